# SPDX-License-Identifier: Apache-2.0
"""BiCache around a sampler of one's own: four requests share the keys and values of their prefix.

A sampler's rule reads the logits of masked positions: it gives each a token, and a score by which
the request's policy says which are filled. Here it is min-p (Nguyen et al. 2024, "Turning Up the
Heat"): a draw from the tokens that are at least a tenth as likely as the likeliest.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

import geojax
from geojax.config import SourceConfig


def min_p(logits, forbidden, draws, step, positions) -> geojax.Reading:
    """[b, r] tokens and scores of logits [b, r, V]; seeds [b], steps [b], positions [b, r]."""
    logits = jnp.where(forbidden, -1e30, logits)
    probs = jax.nn.softmax(logits)
    kept = probs >= 0.1 * probs.max(-1, keepdims=True)

    def noise(seed, step, position):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), position)
        return jax.random.gumbel(key, logits.shape[-1:])

    drawn = jax.vmap(jax.vmap(noise, (None, None, 0)))(draws.seed, step, positions)
    token = jnp.argmax(jnp.where(kept, logits + drawn, -jnp.inf), axis=-1)
    return geojax.Reading(token, jnp.take_along_axis(probs, token[..., None], axis=-1)[..., 0])


if __name__ == "__main__":
    base = geojax.load_config("llada-tiny")
    train = replace(base.train, total_tokens=100_000)
    data = replace(base.data, source=SourceConfig(kind="pydoc"))
    with tempfile.TemporaryDirectory() as folder:
        geojax.start(replace(base, train=train, data=data), Path(folder) / "run")
        model = geojax.load_model(Path(folder) / "run")
    prefix = model.encode("The statements of this language, one after another, and what each does.")
    ask = geojax.SamplingConfig(steps=8, block=0)
    requests = [
        geojax.prompt([*prefix, *model.encode(f" The {word} statement")], 16, model.mask_id, ask)
        for word in ("for", "while", "with", "try")
    ]
    sampler = replace(model.sampler(), read=min_p)
    sizes = geojax.Sizes(kv_bytes=2**24, hidden_bytes=2**22)
    depths = geojax.Depths(((0.0, 1),))  # share the first layer; `geojax profile depth` finds more
    for name in ("none", "bicache"):
        engine = geojax.Engine(sampler, geojax.get_policy(name), sizes, depths)
        answers = engine.answer([geojax.Job(r, segments=(len(prefix),)) for r in requests])
        rows = engine.work["suffix"] + engine.work["prefix"] + engine.store.counts.built_rows
        print(f"{name}: {rows:,.0f} rows through a layer")
    print("\n".join(repr(model.decode(answer.new)) for answer in answers))
