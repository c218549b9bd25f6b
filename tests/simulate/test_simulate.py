# SPDX-License-Identifier: Apache-2.0
"""Simulated rounds agree with the modelled clock, account for every second, and scale by rule."""

import io
import json

import pytest
from rich.console import Console

from geojax.cli import main
from geojax.config import ConfigError, steps_ahead
from geojax.configs import METHODS, demo, load_config
from geojax.geomesh.balance import Plan, SliceWork, make_plan
from geojax.geomesh.clock import (
    Happened,
    ModelledClock,
    modelled_exchange_seconds,
    modelled_profiles,
    traffic,
)
from geojax.simulate.command import simulate
from geojax.simulate.outcome import outcome
from geojax.simulate.rounds import run_rounds
from geojax.simulate.scaling import print_scaling, scaling, scaling_content
from geojax.simulate.setting import make_setting, with_modelled_clock
from geojax.simulate.speeds import Change, Speeds, parse_change

STEADY = Speeds(["a", "b"], ())
PLAN = Plan((SliceWork("a", 1, 4, 1.0), SliceWork("b", 1, 2, 3.0)))  # 4 and 6 seconds


@pytest.mark.parametrize("method", METHODS)
def test_without_jitter_and_changes_a_round_takes_what_the_modelled_clock_says(method):
    config = METHODS[method](demo())
    rounds = simulate(make_setting(config), rounds=5)
    seconds = modelled_exchange_seconds(config, traffic(config).payload_bytes)
    plan = make_plan(modelled_profiles(config), config.balance, seconds)
    zeros = [0] * 4
    nothing = Happened([0.0] * 4, 0.0, 0.0, 0.0, zeros, zeros, zeros)
    expected = ModelledClock(seconds).round(plan, nothing)
    assert rounds[-1].end == pytest.approx(5 * expected.total, rel=1e-9)
    for found in rounds:
        assert found.plan == plan
        assert found.compute == pytest.approx(expected.compute, rel=1e-9)
        assert found.straggler == pytest.approx(expected.straggler, abs=1e-9)
        assert found.wan == pytest.approx([expected.wan] * 4, rel=1e-9)


@pytest.mark.parametrize("overlap", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("replan", [False, True])
def test_every_second_of_every_slice_is_accounted_for(overlap, replan):
    setting = make_setting(METHODS["geomesh"](demo()), "auto", 6, jitter_seconds=0.05)
    names = [w.name for w in setting.plan.work]
    changes = [
        Change(names[0], 20.0, 0.5),
        Change(names[3], 31.0, 2.0),
        Change(names[0], 60.0, 1.0),
    ]
    rounds = simulate(setting, changes, overlap, replan, 15)
    for i in range(6):
        spent = [part for r in rounds for part in (r.compute[i], r.straggler[i], r.wan[i])]
        assert min(spent) >= 0
        assert sum(spent) == pytest.approx(rounds[-1].end, rel=1e-9)


@pytest.mark.parametrize("overlap", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("method", ["geomesh", "diloco"])
def test_an_overlapped_run_takes_what_the_modelled_clock_says(method, overlap):
    """That of a run that is trained, whose rounds begin and end for all slices at once."""
    config = METHODS[method](demo())
    found = simulate(make_setting(config), overlap=overlap, rounds=6)
    seconds = modelled_exchange_seconds(config, traffic(config).payload_bytes)
    plan = make_plan(modelled_profiles(config), config.balance, seconds)
    steps = [steps_ahead(overlap, w.inner_steps) for w in plan.work]
    times, late, behind = [], [0.0] * 4, [0] * 4
    for number in range(6):
        ahead = steps if number < 5 else [0] * 4
        happened = Happened([0.0] * 4, 0.0, 0.0, 0.0, behind, ahead, late)
        times.append(ModelledClock(seconds).round(plan, happened))
        late, behind = times[-1].late, ahead
    assert found[-1].end == pytest.approx(sum(t.total for t in times), rel=1e-9)
    for i in range(4):
        waits = sum(t.straggler[i] + t.wan for t in times)
        assert sum(r.straggler[i] + r.wan[i] for r in found) == pytest.approx(waits, abs=1e-6)


def test_an_overlapped_exchange_costs_what_the_next_rounds_steps_do_not_cover():
    for took, period in ((2.0, 6.0), (6.0, 6.0), (9.0, 9.0)):
        rounds = run_rounds(PLAN, 3 * PLAN.sequences, lambda _, s=took: s, STEADY, overlap=1.0)
        # The first round's steps, a period for each exchange but the last, and that one's end.
        assert rounds[-1].end == pytest.approx(6 + 2 * period + took)
        assert rounds[-1].wan == pytest.approx([took + max(0, took - 6)] * 2)
    alone = run_rounds(PLAN, 3 * PLAN.sequences, lambda _: 2.0, STEADY)
    assert alone[-1].end == pytest.approx(3 * (6 + 2))


def test_a_speed_that_changes_inside_a_round_counts_for_the_rest_of_it():
    speeds = Speeds(["a", "b"], [Change("b", 3.0, 0.5), Change("b", 7.0, 3.0)])
    assert speeds.end(0, 2.0, 5.0) == 7.0
    assert speeds.end(1, 0.0, 2.0) == 2.0
    # 3 s of work until 3, 2 s until 7, and 3 s more in one.
    assert speeds.end(1, 0.0, 8.0) == pytest.approx(8.0)
    (first, second) = run_rounds(PLAN, 2 * PLAN.sequences, lambda _: 0.0, speeds)
    assert first.compute == pytest.approx([4.0, 3 + 4 + 1 / 3])
    assert second.compute == pytest.approx([4.0, 2.0])


def test_a_throttled_slice_idles_the_others_for_good_unless_the_plan_follows():
    setting = make_setting(METHODS["geomesh"](demo()))
    slowest = setting.plan.work[0].name
    for at in (31.0, 34.0, 37.0):  # at any place of a round
        kept, followed = (
            simulate(setting, [Change(slowest, at, 0.5)], 0.0, replan, 12)
            for replan in (False, True)
        )
        hit = next(i for i, r in enumerate(kept) if r.straggler_idle > 0.05)
        assert all(r.straggler_idle > 0.45 for r in kept[hit + 1 :])
        assert all(r.straggler_idle < 0.05 for r in followed[hit + 3 :])


def test_slices_are_multiplied_by_the_rule():
    setting = make_setting(METHODS["geomesh"](demo()), "auto", 10, ["eastus", "westeurope"])
    assert setting.network.regions == ("eastus", "westeurope") * 5
    own = make_setting(METHODS["geomesh"](demo())).plan.work
    assert [(w.batch, w.inner_steps) for w in setting.plan.work] == [
        (own[i % 4].batch, own[i % 4].inner_steps) for i in range(10)
    ]
    assert len({w.name for w in setting.plan.work}) == 10
    # As many tokens take fewer rounds.
    assert outcome(setting, simulate(setting), 0.0).rounds < 57 / 2


def test_auto_takes_the_fastest_and_scaling_shows_where_it_changes():
    config = METHODS["geomesh"](demo())
    rows, changes = scaling(config, counts=(2, 8, 32))
    assert [(c.slices, c.after) for c in changes] == [(3, "two_phase"), (5, "hub")]
    for count in (2, 8, 32):
        of = [r for r in rows if r.slices == count]
        chosen = make_setting(config, "auto", count)
        best = min(of, key=lambda r: r.exchange_seconds)
        assert chosen.pattern == best.pattern == next(r.pattern for r in of if r.fastest)
        assert outcome(chosen, simulate(chosen, rounds=2), 0.0).round_seconds == pytest.approx(
            best.round_seconds
        )
    text = io.StringIO()
    print_scaling(scaling_content(rows, changes, config), Console(file=text, width=80))
    assert "From 5 slices on, hub takes over from two_phase." in text.getvalue()
    assert max(map(len, text.getvalue().splitlines())) <= 80


def test_fewer_rounds_stand_for_the_whole_budget():
    setting = make_setting(METHODS["diloco"](demo()))
    some, whole = (outcome(setting, simulate(setting, rounds=n), 0.0) for n in (3, None))
    assert some.rounds == whole.rounds
    assert some.hours == pytest.approx(whole.hours, rel=1e-9)


def test_the_command_writes_its_figures(tmp_path, capsys):
    path = tmp_path / "figures.json"
    arguments = ["demo-geomesh", "--slices", "8", "--exchange", "hub", "--overlap", "--replan"]
    arguments += ["--changes", "h100-0@30=0.5", "--rounds", "9", "--json", str(path)]
    assert main(["simulate", *arguments]) == 0
    content = json.loads(path.read_text())
    assert content["clock"] == "modelled"
    assert [r["variant"] for r in content["results"]] == [
        "as it is",
        "re-planned",
        "overlapped",
        "both",
    ]
    assert all(r["pattern"] == "hub" and r["slices"] == 8 for r in content["results"])
    assert len(content["straggler_idle_by_round"]["both"]) == 9
    assert "nothing was trained" in capsys.readouterr().out


def test_a_measured_config_wants_its_gpus_named():
    config = load_config("geomesh-150m")
    with pytest.raises(ConfigError, match="name their GPUs"):
        with_modelled_clock(config, None, (), ())
    modelled = with_modelled_clock(config, None, ("h100", "l40s"), ())
    assert [s.gpu for s in modelled.slices] == ["h100", "l40s", "h100", "l40s"]
    assert modelled.clock.wan == "azure-constrained"
    assert make_setting(modelled).slices == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("b", "is not SLICE@SECONDS=FACTOR, such as a@3600=0.5"),
        ("c@1=1", "no slice 'c'"),
        ("a@x=1", "above 0"),
        ("a@-1=1", "at least 0"),
        ("a@1=0", "above 0"),
    ],
)
def test_changes_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_change(change, ["a", "b"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slices": 1}, "must lie in 2..256"),
        ({"slices": 257}, "must lie in 2..256"),
        ({"loss": 1.5}, "a share, not a percentage"),
        ({"jitter_seconds": -1.0}, "jitter -1.0 seconds"),
        ({"regions": ["eastus", "mars"]}, "no region 'mars'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_setting(METHODS["geomesh"](demo()), **settings)


def test_a_run_without_slices_or_with_cona_has_nothing_to_simulate():
    with pytest.raises(ConfigError, match="this run has none"):
        with_modelled_clock(load_config("gpt-tiny"), None, (), ())
    with pytest.raises(ConfigError, match="--wan nowhere: no WAN named"):
        with_modelled_clock(METHODS["geomesh"](demo()), "nowhere", (), ())
    assert main(["simulate", "demo-diloco", "--replan"]) == 2
    for given in ("--scaling", "--overlap", "--replan"):
        assert main(["simulate", "demo-halos", given]) == 2
