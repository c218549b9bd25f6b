# SPDX-License-Identifier: Apache-2.0
"""Speed of the sign codec at 150M parameters, beside a device copy of the same float32 buffer.

All three are timed in turn in one run, several times over, on the same machine; the ratios to the
copy of the same turn are what counts. Run it as `python benchmarks/codec.py [--json PATH]`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from geojax.config import ExchangeConfig
from geojax.geomesh.codec import decode, encode
from geojax.geomesh.layout import make_layout
from geojax.geomesh.message import FRAME_BYTES
from geojax.meshes.wan import ring_all_reduce_bytes
from geojax.models.config import get_model
from geojax.models.transformer import abstract_params
from geojax.track.environment import machine, versions
from geojax.track.metrics import write_atomically

MESSAGES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-150m")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    shapes = abstract_params(get_model(options.model))
    layout = make_layout(shapes, ExchangeConfig(codec="sign"))
    rng = np.random.default_rng(0)
    leaves = [rng.standard_normal(x.shape, np.float32) for x in jax.tree.leaves(shapes)]
    residual = [np.zeros_like(x) for x in leaves]
    merged = [np.zeros_like(x) for x in leaves]
    parameters = sum(x.size for x in leaves)
    buffer = jnp.concatenate([jnp.asarray(x).ravel() for x in leaves])
    copy = jax.jit(jnp.copy)
    message, _ = encode(leaves, layout, residual)
    messages, weights = [message] * MESSAGES, [1 / MESSAGES] * MESSAGES

    seconds: dict[str, list[float]] = {"copy": [], "encode": [], "decode": []}
    for turn in range(options.repeats + 1):  # the first one warms up
        taken = {
            "copy": _time(lambda: copy(buffer).block_until_ready()),
            "encode": _time(lambda: encode(leaves, layout, residual)),
            "decode": _time(lambda: decode(messages, weights, layout, merged)),
        }
        if turn:
            for name, value in taken.items():
                seconds[name].append(value)

    dense = 4 * parameters
    moved = {  # bytes read and written once each: no pass twice over main memory is counted
        "copy": 2 * dense,
        "encode": 3 * dense + layout.num_bytes,
        "decode": dense + MESSAGES * layout.num_bytes,
    }
    print(f"{parameters:,} parameters on {machine()}; median of {options.repeats} turns")
    print(
        f"{'':8}{'seconds':>9}{'min..max':>16}{'over copy':>11}{'least..most':>16}{'GB moved':>10}"
    )
    results = {}
    for name, values in seconds.items():
        ratios = [v / c for v, c in zip(values, seconds["copy"], strict=True)]
        results[name] = {
            "seconds": statistics.median(values),
            "ratio_to_copy": statistics.median(ratios),
            "ratio_spread": [min(ratios), max(ratios)],
            "bytes_moved": moved[name],
        }
        print(
            f"{name:8}{statistics.median(values):9.3f}"
            f"{f'{min(values):.3f}..{max(values):.3f}':>16}{statistics.median(ratios):11.2f}"
            f"{f'{min(ratios):.2f}..{max(ratios):.2f}':>16}{moved[name] / 1e9:10.2f}"
        )
    payload = message.size + FRAME_BYTES
    print(f"payload: {payload:,} bytes packed, {dense / payload:.2f}x under float32")
    for slices in (4, 8, 16):
        shards = [layout.shard(i, slices) for i in range(slices)]
        largest = max(encode(leaves, s)[0].size for s in shards)
        wire = 2 * (slices - 1) * (largest + FRAME_BYTES)
        ratio = ring_all_reduce_bytes(slices, dense) / wire
        results[f"two_phase_{slices}"] = {"wire_bytes": wire, "ratio_to_ring": ratio}
        print(f"two-phase over {slices:2} slices: {wire:,} wire bytes, {ratio:.2f}x under a ring")
    if options.json:
        content = {"clock": "measured", "machine": machine(), "versions": versions(), "seed": 0}
        text = json.dumps(content | {"payload_bytes": payload, "results": results}, indent=2)
        write_atomically(options.json, text + "\n")


def _time(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
