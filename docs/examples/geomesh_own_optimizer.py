# SPDX-License-Identifier: Apache-2.0
"""GeoMesh over an inner optimizer of one's own: two slices, one sign bit a parameter.

The optimizer is any of optax's at learning rate 1: the run's rate multiplies its updates. Here it
is Muon, which makes the momentum of a layer's matrices [layers, in, out] orthogonal, one by one.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

import geojax
from geojax.config import OptimizerConfig, SourceConfig


def matrices(params):
    """Muon's of the layers' matrices; None: AdamW's, as of tables and norms."""

    def dims(path, leaf):
        in_layers = path[0].key == "blocks" and leaf.ndim == 3
        return MuonDimensionNumbers(reduction_axis=1, output_axis=2) if in_layers else None

    return jax.tree_util.tree_map_with_path(dims, params)


def optimizer() -> optax.GradientTransformation:
    return muon(1.0, muon_weight_dimension_numbers=matrices, consistent_rms=0.2)


if __name__ == "__main__":
    base = geojax.load_config("quickstart")
    own = OptimizerConfig("own", learning_rate=1e-2, function=geojax.reference(optimizer))
    config = replace(
        base,
        data=replace(base.data, source=SourceConfig(kind="pydoc")),
        train=replace(base.train, total_tokens=100_000, optimizer=own),
    )
    with tempfile.TemporaryDirectory() as folder:
        geojax.start(config, Path(folder) / "run")
        records = geojax.read_records(Path(folder) / "run" / "metrics.jsonl")
    losses = [r["perplexity"] for r in records if r["kind"] == "eval"]
    (sent,) = (r["payload_bytes"] for r in records if r["kind"] == "start")
    print(f"perplexity: {losses[0]:.1f} at first, {losses[-1]:.1f} at the end")
    print(f"each slice sends {sent:,} bytes a round")
