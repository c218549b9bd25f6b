# SPDX-License-Identifier: Apache-2.0
"""How far a prefix's keys and values move with what follows it, layer by layer.

For requests [prefix | rest] with some of the rest masked, three passes are compared: the whole
request; the prefix alone, or before masks, in one piece or segment after segment; and the whole
with the prefix's rows below layer b taken from the second pass, as a store would give them. Cosines
of keys and values are the paper's criterion; what the reuse does to the predictions of masked rows
is the one that says it directly.

Invariant: figures are of float32 passes over whole sequences, nothing padded, and follow from the
sequences alone.

Shapes: b sequences, s tokens, p of them prefix, L layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from geojax.bicache.denoise import drift_of
from geojax.bicache.depth import Depths, Effect, Guard, ShareProfile, probe_places
from geojax.config import require
from geojax.diffusion.canvas import power_of_two
from geojax.models.attention import attend
from geojax.models.transformer import Inputs, Params, Transformer


class Pass(NamedTuple):
    """What a pass leaves of its first p rows."""

    k: Float[Array, "L b p k e"]
    v: Float[Array, "L b p k e"]
    hidden: Float[Array, "L b p d"]
    """Entering each layer."""


def profile_share(
    model: Transformer,
    params: Params,
    sequences: Int32[np.ndarray, "n s"],
    prefix: int,
    mask_id: int,
    masked: Sequence[float] = (0.25, 0.5, 0.75, 1.0),
    canvas: bool = False,
    batch: int = 16,
    first_mask: int | None = None,
    kinds: Int[np.ndarray, " n"] | None = None,
    ends: Sequence[int] = (),
) -> ShareProfile:
    """Compare passes over `sequences`, whose first `prefix` tokens are shared.

    Of what lies from `first_mask` on (default: the prefix's end) each share of `masked` is hidden,
    by a fixed random order. `canvas`: the prefix's own pass sees masks in place of the rest.
    `kinds`: of each sequence, so that what is bad for few of them does not hide among the others.
    `ends`: where the prefix's segments end, the last with the prefix; (): it is one.
    """
    count, length = sequences.shape
    begin = prefix if first_mask is None else first_mask
    begin = max(begin, prefix + model.config.shifted)
    require(
        0 < prefix < length and begin < length,
        f"a prefix of {prefix} of {length} tokens, masks from {begin} on, leaves nothing to mask; "
        "use longer sequences",
    )
    ends = tuple(ends) or (prefix,)
    assert [*sorted({0, *ends})] == [0, *ends], "segments have tokens, one after another"
    assert ends[-1] == prefix, "segments make up the prefix"
    config, rng = model.config, np.random.default_rng(0)
    order = rng.random((count, length - begin)).argsort(1)
    kinds = np.zeros(count, np.int64) if kinds is None else kinds
    places, counted = _looked_at(prefix, length, config.layers)
    compare = jax.jit(
        partial(
            _compare,
            model,
            ends=ends,
            canvas=canvas,
            mask_id=mask_id,
            places=places,
            counted=counted,
        )
    )
    cosines, drifts, effects = [], [], {}
    for share in masked:
        hide = np.zeros((count, length), bool)
        hide[:, begin:] = order < max(round(share * (length - begin)), 1)
        kl, same, sums = [], [], []
        for start in range(0, count, batch):
            rows = slice(start, start + batch)
            found = compare(params, sequences[rows], hide[rows])
            kl.append(np.asarray(found[0])[:, hide[rows]])
            same.append(np.asarray(found[1])[:, hide[rows]])
            sums.append(np.asarray(found[2]) * len(sequences[rows]))
            drifts.append(np.asarray(found[3]))
        cosines.append(np.sum(sums, axis=0) / count)
        rows_kl, rows_same = np.concatenate(kl, axis=1), np.concatenate(same, axis=1)
        row_kinds = np.repeat(kinds, hide.sum(1))
        for kind in np.unique(kinds):
            kl_there, same_there = (x[:, row_kinds == kind] for x in (rows_kl, rows_same))
            for depth in range(config.layers + 1):
                effect = Effect(
                    float(kl_there[depth].mean()),
                    float(np.quantile(kl_there[depth], 0.95)),
                    float(same_there[depth].mean()),
                )
                worst = effects.get(depth)
                if worst is None or effect.kl_p95 > worst[0].kl_p95:
                    effects[depth] = (effect, share)
    lowest = np.min(cosines, axis=0)
    depths = range(config.layers + 1)
    return ShareProfile(
        prefix / length,
        tuple(map(float, lowest[0])),
        tuple(map(float, lowest[1])),
        tuple(effects[d][0] for d in depths),
        tuple(effects[d][1] for d in depths),
        tuple(map(float, np.quantile(np.concatenate(drifts, axis=1), 0.99, axis=1))),
    )


def doubling(prefix: int) -> tuple[int, ...]:
    """Where a chain of segments ends whose sizes double, as a server splits a long prompt."""
    return tuple(sorted({-(-prefix // parts) for parts in (8, 4, 2, 1)}))


def worst_of(profiles: Sequence[ShareProfile]) -> ShareProfile:
    """Of profiles of one share, what is worst at each layer and depth."""
    first = profiles[0]
    worst = [
        max(
            ((p.effects[d], p.worst_masked[d]) for p in profiles), key=lambda found: found[0].kl_p95
        )
        for d in range(len(first.effects))
    ]
    return ShareProfile(
        first.share,
        tuple(map(min, zip(*(p.key_cosine for p in profiles), strict=True))),
        tuple(map(min, zip(*(p.value_cosine for p in profiles), strict=True))),
        tuple(effect for effect, _ in worst),
        tuple(masked for _, masked in worst),
        tuple(map(max, zip(*(p.drift for p in profiles), strict=True))),
    )


def by_cosine(profiles: Sequence[ShareProfile], least: float = 0.97) -> Depths:
    """The deepest reuse below which keys and values of every layer have that cosine."""

    def depth(profile: ShareProfile) -> int:
        cosines = (profile.key_cosine, profile.value_cosine)
        good = [min(kv) >= least for kv in zip(*cosines, strict=True)]
        return good.index(False) if False in good else len(good)

    return _table(profiles, depth)


def by_output(profiles: Sequence[ShareProfile], most_kl: float) -> Depths:
    """The deepest reuse up to which the 95th percentile of the divergence stays within a bound."""

    def depth(profile: ShareProfile) -> int:
        good = [effect.kl_p95 <= most_kl for effect in profile.effects]
        return (good.index(False) if False in good else len(good)) - 1

    return _table(profiles, depth)


def _table(profiles: Sequence[ShareProfile], depth: Callable[[ShareProfile], int]) -> Depths:
    """Monotone: a share gets no more than any larger one."""
    ordered = sorted(profiles, key=lambda profile: profile.share)
    depths = [max(depth(profile), 0) for profile in ordered]
    safe = np.minimum.accumulate(depths[::-1])[::-1]
    return Depths(tuple((p.share, int(d)) for p, d in zip(ordered, safe, strict=True)))


def _compare(
    model: Transformer,
    params: Params,
    tokens: Int[Array, "b s"],
    hide: Bool[Array, "b s"],
    *,
    ends: tuple[int, ...],
    canvas: bool,
    mask_id: int,
    places: Int32[np.ndarray, " m"],
    counted: Bool[np.ndarray, "L m"],
):
    """(KL [L + 1, b, s], whether the likeliest token stays, cosines [2, L], drift of probes at
    those `places` that are `counted` [L, b]) by depth or layer."""
    seen = jnp.where(hide, mask_id, tokens)
    prefix = ends[-1]
    behind = power_of_two(seen.shape[1] - prefix) if canvas else 0  # as the store builds it
    kept = _build(model, params, seen[:, :prefix], ends, behind, mask_id)
    whole, plain = _capture(model, params, seen, prefix)
    cosines = jnp.stack([_cosine(kept.k, whole.k), _cosine(kept.v, whole.v)])
    expected = jax.nn.log_softmax(_logits(model, params, plain))

    def effect(_, depth):
        found = jax.nn.log_softmax(
            _logits(model, params, _reuse(model, params, seen, prefix, kept, depth))
        )
        kl = jnp.sum(jnp.exp(expected) * (expected - found), axis=-1)
        return None, (kl, jnp.argmax(expected, -1) == jnp.argmax(found, -1))

    _, (kl, same) = lax.scan(effect, None, jnp.arange(model.config.layers + 1))
    return kl, same, cosines, _drift(model, params, seen, prefix, kept, places, counted)


def _looked_at(
    prefix: int, length: int, layers: int
) -> tuple[Int32[np.ndarray, " m"], Bool[np.ndarray, "L m"]]:
    """Where a guard looks, and which of these places count at each depth."""
    counts = [Guard(()).count(length - prefix, prefix, max(d, 1), layers) for d in range(layers)]
    each = [probe_places(prefix, count) for count in counts]
    places = np.unique(np.concatenate(each))
    return places, np.array([np.isin(places, those) for those in each])


def _logits(model: Transformer, params: Params, x: Array) -> Array:
    logits = model.logits(params, x)
    if model.config.shifted:  # the row before a token predicts it
        logits = jnp.concatenate([logits[:, :1], logits[:, :-1]], axis=1)
    return logits


def _capture(model: Transformer, params: Params, tokens, prefix: int) -> tuple[Pass, Array]:
    """A pass over `tokens`, and its residual stream at the end."""
    inputs = _inputs(tokens)
    rotary = model.rotary(inputs)

    def layer(x, weights):
        seen = []

        def remember(q, k, v, *rest):
            seen.append((k[:, :prefix], v[:, :prefix]))
            return attend(q, k, v, *rest)

        new = replace(model, attend=remember).layer(weights, x, 0, rotary, inputs)
        return new, (*seen[0], x[:, :prefix])

    x = model.embed(params, tokens, inputs, jnp.float32)
    x, kept = lax.scan(layer, x, params["blocks"])
    return Pass(*kept), x


def _build(
    model: Transformer, params: Params, tokens, ends: tuple[int, ...], masks: int, mask_id: int
) -> Pass:
    """A prefix as a store builds it: each segment after those before it, with masks behind it."""
    parts: list[Pass] = []
    for start, end in pairwise((0, *ends)):
        padding = ((0, 0), (0, masks))
        seen = jnp.pad(tokens[:, start:end], padding, constant_values=mask_id)
        parts.append(_segment(model, params, seen, start, end - start, parts))
    return Pass(*(jnp.concatenate(list(kept), axis=2) for kept in zip(*parts, strict=True)))


def _segment(
    model: Transformer, params: Params, tokens, first: int, kept: int, before: Sequence[Pass]
) -> Pass:
    """`kept` rows of a pass over tokens from position `first` on, after what is `before` them."""
    places = first + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    inputs = Inputs(jnp.broadcast_to(places, tokens.shape), None, None)
    rotary = model.rotary(inputs)

    def layer(x, item):
        weights, earlier = item
        seen = []

        def remember(q, k, v, *rest):
            seen.append((k[:, :kept], v[:, :kept]))
            k, v = (
                jnp.concatenate([*(getattr(part, name) for part in earlier), new], axis=1)
                for name, new in (("k", k), ("v", v))
            )
            return attend(q, k, v, *rest)

        new = replace(model, attend=remember).layer(weights, x, 0, rotary, inputs)
        return new, (*seen[0], x[:, :kept])

    x = model.embed(params, tokens, inputs, jnp.float32)
    return Pass(*lax.scan(layer, x, (params["blocks"], list(before)))[1])


def _reuse(model: Transformer, params: Params, tokens, prefix: int, kept: Pass, depth) -> Array:
    """The residual stream where the prefix's rows below `depth` are those that were kept."""
    inputs = _inputs(tokens)
    rotary = model.rotary(inputs)

    def layer(x, item):
        weights, number, k_kept, v_kept, hidden = item

        def mixed(q, k, v, *rest):
            shared = number < depth
            k = k.at[:, :prefix].set(jnp.where(shared, k_kept, k[:, :prefix]))
            v = v.at[:, :prefix].set(jnp.where(shared, v_kept, v[:, :prefix]))
            return attend(q, k, v, *rest)

        x = x.at[:, :prefix].set(jnp.where(number <= depth, hidden, x[:, :prefix]))
        return replace(model, attend=mixed).layer(weights, x, 0, rotary, inputs), None

    x = model.embed(params, tokens, inputs, jnp.float32)
    items = (params["blocks"], jnp.arange(model.config.layers), *kept)
    return lax.scan(layer, x, items)[0]


def _drift(
    model: Transformer, params: Params, tokens, prefix: int, kept: Pass, places, counted
) -> Float[Array, "L b"]:
    """Of rows at `places` of the prefix that see what follows it, entering each layer."""
    b, s = tokens.shape
    rows = jnp.concatenate([jnp.arange(prefix, s), jnp.asarray(places)])
    inputs = Inputs(jnp.broadcast_to(rows.astype(jnp.int32), (b, len(rows))), None, None)
    rotary, own = model.rotary(inputs), s - prefix

    def layer(x, item):
        weights, k_kept, v_kept, hidden, those = item

        def mixed(q, k, v, *rest):
            k, v = (jnp.concatenate([z, y[:, :own]], axis=1) for z, y in ((k_kept, k), (v_kept, v)))
            return attend(q, k, v, *rest)

        found = drift_of(x[:, own:], hidden[:, places], those)
        return replace(model, attend=mixed).layer(weights, x, 0, rotary, inputs), found

    x = model.embed(params, tokens[:, rows], inputs, jnp.float32)
    return lax.scan(layer, x, (params["blocks"], *kept, jnp.asarray(counted)))[1]


def _inputs(tokens) -> Inputs:
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return Inputs(places, None, None)


def _cosine(a: Float[Array, "L b p k e"], b: Float[Array, "L b p k e"]) -> Float[Array, " L"]:
    dot = jnp.sum(a * b, axis=-1)
    size = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.mean(dot / jnp.maximum(size, 1e-30), axis=(1, 2, 3))
