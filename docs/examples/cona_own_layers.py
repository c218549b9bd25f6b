# SPDX-License-Identifier: Apache-2.0
"""A model with layers of one's own, its strategy chosen by CONA while it trains.

The layer, made and called as geojax.models.transformer.Block is, has a gated recurrence in place of
attention (minGRU, Feng et al. 2024, "Were RNNs All We Needed?"). Training is real, on one device;
times are those of Llama-3.2-1B on eight A100s, modelled. With `clock=ClockConfig()` CONA measures,
and chooses among the devices there are.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import jax
from flax import nnx

import geojax
from geojax.config import ConaConfig, SourceConfig
from geojax.models.layers import GatedMLP, make_norm, normal_init


class Recurrence(nnx.Module):
    def __init__(self, config, *, rngs):
        # What is named ..._norm also tells CONA the noise of the gradient, by sequence.
        self.mix_norm, self.mlp_norm = make_norm(config), make_norm(config)
        self.forget = normal_init(rngs, config.dim, config.dim, fan_in=config.dim)
        self.new = normal_init(rngs, config.dim, config.dim, fan_in=config.dim)
        self.mlp = GatedMLP(config, rngs=rngs)

    def __call__(self, x, rotary, inputs, collectives, attend):
        """[b, t, d] to the same: h[t] = keep[t] h[t-1] + (1 - keep[t]) new[t]."""
        seen = self.mix_norm(x)
        keep = jax.nn.sigmoid(seen @ self.forget[...].astype(x.dtype) + 2)
        new = (1 - keep) * (seen @ self.new[...].astype(x.dtype))
        x = (
            x
            + jax.lax.associative_scan(
                lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (keep, new), axis=1
            )[1]
        )
        return x + self.mlp(self.mlp_norm(x), collectives)


if __name__ == "__main__":
    base = geojax.load_config("cona-llama-tiny")
    config = replace(
        base,
        model=replace(base.model, block=geojax.reference(Recurrence)),
        data=replace(base.data, source=SourceConfig(kind="pydoc")),
        train=replace(base.train, total_tokens=200_000),
        cona=ConaConfig(global_batches=(4, 16, 64)),
    )
    with tempfile.TemporaryDirectory() as folder:
        geojax.start(config, Path(folder) / "run")
        records = geojax.read_records(Path(folder) / "run" / "metrics.jsonl")
    chain = [(r["tokens"], r["to"]) for r in records if r["kind"] == "switch"]
    losses = [r["perplexity"] for r in records if r["kind"] == "eval"]
    print("chain:", "; ".join(f"{name} from {tokens:,}" for tokens, name in chain))
    print(f"perplexity: {losses[0]:.1f} at first, {losses[-1]:.1f} at the end")
