# SPDX-License-Identifier: Apache-2.0
"""Throughput under every policy of reuse, beside what counting operations says.

    python benchmarks/bicache.py [--rounds N] [--batch 1 4] [--out FOLDER]

A model with random weights (512 wide, 12 layers; what it says does not matter here) fills a block
of 32 in 16 steps behind prefixes of 0.5, 0.7 and 0.9 of 512 tokens, everything compiled before. All
policies run in turn in each round, in one process; ratios are of seconds over no reuse of the same
round. Predicted ratios count multiplications: of rows by weights, of queries by keys and values, of
the head, of the rows that requests have; what is padded to the shapes' buckets is not in them.

`full` is also what a block-causal model of this size would do, whose prefixes do not depend on what
follows: the price of seeing both ways is the distance from it.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path
from statistics import median

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

from geojax.bicache.depth import Depths
from geojax.bicache.engine import Engine, Job, Sizes
from geojax.bicache.policy import Policy, get_policy
from geojax.diffusion.request import SamplingConfig, prompt
from geojax.diffusion.sampler import Sampler
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Transformer, init_params
from geojax.track.environment import machine

MODEL = TransformerConfig(
    vocab_size=8192, dim=512, layers=12, heads=8, kv_heads=8, mlp_dim=1408, bidirectional=True
)
MASK, LENGTH, STEPS, BLOCK, DEPTH = 8191, 512, 16, 32, 6
SHARES = (0.5, 0.7, 0.9)
COLD = ("cold", 1)  # bicache whose store is empty
POLICIES = [
    ("refresh", 1),
    ("refresh", 4),
    ("refresh", 16),
    ("full", None),
    ("prefix", None),
    ("dual", None),
    ("bicache", 1),
    ("bicache", 4),
    ("bicache", 16),
    ("bicache-dual", None),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    params = init_params(MODEL, 0)
    sampler = Sampler(Transformer(MODEL), params, MASK, np.arange(8192) == MASK)
    rows = []
    for batch in args.batch:
        for share in SHARES:
            rows += measure(sampler, batch, share, args.rounds)
    machine_line = f"measured clock, {machine()}"
    print(machine_line)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "bicache.json").write_text(
            json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n"
        )
        plot(rows, args.out / "bicache.png")


def measure(sampler: Sampler, batch: int, share: float, rounds: int) -> list[dict]:
    """A row for each policy at one share and batch."""
    prefix, block = round(share * LENGTH), BLOCK
    rng = np.random.default_rng(0)
    shared = rng.integers(0, MASK, prefix)
    canvas, steps = block, STEPS
    private = LENGTH - prefix - canvas
    jobs = [
        Job(
            prompt(
                [*shared.tolist(), *rng.integers(0, MASK, private).tolist()],
                canvas,
                MASK,
                SamplingConfig(steps=steps, block=block),
            ),
            (prefix,),
        )
        for _ in range(batch)
    ]
    engines = {
        (name, every): Engine(
            sampler, get_policy(name, every), Sizes(4e8, 4e7), Depths(((0.0, DEPTH),))
        )
        for name, every in [("none", None), *POLICIES]
    }
    seconds = {key: [] for key in [*engines, COLD]}
    for number in range(rounds + 1):
        for key in seconds:
            engine = engines[("bicache", 1) if key == COLD else key]
            if key == COLD:
                engine.store.purge()
            started = time.perf_counter()
            engine.answer(jobs)
            if number:  # the first compiles, and builds the prefix
                seconds[key].append(time.perf_counter() - started)
    plain = seconds["none", None]
    tokens = batch * canvas / median(plain)
    print(f"batch {batch}, share {share}: no reuse {median(plain):.2f} s, {tokens:.1f} tokens/s")
    rows = []
    for name, every in POLICIES:
        ratios = [a / b for a, b in zip(plain, seconds[name, every], strict=True)]
        policy = get_policy(name, every)
        expected = operations(get_policy("none"), prefix, private, canvas, steps) / operations(
            policy, prefix, private, canvas, steps
        )
        rows.append(
            {
                "batch": batch,
                "share": share,
                "policy": name,
                "every": every,
                "ratio": median(ratios),
                "low": min(ratios),
                "high": max(ratios),
                "predicted": expected,
            }
        )
        label = name if every is None else f"{name}, every {every}"
        print(
            f"  {label:<22}{median(ratios):6.2f}x ({min(ratios):.2f}-{max(ratios):.2f}), predicted "
            f"{expected:.2f}x: {median(ratios) / expected:.2f} of it"
        )
    by = {(r["policy"], r["every"]): r["ratio"] for r in rows}
    for every in (1, 4, 16):
        gain = by["bicache", every] / by["refresh", every]
        print(f"  reuse between requests alone, every {every}: {gain:.2f}x")
    print(f"  bicache-dual over dual: {by['bicache-dual', None] / by['dual', None]:.2f}x")
    build, saved = (
        [a - b for a, b in zip(seconds[more], seconds["bicache", 1], strict=True)]
        for more in (COLD, ("refresh", 1))
    )
    print(
        f"  building the prefix takes {median(build):.2f} s ({DEPTH * prefix} row-layers), and "
        f"{steps} refreshes of {batch} requests save {median(saved):.2f} s: it pays from refresh "
        f"{max(math.ceil(median(build) / (median(saved) / (steps * batch))), 1)} on"
        if median(saved) > 0
        else "  sharing saves nothing here"
    )
    return rows


def operations(policy: Policy, prefix: int, private: int, canvas: int, steps: int) -> float:
    """Multiplications of one request's steps."""
    layers, length = MODEL.layers, prefix + private + canvas
    a_row = 4 * MODEL.dim**2 + 3 * MODEL.dim * MODEL.mlp_dim
    depth = layers if policy.whole else DEPTH if policy.shared else 0
    if policy.name == "none":
        prefix, private = 0, prefix + private
    suffix = private + canvas
    blocks = canvas // BLOCK
    a_block = steps // blocks
    total = 0.0
    for block in range(blocks):
        window = {"suffix": suffix, "rest": canvas - block * BLOCK, "block": BLOCK}[policy.window]
        for step in range(a_block):
            refresh = step == 0 or (policy.every and step % policy.every == 0)
            own = suffix if refresh else window
            again = prefix * (layers - depth) if refresh else 0  # row-layers
            row_layers = own * layers + again
            total += row_layers * (a_row + 2 * length * MODEL.dim)
            masks = BLOCK - step * BLOCK // a_block
            total += max(masks, 1) * MODEL.dim * MODEL.padded_vocab
    return total


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    batches = sorted({r["batch"] for r in rows})
    figure, axes = plt.subplots(1, len(batches), figsize=(5 * len(batches), 4), squeeze=False)
    for axis, batch in zip(axes[0], batches, strict=True):
        for name, every in POLICIES:
            line = [
                r for r in rows if (r["batch"], r["policy"], r["every"]) == (batch, name, every)
            ]
            label = name if every is None else f"{name}, every {every}"
            axis.plot([r["share"] for r in line], [r["ratio"] for r in line], "o-", label=label)
        axis.set(title=f"batch {batch}", xlabel="share of the prefix", ylabel="speed over no reuse")
        axis.axhline(1, color="grey", lw=0.8)
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
