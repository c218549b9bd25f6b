# SPDX-License-Identifier: Apache-2.0
"""LLaDA-8B and Dream-7B, compiled for GPUs that are not here."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from geojax.meshes import aot
from geojax.meshes.aot import COMPILER_OPTIONS, compile_only_devices, compiled_memory
from geojax.meshes.candidates import Job
from geojax.meshes.hardware import Cluster, get_gpu
from geojax.meshes.memory import STATED_ERROR, step_memory
from geojax.meshes.strategy import parse_strategy
from geojax.models.config import get_model
from geojax.models.transformer import abstract_params, make_apply
from geojax.plan.exact import exact_bytes

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        aot._version("jax-cuda13-plugin") is None,
        reason="no compiler for GPUs; pip install 'geojax[aot]'",
    ),
]
NAMES = ("llada-8b", "dream-7b")
LENGTH = 1024


@pytest.mark.parametrize("name", NAMES)
def test_a_forward_pass_in_bfloat16_fits_one_gpu(name):
    model, (device,) = get_model(name), compile_only_devices("h100", 1, 1)

    def spec(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    def forward(params, tokens, positions):
        return make_apply(model)(params, tokens, positions, None, jnp.bfloat16)

    params = jax.tree.map(lambda x: spec(x.shape, jnp.bfloat16), abstract_params(model))
    ids = spec((1, LENGTH), jnp.int32)
    lowered = jax.jit(forward).lower(params, ids, ids)
    memory = compiled_memory(lowered.compile(compiler_options=COMPILER_OPTIONS))
    print(f"{name}, 1 x {LENGTH}: {memory.total_bytes / 1e9:.2f} GB, {memory}")
    # Both vocabularies are whole multiples of 128: no row is padding.
    assert memory.arguments_bytes == 2 * model.num_params + 2 * 4 * LENGTH
    assert memory.outputs_bytes == 4 * LENGTH * model.vocab_size
    # The logits once more, at most, and a layer's scores; no second copy of the parameters.
    scores = 4 * model.heads * LENGTH**2
    assert memory.temporaries_bytes < memory.outputs_bytes + 2 * scores


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_fits_eight_gpus_as_estimated(name, tmp_path):
    model, length = get_model(name), 2048
    strategy = parse_strategy("dp8-tp1-pp1-mb1-gb64-fsdp-full")
    cluster = Cluster(get_gpu("h100"), 1, 8)
    job = Job(model, length, cluster, "adamw", (64,), (1,))
    found = exact_bytes(job, "h100", strategy, tmp_path)
    estimated = step_memory(model, length, strategy).total_bytes
    print(f"{name}, {strategy}: {found / 1e9:.1f} GB, estimated {estimated / 1e9:.1f} GB")
    assert found < job.usable_bytes
    assert abs(estimated / found - 1) < STATED_ERROR
