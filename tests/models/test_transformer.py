# SPDX-License-Identifier: Apache-2.0
"""The Transformer equals its published formulas, sees only what it may, and maps names to names."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from geojax.models.config import MODELS, RopeScaling, TransformerConfig
from geojax.models.transformer import abstract_params, init_params, make_apply

PLAIN = TransformerConfig(vocab_size=31, dim=16, layers=3, heads=2, kv_heads=2, mlp_dim=20)
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
}


def distinct_params(config, seed=0):
    """Every leaf its own random values, norm scales included, so that no two can be confused."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        base = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(base + 0.3 * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config))


def oracle(config, params, tokens, positions, segments):
    """Logits [b, t, V] in float64, head by head and query by query, from the papers' formulas."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    size = config.dim // config.heads

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale

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
        q, k, v = x @ w["query"], x @ w["key"], x @ w["value"]
        out = np.zeros_like(q)
        for h in range(config.heads):
            g = h // (config.heads // config.kv_heads)
            own, shared = (slice(i * size, (i + 1) * size) for i in (h, g))
            qh, kh = turn(q[:, own], places), turn(k[:, shared], places)
            for t in range(len(x)):
                seen = [s for s in range(t + 1) if segment[s] == segment[t]]
                scores = np.exp(kh[seen] @ qh[t] / math.sqrt(size))
                out[t, own] = scores / scores.sum() @ v[seen][:, shared]
        return out @ w["out"]

    rows = []
    for row, places, segment in zip(tokens, positions, segments, strict=True):
        x = p["embed"][row]
        for layer in range(config.layers):
            w = jax.tree.map(lambda leaf, layer=layer: leaf[layer], p["blocks"])
            normed = norm(x, w["attention_norm"]["scale"])
            x = x + attend(w["attention"], normed, places, segment)
            h = norm(x, w["mlp_norm"]["scale"])
            gate = h @ w["mlp"]["gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp"]["up"])) @ w["mlp"]["down"]
        head = p["embed"] if config.tied else p["head"]
        rows.append(norm(x, p["norm"]["scale"]) @ head.T)
    return np.stack(rows)


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
    logits = make_apply(config)(params, *batch)
    # float32 against float64 on logits of size 1 to 10: 1e-4 is tens of its roundings.
    np.testing.assert_allclose(logits, oracle(config, params, *batch), atol=1e-4, rtol=1e-4)


def test_positions_matter():
    tokens, positions, segments = inputs(PLAIN)
    params, apply = distinct_params(PLAIN), make_apply(PLAIN)
    stretched = apply(params, tokens, 2 * positions, segments)
    assert np.abs(stretched - apply(params, tokens, positions, segments)).max() > 1e-2


@pytest.mark.parametrize("changed", [1, 6, 11])
def test_a_token_changes_no_earlier_logits(changed):
    tokens, positions, segments = inputs(PLAIN)
    params, apply = distinct_params(PLAIN), jax.jit(make_apply(PLAIN))
    before = apply(params, tokens, positions, segments)
    others = tokens.copy()  # JAX may still be reading the array
    others[:, changed] = (tokens[:, changed] + 1) % PLAIN.vocab_size
    after = apply(params, others, positions, segments)
    np.testing.assert_array_equal(after[:, :changed], before[:, :changed])
    assert (np.abs(after - before)[:, changed:].max(axis=(0, 2)) > 0).all()


def test_packed_documents_do_not_see_each_other():
    config = SHAPES["grouped"]
    tokens, positions, segments = packed(config)
    params, apply = distinct_params(config), make_apply(config)
    together = apply(params, tokens, positions, segments)
    for document in (slice(0, 5), slice(5, 12)):
        length = document.stop - document.start
        _, places, whole = inputs(config, length=length)
        alone = apply(params, tokens[:, document], places, whole)
        # Sums over 12 masked and over 5 or 7 plain positions round differently.
        np.testing.assert_allclose(together[:, document], alone, atol=2e-5, rtol=1e-5)


def test_sequences_of_a_batch_do_not_see_each_other():
    tokens, positions, segments = inputs(PLAIN, batch=3)
    params, apply = distinct_params(PLAIN), jax.jit(make_apply(PLAIN))
    before = apply(params, tokens, positions, segments)
    others = tokens.copy()  # JAX may still be reading the array
    others[1] = (tokens[1] + 1) % PLAIN.vocab_size
    after = apply(params, others, positions, segments)
    np.testing.assert_array_equal(after[::2], before[::2])
    assert np.abs(after - before)[1].max() > 0


def test_bfloat16_stays_near_float32():
    config = MODELS["llama-tiny"]
    params, batch = init_params(config, 0), inputs(config, length=32)
    apply = make_apply(config)
    exact, rounded = (np.asarray(apply(params, *batch, dtype)) for dtype in ("f4", jnp.bfloat16))
    assert rounded.dtype == np.float32
    # bfloat16 keeps 8 bits (0.4 %); some twenty rounded operations in a row lose about 2 % of the
    # spread of the logits, and 5 % leaves room for the largest of 32,768 of them.
    assert np.abs(rounded - exact).max() < 0.05 * exact.std() * math.sqrt(2 * math.log(exact.size))
    assert np.abs(rounded - exact).max() > 0


def test_parameters_reach_the_model_by_their_names():
    # Leaves of one shape could be swapped without an error: change one after the other.
    config = SHAPES["untied"]
    params, others, batch = distinct_params(config), distinct_params(config, 1), inputs(config)
    apply = jax.jit(make_apply(config))
    before = apply(params, *batch)
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        changed = jax.tree_util.tree_map_with_path(
            lambda p, old, new, path=path: new if p == path else old, params, others
        )
        logits = apply(changed, *batch)
        np.testing.assert_allclose(
            logits, oracle(config, changed, *batch), atol=1e-4, rtol=1e-4, err_msg=str(path)
        )
        assert np.abs(logits - before).max() > 1e-2, path


def test_order_of_insertion_in_the_dict_does_not_matter():
    config = SHAPES["untied"]
    params, batch = distinct_params(config), inputs(config)

    def reversed_keys(tree):
        if not isinstance(tree, dict):
            return tree
        return {key: reversed_keys(tree[key]) for key in sorted(tree, reverse=True)}

    apply = make_apply(config)
    np.testing.assert_array_equal(apply(reversed_keys(params), *batch), apply(params, *batch))


@pytest.mark.parametrize("name", MODELS)
def test_named_models_have_the_parameters_they_claim(name):
    shapes = jax.tree.leaves(abstract_params(MODELS[name]))
    assert sum(math.prod(leaf.shape) for leaf in shapes) == MODELS[name].num_params
    assert {leaf.dtype for leaf in shapes} == {np.dtype(np.float32)}


def test_llama_3_2_1b_has_its_published_size():
    assert MODELS["llama-3.2-1b"].num_params == 1_235_814_400


def test_fresh_parameters_follow_from_the_seed():
    config = MODELS["llama-tiny"]
    first, again, other = (init_params(config, seed) for seed in (0, 0, 1))
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
        assert same == (path[-1].key == "scale")


def test_fresh_layers_and_leaves_are_all_drawn_apart():
    params = init_params(SHAPES["untied"], 0)
    stacked = [x for x in jax.tree.leaves(params["blocks"]) if x.ndim == 3]
    drawn = [np.asarray(layer).ravel()[:8].tobytes() for x in stacked for layer in x]
    drawn += [np.asarray(params[name]).ravel()[:8].tobytes() for name in ("embed", "head")]
    assert len(set(drawn)) == len(drawn)


def test_fresh_model_predicts_every_token_about_alike():
    # Random logits of variance v cost log V + v / 2; with inputs of size 1 kept at 1, v is 1.
    config = MODELS["llama-tiny"]
    tokens, positions, segments = inputs(config, batch=8, length=32)
    logits = make_apply(config)(init_params(config, 0), tokens, positions, segments)
    nats = -jax.nn.log_softmax(logits)[:, :-1]
    loss = np.take_along_axis(np.asarray(nats), tokens[:, 1:, None], -1).mean()
    assert abs(loss - math.log(config.vocab_size)) < 1
