# SPDX-License-Identifier: Apache-2.0
"""The experiment on CONA: what is made of curves, and that its parts go on where they were."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from made_run import figures
from made_text import write_words
from rich.console import Console

from geojax.bench import cona as experiment
from geojax.bench import cona_greedy, cona_outcome
from geojax.bench.cona import cost_table, pilot_table, run_cona
from geojax.bench.cona_curves import (
    Curve,
    best_fixed,
    crossed_at,
    fixed_curve,
    hindsight,
    loss_at,
    noise_curve,
    over_oracle,
    seconds_to,
    targets,
    tokens_for_equal_loss,
    vertex,
)
from geojax.bench.cona_methods import (
    TUNE_SHARE,
    Setting,
    by_goodput,
    by_hand,
    by_option,
    by_prediction,
    next_rates,
    predicted_legs,
    setting,
    tune_config,
    tuned,
    with_decay,
)
from geojax.bench.cona_outcome import EARLY, SHARES, Look, as_taken, outcome
from geojax.bench.cona_report import report
from geojax.bench.cona_tables import DEMANDS, fixed_table
from geojax.bench.jobs import run_here
from geojax.cona.score import Option
from geojax.config import ChainLeg, ConfigError, DataConfig, SourceConfig, TokenizerConfig
from geojax.configs.cona import REAL_SWITCH_SECONDS, REAL_TOKENS_PER_PARAMETER, cona_bench
from geojax.meshes.strategy import parse_strategy
from geojax.models.config import get_model
from geojax.runs import save_config
from geojax.track.metrics import MetricsWriter
from geojax.track.summary import load_run
from geojax.train.programs import Programs
from geojax.train.steering import candidates

QUIET = Console(quiet=True)
SEQ_LEN, TOTAL, ROUNDS = 10, 64_000, 40
FAST = Option("dp2-tp4-pp1-mb2-gb4", 4, 0.5)
SLOW = Option("dp8-tp1-pp1-mb2-gb16", 16, 1.625)
LINE = Curve("line", (0.0, 10.0, 20.0, 30.0), (0, 1, 2, 3), (6.0, 4.0, 3.0, 3.5))


def test_a_target_is_first_reached_between_two_evaluations():
    assert seconds_to(LINE, 5.0) == 5.0
    assert seconds_to(LINE, 3.25) == 17.5  # and not later, where the loss rises through it
    assert seconds_to(LINE, 2.9) is None
    assert seconds_to(LINE, 7.0) == 0.0


def test_a_run_that_has_ended_keeps_its_result():
    assert loss_at(LINE, 15.0) == 3.5
    assert loss_at(LINE, 99.0) == 3.5
    assert targets(LINE, (0.5, 2 / 3, 1.0)) == [3.5, 3.0, 3.0]


def test_the_best_fixed_strategy_is_the_first_there():
    late = Curve("late", (0.0, 40.0), (0, 1), (6.0, 2.0))
    assert best_fixed([LINE, late], 3.5).name == "line"
    assert best_fixed([LINE, late], 2.5).name == "late"
    assert best_fixed([LINE, late], 1.0) is None
    assert hindsight([LINE, late], 1.0).name == "late"


def test_the_oracle_is_the_better_of_its_parts_at_every_moment():
    own = Curve("own", (0.0, 1.0, 10.0, 20.0), (0, 1, 2, 3), (6.0, 9.0, 4.2, 3.1))
    other = Curve("other", (0.0, 20.0), (0, 1), (6.0, 2.9))  # 4.45 at 10 s
    found = over_oracle(own, [LINE, other], 0.1)
    assert found == pytest.approx([math.exp(4.2 - 4.0) - 1, math.exp(3.1 - 2.9) - 1])


def test_the_vertex_lies_between_rates_that_were_tried():
    losses = {math.exp(x): (x + 5.3) ** 2 for x in (-6.0, -5.0, -4.0)}
    assert math.log(vertex(losses)) == pytest.approx(-5.3)
    assert vertex({1e-3: 1.0, 2e-3: 2.0}) == 1e-3


def test_tokens_to_one_loss_are_measured_and_said_by_the_noise():
    losses = {4: 3.0, 16: 3.1, 64: 2.9}
    found = tokens_for_equal_loss(losses, 0.2, lambda _: 48.0, 1000)
    assert found[4] == (1.0, 1.0)
    assert found[16] == pytest.approx((math.exp(0.5), 64 / 52))
    assert found[64] == pytest.approx((math.exp(-0.5), 112 / 52))
    # Half of the run at a noise of 0, half at one without end: the second half is worth nothing.
    halves = tokens_for_equal_loss(losses, 0.2, lambda s: 0.0 if s <= 500 else 1e12, 1000)
    assert halves[16][1] == pytest.approx(4)


@pytest.fixture(scope="module")
def base() -> Setting:
    """Two strategies that cross at a noise of 48."""
    config = cona_bench("gpt-tiny")
    config = replace(
        config,
        train=replace(config.train, total_tokens=TOTAL),
        data=replace(config.data, seq_len=SEQ_LEN),
    )
    return tuned(Setting("gpt", config, (FAST, SLOW)), {16: 5e-3})


def test_the_search_goes_on_while_the_best_rate_is_at_an_end(base):
    first = next_rates(base, 4, {})
    assert first == pytest.approx([1.25e-3, 2.5e-3, 5e-3])  # around the root of the batch
    falling = dict(zip(first, (3.0, 2.0, 1.0), strict=True))
    assert next_rates(base, 4, falling) == pytest.approx([1e-2])
    rising = dict(zip(first, (1.0, 2.0, 3.0), strict=True))
    assert next_rates(base, 4, rising) == pytest.approx([6.25e-4])
    assert next_rates(base, 4, dict(zip(first, (2.0, 1.0, 2.0), strict=True))) == []


def test_rates_are_tuned_on_sequences_that_no_figure_is_of(base):
    shown, tried = base.config.eval, tune_config(base, 4, 1e-3).eval
    assert tried.first >= shown.first + shown.sequences


@pytest.mark.parametrize("name", ["gpt", "bert", "llama"])
def test_settings_of_the_experiment(name):
    real = setting(name)
    assert len(real.options) == 7 == len(real.config.cona.global_batches)
    assert len(real.line) >= 4
    dp = by_goodput(real, 1)
    assert dp.seed == dp.data.seed == 1
    rest = {**vars(dp), "cona": None, "name": "", "seed": 0, "data": None}
    assert rest == {**vars(real.config), "cona": None, "name": "", "seed": 0, "data": None}
    stages = [parse_strategy(leg.strategy).global_batch for leg in by_hand(real, 0).chain]
    assert stages[0] == real.options[0].batch
    assert all(b >= 2 * a for a, b in pairwise(stages))
    # A switch takes the share of this run that it takes of the real one.
    config = real.config
    clock, model = config.clock, get_model(config.clock.model)
    share = config.train.total_tokens / config.data.seq_len * clock.seq_len
    share /= REAL_TOKENS_PER_PARAMETER * model.num_params
    assert clock.switch_seconds == pytest.approx(REAL_SWITCH_SECONDS * share)


def test_dp_alone_is_chosen_from_where_it_is_asked_for():
    config = by_goodput(setting("gpt"), 0)
    found = [c.strategy for c in candidates(config, ())]
    assert {(s.tp, s.pp) for s in found} == {(1, 1)}
    assert {s.global_batch for s in found} == {8, 16, 24, 32, 64, 128}  # not 4, on eight devices
    assert config.cona
    small = replace(config, cona=replace(config.cona, global_batches=(4,)))
    with pytest.raises(ConfigError, match=r"cona.layouts 'dp': no strategy .* batches \[4\]"):
        candidates(small, ())


def noise_at(samples: float) -> float:
    """Comes up to the crossing at 48 after a tenth of the run."""
    return 480 * samples * SEQ_LEN / TOTAL


def loss_after(tokens: float, penalty: float) -> float:
    return 3 + 3 / (1 + tokens / 4000) + penalty


def write_run(folder: Path, base: Setting, options, penalty=0.0, trial=None, ended=True):
    """A run of ROUNDS of equal tokens by `options` in equal parts, one round of `trial` at its
    middle; switches cost nothing."""
    folder.mkdir(parents=True)
    save_config(base.config, folder / "config.json")
    seconds, before = 0.0, None
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        about = {"machine": "made up", "versions": {}, "cona": None, "scaling": None}
        metrics.write("start", method="cona", seed=0, clock="modelled", **about)
        for number in range(ROUNDS + 1):
            tokens = number * TOTAL // ROUNDS
            samples = tokens // SEQ_LEN
            if number:
                by = options[(number - 1) * len(options) // ROUNDS]
                by = trial if trial and number == ROUNDS // 4 else by
                if before not in (None, by):
                    places = {"from": before.name, "to": by.name}
                    why = {"decision": "switch", "why": "it pays", "switch_seconds": 0.0}
                    metrics.write("switch", round=number - 1, **places, **why)
                before, took = by, TOTAL / ROUNDS / SEQ_LEN / by.batch * by.seconds
                seconds += took
                parts = {"straggler_seconds": 0.0, "wan_seconds": 0.0, "outer_seconds": 0.0}
                metrics.write(
                    "slice",
                    round=number,
                    slice="all",
                    batch=by.batch,
                    compute_seconds=took,
                    **parts,
                )
                value = noise_at(samples)
                noise = {"value": value, "low": value / 2, "high": value * 2, "source": ""}
                at = {"tokens": tokens, "samples": samples, "seconds": seconds}
                metrics.write(
                    "round", round=number, round_seconds=took, strategy=by.name, noise=noise, **at
                )
            loss = loss_after(tokens, penalty)
            at = {"tokens": tokens, "seconds": seconds, "perplexity": math.exp(loss)}
            metrics.write("eval", round=number, loss=loss, **at)
        if ended:
            metrics.write("end", round=ROUNDS, seconds=seconds)
    return load_run(folder)


def test_one_curve_is_that_of_every_strategy_of_its_batch(base, tmp_path):
    run = write_run(tmp_path / "gb16", base, [SLOW])
    assert fixed_curve(run, SLOW, SEQ_LEN).end == pytest.approx(run.seconds)
    twice = fixed_curve(run, replace(SLOW, seconds=2 * SLOW.seconds), SEQ_LEN)
    assert twice.end == pytest.approx(2 * run.seconds)
    assert twice.losses == tuple(e["loss"] for e in run.evals)


def test_noise_that_was_never_known_is_said(base, tmp_path):
    run = write_run(tmp_path / "gb16", base, [SLOW])
    unknown = replace(run, rounds=tuple(r | {"noise": None} for r in run.rounds))
    with pytest.raises(ConfigError, match=r"the noise of .*gb16 was never known; give it more"):
        noise_curve(unknown)


def test_noise_between_measurements(base, tmp_path):
    noise = noise_curve(write_run(tmp_path / "gb16", base, [SLOW]))
    for share in (0.1, 0.5, 1.0):
        samples = share * TOTAL / SEQ_LEN
        assert noise(samples) == pytest.approx(noise_at(samples), rel=0.1)
    assert crossed_at(noise, 48, TOTAL // SEQ_LEN) == pytest.approx(0.1, rel=0.1)
    assert crossed_at(noise, 1e4, TOTAL // SEQ_LEN) is None
    legs = predicted_legs(base, noise)
    assert [leg.option for leg in legs] == [FAST, SLOW]
    chain = by_prediction(base, legs, 0).chain
    assert chain[0] == ChainLeg(0, FAST.name)
    assert chain[1].tokens == pytest.approx(TOTAL / 10, rel=0.1)


def greedy_checkpoint(folder: Path, evals):
    """What an oracle that has ended leaves, without its state."""
    from geojax.config import CheckpointConfig
    from geojax.train.checkpoint import Checkpoints

    place = cona_greedy.Place(FAST.name, 0, 0.0, evals, True)
    with Checkpoints(folder / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save({"state": {"x": 0.0}}, {"place": place._asdict()})


def all_runs(base, folder):
    third = replace(FAST, name="dp1-tp8-pp1-mb4-gb4")
    write_run(folder / "cona", base, [FAST, SLOW, SLOW, SLOW], trial=third)
    write_run(folder / "gb4", base, [FAST])
    write_run(folder / "gb16", base, [SLOW], penalty=0.05)
    write_run(folder / "warm-up", base, [FAST, SLOW])
    write_run(folder / "goodput-dp", base, [SLOW], penalty=0.01)
    write_run(folder / "predicted", base, [SLOW, SLOW])
    evals = load_run(folder / "predicted").evals
    greedy_checkpoint(folder / "greedy", [dict(e, loss=e["loss"] - 0.1) for e in evals])
    for name, penalty in (("gb4-rate0.001", 0.2), ("gb4-rate0.002", 0.9), ("gb16-rate0.002", 0.3)):
        write_run(folder.parent / "tune" / name, base, [FAST], penalty=penalty)


def test_an_outcome_is_what_its_runs_came_to(base, tmp_path):
    all_runs(base, tmp_path / "seed0")
    whole_outcome = outcome(base, tmp_path / "seed0", 0)
    found = whole_outcome.figures
    assert found.missing == []
    # A quarter of the tokens by the first, the rest by the second.
    whole = TOTAL / SEQ_LEN * (0.25 * 0.5 / 4 + 0.75 * 1.625 / 16)
    assert whole_outcome.cona.seconds == pytest.approx(whole, rel=0.05)
    assert {r.ratio for r in found.ratios["CONA"]} == {1.0}
    last = found.ratios["shortest iteration"][-1]
    assert last.reached
    assert last.ratio == pytest.approx(TOTAL / SEQ_LEN / 8 / whole, rel=0.05)
    assert not found.ratios["highest throughput"][-1].reached  # its loss stays above
    assert found.ratios["best fixed, each target"][-1] == last
    # The greedy run is a tenth of a nat below the predicted chain, which is ahead of CONA.
    assert found.oracle == "greedy oracle"
    assert min(found.over_oracle) >= math.exp(0.1) - 1 - 1e-9
    assert all(a >= o for a, o in zip(found.over_all, found.over_oracle, strict=True))
    assert found.switches == 1
    assert found.trials == 1
    by_batch = {change.batch: change for change in found.changes}
    assert by_batch[16].crossing == 48
    assert by_batch[16].taken == pytest.approx(0.25)
    assert by_batch[16].predicted == pytest.approx(0.1, rel=0.1)
    assert by_batch[16].noise[0] == pytest.approx(noise_at(0.25 * TOTAL / SEQ_LEN))
    assert by_batch[16].why == "it pays"
    assert by_batch[16].differs.startswith("later: CONA did not know")  # it wrote no decision down
    assert by_batch[4].differs == ""
    # 4 ends 0.05 below 16, and e times as many tokens as the search's lower its loss by `slope`.
    slope = 0.2 / math.log(1 / TUNE_SHARE)
    for equal, apart in ((found.equal_loss, 0.05), (found.equal_loss_shorter, 0.1)):
        assert equal["4"] == (1.0, 1.0)
        assert equal["16"][0] == pytest.approx(math.exp(apart / slope))
        assert equal["16"][1] > 1
    assert found.equal_loss_shorter["16"][1] > found.equal_loss["16"][1]  # less noise
    unknown = fixed_table([replace(found, equal_loss={})], {})
    assert list(unknown.columns[3].cells) == ["-", "-"]
    assert next(iter(unknown.columns[5].cells)) == "1.00"
    worst = {d.text: d.worst([found]) for d in DEMANDS}
    assert worst["switches after 5 %"] == 1
    assert worst["share of the run spent on switching"] == 0


@pytest.mark.parametrize(
    ("taken", "looks", "said"),
    [
        (0.12, [], ""),
        (0.05, [], "earlier: it pays"),
        (0.4, [(0.2, 0.9), (0.5, 1.2)], "later: it scored no more than what was in force"),
        (0.4, [(0.2, 1.2), (0.3, 1.1)], "later: at 30% of the tokens it scored 1.10 times as much"),
        (None, [(0.05, 1.2)], "not taken: CONA did not know the noise yet"),
        (None, [(0.2, 0.9), (0.9, 1.3)], "not taken: at 90% of the tokens it scored 1.30 times"),
    ],
)
def test_why_chains_differ_is_what_the_run_wrote_down(taken, looks, said):
    found = as_taken(0.1, taken, "it pays", [Look(at, x, x / 2, "too dear") for at, x in looks])
    assert found.startswith(said) if said else found == ""
    assert ("too dear" in found) == ("times as much" in found)


def test_a_report_is_of_whatever_has_ended(base, tmp_path, capsys):
    assert outcome(base, tmp_path / "gpt" / "seed0", 0) is None
    all_runs(base, tmp_path / "gpt" / "seed0")
    write_run(tmp_path / "gpt" / "seed1" / "cona", base, [SLOW])
    write_run(tmp_path / "gpt" / "seed1" / "gb4", base, [FAST], ended=False)
    report(tmp_path, [base], (0, 1, 2), None, Console(width=120))
    said = capsys.readouterr().out
    for name in ("seed 1, gb4", "seed 1, greedy", "seed 2, all"):
        assert f"missing: {name}" in said
    assert "missing: seed 0" not in said
    fixed = said[said.index("fixed batches") :].splitlines()
    finals = {4: load_run(tmp_path / "gpt" / "seed0" / "gb4").final_perplexity}
    row = ["4", "0.005", f"{finals[4]:.2f}", *["1.00"] * 4]
    assert any(line.split() == row for line in fixed)
    content = figures(tmp_path / "report.json")
    assert [r["seed"] for r in content["results"]] == [0, 1]
    assert len(content["results"][0]["ratios"]["shortest iteration"]) == len(SHARES)
    assert "shortest iteration" not in content["results"][1]["ratios"]
    assert (tmp_path / "gpt-perplexity.png").stat().st_size > 1000
    assert (tmp_path / "gpt-chain.png").stat().st_size > 1000


def test_what_is_asked_for_without_anything_to_do(tmp_path):
    with pytest.raises(ConfigError, match="no model 'rnn' in the experiment; use"):
        run_cona(tmp_path, 1, ("rnn",), (0,), None)
    with pytest.raises(ConfigError, match=r"seeds \[0, 0\] must be at least 0, each once"):
        run_cona(tmp_path, 1, ("gpt",), (0, 0), None)
    assert 0 < EARLY < SHARES[0]


@pytest.mark.parametrize(("decay", "end"), [("cosine", 0.1), ("constant", 1.0), ("linear", 0.1)])
def test_the_rate_decays_as_is_asked_for_in_every_run(decay, end):
    base = with_decay(setting("gpt"), decay)
    rates = tuned(base, {o.batch: 1e-3 for o in base.options})
    for config in (base.config, by_option(rates, base.options[0], 0), by_hand(rates, 0)):
        schedule = config.train.schedule
        assert (schedule.decay, schedule.final_fraction) == (decay, end)
        assert schedule.warmup_fraction == setting("gpt").config.train.schedule.warmup_fraction


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    return write_words(tmp_path_factory.mktemp("text"))


@pytest.fixture
def tiny(words, monkeypatch) -> Setting:
    """Some dozens of steps of a model of one layer, timed as the real one's."""
    monkeypatch.setenv("GEOJAX_CACHE", str(words.parent / "cache"))
    config = cona_bench("gpt-tiny")
    source = SourceConfig(kind="files", paths=(str(words),))
    small = replace(config.model, vocab_size=258, dim=16, heads=2, kv_heads=2, layers=1, mlp_dim=32)
    config = replace(
        config,
        model=small,
        data=DataConfig(source, TokenizerConfig(vocab_size=257), seq_len=16, valid_fraction=0.2),
        train=replace(config.train, total_tokens=8_000, round_steps=4),
        cona=replace(config.cona, global_batches=(4, 8), micro_batches=(1, 2)),
        noise=replace(config.noise, first_steps=3),
        eval=replace(config.eval, every_tokens=0, sequences=16, batch=16),
    )
    return tuned(setting("gpt", config), {8: 5e-3})


@pytest.fixture
def compiled_once(monkeypatch):
    """Programs serve all engines of a test: compiling is most of its time."""
    made, compiling = {}, Programs._compile

    def once(self, strategy):
        if strategy not in made:
            made[strategy] = compiling(self, strategy)
        return made[strategy]

    monkeypatch.setattr(Programs, "_compile", once)


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.full
def test_an_interrupted_oracle_comes_to_the_same_end(tiny, tmp_path, monkeypatch):
    line = [option for _, option in tiny.line]
    until = 12.0  # seconds; it ends with them, or with the tokens

    def run(folder):
        return cona_greedy.run_greedy(tiny.config, folder, line, until, 3, QUIET)

    whole = run(tmp_path / "whole")
    assert len(whole) > 2
    assert [e["loss"] for e in whole] == sorted((e["loss"] for e in whole), reverse=True)
    for e in whole[1:]:
        assert e["loss"] == min(e["tried"].values())
    assert len(whole[1]["tried"]) == len(line)
    assert all(abs(e["seconds"] - i * until / 3) < 1 for i, e in enumerate(whole[:-1]))

    interval, taken = cona_greedy._Oracle.interval, []

    def killed(self, place, width):
        if len(taken) == 1:
            raise KeyboardInterrupt
        taken.append(place)
        return interval(self, place, width)

    monkeypatch.setattr(cona_greedy._Oracle, "interval", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut")
    monkeypatch.setattr(cona_greedy._Oracle, "interval", interval)
    assert run(tmp_path / "cut") == whole
    assert run(tmp_path / "cut") == whole  # and an end is an end


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.full
def test_the_experiment_goes_on_where_it_was_and_comes_to_the_same_report(
    tiny, tmp_path, monkeypatch, capsys
):
    # Not tuned yet, and dp can be by eight devices at the larger batch only.
    base = tiny._replace(config=replace(tiny.config, scaling=cona_bench("gpt-tiny").scaling))
    monkeypatch.setattr(experiment, "setting", lambda name: base)
    monkeypatch.setattr(experiment, "INTERVALS", 3)
    monkeypatch.setattr(experiment, "stay_on_one_core", lambda: None)
    for module in (experiment, cona_outcome):  # so short a run does not know its noise
        monkeypatch.setattr(module, "noise_curve", lambda run: lambda samples: 1 + samples)

    def report_of(folder):
        run_cona(folder, 1, ("gpt",), (0,), None)
        content = json.loads((folder / "report.json").read_text())
        return content["results"], content["rates"]

    whole = report_of(tmp_path / "whole")
    said = capsys.readouterr().out
    assert "missing" not in said
    assert len(whole[0][0]["fixed_final_perplexity"]) == len(base.options)
    train, started = experiment._train, []

    def killed(configs, jobs, console):
        started.append(configs)
        if len(started) == 4:
            raise KeyboardInterrupt
        train(configs, jobs, console)

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "_train", killed)
        with pytest.raises(KeyboardInterrupt):
            report_of(tmp_path / "cut")
    there = {p: p.stat().st_mtime_ns for p in (tmp_path / "cut").rglob("metrics.jsonl")}
    assert there
    assert report_of(tmp_path / "cut") == whole
    assert all(p.stat().st_mtime_ns == before for p, before in there.items())


@pytest.mark.full
def test_a_fixed_branch_is_the_run_by_that_strategy(tiny, tmp_path):
    option = tiny.options[-1]
    config = replace(tiny.config, cona=None, strategy=option.name)
    run_here({tmp_path / "run": config}, QUIET)
    run = load_run(tmp_path / "run")
    evals = cona_greedy.run_greedy(
        tiny.config, tmp_path / "greedy", [option], run.seconds, 2, QUIET
    )
    assert evals[-1]["tokens"] == run.evals[-1]["tokens"]
    assert evals[-1]["seconds"] == pytest.approx(run.seconds)
    assert evals[-1]["loss"] == pytest.approx(run.evals[-1]["loss"], rel=1e-5)


def test_costs_and_crossings_are_said(base, tmp_path, capsys):
    write_run(tmp_path / "gb16", base, [SLOW])
    console = Console(width=120)
    console.print(cost_table([base], 3))
    console.print(pilot_table(base, tmp_path / "gb16"))
    said = capsys.readouterr().out
    assert "greedy oracle" in said
    assert SLOW.name in said
