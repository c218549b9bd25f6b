# SPDX-License-Identifier: Apache-2.0
"""Parameters that a run starts from, where they are not fresh ones."""

from dataclasses import fields, replace
from pathlib import Path

import jax
import numpy as np

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


def read_init(folder: str, model: TransformerConfig) -> Params:
    """Host parameters from a folder of safetensors; ConfigError where they are of another model.

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
    params = load_safetensors(path, theirs)
    for name in ("embed", "head"):
        if name in params:
            params[name] = _grown(params[name], theirs.vocab_size, model)
    return params


def _grown(table: np.ndarray, entries: int, model: TransformerConfig) -> np.ndarray:
    """A table of the vocabulary for a model of more `entries`."""
    if entries == model.vocab_size:
        return table
    grown = np.zeros((model.padded_vocab, *table.shape[1:]), table.dtype)
    grown[:entries] = table[:entries]
    grown[entries : model.vocab_size] = table[:entries].mean(0, dtype=np.float32)
    return grown
