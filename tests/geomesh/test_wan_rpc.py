# SPDX-License-Identifier: Apache-2.0
"""Calls between processes: what arrives, what is refused, and errors that say what to do."""

import shutil
import socket
import subprocess
import threading
import time

import numpy as np
import pytest

from geojax.config import ConfigError, ExchangeConfig, GrpcConfig
from geojax.geomesh.layout import make_layout
from geojax.geomesh.message import FRAME_BYTES, Header, MessageError, pack
from geojax.geomesh.sync import Contribution, Most, Synchronizer
from geojax.geomesh.wan.rpc import (
    CHUNK_BYTES,
    CallError,
    Client,
    Server,
    Streamed,
    chunks,
)

QUICK = {"call_seconds": 5.0, "lease_seconds": 10.0}


def echo_server(config: GrpcConfig, kept: list, streamed: Streamed | None = None) -> Server:
    def keep(header, data):
        kept.append(data)
        return {"sum": int(data.sum())}

    def give(header):
        return {"size_bytes": kept[-1].size}, chunks([kept[-1]])

    return Server(
        config,
        0,
        4,
        unary={"echo": lambda header: header, "wait": lambda header: time.sleep(3) or {}},
        receive={"keep": keep},
        send={"give": give},
        largest_bytes=3 * CHUNK_BYTES,
        streamed=streamed,
    )


@pytest.fixture
def server():
    kept = []
    made = echo_server(GrpcConfig(**QUICK), kept)
    yield made
    made.stop()


@pytest.fixture
def client():
    made = Client(GrpcConfig(**QUICK))
    yield made
    made.close()


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 17])
def test_bytes_arrive_whole_whatever_their_number(server, client, size):
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    assert client.push(server.address, "keep", {}, data) == {"sum": int(data.sum())}
    _, back = client.pull(server.address, "give", {}, size)
    assert back.tobytes() == data.tobytes()
    assert client.call(server.address, "echo", {"x": [1, "y"]}) == {"x": [1, "y"]}


def test_bytes_in_streams_are_counted_with_their_headers_also_of_pushes_that_are_cut_off():
    given, pushed = Streamed(), Streamed()
    server = echo_server(GrpcConfig(**QUICK), [], given)
    client = Client(GrpcConfig(**QUICK), pushed)
    data = np.zeros(2 * CHUNK_BYTES + 17, np.uint8)
    for number in (1, 2):
        client.push(server.address, "keep", {}, data)
        assert 0 < pushed.sent_bytes - number * data.size < number * 100
    assert given.sent_bytes == 0
    client.pull(server.address, "give", {}, data.size)
    assert 0 < given.sent_bytes - data.size < 100
    before = pushed.sent_bytes
    with pytest.raises(CallError, match="at most"):
        client.push(server.address, "keep", {}, np.zeros(4 * CHUNK_BYTES, np.uint8))
    assert before < pushed.sent_bytes <= before + 4 * CHUNK_BYTES + 100
    client.close()
    server.stop()


def test_sizes_that_are_not_meant_are_refused(server, client):
    with pytest.raises(CallError, match="at most"):
        client.push(server.address, "keep", {}, np.zeros(3 * CHUNK_BYTES + 1, np.uint8))
    client.push(server.address, "keep", {}, np.zeros(100, np.uint8))
    with pytest.raises(CallError, match="100 bytes, and 99 are meant"):
        client.pull(server.address, "give", {}, 99)


def test_every_call_ends_at_its_deadline(server):
    impatient = Client(GrpcConfig(call_seconds=0.2))
    started = time.monotonic()
    with pytest.raises(CallError, match="deadline_exceeded"):
        impatient.call(server.address, "wait", {})
    with pytest.raises(CallError, match=r"unavailable|deadline_exceeded"):
        impatient.call("127.0.0.1:1", "echo", {})
    assert time.monotonic() - started < 2.5
    impatient.close()


def test_a_push_that_is_not_needed_any_more_leaves_the_link(client):
    """The other side reads nothing; without `over` the push would take its whole deadline."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        over = threading.Event()
        threading.Timer(0.3, over.set).start()
        started = time.monotonic()
        with pytest.raises(CallError, match="not needed any more"):
            client.push(f"127.0.0.1:{port}", "keep", {}, np.zeros(CHUNK_BYTES), over.is_set)
        assert time.monotonic() - started < 2.5


def test_an_address_that_cannot_be_listened_on_is_named_with_the_reason():
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7 .*no address of this machine"):
        Server(GrpcConfig(bind="203.0.113.7"), 0, 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="the port is taken"):
            Server(GrpcConfig(), taken.getsockname()[1], 1)
    with pytest.raises(ConfigError, match="every address of this machine"):
        GrpcConfig(bind="0.0.0.0")
    with pytest.raises(ConfigError, match="all three"):
        GrpcConfig(tls_ca="ca.pem")
    with pytest.raises(ConfigError, match=r"cannot read nowhere\.pem"):
        Server(
            GrpcConfig(tls_ca="nowhere.pem", tls_cert="nowhere.pem", tls_key="nowhere.pem"), 0, 1
        )


@pytest.mark.skipif(not shutil.which("openssl"), reason="makes certificates with openssl")
def test_with_tls_both_sides_must_show_a_certificate_of_the_authority(tmp_path):
    def openssl(*args):
        subprocess.run(["openssl", *args], cwd=tmp_path, check=True, capture_output=True)

    new = ("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost")
    for authority in ("ca", "other"):
        openssl(*new, "-x509", "-keyout", f"{authority}.key", "-out", f"{authority}.pem")
    (tmp_path / "names").write_text("subjectAltName=DNS:localhost")
    openssl(*new, "-keyout", "own.key", "-out", "own.csr")
    sign = ("x509", "-req", "-in", "own.csr", "-CAcreateserial", "-extfile", "names")
    for authority in ("ca", "other"):
        by = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key")
        openssl(*sign, *by, "-out", f"by-{authority}.pem")

    def config(authority: str) -> GrpcConfig:
        files = [str(tmp_path / f) for f in ("ca.pem", f"by-{authority}.pem", "own.key")]
        names = ("tls_ca", "tls_cert", "tls_key")
        return GrpcConfig(advertise="localhost", **dict(zip(names, files, strict=True)), **QUICK)

    server = echo_server(config("ca"), [])
    good, stranger, plain = Client(config("ca")), Client(config("other")), Client(GrpcConfig())
    assert good.call(server.address, "echo", {"x": 1}) == {"x": 1}
    for refused in (stranger, plain):
        with pytest.raises(CallError, match=r"unavailable|deadline_exceeded"):
            refused.call(server.address, "echo", {})
    theirs = echo_server(config("other"), [])  # whose certificate is of another authority
    with pytest.raises(CallError, match=r"perhaps no TLS .*a certificate of .*ca\.pem"):
        good.call(theirs.address, "echo", {})
    theirs.stop()
    elsewhere = server.address.replace("localhost", "127.0.0.1")  # not its certificate's name
    with pytest.raises(CallError, match="for the name by which it is reached"):
        good.call(elsewhere, "echo", {})
    names = {f"tls_{kind}": str(tmp_path / kind) for kind in ("ca", "cert", "key")}
    for kind, wrong in (("ca", "names"), ("cert", "own.csr"), ("key", "ca.key"), ("key", "names")):
        right = {"ca": "ca.pem", "cert": "by-ca.pem", "key": "own.key"} | {kind: wrong}
        for name, file in right.items():
            shutil.copy(tmp_path / file, tmp_path / name)
        for make in (Client, lambda config: Server(config, 0, 1)):
            with pytest.raises(ConfigError, match=rf"grpc\.tls_{kind}.*{tmp_path}/{kind}"):
                make(GrpcConfig(**names))
    for client in (good, stranger, plain):
        client.close()
    server.stop()


@pytest.mark.parametrize("merge", ["tokens", "fednova"])
def test_a_message_that_says_more_than_its_samples_hold_has_no_weight(merge):
    params = {"embed": np.zeros((6, 8), np.float32)}
    layout = make_layout(params, ExchangeConfig(codec="fp32", error_feedback=False))
    synchronizer = Synchronizer(layout, None, ["a", "b"], "gather", merge)
    like, most = [params["embed"]], [Most(100, 25)] * 2

    def result(tokens, steps):
        said = ((100, 4, 1.0), (tokens, steps, 3.0))
        row = [
            synchronizer.pack(1, Contribution(i, [np.full((6, 8), x, np.float32)], t, s, None))
            for i, (t, s, x) in enumerate(said)
        ]
        return synchronizer.merge(1, row, like, most).pseudo_gradients[0][0].mean()

    assert result(100, 4) == 2.0
    assert 1.0 < result(50, 4) < 2.0
    assert result(101, 5) == result(100, 1) == result(2**63, 2**63) == 1.0


@pytest.mark.parametrize("codec", ["sign", "int8", "fp16", "fp32"])
def test_a_message_of_numbers_that_are_not_finite_is_refused(codec):
    params = {"embed": np.zeros((6, 8), np.float32), "head": np.zeros((8, 6), np.float32)}
    exchange = ExchangeConfig(codec=codec, error_feedback=False, schedule="gather")
    layout = make_layout(params, exchange)
    synchronizer = Synchronizer(layout, None, ["a", "b"], "gather", "tokens")
    leaves = [np.ones((6, 8), np.float32), np.ones((8, 6), np.float32)]
    message = synchronizer.pack(3, Contribution(1, leaves, 10, 1, None))
    synchronizer.check(3, 1, message)
    body = message[FRAME_BYTES:].copy()
    body[:4] = 0xFF  # of a magnitude, or of an element: not a number
    with pytest.raises(MessageError, match="not finite"):
        synchronizer.check(3, 1, pack(Header(3, 1, 10, 1), body))
    synchronizer.check(3, 1, pack(Header(3, 1, 0, 1), body))  # of no weight
    with pytest.raises(MessageError, match="has 8 bytes"):
        synchronizer.check(3, 1, pack(Header(3, 1, 10, 1), body[:8]))
    for wrong in ((2, 1), (3, 0)):
        with pytest.raises(MessageError, match="not one"):
            synchronizer.check(*wrong, message)
