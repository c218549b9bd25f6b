# SPDX-License-Identifier: Apache-2.0
"""Profiles of depth say what reuse does, and tables keep to them."""

import json
import math
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import slow_engine

from geojax.bicache.depth import Depths
from geojax.bicache.profile import (
    Effect,
    ShareProfile,
    by_cosine,
    by_output,
    doubling,
    profile_share,
    worst_of,
)
from geojax.bicache.table import DepthOptions, guard_of, read_table, run_depth
from geojax.config import ConfigError
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Transformer, init_params

MASK, VOCAB = 31, 32
MODEL = TransformerConfig(
    vocab_size=VOCAB, dim=32, layers=3, heads=4, kv_heads=2, mlp_dim=48, bidirectional=True
)


@pytest.fixture(scope="module")
def params():
    tree = init_params(MODEL, 1)
    return jax.tree.map(lambda x: x * 2 if x.ndim > 2 else x, tree)


@pytest.fixture(scope="module")
def sequences():
    return np.random.default_rng(0).integers(0, 30, (12, 24)).astype(np.int32)


@pytest.fixture(scope="module")
def profile(params, sequences):
    return profile_share(
        Transformer(MODEL), params, sequences, 12, MASK, masked=(0.5, 1.0), batch=5
    )


def test_nothing_moves_before_the_first_attention(profile):
    """Layer 0's keys and values are of embeddings alone, so reuse of them is exact."""
    assert profile.key_cosine[0] == pytest.approx(1, abs=1e-5)
    assert profile.value_cosine[0] == pytest.approx(1, abs=1e-5)
    assert max(profile.key_cosine[1:]) < 0.999
    assert profile.effects[0].kl == pytest.approx(0, abs=1e-6)
    assert profile.effects[0].agreement == 1
    # Sharing layer 0 means that its rows of the prefix do not see the rest.
    assert profile.effects[1].kl > 1e-4
    assert len(profile.effects) == MODEL.layers + 1
    assert profile.share == 0.5


@pytest.mark.parametrize("ends", [(12,), (2, 3, 6, 12)])
def test_the_effect_is_that_of_passes_in_which_the_prefix_does_not_see_the_rest(
    params, sequences, ends
):
    """At full depth: a segment's rows see those before it and its own, and the rest sees all."""
    tokens = sequences[:2].copy()
    tokens[:, 12:] = MASK
    model = slow_engine.SlowModel(MODEL, params)
    found = profile_share(
        Transformer(MODEL), params, sequences[:2], 12, MASK, masked=(1.0,), ends=ends
    )
    segment = np.searchsorted(ends, np.arange(24), side="right")
    blind = segment[:, None] >= segment  # the rest is the last segment
    divergences = []
    for row in tokens:
        logs = []
        for seen in (np.ones((24, 24), bool), blind):
            x = model.embed(row)
            for layer in range(MODEL.layers):
                q, k, v = model.project(layer, x, np.arange(24))
                mixed = [model.attend(q[i : i + 1], k[s], v[s])[0] for i, s in enumerate(seen)]
                x = model.finish(layer, x, np.array(mixed))
            z = model.logits(x[12:])
            logs.append(z - np.log(np.exp(z).sum(-1, keepdims=True)))
        divergences.append((np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1))
    assert found.effects[0].kl == pytest.approx(0, abs=1e-6)
    assert found.effects[-1].kl == pytest.approx(np.mean(divergences), rel=1e-3)
    assert found.effects[-1].kl > 1e-3


def test_the_worse_of_two_ways_to_build_counts_at_each_depth():
    whole = made(0.5, (1.0, 0.98, 0.99), (0, 1e-3, 1e-2, 1e-2))
    chained = made(0.5, (1.0, 0.99, 0.90), (0, 1e-4, 0.5, 0.5))
    both = worst_of([whole, chained])
    assert both.key_cosine == (1.0, 0.98, 0.90)
    assert [e.kl for e in both.effects] == [0, 1e-3, 0.5, 0.5]
    assert by_output([both], 0.05).steps == ((0.5, 1),)
    assert doubling(100) == (13, 25, 50, 100)
    assert doubling(1) == (1,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": Path("depths.png")}, "is where the picture goes"),
        ({"least_cosine": 0.9}, "least-cosine 0.9 means nothing to criterion 'output'"),
        ({"criterion": "cosine", "most_kl": 0.1}, "most-kl 0.1 means nothing to criterion 'cosine"),
    ],
)
def test_options_that_would_be_ignored_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        run_depth(DepthOptions(Path("nowhere"), **changes))


def test_a_canvas_behind_the_prefix_brings_its_keys_nearer(params, sequences):
    plain, canvas = (
        profile_share(Transformer(MODEL), params, sequences, 8, MASK, masked=(1.0,), canvas=canvas)
        for canvas in (False, True)
    )
    # Everything after the prefix is masked here, so that a canvas is what it will see.
    assert canvas.effects[-1].kl == pytest.approx(0, abs=1e-6)
    assert min(canvas.key_cosine) == pytest.approx(1, abs=1e-5)
    assert plain.effects[-1].kl > 1e-3


def test_a_canvas_has_as_many_masks_as_the_store_builds_with(params, sequences):
    """Behind 12 tokens that follow, 16: not what the request will see, and the profile says so."""
    canvas = profile_share(
        Transformer(MODEL), params, sequences, 12, MASK, masked=(1.0,), canvas=True
    )
    assert canvas.effects[-1].kl > 1e-5


def made(share, cosines, kls):
    effects = tuple(Effect(kl, kl, 1.0) for kl in kls)
    drift = tuple(0.01 * i for i in range(len(cosines)))
    return ShareProfile(share, cosines, (1.0,) * len(cosines), effects, (1.0,) * len(kls), drift)


def test_a_table_is_the_deepest_that_is_safe_everywhere_below_it():
    profiles = [
        made(0.9, (1.0, 0.98, 0.99), (0, 1e-3, 1e-2, 1e-2)),
        made(0.5, (1.0, 0.98, 0.9), (0, 1e-3, 0.5, 1e-3)),
    ]
    assert by_cosine(profiles).steps == ((0.5, 2), (0.9, 3))
    # What is good again below a bad layer does not count.
    assert by_output(profiles, 0.05).steps == ((0.5, 1), (0.9, 3))
    assert by_output(profiles, 1e-4).steps == ((0.5, 0), (0.9, 0))


def test_a_guards_bounds_lie_above_what_was_seen():
    profiles = [
        made(0.5, (1.0, 0.99, 0.99), (0, 0, 1, 1)),
        made(0.9, (1.0, 0.99, 0.99), (0, 0, 0, 1)),
    ]
    guard = guard_of(profiles, by_output(profiles, 0.1))
    assert [d for d, _ in guard.bounds] == [1, 2]
    assert guard.bound(1) == pytest.approx(0.015)
    assert guard.bound(2) == pytest.approx(0.03)
    assert guard.bound(3) == math.inf


def test_a_smaller_share_gets_no_more_than_a_larger_one():
    profiles = [
        made(0.5, (1.0, 0.99, 0.99), (0, 0, 0, 0)),
        made(0.7, (1.0, 0.99, 0.9), (0, 0, 1, 1)),
        made(0.9, (1.0, 0.99, 0.99), (0, 0, 0, 0)),
    ]
    assert by_cosine(profiles).steps == ((0.5, 2), (0.7, 2), (0.9, 3))
    assert by_output(profiles, 0.1).steps == ((0.5, 1), (0.7, 1), (0.9, 3))


def test_a_prefix_that_leaves_nothing_is_refused(params, sequences):
    with pytest.raises(ConfigError, match=r"a prefix of 24 of 24 tokens, .* use longer"):
        profile_share(Transformer(MODEL), params, sequences, 24, MASK)


def test_a_table_of_other_weights_or_another_builder_is_refused(tmp_path):
    path = tmp_path / "depths.json"
    content = {
        "revision": "abc",
        "builder": "prefix",
        "steps": [[0.5, 1], [0.9, 4]],
        "guard": [[1, 0.1]],
    }
    for covers in ("whole", "chained", "both"):
        path.write_text(json.dumps(content | {"segments": covers}))
        assert read_table(path, "abc", "prefix")[0].covers == covers
    path.write_text(json.dumps(content))  # of an older version
    depths, guard = read_table(path, "abc", "prefix")
    assert depths == Depths(((0.5, 1), (0.9, 4)), "whole")
    assert (guard.bound(1), guard.bound(4)) == (0.1, math.inf)
    with pytest.raises(ConfigError, match=r"is of weights abc .* make one of these"):
        read_table(path, "abd", "prefix")
    with pytest.raises(ConfigError, match="builder 'prefix', not of abc and 'canvas'"):
        read_table(path, "abc", "canvas")
    wrong = ["{}", "[]", json.dumps(content | {"segments": "some"})]
    wrong.append(path.read_text().replace("[0.9, 4]", "[0.9, 1e999]"))
    for text in wrong:
        path.write_text(text)
        with pytest.raises(ConfigError, match="is no table of depths"):
            read_table(path, "abc", "prefix")


def test_a_rare_kind_of_requests_decides_how_deep(params, sequences):
    """What is bad for a twelfth of the requests is no less bad for them."""
    model, kinds = Transformer(MODEL), np.arange(12) // 11
    profile = partial(profile_share, model, params, prefix=12, mask_id=MASK, masked=(1.0,))
    apart, together = profile(sequences, kinds=kinds), profile(sequences)
    each = [profile(rows) for rows in (sequences[:11], sequences[11:])]
    worst = [max(e.effects[d].kl_p95 for e in each) for d in range(4)]
    assert [e.kl_p95 for e in apart.effects] == pytest.approx(worst, rel=1e-3)
    assert worst[1] != pytest.approx(together.effects[1].kl_p95, rel=1e-3)
