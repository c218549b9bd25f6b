# SPDX-License-Identifier: Apache-2.0
"""What was measured, in plain words.

Invariant: a figure that was not measured is not printed; what failed, and what was left out, is.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from geojax.bench.gpu.stages import Content
from geojax.track.console import format_bytes, format_count, format_seconds, format_share


def header(measured: dict[str, Any], device: Content) -> list[str]:
    """What is measured, and where."""
    known = device["result"].get("known_as")
    lines = [f"{measured['device']}, {measured['machine']}, jax {measured['versions']['jax']}"]
    if measured["tiny"]:
        lines.append("Small shapes on a CPU: this tries the script, and its times say nothing.")
    elif known is None:
        lines.append(
            "No data sheet of it is known (GPUS in meshes/hardware.py): no MFU, and a plan wants "
            "its figures as those of NOMINAL there."
        )
    return lines


def outcome(name: str, content: Content) -> list[str]:
    """A stage that is over: how it went, and what it found."""
    took = format_seconds(content.get("seconds", 0.0))
    state = "failed in part" if content["errors"] else "skipped" if content["skipped"] else "done"
    lines = [f"{name}: {state}, {took}"]
    if content["skipped"]:
        lines.append(f"  skipped: {content['skipped']}")
    lines += [f"  {line}" for line in _FOUND[name](content["result"])]
    lines += [f"  failed: {piece}: {text}" for piece, text in content["errors"].items()]
    return lines + [f"  left out: {piece}" for piece in content["left_out"]]


def summary(measured: dict[str, Any], out: Path) -> list[str]:
    """The whole, in a table of stages, and what the file is for."""
    rows = [("stage", "took", "failed", "left out", "")]
    for name, content in measured["stages"].items():
        counts = (str(len(content["errors"])), str(len(content["left_out"])))
        took = format_seconds(content.get("seconds", 0.0))
        rows.append((name, took, *counts, "skipped" if content["skipped"] else ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["", *("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)]
    training = measured["stages"].get("train", {}).get("result", {}).get("training")
    if training:
        lines.append(f"Training: {_speed(training)}, {training['strategy']}.")
    if fit := measured.get("fit"):
        apart = fit["median_error_left_out"]
        lines.append(
            f"Timing model: {fit['rows']} steps timed; the A100 rows' model is off by "
            f"{format_share(fit['median_error_before'])} in the median, the corrected one by "
            f"{format_share(fit['median_error'])}"
            + ("." if apart is None else f", or {format_share(apart)} on steps left out of it.")
        )
        lines.append(f"wrote {out}: `geojax plan MODEL --calibration {out}` reads it")
    else:
        lines.append(f"wrote {out}; no step was timed, so `geojax plan` cannot read it")
    return [line.rstrip() for line in lines]


def _device(found: dict[str, Any]) -> list[str]:
    rates = {"matmul_flops_per_second": "FLOP/s", "copied_bytes_per_second": "B/s read and written"}
    return [f"{format_count(found[key])} {unit}" for key, unit in rates.items() if key in found]


def _kernels(found: dict[str, Any]) -> list[str]:
    worst: dict[str, list[float]] = {}
    for row in found.get("checked", []):
        errors = [row["error"], row.get("gradient_error", 0.0)]
        worst.setdefault(row["kernel"], []).append(max(map(_number, errors)))
    return [f"{k}: {len(v)} cases, largest error {max(v):.1e}" for k, v in worst.items()]


def _train(found: dict[str, Any]) -> list[str]:
    lines = _steps(found)
    if training := found.get("training"):
        t = training
        lines.append(
            f"{t['steps']} steps of {t['strategy']}: {_speed(t)}; loss {t['loss_first_tenth']:.2f} "
            f"to {t['loss_last_tenth']:.2f}, at least {t['loss_least']:.2f}"
        )
        lines.append(f"text: {t['text']}")
    return lines


def _steps(found: dict[str, Any]) -> list[str]:
    lines = []
    for r in found.get("timed", []):
        peak = format_bytes(r["peak_bytes"]) if r["peak_bytes"] else "not told"
        lines.append(
            f"{r['model']} {r['seq_len']} {r['strategy']}: {format_seconds(r['seconds'])}, "
            f"{_speed(r)}; estimated {format_bytes(r['estimated_bytes'])}, by the compiler "
            f"{format_bytes(r['compiler_bytes'])}, peak {peak}"
        )
    return lines


def _engine(found: dict[str, Any]) -> list[str]:
    rows = found.get("policies", [])
    plain = {r["batch"]: r["seconds"] for r in rows if r["policy"] == "none"}
    lines = []
    for r in rows:
        line = (
            f"{r['policy']}, batch {r['batch']}: {r['tokens_per_second']:.1f} tokens/s, "
            f"{r['steps_per_second']:.1f} denoising steps/s"
        )
        if r["batch"] in plain:
            line += f", {plain[r['batch']] / r['seconds']:.2f}x of no reuse"
        lines.append(line)
    return lines


def _attention(found: dict[str, Any]) -> list[str]:
    lines = []
    for r in found.get("timed", []):
        bound = r["share_of_bound"]
        share = "" if bound is None else f", {format_share(bound)} of what the data sheet allows"
        lines.append(
            f"{r['kernel']}, {r['model']}, {r['case']}: {1e6 * r['seconds']:.1f} us{share}"
        )
    return lines


def _speed(row: dict[str, Any]) -> str:
    share = "" if row["mfu"] is None else f", MFU {format_share(row['mfu'])}"
    return f"{format_count(row['tokens_per_second'])} tokens/s{share}"


def _number(error: float | None) -> float:
    """JSON has no infinity: one is written as null."""
    return float("inf") if error is None else error


_FOUND: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "device": _device,
    "kernels": _kernels,
    "train": _train,
    "steps": _steps,
    "engine": _engine,
    "attention": _attention,
}
