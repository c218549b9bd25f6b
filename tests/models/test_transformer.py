# SPDX-License-Identifier: Apache-2.0
"""The Transformer equals its published formulas, sees only what it may, and maps names to names."""

import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from geojax.models.attention import NEVER
from geojax.models.collectives import vocab_nats
from geojax.models.config import MODELS, RopeScaling, TransformerConfig
from geojax.models.transformer import (
    Inputs,
    Transformer,
    abstract_params,
    init_params,
    make_apply,
)

PLAIN = TransformerConfig(vocab_size=31, dim=16, layers=3, heads=2, kv_heads=2, mlp_dim=20)
# Learned positions need no even head, and rows for twice the tokens of a test's sequences.
GPT = TransformerConfig(
    vocab_size=31,
    dim=20,
    layers=2,
    heads=4,
    kv_heads=2,
    mlp_dim=24,
    tied=True,
    family="gpt",
    context=24,
)
BERT = TransformerConfig(
    vocab_size=31,
    dim=18,
    layers=2,
    heads=2,
    kv_heads=2,
    mlp_dim=24,
    tied=True,
    family="bert",
    context=24,
    dropout=0.1,
    attention_dropout=0.1,
    norm_eps=1e-12,
)
LLADA = replace(PLAIN, bidirectional=True)
DREAM = TransformerConfig(
    vocab_size=31,
    dim=24,
    layers=2,
    heads=6,
    kv_heads=2,
    mlp_dim=20,
    bidirectional=True,
    qkv_bias=True,
    shifted=True,
)
SHAPES = {
    "untied": PLAIN,
    "tied": TransformerConfig(
        vocab_size=31, dim=16, layers=2, heads=4, kv_heads=4, mlp_dim=24, tied=True
    ),
    "grouped": TransformerConfig(
        vocab_size=31, dim=24, layers=2, heads=6, kv_heads=2, mlp_dim=20, rope_theta=500.0
    ),
    # Contexts of 4..16 tokens put this head's wavelengths in all three of the bands.
    "scaled": TransformerConfig(
        vocab_size=31,
        dim=32,
        layers=2,
        heads=2,
        kv_heads=1,
        mlp_dim=20,
        tied=True,
        rope_theta=100.0,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64),
    ),
    "gpt": GPT,
    "bert": BERT,
    "llada": LLADA,
    "dream": DREAM,
    "qwen2": TransformerConfig(
        vocab_size=31, dim=24, layers=2, heads=6, kv_heads=2, mlp_dim=20, qkv_bias=True
    ),
}
FAMILIES = {"llama": PLAIN, "gpt": GPT, "bert": BERT}
TINY = ("llama-tiny", "gpt-tiny", "bert-tiny", "dream-tiny")


def distinct_params(config, seed=0):
    """Every leaf its own random values, norm scales included, so that no two can be confused.

    Rows beyond the vocabulary hold values too, which nothing may depend on.
    """
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        base = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(base + 0.3 * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config))


def oracle(config, params, tokens, positions, segments):
    """Logits [b, t, V] in float64, head by head and query by query, from the papers' formulas."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    size, llama = config.dim // config.heads, config.family == "llama"
    sees_all = config.family == "bert" or config.bidirectional

    def norm(x, w):
        centred = x if llama else x - x.mean(-1, keepdims=True)
        normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.norm_eps)
        return normed * w["scale"] + (0 if llama else w["bias"])

    def linear(w, name, x):
        biased = not llama or (config.qkv_bias and name in ("query", "key", "value"))
        return x @ w[name] + (w[f"{name}_bias"] if biased else 0)

    def gelu(x):
        return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2

    def frequency(i):
        plain = config.rope_theta ** (-2 * i / size)
        if config.rope_scaling is None:
            return plain
        s, wavelength = config.rope_scaling, 2 * math.pi / plain
        if wavelength < s.original_context / s.high_freq_factor:
            return plain
        if wavelength > s.original_context / s.low_freq_factor:
            return plain / s.factor
        smooth = (s.original_context / wavelength - s.low_freq_factor) / (
            s.high_freq_factor - s.low_freq_factor
        )
        return (1 - smooth) * plain / s.factor + smooth * plain

    def turn(head, places):
        half, out = size // 2, np.empty_like(head)
        for i in range(half):
            angle = places * frequency(i)
            cos, sin = np.cos(angle), np.sin(angle)
            out[:, i] = head[:, i] * cos - head[:, i + half] * sin
            out[:, i + half] = head[:, i + half] * cos + head[:, i] * sin
        return out

    def attend(w, x, places, segment):
        q, k, v = (linear(w, name, x) for name in ("query", "key", "value"))
        out = np.zeros_like(q)
        for h in range(config.heads):
            g = h // (config.heads // config.kv_heads)
            own, shared = (slice(i * size, (i + 1) * size) for i in (h, g))
            qh, kh = q[:, own], k[:, shared]
            if llama:
                qh, kh = turn(qh, places), turn(kh, places)
            for t in range(len(x)):
                last = len(x) if sees_all else t + 1
                seen = [s for s in range(last) if segment[s] == segment[t]]
                scores = np.exp(kh[seen] @ qh[t] / math.sqrt(size))
                out[t, own] = scores / scores.sum() @ v[seen][:, shared]
        return linear(w, "out", out)

    def mlp(w, x):
        up = linear(w, "up", x)
        if llama:
            gate = x @ w["gate"]
            up = gate / (1 + np.exp(-gate)) * up
        elif config.family == "gpt":
            up = up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))) / 2
        else:
            up = gelu(up)
        return linear(w, "down", up)

    rows = []
    for row, places, segment in zip(tokens, positions, segments, strict=True):
        x = p["embed"][row] + (0 if llama else p["positions"][places])
        if config.family == "bert":
            x = norm(x + p["types"][0], p["embed_norm"])
        for layer in range(config.layers):
            w = jax.tree.map(lambda leaf, layer=layer: leaf[layer], p["blocks"])
            if config.family == "bert":
                x = norm(x + attend(w["attention"], x, places, segment), w["attention_norm"])
                x = norm(x + mlp(w["mlp"], x), w["mlp_norm"])
            else:
                x = x + attend(w["attention"], norm(x, w["attention_norm"]), places, segment)
                x = x + mlp(w["mlp"], norm(x, w["mlp_norm"]))
        if config.family == "bert":
            x = gelu(linear(p, "transform", x))
        logits = norm(x, p["norm"]) @ (p["embed"] if config.tied else p["head"]).T
        rows.append(logits + (p["head_bias"] if config.family == "bert" else 0))
    return np.stack(rows)[..., : config.vocab_size]


@cache
def jitted(config):
    return jax.jit(make_apply(config), static_argnums=4)


@cache
def fresh(config):
    return init_params(config, 0)


def inputs(config, batch=2, length=12, seed=1):
    """Tokens, positions and segments [b, t] of sequences that are one document each."""
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length), np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (batch, 1))
    return tokens, positions, np.zeros_like(tokens)


def packed(config):
    """The same, but each sequence holds documents of 5 and 7 tokens."""
    tokens, positions, segments = inputs(config)
    segments[:, 5:] = 1
    positions[:, 5:] -= 5
    return tokens, positions, segments


@pytest.mark.parametrize("arrange", [inputs, packed])
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_forward_equals_the_formulas(config, arrange):
    # Every leaf is distinct, so a parameter under another's name would change the logits too.
    params, batch = distinct_params(config), arrange(config)
    logits = jitted(config)(params, *batch)
    # float32 against float64 on logits of size 1 to 10: 1e-4 is tens of its roundings.
    np.testing.assert_allclose(logits, oracle(config, params, *batch), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_positions_matter(config):
    tokens, positions, segments = inputs(config)
    params, apply = distinct_params(config), jitted(config)
    stretched = apply(params, tokens, 2 * positions, segments)
    assert np.abs(stretched - apply(params, tokens, positions, segments)).max() > 1e-2


def changes(config, batch, changed):
    """Largest change of the logits at each place [t], where the tokens of one place change."""
    tokens, positions, segments = batch
    params, apply = distinct_params(config), jitted(config)
    before = apply(params, tokens, positions, segments)
    others = tokens.copy()  # JAX may still be reading the array
    others[:, changed] = (tokens[:, changed] + 1) % config.vocab_size
    after = apply(params, others, positions, segments)
    return np.abs(np.asarray(after) - before).max(axis=(0, 2))


@pytest.mark.parametrize("changed", [1, 6, 11])
@pytest.mark.parametrize("config", [PLAIN, GPT], ids=["llama", "gpt"])
def test_a_token_changes_no_earlier_logits(config, changed):
    found = changes(config, inputs(config), changed)
    assert (found[:changed] == 0).all()
    assert (found[changed:] > 0).all()


@pytest.mark.parametrize(("changed", "seen"), [(0, range(5)), (4, range(5)), (8, range(5, 12))])
@pytest.mark.parametrize("config", [BERT, LLADA, DREAM], ids=["bert", "llada", "dream"])
def test_both_sides_are_seen_and_the_own_segment_only(config, changed, seen):
    found = changes(config, packed(config), changed)
    np.testing.assert_array_equal(found > 0, [t in seen for t in range(12)])


@pytest.mark.parametrize("config", [SHAPES["grouped"], GPT, BERT], ids=FAMILIES)
def test_packed_documents_do_not_see_each_other(config):
    tokens, positions, segments = packed(config)
    params, apply = distinct_params(config), jitted(config)
    together = apply(params, tokens, positions, segments)
    for document in (slice(0, 5), slice(5, 12)):
        length = document.stop - document.start
        _, places, whole = inputs(config, length=length)
        alone = apply(params, tokens[:, document], places, whole)
        # Sums over 12 masked and over 5 or 7 plain positions round differently.
        np.testing.assert_allclose(together[:, document], alone, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_sequences_of_a_batch_do_not_see_each_other(config):
    tokens, positions, segments = inputs(config, batch=3)
    params, apply = distinct_params(config), jitted(config)
    before = apply(params, tokens, positions, segments)
    others = tokens.copy()  # JAX may still be reading the array
    others[1] = (tokens[1] + 1) % config.vocab_size
    after = apply(params, others, positions, segments)
    np.testing.assert_array_equal(after[::2], before[::2])
    assert np.abs(after - before)[1].max() > 0


@pytest.mark.parametrize("name", TINY)
def test_bfloat16_stays_near_float32(name):
    config = MODELS[name]
    params, batch = fresh(config), inputs(config, length=32)
    apply = jitted(config)
    exact, rounded = (np.asarray(apply(params, *batch, dtype)) for dtype in ("f4", "bfloat16"))
    assert rounded.dtype == np.float32
    # bfloat16 keeps 8 bits (0.4 %); some twenty rounded operations in a row lose about 2 % of the
    # spread of the logits, and 5 % leaves room for the largest of 32,768 of them.
    assert np.abs(rounded - exact).max() < 0.05 * exact.std() * math.sqrt(2 * math.log(exact.size))
    assert np.abs(rounded - exact).max() > 0


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_parameters_reach_the_model_by_their_names(config):
    # Leaves of one shape could be swapped without an error: change one after the other.
    params, others, batch = distinct_params(config), distinct_params(config, 1), inputs(config)
    apply = jitted(config)
    before = apply(params, *batch)
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        changed = jax.tree_util.tree_map_with_path(
            lambda p, old, new, path=path: new if p == path else old, params, others
        )
        logits = apply(changed, *batch)
        np.testing.assert_allclose(
            logits, oracle(config, changed, *batch), atol=1e-4, rtol=1e-4, err_msg=str(path)
        )
        # A bias of the keys adds the same to all scores of a query, and softmax takes it off.
        expected = path[-1].key != "key_bias"
        assert (np.abs(logits - before).max() > 1e-2) == expected, path


def test_order_of_insertion_in_the_dict_does_not_matter():
    config = SHAPES["untied"]
    params, batch = distinct_params(config), inputs(config)

    def reversed_keys(tree):
        if not isinstance(tree, dict):
            return tree
        return {key: reversed_keys(tree[key]) for key in sorted(tree, reverse=True)}

    apply = jitted(config)
    np.testing.assert_array_equal(apply(reversed_keys(params), *batch), apply(params, *batch))


@pytest.mark.parametrize("name", MODELS)
def test_named_models_have_the_parameters_they_claim(name):
    config, params = MODELS[name], abstract_params(MODELS[name])
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    by_vocabulary = [params[x] for x in ("embed", "head", "head_bias") if x in params]
    assert len(by_vocabulary) == (1 if config.tied else 2) + (config.family == "bert")
    counted = 0
    for leaf in jax.tree.leaves(params):
        rows = leaf.shape[0]
        if any(leaf is x for x in by_vocabulary):
            assert 0 <= rows - config.vocab_size < 128
            assert rows % 128 == 0
            rows = config.vocab_size  # padding is no parameter of the model
        counted += rows * math.prod(leaf.shape[1:])
    assert counted == config.num_params


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-3.2-1b", 1_235_814_400),
        ("gpt-2", 124_439_808),
        ("gpt-3-1.3b", 1_315_723_264),
        ("bert-large", 335_174_458),
        ("llada-8b", 8_015_581_184),
        ("dream-7b", 7_615_616_512),
    ],
)
def test_named_models_have_their_published_sizes(name, count):
    assert MODELS[name].num_params == count


@pytest.mark.parametrize("config", [PLAIN, BERT], ids=["llama", "bert"])
def test_fresh_rows_beyond_the_vocabulary_are_zeros(config):
    params = fresh(config)
    for name in {"embed", "head", "head_bias"} & set(params):
        assert params[name].shape[0] == 128
        assert not np.asarray(params[name])[config.vocab_size :].any()
    assert np.asarray(params["embed"])[: config.vocab_size].any(axis=1).all()


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_rows_beyond_the_vocabulary_are_never_predicted_nor_moved(config):
    params, batch = distinct_params(config), inputs(config)  # whatever the rows hold
    tokens, positions, segments = batch
    targets, model = np.roll(tokens, -1, axis=1), Transformer(config)

    def nats(params):
        seen = Inputs(positions, segments, None)
        x = model.embed(params, tokens, seen, "float32")
        rotary = model.rotary(seen)
        x, _ = jax.lax.scan(
            lambda x, w: (model.layer(w, x, 0, rotary, seen), None), x, params["blocks"]
        )
        logits = model.logits(params, x)
        return vocab_nats(logits, targets).sum(), logits

    (loss, logits), gradient = jax.jit(jax.value_and_grad(nats, has_aux=True))(params)
    assert logits.shape[-1] == 128
    assert (logits[..., config.vocab_size :] == NEVER).all()
    assert (jax.nn.softmax(logits)[..., config.vocab_size :] == 0).all()
    real = np.asarray(logits[..., : config.vocab_size], np.float64)
    np.testing.assert_allclose(real, jitted(config)(params, *batch), atol=1e-5, rtol=1e-5)
    picked = np.take_along_axis(real, targets[..., None], -1)[..., 0]
    assert loss == pytest.approx((np.log(np.exp(real).sum(-1)) - picked).sum(), rel=1e-5)
    for name in {"embed", "head", "head_bias"} & set(gradient):
        rows = np.asarray(gradient[name])
        assert not rows[config.vocab_size :].any()
        assert rows[: config.vocab_size].any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("name", TINY)
def test_fresh_parameters_follow_from_the_seed(name):
    config = MODELS[name]
    first, again, other = fresh(config), init_params(config, 0), init_params(config, 1)
    assert sum(x.size for x in jax.tree.leaves(first)) == config.num_params
    assert jax.tree.map(lambda x: (x.shape, x.dtype), first) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract_params(config)
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    for path, leaf in jax.tree_util.tree_leaves_with_path(first):
        same = all(
            np.array_equal(leaf, theirs)
            for p, theirs in jax.tree_util.tree_leaves_with_path(other)
            if p == path
        )
        assert same == path[-1].key.endswith(("scale", "bias"))


@pytest.mark.parametrize("config", [PLAIN, MODELS["gpt-tiny"], BERT], ids=FAMILIES)
def test_fresh_layers_and_leaves_are_all_drawn_apart(config):
    params = fresh(config)
    stacked = [x for x in jax.tree.leaves(params["blocks"]) if x.ndim == 3]
    drawn = [layer for x in stacked for layer in x]
    drawn += [x for name, x in params.items() if name != "blocks" and getattr(x, "ndim", 0) == 2]
    assert (
        len(drawn)
        == {
            "llama": 7 * config.layers + 2,  # embedding, head
            "gpt": 6 * config.layers + 2,  # embedding, positions
            "bert": 6 * config.layers + 4,  # types and the head's layer too
        }[config.family]
    )
    assert len({np.asarray(x).ravel()[:8].tobytes() for x in drawn}) == len(drawn)


@pytest.mark.parametrize("name", TINY)
def test_fresh_model_predicts_every_token_about_alike(name):
    # Random logits of variance v cost log V + v / 2; with inputs of size 1 kept at 1, v is 1.
    config = MODELS[name]
    tokens, positions, segments = inputs(config, batch=8, length=32)
    logits = jitted(config)(fresh(config), tokens, positions, segments)
    nats = -jax.nn.log_softmax(logits)[:, :-1]
    loss = np.take_along_axis(np.asarray(nats), tokens[:, 1:, None], -1).mean()
    assert abs(loss - math.log(config.vocab_size)) < 1
