# SPDX-License-Identifier: Apache-2.0
"""`geojax eval MODEL --tasks`, from a folder to figures, over items that are made here."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made_text import write_words
from tokenizers import Tokenizer

from geojax.choice import tasks
from geojax.choice.load import load_subject
from geojax.choice.tasks import Task
from geojax.cli import main
from geojax.config import ConfigError, DataConfig, MaskingConfig, SourceConfig, TokenizerConfig
from geojax.configs import load_config
from geojax.data import prepare
from geojax.diffusion.load import load as load_model
from geojax.runs import begin_folder
from geojax.score import perplexity

TOYS = {
    "examples": [
        {
            "input": f"Is {i} {'even' if i % 2 else 'odd'}?",
            "target_scores": {"yes": 0, "no": 1, "perhaps": 0},
        }
        for i in range(6)
    ]
}
LONG = {"examples": [{"input": "so " * 40, "target_scores": {"good": 1, "bad!": 0}}]}


@pytest.fixture(autouse=True)
def toys(tmp_path, monkeypatch):
    monkeypatch.setenv("GEOJAX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "packages" / "toys-1"
    folder.mkdir(parents=True)
    (folder / "parity").write_text(json.dumps(TOYS))
    (folder / "long").write_text(json.dumps(LONG))
    known = {name: Task("toys==1", name, tasks._bigbench) for name in ("parity", "long")}
    monkeypatch.setattr(tasks, "TASKS", known)
    monkeypatch.setattr("geojax.choice.command.TASKS", known)


@pytest.mark.parametrize("kind", ["causal", "diffusion"])
def test_figures_are_the_same_after_a_second_start(kind, tmp_path, request, capsys):
    folder, out = request.getfixturevalue(kind), tmp_path / "out"
    args = ["eval", str(folder), "--tasks", "all", "--items", "5", "--out", str(out)]
    args += ["--samples", "3"] if kind == "diffusion" else []
    assert main(args) == 0
    printed = capsys.readouterr().out
    assert "parity" in printed
    assert "chance" in printed
    first = json.loads((out / "results.json").read_text())
    assert first["samples"] == (3 if kind == "diffusion" else None)
    parity, long = first["tasks"]["parity"], first["tasks"]["long"]
    assert (parity["items"], parity["source_items"], parity["cut_items"]) == (5, 6, 0)
    assert parity["chance"] == pytest.approx(1 / 3)
    assert parity["majority"] == 1
    assert (long["items"], long["cut_items"]) == (1, 1)
    lines = (out / "items.jsonl").read_text()
    (out / "items.jsonl").write_text("".join(lines.splitlines(keepends=True)[:4]))
    assert main([*args, "--json", str(tmp_path / "again.json")]) == 0
    assert json.loads((tmp_path / "again.json").read_text()) == first
    assert main([*args, "--dtype", "bfloat16"]) == 2
    assert "give another --out" in capsys.readouterr().err


def test_bfloat16_says_nearly_the_same(causal):
    subjects = [load_subject(causal, dtype) for dtype in ("float32", "bfloat16")]
    pairs = subjects[0].pairs([("Is 1 odd?", " yes"), ("Is 1 odd?", " perhaps")])
    exact, rough = (np.array([x.log for x in s.likelihood()(pairs)]) for s in subjects)
    np.testing.assert_allclose(rough, exact, rtol=0.02)  # 8 bits of mantissa, 4 and 8 tokens
    assert (rough != exact).any()


def test_perplexity_masks_with_the_id_of_config_json(diffusion, tmp_path):
    """A tokenizer knows a mask of its own; id 7 is a byte's, which the text has not."""
    folder = tmp_path / "other"
    shutil.copytree(diffusion, folder)
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf | {"mask_token_id": 7}))
    source = SourceConfig(kind="files", paths=(str(write_words(tmp_path)),))
    data = DataConfig(
        source=source, seq_len=16, valid_fraction=0.3, masking=MaskingConfig("diffusion")
    )
    file = TokenizerConfig(kind="file", path=str(diffusion / "tokenizer.json"))
    asked = prepare(replace(data, tokenizer=file), 258, mask_id=7)
    assert (asked.mask_id, bool(asked.ordinary[7])) == (7, False)
    own, other = (perplexity(f, data, 4, 4)["nats_per_token"] for f in (diffusion, folder))
    assert own != other


@pytest.mark.parametrize("kind", ["causal", "diffusion"])
def test_every_weight_is_in_the_type_that_was_asked_for_and_held_once(kind, request):
    subject = load_subject(request.getfixturevalue(kind), "bfloat16")
    for leaf in jax.tree.leaves(subject.params):
        assert leaf.dtype == "bfloat16"
        assert jnp.asarray(leaf, "bfloat16") is leaf  # on the device already: no copy is made


def test_a_fingerprint_changes_with_any_element_of_any_weight(causal):
    subject = load_subject(causal)
    leaves, form = jax.tree.flatten(subject.params)
    wide = [jnp.zeros((4, 8000)) for _ in leaves]
    found = set()
    for changed in (None, *range(len(leaves))):
        new = [x.at[-1, -1].set(1) if i == changed else x for i, x in enumerate(wide)]
        found.add(replace(subject, params=jax.tree.unflatten(form, new)).fingerprint())
    assert len(found) == len(leaves) + 1


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation(causal):
    subject = load_subject(causal)
    (moved,), (plain,) = subject.pairs([("A: ", "yes")]), subject.pairs([("A:", " yes")])
    assert moved.context.tolist() == plain.context.tolist()
    assert moved.continuation.tolist() == plain.continuation.tolist()
    assert len(plain.continuation) == 4
    (nothing,) = subject.pairs([("", "yes")])
    assert nothing.context.tolist() == [256]  # end-of-text


def test_what_a_tokenizer_begins_texts_with_stands_before_a_context(causal, tmp_path):
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path / "begins"
    shutil.copytree(causal, folder)
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    inner.save(str(folder / "tokenizer.json"))
    (pair,) = load_subject(folder).pairs([("A:", " yes")])
    (before,) = load_subject(causal).pairs([("A:", " yes")])
    assert pair.context.tolist() == [256, *before.context.tolist()]
    assert pair.continuation.tolist() == before.continuation.tolist()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tasks", "parityy"], "did you mean 'parity'"),
        (["--tasks", "parity", "--draws", "2"], "--draws means nothing with --tasks"),
        (["--items", "3"], "--items means nothing without --tasks"),
        (["--tasks", "parity", "--items", "0"], "items 0 must be at least 1"),
        (["--tasks", "parity", "--samples", "4"], "a causal llama has none"),
        (["--tasks", "parity", "--batch-tokens", "0"], "batch_tokens 0 must be"),
    ],
)
def test_bad_requests_are_refused(args, message, causal, capsys):
    assert main(["eval", str(causal), *args]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_or_of_a_bert_is_refused(causal, tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        load_subject(tmp_path / "none")
    folder = tmp_path / "copy"
    shutil.copytree(causal, folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="put it beside its weights"):
        load_subject(folder)
    hf = {"model_type": "bert", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 44}
    hf |= {"num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 16}
    (folder / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ConfigError, match="holds a bert"):
        load_subject(folder)


def test_a_run_of_generated_tasks_is_refused(causal, tmp_path, capsys):
    begin_folder(load_config("dlm-tasks"), tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert main(["eval", str(tmp_path / "run"), "--tasks", "parity"]) == 2
    assert "trained on generated tasks, which have no text" in capsys.readouterr().err


def test_a_tokenizer_beyond_the_model_s_vocabulary_is_refused(diffusion, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(diffusion, folder)
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(["<|im_end|>"])
    inner.save(str(folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"<\|im_end\|> is id 258, beyond .* vocabulary of 258"):
        load_model(folder)
