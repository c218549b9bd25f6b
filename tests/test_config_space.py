# SPDX-License-Identifier: Apache-2.0
"""Any config that exists can be built and is what its JSON says; any other is refused in words that
name a value and say what to do. Random walks, the same ones each time."""

import io
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from config_space import Walk, walks
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console

from geojax import runs
from geojax.config import (
    CheckpointConfig,
    ConfigError,
    EvalConfig,
    PlatformConfig,
    RunConfig,
    RunError,
    SourceConfig,
    TokenizerConfig,
    slice_strategy,
)
from geojax.config.files import read_config
from geojax.geomesh.clock import modelled_exchange_seconds, modelled_profiles, traffic
from geojax.geomesh.options import choices, work_strategy
from geojax.geomesh.records import derived_rows
from geojax.geomesh.steering import first_plan
from geojax.meshes.axes import assign_devices
from geojax.track.metrics import read_records
from geojax.train.program import Program
from geojax.train.steering import devices_for, local_strategy, make_pilot, make_task

QUIET = Console(file=io.StringIO())
ADVICE = re.compile(
    r"\b(use|set|give|leave|raise|lower|choose|drop|rename|make|name|write|say|put|start|means "
    r"nothing|must (be|lie|begin)|did you mean)\b"
)


def repeatable(count: int):
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def faults(walk: Walk) -> list[str]:
    """Refusals that do not help."""
    return [said for said, error in walk.refused if not helps(error)]


def helps(error: Exception) -> bool:
    """Whether it is a refusal of ours, in one line that says what to do."""
    text = str(error)
    ours = isinstance(error, ConfigError | RunError) or text.startswith(("model ", "rope "))
    return ours and bool(ADVICE.search(text)) and "\n" not in text


def check_json(config: RunConfig, folder: Path) -> None:
    path = folder / "config.json"
    runs.save_config(config, path)
    assert read_config(path) == config


def trace(config: RunConfig, most_programs: int = 2) -> int:
    """Go as far as a run goes before it compiles; how many programs were traced.

    ConfigError where this machine's devices do not do, or nothing fits a modelled GPU.
    """
    task = make_task(config)
    if not config.slices:
        devices = devices_for(config)
        pilot = make_pilot(config, devices)
        wanted = {(local_strategy(config, pilot.strategy), tuple(devices))}
    else:
        try:
            rows = assign_devices([s.devices for s in config.slices], jax.local_devices())
        except ValueError as error:
            raise ConfigError(str(error)) from error
        wanted = set(of_slices(config, rows))
    for strategy, devices in sorted(wanted, key=str)[:most_programs]:
        program = Program(task, strategy, devices[: strategy.devices])
        program.lower(2)
        if program.wants_probes:
            program.lower(1, probe=True)
    return min(len(wanted), most_programs)


def of_slices(config: RunConfig, rows):
    """(strategy, devices) of each slice under its plan, or each batch where that is measured."""
    sent = traffic(config)
    if config.clock.kind == "measured":
        for row, found in zip(rows, choices(config, rows), strict=True):
            yield from ((strategy, row) for strategy in found)
        return
    seconds = modelled_exchange_seconds(config, sent.payload_bytes)
    plan = first_plan(config, modelled_profiles(config), seconds)
    assert derived_rows(config, plan, sent, seconds, False)
    for index, (work, row) in enumerate(zip(plan.work, rows, strict=True)):
        yield work_strategy(config, index, work), row
        assert slice_strategy(config.slices[index], None, work.batch)


@repeatable(50)
@given(walks())
def test_walks_end_at_configs_that_their_json_gives_back(walk):
    assert not faults(walk), walk.refused
    with tempfile.TemporaryDirectory() as folder:
        check_json(walk.config, Path(folder))


@repeatable(6)
@given(walks())
def test_some_walks_end_at_configs_whose_programs_can_be_made(walk):
    try:
        trace(walk.config, 1)
    except ConfigError as error:
        if not helps(error):
            raise


@pytest.mark.full
def test_a_thousand_walks_end_at_programs_and_a_thousand_changes_are_refused():
    traced, unfit, refused = [], [], []

    @repeatable(1_000)
    @given(walks())
    def walk_all(walk: Walk) -> None:
        assert not faults(walk), walk.refused
        refused.append(len(walk.refused))
        with tempfile.TemporaryDirectory() as folder:
            check_json(walk.config, Path(folder))
        try:
            traced.append(trace(walk.config))
        except ConfigError as error:  # this machine is too small for it
            if not helps(error):
                raise
            unfit.append(str(error))
        if len(refused) % 50 == 0:
            jax.clear_caches()

    walk_all()
    print(f"{len(refused)} walks, {sum(refused)} refusals; {sum(traced)} programs; {unfit}")
    assert sum(refused) >= 1_000
    assert len(traced) >= 900


TRAINED = ("quickstart", "llama-tiny", "gpt-tiny", "bert-tiny", "llada-tiny", "cona-gpt-tiny")


@pytest.mark.full
def test_thirty_walks_end_at_runs_that_train_two_steps(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("thirty")
    monkeypatch.setenv("GEOJAX_CACHE", str(folder / "cache"))
    text = folder / "text.txt"
    line = "{} is followed by {}, which is no news. "
    text.write_text("\n\n".join(line.format(n, n + 1) * 60 for n in range(300)))
    ended, refused = [], []

    @repeatable(60)  # some are refused: the text is too short, or this machine too small
    @given(walks(bases=TRAINED), st.integers(0, 10**6))
    def train_all(walk: Walk, number: int) -> None:
        if len(ended) == 30:
            return
        run = folder / f"run-{len(ended) + len(refused)}"
        try:
            config = two_steps(walk.config, text)
            runs.start(config, run, QUIET)
            assert read_records(run / "metrics.jsonl")[-1]["kind"] == "end"
            ended.append(config)
        except (ConfigError, RunError) as error:
            if not helps(error):
                raise
            refused.append(str(error))
        jax.clear_caches()

    train_all()
    print(f"{len(ended)} trained; refused: {refused}")
    assert len(ended) == 30


def two_steps(config: RunConfig, text: Path) -> RunConfig:
    """The same on a text that is here, for two steps, or one round of slices."""
    tokenizer = TokenizerConfig(vocab_size=min(max(257, config.model.vocab_size - 1), 300))
    batch = max(config.slice_batches) if config.slices or config.cona else 8
    return replace(
        config,
        init="",
        data=replace(
            config.data,
            source=SourceConfig(kind="files", paths=(str(text),)),
            tokenizer=tokenizer,
            valid_fraction=0.1,
        ),
        train=replace(config.train, total_tokens=2 * batch * config.data.seq_len, round_steps=2),
        eval=EvalConfig(sequences=8, batch=8, draws=config.eval.draws),
        checkpoint=CheckpointConfig(),
        platform=PlatformConfig(),
    )
