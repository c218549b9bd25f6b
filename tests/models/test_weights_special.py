# SPDX-License-Identifier: Apache-2.0
"""Special tokens, ids that must not be sampled, and chat templates of checkpoints' folders."""

import json

import numpy as np
import pytest
from checkpoints import DREAM, LLADA, LLAMA
from tokenizers import AddedToken, Tokenizer, models

from geojax.config import ConfigError
from geojax.models.config import MODELS
from geojax.models.weights import (
    SpecialTokens,
    forbidden_ids,
    read_config,
    read_special,
    render_chat,
)
from geojax.models.weights.hf_config import write_config

WORDS = [f"w{i}" for i in range(40)]
CHAT = [{"role": "user", "content": " hi\n"}, {"role": "assistant", "content": "ho"}]


def folder_of(path, hf, tokenizer=None, **files):
    """A folder without weights; `files`: JSON by stem."""
    path.mkdir(exist_ok=True)
    for stem, content in {"config": hf, **files}.items():
        (path / f"{stem}.json").write_text(json.dumps(content))
    if tokenizer:
        tokenizer.save(str(path / "tokenizer.json"))
    return path


def small_tokenizer():
    """Ids 0 to 39 are words, then come <eos> and <mask>; of a model's 50."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "w0"))
    tokenizer.add_special_tokens([AddedToken("<eos>"), AddedToken("<mask>")])
    return tokenizer


def test_ids_are_those_of_config_json(tmp_path):
    folder = folder_of(tmp_path, DREAM, generation_config={"mask_token_id": 3, "eos_token_id": 3})
    assert read_special(folder) == SpecialTokens(mask=49, eos=40, pad=40, bos=40)


def test_what_config_json_lacks_is_in_the_other_files(tmp_path):
    hf = LLAMA | {"pad_token_id": -1, "bos_token_id": None}
    folder = folder_of(
        tmp_path,
        hf,
        small_tokenizer(),
        generation_config={"eos_token_id": [40, 7], "mask_token_id": None},
        tokenizer_config={"mask_token": {"content": "<mask>"}, "bos_token": "w5"},
    )
    special = read_special(folder)
    assert special == SpecialTokens(41, 40, None, 5, undecodable=((42, 50),))
    assert special.ids() == {"mask_token_id": 41, "eos_token_id": 40, "bos_token_id": 5}


@pytest.mark.parametrize(
    ("hf", "size", "expected"),
    [
        (LLADA, 126_464, SpecialTokens(126_336, 126_081, 126_081, 126_080, ((126_349, 126_464),))),
        (DREAM, 152_064, SpecialTokens(151_666, 151_643, 151_643, 151_643, ((151_667, 152_064),))),
    ],
)
def test_published_ids_stand_in_for_a_published_vocabulary_only(hf, size, expected, tmp_path):
    bare = {key: value for key, value in hf.items() if not key.endswith("token_id")}
    found = read_special(folder_of(tmp_path, bare | {"vocab_size": size, "embedding_size": size}))
    assert (*found.ids().values(), found.undecodable) == (
        *expected.ids().values(),
        expected.undecodable,
    )
    assert read_special(folder_of(tmp_path, bare)).ids() == {}


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path):
    folder = folder_of(tmp_path, LLADA | {"mask_token_id": 50})
    with pytest.raises(ConfigError, match="mask_token_id 50 is no id of the vocabulary of 50"):
        read_special(folder)


def test_damaged_files_are_refused(tmp_path):
    for name in ("generation_config", "tokenizer_config", "tokenizer"):
        folder = folder_of(tmp_path / name, LLADA)
        (folder / f"{name}.json").write_text("{")
        with pytest.raises(ConfigError, match=f"{name}.json"):
            read_special(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chat_template", ["a", "b"]),
        ("chat_template", 3),
        ("chat_template", [{"name": "default"}]),
        ("added_tokens_decoder", [{"content": "<eos>"}]),
        ("added_tokens_decoder", {"five": {"content": "<eos>"}}),
        ("added_tokens_decoder", {"5": {"special": True}}),
        ("mask_token", ["<mask>"]),
        ("eos_token", {"special": True}),
    ],
)
def test_a_tokenizer_config_of_another_form_is_refused(key, value, tmp_path):
    folder = folder_of(tmp_path, LLADA, tokenizer_config={key: value})
    with pytest.raises(ConfigError, match=rf"tokenizer_config\.json: {key} .* is not .*; fetch"):
        read_special(folder)


def test_a_template_that_is_no_text_is_refused(tmp_path):
    folder = folder_of(tmp_path, LLADA)
    (folder / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja is not UTF-8 text"):
        read_special(folder)


def test_ids_that_are_written_are_read_again(tmp_path):
    special = SpecialTokens(mask=511, eos=0, pad=1, bos=2)
    for name in ("llada-tiny", "dream-tiny", "gpt-tiny"):
        write_config(MODELS[name], tmp_path, "float32", special)
        assert read_special(tmp_path).ids() == special.ids()
        assert read_config(tmp_path) == MODELS[name]


def test_the_mask_and_what_cannot_be_decoded_are_forbidden():
    tokenizer = small_tokenizer()
    found = forbidden_ids(SpecialTokens(mask=41, eos=40), tokenizer, 50)
    np.testing.assert_array_equal(np.flatnonzero(found), range(41, 50))
    for i in np.flatnonzero(~found):
        assert tokenizer.id_to_token(int(i)) is not None
    holes = forbidden_ids(SpecialTokens(mask=3, undecodable=((0, 2), (45, 50))), None, 50)
    np.testing.assert_array_equal(np.flatnonzero(holes), [0, 1, 3, 45, 46, 47, 48, 49])


def test_ids_that_a_tokenizer_skips_are_forbidden():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 3, "c": 9}, "a"))
    found = forbidden_ids(SpecialTokens(), tokenizer, 8)
    np.testing.assert_array_equal(np.flatnonzero(found), [1, 2, 4, 5, 6, 7])


def test_a_llada_without_a_template_has_the_published_one(tmp_path):
    head = "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    head += "<|start_header_id|>assistant<|end_header_id|>\n\n"
    folder = folder_of(tmp_path, LLADA)
    assert render_chat(folder, CHAT[:1]) == head
    assert render_chat(folder, CHAT, reply=False) == head + "ho<|eot_id|>"


def test_a_folder_s_template_is_used_with_its_tokens(tmp_path):
    template = """
        {%- for m in messages %}
            {%- if m.role not in ('user', 'assistant') %}
                {{- raise_exception('no role ' + m.role) }}
            {%- endif %}
            {%- if loop.index > 5 %}{% break %}{% endif %}
            {{- bos_token + m.role + ':' + m.content | tojson + eos_token }}
        {%- endfor %}
        {%- if add_generation_prompt and not tools %}{{ 'assistant:' }}{% endif %}"""
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    folder = folder_of(tmp_path, DREAM, tokenizer_config=named)
    said = [{"role": "user", "content": "a<b"}]
    assert render_chat(folder, said) == '<s>user:"a<b"</s>assistant:'
    with pytest.raises(ConfigError, match="template failed: no role judge"):
        render_chat(folder, [{"role": "judge", "content": "x"}])
    several = [{"name": "tool", "template": "x"}, {"name": "default", "template": "{{eos_token}}"}]
    folder_of(tmp_path, DREAM, tokenizer_config=named | {"chat_template": several})
    assert render_chat(folder, said) == "</s>"
    (tmp_path / "chat_template.jinja").write_text("own {{ messages | length }}")
    assert render_chat(folder, said) == "own 1"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(messages[0]) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(1000000000) %}{{ i }}{% endfor %}",
        "{{ 1 / 0 }}",
        "{% if %}",
    ],
)
def test_templates_that_reach_out_of_their_box_or_fail_are_refused(template, tmp_path):
    folder = folder_of(tmp_path, DREAM, tokenizer_config={"chat_template": template})
    with pytest.raises(ConfigError, match="the chat template failed"):
        render_chat(folder, CHAT)
    assert len(CHAT) == 2


def test_messages_and_folders_that_give_no_text_are_refused(tmp_path):
    folder = folder_of(tmp_path, DREAM)
    with pytest.raises(ConfigError, match="has no chat_template"):
        render_chat(folder, CHAT)
    with pytest.raises(ConfigError, match=r"message 1 .* must have a role and a content"):
        render_chat(folder_of(tmp_path / "l", LLADA), [CHAT[0], {"role": "user"}])
