# SPDX-License-Identifier: Apache-2.0
"""A trace's summary is made of devices' own time and nothing else."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from geojax.config import RunError
from geojax.platform import summarize, trace_steps


def test_a_jitted_function_on_the_cpu(tmp_path):
    @jax.jit
    def step(x):
        return jnp.sin(x @ x).sum()

    x = jnp.ones((400, 400))
    step(x).block_until_ready()
    with trace_steps(tmp_path / "trace") as trace:
        for _ in range(3):
            step(x).block_until_ready()
    assert trace.file.is_file()
    assert trace.file.is_relative_to(tmp_path / "trace")
    summary = trace.summary
    assert 0 < summary.device_seconds < 60
    assert 1 <= len(summary.top) <= 15
    seconds = [op.seconds for op in summary.top]
    assert seconds == sorted(seconds, reverse=True)
    assert sum(op.share for op in summary.top) == pytest.approx(1)
    compiled = step.lower(x).compile().as_text()
    assert all(op.name in compiled for op in summary.top)


def test_a_second_trace_is_refused_and_the_first_goes_on(tmp_path):
    with trace_steps(tmp_path / "one") as trace:
        with pytest.raises(RunError, match="cannot trace into"), trace_steps(tmp_path / "two"):
            pass
        jnp.ones(3).block_until_ready()
    assert trace.file is not None


def test_an_error_inside_ends_the_trace(tmp_path):
    with pytest.raises(ZeroDivisionError), trace_steps(tmp_path):
        raise ZeroDivisionError
    with trace_steps(tmp_path):
        pass


def write(file, events):
    with gzip.open(file, "wt") as stream:
        json.dump({"traceEvents": events}, stream)
    return file


def named(kind, name, pid, tid=0):
    return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def span(name, start, duration, pid=1, tid=1, **arguments):
    where = {"pid": pid, "tid": tid, "ts": start, "dur": duration}
    return {"ph": "X", "name": name, "args": arguments} | where


def test_on_gpus_streams_count_and_neither_host_nor_derived_rows_do(tmp_path):
    events = [
        named("process", "/device:GPU:0", 1),
        named("process", "/device:GPU:1", 2),
        named("process", "/host:CPU", 3),
        named("thread", "Stream #13(Compute)", 1, 1),
        named("thread", "Stream #13(Compute)", 2, 1),
        named("thread", "XLA Modules", 1, 2),
        named("thread", "python", 3, 1),
        span("gemm_kernel", 0, 300, hlo_op="dot.1"),
        span("gemm_kernel", 400, 300, hlo_op="dot.1"),
        span("gemm_kernel", 0, 300, pid=2, hlo_op="dot.1"),
        span("MemcpyD2D", 700, 100),
        span("jit_step", 0, 800, tid=2, hlo_op="jit_step"),
        span("launch", 0, 900, pid=3, hlo_op="dot.1"),
    ]
    summary = summarize(write(tmp_path / "t.gz", events))
    assert summary.device_seconds == pytest.approx(1000e-6)
    assert [op.name for op in summary.top] == ["dot.1", "MemcpyD2D"]
    assert [op.share for op in summary.top] == pytest.approx([0.9, 0.1])
    (only,) = summarize(tmp_path / "t.gz", top=1).top
    assert only.seconds == pytest.approx(900e-6)


def test_nested_spans_count_once_for_the_inner(tmp_path):
    events = [
        span("while", 0, 100, hlo_op="while"),
        span("body", 10, 30, hlo_op="body"),
        span("inner", 20, 10, hlo_op="inner"),
        span("body", 40, 50, hlo_op="body"),
        span("after", 100, 20, hlo_op="after"),
        span("elsewhere", 0, 100, tid=2, hlo_op="elsewhere"),
        span("no op", 0, 500),
    ]
    summary = summarize(write(tmp_path / "t.gz", events))
    own = {op.name: round(op.seconds * 1e6) for op in summary.top}
    assert own == {"while": 20, "body": 70, "inner": 10, "after": 20, "elsewhere": 100}
    assert summary.device_seconds == pytest.approx(220e-6)


def test_a_trace_without_device_operations_has_no_summary(tmp_path):
    assert summarize(write(tmp_path / "t.gz", [span("python", 0, 5)])) is None
