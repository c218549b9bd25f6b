# SPDX-License-Identifier: Apache-2.0
"""CONA over whole runs, simulated: known noise and known step times, no model and no devices."""

import json
import math

import pytest

from geojax.cona.controller import Controller, FixedChain, NoiseWatch, Round, rate_scale
from geojax.cona.decision import Decision
from geojax.cona.noise import Moments
from geojax.cona.score import Option, best, worth
from geojax.config import ConaConfig, NoiseConfig
from geojax.config.rate import RateRule
from geojax.meshes.candidates import Candidate
from geojax.meshes.strategy import Strategy, parse_strategy

BATCHES = (8, 32, 128, 512)
LAYOUTS = ((8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 2, 4))
NOISE = NoiseConfig(window_samples=2_000, window_fraction=0.1)
TOTAL = 400_000
STEPS = 10  # a round


def step_seconds(strategy):
    """A launch, and work that its layout does more or less well: tp helps small batches."""
    launch = 0.1 / (1 + 0.2 * (strategy.tp - 1)) * (1 + 0.1 * (strategy.pp - 1))
    return launch + strategy.global_batch * 0.002 * (1 + 0.15 * (strategy.tp - 1))


def strategies():
    return [
        Strategy(dp, tp, pp, 1, batch)
        for batch in BATCHES
        for dp, tp, pp in LAYOUTS
        if batch % dp == 0 and batch // dp >= pp
    ]


def candidates(predict=step_seconds):
    return [Candidate(s, 10**9 * s.dp, False, predict(s), 0.4, None) for s in strategies()]


def moments(noise, steps, batch):
    """Steps whose S and G2 vary as those of a batch in eight parts do, noise in 50 directions."""
    s, g = noise, 1.0
    var_s, var_g = s * s * 2 / 7 / 50, (4 * s / batch + 2 * (s / batch) ** 2) / 50
    # Two values a step, one above and one below: the mean is exact, the spread is as stated.
    return Moments(
        steps, s * steps, g * steps, (s * s + var_s) * steps, (g * g + var_g) * steps, s * g * steps
    )


class Simulation:
    """A run of TOTAL samples under `controller`."""

    def __init__(self, controller, noise_at, seconds=step_seconds):
        self.controller, self.noise_at, self.seconds_of = controller, noise_at, seconds
        self.samples, self.seconds, self.progress, self.rounds = 0, 0.0, 0.0, 0
        self.decisions = []

    def round(self):
        strategy = self.controller.strategy
        batch, noise = strategy.global_batch, self.noise_at(self.samples)
        seconds = STEPS * self.seconds_of(strategy)
        self.samples += STEPS * batch
        self.seconds += seconds
        self.progress += STEPS * worth(batch, noise)
        self.rounds += 1
        done = Round(STEPS, seconds, {"parts": moments(noise, STEPS, batch)})
        self.controller.observe(self.samples, done)
        decision, _ = self.controller.propose(self.rounds, self.samples, self.seconds, None)
        if decision.kind not in ("keep", "prepare"):
            self.decisions.append((self.samples, decision))
            self.seconds += 0.5
            self.controller.switched(decision, 0.5)

    def run(self, until=TOTAL):
        while self.samples < until:
            self.round()
        return self

    def chain(self):
        return [(decision.kind, decision.to) for _, decision in self.decisions]


def make(predict=step_seconds, **changes):
    config = ConaConfig(global_batches=BATCHES, **changes)
    return Controller(config, NOISE, candidates(predict), TOTAL, 0.5)


def growing(samples):
    return 2 * (1 + samples / 200) ** 1.05


def oracle_seconds(noise_of_progress, progress, step_seconds):
    """Time to `progress` by the best strategy at every moment; noise as a function of progress."""
    options = [Option(str(s), s.global_batch, step_seconds(s)) for s in strategies()]
    seconds = done = 0.0
    while done < progress:
        noise = noise_of_progress(done)
        option = best(options, noise)
        seconds += STEPS * option.seconds
        done += STEPS * worth(option.batch, noise)
    return seconds


def along(points):
    """Noise by progress, from (progress, noise) points of a run."""

    def at(progress):
        return next((n for p, n in reversed(points) if p <= progress), points[0][1])

    return at


def regret(simulation):
    """Share of time lost against the oracle, to the same progress."""
    points = []
    while simulation.samples < TOTAL:
        points.append((simulation.progress, simulation.noise_at(simulation.samples)))
        simulation.round()
        oracle = oracle_seconds(along(points), simulation.progress, simulation.seconds_of)
    return simulation.seconds / oracle - 1


def test_it_climbs_the_ladder_as_noise_grows_and_loses_little_against_the_oracle():
    simulation = Simulation(make(), growing)
    lost = regret(simulation)
    reached = [parse_strategy(d.to).global_batch for _, d in simulation.decisions]
    assert max(reached) == 512
    assert 3 <= len(simulation.decisions) <= 40
    assert 0 <= lost < 0.05


def test_it_comes_down_when_noise_collapses():
    def collapse(samples):
        return 3000.0 if samples < TOTAL / 2 else 2.0

    simulation = Simulation(make(), collapse).run(TOTAL / 2)
    assert simulation.controller.strategy.global_batch == 512
    simulation.run()
    assert simulation.controller.strategy.global_batch == 8


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_is_wrong_by_three_on_one_family_costs_little(layout, factor):
    def wrong(strategy):
        family = (strategy.tp, strategy.pp) == layout[1:]
        return step_seconds(strategy) * (factor if family else 1.0)

    assert regret(Simulation(make(wrong), growing)) < 0.08


def test_a_machine_far_slower_than_the_model_climbs_as_well():
    def slow(strategy):
        return 50 * step_seconds(strategy)

    simulation = Simulation(make(), growing, slow)
    assert 0 <= regret(simulation) < 0.05
    assert simulation.controller.strategy.global_batch == 512


def test_out_of_memory_takes_all_that_need_as_much_out():
    controller = make()
    present = str(controller.strategy)
    size = {str(c.strategy): c.memory_bytes for c in candidates()}
    victim = next(n for n, b in size.items() if b == 4 * 10**9 and n != present)
    controller.refuse(victim, "no room", out_of_memory=True)
    gone = set(controller.state()["refused"])
    assert victim in gone
    assert gone == {n for n, b in size.items() if b >= size[victim] and n != present}
    simulation = Simulation(controller, growing).run()
    assert not gone & {d.to for _, d in simulation.decisions}


def test_what_cannot_be_built_is_never_proposed_again():
    controller = make()
    names = [str(s) for s in strategies()]
    victims = [n for n in names if n.endswith("gb512")]
    for name in victims:
        controller.refuse(name, "the compiler failed")
    simulation = Simulation(controller, growing).run()
    assert simulation.controller.strategy.global_batch == 128
    assert not set(victims) & {d.to for _, d in simulation.decisions}


def test_a_restored_controller_takes_the_same_chain():
    whole = Simulation(make(), growing).run()
    first = Simulation(make(), growing).run(TOTAL / 3)
    again = make()
    again.restore(json.loads(json.dumps(first.controller.state())))
    second = Simulation(again, growing)
    for name in ("samples", "seconds", "progress", "rounds"):
        setattr(second, name, getattr(first, name))
    assert first.chain() + second.run().chain() == whole.chain()
    assert second.seconds == whole.seconds


def on_trial(controller, to):
    """`controller` after two rounds, a good noise estimate, and a switch to `to` on trial."""
    present = controller.strategy
    for number in (1, 2):
        batch = present.global_batch
        seconds = STEPS * step_seconds(present)
        done = Round(STEPS, seconds, {"parts": moments(500.0, STEPS, batch)})
        controller.observe(number * STEPS * batch, done)
    controller.switched(Decision("trial", to, "", 1.0, 1.0), 3.0)
    return number * STEPS * batch


def after_round(controller, samples, seconds_a_step, disturbed=False):
    """What it proposes after a round of such steps."""
    batch = controller.strategy.global_batch
    noise = {"parts": moments(500.0, STEPS, batch)}
    controller.observe(samples, Round(STEPS, STEPS * seconds_a_step, noise, disturbed))
    return controller.propose(3, samples, 100.0, None)[0]


def test_a_trial_beside_a_compiler_goes_on_until_it_is_timed():
    controller = make()
    first, to = str(controller.strategy), "dp8-tp1-pp1-mb1-gb128"
    true = step_seconds(parse_strategy(to))
    samples = on_trial(controller, to)
    for _ in range(3):
        decision = after_round(controller, samples := samples + 1280, 50 * true, disturbed=True)
        assert decision.kind == "keep"
        assert not controller._speed.timed(to)
    assert after_round(controller, samples + 1280, true).kind != "fallback"
    assert controller._speed.of([to], to).seconds == pytest.approx([true], rel=0.1)
    # One that is as slow when nothing is beside it goes.
    controller = make()
    samples = on_trial(controller, to)
    decision = after_round(controller, samples + 1280, 50 * true)
    assert (decision.kind, decision.to) == ("fallback", first)


def test_only_trials_that_fail_are_charged():
    to = "dp8-tp1-pp1-mb1-gb128"
    true = step_seconds(parse_strategy(to))
    good, bad = make(), make()
    samples = on_trial(good, to)
    assert after_round(good, samples + 1280, true).kind == "keep"
    assert good.state()["trial_seconds"] == 0
    samples = on_trial(bad, to)
    decision = after_round(bad, samples + 1280, 50 * true)
    again = make()
    again.restore(json.loads(json.dumps(bad.state())))  # in the middle of it
    for controller in (bad, again):
        controller.switched(decision, 4.0)
        assert controller.state()["trial_seconds"] == 7.0


def test_timings_of_strategies_that_are_none_any_more_are_dropped():
    controller = make()
    on_trial(controller, "dp8-tp1-pp1-mb1-gb512")
    controller.observe(10_000, Round(STEPS, 10.0, {}))
    controller.switched(Decision("fallback", "dp8-tp1-pp1-mb1-gb8", "", 1.0, 1.0), 1.0)
    state = json.loads(json.dumps(controller.state()))
    fewer = [c for c in candidates() if c.strategy.global_batch < 512]
    config = ConaConfig(global_batches=BATCHES[:-1])
    again = Controller(config, NOISE, fewer, TOTAL, 0.5)
    again.restore(state)
    assert again.likely()
    assert again.propose(1, 10_000, 1.0, None)[0].to in {str(c.strategy) for c in fewer}


def test_a_state_of_other_devices_is_refused():
    state = make().state() | {"strategy": "dp16-tp1-pp1-mb1-gb16"}
    with pytest.raises(ValueError, match=r"was under dp16-tp1-pp1-mb1-gb16, which does not fit"):
        make().restore(state)
    with pytest.raises(ValueError, match=r"cona\.start dp3 is none of the 1"):
        make(start="dp3")


def test_it_begins_with_the_best_for_little_noise_or_where_it_is_told():
    options = [Option(str(s), s.global_batch, step_seconds(s)) for s in strategies()]
    assert str(make().strategy) == best(options, min(BATCHES)).name
    start = "dp2-tp2-pp2-mb1-gb128"
    assert str(make(start=start).strategy) == start


def test_likely_next_are_the_neighbours_on_the_ladder():
    controller = make(start="dp8-tp1-pp1-mb1-gb128")
    above, below, *others = (s.global_batch for s in controller.likely())
    assert below < 128 < above
    assert len(others) == 2  # of families that never ran


def test_a_fixed_chain_ends_rounds_at_its_borders():
    texts = ("dp8-tp1-pp1-mb1-gb8", "dp4-tp2-pp1-mb1-gb32", "dp8-tp1-pp1-mb1-gb8")
    legs = [(at, parse_strategy(text)) for at, text in zip((0, 80, 400), texts, strict=True)]
    chain = FixedChain(legs, RateRule("linear", 8))
    assert chain.samples_left(0) == 80
    assert chain.samples_left(79) == 1
    assert chain.samples_left(400) is None
    assert chain.scale() == 1
    for samples, due in ((40, 0), (80, 1), (399, 1), (407, 2)):
        decision, _ = chain.propose(1, samples, 0.0, None)
        assert decision.to == texts[due]
        assert decision.kind == ("keep" if chain.strategy == legs[due][1] else "switch")
        chain.switched(decision, 0.0)
    again = FixedChain(legs)
    again.restore(chain.state())
    assert again.strategy == chain.strategy
    with pytest.raises(ValueError, match="cannot run here: no room"):
        chain.refuse(texts[0], "no room")


def test_the_rate_is_careful_before_noise_is_known():
    watch, rule = NoiseWatch(NOISE), RateRule("adascale", 32)
    assert rate_scale(None, 128, watch) == 1
    assert rate_scale(rule, 128, watch) == 1
    assert rate_scale(rule, 8, watch) == pytest.approx(0.25)
    for i in range(4):
        watch.observe(32, 320 * (i + 1), 10, {"parts": moments(64.0, 10, 32)})
    found = watch.estimate()
    assert found.value == pytest.approx(64.0)
    assert found.low < 64 < (found.high or math.inf)
    assert rate_scale(rule, 128, watch) == pytest.approx((1 + 64 / 32) / (1 + 64 / 128))
