# SPDX-License-Identifier: Apache-2.0
"""The engine under every policy, against a slow one, and what a request may not depend on."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
import slow_engine

from geojax.bicache import policy
from geojax.bicache.build import _compiled
from geojax.bicache.depth import Depths
from geojax.bicache.engine import Engine, Job, Sizes
from geojax.bicache.pages import NoPagesError, hidden_page_bytes, kv_page_bytes
from geojax.bicache.policy import get_policy
from geojax.bicache.shapes import bucket, buckets, page_bucket, page_buckets, shapes_within
from geojax.config import ConfigError, RunError
from geojax.diffusion.choose import read
from geojax.diffusion.request import Request, SamplingConfig, prompt
from geojax.diffusion.sampler import Sampler
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Transformer, init_params

MASK, VOCAB, PAGE = 31, 32, 16
LLADA = TransformerConfig(
    vocab_size=VOCAB, dim=32, layers=4, heads=4, kv_heads=2, mlp_dim=48, bidirectional=True
)
DREAM = replace(LLADA, qkv_bias=True, shifted=True)
DEPTHS = Depths(((0.0, 1), (0.5, 2), (0.75, 3)))
SIZES = Sizes(4e6, 1e6, page=PAGE)


@cache
def params(config):
    tree = init_params(config, 1)
    # Larger weights, so that what a row sees matters to what it says.
    return jax.tree.map(lambda x: x * 2.5 if x.ndim > 2 else x, tree)


@cache
def sampler(config=LLADA):
    return Sampler(Transformer(config), params(config), MASK, np.arange(VOCAB) == MASK)


@cache
def slow_model(config):
    return slow_engine.SlowModel(config, params(config))


def request(seed, given, canvas, **kwargs):
    ids = np.random.default_rng(seed).integers(0, 30, given)
    return prompt(ids.tolist(), canvas, MASK, SamplingConfig(**kwargs))


def blanks(ask, prefix, places):
    """The same with masks in its prefix, which stay."""
    tokens = np.array(ask.tokens)
    tokens[list(places)] = MASK
    return Job(replace(ask, tokens=tokens.tolist(), begin=prefix), (prefix,))


JOBS = [
    Job(request(0, 45, 20, block=8, steps=10), (40,)),  # a share of 0.62
    Job(request(1, 73, 16, block=8), (30, 40)),  # two segments, a share of 0.79
    Job(request(2, 9, 12, block=5)),  # no prefix
    Job(request(3, 20, 30, block=0, steps=9), (16,)),  # one page, a share of 0.32
    blanks(request(4, 52, 18, block=6), 50, (5, 17, 44)),  # a share of 0.71
]
LONG = pytest.mark.full
POLICIES = [
    pytest.param("none", None, marks=LONG),
    ("refresh", 1),
    pytest.param("refresh", 4, marks=LONG),
    ("full", None),
    pytest.param("prefix", None, marks=LONG),
    pytest.param("dual", None, marks=LONG),
    pytest.param("bicache", 1, marks=LONG),
    ("bicache", 3),
    pytest.param("bicache-dual", None, marks=LONG),
    ("bicache-dual", 3),
]


@cache
def engine(name, every, config=LLADA, builder="prefix"):
    return Engine(sampler(config), get_policy(name, every), SIZES, DEPTHS, builder)


@cache
def answers(name, every, config=LLADA, builder="prefix"):
    made = engine(name, every, config, builder)
    found = made.answer(JOBS)
    made.check_books()
    return found


def slow(name, every, job, config=LLADA, masks=0):
    policy = get_policy(name, every)
    share = job.prefix / len(job.request.tokens)
    depth = config.layers if policy.whole else DEPTHS.at(share)
    return slow_engine.answer(
        slow_model(config), job.request, policy, MASK, job.segments, depth, masks
    )


@pytest.mark.parametrize(("name", "every"), POLICIES)
def test_every_policy_equals_the_slow_engine(name, every):
    for job, found in zip(JOBS, answers(name, every), strict=True):
        np.testing.assert_array_equal(found.tokens, slow(name, every, job))


@pytest.mark.parametrize(
    ("name", "every"),
    [
        pytest.param("refresh", 4, marks=LONG),
        pytest.param("bicache", 3, marks=LONG),
        ("bicache-dual", 3),
    ],
)
def test_so_does_a_shifted_model(name, every):
    for job, found in zip(JOBS, answers(name, every, DREAM), strict=True):
        np.testing.assert_array_equal(found.tokens, slow(name, every, job, DREAM))


def test_so_do_prefixes_that_were_built_before_masks():
    for job, found in zip(JOBS, answers("bicache", 3, LLADA, "canvas"), strict=True):
        masks = 1 << (len(job.request.tokens) - job.prefix - 1).bit_length()
        np.testing.assert_array_equal(found.tokens, slow("bicache", 3, job, masks=masks))


def test_refreshing_all_at_every_step_is_no_reuse():
    plain = sampler().sample([job.request for job in JOBS])
    for name, every in (("none", None), ("refresh", 1)):
        for ours, theirs in zip(answers(name, every), plain, strict=True):
            np.testing.assert_array_equal(ours.tokens, theirs.tokens)
            assert ours.steps == theirs.steps
    # Reuse changes something here, or the tests above would show little.
    assert any(
        (a.tokens != b.tokens).any() for a, b in zip(answers("full", None), plain, strict=True)
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "threshold", "threshold": 0.2},
        {"policy": "margin", "temperature": 0.7, "steps": 12},
        {"policy": "origin", "temperature": 0.7, "block": 8, "steps": 12},
    ],
    ids=lambda s: s["policy"],
)
def test_so_it_is_whatever_is_filled_and_drawn(settings):
    """And where an answer may end early."""
    model = Sampler(Transformer(DREAM), params(DREAM), MASK, np.arange(VOCAB) == MASK, (7,))
    engine = Engine(model, get_policy("refresh", 1), SIZES)
    asks = [
        prompt(
            np.random.default_rng(n).integers(0, 30, 40).tolist(),
            24,
            MASK,
            SamplingConfig(seed=n, **settings),
        )
        for n in range(3)
    ]
    expected = model.sample(asks)
    assert any(answer.ended for answer in expected)
    for ours, theirs in zip(engine.answer([Job(a, (33,)) for a in asks]), expected, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        assert ours.steps == theirs.steps


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_keys_and_values_of_the_first_layer_are_those_of_a_whole_pass(config):
    """They depend on nothing but their token and its place."""
    made = Engine(sampler(config), get_policy("bicache", 3), SIZES, DEPTHS)
    job = Job(request(5, 60, 8), (20, 17))
    slot = made.admit(job)
    places = np.arange(job.prefix)
    model, tokens = slow_model(config), np.array(job.request.tokens)[: job.prefix]
    _, *expected = model.project(0, model.embed(tokens), places)
    real = np.arange(PAGE) < slot.counts[:, None]
    for pool, whole in zip((made.memory.pool.k, made.memory.pool.v), expected, strict=True):
        found = np.asarray(pool)[slot.table[0]][real]
        np.testing.assert_allclose(found, whole, atol=1e-5)
    made.leave(slot)


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("bicache", 1),
        pytest.param("refresh", 1, marks=LONG),
        pytest.param("none", None, marks=LONG),
    ],
)
def test_logits_are_those_without_a_cache_where_all_is_refreshed(name, every):
    """Nothing is shared at depth 0, and at every step nothing is kept."""
    seen = {}

    def reading(logits, forbidden, draws, step, positions):
        jax.debug.callback(lambda z, at: seen.update({int(at[0]): z[0]}), logits, step)
        return read(logits, forbidden, draws, step, positions)

    usual = init_params(LLADA, 1)  # larger ones round more
    mine = replace(sampler(), params=usual, read=reading)
    made = Engine(mine, get_policy(name, every), SIZES, Depths(((0.0, 0),)))
    (found,) = made.answer(JOBS[:1])
    jax.effects_barrier()
    assert len(made.store) == 0
    (plain, tokens), (full, _) = (
        trace_of(slow_engine.SlowModel(LLADA, usual), JOBS[0], *how)
        for how in (("none", 0), ("full", LLADA.layers))
    )
    np.testing.assert_array_equal(found.tokens, tokens)
    assert sorted(seen) == list(range(len(plain)))
    for step, logits in enumerate(plain):
        assert np.abs(seen[step][: len(logits), :VOCAB] - logits).max() < 1e-5
    # Reuse would show.
    assert np.abs(full[0] - plain[0]).max() > 1e-3


def trace_of(model, job, name, depth):
    """Logits of each step, and the answer."""
    trace = []
    policy = get_policy(name)
    tokens = slow_engine.answer(model, job.request, policy, MASK, job.segments, depth, trace=trace)
    return trace, tokens


@pytest.mark.parametrize(("name", "every"), [("bicache", 3), ("bicache-dual", 3)])
def test_answers_do_not_depend_on_the_batch_its_order_or_what_is_stored(name, every):
    together, made = answers(name, every), engine(name, every)
    backwards = made.answer(JOBS[::-1])[::-1]  # all prefixes are there now
    for ours, theirs in zip(backwards, together, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    made.store.purge()
    (alone,) = made.answer(JOBS[1:2])  # built anew
    np.testing.assert_array_equal(alone.tokens, together[1].tokens)
    made.check_books()


def test_rows_may_join_and_leave_between_calls():
    made, expected = engine("bicache", 3), answers("bicache", 3)
    first = made.admit(JOBS[0])
    made.run([first])
    second = made.admit(JOBS[1])
    waiting = [first, second]
    while waiting:
        made.run(waiting)
        for slot in [s for s in waiting if s.done]:
            waiting.remove(slot)
            number = JOBS.index(slot.job)
            np.testing.assert_array_equal(made.result(slot).tokens, expected[number].tokens)
            made.leave(slot)
    made.check_books()


def test_requests_of_one_prefix_share_its_pages():
    made = engine("bicache", 3)
    ids = np.random.default_rng(9).integers(0, 30, 48).tolist()
    jobs = [Job(prompt([*ids, i, 2], 10, MASK), (48,)) for i in range(3)]
    before = made.store.counts.builds
    slots = [made.admit(job) for job in jobs]
    assert made.store.counts.builds == before + 1
    depth = slots[0].depth
    assert depth == DEPTHS.at(0.8)
    for slot in slots[1:]:
        np.testing.assert_array_equal(slot.table[:depth], slots[0].table[:depth])
        assert not set(slot.table[depth:].flat) & set(slots[0].table[depth:].flat)
    for slot in slots:
        made.leave(slot)


def test_an_exact_request_reuses_nothing():
    made = engine("bicache", 3)
    made.answer(JOBS[:1])
    builds = made.store.counts.builds
    jobs = [replace(JOBS[1], exact=True), JOBS[0]]
    exact, other = made.answer(jobs)
    assert made.store.counts.builds == builds  # the other's is there
    plain = sampler().sample([JOBS[1].request])[0]
    np.testing.assert_array_equal(exact.tokens, plain.tokens)
    np.testing.assert_array_equal(other.tokens, answers("bicache", 3)[0].tokens)


def test_work_is_what_the_definitions_say():
    made = Engine(sampler(), get_policy("bicache", 3), SIZES, DEPTHS)
    job = Job(request(5, 48, 16, block=0), (40,))  # a share of 0.625: 2 of 4 layers
    made.answer([job])
    steps, refreshes = 16, 6
    # Computed are a bucket of 64 rows, and four pages.
    computed = steps * 64 * 4 + refreshes * 4 * PAGE * 2
    useful = {"suffix": steps * 24 * 4, "prefix": refreshes * 40 * 2, "probes": 0}
    assert made.work == useful | {"computed": computed}
    assert made.refreshes == refreshes


def test_hidden_states_have_a_budget_of_their_own():
    per = hidden_page_bytes(LLADA, "float32", PAGE)
    made = Engine(sampler(), get_policy("bicache", 3), Sizes(4e6, 5 * per, page=PAGE), DEPTHS)
    assert made.memory.pool.hidden.nbytes == 5 * per
    made.answer([Job(request(0, 30, 8), (16,))])  # a page at each of three depths
    # For ever too many, so nobody waits for room.
    with pytest.raises(ConfigError, match=r"takes 9 pages of hidden .* 4; raise hidden_bytes"):
        made.admit(Job(request(0, 60, 8), (48,)))
    with pytest.raises(ConfigError, match=r"hidden_bytes \d+ holds nothing: .* give \d+ or more"):
        Engine(sampler(), get_policy("bicache", 3), Sizes(4e6, 1.5 * per, page=PAGE), DEPTHS)
    none = Engine(sampler(), get_policy("refresh", 3), Sizes(4e6, 9e9, page=PAGE))
    assert none.memory.pool.hidden.nbytes == 2 * per


def test_a_prefix_that_is_let_go_is_not_built_for_that():
    made = Engine(sampler(), get_policy("bicache", 3), SIZES, DEPTHS)
    job = Job(request(0, 60, 8), (16, 32))
    made.pin(job)
    assert made.store.counts.builds == 2
    made.pin(job, False)
    made.store.purge()
    made.pin(job, False)
    assert made.store.counts.builds == 2
    assert not len(made.store)


def test_memory_that_is_too_small_is_refused_and_nothing_leaks():
    made = Engine(sampler(), get_policy("bicache", 3), Sizes(60_000, 1e6, page=PAGE), DEPTHS)
    slots, jobs = [], iter(Job(request(i, 40, 8), (33,)) for i in range(99))

    def fill():
        while True:
            slots.append(made.admit(next(jobs)))

    with pytest.raises(NoPagesError, match=r"wanted, \d+ and \d+ are free, .* raise the pool"):
        fill()
    with pytest.raises(ConfigError, match=r"takes \d+ pages, and there are \d+; raise kv_bytes"):
        made.admit(Job(request(0, 400, 8), (390,)))
    assert slots
    made.check_books(slots)
    with pytest.raises(AssertionError):
        made.check_books(slots[1:])  # what a request holds is missed
    for slot in slots:
        made.leave(slot)
    made.check_books()
    # Now that they are gone, others fit: idle entries make room, and answers stay what they are.
    for _ in range(3):
        evicted, job = made.store.counts.evictions, next(jobs)
        (found,) = made.answer([job])
        assert made.store.counts.evictions > evicted
        np.testing.assert_array_equal(found.tokens, slow("bicache", 3, job))


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job(request(0, 10, 4), (11,)), "segments .* are 11 tokens, and the prefix may have 10"),
        (Job(request(0, 10, 4), (5, 0)), "at least 1 token each"),
        (Job(request(0, 10, 4, guidance=1.0), (5,)), "the masked prompt shares nothing"),
        (Job(Request([1, 2, 3])), "no token is the mask"),
    ],
)
def test_jobs_that_mean_nothing_are_refused(job, message):
    with pytest.raises(ConfigError, match=message):
        engine("bicache", 3).admit(job)
    engine("bicache", 3).check_books()


def test_a_shifted_models_prefix_leaves_the_row_that_predicts():
    with pytest.raises(ConfigError, match=r"may have 9: .* its last token predicts that"):
        engine("bicache", 3, DREAM).admit(Job(request(0, 10, 4), (10,)))


def test_a_request_of_no_numbers_spoils_no_page():
    """What a broken request leaves behind is read by nobody."""
    made = Engine(sampler(), get_policy("bicache", 3), SIZES, DEPTHS)
    filled = made.memory.pool.k.at[1:].set(np.nan), made.memory.pool.v.at[1:].set(np.nan)
    made.memory.pool = made.memory.pool._replace(k=filled[0], v=filled[1])
    for job, found in zip(JOBS, made.answer(JOBS), strict=True):
        np.testing.assert_array_equal(found.tokens, slow("bicache", 3, job))
    made.sampler = replace(sampler(), params=jax.tree.map(lambda x: x * np.nan, sampler().params))
    with pytest.raises(RunError, match="logits are not finite"):
        made.answer([Job(request(99, 40, 8))])
    made.check_books()


def test_a_call_that_fails_and_takes_the_pool_with_it_ends_those_requests_alone(monkeypatch):
    """Donated arrays are gone when a program fails, and with them all that was kept."""
    made = Engine(sampler(), get_policy("bicache", 3), SIZES, DEPTHS)
    slots = [made.admit(job) for job in JOBS[:2]]

    def failing(params, pool, *args):
        for array in pool:
            array.delete()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(made, "_program", lambda shape: failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        made.run(slots[:1])
    monkeypatch.undo()
    assert len(made.store) == 0
    with pytest.raises(RunError, match="admit them again"):
        made.run(slots[1:])
    for slot in slots:
        made.leave(slot)
    assert made.kv.taken == made.memory.hidden.taken == 0
    for job, found in zip(JOBS, made.answer(JOBS), strict=True):
        np.testing.assert_array_equal(found.tokens, slow("bicache", 3, job))


def test_buckets_are_powers_of_two_and_half_as_much_again():
    assert buckets(1, 100) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    for size in range(300):
        found = bucket(size)
        assert size <= found <= max(1.5 * size, 2 * size if size < 2 else 0)
        assert bucket(found) == found
        assert size <= page_bucket(size) <= max(1.5 * size + 2, 2)
    assert page_buckets(7) == [0, 2, 4, 6, 8]


def test_segments_are_found_for_a_request():
    made = Engine(sampler(DREAM), get_policy("bicache", 3), SIZES, DEPTHS)
    asked = request(0, 2 * PAGE, 8)
    assert made.segments(asked) == ()
    # The last token of the prompt predicts the first mask, and so is never shared.
    assert made.segments(asked) == (PAGE,)
    assert made.segments(asked, ends=[5, 20]) == (5, 15)
    assert made.segments(asked, salt="other") == ()


def test_a_prefix_may_be_built_ahead_and_kept(monkeypatch):
    per = kv_page_bytes(LLADA, np.float32, PAGE)
    made = Engine(sampler(), get_policy("bicache", 3), Sizes(25 * per, 1e6, page=PAGE), DEPTHS)
    built = []
    monkeypatch.setattr(made._builds, "_fill", lambda masks, entry: built.append(entry))
    first = JOBS[0]  # three pages: nine of the store's three layers, six of its own two
    made.pin(first)
    made.check_books()
    for seed in range(20, 24):  # there is room for one more beside it
        made.leave(made.admit(Job(request(seed, 45, 20), (40,))))
    assert made.store.counts.evictions == 3
    made.leave(made.admit(first))
    assert len(built) == 5  # not again
    made.pin(first, False)
    for seed in (30, 31):
        made.leave(made.admit(Job(request(seed, 45, 20), (40,))))
    assert built[0] not in made.store.entries
    with pytest.raises(ConfigError, match=r"shared in no layer .* pin a longer prefix"):
        made.pin(JOBS[2])


def test_prefixes_that_the_table_was_not_made_for_are_named_once(monkeypatch, caplog):
    table = replace(DEPTHS, covers="whole")
    made = Engine(sampler(), get_policy("bicache", 3), SIZES, table)
    monkeypatch.setattr(made._builds, "_fill", lambda masks, entry: None)
    for job in (JOBS[0], JOBS[1], JOBS[1]):
        made.leave(made.admit(job))
    assert len(caplog.records) == 1
    assert "is of whole prefixes, and a chained one is shared by it" in caplog.text


def test_policies_and_tables_that_mean_nothing_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'bicache'"):
        get_policy("bicahce")
    with pytest.raises(ConfigError, match="'full' has no refresh interval"):
        get_policy("full", 4)
    with pytest.raises(ConfigError, match="refreshes every 0 steps; use 1 or more"):
        get_policy("bicache", 0)
    with pytest.raises(ConfigError, match="nothing says how deep"):
        Engine(sampler(), get_policy("bicache"), SIZES)
    with pytest.raises(ConfigError, match="depths must not fall"):
        Depths(((0.0, 2), (0.5, 1)))
    assert [DEPTHS.at(r) for r in (0.0, 0.49, 0.5, 0.8)] == [1, 1, 2, 3]
    assert Depths(((0.5, 2),)).at(0.4) == 0
    assert Depths(((0.7, 2),)).at(67 / 96) == 0  # 0.698
    assert Depths(((0.7, 2),)).at(56 / 80) == Depths(((0.29, 2),)).at(29 / 100) == 2
    with pytest.raises(ConfigError, match="shares 9 layers, and the model has 4"):
        Engine(sampler(), get_policy("bicache"), SIZES, Depths(((0.0, 9),)))


@pytest.mark.parametrize("name", policy.POLICIES)
def test_no_step_makes_a_copy_of_the_pool(name):
    """As conditions inside conditions do: it would be read and written at every step."""
    engine = Engine(sampler(), get_policy(name), Sizes(6e7, 1e6, page=PAGE), DEPTHS)
    shape = max(shapes_within([1], 4, 128, 16))
    rows, canvas, rules = engine.shapes.assemble([], shape, 0, [])
    program = engine._program(shape)
    args = (sampler().params, engine.memory.pool, rows, canvas, rules, np.int32(1))
    compiled = program.func.lower(*args, **program.keywords).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3e7


@pytest.mark.parametrize("builder", ["prefix", "canvas"])
def test_no_build_makes_a_copy_of_the_pool(builder):
    """As one would that reads its parents' pages and writes its own in no given order."""
    sizes = Sizes(6e7, 1e6, page=PAGE)
    builds = Engine(sampler(), get_policy("bicache"), sizes, DEPTHS, builder=builder)._builds
    program = _compiled(builds._program)
    compiled = program.lower(*builds._given(4, 4, builds._room(32), 32, None)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3e7
