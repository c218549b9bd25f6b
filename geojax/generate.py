# SPDX-License-Identifier: Apache-2.0
"""`geojax generate`: text from a diffusion model, shown while it is being denoised.

Invariant: standard output holds answers alone, so that it can be piped; all else goes to standard
error.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import batched
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.live import Live
from rich.text import Text

from geojax.config import ConfigError, require
from geojax.diffusion.chat import encode_chat, outline
from geojax.diffusion.load import DTYPES, Model, load
from geojax.diffusion.request import Request, SamplingConfig, check
from geojax.diffusion.sampler import Answer, Progress, Sampler
from geojax.models.weights import read_chat

HIDDEN = "░"  # stands for a token that is not there yet


@dataclass(frozen=True)
class GenerateOptions:
    """Fill masks after a prompt, or between a prompt and a suffix."""

    model: tyro.conf.Positional[Path]
    """Folder of a run, or of weights that `geojax convert` wrote."""
    prompt: str | None = None
    """Text that comes first; unset: --file, or standard input."""
    file: Path | None = None
    """Its text is the prompt; of a .jsonl file, each record's "prompt" (and "suffix", and "seed",
    else --seed plus the records before it), and answers are printed as JSON, one a line."""
    suffix: str = ""
    """Text that comes last: what lies between is filled."""
    chat: bool = False
    """The prompt is a message of a user's, put into the model's chat template."""
    tokens: int = 128
    """Most new tokens."""
    sampling: Annotated[SamplingConfig, tyro.conf.arg(name="")] = SamplingConfig()
    batch: int = 8
    """Prompts of a .jsonl file at once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and of the computation."""
    quiet: bool = False
    """Show the answers only."""


class Prompt(NamedTuple):
    text: str
    suffix: str
    seed: int
    place: str = ""
    """Where it comes from, if there are several."""


def run_generate(options: GenerateOptions) -> None:
    """Answer every prompt. Raises ConfigError on bad input."""
    require(options.tokens >= 1, f"tokens {options.tokens} must be at least 1")
    require(options.batch >= 1, f"batch {options.batch} must be at least 1")
    prompts = list(_prompts(options))
    model = load(options.model, DTYPES[options.dtype])
    requests = [_checked(p, model, options) for p in prompts]
    sampler = model.sampler()
    many = options.file is not None and options.file.suffix == ".jsonl"
    for group in batched(zip(prompts, requests, strict=True), options.batch):
        started = time.perf_counter()
        answers = _sample(sampler, model, [r for _, r in group], options)
        seconds = time.perf_counter() - started
        for (given, _), answer in zip(group, answers, strict=True):
            text = model.decode(answer.new)
            if many:
                steps = {"tokens": len(answer.new), "steps": answer.steps, "ended": answer.ended}
                record = {"prompt": given.text, "seed": given.seed, "answer": text, **steps}
                print(json.dumps(record))
            else:
                print(text)
        sys.stdout.flush()
        if not options.quiet:
            _say_speed(answers, seconds)


def _prompts(options: GenerateOptions) -> Iterator[Prompt]:
    require(
        options.prompt is None or options.file is None,
        "--prompt and --file are two sources of the prompt; give one of them",
    )
    seed = options.sampling.seed
    if options.file is None:
        text = _standard_input() if options.prompt is None else options.prompt
        yield Prompt(text, options.suffix, seed)
        return
    try:
        text = options.file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompt {options.file}: {error}") from error
    if options.file.suffix != ".jsonl":
        yield Prompt(text, options.suffix, seed)
        return
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    require(lines, f"{options.file} holds no prompt; write {_FORM}, one a line")
    for before, (number, line) in enumerate(lines):
        default = Prompt("", options.suffix, (seed + before) % 2**32, f"{options.file}:{number}")
        yield _record(line, default)


_FORM = '{"prompt": "..."}'


def _record(line: str, default: Prompt) -> Prompt:
    """The prompt of a line of a .jsonl file; what it does not say is as in `default`."""
    place = default.place
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON ({error}); write one object a line") from error
    good = isinstance(record, dict) and isinstance(record.get("prompt"), str)
    require(good, f'{place} needs a text "prompt"; write {_FORM}')
    unknown = sorted(record.keys() - {"prompt", "suffix", "seed"})
    require(
        not unknown,
        f"{place}: {unknown} are none of its fields, prompt, suffix and seed; leave them out, and "
        "give what is of all records as options",
    )
    suffix, seed = record.get("suffix", default.suffix), record.get("seed", default.seed)
    require(isinstance(suffix, str), f'{place}: "suffix" {suffix!r} is no text; write one, or none')
    require(type(seed) is int, f'{place}: "seed" {seed!r} is no whole number; write one, or none')
    return Prompt(record["prompt"], suffix, seed, place)


def _standard_input() -> str:
    try:
        text = sys.stdin.read()
        text.encode()  # where Python lets bytes that are no text through
    except UnicodeError as error:
        raise ConfigError(
            f"standard input is not UTF-8 text ({error}); convert it, as iconv does"
        ) from error
    return text


def _checked(given: Prompt, model: Model, options: GenerateOptions) -> Request:
    """The request of a prompt; ConfigError, naming its place, where the model cannot fill it."""
    try:
        request = _request(given, model, options)
        check(request, model.config, model.mask_id)
    except ConfigError as error:
        raise ConfigError(f"{given.place}: {error}" if given.place else str(error)) from error
    return request


def _request(given: Prompt, model: Model, options: GenerateOptions) -> Request:
    if options.chat:
        chat, messages = read_chat(model.folder), [{"role": "user", "content": given.text}]
        text = chat(messages, True)
        ids, _ = encode_chat(model, outline(chat, messages, text), messages, text)
    else:
        ids = model.encode(given.text)
    if not len(ids) and model.config.shifted:
        first = model.special.bos if model.special.bos is not None else model.special.eos
        require(first is not None, "a shifted model needs a first token; give a prompt")
        ids = np.array([first], np.int32)
    canvas = np.full(options.tokens, model.mask_id, np.int32)
    tokens = np.concatenate([ids, canvas, model.encode(given.suffix)])
    sampling = replace(options.sampling, seed=given.seed)
    return Request(tokens, sampling, not given.suffix, begin=len(ids))


def _sample(
    sampler: Sampler, model: Model, requests: list[Request], options: GenerateOptions
) -> list[Answer]:
    """Shown live where there is a terminal to show one answer in."""
    console = Console(stderr=True, highlight=False)
    if options.quiet or len(requests) > 1 or not console.is_terminal:
        return sampler.sample(requests)
    first = requests[0].begin
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def show(progress: Progress) -> None:
            live.update(_picture(progress.tokens[0][first:], model, requests[0], first))
            live.refresh()

        return sampler.sample(requests, show, steps_a_call=1)


def _picture(tokens: np.ndarray, model: Model, request: Request, first: int) -> Text:
    """The canvas as text, what is hidden as blocks."""
    tokens = tokens[: len(request.tokens) - first]
    text, run = Text(), list[int]()
    for token in [*tokens.tolist(), None]:
        if run and (token is None or token == model.mask_id):
            text.append(model.decode(np.array(run)))
            run = []
        if token == model.mask_id:
            text.append(HIDDEN, style="dim")
        elif token is not None:
            run.append(token)
    return text


def _say_speed(answers: list[Answer], seconds: float) -> None:
    new, steps = sum(len(a.new) for a in answers), max(a.steps for a in answers)
    Console(stderr=True, highlight=False).print(
        f"{new} new tokens in {steps} denoising steps, {seconds:.2f} s with compilation: "
        f"{new / seconds:.1f} tokens/s",
        soft_wrap=True,
    )
