# SPDX-License-Identifier: Apache-2.0
"""A diffusion model with what sampling needs of it, from a run or from converted weights."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Int32, Int64

from geojax.config import ConfigError, require
from geojax.data import Tokenizer, read_tokenizer
from geojax.data.tokenizer import wrap
from geojax.diffusion.sampler import Sampler
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Params, Transformer
from geojax.models.weights import SpecialTokens, forbidden_ids, load_safetensors, read_special
from geojax.models.weights import read_config as read_weights_config
from geojax.models.weights.bpe_files import read_bpe
from geojax.models.weights.special import TOKENIZER
from geojax.trained import read_run

if TYPE_CHECKING:
    import tokenizers

_TURN_ENDS = ("<|eot_id|>", "<|im_end|>")  # end an answer in a conversation
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class Model:
    """A bidirectional model, its text and its special tokens."""

    folder: Path
    config: TransformerConfig
    params: Params
    special: SpecialTokens
    tokenizer: "tokenizers.Tokenizer | None"
    """None where the model has no text."""
    end_ids: tuple[int, ...]

    @property
    def mask_id(self) -> int:
        assert self.special.mask is not None, "load refuses models without one"
        return self.special.mask

    @cached_property
    def revision(self) -> str:
        """Names the weights, as `revision` does."""
        return revision(self.params)

    def encode(self, text: str, special: bool = False) -> Int32[np.ndarray, " n"]:
        """Ids of `text`; what spells a special token is one only where `special`.

        ConfigError where there is no tokenizer, or the text is not Unicode.
        """
        return np.array(self._encoding(text, special).ids, np.int32)

    def encode_with_starts(
        self, text: str
    ) -> tuple[Int32[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """The same, special tokens included, and where in the text each begins."""
        found = self._encoding(text, True)
        starts = [start for start, _ in found.offsets]
        return np.array(found.ids, np.int32), np.array(starts, np.int64)

    def _encoding(self, text: str, special: bool) -> "tokenizers.Encoding":
        inner = self._text()
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the text has half of a surrogate pair, {text[error.start]!r}, at place "
                f"{error.start}, which is not Unicode; leave it out"
            ) from error
        before, inner.encode_special_tokens = inner.encode_special_tokens, not special
        try:
            return inner.encode(text, add_special_tokens=False)
        finally:
            inner.encode_special_tokens = before

    def decode(self, ids: Int32[np.ndarray, " n"]) -> str:
        """Text of `ids`; special tokens are left out."""
        return self._text().decode([int(i) for i in ids], skip_special_tokens=True)

    def sampler(self, dtype: DTypeLike | None = None) -> Sampler:
        """Of the parameters as they are, or of a copy of them in another type."""
        params = self.params
        if dtype is not None:
            params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
        forbidden = forbidden_ids(self.special, self.tokenizer, self.config.vocab_size)
        forbidden[list(self.end_ids)] = False
        return Sampler(
            Transformer(self.config),
            params,
            self.mask_id,
            forbidden,
            self.end_ids,
            jax.tree.leaves(params)[0].dtype,
        )

    def _text(self) -> "tokenizers.Tokenizer":
        if self.tokenizer is None:
            raise ConfigError(
                f"{self.folder} has no {TOKENIZER}; put the model's beside its weights"
            )
        return self.tokenizer


def revision(params: Params) -> str:
    """Names parameters: the first 16 hex digits of the SHA-256 of all of them, in their type."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def load(folder: Path | str, dtype: DTypeLike = jnp.float32) -> Model:
    """The diffusion model in a run folder, or in one of safetensors as `geojax convert` writes,
    its parameters in `dtype` on the default device.

    The revision is of them in that type.

    ConfigError where there is none, it is causal, or nothing says which token is the mask.
    """
    folder = Path(folder).expanduser()
    require(folder.is_dir(), f"{folder} is not a folder; name that of a run or of weights")
    read = _of_run if (folder / "metrics.jsonl").is_file() else _of_weights
    config, params, special, tokenizer = read(folder, jnp.dtype(dtype))
    ends = {special.eos}
    for name in _TURN_ENDS if tokenizer is not None else ():
        end = tokenizer.token_to_id(name)
        require(
            end is None or end < config.vocab_size,
            f"{folder}: the tokenizer's {name} is id {end}, beyond the model's vocabulary of "
            f"{config.vocab_size}; put the tokenizer of these weights beside them",
        )
        ends.add(end)
    end_ids = tuple(sorted(i for i in ends if i is not None))
    return Model(folder, config, params, special, tokenizer, end_ids)


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """That of a folder of weights: its tokenizer.json, or else made of vocab.json, merges.txt and
    added tokens; None where it has neither. ConfigError where a file cannot be used."""
    if (folder / TOKENIZER).is_file():
        return read_tokenizer(folder / TOKENIZER)
    inner = read_bpe(folder)
    return inner and wrap(inner, str(folder))


def _of_weights(
    folder: Path, dtype: np.dtype
) -> tuple[TransformerConfig, Params, SpecialTokens, Any]:
    config, special = read_weights_config(folder), read_special(folder)
    _require_bidirectional(folder, config)
    require(
        special.mask is not None,
        f"{folder} does not say which token is the mask; set mask_token_id in its config.json",
    )
    tokenizer = find_tokenizer(folder)
    # A leaf moves to the device as soon as it is whole.
    params = load_safetensors(folder, config, dtype, place=lambda path, leaf: jnp.asarray(leaf))
    return config, params, special, tokenizer and tokenizer.inner


def _of_run(folder: Path, dtype: np.dtype) -> tuple[TransformerConfig, Params, SpecialTokens, Any]:
    config, params, special, tokenizer = read_run(folder)
    _require_bidirectional(folder, config.model)
    require(
        config.data.masking is not None and config.data.masking.kind == "diffusion",
        f"{folder} was not trained by masked diffusion (data.masking.kind); name a run that was, "
        "such as one of preset llada-tiny",
    )
    require(
        special.mask is not None,
        f"the text of {folder} and its tokenizer are gone from the cache; make them again with "
        "`geojax data` and the run's settings",
    )
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    return config.model, params, special, tokenizer and tokenizer.inner


def _require_bidirectional(folder: Path, config: TransformerConfig) -> None:
    require(
        not config.causal,
        f"{folder} holds a causal {config.family}, which predicts the next token and fills no "
        "masks; name a diffusion model, such as a run of preset llada-tiny",
    )
