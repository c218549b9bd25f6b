# SPDX-License-Identifier: Apache-2.0
"""Shapes of the Transformer family, as plain dataclasses, and their parameter counts.

Importable without JAX, so that planning and `--help` stay quick. Invariant: a `TransformerConfig`
that exists is one that can be built.
"""

import math
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

VOCAB_MULTIPLE = 128
"""Embeddings and heads are padded to whole multiples of it, so that tensor parallelism can divide
them, and one checkpoint serves every mesh."""
TOKEN_TYPES = 2
"""Rows of a bert's table of token types: first and second sentence."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3's stretching of rotary wavelengths (Dubey et al. 2024, "The Llama 3 Herd of Models").

    Wavelengths beyond `original_context / low_freq_factor` tokens are stretched by `factor`, those
    below `original_context / high_freq_factor` are kept, and those between are interpolated.
    """

    factor: float = 32.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self):
        if not 0 < self.factor < math.inf or self.original_context < 1:
            raise ValueError(
                f"rope factor {self.factor} must be above 0 and finite, and original_context "
                f"{self.original_context} at least 1; Llama 3.2 uses 32 and 8192"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ValueError(
                f"rope low_freq_factor {self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor {self.high_freq_factor}; Llama 3 uses 1 and 4"
            )


@dataclass(frozen=True)
class TransformerConfig:
    """One Transformer.

    llama: causal; RMSNorm before each part, rotary positions, SwiGLU, no biases (Touvron et al.
    2023); with `qkv_bias` it is a Qwen2 (Yang et al. 2024), with `bidirectional` a LLaDA (Nie et
    al. 2025), with both and `shifted` a Dream (Ye et al. 2025). gpt: causal; LayerNorm before each
    part, learned positions, tanh GELU, biases (Radford et al. 2019, Brown et al. 2020). bert: every
    position sees every other; LayerNorm after each part and on the embeddings, learned positions
    and token types, GELU, biases, and a head with a layer of its own (Devlin et al. 2019).
    """

    vocab_size: int
    """Entries that can be predicted; at least the tokenizer's vocabulary."""
    dim: int
    """Width of the residual stream."""
    layers: int
    heads: int
    """Query heads; the head size is dim / heads."""
    kv_heads: int
    """Key/value heads (grouped-query attention where fewer than `heads`)."""
    mlp_dim: int
    """Hidden width of the MLP."""
    tied: bool = False
    """Whether the head is the embedding, transposed."""
    family: Literal["llama", "gpt", "bert"] = "llama"
    context: int = 0
    """Most positions of a sequence; gpt and bert learn that many, llama takes any where it is 0."""
    dropout: float = 0.0
    """Probability that an element of the embeddings, or of what a part adds to the residual
    stream, is zeroed while training."""
    attention_dropout: float = 0.0
    """The same of attention probabilities."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    bidirectional: bool = False
    """Whether every position of a llama sees every other, as in a model of masked diffusion."""
    qkv_bias: bool = False
    """Whether a llama's queries, keys and values have biases."""
    shifted: bool = False
    """Whether row i predicts token i + 1 though it sees that token's place too, as a model does
    that was made of an autoregressive one; where unset, a bidirectional model's predicts token i.
    """
    embed_init: float = 0.0
    """Deviation of a fresh embedding's elements, where the head is another table; 0: 1 / sqrt(dim).
    The larger it is, the deeper a row's keys and values stay those of its own token."""
    block: str = ""
    """Layers of one's own in place of the family's: an nnx.Module class, as FILE.py:NAME or
    MODULE:NAME, made and called as models.transformer.Block is. Empty: the family's."""

    def __post_init__(self):
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "mlp_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model {name} {getattr(self, name)} must be at least 1")
        if self.family not in ("llama", "gpt", "bert"):
            raise ValueError(f"model family {self.family!r}; use llama, gpt or bert")
        if self.context < 0 or (self.learned_positions and not self.context):
            raise ValueError(
                f"model context {self.context}: a {self.family} learns its positions; say "
                "how many, such as 1024"
            )
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"model {name} {getattr(self, name)} must lie in [0, 1)")
        for name in ("rope_scaling", "bidirectional", "qkv_bias", "shifted"):
            if self.family != "llama" and getattr(self, name):
                raise ValueError(f"model {name} means nothing to a {self.family}; leave it unset")
        if self.shifted and not self.bidirectional:
            raise ValueError(
                "model shifted True: a causal model's rows always predict the next token; leave it "
                "unset, or set bidirectional"
            )
        if self.family == "bert" and not self.tied:
            raise ValueError("model tied False: the head of a bert is its embedding; set it True")
        if not 0 <= self.embed_init < math.inf or (self.tied and self.embed_init):
            raise ValueError(
                f"model embed_init {self.embed_init} must be at least 0 and finite, and "
                "means nothing where the head is the embedding; leave it unset"
            )
        if not 0 < self.rope_theta < math.inf or not 0 < self.norm_eps < math.inf:
            raise ValueError(
                f"model rope_theta {self.rope_theta} and norm_eps {self.norm_eps} must be above 0 "
                "and finite; use 10000 and 1e-5"
            )
        unit = self.heads if self.learned_positions else 2 * self.heads
        if self.dim % unit:
            even = "" if self.learned_positions else "n even"
            why = (
                "" if self.learned_positions else " (rotary positions pair the elements of a head)"
            )
            raise ValueError(
                f"model dim {self.dim} must be a{even} multiple of heads {self.heads}{why}; use "
                f"dim {_next_multiple(self.dim, unit)}"
            )
        if self.heads % self.kv_heads:
            legal = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(
                f"model heads {self.heads} do not divide by kv_heads {self.kv_heads}; "
                f"use one of {legal}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding and of the head; those from vocab_size on are never predicted."""
        return _next_multiple(self.vocab_size, VOCAB_MULTIPLE)

    @property
    def causal(self) -> bool:
        """Whether a position sees only those before it."""
        return self.family != "bert" and not self.bidirectional

    @property
    def learned_positions(self) -> bool:
        return self.family != "llama"

    @property
    def num_params(self) -> int:
        """Parameters of the model; a tied head counts once, padding of the vocabulary not at all.

        A bert's are those with its masked-LM head and without a pooler.
        """
        d, kv_width = self.dim, self.kv_heads * self.head_dim
        matrices = 2 * d * d + 2 * d * kv_width
        tables = self.vocab_size * d * (1 if self.tied else 2)
        if self.family == "llama":
            vectors = 2 * d + (d + 2 * kv_width if self.qkv_bias else 0)
            return self.layers * (matrices + 3 * d * self.mlp_dim + vectors) + d + tables
        matrices += 2 * d * self.mlp_dim
        vectors = 2 * d + 2 * kv_width + self.mlp_dim + d + 4 * d  # biases, two norms
        total = self.layers * (matrices + vectors) + tables + self.context * d
        if self.family == "gpt":
            return total + 2 * d
        return total + TOKEN_TYPES * d + 2 * d + (d * d + d + 2 * d + self.vocab_size)

    @property
    def matmul_params(self) -> int:
        """Parameters that every token is multiplied by; the head counts, lookups do not."""
        d, kv_width = self.dim, self.kv_heads * self.head_dim
        mlp = (3 if self.family == "llama" else 2) * d * self.mlp_dim
        head = self.vocab_size * d + (d * d if self.family == "bert" else 0)
        return self.layers * (2 * d * d + 2 * d * kv_width + mlp) + head

    def train_flops_per_token(self, seq_len: int) -> float:
        """FLOPs of forward and backward for one token: 6 a matmul parameter + attention.

        Attention adds 12 * layers * dim * seq_len (Kaplan et al. 2020), half of it under a causal
        mask.
        """
        attention = 12.0 * self.layers * self.dim * seq_len * (0.5 if self.causal else 1.0)
        return 6.0 * self.matmul_params + attention


def _next_multiple(value: int, of: int) -> int:
    return -(-value // of) * of


MODELS: dict[str, TransformerConfig] = {
    "llama-tiny": TransformerConfig(
        vocab_size=512, dim=64, layers=2, heads=4, kv_heads=4, mlp_dim=176, tied=True
    ),
    "llama-2m": TransformerConfig(
        vocab_size=4096, dim=160, layers=4, heads=5, kv_heads=5, mlp_dim=432, tied=True
    ),
    # The sizes of the published GeoMesh runs are named, their shapes are not; these are ours.
    "llama-150m": TransformerConfig(
        vocab_size=32_000, dim=768, layers=14, heads=12, kv_heads=12, mlp_dim=2048
    ),
    "llama-300m": TransformerConfig(
        vocab_size=32_000, dim=1024, layers=18, heads=16, kv_heads=16, mlp_dim=2816
    ),
    "llama-500m": TransformerConfig(
        vocab_size=32_000, dim=1280, layers=21, heads=20, kv_heads=20, mlp_dim=3456
    ),
    "llama-3.2-1b": TransformerConfig(
        vocab_size=128_256,
        dim=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        mlp_dim=8192,
        tied=True,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(),
    ),
    "llada-tiny": TransformerConfig(
        vocab_size=512, dim=64, layers=2, heads=4, kv_heads=4, mlp_dim=176, bidirectional=True
    ),
    "llada-8b": TransformerConfig(
        vocab_size=126_464,
        dim=4096,
        layers=32,
        heads=32,
        kv_heads=32,
        mlp_dim=12_288,
        context=4096,
        rope_theta=500_000.0,
        bidirectional=True,
    ),
    "dlm-tasks": TransformerConfig(
        vocab_size=37,
        dim=96,
        layers=8,
        heads=3,
        kv_heads=3,
        mlp_dim=256,
        norm_eps=1e-6,
        bidirectional=True,
        embed_init=0.5,
    ),
    "dream-tiny": TransformerConfig(
        vocab_size=512,
        dim=64,
        layers=2,
        heads=4,
        kv_heads=2,
        mlp_dim=176,
        norm_eps=1e-6,
        bidirectional=True,
        qkv_bias=True,
        shifted=True,
    ),
    "dream-7b": TransformerConfig(
        vocab_size=152_064,
        dim=3584,
        layers=28,
        heads=28,
        kv_heads=4,
        mlp_dim=18_944,
        context=131_072,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        bidirectional=True,
        qkv_bias=True,
        shifted=True,
    ),
    "gpt-tiny": TransformerConfig(
        vocab_size=512,
        dim=64,
        layers=4,
        heads=4,
        kv_heads=4,
        mlp_dim=256,
        tied=True,
        family="gpt",
        context=256,
    ),
    "gpt-2": TransformerConfig(
        vocab_size=50_257,
        dim=768,
        layers=12,
        heads=12,
        kv_heads=12,
        mlp_dim=3072,
        tied=True,
        family="gpt",
        context=1024,
    ),
    # Brown et al. 2020 give 24 heads of 128 for width 2048, which do not fit together; with 16 the
    # parameters are the same.
    "gpt-3-1.3b": TransformerConfig(
        vocab_size=50_257,
        dim=2048,
        layers=24,
        heads=16,
        kv_heads=16,
        mlp_dim=8192,
        tied=True,
        family="gpt",
        context=2048,
    ),
    "bert-tiny": TransformerConfig(
        vocab_size=512,
        dim=64,
        layers=4,
        heads=4,
        kv_heads=4,
        mlp_dim=256,
        tied=True,
        family="bert",
        context=256,
        dropout=0.1,
        attention_dropout=0.1,
        norm_eps=1e-12,
    ),
    "bert-large": TransformerConfig(
        vocab_size=30_522,
        dim=1024,
        layers=24,
        heads=16,
        kv_heads=16,
        mlp_dim=4096,
        tied=True,
        family="bert",
        context=512,
        dropout=0.1,
        attention_dropout=0.1,
        norm_eps=1e-12,
    ),
}


def get_model(name: str) -> TransformerConfig:
    """The named shape; ValueError with the nearest name where there is none."""
    if name in MODELS:
        return MODELS[name]
    near = get_close_matches(name, MODELS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(MODELS)}"
    raise ValueError(f"no model named {name!r}; {hint}")
