# SPDX-License-Identifier: Apache-2.0
"""An object store on this machine that answers as Google Cloud Storage does.

An emulator of others (gcp-storage-emulator), so that what it answers is not what our tests would
like to hear. Two things that TensorStore relies on are added, as Google documents them: what is
read says of which generation it is, and a write may name the generation that it replaces.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import RequestHandler, Router
from gcp_storage_emulator.storage import Storage

BUCKET = "bucket"


class _Handler(RequestHandler):
    _lock = threading.Lock()
    """The emulator's memory is not made for several requests at once."""
    _read = ""
    """Generation of the object that is read."""

    def _handle(self):
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        with self._lock:
            wanted, name = query.get("ifGenerationMatch"), query.get("name")
            if wanted and name and wanted != [self._generation(name[0])]:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_error(HTTPStatus.PRECONDITION_FAILED)
                return
            path = url.path.partition(f"/b/{BUCKET}/o/")[2]
            if "/moveTo/o/" in path:  # not known; a 501 would be tried again for half a minute
                self.send_error(HTTPStatus.BAD_REQUEST)
                return
            self._read = self._generation(unquote(path)) if "alt" in query else ""
            Router(self).handle(self.command)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle  # noqa: N815 (http.server names them)

    def _generation(self, name: str) -> str:
        try:
            return self.storage.get_file_obj(BUCKET, name)["generation"]
        except NotFound:
            return "0"

    def end_headers(self):
        if self._read not in ("", "0"):
            self.send_header("x-goog-generation", self._read)
        super().end_headers()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """Of a client that asked two things at once and hung up after the first answer."""


@contextmanager
def object_store() -> Generator[dict[str, str]]:
    """Environment variables with which a process takes it for Google's, while it lives."""
    storage = Storage(use_memory_fs=True)
    create_bucket(BUCKET, storage)
    server = _Server(("127.0.0.1", 0), partial(_Handler, storage))
    thread = threading.Thread(target=server.serve_forever, name="object store", daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield {
            "STORAGE_EMULATOR_HOST": url,  # of gcsfs and google-cloud-storage
            "TENSORSTORE_GCS_HTTP_URL": url,
            # What kind of bucket it is, gcsfs would ask a service that the emulator does not have.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            # Without credentials each of the three would look for a machine of Google's.
            "FSSPEC_GCS_TOKEN": "anon",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "GOOGLE_CLOUD_PROJECT": "none",
        }
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
