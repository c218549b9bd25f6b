# SPDX-License-Identifier: Apache-2.0
"""GPU figures and estimates obey the bounds that hold whatever the constants."""

from dataclasses import replace

import pytest

from geojax.meshes.hardware import GPUS, get_gpu, step_bytes, step_seconds
from geojax.models.config import get_model

MODEL, SEQ_LEN = get_model("llama-150m"), 1024


def test_unknown_gpu_gives_the_nearest():
    assert get_gpu("h100") is GPUS["h100"]
    with pytest.raises(ValueError, match="did you mean 'h100'"):
        get_gpu("H100")


@pytest.mark.parametrize("name", GPUS)
def test_a_step_is_slower_than_the_peak_and_never_gains_from_fewer_gpus(name):
    gpu = get_gpu(name)
    flops = 32 * SEQ_LEN * MODEL.train_flops_per_token(SEQ_LEN)
    seconds = [step_seconds(MODEL, gpu, gpus, 32, SEQ_LEN) for gpus in (1, 2, 4, 8)]
    assert seconds[0] > flops / gpu.bf16_flops_per_second
    assert seconds == sorted(seconds, reverse=True)


def test_larger_batches_cost_more_a_step_and_less_a_sequence():
    seconds = [step_seconds(MODEL, get_gpu("l40s"), 1, batch, SEQ_LEN) for batch in (8, 16, 32)]
    assert seconds[0] < seconds[1] < seconds[2]
    assert seconds[0] / 8 > seconds[1] / 16 > seconds[2] / 32


def test_the_gpu_with_the_most_sequences_sets_the_pace():
    # 9 sequences on 8 GPUs: one GPU has 2, as with 16 sequences.
    gpu = get_gpu("h100")
    nine, sixteen = (step_seconds(MODEL, gpu, 8, batch, SEQ_LEN) for batch in (9, 16))
    assert nine == sixteen


def test_of_the_published_setting_the_h100_is_fastest():
    setting = ("h100", "a100-80gb", "l40s", "rtx-6000-ada")
    seconds = {name: step_seconds(MODEL, get_gpu(name), 1, 16, SEQ_LEN) for name in setting}
    assert min(seconds, key=seconds.__getitem__) == "h100"
    assert 2 < max(seconds.values()) / seconds["h100"] < 4


def test_state_is_12_bytes_a_parameter_with_lion_and_16_with_adamw():
    lion, adamw = (step_bytes(MODEL, 4, SEQ_LEN, optimizer_slots=slots) for slots in (1, 2))
    assert adamw - lion == 4 * MODEL.num_params
    one, two = (step_bytes(MODEL, batch, SEQ_LEN) for batch in (1, 2))
    assert one - (two - one) == 12 * MODEL.num_params


def test_activations_follow_the_micro_batch_and_not_the_batch():
    whole = step_bytes(MODEL, 16, SEQ_LEN)
    assert step_bytes(MODEL, 64, SEQ_LEN, micro_batch=16) == whole
    assert step_bytes(MODEL, 16, SEQ_LEN, micro_batch=64) == whole
    assert step_bytes(MODEL, 16, SEQ_LEN, micro_batch=4) < whole


def test_one_tiny_layer_counted_by_hand():
    model = replace(
        MODEL, vocab_size=10, dim=8, layers=1, heads=2, kv_heads=1, mlp_dim=12, tied=True
    )
    # A token's elements: 6 x 8 + 2 x 4 + 4 x 12 = 104; probabilities: 2 heads x 3 keys.
    token_bytes = 104 * 2 + 2 * 3 * (4 + 2) + 10 * 2 * 4
    assert step_bytes(model, 5, 3) == 12 * model.num_params + 5 * 3 * token_bytes
