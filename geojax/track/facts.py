# SPDX-License-Identifier: Apache-2.0
"""What a run is, in a few lines, from its config and its records.

Invariant: what a config of another version does not have is left out, not guessed.
"""

import json
from datetime import UTC, datetime
from typing import Any

from geojax.track.console import format_bytes, format_count, format_share
from geojax.track.summary import Run

type Facts = tuple[tuple[str, str], ...]


def facts_of(run: Run) -> Facts:
    """(label, value) of the run, and what it was made with."""
    start = run.start
    lines = [
        ("state", _state(run)),
        ("model", _model(run)),
        ("text", _text(run)),
        ("goes by", _way(run)),
        ("optimizer", _optimizer(run)),
        ("seed", str(start["seed"])),
        ("clock", clock_of(run)),
        ("machine", start["machine"]),
        ("versions", ", ".join(f"{k} {v}" for k, v in start["versions"].items())),
        ("folder", f"{run.folder}, last record of {_written(run)}"),
    ]
    return tuple((label, value) for label, value in lines if value)


def clock_of(run: Run) -> str:
    """Which clock its times are from, and what it stands for."""
    if run.start["clock"] != "modelled":
        return f"{run.start['clock']}: wall time"
    clock = _at(run, "clock") or {}
    gpus = ""
    if clock.get("gpu"):
        gpus = f" on {clock.get('nodes')} x {clock.get('gpus_per_node')} {clock['gpu']}"
    over = f" over {clock['wan']}" if clock.get("wan") else ""
    params = format_count(run.start["clocked_params"])
    return f"modelled: {params} parameters{gpus}{over}; convergence is real"


def config_of(run: Run) -> str:
    """Its config.json."""
    return json.dumps(run.config, indent=2) if run.config else ""


def _state(run: Run) -> str:
    done, total = run.rounds[-1]["tokens"], run.start.get("total_tokens")
    seen = format_count(done) + (f" of {format_count(total)}" if total else "") + " tokens"
    if run.end is None:
        share = f", {format_share(min(done / total, 1.0))}" if total else ""
        return f"not ended: {seen}{share}, after round {len(run.rounds)}"
    return f"ended: {seen}, {len(run.rounds)} rounds; {run.end.get('reason', '')}".rstrip("; ")


def _model(run: Run) -> str:
    model = _at(run, "model") or {}
    shape = [
        str(model[key]) if key == "family" else f"{name} {model[key]}"
        for key, name in (
            ("family", ""),
            ("layers", "layers"),
            ("dim", "dim"),
            ("vocab_size", "vocabulary"),
        )
        if key in model
    ]
    return ", ".join([f"{format_count(run.start['params'])} parameters", *shape])


def _text(run: Run) -> str:
    source = _at(run, "data", "source") or {}
    if not source:
        return ""
    parts = [" ".join([str(source.get("kind")), *map(str, source.get("paths") or ())])]
    parts += [str(source["dataset"])] if source.get("dataset") else []
    tokenizer = _at(run, "data", "tokenizer") or {}
    parts += [f"tokens by {tokenizer['kind']}"] if tokenizer.get("kind") else []
    length = _at(run, "data", "seq_len")
    parts += [f"sequences of {length}"] if length else []
    masking = _at(run, "data", "masking") or {}
    parts += [f"{masking['kind']} masks"] if masking.get("kind") else []
    return ", ".join(parts)


def _way(run: Run) -> str:
    """Slices, a strategy, a chain, or CONA's choice."""
    start, parts = run.start, []
    names = list(run.shares())
    if names != ["all"]:
        parts.append(f"{len(names)} slices")
        if "codec" in start:
            payload = format_bytes(start["payload_bytes"])
            parts.append(f"{start['codec']} by {start['schedule']}, {payload} a slice")
    elif "strategy" in start:
        parts.append(str(start["strategy"]))
    ladder = _at(run, "cona", "global_batches")
    if ladder:
        parts.append(f"CONA over batches {', '.join(map(str, ladder))}")
    legs = run.config.get("chain") or []
    if legs:
        parts.append(f"a chain of {len(legs)} legs")
    return "; ".join(parts)


def _optimizer(run: Run) -> str:
    optimizer = _at(run, "train", "optimizer") or {}
    if not optimizer.get("name"):
        return ""
    outer = _at(run, "outer", "optimizer") or {}
    text = f"{optimizer['name']}, learning rate {optimizer.get('learning_rate')}"
    if run.config.get("slices") and outer.get("name"):
        text += f"; outer {outer['name']}, {outer.get('learning_rate')}"
    return text


def _written(run: Run) -> str:
    seconds = (run.folder / "metrics.jsonl").stat().st_mtime
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _at(run: Run, *keys: str) -> Any:
    found: Any = run.config
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found
