# SPDX-License-Identifier: Apache-2.0
"""An engine of a model's shape with random weights, and requests that share a prefix: what speed
needs, and nothing else."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from geojax.bicache.engine import Job, Sizes
from geojax.bicache.pages import PAGE, hidden_page_bytes, kv_page_bytes, pages_of
from geojax.diffusion.request import SamplingConfig, prompt
from geojax.diffusion.sampler import Sampler
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Params, Transformer, abstract_params


def random_weights(config: TransformerConfig, dtype: DTypeLike) -> Params:
    """Normal ones of the size that fresh ones have, made in `dtype` on the device."""
    leaves, tree = jax.tree.flatten(abstract_params(config))

    def make(key, shape):
        fan_in = shape[-2] if len(shape) > 1 else 1
        return jax.random.normal(key, shape, dtype) / jnp.sqrt(fan_in).astype(dtype)

    made = jax.jit(make, static_argnums=1)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten([made(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


def random_sampler(config: TransformerConfig, dtype: DTypeLike) -> Sampler:
    """Of random weights; its mask is the last id."""
    mask = config.vocab_size - 1
    forbidden = np.arange(config.vocab_size) == mask
    weights = random_weights(config, dtype)
    return Sampler(Transformer(config), weights, mask, forbidden, dtype=jnp.dtype(dtype))


def shared_jobs(
    mask: int, batch: int, prefix: int, private: int, canvas: int, sampling: SamplingConfig
) -> list[Job]:
    """`batch` requests for `canvas` tokens after `prefix` tokens that all share and `private` of
    their own, all random ids below `mask`."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, mask, prefix).tolist()
    return [
        Job(
            prompt([*shared, *rng.integers(0, mask, private).tolist()], canvas, mask, sampling),
            (prefix,),
        )
        for _ in range(batch)
    ]


def roomy_sizes(config: TransformerConfig, dtype: DTypeLike, jobs: Sequence[Job]) -> Sizes:
    """Twice what the jobs hold at once, each with a prefix of its own, and one shared prefix."""
    rows = [len(job.request.tokens) for job in jobs]
    pages = sum(pages_of(n) + 1 for n in [*rows, max(rows)])
    kv_bytes = 2 * config.layers * pages * kv_page_bytes(config, dtype)
    hidden = 4 * pages_of(max(rows)) * hidden_page_bytes(config, dtype, PAGE)
    return Sizes(kv_bytes, hidden)
