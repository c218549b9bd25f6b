# SPDX-License-Identifier: Apache-2.0
"""The byte-level BPE tokenizer of a GGUF file, as the `tokenizers` library has it.

Invariant: ids are the file's. How text is cut before merges apply is only named there, so that a
name which is not known here is refused: with other cuts, ids would be right almost everywhere.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from geojax.config.base import ConfigError, require

if TYPE_CHECKING:
    import tokenizers

_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens, in the format's numbers

# Llama 3's cuts: contractions, words with the sign before them, up to three digits, signs, blanks.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(get: Callable[[str], Any], where: str) -> "tokenizers.Tokenizer":
    """The tokenizer that the settings under tokenizer.ggml describe; `get` gives None for no value.

    Raises ConfigError where there is none or it is of another kind.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    kind, cuts = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre")
    require(
        kind == "gpt2",
        f"{where}: tokenizer {kind!r} is not implemented, only 'gpt2' (byte-level BPE); import the "
        "model from its Hugging Face folder",
    )
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    known = {
        "gpt-2": plain,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain]),
        "llama-bpe": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), raw]
        ),
    }
    require(
        cuts in known,
        f"{where}: pre-tokenizer {cuts!r} is not implemented, only {', '.join(known)}; import the "
        "model from its Hugging Face folder",
    )
    tokens, merges = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.merges")
    kinds = get("tokenizer.ggml.token_type")
    require(tokens and merges, f"{where} has no tokens or no merges; fetch it again")
    ids = {token: i for i, token in enumerate(tokens)}
    try:
        # A merge's halves have no space inside, as bytes have letters of their own.
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        # Llama 3 has words that no merges lead to.
        bpe = models.BPE(ids, pairs, ignore_merges=cuts == "llama-bpe")
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{where}: its tokenizer cannot be made: {error}") from error
    inner = Tokenizer(bpe)
    inner.pre_tokenizer = known[cuts]
    inner.decoder = decoders.ByteLevel()
    numbered = zip(tokens, kinds or (), strict=False)
    special, plain_added = [], []
    for token, number in numbered:
        if number == _CONTROL:
            special.append(AddedToken(token, normalized=False, special=True))
        elif number == _USER_DEFINED:
            plain_added.append(AddedToken(token, normalized=False))
    inner.add_special_tokens(special)
    inner.add_tokens(plain_added)
    return inner
