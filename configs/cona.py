# SPDX-License-Identifier: Apache-2.0
"""Runs whose strategy follows the noise of the gradient."""

from dataclasses import replace

from geojax.config import (
    ClockConfig,
    ConaConfig,
    EvalConfig,
    NoiseConfig,
    RunConfig,
    ScalingConfig,
    ScheduleConfig,
    TokenizerConfig,
)
from geojax.configs.strategies import tiny
from geojax.models.config import get_model

MODELLED = {"gpt-tiny": "gpt-3-1.3b", "bert-tiny": "bert-large", "llama-tiny": "llama-3.2-1b"}
"""The published model that a tiny one stands for on the modelled clock."""


def cona_tiny(name: str) -> RunConfig:
    """A tiny model by CONA; times are those of a published one on eight A100s, modelled."""
    base = tiny(name)
    return replace(
        base,
        name=f"cona-{name}",
        strategy="",
        train=replace(base.train, total_tokens=800_000, micro_batch=8),
        cona=ConaConfig(global_batches=(4, 8, 16, 32, 64, 128)),
        scaling=ScalingConfig(base_batch=16, rule="sqrt", cap=True),
        noise=NoiseConfig("preconditioned", window_samples=200),  # the steps are AdamW's
        clock=ClockConfig(
            kind="modelled",
            model=MODELLED[name],
            gpu="a100-80gb",
            seq_len=512 if name == "bert-tiny" else 1024,
            # A run of so few tokens lasts a minute there; a switch is as short beside it as it
            # would be in a run of days.
            switch_seconds=0.01,
        ),
    )


_BENCH = {
    "gpt-tiny": ((4, 8, 16, 24, 32, 64, 128), (1, 2, 3, 4, 8), 1024),
    "bert-tiny": ((8, 16, 32, 56, 72, 88, 112), (1, 2, 4, 7, 8, 9, 11, 14, 16), 512),
    "llama-tiny": ((4, 8, 24, 32, 48, 64, 128), (1, 2, 3, 4, 6, 8, 16), 512),
}
"""Batches, micro-batches and timed sequence length of the experiment: chosen so that strategies of
the real model on eight A100s cross within the noise scales that the small one passes through."""
REAL_SWITCH_SECONDS = 10.0
"""A change of strategy of a model of a billion parameters: its state moves in a second or two, and
a program that is compiled beforehand is loaded and warms up."""
REAL_TOKENS_PER_PARAMETER = 20


def cona_bench(name: str) -> RunConfig:
    """CONA in the experiment: two layers for real, a published model's times on eight A100s.

    The rate decays, as it does in the training of such models; it follows the batch by a table that
    the experiment makes. A switch takes the share of the run that REAL_SWITCH_SECONDS are of one
    over REAL_TOKENS_PER_PARAMETER.
    """
    base, total_tokens = tiny(name), 4_000_000
    clocked, (batches, micro_batches, clock_seq_len) = get_model(MODELLED[name]), _BENCH[name]
    model = replace(base.model, layers=2, dropout=0.0, attention_dropout=0.0)
    data, rate, sequences = replace(base.data, seq_len=64), 5e-3, 256
    if data.masking:
        # With more tokens, and less to be told from a neighbour, a run as short as this would not
        # get beyond how frequent each token is.
        entries = 258
        model = replace(model, vocab_size=entries + 1)
        data = replace(data, seq_len=32, tokenizer=TokenizerConfig(vocab_size=entries))
        rate, sequences = 4e-3, 768
    clocked_tokens = total_tokens / data.seq_len * clock_seq_len
    real_tokens = REAL_TOKENS_PER_PARAMETER * clocked.num_params
    return replace(
        base,
        name="cona",
        model=model,
        data=data,
        train=replace(
            base.train,
            total_tokens=total_tokens,
            # Adam's memory goes by samples: 0.95 at 16 would be two steps of a batch of 128, and a
            # short warm-up no more, and large batches would stand no chance.
            optimizer=replace(base.train.optimizer, learning_rate=rate, b2=0.99),
            schedule=ScheduleConfig("cosine", warmup_fraction=0.04, final_fraction=0.1),
            micro_batch=8,
            round_steps=4,
        ),
        strategy="",
        cona=ConaConfig(batches, micro_batches),
        scaling=ScalingConfig(base_batch=16, rule="sqrt", cap=True),
        noise=NoiseConfig("preconditioned", window_samples=200),  # the steps are AdamW's
        clock=ClockConfig(
            kind="modelled",
            model=MODELLED[name],
            gpu="a100-80gb",
            seq_len=clock_seq_len,
            switch_seconds=REAL_SWITCH_SECONDS * clocked_tokens / real_tokens,
        ),
        eval=EvalConfig(every_tokens=total_tokens // 25, sequences=sequences, batch=64),
    )


def cona_large(base: RunConfig, batches: tuple[int, ...], base_batch: int) -> RunConfig:
    """A published model by CONA on C4 and the GPUs there are."""
    return replace(
        base,
        name=f"cona-{base.name}",
        strategy="",
        cona=ConaConfig(global_batches=batches),
        scaling=ScalingConfig(base_batch=base_batch, rule="sqrt", cap=True),
        noise=NoiseConfig("preconditioned"),  # the steps are AdamW's
    )
