# SPDX-License-Identifier: Apache-2.0
"""Parameters that a run starts from, where they are not fresh ones."""

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from geojax.config import RunConfig, require
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Params, abstract_params, init_params
from geojax.models.weights import load_safetensors, read_config


def host_params(config: RunConfig, resumed: bool) -> Params:
    """What a run begins with, on the host: fresh parameters or those of `init`. Of a `resumed` one,
    whose checkpoint takes their place, zeros: the folder of `init` may be gone."""
    if resumed:
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract_params(config.model))
    if config.init:
        return read_init(config.init, config.model)
    return jax.tree.map(np.asarray, init_params(config.model, config.seed))


def read_init(folder: str, model: TransformerConfig, shardings: Params | None = None) -> Params:
    """Parameters from a folder of safetensors, on the host, or with `shardings`, one at every leaf,
    tensor by tensor on their devices. ConfigError where they are of another model.

    A causal model's become a bidirectional one's as they are (Gong et al. 2025, "Scaling Diffusion
    Language Models via Adaptation from Autoregressive Models"), best with `shifted`. Where the
    model has more entries than they have, as for a mask token, each new one begins as the mean of
    the others.
    """
    path = Path(folder).expanduser()
    theirs = read_config(path)
    free = ["dropout", "attention_dropout", "embed_init"]
    if theirs.causal and not model.causal:
        free += ["bidirectional", "shifted"]
    if theirs.vocab_size < model.vocab_size:
        free.append("vocab_size")
    expected = replace(theirs, **{name: getattr(model, name) for name in free})
    differ = {
        f"model.{f.name} {getattr(model, f.name)!r}": f"{getattr(expected, f.name)!r}"
        for f in fields(model)
        if getattr(model, f.name) != getattr(expected, f.name)
    }
    require(
        not differ,
        f"init {folder} is of another model: {', '.join(differ)} is {', '.join(differ.values())} "
        "there; set it to match",
    )
    tables = {"embed", "head"} if theirs.vocab_size < model.vocab_size else set()
    where = shardings
    if shardings and theirs.padded_vocab != model.padded_vocab:
        # Of another length, which need not divide as the model's does.
        whole = {name: _whole(shardings[name]) for name in tables & shardings.keys()}
        where = shardings | whole
    params = load_safetensors(path, theirs, shardings=where)
    for name in tables & params.keys():
        grow = partial(_grown, entries=theirs.vocab_size, model=model, xp=jnp if shardings else np)
        if shardings:
            grow = jax.jit(grow, out_shardings=shardings[name])
        params[name] = grow(params[name])
    return params


def _grown(table: Any, entries: int, model: TransformerConfig, xp: Any) -> Any:
    """A table of the vocabulary for a model of more than `entries`; `xp`: jax.numpy or numpy."""
    mean = xp.mean(table[:entries], axis=0, dtype=np.float32)
    longer = xp.pad(table, [(0, model.padded_vocab - len(table)), (0, 0)])
    number = xp.arange(model.padded_vocab)[:, None]
    return xp.where(number < entries, longer, xp.where(number < model.vocab_size, mean, 0))


def _whole(sharding: NamedSharding) -> NamedSharding:
    """The same devices, each with all of it."""
    return NamedSharding(sharding.mesh, PartitionSpec())
