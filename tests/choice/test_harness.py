# SPDX-License-Identifier: Apache-2.0
"""geojax under lm-eval, where that is installed (the extra `lm-eval`)."""

import numpy as np
import pytest

from geojax.choice.load import load_subject
from geojax.choice.pairs import windows
from geojax.config import ConfigError


def test_windows_predict_each_token_once_with_all_the_room_before():
    ids = list(range(1, 11))
    found = [(p.context.tolist(), p.continuation.tolist()) for p in windows(ids, 0, 4)]
    assert found == [([0], [1, 2, 3, 4]), ([4], [5, 6, 7, 8]), ([6, 7, 8], [9, 10])]
    (only,) = windows([5], 0, 4)
    assert (only.context.tolist(), only.continuation.tolist()) == ([0], [5])
    assert windows([], 0, 4) == []


@pytest.fixture
def harness():
    pytest.importorskip("lm_eval", reason="needs the extra lm-eval")
    from geojax.choice import harness

    return harness


def instances(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def test_a_causal_model_says_there_what_it_says_here(harness, causal):
    from lm_eval.api.registry import get_model

    model = get_model("geojax")(folder=str(causal))
    subject = load_subject(causal)
    texts = [("Is 1 odd?", " yes"), ("Is 1 odd? ", "no"), ("", "maybe")]
    found = model.loglikelihood(instances("loglikelihood", *texts))
    score = subject.likelihood()
    assert found == [(a.log, a.greedy) for a in score(subject.pairs(texts))]
    text = "so " * 50  # 150 tokens, in a context of 64
    (rolling,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
    (ids,) = subject.tokenizer.encode_batch([text])
    assert rolling == pytest.approx(sum(a.log for a in score(windows(ids, 256, 64))))
    with pytest.raises(ConfigError, match="writes no text here yet"):
        model.generate_until(instances("generate_until", ("Hi", {})))


def test_a_diffusion_model_scores_and_writes_there(harness, diffusion):
    model = harness.GeojaxLM(folder=str(diffusion), samples=2, batch_size=2)
    ((log, _),) = model.loglikelihood(instances("loglikelihood", ("Is 1 odd?", " yes")))
    assert np.isfinite(log)
    (rolling,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", ("so " * 30,)))
    assert rolling < log
    how = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False, "temperature": 0.7}
    asked = instances("generate_until", ("Hi", how), ("so " * 40, how), ("Hi", how))
    first, second, third = model.generate_until(asked)
    assert first == third
    assert "\n" not in first + second
    assert first
    how |= {"do_sample": True, "temperature": 2.0}
    a, b = model.generate_until(instances("generate_until", ("Hi", how), ("Hi", how)))
    assert a != b  # repeats of a request are draws of their own


def test_the_whole_harness_takes_it(harness, causal, tmp_path):
    """A task of its own config over items made here."""
    import json

    import lm_eval

    rows = [{"question": f"Is {i} odd?", "choices": ["yes", "no"], "gold": i % 2} for i in range(4)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    task = {
        "task": "toy",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
    }
    found = lm_eval.simple_evaluate(
        model="geojax", model_args={"folder": str(causal)}, tasks=[task], bootstrap_iters=0
    )
    subject = load_subject(causal)
    asked = [(row["question"], f" {choice}") for row in rows for choice in row["choices"]]
    logs = np.array([a.log for a in subject.likelihood()(subject.pairs(asked))]).reshape(-1, 2)
    right = logs.argmax(1) == np.array([row["gold"] for row in rows])
    assert found["results"]["toy"]["acc,none"] == right.mean()
