# SPDX-License-Identifier: Apache-2.0
"""Sampling beside a plain loop in numpy with the same weights, and a training step beside that of
the autoregressive model of the same shape.

    python benchmarks/diffusion.py [--rounds N]

Both samplers fill the same canvas in the same number of steps, at temperature 0, in turn in one
process; the numpy one computes logits of the masked positions only, as ours does. Ratios round by
round. The tokens that both filled are compared as well, and those of bfloat16; and what a trained
model gives requests in a batch, with what it gives them alone.
"""

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from geojax.config import MaskingConfig, OptimizerConfig, TrainConfig
from geojax.data import empty_batch, tasks
from geojax.data.masking import Masker
from geojax.diffusion import exact
from geojax.diffusion.load import load
from geojax.diffusion.request import Request, SamplingConfig, masks, prompt
from geojax.diffusion.sampler import Sampler
from geojax.meshes.strategy import Strategy
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Transformer, init_params
from geojax.track.environment import machine
from geojax.train.program import Program, Task

MODEL = TransformerConfig(
    vocab_size=4096, dim=256, layers=8, heads=4, kv_heads=4, mlp_dim=704, bidirectional=True
)
FIXTURE = Path(__file__).parent.parent / "tests" / "fixtures" / "dlm-tasks"
MASK, PROMPT, CANVAS, STEPS, BLOCK, BATCH = 4095, 192, 64, 32, 32, 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5, help="pairs of measurements")
    rounds = parser.parse_args().rounds
    params = init_params(MODEL, 0)
    rng = np.random.default_rng(0)
    ask = SamplingConfig(steps=STEPS, block=BLOCK)
    requests = [
        prompt(rng.integers(0, MASK, PROMPT).tolist(), CANVAS, MASK, ask) for _ in range(BATCH)
    ]
    sampling(params, requests, rounds)
    batching()
    training(rounds)
    print(f"measured clock, {machine()}")


def sampling(params, requests: list[Request], rounds: int) -> None:
    forbidden = np.arange(MODEL.vocab_size) == MASK

    def sampler(dtype) -> Sampler:
        weights = jax.tree.map(lambda x: x.astype(dtype), params)
        return Sampler(Transformer(MODEL), weights, MASK, forbidden, (), dtype)

    ours, narrow = sampler(jnp.float32), sampler(jnp.bfloat16)
    plain = Plain(params)
    found = ours.sample(requests)
    ratios, seconds = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        ours.sample(requests)
        between = time.perf_counter()
        expected = plain.sample(requests)
        ended = time.perf_counter()
        ratios.append((ended - between) / (between - started))
        seconds.append(between - started)
    low, high = np.percentile(ratios, [25, 75])
    took = median(seconds)
    print(
        f"{BATCH} requests of {PROMPT} + {CANVAS} tokens, {STEPS} steps, blocks of {BLOCK}, "
        f"{MODEL.num_params / 1e6:.1f}M parameters:\n"
        f"  {BATCH * STEPS / took:.1f} denoising steps/s of a request, "
        f"{BATCH * CANVAS / took:.1f} generated tokens/s\n"
        f"  numpy / ours: median {median(ratios):.2f} (quartiles {low:.2f}-{high:.2f}, "
        f"{rounds} pairs)"
    )
    same = np.mean([a.tokens == b for a, b in zip(found, expected, strict=True)])
    halves = narrow.sample(requests)
    other = np.mean([a.new != b.new for a, b in zip(found, halves, strict=True)])
    print(
        f"  tokens as numpy's: {same:.1%}; filled otherwise by bfloat16: {other:.1%} (random "
        "weights: margins are small)"
    )


class Plain:
    """The same model and sampler, as one would write them in numpy, float32."""

    def __init__(self, params):
        self.p = jax.tree.map(np.asarray, params)

    def sample(self, requests: list[Request]) -> list[np.ndarray]:
        tokens = np.array([request.tokens for request in requests])
        for begin in range(PROMPT, PROMPT + CANVAS, BLOCK):
            steps = STEPS * BLOCK // CANVAS
            for step in range(steps):
                x = self.hidden(tokens)
                count = BLOCK // steps + (step < BLOCK % steps)
                for row, h in zip(tokens, x, strict=True):
                    wanted = begin + np.flatnonzero(row[begin : begin + BLOCK] == MASK)
                    logits = self.norm(h[wanted], self.p["norm"]["scale"]) @ self.p["head"].T
                    logits[:, MASK:] = -np.inf
                    probs = softmax(logits)
                    best = np.argsort(-probs.max(-1), kind="stable")[:count]
                    row[wanted[best]] = probs[best].argmax(-1)
        return list(tokens)

    def hidden(self, tokens: np.ndarray) -> np.ndarray:
        x, blocks = self.p["embed"][tokens], self.p["blocks"]
        b, s = tokens.shape
        half = MODEL.head_dim // 2
        angles = np.arange(s)[:, None] * MODEL.rope_theta ** (-np.arange(half) / half)
        cos, sin = (f(angles).astype(np.float32)[:, None] for f in (np.cos, np.sin))

        def turn(z):
            first, second = z[..., :half], z[..., half:]
            return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

        for i in range(MODEL.layers):
            part = {k: v[i] for k, v in blocks["attention"].items()}
            y = self.norm(x, blocks["attention_norm"]["scale"][i])
            q, k, v = (
                (y @ part[n]).reshape(b, s, MODEL.heads, -1) for n in ("query", "key", "value")
            )
            q, k, v = (z.transpose(0, 2, 1, 3) for z in (turn(q), turn(k), v))
            mixed = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(np.float32(q.shape[-1]))) @ v
            x = x + mixed.transpose(0, 2, 1, 3).reshape(b, s, -1) @ part["out"]
            part = {k: v[i] for k, v in blocks["mlp"].items()}
            y = self.norm(x, blocks["mlp_norm"]["scale"][i])
            gate = y @ part["gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (y @ part["up"])) @ part["down"]
        return x

    def norm(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + MODEL.norm_eps) * scale


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def batching() -> None:
    """Tokens that a trained model gives a request otherwise in a batch than alone."""
    asks = []
    for task in tasks.TASKS:
        asks += exact.requests(
            tasks.make_examples(task.name, None, 8, 0, exact.LENGTH), exact.STEPS
        )
    order = np.random.default_rng(0).permutation(len(asks))
    for dtype in (jnp.float32, jnp.bfloat16):
        sampler = load(FIXTURE, dtype).sampler()
        alone = [sampler.sample([ask])[0].tokens for ask in asks]
        other, count = 0, 0
        for places in np.array_split(order, len(asks) // 8):
            found = sampler.sample([asks[i] for i in places])
            other += sum(
                int((a.tokens != alone[i]).sum()) for i, a in zip(places, found, strict=True)
            )
            count += sum(int(masks(asks[i], tasks.MASK).sum()) for i in places)
        print(
            f"tokens otherwise in a batch of 8 of other lengths than alone, {FIXTURE.name}, "
            f"{jnp.dtype(dtype).name}: {other} of {count}"
        )


def training(rounds: int) -> None:
    """Seconds a step of masked diffusion over those of the causal model."""
    seq_len, batch = 256, 8
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, MASK, (batch, seq_len), np.int32)
    plain = empty_batch((1, batch), seq_len)
    positions = np.broadcast_to(np.arange(seq_len, dtype=np.int32), (1, batch, seq_len))
    ones = np.ones((batch, seq_len), bool)
    masker = Masker(MaskingConfig(kind="diffusion"), MASK, ones[0], 0)
    hidden, weights = masker(tokens, np.arange(batch, dtype=np.uint64), ones)
    batches = {
        "diffusion": (hidden, tokens, weights),
        "causal": (tokens, np.roll(tokens, -1, 1), ones.astype(np.float32)),
    }
    train = TrainConfig(
        total_tokens=1, optimizer=OptimizerConfig(name="adamw"), compute_dtype="float32"
    )
    state, chunk, programs = {}, {}, {}
    for name, (inputs, targets, weight) in batches.items():
        model = replace(MODEL, bidirectional=name == "diffusion")
        strategy = Strategy(1, 1, 1, batch, batch)
        programs[name] = Program(Task(model, train, seq_len), strategy, jax.devices()[:1])
        state[name] = programs[name].init(0)
        chunk[name] = programs[name].put_chunk(
            plain._replace(
                tokens=inputs[None],
                targets=targets[None],
                weights=weight[None],
                positions=positions,
            )
        )
    ratios = []
    for number in range(4 * rounds + 1):
        took = {}
        for name, program in programs.items():
            started = time.perf_counter()
            state[name], _ = program.run(state[name], chunk[name], 1, 0.5, 0.0, 0)
            jax.block_until_ready(state[name])
            took[name] = time.perf_counter() - started
        if number:
            ratios.append(took["diffusion"] / took["causal"])
    low, high = np.percentile(ratios, [25, 75])
    print(
        f"training step, {batch} sequences of {seq_len}: diffusion / causal: median "
        f"{median(ratios):.3f} (quartiles {low:.3f}-{high:.3f}, {len(ratios)} pairs)"
    )


if __name__ == "__main__":
    main()
