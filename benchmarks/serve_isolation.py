# SPDX-License-Identifier: Apache-2.0
"""Can a tenant tell by time what another one asked before? And by the same means its own requests?

    python benchmarks/serve_isolation.py [--pairs 1000]

For each pair one tenant asks a prefix that nobody asked before. Then the time of the same prefix is
compared with that of another new one: asked by a second tenant, and asked by the first one again,
which is the positive control. The area under the ROC curve (the chance that the new one is slower)
is 0.5 where times tell nothing. Exit code 1 where across tenants it lies outside of 0.45-0.55, or
within one it is not above 0.9.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import httpx2
import numpy as np
from scipy.stats import mannwhitneyu
from serve import EOS, Served, make_model

from geojax.track.environment import machine

NAMES = ("first", "second")
PREFIX = 512
"""Tokens: enough for the control, since one that is built beforehand saves a few milliseconds."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=1000)
    pairs = parser.parse_args().pairs
    keys = {name: f"{name}-0123456789abcdef" for name in NAMES}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys"
        path.write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
        served = Served(make_model(), 1, path)
    rng, order = np.random.default_rng(0), random.Random(0)

    def fresh() -> list[int]:
        return rng.integers(0, EOS, PREFIX).tolist()

    def ask(client: httpx2.Client, name: str, prefix: list[int]) -> float:
        """Milliseconds."""
        body = {"prompt": [*prefix, 1, 2, 3], "max_tokens": 1, "prefix_tokens": PREFIX, "seed": 0}
        headers = {"Authorization": f"Bearer {keys[name]}"}
        began = time.perf_counter()
        client.post("/v1/completions", json=body, headers=headers).raise_for_status()
        return 1000 * (time.perf_counter() - began)

    times: dict[tuple[str, str], list[float]] = {}
    try:
        with httpx2.Client(base_url=served.url, timeout=600) as client:
            for name in (*NAMES, *NAMES):
                ask(client, name, fresh())
            for _ in range(pairs):
                known = fresh()
                ask(client, "first", known)
                trials = [(n, kind) for n in reversed(NAMES) for kind in ("known", "new")]
                # The second tenant first: afterwards its own prefix would be stored, too.
                halves = trials[:2], trials[2:]
                for half in halves:
                    order.shuffle(half)
                for name, kind in (*halves[0], *halves[1]):
                    prefix = known if kind == "known" else fresh()
                    times.setdefault((name, kind), []).append(ask(client, name, prefix))
    finally:
        served.stop()
    found = {}
    for name in NAMES:
        known, new = times[name, "known"], times[name, "new"]
        found[name] = mannwhitneyu(new, known).statistic / (len(new) * len(known))
        print(
            f"asked by the {name} tenant: known prefix {np.median(known):.2f} ms, new "
            f"{np.median(new):.2f} ms (medians), AUC {found[name]:.3f}"
        )
    print(f"{pairs} pairs, measured clock, {machine()}")
    return 0 if found["first"] > 0.9 and 0.45 <= found["second"] <= 0.55 else 1


if __name__ == "__main__":
    sys.exit(main())
