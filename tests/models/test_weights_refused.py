# SPDX-License-Identifier: Apache-2.0
import json

import numpy as np
import pytest
from checkpoints import CASES, make, random_params, write
from safetensors.numpy import save_file

from geojax.config import ConfigError
from geojax.models.config import MODELS
from geojax.models.weights import files, load_safetensors, read_config, save_safetensors


def change(**tensors):
    """Tensors of the case with these instead, or without those that are None."""

    def apply(found):
        merged = found | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in merged.items() if tensor is not None}

    return apply


@pytest.mark.parametrize(
    ("case", "edit", "message"),
    [
        ("llama", change(lm_head__weight=None), r"no tensor 'lm_head.weight'.* \[50, 32\]"),
        (
            "llama",
            change(model__norm__weight=np.zeros(31, np.float32)),
            r"'model.norm.weight' is \[31\], but the config makes it \[32\]",
        ),
        (
            "llama",
            change(model__layers__0__self_attn__q_proj__bias=np.zeros(32, np.float32)),
            r"'model.layers.0.self_attn.q_proj.bias' of \[32\] has no place",
        ),
        (
            "llama",
            change(model__layers__3__input_layernorm__weight=np.zeros(32, np.float32)),
            r"'model.layers.3.input_layernorm.weight' of \[32\] has no place",
        ),
        (
            "llama",
            change(model__norm__weight=np.zeros(32, np.int8)),
            r"'model.norm.weight' is of type I8, not one of .*BF16",
        ),
        (
            "bert",
            change(cls__predictions__transform__LayerNorm__gamma=np.ones(32, np.float32)),
            r"two spellings of one",
        ),
        (
            "llada",
            change(model__transformer__ff_out__weight=None),
            r"no tensor 'model.transformer.ff_out.weight'.* \[50, 32\]",
        ),
        (
            "llada",
            change(model__transformer__blocks__2__ff_out__weight=np.zeros((44, 32), np.float32)),
            r"blocks.2.ff_out.weight' is \[44, 32\], but the config makes it \[32, 44\]",
        ),
        (
            "llada",
            change(model__transformer__blocks__0__q_norm__weight=np.zeros(8, np.float32)),
            r"blocks.0.q_norm.weight' of \[8\] has no place",
        ),
        (
            "dream",
            change(model__layers__1__self_attn__k_proj__bias=None),
            r"no tensor 'model.layers.1.self_attn.k_proj.bias'.* \[16\]",
        ),
        (
            "dream",
            change(model__layers__1__self_attn__o_proj__bias=np.zeros(32, np.float32)),
            r"o_proj.bias' of \[32\] has no place",
        ),
        ("bert", change(cls__predictions__bias=None), r"no tensor 'cls.predictions.bias'"),
        (
            "gpt2",
            change(transformer__h__1__attn__c_attn__weight=np.zeros((96, 32), np.float32)),
            r"'transformer.h.1.attn.c_attn.weight' is \[96, 32\], .* \[32, 96\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(case, edit, message, tmp_path):
    folder, tensors = make(tmp_path, case)
    write(folder, CASES[case][0], edit(tensors))
    with pytest.raises(ConfigError, match=message):
        load_safetensors(folder, read_config(folder))


def test_damaged_and_missing_files_are_refused(tmp_path):
    folder, tensors = make(tmp_path / "a", "llama")
    config, file = read_config(folder), folder / "model.safetensors"
    load_safetensors(file, config)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read"):
        load_safetensors(folder, config)
    file.unlink()
    with pytest.raises(ConfigError, match=r"has neither model.safetensors nor"):
        load_safetensors(folder, config)
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        load_safetensors(tmp_path / "none", config)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "one.safetensors")}))
    with pytest.raises(ConfigError, match=r"names 'one.safetensors', which is not in the folder"):
        load_safetensors(folder, config)
    index.write_text("{}")
    with pytest.raises(ConfigError, match=r"index.json is damaged"):
        load_safetensors(folder, config)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder, tensors = make(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, folder / "b.safetensors")
    files_of = dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": "b.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files_of}))
    with pytest.raises(ConfigError, match=r"b.safetensors: tensor 'model.norm.weight' is in anoth"):
        load_safetensors(folder, read_config(folder))


def test_what_cannot_be_written_is_refused(tmp_path):
    config = MODELS["llama-tiny"]
    params = random_params(config)
    with pytest.raises(ConfigError, match="'int8'; use float32 or bfloat16"):
        save_safetensors(params, config, tmp_path / "out", dtype="int8")
    with pytest.raises(
        ConfigError, match=r"not those of the config: .* is \(2, 64, 64\), .* \(12, "
    ):
        save_safetensors(params, MODELS["gpt-2"], tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        save_safetensors(params, config, tmp_path / "full")
    assert [p.name for p in tmp_path.iterdir()] == ["full"]
    assert (tmp_path / "full" / "mine").read_text() == "mine"


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args):
        yield "model.embed_tokens.weight", np.zeros((512, 64), np.float32)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "iter_tensors", fail)
    config = MODELS["llama-tiny"]
    with pytest.raises(OSError, match="No space"):
        save_safetensors(random_params(config), config, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
