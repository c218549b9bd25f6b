# SPDX-License-Identifier: Apache-2.0
"""A predicted chain and its rivals agree with closed forms, and no rival beats the chain."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from geojax.cli import main
from geojax.cona.score import WALK_POINTS, Option, best, envelope, fastest, power_law
from geojax.config import ConfigError
from geojax.config.files import read_chain
from geojax.plan.chain import Noise, assumed_noise, compare, measured_noise, predict
from geojax.plan.chain_report import plot_chain
from geojax.plan.command import PlanOptions, run_plan
from geojax.track.metrics import MetricsWriter

# Samples a second: 40, 128, 256. The times are invented.
SMALL, MIDDLE, LARGE = Option("small", 8, 0.2), Option("middle", 64, 0.5), Option("large", 512, 2.0)
LADDER = [SMALL, MIDDLE, LARGE]
QUICK = PlanOptions("gpt-2", gpus_per_node=2, global_batches=(8, 64), exact=False)


def constant(noise: float):
    return lambda seen: noise


def by_name(choices):
    return {choice.name: choice for choice in choices}


def seconds(option: Option, progress: float, noise: float) -> float:
    """Of `progress` noise-free steps at constant noise."""
    return progress * option.seconds * (1 + noise / option.batch)


@pytest.mark.parametrize("noise", [0.0, 3.0, 300.0, 1e5])
def test_constant_noise_is_one_leg_and_every_rival_is_known(noise):
    total = 100_000
    chain = predict(LADDER, constant(noise), total, switch_seconds=7.0)
    winner = best(LADDER, noise)
    assert [leg.option for leg in chain.legs] == [winner]
    steps = total / (winner.batch + noise)
    assert chain.progress[-1] == pytest.approx(steps)
    assert chain.mean_noise == pytest.approx(noise)
    assert chain.seconds == pytest.approx(seconds(winner, steps, noise))
    found = by_name(compare(chain, LADDER))
    for name, option in (
        ("chain", winner),
        ("shortest iteration", SMALL),
        ("highest throughput", LARGE),
        ("best fixed in hindsight", winner),
    ):
        assert found[name].options == (option,)
        assert found[name].seconds == pytest.approx(seconds(option, steps, noise))
        assert found[name].samples == pytest.approx(steps * (option.batch + noise))
    # Equal shares of samples s: the stages' progress, s / (B + n) each, is that of the chain.
    warm_up = found["batch warm-up by hand"]
    share = steps / sum(1 / (o.batch + noise) for o in LADDER)
    assert warm_up.options == tuple(LADDER)
    assert warm_up.samples == pytest.approx(3 * share)
    stages = sum(share / o.batch * o.seconds for o in LADDER)
    assert warm_up.seconds == pytest.approx(stages + 2 * 7.0)


def test_noise_in_proportion_to_samples_has_a_closed_form():
    # One strategy, n = s: progress is the integral of 1 / (B + s), so ln(1 + S/B), and N the
    # integral of s / (B + s), so S - B ln(1 + S/B). Noise before the first step counts as B, which
    # takes from progress what the integral has there above 1 / 2, ln 2 - 1/2.
    total = 10**6
    chain = predict([MIDDLE], lambda seen: seen, total)
    steps = math.log(1 + total / 64) - math.log(2) + 0.5
    assert chain.progress[-1] == pytest.approx(steps, rel=1e-4)  # of trapezia: h^2 / 12, h 1.4 %
    assert chain.mean_noise == pytest.approx((total - 64 * steps) / steps, rel=1e-4)


def test_growing_noise_switches_at_the_crossings_and_pays_for_each():
    total = 10**6
    law = power_law([100, total], [1.0, 2000.0])
    chain = predict(LADDER, law, total)
    assert [leg.option for leg in chain.legs] == LADDER
    ratio = total ** (1 / (WALK_POINTS - 1))
    for leg, (noise, _) in zip(chain.legs[1:], envelope(LADDER)[1:], strict=True):
        assert noise <= law(leg.begin_sample) <= noise * ratio
    # A second a switch is too little to move one.
    paid = predict(LADDER, law, total, 1.0)
    assert [leg.option for leg in paid.legs] == LADDER
    assert paid.seconds == pytest.approx(sum(leg.seconds for leg in paid.legs) + 2.0, rel=1e-9)
    assert predict(LADDER, law, total, 1e9).legs[0].option == best(LADDER, law(8))


def test_a_first_step_has_the_noise_after_it():
    # At sample 0 a power law has no noise, at sample 1 enough for the large batch.
    legs = predict(LADDER, power_law([1, 10], [1e4, 1.1e4]), 10**6, switch_seconds=5.0).legs
    assert [leg.option for leg in legs] == [LARGE]


options = st.lists(
    st.builds(Option, st.just("o"), st.integers(1, 512), st.floats(0.01, 10)), min_size=1
)


@settings(deadline=None, max_examples=60)
@given(options, st.floats(0.1, 1e3), st.floats(1, 1e3), st.integers(10**5, 10**8))
def test_no_rival_beats_a_chain_that_switches_for_nothing(choices, first, growth, total):
    noise = assumed_noise(first, first * growth, total)
    chain = predict(choices, noise.at, total)
    found = compare(chain, choices)
    # A switch comes late by a point of the walk, over which noise grows by 2.8 % at most: so long,
    # in samples, is the present option behind, by so much.
    for choice in found:
        assert choice.seconds >= chain.seconds * (1 - 1e-3), choice.name
    fixed = [choice for choice in found if len(choice.options) == 1 and choice.name != "chain"]
    hindsight = by_name(found)["best fixed in hindsight"]
    assert hindsight.seconds <= min(choice.seconds for choice in fixed) * (1 + 1e-9)
    every = [o.seconds * (1 + chain.mean_noise / o.batch) for o in fastest(choices)]
    assert hindsight.seconds == pytest.approx(chain.progress[-1] * min(every))


@settings(deadline=None, max_examples=60)
@given(options, st.floats(0.1, 1e3), st.floats(1, 1e3), st.floats(0, 100))
def test_a_chain_of_one_leg_takes_its_own_time_as_a_rival(choices, first, growth, switch_seconds):
    noise = assumed_noise(first, first * growth, 10**5)
    chain = predict(choices, noise.at, 10**5, switch_seconds)
    alone = predict([chain.legs[0].option], noise.at, 10**5)
    rival = by_name(compare(alone, [chain.legs[0].option]))["best fixed in hindsight"]
    assert rival.seconds == pytest.approx(alone.seconds)
    assert rival.samples == pytest.approx(10**5)


def test_a_warm_up_meets_noise_by_progress_and_stages_double():
    total = 10**6
    law = power_law([100, total], [1.0, 2000.0])
    between = Option("between", 96, 0.7)  # not twice the middle one
    chain = predict([*LADDER, between], law, total)
    warm_up = by_name(compare(chain, [*LADDER, between]))["batch warm-up by hand"]
    assert warm_up.options == tuple(LADDER)
    # Walked in small pieces of progress instead.
    share, made, stage, spent, noise_sum = warm_up.samples / 3, 0.0, 0, 0.0, 0.0
    for index in range(1, len(chain.progress)):
        begin, end = chain.progress[index - 1 : index + 1]
        sums = chain.noise_sum[index] - chain.noise_sum[index - 1]
        samples = LADDER[stage].batch * (end - begin) + sums
        spent += samples / LADDER[stage].batch * LADDER[stage].seconds
        made, noise_sum = made + samples, noise_sum + sums
        stage = min(int(made / share + 1e-6), 2)
    assert made == pytest.approx(warm_up.samples, rel=0.01)  # borders fall inside pieces
    assert spent == pytest.approx(warm_up.seconds, rel=0.01)
    assert "batch warm-up by hand" not in by_name(compare(chain, [MIDDLE, between]))


def write_run(folder, rounds, seq_len=16):
    folder.mkdir()
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        metrics.write("start", method="x")
        for samples, noise in rounds:
            metrics.write("round", samples=samples, tokens=samples * seq_len, noise=noise)
    return folder


def measured(value, high=math.inf):
    return {"value": value, "low": 1.0, "high": high, "source": "whole gradient"}


def test_noise_of_a_run_is_fitted_to_what_it_knew(tmp_path):
    rounds = [(10, None), (50, measured(None)), *((s, measured(3 * s**0.5)) for s in (100, 900))]
    run = write_run(tmp_path / "run", rounds)
    noise = measured_noise(run, 16)
    assert [p.samples for p in noise.points] == [100, 900]
    assert noise.points[0].high is None
    assert noise.at(10_000) == pytest.approx(300)
    assert noise.spread == pytest.approx(1.0)
    # Sequences of a quarter of the length: four times as many of them, with the same tokens.
    assert measured_noise(run, 4).at(40_000) == pytest.approx(1200)
    assert "in tokens, as its sequences have 16" in measured_noise(run, 4).source
    # One factor of 1.2 above the law and one below.
    apart = [(100, measured(30 * 1.2)), (100, measured(30 / 1.2)), (900, measured(90 * 1.2))]
    apart += [(900, measured(90 / 1.2))]
    assert measured_noise(write_run(tmp_path / "apart", apart), 16).spread == pytest.approx(1.2)


def test_a_run_that_cannot_be_fitted_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no file .*none/metrics\.jsonl; --noise-from"):
        measured_noise(tmp_path / "none", 16)
    with pytest.raises(ConfigError, match="quiet measured no noise; train it with"):
        measured_noise(write_run(tmp_path / "quiet", [(10, None)]), 16)
    with pytest.raises(ConfigError, match="short: 1 different samples"):
        measured_noise(write_run(tmp_path / "short", [(10, measured(4.0))]), 16)


@pytest.mark.parametrize(
    ("first", "last"), [(0.0, 8.0), (8.0, 4.0), (1.0, math.inf), (math.nan, 8.0)]
)
def test_assumed_noise_is_positive_finite_and_grows(first, last):
    with pytest.raises(ConfigError, match=f"noise {first:g} {last:g} must be above 0"):
        assumed_noise(first, last, 1000)


def test_assumed_noise_is_as_given():
    noise = assumed_noise(8, 512, 10**6)
    assert noise.at(10**4) == pytest.approx(8)
    assert noise.at(10**6) == pytest.approx(512)
    assert noise.at(10**5) == pytest.approx(64)  # half way by ratio


def test_endless_noise_is_refused():
    with pytest.raises(ValueError, match="noise scale inf at 8 samples must be finite"):
        predict(LADDER, constant(math.inf), 1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise": (8, 512)}, r"noise \(8, 512\) is of a chain, .*; add --chain"),
        ({"tokens": 1e9}, r"tokens 1000000000\.0 is of a chain"),
        ({"switch_seconds": 1.0}, r"switch_seconds 1\.0 is of a chain"),
        ({"chain": True}, "noise None and noise_from None: .* either --noise START END or"),
        (
            {"chain": True, "noise": (1, 2), "noise_from": "x"},
            r"noise \(1, 2\) and noise_from x: ",
        ),
        ({"chain": True, "noise": (1, 2), "tokens": 9e3}, "tokens 9000 must .* 65,536, a step"),
        ({"chain": True, "noise": (1, 2), "switch_seconds": -1.0}, r"switch_seconds -1\.0 must"),
        ({"chain": True, "noise": (2, 1)}, "noise 2 1 must be above 0"),
    ],
)
def test_options_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        run_plan(replace(QUICK, **changes))


def test_json_and_picture_hold_the_chain(tmp_path, capsys):
    path = tmp_path / "plan.json"
    ask = ["--chain", "--tokens", "1e8", "--noise", "1", "4000", "--switch-seconds", "0"]
    quick = ["--gpus-per-node", "2", "--global-batches", "8", "64", "--no-exact"]
    files = [
        "--json",
        str(path),
        "--out",
        str(tmp_path),
        "--chain-file",
        str(tmp_path / "legs.json"),
    ]
    assert main(["plan", "gpt-2", *quick, *ask, *files]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("predicted", "A prediction", "assumed, 1 at 1% of the run", "hindsight"):
        assert part in text
    content = json.loads(path.read_text())
    chain = content["chain"]
    speeds = {row["strategy"]: row["step_seconds"] for row in content["candidates"]}
    legs, choices = chain["legs"], {choice["name"]: choice for choice in chain["choices"]}
    assert [leg["batch"] for leg in legs] == [8, 64]
    assert legs[0]["begin_tokens"] == 0
    assert legs[-1]["end_tokens"] == chain["total_tokens"] == math.ceil(1e8 / 1024) * 1024
    to_train_by = [(leg.tokens, leg.strategy) for leg in read_chain(tmp_path / "legs.json")]
    assert to_train_by == [(leg["begin_tokens"], leg["strategy"]) for leg in legs]
    for leg in legs:
        assert leg["step_seconds"] == speeds[leg["strategy"]]
        tokens = leg["end_tokens"] - leg["begin_tokens"]
        steps = tokens / 1024 / leg["batch"]
        assert leg["leg_seconds"] == pytest.approx(steps * leg["step_seconds"])
    assert sum(leg["leg_seconds"] for leg in legs) == pytest.approx(choices["chain"]["seconds"])
    assert choices["chain"]["ratio"] == 1
    assert all(choice["ratio"] > 0.99 for choice in choices.values())
    assert (tmp_path / "chain.png").stat().st_size > 10_000


def test_without_a_chain_there_is_none(tmp_path):
    run_plan(replace(QUICK, json=tmp_path / "plan.json"))
    assert "chain" not in json.loads((tmp_path / "plan.json").read_text())


def test_noise_of_a_run_is_shown_with_its_intervals(tmp_path, capsys):
    rounds = [(s, measured(0.5 * s**0.5, high=s)) for s in (100, 400, 1600)]
    run = write_run(tmp_path / "run", rounds, seq_len=1024)
    run_plan(replace(QUICK, chain=True, noise_from=run, tokens=1e8))
    text = " ".join(capsys.readouterr().out.split())
    for part in ("1.6M tokens 20 1-1,600 20", "fitted to 3 rounds", "factor of 1.00"):
        assert part in text
    assert "extrapolated from 1.6M tokens on" in text


def test_a_picture_shows_batches_over_tokens(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    law = power_law([100, 10**6], [1.0, 2000.0])
    chain = predict(LADDER, law, 10**6)
    plot_chain(chain, Noise(law, "assumed"), 16, "title", tmp_path / "chain.png")
    axes = drawn[0].axes[0]
    tokens, batches = axes.lines[0].get_data()
    assert list(batches) == [8, 8, 64, 512]
    assert list(tokens[1:]) == [leg.end_sample * 16 for leg in chain.legs]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
