# SPDX-License-Identifier: Apache-2.0
"""Load, clients that go away or stall, deadlines, keys, stopping, and an engine that dies."""

import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2
import numpy as np
import pytest
from tiny_serve import CONFIG, PAGE, QuickEngine, letters, running, wait_until

from geojax.bicache.depth import Guard
from geojax.bicache.pages import QuotaError, kv_page_bytes
from geojax.bicache.policy import get_policy
from geojax.cli import main
from geojax.serve import loop as loop_module
from geojax.serve import server
from geojax.serve.options import Limits, Pace


def ask(**kwargs):
    return {"prompt": "Once", "max_tokens": 20, "seed": 0, **kwargs}


def slow_engine(model, seconds=0.02, **kwargs):
    engine = QuickEngine(model, **kwargs)
    engine.step_seconds = seconds
    return engine


def test_a_client_that_goes_away_frees_its_row(model):
    engine = slow_engine(model)
    with running(model, engine) as live:
        body = ask(max_tokens=2000)
        with (
            httpx2.Client() as client,
            client.stream("POST", live.url + "/v1/completions", json=body | {"stream": True}) as r,
        ):
            next(r.iter_lines())
            wait_until(lambda: live.loop.running == 1)
        wait_until(lambda: live.loop.idle)
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(live.url + "/v1/completions", json=body, timeout=2)
        wait_until(lambda: live.loop.idle)
        assert engine.steps_run < 500
        engine.check_books()
        assert engine.kv.taken == 0
        wait_until(lambda: live.metric("vllm:request_success_total", finished_reason="abort") == 2)
        assert live.post(ask()).json()["choices"][0]["text"] == letters(4, 20)


@contextmanager
def unread(live, body):
    """A stream's connection, of which nothing is read and little may lie in buffers."""
    body = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.settimeout(60)
        host, port = live.url[7:].split(":")
        reader.connect((host, int(port)))
        reader.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body)
        yield reader


SHOWN = {"stream": True, "stream_options": {"include_snapshots": True}}
PATIENT = Limits(stall_seconds=600)  # a loaded machine may take long to read


def test_a_slow_reader_holds_up_nobody_and_gets_the_whole_answer(model):
    with running(model, slow_engine(model, 0.001), limits=PATIENT) as live:
        with unread(live, ask(max_tokens=1000, n=8, canvas=64, **SHOWN)) as reader:
            wait_until(lambda: live.loop.running)
            assert live.post(ask()).json()["choices"][0]["text"] == letters(4, 20)
            wait_until(lambda: live.loop.idle)
            assert live.metric("vllm:request_success_total") == 1  # what it has not taken is there
            found = b""
            while b"[DONE]" not in found:
                found += reader.recv(2**16)
        assert len(found) > 2**16  # more than sockets hold
        lines = [line[6:] for line in found.decode().splitlines() if line.startswith("data: {")]
        said = dict.fromkeys(range(8), "")
        for line in lines:
            (choice,) = json.loads(line)["choices"]
            said[choice["index"]] += choice["text"]
        assert said == {i: letters(4, 1000, i) for i in range(8)}


def test_a_reader_that_stalls_is_given_up(model):
    limits = Limits(stall_seconds=0.3)
    with running(model, slow_engine(model, 0.001), limits=limits) as live:
        with unread(live, ask(max_tokens=1000, n=16, canvas=64, **SHOWN)):
            reason = "vllm:request_success_total"
            wait_until(lambda: live.metric(reason, finished_reason="abort") > 0)
        wait_until(lambda: live.loop.idle)


def test_time_that_is_over_is_an_error(model):
    with running(model, slow_engine(model)) as live:
        found = live.post(ask(max_tokens=500, deadline_seconds=0.2))
        assert found.status_code == 504
        assert found.json()["error"]["code"] == "deadline_exceeded"
        streamed = live.post(ask(max_tokens=500, deadline_seconds=0.2, stream=True)).text
        assert json.loads(streamed.split("data: ")[-1])["error"]["code"] == "deadline_exceeded"
        wait_until(lambda: live.loop.idle)
        # Both were accepted, and ended so.
        assert live.metric("vllm:request_success_total", finished_reason="error") == 2
        assert live.metric("geojax_refused_total") == 0


def test_of_a_whole_response_that_failed_no_answer_counts(model):
    """One of two has ended when time is over; in a stream its client has it, else it has not."""
    name, row = "vllm:request_success_total", {"max_tokens": 600, "n": 2, "seed": 98}
    with running(model, slow_engine(model, 0.01)) as live:
        found = live.post(ask(**row, deadline_seconds=3))
        assert found.status_code == 504
        assert live.metric(name, finished_reason="error") == live.metric(name) == 2
        assert live.metric("vllm:generation_tokens_total") == 0
        streamed = live.post(ask(**row, deadline_seconds=3, stream=True)).text
        assert '"finish_reason": "stop"' in streamed
        assert "deadline_exceeded" in streamed
        assert live.metric(name, finished_reason="stop") == 1
        assert live.metric(name, finished_reason="error") == 3
        assert live.metric("vllm:generation_tokens_total") == 5
        assert live.metric("vllm:prompt_tokens_total") == 0


def test_more_answers_than_may_ever_wait_are_a_mistake(model):
    with running(model, QuickEngine(model), pace=Pace(queue=2)) as live:
        assert live.post(ask(n=2)).status_code == 200
        found = live.post(ask(n=3))
        assert found.status_code == 400
        assert "3 answers are asked for at once, and 2 may be" in found.json()["error"]["message"]


def test_a_full_queue_refuses_and_says_when_to_come_back(model):
    engine = slow_engine(model, 0.3)
    with running(model, engine, pace=Pace(rows=1, queue=2)) as live, ThreadPoolExecutor(4) as pool:
        first = pool.submit(live.post, ask(max_tokens=40))
        wait_until(lambda: live.loop.running == 1)
        waiting = [pool.submit(live.post, ask(seed=i)) for i in (1, 2)]
        wait_until(lambda: len(live.loop.waiting) == 2)
        refused = live.post(ask())
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert live.metric("geojax_refused_total", status="429") == 1
        assert live.metric("vllm:num_requests_waiting") == 2
        engine.step_seconds = 0.0
        assert first.result().json()["choices"][0]["text"] == letters(4, 40)
        for seed, one in enumerate(waiting, 1):
            assert one.result().json()["choices"][0]["text"] == letters(4, 20, seed)


def test_requests_join_and_leave_between_quanta(model):
    """A short one that comes later ends earlier, and a long one is not disturbed."""
    with running(model, slow_engine(model)) as live, ThreadPoolExecutor(2) as pool:
        long = pool.submit(live.post, ask(max_tokens=200))
        wait_until(lambda: live.loop.running == 1)
        short = live.post(ask(max_tokens=4))
        assert not long.done()
        assert short.json()["choices"][0]["text"] == letters(4, 4)
        assert long.result().json()["choices"][0]["text"] == letters(4, 200)


def test_clients_that_were_answered_together_begin_together_again(model, monkeypatch):
    engine, together = QuickEngine(model), []
    run = engine.run

    def seen(slots, steps=None):
        together.append(len(slots))
        run(slots, steps)

    monkeypatch.setattr(engine, "run", seen)
    monkeypatch.setattr(loop_module, "_BACK_SHARE", 1e6)
    with running(model, engine) as live, ThreadPoolExecutor() as pool:
        live.post(ask(n=2))
        assert set(together) == {2}
        together.clear()
        monkeypatch.setattr(loop_module, "_MOST_BACK_SECONDS", 1000.0)
        first = pool.submit(live.post, ask())
        wait_until(lambda: live.loop.waiting)
        second = pool.submit(live.post, ask())
        assert [r.result().status_code for r in (first, second)] == [200, 200]
        assert set(together) == {2}
        together.clear()
        monkeypatch.setattr(loop_module, "_MOST_BACK_SECONDS", 0.0)
        assert live.post(ask()).status_code == 200
        assert set(together) == {1}
        monkeypatch.setattr(loop_module, "_MOST_BACK_SECONDS", 1000.0)
        assert live.post(ask()).status_code == 200  # nobody else was there before


def test_memory_that_is_short_is_waited_for(model):
    """The prefix of each takes pages, and there are not enough for all at once."""
    engine = slow_engine(model, 0.005, kv_bytes=60_000)
    with running(model, engine) as live, ThreadPoolExecutor(6) as pool:
        prompt = "x" * 64
        asked = [pool.submit(live.post, ask(prompt=prompt, seed=i)) for i in range(6)]
        for seed, one in enumerate(asked):
            assert one.result().json()["choices"][0]["text"] == letters(64, 20, seed)
        engine.check_books()
        assert engine.kv.taken == 0
        # A prefix that would never fit is not shared, and the request is answered.
        huge = live.post(ask(prompt="x" * 3000)).json()["choices"][0]
        assert huge["text"] == letters(3000, 20)
        assert huge["geojax"]["prefix_tokens"] == 0


def test_tenants_need_keys_and_none_starves(model, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alice alice-0123456789abcdef # the first\nbob bob-0123456789abcdef\n")
    engine = slow_engine(model, 0.2)
    with (
        running(model, engine, keys=keys, pace=Pace(rows=1)) as live,
        ThreadPoolExecutor(20) as pool,
    ):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "alice"}):
            found = live.post(ask(), headers=headers)
            assert found.status_code == 401
            assert found.headers["www-authenticate"] == "Bearer"
        assert live.get("/v1/models").status_code == 401
        assert live.get("/health").status_code == 200
        ended = []

        def one(name):
            headers = {"Authorization": f"Bearer {name}-0123456789abcdef"}
            assert live.post(ask(max_tokens=8), headers=headers).status_code == 200
            ended.append(name)

        flood = [pool.submit(one, "alice") for _ in range(16)]
        wait_until(lambda: len(live.loop.waiting) > 10)
        engine.step_seconds = 0.01
        one("bob")
        assert ended.count("alice") <= 8  # bob was next but one, not last
        for task in flood:
            task.result()
        text = live.get("/metrics").text
        assert "alice" not in text
        assert "bob" not in text


def test_a_tenant_with_a_long_answer_shuts_nobody_out(model, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alice alice-0123456789abcdef\nbob bob-0123456789abcdef\n")
    engine = slow_engine(model, 0.02)
    with (
        running(model, engine, keys=keys, pace=Pace(rows=1)) as live,
        ThreadPoolExecutor(1) as pool,
    ):

        def one(name, tokens):
            headers = {"Authorization": f"Bearer {name}-0123456789abcdef"}
            found = live.post(ask(max_tokens=tokens, canvas=16), headers=headers).json()
            return found["choices"][0]

        long = pool.submit(one, "alice", 480)
        wait_until(lambda: live.loop.running == 1)
        before = engine.steps_run
        short = [one("bob", 4) for _ in range(3)]
        assert engine.steps_run - before < 300
        assert not long.done()
        engine.step_seconds = 0.0
        assert max(choice["geojax"]["queue_seconds"] for choice in short) < 3
        assert [choice["text"] for choice in short] == [letters(4, 4)] * 3
        assert long.result()["text"] == letters(4, 480)


def test_an_answer_that_grows_at_its_quota_stops_nobody_else(model, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alice alice-0123456789abcdef\nbob bob-0123456789abcdef\n")
    engine, full, asked = QuickEngine(model), threading.Event(), threading.Event()
    admit = engine.admit

    def quota(job):
        if len(job.request.tokens) == 48 and not full.is_set():  # 16 are there, 16 are wanted
            asked.set()
            raise QuotaError("all is in use")
        return admit(job)

    engine.admit = quota
    with running(model, engine, keys=keys) as live, ThreadPoolExecutor(1) as pool:

        def one(name, **kwargs):
            headers = {"Authorization": f"Bearer {name}-0123456789abcdef"}
            return live.post(ask(**kwargs), headers=headers).json()["choices"][0]["text"]

        body = {"prompt": "x" * 16, "max_tokens": 32, "canvas": 16, "exact": True}
        blocked = pool.submit(one, "alice", **body)
        assert asked.wait(60)
        assert one("bob", max_tokens=4) == letters(4, 4)
        assert not blocked.done()
        full.set()
        assert blocked.result() == letters(16, 32)


def test_a_tenant_at_its_quota_waits_alone(model, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alice alice-0123456789abcdef\nbob bob-0123456789abcdef\n")
    engine = slow_engine(model, 0.2, quota_bytes=3.5 * kv_page_bytes(CONFIG, np.float32, PAGE))
    with running(model, engine, keys=keys) as live, ThreadPoolExecutor(3) as pool:

        def one(name, letter, tokens):
            body = ask(prompt=letter * 48, prefix_tokens=48, max_tokens=tokens)
            headers = {"Authorization": f"Bearer {name}-0123456789abcdef"}
            found = live.post(body, headers=headers).json()["choices"][0]
            assert found["geojax"]["depth"] == 1
            return time.monotonic()

        first = pool.submit(one, "alice", "a", 60)
        wait_until(lambda: live.loop.running == 1)
        second = pool.submit(one, "alice", "b", 4)  # its prefix has no room beside the first
        wait_until(lambda: len(live.loop.waiting) == 1)
        bobs = one("bob", "c", 4)
        assert not first.done()
        engine.step_seconds = 0.01
        assert bobs < first.result() < second.result()
        engine.check_books()


def test_who_finds_no_memory_that_could_come_free_is_told(model, tmp_path):
    """Alice's prefixes stay within her quota, and Bob's request wants more than is left."""
    keys = tmp_path / "keys"
    keys.write_text("alice alice-0123456789abcdef\nbob bob-0123456789abcdef\n")
    per = kv_page_bytes(CONFIG, np.float32, PAGE)
    engine = QuickEngine(model, kv_bytes=15 * per, quota_bytes=9.5 * per)
    engine.policy = get_policy("bicache-dual")
    with running(model, engine, keys=keys) as live:

        def one(name, letter, **kwargs):
            body = ask(prompt=letter * 48, prefix_tokens=48, **kwargs)
            return live.post(body, headers={"Authorization": f"Bearer {name}-0123456789abcdef"})

        for letter in "abc":
            assert one("alice", letter).status_code == 200
        refused = one("bob", "d")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_memory")
        assert "prefixes of others stay" in refused.json()["error"]["message"]
        assert one("bob", "d", max_tokens=4).status_code == 200
        engine.check_books()


@pytest.mark.parametrize("marked", [True, False])
def test_a_prefix_that_was_built_in_vain_is_no_hit_and_no_death(model, tmp_path, marked):
    """It is built, and then memory is short for the request itself, which goes on without."""
    keys = tmp_path / "keys"
    keys.write_text("alice alice-0123456789abcdef\nbob bob-0123456789abcdef\n")
    per = kv_page_bytes(CONFIG, np.float32, PAGE)
    engine = QuickEngine(model, kv_bytes=15 * per, quota_bytes=(11.5 if marked else 12.5) * per)
    with running(model, engine, keys=keys) as live:

        def one(name, text):
            mark = {"prefix_tokens": len(text)} if marked else {}
            headers = {"Authorization": f"Bearer {name}-0123456789abcdef"}
            return live.post(ask(prompt=text, **mark), headers=headers)

        sizes = (48, 48, 48, 16) if marked else (48, 48, 48, 16, 32)
        for letter, size in zip("abcde", sizes, strict=False):
            assert one("alice", letter * size).status_code == 200
        for size in (48, 32, 16):
            found = one("bob", "z" * size)
            assert found.status_code == 200
            assert found.json()["usage"]["prompt_tokens_details"]["cached_tokens"] <= size
        assert one("bob", "y" * 48).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert live.get("/health").status_code == 200
        engine.check_books()


def test_a_prefix_of_ones_own_earlier_attempt_is_no_hit(model):
    per = kv_page_bytes(CONFIG, np.float32, PAGE)
    engine = slow_engine(model, 0.01, kv_bytes=11 * per, quota_bytes=20 * per)
    with running(model, engine) as live, ThreadPoolExecutor(2) as pool:

        def one(letter, tokens):
            return live.post(ask(prompt=letter * 48, prefix_tokens=48, max_tokens=tokens)).json()

        first = pool.submit(one, "a", 60)
        wait_until(lambda: live.loop.running == 1)
        second = one("b", 4)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert first.result()["choices"][0]["text"] == letters(48, 60)
        assert live.metric("vllm:prefix_cache_hits_total") == 0


def test_layers_that_are_shared_no_more_are_not_told_as_shared(model):
    """The guard saw it drift."""
    engine = QuickEngine(model, quota_bytes=1e5)
    engine.guard, run = Guard(((1, 0.1),)), engine.run

    def drifting(slots, steps=None):
        for slot in slots:
            if slot.chain:
                engine._retreat(slot)
        run(slots, steps)

    with running(model, engine) as live:
        found = live.post(ask(prompt="x" * 48, prefix_tokens=48)).json()["choices"][0]["geojax"]
        assert found["depth"] == 1
        engine.run = drifting
        found = live.post(ask(prompt="x" * 48, prefix_tokens=48)).json()["choices"][0]["geojax"]
        assert (found["depth"], found["cached_tokens"]) == (0, 48)
        assert live.metric("geojax_guard_events_total") == 1
        assert live.metric("geojax_shared_layers_total") == 1
        engine.check_books()


def test_priorities_go_before_within_a_tenant(model):
    engine = slow_engine(model, 0.2)
    with running(model, engine, pace=Pace(rows=1)) as live, ThreadPoolExecutor(4) as pool:
        ended = []

        def one(priority):
            assert live.post(ask(max_tokens=4, priority=priority)).status_code == 200
            ended.append(priority)

        first = pool.submit(live.post, ask(max_tokens=60))
        wait_until(lambda: live.loop.running == 1)
        asked = []
        for number, priority in enumerate((5, 0, -5), 1):
            asked.append(pool.submit(one, priority))
            wait_until(lambda n=number: len(live.loop.waiting) == n)
        engine.step_seconds = 0.02
        for task in (first, *asked):
            task.result()
        assert ended == [-5, 0, 5]


def test_the_servers_own_time_limit_holds(model):
    limits = Limits(request_seconds=0.2)
    with running(model, slow_engine(model), limits=limits) as live:
        found = live.post(ask(max_tokens=500))
        assert (found.status_code, found.headers["x-should-retry"]) == (504, "false")


def test_stored_prefixes_that_nobody_uses_are_no_load(model):
    engine = QuickEngine(model, quota_bytes=1e5)
    with running(model, engine) as live:
        assert live.post(ask(prompt="x" * 48, prefix_tokens=48)).status_code == 200
        assert live.metric("geojax_prefixes") == 1
        assert engine.kv.taken > 0
        assert live.metric("vllm:kv_cache_usage_perc") == 0


def test_stopping_answers_what_was_accepted_and_refuses_the_rest(model):
    """What waits for a row, too."""
    engine = slow_engine(model, 0.2)
    with running(model, engine, pace=Pace(rows=2)) as live, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(live.post, ask(max_tokens=30, seed=i)) for i in range(8)]
        wait_until(lambda: live.loop.running + len(live.loop.waiting) == 8)
        assert len(live.loop.waiting) >= 6
        live.server.begin_stop()
        engine.step_seconds = 0.02
        late = live.post(ask())
        assert late.status_code == 503
        assert late.headers["retry-after"]
        assert live.get("/ready").status_code == 503
        for seed, one in enumerate(asked):
            assert one.result().json()["choices"][0]["text"] == letters(4, 30, seed)
        wait_until(lambda: live.server.should_exit)


def test_a_reader_that_is_behind_has_the_drains_time(model, monkeypatch):
    """Also once the engine has nothing more to do."""
    monkeypatch.setattr(server, "_LAST_SECONDS", 0.1)
    with running(model, slow_engine(model, 0.001), limits=PATIENT, drain_seconds=600) as live:
        with unread(live, ask(max_tokens=1000, n=8, canvas=64, **SHOWN)) as reader:
            wait_until(lambda: live.loop.running)
            wait_until(lambda: live.loop.idle)
            assert live.metric("vllm:request_success_total") == 0
            live.server.begin_stop()
            wait_until(lambda: live.server.should_exit)
            time.sleep(1)
            found = b""
            while part := reader.recv(2**16):
                found += part
        assert b"data: [DONE]" in found
        assert found.count(b'"finish_reason": "length"') == 8


def test_stopping_has_a_time_limit(model):
    with (
        running(model, slow_engine(model), drain_seconds=0.3) as live,
        ThreadPoolExecutor() as pool,
    ):
        asked = pool.submit(live.post, ask(max_tokens=2000))
        wait_until(lambda: live.loop.running == 1)
        live.server.begin_stop()
        assert asked.result(timeout=60).status_code == 503
        wait_until(lambda: live.server.should_exit)


def test_an_engine_that_dies_fails_health_and_hangs_nobody(model, caplog):
    engine = slow_engine(model)
    with running(model, engine, pace=Pace(rows=1)) as live, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(live.post, ask(max_tokens=500)) for _ in range(2)]
        streamed = pool.submit(live.post, ask(max_tokens=500, stream=True))
        wait_until(lambda: live.loop.running == 1 and len(live.loop.waiting) == 2)
        assert live.get("/health").status_code == 200
        engine.fails = True
        for one in asked:
            assert one.result().status_code == 503
            assert one.result().json()["error"]["code"] == "engine_dead"
        assert "engine_dead" in streamed.result().text
        assert live.get("/health").status_code == 503
        assert live.post(ask()).status_code == 503
        assert "the device is lost" in caplog.text


def test_a_request_that_the_device_cannot_compute_is_its_own_error(model, caplog):
    """However many there are, if others go through between them."""
    engine, run = QuickEngine(model), QuickEngine.run

    def fragile(slots, steps=None):
        if any(len(slot.job.request.tokens) > 100 for slot in slots):
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        run(engine, slots, steps)

    engine.run = fragile
    with running(model, engine) as live:
        for _ in range(4):
            large = live.post(ask(prompt="x" * 200))
            assert (large.status_code, large.json()["error"]["code"]) == (500, "failed")
            assert large.headers["x-should-retry"] == "false"
        assert live.post(ask(prompt="x" * 200, n=4)).status_code == 500
        assert live.post(ask()).json()["choices"][0]["text"] == letters(4, 20)
        assert live.get("/health").status_code == 200
        engine.check_books()
        assert engine.kv.taken == 0
        assert "out of memory" in caplog.text
        assert live.metric("vllm:request_success_total", finished_reason="error") == 8


def test_a_prefix_that_cannot_be_built_is_its_requests_own_error(model):
    engine = QuickEngine(model, quota_bytes=1e5)

    def fails(masks, entry):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    fills, engine._builds._fill = engine._builds._fill, fails
    with running(model, engine) as live:
        found = live.post(ask(prompt="x" * 48, n=4))
        assert (found.status_code, found.json()["error"]["code"]) == (500, "failed")
        assert live.post(ask()).status_code == 200
        engine._builds._fill = fills
        assert live.post(ask(prompt="x" * 48)).status_code == 200
        engine.check_books()


def test_a_call_of_the_engine_that_hangs_fails_health(model):
    engine = slow_engine(model, 4.0)
    with running(model, engine, stuck_seconds=0.2) as live, ThreadPoolExecutor() as pool:
        asked = pool.submit(live.post, ask(max_tokens=1))
        wait_until(lambda: live.get("/health").status_code == 503)
        assert asked.result().status_code == 200
        wait_until(lambda: live.get("/health").status_code == 200)


def test_it_is_ready_only_when_it_is_warm(model):
    go = threading.Event()

    def warm(say):
        say("1 of 2")
        go.wait(60)
        say("2 of 2")

    with running(model, QuickEngine(model), warm=warm) as live:
        wait_until(lambda: live.get("/ready").json()["warm_up"] == "1 of 2")
        assert live.get("/ready").status_code == 503
        assert live.get("/health").status_code == 200
        assert live.post(ask()).status_code == 503
        go.set()
        wait_until(lambda: live.get("/ready").status_code == 200)
        assert live.post(ask()).status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for(model):
    with running(model, QuickEngine(model), limits=Limits(body_seconds=0.2)) as live:
        host, port = live.url[7:].split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.settimeout(30)
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
            )
            assert b"408" in slow.recv(4096)


HALF = b"GET /health HTTP/1.1\r\nHost: loc"


@pytest.mark.parametrize(
    ("before", "sent"),
    [(False, b""), (False, HALF), (True, HALF)],
    ids=["nothing", "half", "half of a second request's"],
)
def test_headers_that_do_not_come_end_the_connection(model, monkeypatch, before, sent):
    monkeypatch.setattr(server, "_HEADER_SECONDS", 0.2)
    with running(model, QuickEngine(model)) as live:
        host, port = live.url[7:].split(":")
        with socket.create_connection((host, int(port)), timeout=60) as slow:
            if before:
                slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert slow.recv(4096).startswith(b"HTTP/1.1 200")
            slow.sendall(sent)
            while slow.recv(4096):
                pass


def test_answers_may_take_longer_than_headers(model, monkeypatch):
    monkeypatch.setattr(server, "_HEADER_SECONDS", 0.2)
    with running(model, slow_engine(model, 0.05)) as live, httpx2.Client(timeout=60) as client:
        for _ in range(2):  # over one connection
            answer = client.post(live.url + "/v1/completions", json=ask())
            assert answer.json()["choices"][0]["text"] == letters(4, 20)


def test_load_is_measured_at_the_client(model, tmp_path):
    """`geojax bench serve`, and its count of tokens against the server's own."""
    with running(model, QuickEngine(model)) as live:
        sizes = ["--prefix-tokens", "40", "--suffix-tokens", "8", "--tokens", "12"]
        args = ["--requests", "12", "--prefixes", "2", "--concurrency", "3", *sizes]
        path = tmp_path / "load.json"
        assert main(["bench", "serve", live.url, *args, "--json", str(path)]) == 0
        found = json.loads(path.read_text())
        assert (found["completed"], found["failed"]) == (12, 0)
        assert found["total_input_tokens"] == 12 * 48
        assert found["total_output_tokens"] == 12 * 12
        assert live.metric("vllm:generation_tokens_total") == 12 * 12
        assert 0 < found["median_ttft_ms"] <= found["median_e2el_ms"]


def test_where_nothing_is_answered_the_servers_reason_is_shown(model, tmp_path, capsys):
    limits = Limits(prompt_tokens=20)
    with running(model, QuickEngine(model), limits=limits) as live:
        path = tmp_path / "load.json"
        args = ["--requests", "3", "--prefix-tokens", "40", "--json", str(path)]
        assert main(["bench", "serve", live.url, *args]) == 1
        said = " ".join(capsys.readouterr().out.split())
        assert "3 not answered, status 400: the prompt has 296 tokens, and 20 may be" in said
        assert json.loads(path.read_text())["statuses"] == {"400": 3}


@pytest.mark.runs
def test_a_minute_at_twice_its_capacity():
    script = Path(__file__).parents[2] / "benchmarks" / "serve_soak.py"
    command = [sys.executable, str(script), "--seconds", "60"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stdout + found.stderr
