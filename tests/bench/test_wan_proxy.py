# SPDX-License-Identifier: Apache-2.0
"""Delay lines of benchmarks/wan: bytes whole, in order, and none too early."""

import asyncio
import random
import socket
import time
from dataclasses import replace

import pytest

from benchmarks.wan.proxy import Delay, Line, serve

LINE = Line("b", ("127.0.0.1", 0), ("127.0.0.1", 0), 0.05)


def test_no_piece_is_early_or_overtakes_another_whatever_the_jitter():
    delay = Delay(replace(LINE, jitter_seconds=0.2), random.Random(0))
    came = [0.01 * i for i in range(200)]
    due = [delay.due(now, 100) for now in came]
    late = [b - a for a, b in zip(came, due, strict=True)]
    assert min(late) >= 0.05
    assert max(late) <= 0.05 + 0.2 + 1e-9
    assert due == sorted(due)
    assert max(late) - min(late) > 0.05


def test_a_stream_that_loss_limits_has_that_rate():
    delay = Delay(replace(LINE, loss_bytes_per_second=1000.0), random.Random(0))
    assert delay.due(0.0, 50) == pytest.approx(0.05 + 0.05)
    assert [delay.due(0.0, delay.piece_bytes) for _ in range(19)][-1] == pytest.approx(1.05)
    assert delay.due(10.0, 50) == pytest.approx(10.1)  # an idle stream saves nothing up


def through_a_proxy(line, server, client):
    """What `client(reader, writer)` returns, with `server` behind the line; its traffic."""

    async def go():
        behind = await asyncio.start_server(server, "127.0.0.1", 0)
        place = behind.sockets[0].getsockname()
        traffic, (proxy,) = await serve([replace(line, forward=place)], 0)
        streams = await asyncio.open_connection(*proxy.sockets[0].getsockname())
        try:
            return await asyncio.wait_for(client(*streams), 20), traffic["b"]
        finally:
            streams[1].close()
            proxy.close()
            behind.close()
            held = asyncio.all_tasks() - {asyncio.current_task()}
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            await asyncio.sleep(0.01)  # sockets close

    return asyncio.run(go())


async def _echo(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


def test_bytes_come_back_whole_and_in_order_after_a_round_trip():
    data = random.Random(0).randbytes(1_000_000)

    async def client(reader, writer):
        began = time.monotonic()
        writer.write(b"x")
        await reader.readexactly(1)
        first = time.monotonic() - began

        async def send():
            writer.write(data)
            await writer.drain()
            writer.write_eof()  # passes through, and the echo ends

        _, back = await asyncio.gather(send(), reader.read())
        return first, back

    line = replace(LINE, jitter_seconds=0.01, window_bytes=128 << 10)
    (first, back), traffic = through_a_proxy(line, _echo, client)
    assert back == data
    assert first >= 0.1
    assert traffic.forward_bytes == traffic.back_bytes == len(data) + 1


def test_no_more_than_a_window_is_inside():
    """A sender that nobody hears is stopped, as by a socket that is full."""

    async def deaf(reader, writer):
        try:
            await asyncio.sleep(10)
        finally:
            writer.transport.abort()

    async def client(reader, writer):
        sent = 0
        while True:
            writer.write(bytes(1 << 16))
            try:
                await asyncio.wait_for(writer.drain(), 0.5)
            except TimeoutError:
                return sent
            sent += 1 << 16

    line = replace(LINE, delay_seconds=60.0, window_bytes=128 << 10)
    sent, traffic = through_a_proxy(line, deaf, client)
    assert traffic.forward_bytes == 0
    assert sent < 32 << 20  # sockets of this machine on the way, and the window


def test_a_connection_that_the_other_side_ends_ends_here_too():
    async def client(reader, writer):
        writer.write(b"x")
        began = time.monotonic()
        assert not await reader.read()
        return time.monotonic() - began

    async def gone(reader, writer):
        await reader.read(1)
        writer.close()

    took, _ = through_a_proxy(LINE, gone, client)
    assert 0.1 <= took < 5


def test_nobody_listens_behind_a_line_and_it_ends_at_once():
    async def go():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            nobody = taken.getsockname()
        _, (proxy,) = await serve([replace(LINE, forward=nobody)], 0)
        reader, writer = await asyncio.open_connection(*proxy.sockets[0].getsockname())
        try:
            return await asyncio.wait_for(reader.read(), 5)
        except ConnectionError:
            return b""
        finally:
            writer.close()
            proxy.close()
            await asyncio.sleep(0.01)

    assert asyncio.run(go()) == b""
