# SPDX-License-Identifier: Apache-2.0
"""The page at `/`: one file, which loads nothing and sends nothing elsewhere.

Invariant: its own script and style are all that a browser will run for it (their hashes are in the
policy that goes with it).
"""

import base64
import hashlib
import re
from importlib.resources import files

PAGE = files("geojax.serve").joinpath("page.html").read_text("utf-8")


def _hash(tag: str) -> str:
    found = re.search(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    assert found, f"page.html has no {tag}"
    return "'sha256-" + base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode() + "'"


HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hash('script')}; style-src {_hash('style')}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
