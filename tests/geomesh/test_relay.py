# SPDX-License-Identifier: Apache-2.0
"""The processes of a slice, threads here, hear the same, and none is left waiting for another."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from geojax.config import RunError
from geojax.geomesh.relay import Relay, admit, call

PATIENCE_SECONDS = 20
NAME = "slice east"


class Cluster:
    """Relays of so many processes, each with its own `stop`, and what ended them."""

    def __init__(self, count):
        pairs = [socket.socketpair() for _ in range(count - 1)]
        lines = [{i: a for i, (a, _) in enumerate(pairs, 1)}, *({0: b} for _, b in pairs)]
        self.sockets = lines
        self.stops = [threading.Event() for _ in range(count)]
        self.ended = [threading.Event() for _ in range(count)]
        self.texts = [""] * count
        self.relays = [
            Relay(i, lines[i], self.stops[i], NAME, lambda text, i=i: self.end(i, text))
            for i in range(count)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for lines in self.sockets:
            for line in lines.values():
                line.close()

    def end(self, number, text):
        self.texts[number] = text
        self.ended[number].set()

    def run(self, *parts):
        """Each process's part with its relay, in a thread; what they return."""
        with ThreadPoolExecutor(len(parts)) as pool:
            running = [
                pool.submit(self._run, *each) for each in zip(self.relays, parts, strict=True)
            ]
            return [r.result(PATIENCE_SECONDS) for r in running]

    @staticmethod
    def _run(relay, part):
        with relay:
            return part(relay)


@pytest.fixture
def three():
    with Cluster(3) as cluster:
        yield cluster


def test_all_hear_what_the_first_one_says_in_its_order(three):
    rng = np.random.default_rng(0)
    said = [
        (["a", {"b": None}], [rng.integers(0, 256, n).astype(np.uint8) for n in sizes])
        for sizes in ([], [3_000_000, 0, 7], [1])
    ]
    asked = []

    def part(relay):
        heard = []
        for item in said:
            heard.append(relay.first(lambda item=item: asked.append(1) or item))
        return heard

    results = three.run(part, part, part)
    assert len(asked) == len(said)  # the first process alone is asked
    for heard in results:
        for (value, arrays), (wanted, bytes_) in zip(heard, said, strict=True):
            assert value == wanted
            assert [a.tobytes() for a in arrays] == [b.tobytes() for b in bytes_]


def test_a_process_alone_hears_itself():
    with Relay(0, {}, threading.Event(), NAME) as relay:
        assert relay.first(lambda: (1, ())) == (1, ())


def test_a_stop_of_any_process_reaches_the_first_one_while_the_others_wait(three):
    three.stops[2].set()

    def speak(relay):
        def ask():
            assert three.stops[0].wait(PATIENCE_SECONDS)
            return "stopped", ()

        return relay.first(ask)[0]

    waiting = []

    def hear(relay):
        relay.beat = lambda: waiting.append(1)
        return relay.first(lambda: None)[0]

    assert three.run(speak, hear, hear) == ["stopped"] * 3
    assert not three.stops[1].is_set()  # the first one tells the others when they are to stop
    assert not any(three.texts)


@pytest.mark.parametrize(("victim", "others"), [(0, (1, 2)), (1, (0,))])
def test_a_process_that_ends_without_a_word_ends_those_that_it_spoke_with(three, victim, others):
    for relay in three.relays:
        relay.__enter__()
    began = time.monotonic()
    for line in three.sockets[victim].values():  # as the system does with a dead process's
        line.shutdown(socket.SHUT_RDWR)
    for number in others:
        assert three.ended[number].wait(PATIENCE_SECONDS)
        assert f"{NAME}: process {victim} of the slice has ended" in three.texts[number]
        assert f"process {number} ends too" in three.texts[number]
    assert time.monotonic() - began < 2


def test_a_process_that_fails_says_why_and_the_others_end_if_they_do_not_by_themselves(
    three, monkeypatch
):
    monkeypatch.setattr("geojax.geomesh.relay._GRACE_SECONDS", 0.3)
    stuck = three.relays[1].__enter__()
    failing = three.relays[2].__enter__()
    first = three.relays[0].__enter__()
    failing.__exit__(RunError, RunError("no room on the disk"), None)
    assert three.ended[0].wait(PATIENCE_SECONDS)
    assert "process 2 of the slice fails: no room on the disk" in three.texts[0]
    first.__exit__(None, None, None)
    with pytest.raises(RunError, match="the first process has ended its part"):
        stuck.first(lambda: None)


def test_a_process_that_fails_as_another_does_is_not_ended_by_it():
    def part(relay):
        relay.first(lambda: (None, ()))
        raise RunError("for all")

    with Cluster(2) as two:
        with pytest.raises(RunError, match="for all"):
            two.run(part, part)
        assert not any(two.texts)


def test_strangers_are_sent_away():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(admit, NAME, listener, 2, 1234)
            callers = [call(NAME, address, *hello) for hello in ((1, 99), (1, 1234), (2, 1234))]
            lines = coming.result(PATIENCE_SECONDS)
        assert callers[0].recv(1) == b""
        for line in (*callers, *lines.values()):
            line.close()
    assert sorted(lines) == [1, 2]


def test_a_process_that_does_not_come_is_missed_and_one_that_cannot_says_so():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with pytest.raises(RunError, match="slice east: 1 of its 2 processes did not reach port"):
            admit(NAME, listener, 1, 5, seconds=0.1)
    with pytest.raises(RunError, match="slice east: cannot reach its first process at 127"):
        call(NAME, address, 1, 5)
