# SPDX-License-Identifier: Apache-2.0
"""Delay lines for TCP: latency, jitter and loss where the kernel has no netem.

    python -m benchmarks.wan.proxy LINES.json

runs in the namespace of one node and stands in for the others: it listens at the addresses by which
this node knows them, and forwards each connection to the real one. What goes through is held for
the link's one-way delay plus its jitter, in either direction. Loss is the throughput that TCP gets
under it (`world.loss_limit`), a stream at a time; no packet is lost. Invariant: bytes come out
whole and in order, none before its delay, and at most a window of them is inside.
"""

import argparse
import asyncio
import json
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from geojax.track.metrics import write_atomically

_PIECE_BYTES = 64 << 10
_SLOWEST_PIECE_SECONDS = 0.05  # of a stream that loss limits: it comes in pieces of at most this


@dataclass(frozen=True)
class Line:
    """How one node is reached from another."""

    name: str
    listen: tuple[str, int]
    forward: tuple[str, int]
    delay_seconds: float
    jitter_seconds: float = 0.0
    loss_bytes_per_second: float | None = None
    """Of one stream; None: without a limit."""
    window_bytes: int = 256 << 10


@dataclass
class Traffic:
    """Bytes that came out."""

    forward_bytes: int = 0
    """To the node that is reached."""
    back_bytes: int = 0


class Delay:
    """When each piece of a stream may go on."""

    def __init__(self, line: Line, rng: random.Random):
        self._line, self._rng, self._due = line, rng, 0.0
        self._paced = 0.0
        """When the stream's last byte was through, as far as loss is concerned."""

    def due(self, now: float, size_bytes: int) -> float:
        """For a piece that came at `now`; never before the one ahead of it."""
        line, rate = self._line, self._line.loss_bytes_per_second
        if rate:
            self._paced = max(self._paced, now) + size_bytes / rate
        jitter = self._rng.uniform(0.0, line.jitter_seconds) if line.jitter_seconds else 0.0
        self._due = max(self._due, max(self._paced, now) + line.delay_seconds + jitter)
        return self._due

    @property
    def piece_bytes(self) -> int:
        """To read at once."""
        rate = self._line.loss_bytes_per_second
        return max(1, min(_PIECE_BYTES, int((rate or 1e12) * _SLOWEST_PIECE_SECONDS)))


async def serve(lines: list[Line], seed: int) -> tuple[dict[str, Traffic], list[asyncio.Server]]:
    """Listen for every line; what goes through it, by its name, and the servers."""
    traffic = {line.name: Traffic() for line in lines}
    servers = []
    for line in lines:
        rng = random.Random(f"{seed} {line.name}")
        answer = _answering(line, rng, traffic[line.name])
        servers.append(await asyncio.start_server(answer, *line.listen))
    return traffic, servers


def _answering(line: Line, rng: random.Random, traffic: Traffic):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(*line.forward)
        except OSError:  # nobody is there, or nobody listens: so it looks from here, too
            writer.transport.abort()
            return

        def count(name: str):
            def add(size: int) -> None:
                setattr(traffic, name, getattr(traffic, name) + size)

            return add

        ways = (
            _hold(line, rng, reader, there_writer, count("forward_bytes")),
            _hold(line, rng, there_reader, writer, count("back_bytes")),
        )
        try:
            async with asyncio.TaskGroup() as group:  # a reset of either way ends both
                for way in ways:
                    group.create_task(way)
        except* OSError:
            pass
        finally:
            for end in (writer, there_writer):
                end.transport.abort()

    return answer


class _Window:
    """Bytes that are inside; no more come in while it is full."""

    def __init__(self, size_bytes: int):
        self._size, self._inside, self._open = size_bytes, 0, asyncio.Event()
        self._open.set()

    async def room(self) -> None:
        await self._open.wait()

    def add(self, size_bytes: int) -> None:
        self._inside += size_bytes
        if self._inside < self._size:
            self._open.set()
        else:
            self._open.clear()


async def _hold(
    line: Line,
    rng: random.Random,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    count: Callable[[int], None],
) -> None:
    """One way of a connection, to its end."""
    delay, loop, window = Delay(line, rng), asyncio.get_running_loop(), _Window(line.window_bytes)
    held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def take() -> None:
        while True:
            await window.room()
            data = await reader.read(delay.piece_bytes)
            window.add(len(data))
            held.put_nowait((delay.due(loop.time(), len(data)), data))
            if not data:
                return

    async def give() -> None:
        while True:
            due, data = await held.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
            count(len(data))
            window.add(-len(data))

    async with asyncio.TaskGroup() as group:
        group.create_task(take())
        group.create_task(give())


async def _main(path: Path) -> None:
    spec = json.loads(path.read_text())
    lines = [Line(**x | {k: tuple(x[k]) for k in ("listen", "forward")}) for x in spec["lines"]]
    traffic, servers = await serve(lines, spec["seed"])
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    Path(spec["ready"]).touch()
    while not stop.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1.0)
        counts = {name: asdict(t) for name, t in traffic.items()}
        write_atomically(spec["counts"], json.dumps(counts) + "\n")
    for server in servers:
        server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Delay lines between this namespace and others.")
    parser.add_argument("lines", type=Path, help="JSON: lines, seed, ready and counts (files)")
    asyncio.run(_main(parser.parse_args().lines))
