# SPDX-License-Identifier: Apache-2.0
"""A plan of a whole run takes what the modelled clock says, and changes as its inputs do."""

import io
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from geojax import runs
from geojax.cli import main
from geojax.config import (
    BalanceConfig,
    CheckpointConfig,
    ClockConfig,
    DataConfig,
    EvalConfig,
    ExchangeConfig,
    OptimizerConfig,
    RunConfig,
    SliceConfig,
    SourceConfig,
    TokenizerConfig,
    TrainConfig,
)
from geojax.configs import load_config
from geojax.configs.geomesh import over_slices
from geojax.geomesh.balance import make_plan
from geojax.geomesh.clock import (
    Happened,
    ModelledClock,
    modelled_exchange_seconds,
    modelled_profiles,
    traffic,
)
from geojax.meshes.hardware import Cluster, get_gpu
from geojax.meshes.timing_a100 import A100, extrapolated
from geojax.meshes.wan import from_links, get_wan
from geojax.models.config import TransformerConfig
from geojax.plan.changes import changes, effects, next_kind
from geojax.plan.cluster import ClusterFile, Site, read_cluster
from geojax.plan.whole import Search, count_memory, placed, plan_whole
from geojax.plan.whole_report import gantt_runs
from geojax.simulate.command import simulate
from geojax.simulate.outcome import outcome
from geojax.simulate.setting import make_setting
from geojax.track.metrics import read_records

REGIONS = ("eastus", "westus2", "westeurope", "koreacentral")
KINDS = ("h100", "a100-80gb", "l40s")
EXACT = ExchangeConfig(codec="fp32", error_feedback=False)
SEARCH = Search(A100, extrapolated)  # what one plan found, others need not look for
BASE = replace(
    load_config("geomesh-150m"), balance=BalanceConfig(inner_steps=16, batch_sizes=(8, 64))
)


def cluster_of(kinds, gpus, wan="geomesh-azure", prices=(2.0, 1.0, 0.5, 0.25)):
    sites = tuple(
        Site(f"s{i}", region, kind, Cluster(get_gpu(kind), 1, count), price)
        for i, (kind, count, region, price) in enumerate(
            zip(kinds, gpus, REGIONS, prices, strict=False)
        )
    )
    return ClusterFile("test", sites, get_wan(wan), {}, {"h100": 2.0, "h200": 3.0})


def planned(config, cluster, how="config", tokens=3e8):
    config = placed(config, cluster, tokens)
    return config, plan_whole(config, cluster, how, SEARCH)


def clocked(config, cluster, wan="geomesh-azure"):
    """The same slices and links as a run's config says them."""
    return replace(
        config,
        slices=tuple(
            SliceConfig(s.name, s.region, gpu=s.gpu, gpus=s.cluster.gpus) for s in cluster.sites
        ),
        clock=ClockConfig("modelled", wan=wan),
    )


@pytest.mark.parametrize("how", ["config", "auto", "hub"])
@pytest.mark.parametrize(("mode", "exchange"), [("adaptive", BASE.exchange), ("equal", EXACT)])
def test_a_plan_takes_what_simulate_and_the_modelled_clock_say(mode, exchange, how):
    cluster = cluster_of(KINDS, (8, 8, 2))
    config = replace(BASE, exchange=exchange, balance=replace(BASE.balance, mode=mode))
    config, whole = planned(config, cluster, how)
    run = clocked(config, cluster)
    setting = make_setting(run, how)
    assert whole.work == setting.plan.work
    for overlap in (False, True):
        rounds = simulate(setting, overlap=float(overlap))
        expected = outcome(setting, rounds, float(overlap))
        found = whole.timed(overlap).outcome
        assert replace(found, wan=expected.wan) == expected
        done = found.rounds * found.tokens_per_round
        assert whole.tokens_per_second(overlap) == pytest.approx(done / (3600 * found.hours))
    if how == "config":
        seconds = modelled_exchange_seconds(run, traffic(run).payload_bytes)
        plan = make_plan(modelled_profiles(run), run.balance, seconds)
        nothing = [0, 0, 0]
        happened = Happened([0.0] * 3, 0.0, 0.0, 0.0, nothing, nothing, [0.0] * 3)
        times = ModelledClock(seconds).round(plan, happened)
        assert whole.plain.outcome.round_seconds == pytest.approx(times.total, rel=1e-9)
        for i in range(3):
            assert whole.plain.shares(i) == pytest.approx(
                {
                    "compute": times.compute[i] / times.total,
                    "straggler": times.straggler[i] / times.total,
                    "wan": times.wan / times.total,
                },
                abs=1e-9,
            )


@pytest.mark.full
def test_a_trained_run_takes_what_was_planned(tmp_path, monkeypatch):
    monkeypatch.setenv("GEOJAX_CACHE", str(tmp_path / "cache"))
    (tmp_path / "words.txt").write_text("\n\n".join(f"abc {i} " * 60 for i in range(60)))
    config = RunConfig(
        name="tiny",
        model=TransformerConfig(vocab_size=300, dim=16, layers=1, heads=2, kv_heads=2, mlp_dim=24),
        data=DataConfig(
            SourceConfig(kind="files", paths=(str(tmp_path / "words.txt"),)),
            TokenizerConfig(kind="bytes"),
            seq_len=16,
            valid_fraction=0.2,
        ),
        train=TrainConfig(total_tokens=3000, optimizer=OptimizerConfig(name="lion")),
        balance=BalanceConfig(inner_steps=2, batch_sizes=(8,)),
        eval=EvalConfig(every_tokens=10_000, sequences=8, batch=8),
        checkpoint=CheckpointConfig(every_rounds=100),
        slices=(SliceConfig("x"), SliceConfig("y")),
    )
    cluster = cluster_of(("h100", "l40s"), (8, 4))
    run = clocked(config, cluster)
    run = replace(run, clock=replace(run.clock, model="llama-150m", seq_len=1024))
    assert runs.start(run, tmp_path / "run", Console(file=io.StringIO()))
    _, whole = planned(run, cluster, tokens=None)
    records = list(read_records(tmp_path / "run" / "metrics.jsonl"))
    rounds = [r for r in records if r["kind"] == "round"]
    assert len(rounds) == whole.plain.outcome.rounds
    assert rounds[-1]["seconds"] / 3600 == pytest.approx(whole.plain.outcome.hours, rel=0.01)
    for record in (r for r in records if r["kind"] == "slice"):
        index = ("s0", "s1").index(record["slice"])
        share = whole.plain.shares(index)["wan"]
        assert record["wan_seconds"] / whole.plain.outcome.round_seconds == pytest.approx(
            share, rel=0.01
        )
        assert record["wire_bytes"] == pytest.approx(
            whole.setting.exchange().sent_bytes[index], rel=0.01
        )


links = st.tuples(
    st.floats(0.02, 20).map(lambda gbit: gbit * 1e9), st.floats(0, 300).map(lambda ms: ms / 1e3)
)


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    count=st.integers(2, 4),
    how=st.sampled_from(["gather", "two_phase", "hub"]),
    mode=st.sampled_from(["equal", "adaptive"]),
    exchange=st.sampled_from([BASE.exchange, EXACT]),
    shared=st.booleans(),
)
def test_twice_the_bandwidth_is_never_slower_and_prices_change_costs_alone(
    data, count, how, mode, exchange, shared
):
    kinds, gpus = (
        data.draw(st.lists(st.sampled_from(values), min_size=count, max_size=count))
        for values in (KINDS, (1, 8))
    )
    regions = data.draw(st.lists(st.sampled_from(REGIONS), min_size=count, max_size=count))
    pairs = [(a, b) for i, a in enumerate(REGIONS) for b in REGIONS[i + 1 :]]
    wan = from_links({pair: data.draw(links) for pair in pairs}, 1, shared)
    plain = cluster_of(kinds, gpus)
    sites = tuple(
        replace(s, region=region, price_per_gpu_hour=None)
        for s, region in zip(plain.sites, regions, strict=True)
    )
    cluster = replace(plain, sites=sites, wan=wan)
    config = replace(BASE, exchange=exchange, balance=replace(BASE.balance, mode=mode))
    config, whole = planned(config, cluster, how, 1e8)
    for change in changes(whole, config, False, SEARCH):
        if "bandwidth" in change.name or "latency" in change.name:
            faster = plan_whole(config, change.cluster, how, SEARCH)
            for overlap in (False, True):
                before, after = (w.timed(overlap).outcome.hours for w in (whole, faster))
                assert after <= before * (1 + 1e-9), change.name
    assert whole.overlapped.outcome.hours <= whole.plain.outcome.hours * (1 + 1e-9)
    dear = tuple(replace(s, price_per_gpu_hour=data.draw(st.floats(0, 10))) for s in sites)
    priced = plan_whole(config, replace(cluster, sites=dear), how, SEARCH)
    assert (priced.work, priced.plain, priced.overlapped) == (
        whole.work,
        whole.plain,
        whole.overlapped,
    )
    assert whole.cost() is None
    total = sum(s.cluster.gpus * s.price_per_gpu_hour for s in dear)
    assert priced.cost() == pytest.approx(priced.plain.outcome.hours * total)


def test_an_effect_is_what_the_changed_file_itself_comes_to():
    cluster = cluster_of(KINDS, (8, 8, 1))
    config, whole = planned(replace(BASE, exchange=EXACT), cluster)
    found = {e.name: e for e in effects(whole, config, "config", False, SEARCH)}
    hours = whole.plain.outcome.hours
    done = [e.hours for e in found.values() if e.hours is not None]
    assert done == sorted(done)
    wan = replace(
        cluster.wan,
        bits_per_second=tuple(
            tuple(rate * (1 if i == j else 2) for j, rate in enumerate(row))
            for i, row in enumerate(cluster.wan.bits_per_second)
        ),
    )
    bigger = replace(cluster.sites[2], cluster=replace(cluster.sites[2].cluster, nodes=2))
    signs = replace(config, exchange=ExchangeConfig("sign"))
    others = {
        "all links: twice the bandwidth": (config, replace(cluster, wan=wan)),
        "signs in place of fp32": (signs, cluster),
        "s2: one more node": (config, replace(cluster, sites=(*cluster.sites[:2], bigger))),
        "without s2": (config, replace(cluster, sites=cluster.sites[:2])),
    }
    for name, (changed, file) in others.items():
        _, other = planned(changed, file)
        assert found[name].hours == other.plain.outcome.hours
        assert found[name].saved_hours == pytest.approx(hours - other.plain.outcome.hours)
        assert found[name].extra_cost == pytest.approx(other.cost() - whole.cost())
    beside = found["exchanges beside the next steps"]
    assert beside.hours == whole.overlapped.outcome.hours < hours
    # The fastest kind of one slice has no price; another's is known.
    assert found["s0: h200 in place of h100"].cost is not None
    assert found["s2: rtx-6000-ada in place of l40s"].cost is None
    assert next_kind(whole, 0, SEARCH).cluster.gpu == get_gpu("h200")
    assert "each slice its own work" not in found
    assert not any("exchanges beside" in c.name for c in changes(whole, config, True, SEARCH))


def test_a_strategy_that_the_compiler_finds_too_large_is_not_planned():
    cluster = cluster_of(KINDS, (8, 8, 1))
    config = placed(BASE, cluster, 1e8)
    search = Search(A100, extrapolated)
    first = plan_whole(config, cluster, "config", search)
    too_large = first.chosen[2].strategy

    def count(job, gpu, strategy):
        assert gpu in KINDS
        return job.usable_bytes + (1 if strategy == too_large else -1)

    whole = count_memory(lambda: plan_whole(config, cluster, "config", search), search, count)
    assert all(c.exact and c.strategy != too_large for c in whole.chosen)
    next_best = next(o for o in whole.setting.profiles[2].options if o.batch == first.work[2].batch)
    assert next_best.strategy != str(too_large)
    assert [c.strategy for c in whole.chosen[:2]] == [c.strategy for c in first.chosen[:2]]


def test_batches_are_rounded_down_to_a_slices_gpus():
    config = replace(BASE, balance=replace(BASE.balance, batch_sizes=(8, 16)))
    _, whole = planned(config, cluster_of(("h100", "h100"), (8, 6)))
    assert {o.batch for o in whole.setting.profiles[1].options} >= {6, 12}


FILE = """
wan = "azure-constrained"
[[slices]]
name = "east"
region = "eastus"
gpu = "h100"
gpus_per_node = 8
price_per_gpu_hour = 3
[[slices]]
name = "[b]west"
region = "westus2"
gpu = "l40s"
price_per_gpu_hour = 1
"""


def test_the_command_says_the_same_in_table_picture_and_file(tmp_path, capsys):
    path, figures = tmp_path / "two.toml", tmp_path / "plan.json"
    path.write_text(FILE)
    sizes = ["--balance.batch-sizes", "8", "64", "--balance.inner-steps", "16"]
    where = ["--cluster", str(path), "--json", str(figures), "--out", str(tmp_path)]
    assert main(["plan", "geomesh-150m", *where, *sizes, "--no-exact"]) == 0
    content, shown = json.loads(figures.read_text()), capsys.readouterr().out
    _, whole = planned(BASE, read_cluster(path), "auto", None)
    result = whole.plain.outcome
    assert content["clock"] == "modelled"
    assert content["results"][0]["hours"] == result.hours
    assert content["results"][0]["cost"] == whole.cost() == pytest.approx(25 * result.hours)
    assert [s["batch"] for s in content["slices"]] == [w.batch for w in whole.work]
    for s, work in zip(content["slices"], whole.work, strict=True):
        assert sum(s["shares"].values()) == pytest.approx(1)
        assert sum(s["step_parts_seconds"].values()) == pytest.approx(work.seconds_per_step)
        assert f"{work.batch} x {work.inner_steps}" in shown
    assert f"{result.hours:,.1f}" in shown
    assert "[b]west" in shown  # a name, not markup
    assert "nothing was trained" in " ".join(shown.split())
    assert max(map(len, shown.splitlines()[:-2])) <= 80
    assert {e["name"] for e in content["changes"]} >= {"[b]west: one more node"}
    assert (tmp_path / "gantt.png").stat().st_size > 1000


def test_a_preset_of_one_cluster_is_planned_as_geomesh():
    config = over_slices(load_config("gpt-tiny"))
    assert config.balance.batch_sizes == (2, 4, 8, 16)
    config, whole = planned(config, cluster_of(("h100", "l40s"), (1, 1)), tokens=None)
    assert config.exchange.codec == "sign"
    assert config.train.total_tokens == load_config("gpt-tiny").train.total_tokens
    assert {w.batch for w in whole.work} <= set(config.balance.batch_sizes)


def test_the_picture_accounts_for_every_second():
    _, whole = planned(replace(BASE, exchange=EXACT), cluster_of(KINDS, (8, 8, 1)))
    for run, timed in zip(gantt_runs(whole), (whole.plain, whole.overlapped), strict=True):
        assert [r["seconds"] for r in run.rounds] == [r.end for r in timed.rounds[:3]]
        for name in ("s0", "s1", "s2"):
            at = 0.0
            for record in (r for r in run.slices if r["slice"] == name):
                assert record["begin_seconds"] == pytest.approx(at)
                parts = ("compute", "straggler", "wan", "outer")
                at += sum(record[f"{part}_seconds"] for part in parts)
            assert at <= run.rounds[-1]["seconds"] * (1 + 1e-9)
