# SPDX-License-Identifier: Apache-2.0
"""Shapes of the Transformer family, as plain dataclasses, and their parameter counts.

Importable without JAX, so that planning and `--help` stay quick. Invariant: a `TransformerConfig`
that exists is one that can be built.
"""

from dataclasses import dataclass
from difflib import get_close_matches


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
        if self.factor <= 0 or self.original_context < 1:
            raise ValueError(
                f"rope factor {self.factor} must be above 0, and original_context "
                f"{self.original_context} at least 1; Llama 3.2 uses 32 and 8192"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope low_freq_factor {self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor {self.high_freq_factor}; Llama 3 uses 1 and 4"
            )


@dataclass(frozen=True)
class TransformerConfig:
    """One decoder of the Llama family: RMSNorm, rotary positions, grouped queries, SwiGLU."""

    vocab_size: int
    """Rows of the embedding and of the head; at least the tokenizer's vocabulary."""
    dim: int
    """Width of the residual stream."""
    layers: int
    heads: int
    """Query heads; the head size is dim / heads."""
    kv_heads: int
    """Key/value heads (grouped-query attention where fewer than `heads`)."""
    mlp_dim: int
    """Hidden width of the gated MLP."""
    tied: bool = False
    """Whether the head is the embedding, transposed."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5

    def __post_init__(self):
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "mlp_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model {name} {getattr(self, name)} must be at least 1")
        if self.rope_theta <= 0 or self.norm_eps <= 0:
            raise ValueError(
                f"model rope_theta {self.rope_theta} and norm_eps {self.norm_eps} must be above 0; "
                "use 10000 and 1e-5"
            )
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"model dim {self.dim} must be an even multiple of heads {self.heads} (rotary "
                f"positions pair the elements of a head); use dim "
                f"{_next_multiple(self.dim, 2 * self.heads)}"
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
    def num_params(self) -> int:
        """Parameters of the model; a tied head counts once."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        mlp = 3 * self.dim * self.mlp_dim
        norms = 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tied else 2)
        return self.layers * (attention + mlp + norms) + self.dim + embeddings

    def train_flops_per_token(self, seq_len: int) -> float:
        """FLOPs of forward and backward for one token: 6 a matmul parameter + causal attention.

        The embedding lookup costs nothing; attention adds 12 * layers * dim * seq_len / 2
        (Kaplan et al. 2020, halved for the causal mask).
        """
        matmul_params = self.num_params - (0 if self.tied else self.vocab_size * self.dim)
        return 6.0 * matmul_params + 6.0 * self.layers * self.dim * seq_len


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
}


def get_model(name: str) -> TransformerConfig:
    """The named shape; ValueError with the nearest name where there is none."""
    if name in MODELS:
        return MODELS[name]
    near = get_close_matches(name, MODELS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(MODELS)}"
    raise ValueError(f"no model named {name!r}; {hint}")
