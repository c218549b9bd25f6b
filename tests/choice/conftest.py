# SPDX-License-Identifier: Apache-2.0
"""Folders of small random models with a tokenizer, as `geojax convert` writes them."""

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from geojax.models.config import TransformerConfig
from geojax.models.transformer import abstract_params
from geojax.models.weights import SpecialTokens, save_safetensors

MASK, EOS = 257, 256
CAUSAL = TransformerConfig(
    vocab_size=258, dim=16, layers=2, heads=4, kv_heads=2, mlp_dim=24, context=64
)
DIFFUSION = TransformerConfig(
    vocab_size=258, dim=16, layers=2, heads=2, kv_heads=2, mlp_dim=24, context=64,
    bidirectional=True,
)  # fmt: skip


def write(folder, config):
    """A model whose text is bytes."""
    rng = np.random.default_rng(0)
    draw = lambda leaf: rng.normal(0, 0.4, leaf.shape).astype(np.float32)  # noqa: E731
    params = jax.tree.map(draw, abstract_params(config))
    mask = None if config.causal else MASK
    save_safetensors(params, config, folder, special=SpecialTokens(mask=mask, eos=EOS))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>", "<|mdm_mask|>"])
    inner.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def causal(tmp_path_factory):
    return write(tmp_path_factory.mktemp("causal") / "model", CAUSAL)


@pytest.fixture(scope="session")
def diffusion(tmp_path_factory):
    return write(tmp_path_factory.mktemp("diffusion") / "model", DIFFUSION)
