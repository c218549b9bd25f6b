# SPDX-License-Identifier: Apache-2.0
"""Strategies are written and read alike, the illegal ones are refused with a way out that is one,
and no legal one is left out."""

import re
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from geojax.meshes.strategy import (
    Strategy,
    enumerate_strategies,
    parse_strategy,
    problems,
    require_legal,
)
from geojax.models.config import TransformerConfig

MODEL = TransformerConfig(vocab_size=200, dim=32, layers=8, heads=8, kv_heads=4, mlp_dim=64)
REMATS = ("none", "matmuls", "full")
SHARDINGS = ("none", "optimizer", "all")

few, depths = st.integers(1, 9), st.integers(1, 36)
any_strategy = st.builds(
    Strategy,
    few,
    few,
    few,
    few,
    st.integers(1, 99),
    few,
    *map(st.sampled_from, (REMATS, SHARDINGS)),
)


def models(layers=depths):
    """Shapes whose counts have all sorts of divisors."""

    def build(layers, kv_heads, groups, mlp_dim, vocab):
        heads = kv_heads * groups
        return TransformerConfig(vocab, 2 * heads, layers, heads, kv_heads, mlp_dim)

    return st.builds(build, layers, few, few, st.integers(1, 40), st.integers(1, 900))


def fits(s, model):
    """Whether a strategy is legal, said once more."""
    unit = s.dp * s.micro_batch
    return (
        all(n % s.tp == 0 for n in (model.heads, model.kv_heads, model.mlp_dim, model.padded_vocab))
        and model.layers % (s.pp * s.interleave) == 0
        and s.global_batch % unit == 0
        and s.global_batch >= unit * s.pp
        and (s.interleave == 1 or (s.pp > 1 and s.global_batch % (unit * s.pp) == 0))
        and (s.sharding == "none" or s.dp > 1)
    )


# --- text ---


@given(any_strategy)
def test_text_names_one_strategy(s):
    assert parse_strategy(str(s)) == s
    assert parse_strategy(f" {s}\n") == s


@given(any_strategy, any_strategy)
def test_two_strategies_never_share_a_text(a, b):
    assert (str(a) == str(b)) == (a == b)


def test_text_is_what_the_documentation_shows():
    assert str(Strategy(2, 2, 2, 1, 16)) == "dp2-tp2-pp2-mb1-gb16"
    folded = Strategy(2, 1, 4, 1, 16, interleave=2, remat="full", sharding="all")
    assert str(folded) == "dp2-tp1-pp4x2-mb1-gb16-fsdp-full"
    assert str(replace(folded, sharding="optimizer", remat="matmuls")).endswith("-zero-matmuls")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dp2",
        "dp2-tp2-pp2-mb1",
        "dp2-tp2-pp2-mb1-gb16-full-fsdp",
        "dp2-tp2-pp2-mb1-gb16-none",
        "dp2-tp2-pp2x-mb1-gb16",
        "dp-2-tp2-pp2-mb1-gb16",
        "dp2 tp2 pp2 mb1 gb16",
        "dp2-tp2-pp2-mb1-gb16 dp2-tp2-pp2-mb1-gb16",
        "DP2-TP2-PP2-MB1-GB16",
    ],
)
def test_other_text_is_refused_with_an_example_that_can_be_read(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))) as caught:
        parse_strategy(text)
    sample = re.search(r"like (\S+),", str(caught.value))
    assert sample
    assert problems(parse_strategy(sample[1]), MODEL) == []


@pytest.mark.parametrize("name", ["dp", "tp", "pp", "micro_batch", "global_batch", "interleave"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "2", None])
def test_counts_are_whole_numbers_from_one_on(name, value):
    with pytest.raises(ValueError, match=rf"strategy {name} .* at least 1"):
        replace(Strategy(2, 2, 2, 1, 16), **{name: value})


def test_zero_in_a_text_is_refused_by_name():
    with pytest.raises(ValueError, match="strategy tp 0"):
        parse_strategy("dp2-tp0-pp2-mb1-gb16")


@pytest.mark.parametrize(("name", "known"), [("remat", REMATS), ("sharding", SHARDINGS)])
def test_unknown_choices_are_refused_with_those_there_are(name, known):
    with pytest.raises(ValueError, match="'half'") as caught:
        replace(Strategy(2, 2, 2, 1, 16), **{name: "half"})
    assert all(choice in str(caught.value) for choice in known)


# --- legality ---


@settings(max_examples=300)
@given(any_strategy, models())
def test_problems_are_found_exactly_where_there_are_some(s, model):
    assert (problems(s, model) == []) == fits(s, model)


# What a message begins with, whatever its numbers; and the fields that it offers other values of.
SUBJECTS = {
    r"model heads \d+ does not divide by tp (\d+)": "tp",
    r"model kv_heads \d+ does not divide by tp (\d+)": "tp",
    r"model mlp_dim \d+ does not divide by tp (\d+)": "tp",
    r"model padded_vocab \d+ does not divide by tp (\d+)": "tp",
    r"model layers \d+ does not divide by pp (\d+)": "pp",
    r"layers a stage \d+ does not divide by interleave (\d+)": "interleave",
    r"global_batch (\d+) does not divide by dp \d+ x micro_batch \d+": "global_batch",
    r"(\d+) micro-batches are fewer than pp \d+ stages": "micro_batches",
    r"(\d+) micro-batches do not divide by pp \d+, which interleaved stages need": "micro_batches",
    r"interleave (\d+) needs pp above 1": "interleave",
    r"sharding '(\w+)' needs dp above 1": "sharding",
}
FIELD = re.compile(r"(dp|tp|pp|micro_batch|global_batch|interleave|sharding) '?(\w+)'?")


def subject_of(problem):
    (found,) = [s for s in SUBJECTS if re.match(s + "; use ", problem)]
    return found


def ways_out(problem, s):
    """The strategies that a message offers: 'tp 2 or 4' are two."""
    ways, name = [], SUBJECTS[subject_of(problem)]
    for way in re.split(",? or ", problem.split("; use ")[1]):
        found = FIELD.fullmatch(way)
        name, value = found.groups() if found else (name, way)
        ways.append(replace(s, **{name: value if name == "sharding" else int(value)}))
    return ways


@settings(max_examples=400)
@given(any_strategy, models())
@example(Strategy(1, 1, 4, 7, 14), replace(MODEL, layers=4))  # no micro_batch near 3 divides 14
@example(Strategy(1, 1, 4, 1, 2), replace(MODEL, layers=4))  # nothing but more sequences helps
@example(Strategy(6, 1, 5, 1, 12), replace(MODEL, layers=5))
def test_every_way_out_leads_out_of_its_problem(s, model):
    for problem in problems(s, model):
        subject = subject_of(problem)
        value = re.match(subject, problem)[1]
        assert value == str(getattr(s, SUBJECTS[subject]))
        ways = ways_out(problem, s)
        assert ways
        for way in ways:
            left = problems(way, model)
            assert subject not in map(subject_of, left), f"{problem}: {way} has {left}"
            if SUBJECTS[subject] == "micro_batches":  # nor does it lead into the next one
                assert way.global_batch % (way.dp * way.micro_batch) == 0, f"{problem}: {way}"


@given(any_strategy, models())
def test_a_divisor_is_replaced_by_its_neighbours(s, model):
    for problem in problems(s, model):
        name = SUBJECTS[subject_of(problem)]
        if name not in ("tp", "pp") or "divide" not in problem:
            continue
        number = int(re.search(r"\d+", problem)[0])
        divisors = [d for d in range(1, number + 1) if number % d == 0]
        below = max(d for d in divisors if d < getattr(s, name))
        above = [d for d in divisors if d > getattr(s, name)][:1]
        assert [getattr(way, name) for way in ways_out(problem, s)] == [below, *above]


def test_layers_are_never_dropped_to_make_stages_even():
    # Elsewhere 30 layers on 4 stages build 28 without a word, and 10 on 3 lose one.
    for layers, pp, offered in ((30, 4, "3 or 5"), (10, 3, "2 or 5")):
        (problem,) = problems(Strategy(1, 1, pp, 1, 8), replace(MODEL, layers=layers))
        assert problem == f"model layers {layers} does not divide by pp {pp}; use pp {offered}"


def test_fewer_micro_batches_than_stages_are_refused():
    # Elsewhere they hang.
    for count in range(1, 10):
        found = problems(Strategy(2, 1, 4, 1, 2 * count), MODEL)
        assert bool(found) == (count < 4), count
        assert all("fewer than pp 4 stages" in problem for problem in found)


def test_a_vocabulary_divides_by_its_padding():
    # 50,257 is odd; tables of 50,304 rows divide by 2, 3, 4, 6, 8.
    odd = TransformerConfig(50_257, 48, 8, 24, 24, 48)
    for tp in (2, 3, 4, 6, 8):
        assert problems(Strategy(1, tp, 1, 1, 8), odd) == []
    (problem,) = problems(
        Strategy(1, 5, 1, 1, 8), replace(odd, dim=40, heads=5, kv_heads=5, mlp_dim=5)
    )
    assert problem.startswith("model padded_vocab 50304 does not divide by tp 5; use tp 4 or 6")


def test_all_problems_are_named_at_once():
    s = Strategy(1, 3, 3, 2, 5, interleave=2, sharding="all")
    with pytest.raises(ValueError, match=re.escape(f"strategy {s}: ")) as caught:
        require_legal(s, MODEL)
    assert all(problem in str(caught.value) for problem in problems(s, MODEL))
    assert len(problems(s, MODEL)) >= 6


@given(s=any_strategy, devices=st.integers(1, 99))
def test_the_number_of_devices_must_be_that_of_the_strategy(s, devices):
    s = replace(s, micro_batch=1, interleave=1, sharding="none", global_batch=s.dp * s.pp)
    model = TransformerConfig(128 * s.tp, 2 * s.tp, s.pp, s.tp, s.tp, s.tp)
    if devices == s.devices:
        require_legal(s, model, devices)
        return
    with pytest.raises(ValueError, match=f"and there are {devices}; ") as caught:
        require_legal(s, model, devices)
    assert f"wants {s.devices} devices" in str(caught.value)
    for copies in re.findall(r"; use dp (\d+)", str(caught.value)):
        assert replace(s, dp=int(copies)).devices == devices


# --- enumeration ---


@settings(max_examples=50)
@given(
    models(st.sampled_from([1, 2, 6, 8])),
    st.integers(1, 12),
    st.lists(st.integers(1, 24), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(1, 4), max_size=2, unique=True),
)
def test_enumeration_holds_every_legal_strategy_once(model, devices, batches, micros, more):
    interleaves = sorted({1, *more})
    found = enumerate_strategies(model, devices, batches, micros, interleaves, REMATS, SHARDINGS)
    sizes = range(1, devices + 1)
    expected = {
        s
        for layout in product(sizes, sizes, sizes)
        if layout[0] * layout[1] * layout[2] == devices
        for rest in product(micros, batches, interleaves, REMATS, SHARDINGS)
        if fits(s := Strategy(*layout, *rest), model)
    }
    assert set(found.legal) == expected
    assert len(found.legal) == len(expected)
    excluded = [s for s, _ in found.excluded]
    assert len(set(excluded)) == len(excluded)
    assert not expected & set(excluded)
    for s, reason in found.excluded:
        assert s.devices == devices
        assert reason == "; and ".join(problems(s, model)) != ""


def test_every_candidate_is_either_legal_or_excluded():
    found = enumerate_strategies(MODEL, 8, [8, 12], [1, 3], [1, 2], REMATS, SHARDINGS)
    layouts = [
        (dp, tp, 8 // dp // tp) for dp in (1, 2, 4, 8) for tp in (1, 2, 4, 8) if dp * tp <= 8
    ]
    choices = [(2 if pp > 1 else 1) * (3 if dp > 1 else 1) for dp, _, pp in layouts]
    assert len(found.legal) + len(found.excluded) == sum(choices) * 2 * 2 * len(REMATS)
    assert found == enumerate_strategies(MODEL, 8, [8, 12], [1, 3], [1, 2], REMATS, SHARDINGS)


def test_a_further_reason_excludes():
    plain = enumerate_strategies(MODEL, 8, [8])
    narrow = enumerate_strategies(MODEL, 8, [8], also=lambda s: "tp leaves" if s.tp > 2 else None)
    assert set(narrow.legal) == {s for s in plain.legal if s.tp <= 2}
    assert {s for s, reason in narrow.excluded if reason == "tp leaves"} == {
        s for s in plain.legal if s.tp > 2
    }


# --- the bubble ---


def simulated_bubble(pp, rounds, micro_batches):
    """Idle share of stages that take, each tick, the first chunk of a micro-batch that is ready."""
    waiting = {  # stage -> work in the order in which it is preferred
        stage: [
            (group, chunk, group * pp + i)
            for group in range(-(-micro_batches // pp))
            for chunk in range(stage, pp * rounds, pp)
            for i in range(min(pp, micro_batches - group * pp))
        ]
        for stage in range(pp)
    }
    done, ticks = set(), 0
    while any(waiting.values()):
        taken = []
        for work in waiting.values():
            if work and (not work[0][1] or (work[0][1] - 1, work[0][2]) in done):
                taken.append(work.pop(0)[1:])
        done.update(taken)
        ticks += 1
    return 1 - Fraction(micro_batches * rounds, ticks)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(0, 5))
def test_bubble_is_the_idle_share_of_the_schedule(pp, rounds, groups, more):
    assume(rounds == 1 or pp > 1)
    micro_batches = groups * pp + (more if rounds == 1 else 0)
    s = Strategy(3, 1, pp, 2, 6 * micro_batches, interleave=rounds)
    assert s.bubble == pytest.approx(float(simulated_bubble(pp, rounds, micro_batches)), abs=1e-12)


def test_bubble_of_known_pipelines():
    # Huang et al. 2019: (K - 1) / (M + K - 1). Narayanan et al. 2021: idle over busy time is
    # (p - 1) / m, and v chunks divide it by v.
    assert Strategy(1, 1, 4, 1, 8).bubble == 3 / 11
    folded = Strategy(1, 1, 4, 1, 8, interleave=2).bubble
    assert folded / (1 - folded) == pytest.approx(3 / 8 / 2)
    assert Strategy(4, 2, 1, 1, 8).bubble == 0


def test_planning_needs_no_jax():
    code = "import sys, geojax.meshes.strategy; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
