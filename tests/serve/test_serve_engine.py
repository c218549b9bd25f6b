# SPDX-License-Identifier: Apache-2.0
"""The real engine behind HTTP: the same answers, whoever else asks; prefixes of one tenant only."""

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tiny_serve import MASK, PAGE, running, wait_until

from geojax.bicache.depth import Depths
from geojax.bicache.engine import Engine, Job, Sizes
from geojax.bicache.policy import get_policy
from geojax.diffusion.request import Request, SamplingConfig
from geojax.serve.options import Pace

ALICE, BOB = ({"Authorization": f"Bearer {name}-0123456789abcdef"} for name in ("alice", "bob"))
SHARED = "A prefix that many share. " * 2  # 52 tokens: 3 whole pages


def make_engine(model):
    sizes = Sizes(1e6, 1e5, page=PAGE)
    return Engine(model.sampler(), get_policy("bicache", 4), sizes, Depths(((0.0, 1), (0.6, 2))))


@pytest.fixture(scope="module")
def live(model, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("alice alice-0123456789abcdef\nbob bob-0123456789abcdef\n")
    with running(model, make_engine(model), keys=keys, pace=Pace(rows=2)) as found:
        yield found


def ask(prompt, **kwargs):
    return {"prompt": prompt, "max_tokens": 8, "seed": 1, "temperature": 0.7, "steps": 5, **kwargs}


def expected(model, prompt, segments=(), seed=1, exact=False):
    """What the engine itself answers, alone."""
    ids = [*model.encode(prompt).tolist(), *[MASK] * 8]
    sampling = SamplingConfig(steps=5, temperature=0.7, seed=seed)
    (answer,) = make_engine(model).answer([Job(Request(ids, sampling), segments, exact=exact)])
    return model.decode(answer.new)


def test_answers_are_the_engines_whoever_else_asks(model, live):
    """The same seed gives the same answer, alone or among others, streamed or not."""
    prompts = [SHARED + word for word in ("one", "two!", "three")]
    alone = [live.post(ask(p, prefix_tokens=48), headers=ALICE).json() for p in prompts]
    for prompt, found in zip(prompts, alone, strict=True):
        (choice,) = found["choices"]
        assert choice["text"] == expected(model, prompt, (48,))
        assert choice["geojax"]["reuse"] == "bicache"
        assert choice["geojax"]["depth"] == 2
        assert choice["geojax"]["prefix_tokens"] == 48
    with ThreadPoolExecutor(6) as pool:
        bodies = [ask(p, prefix_tokens=48, stream=s) for p in prompts for s in (False, True)]
        together = list(pool.map(lambda body: live.post(body, headers=ALICE), bodies))
    for i, found in enumerate(alone):
        assert together[2 * i].json()["choices"][0]["text"] == found["choices"][0]["text"]
    exact = live.post(ask(prompts[0], exact=True), headers=ALICE).json()["choices"][0]
    assert exact["text"] == expected(model, prompts[0], exact=True)
    assert (exact["geojax"]["reuse"], exact["geojax"]["prefix_tokens"]) == ("none", 0)


def test_temperature_0_is_greedy_and_others_are_not(live):
    def said(temperature, seed):
        body = ask(SHARED + "one", prefix_tokens=48, temperature=temperature, seed=seed)
        return live.post(body, headers=ALICE).json()["choices"][0]["text"]

    assert len({said(0, seed) for seed in range(4)}) == 1
    assert len({said(1.5, seed) for seed in range(4)}) > 1
    assert said(1.5, 3) == said(1.5, 3)


def test_a_prefix_shorter_than_a_page_hits_where_it_is_marked(live):
    prompt = "short: " + SHARED
    cached = []
    for _ in range(2):
        found = live.post(ask(prompt, prefix_tokens=7), headers=ALICE).json()
        cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 7]


def test_a_repeated_prefix_hits_from_its_second_request_on(live):
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 256, 40).tolist()
    cached = []
    for _ in range(3):
        body = ask([*prefix, *rng.integers(0, 256, 9).tolist()])
        cached.append(live.post(body, headers=ALICE).json()["usage"]["prompt_tokens_details"])
    assert [c["cached_tokens"] for c in cached] == [0, 32, 32]
    before = live.metric("vllm:prefix_cache_hits_total")
    live.post(body, headers=ALICE)
    assert live.metric("vllm:prefix_cache_hits_total") > before


@pytest.mark.runs
def test_a_conversation_costs_its_new_rows_only(live):
    messages = [{"role": "system", "content": "Be brief."}]
    built, given = [], []
    for turn in range(10):
        messages.append({"role": "user", "content": f"Turn {turn}?"})
        before = live.metric("geojax_built_tokens_total")
        body = {"messages": messages, "max_tokens": 4, "steps": 2, "seed": turn}
        found = live.post(body, "/v1/chat/completions", headers=ALICE).json()
        built.append(live.metric("geojax_built_tokens_total") - before)
        given.append(found["usage"]["prompt_tokens"])
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        facts = found["choices"][0]["geojax"]
        assert cached == facts["prefix_tokens"] - built[-1]
        messages.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
    # From the second turn on, what is built is what was new in the turn before.
    assert all(0 < b <= g - f + 1 for b, g, f in zip(built[2:], given[2:], given[1:], strict=False))
    assert sum(built) < given[-1]


def test_every_metric_says_what_happened(live):
    """All names, after an answer of 8 steps that shares a prefix and refreshes it every 4."""

    def values():
        lines = [n for n in live.get("/metrics").text.splitlines() if n[0] != "#"]
        pairs = [line.rpartition(" ") for line in lines if "_bucket" not in line]
        return {re.sub(',?model_name="tiny",?', "", n): float(v) for n, _, v in pairs}

    body = ask(SHARED + "metrics", prefix_tokens=48, steps=8)
    live.post(body, headers=ALICE)
    before = values()
    choice = live.post(body, headers=ALICE).json()["choices"][0]
    wait_until(
        lambda: (
            values()["vllm:e2e_request_latency_seconds_count{}"]
            > before["vllm:e2e_request_latency_seconds_count{}"]
        )
    )
    after = values()
    moved = {n: v - before.get(n, 0) for n, v in after.items() if v != before.get(n, 0)}
    reason = f'finished_reason="{choice["finish_reason"]}"'
    expected = {
        "vllm:prompt_tokens_total{}": 59,
        "vllm:prefix_cache_queries_total{}": 59,
        "vllm:prefix_cache_hits_total{}": 48,
        f"vllm:request_success_total{{{reason}}}": 1,
        "geojax_shared_layers_total{}": 2,
        "geojax_sharing_answers_total{}": 1,
        "geojax_denoising_steps_total{}": choice["geojax"]["steps"],
        "geojax_refreshes_total{}": 2,
        'geojax_row_layers_total{part="suffix"}': choice["geojax"]["steps"] * 19 * 2,
    }
    for name in ("request_queue_time", "time_to_first_token", "e2e_request_latency"):
        expected[f"vllm:{name}_seconds_count{{}}"] = 1
    assert {name: moved.get(name) for name in expected} == expected
    assert moved["vllm:generation_tokens_total{}"] <= 8
    assert moved["geojax_quantum_seconds_count{}"] >= 1
    assert (
        moved["geojax_computed_row_layers_total{}"]
        > expected['geojax_row_layers_total{part="suffix"}']
    )
    idle = {"vllm:num_requests_running{}", "vllm:num_requests_waiting{}"}
    assert {after[n] for n in idle | {"vllm:kv_cache_usage_perc{}"}} == {0}
    assert after["geojax_prefixes{}"] >= 1
    for name in ("guard_events", "built_tokens", "evictions", "refused"):
        assert f"geojax_{name}_total{{}}" not in moved


def test_tenants_never_share(live):
    store = live.loop.engine.store
    prompt = SHARED + "a secret of one tenant's"
    for headers in (ALICE, BOB):
        before = len(store)
        cached = []
        for _ in range(3):
            found = live.post(ask(prompt, prefix_tokens=60), headers=headers).json()
            cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 60, 60]  # also for the second tenant
        assert len(store) == before + 1
    salts = {entry.salt for entry in store._entries.values()}
    assert len(salts) == 2
    assert not any(name in salt for salt in salts for name in ("alice", "bob"))
