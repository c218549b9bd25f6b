# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over a spread vocabulary is that of the whole one, and so is what it looks up."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from geojax.meshes.axes import strategy_mesh
from geojax.meshes.rules import vocab_axes
from geojax.meshes.strategy import Strategy
from geojax.models.attention import NEVER
from geojax.models.collectives import ONE_DEVICE, Collectives, vocab_nats
from geojax.models.config import TransformerConfig

ROWS, TOKENS = 24, (2, 8)
LAYOUTS = {"tp": (1, 4, 1), "pp": (1, 1, 4), "pp-tp": (1, 2, 4), "dp-tp": (2, 4, 1)}


@pytest.fixture(autouse=True, scope="module")
def _x64():
    with jax.enable_x64(True):
        yield


def laid_out(layout, sequence=False):
    """A mesh, and the collectives of a vocabulary that all its stages and tensor shards share."""
    dp, tp, pp = layout
    mesh = strategy_mesh(Strategy(dp, tp, pp, 1, 8), jax.devices()[: dp * tp * pp])
    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1)
    vocab = tuple(axis for axis in ("pp", "tp") if axis in axes)
    return mesh, Collectives(axes, "tp" if tp > 1 else None, tp, vocab, sequence)


def spread(layout, body, *in_specs, out, sequence=False):
    """`body(collectives, *args)` on every device."""
    mesh, c = laid_out(layout, sequence)
    return jax.jit(jax.shard_map(partial(body, c), mesh=mesh, in_specs=in_specs, out_specs=out))


def over_vocab(layout, dim):
    """The spec of an array whose dim is spread like the vocabulary."""
    _, c = laid_out(layout)
    return PartitionSpec(*(None,) * dim, c.vocab)


def nats_and_slope(layout, logits, targets, weights):
    """Nats [b, t] and the gradient of their weighted sum, over a spread vocabulary."""

    def body(c, logits, targets, weights):
        logits = c.vary(logits)
        copies = layout[1] * layout[2]

        def share(logits):
            nats = vocab_nats(logits, targets, c)
            return jnp.sum(nats * weights) / copies / layout[0], nats

        slope, nats = jax.grad(share, has_aux=True)(logits)
        others = tuple(axis for axis in c.axes if axis not in c.vocab)
        return jax.lax.pmean(nats, c.axes), jax.lax.psum(slope, others) if others else slope

    rows = over_vocab(layout, 2)
    whole = PartitionSpec()
    return spread(layout, body, rows, whole, whole, out=(whole, rows))(logits, targets, weights)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_nats_equal_a_log_softmax_over_the_whole_vocabulary(layout):
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal((*TOKENS, ROWS))
    logits[0, 0] += 1e4  # sums of exponentials that overflow unless the peak is taken off
    logits[0, 1] -= 1e4
    logits[0, 2] = 0
    logits[..., ROWS - 5 :] = NEVER  # padding, all of some device's rows with it
    targets = rng.integers(0, ROWS - 5, TOKENS).astype(np.int32)
    targets[1] = np.arange(0, 16, 2)  # rows of every device that has any
    weights = rng.random(TOKENS)

    def plain(logits):
        scores = jax.nn.log_softmax(logits)
        nats = -jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
        return jnp.sum(nats * weights), nats

    slope, expected = jax.grad(plain, has_aux=True)(jnp.asarray(logits))
    nats, found = nats_and_slope(layout, logits, targets, weights)
    # Peaks of 1e4 leave 1e4 * 2e-16 of a difference.
    np.testing.assert_allclose(nats, expected, atol=1e-11)
    np.testing.assert_allclose(found, slope, atol=1e-12)
    np.testing.assert_allclose(vocab_nats(logits, targets, ONE_DEVICE), expected, atol=1e-11)
    assert np.isfinite(nats).all()
    assert (np.asarray(found)[..., ROWS - 5 :] == 0).all()


def test_a_target_that_is_impossible_costs_much_and_stays_finite():
    logits = np.zeros((*TOKENS, ROWS))
    logits[..., 7] = NEVER
    nats = vocab_nats(logits, np.full(TOKENS, 7, np.int32))
    assert np.isfinite(nats).all()
    assert (nats > 1e29).all()


@pytest.mark.parametrize(
    ("name", "sequence"), [*((name, False) for name in LAYOUTS), ("tp", True), ("pp-tp", True)]
)
def test_rows_are_looked_up_wherever_they_are(name, sequence):
    layout = LAYOUTS[name]
    rng = np.random.default_rng(0)
    table = rng.standard_normal((ROWS, 3))
    tokens = rng.integers(0, ROWS, TOKENS).astype(np.int32)

    def body(c, table, tokens):
        local = tokens - c.vocab_start(len(table))
        mine = (local >= 0) & (local < len(table))
        found = jnp.where(mine[..., None], table[jnp.where(mine, local, 0)], 0)
        rows = c.embed_sum(c.vary(found))
        assert rows.shape[1] == TOKENS[1] // (layout[1] if sequence else 1)
        np.testing.assert_equal(c.rows(tokens).shape, rows.shape[:2])
        whole = c.enter(rows)
        return jax.lax.pmean(whole, c.axes)

    whole = PartitionSpec()
    look_up = spread(layout, body, over_vocab(layout, 0), whole, out=whole, sequence=sequence)
    np.testing.assert_allclose(look_up(table, tokens), table[tokens], atol=1e-15)


@pytest.mark.parametrize("sequence", [False, True], ids=["copied", "spread"])
def test_entering_and_leaving_a_layer_are_each_others_transpose(sequence):
    # What leaves is the sum of the devices' parts; its gradient enters every part whole.
    rng = np.random.default_rng(0)
    parts, slopes = rng.standard_normal((2, 4, 2, 8, 3))

    def body(c, parts, slopes):
        part = c.vary(parts[0])
        total = c.enter(c.leave(part))
        share = lambda x: jnp.sum(c.enter(c.leave(x)) * slopes) / 4  # noqa: E731
        return jax.lax.pmean(total, "tp"), jax.grad(share)(part)[None]

    tp = PartitionSpec("tp")
    whole = PartitionSpec()
    run = spread((1, 4, 1), body, tp, whole, out=(whole, tp), sequence=sequence)
    total, grads = run(parts, slopes[0])
    np.testing.assert_allclose(total, parts.sum(0), atol=1e-14)
    np.testing.assert_allclose(grads, np.broadcast_to(slopes[0], parts.shape), atol=1e-14)


@pytest.mark.parametrize(
    ("vocab_size", "layout", "axes"),
    [
        (200, (1, 2, 4), ("pp", "tp")),
        (200, (1, 2, 3), ("tp",)),  # 256 rows do not divide by 6
        (200, (1, 1, 3), ()),
        (300, (1, 1, 3), ("pp",)),  # 384 do
        (300, (2, 2, 3), ("pp", "tp")),
        (200, (8, 1, 1), ()),
    ],
)
def test_a_vocabulary_is_spread_over_stages_where_it_divides(vocab_size, layout, axes):
    model = TransformerConfig(vocab_size, 32, 6, 8, 8, 64)
    assert vocab_axes(model, Strategy(*layout, 1, 24)) == axes
