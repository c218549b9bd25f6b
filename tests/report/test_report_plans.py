# SPDX-License-Identifier: Apache-2.0
"""The plans of slices under CONA are shown with their reasons, and computed again."""

import json
from dataclasses import asdict, replace

import pytest

from geojax.config import BalanceConfig, ConaConfig, ScalingConfig
from geojax.geomesh.balance import Option, SliceProfile, make_plan
from geojax.geomesh.steering import Situation, decide, read_plan, read_profiles, record
from geojax.report.inputs import read_inputs
from geojax.report.page import page
from geojax.track.metrics import to_json

OPTIONS = (Option(8, 1.0, 0, "dp1-tp1-pp1-mb8-gb8"), Option(32, 1.5, 0, "dp4-tp1-pp1-mb8-gb32"))
BALANCE, CONA = BalanceConfig(inner_steps=4), ConaConfig((8, 32), dwell_rounds=2)
SCALING = ScalingConfig(base_batch=8)


@pytest.fixture
def folder(make_run):
    """A run whose noise grows until the plan changes, after round 2 of 4."""
    folder = make_run(rounds=4, perplexities=(512.0, 23.0))
    config = {"balance": BALANCE, "cona": CONA, "scaling": SCALING}
    (folder / "config.json").write_text(json.dumps({k: asdict(v) for k, v in config.items()}))
    profiles = tuple(SliceProfile(name, OPTIONS, None) for name in ("h100", "a100"))
    plan = make_plan(profiles, BALANCE, 1.0, lambda batch: batch / (batch + 1.0))
    lines, here = [], 0
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        fields = json.loads(line)
        if fields["kind"] != "round":
            lines.append(line)
            continue
        number, noise = fields["round"], (1.0, 100.0, 100.0, 100.0)[fields["round"] - 1]
        here += 1
        fields |= {"strategy": str(plan), "noise": {"value": noise}}
        now = Situation(
            number, 10, 1000, here, plan, profiles, 1.0, (noise, noise / 2, noise * 2), 0.1
        )
        decision = decide(now, BALANCE, CONA, SCALING.rate_rule())
        at = {"round": number, "tokens": fields["tokens"]}
        lines += [
            json.dumps(fields),
            json.dumps(to_json({"kind": "plan"} | at | record(now, decision))),
        ]
        if decision.kind == "change":
            places = {"from": str(plan), "to": str(decision.plan), "switch_seconds": 0.0}
            why = {"why": decision.reason, "decision": "change"}
            lines.append(json.dumps({"kind": "switch"} | at | places | why))
            plan, here = decision.plan, 0
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def blocks(folder):
    inputs = read_inputs([str(folder)], None, wait=False)
    return inputs, [b for s in inputs.sections() for b in s.blocks if b.heading == "its plans"]


def test_each_plan_is_shown_with_its_reason_and_comes_out_again(folder):
    inputs, (block,) = blocks(folder)
    columns = {str(column.header): list(column.cells) for column in block.table.columns}
    plans = columns["plan: strategy x inner steps of each slice"]
    assert ["gb8" in plans[0], "gb32" in plans[1], len(plans)] == [True, True, 2]
    assert columns["why"][0] == ""
    assert columns["why"][1].startswith("saves")
    assert block.notes == (
        "Decisions: 4, each computed again from its recorded inputs: all the same.",
    )
    assert "its plans" in page(inputs.sections(), (), None)


def test_a_decision_that_comes_out_otherwise_is_named(folder):
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    plans = [r for r in records if r["kind"] == "plan"]
    assert [r["decision"]["kind"] for r in plans] == ["keep", "change", "keep", "keep"]
    plans[1]["decision"]["gain"] += 0.1
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    _, (block,) = blocks(folder)
    assert "those of rounds [2] come out otherwise" in block.notes[0]


def test_what_waits_for_the_dwell_says_what_may_be_next(folder):
    inputs = read_inputs([str(folder)], None, wait=False)
    (run,) = (run for _, run in inputs.runs)
    now = run.plans[2]
    assert now["decision"]["best"] is None  # the plan is the best one
    first = replace(CONA, dwell_rounds=3)
    situation = Situation(**_read(run.plans[1]["inputs"]))
    waiting = decide(situation, BALANCE, first, SCALING.rate_rule())
    changed = decide(situation, BALANCE, CONA, SCALING.rate_rule())
    assert (waiting.kind, waiting.plan, waiting.best) == ("keep", situation.plan, changed.plan)


def _read(inputs):
    return inputs | {
        "plan": read_plan(inputs["plan"]["work"]),
        "profiles": read_profiles(inputs["profiles"]),
        "noise": tuple(inputs["noise"]),
    }
