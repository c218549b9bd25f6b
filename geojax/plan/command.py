# SPDX-License-Identifier: Apache-2.0
"""`geojax plan`: a table, a picture and JSON of what fits a cluster and how fast it would be, and
of the chain of strategies that a run on it is expected to go through."""

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from geojax.cona.score import Option
from geojax.config import ConfigError, require
from geojax.meshes.aot import AotUnavailableError
from geojax.meshes.candidates import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    MICRO_BATCHES,
    Candidate,
    Job,
    Plan,
    frontier,
    make_plan,
    with_exact_memory,
)
from geojax.meshes.hardware import Cluster, Gpu, get_gpu
from geojax.meshes.memory import STATED_ERROR
from geojax.models.config import TransformerConfig, get_model
from geojax.plan.chain import (
    Chain,
    Choice,
    Noise,
    assumed_noise,
    compare,
    measured_noise,
    predict,
)
from geojax.plan.chain_report import (
    chain_content,
    chain_file,
    columns,
    plot_chain,
    print_chain,
)
from geojax.plan.cluster import require_gpus
from geojax.plan.exact import exact_bytes
from geojax.plan.timing import read_timing, timing_source
from geojax.track.console import format_seconds, format_share
from geojax.track.environment import machine, versions
from geojax.track.metrics import NewFile, NewFolder, to_json, write_atomically


@dataclass(frozen=True)
class PlanOptions:
    """Strategies of a model on a cluster: which fit, and how fast they would be. With a preset and
    --cluster FILE, a whole run over regions: `geojax plan PRESET --cluster FILE --help`."""

    model: tyro.conf.Positional[str]
    """A model of geojax.models, or a folder with a Hugging Face config.json."""
    gpu: str = "h100"
    """h100, h200, b200, a100-40gb, a100-80gb, l40s or rtx-6000-ada; any name with the four figures
    below."""
    nodes: int = 1
    gpus_per_node: int = 8
    network: float = 25e9
    """Bytes a second and GPU between nodes, each way."""
    global_batches: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Sequences a step."""
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    """Sequences that one copy of the model computes at once."""
    seq_len: int | None = None
    """Tokens a sequence; unset: the model's context, or 2048."""
    optimizer: Literal["adamw", "lion", "sgd"] = "adamw"
    top: int = 5
    """Leading candidates whose memory the compiler counts, where it is installed."""
    rows: int = 4
    """Rows of the table for each global batch."""
    exact: bool = True
    """Compile the leading candidates; needs the extra `aot`."""
    calibration: Path | None = None
    """File of `geojax profile strategies --out`; unset: fitted to A100 rows."""
    excluded: bool = False
    """Also say why others are out."""
    json: NewFile | None = None
    """File for all candidates."""
    out: NewFolder | None = None
    """Folder for the pictures, plan.png and with a chain chain.png."""
    chain: bool = False
    """Also predict the chain of strategies of a run, and what fixed ones would take."""
    tokens: float | None = None
    """Of the run; unset: 20 a parameter."""
    noise: Annotated[tuple[float, float] | None, tyro.conf.arg(metavar="START END")] = None
    """Noise scale of the gradient at 1 % of the run and at its end, in sequences; between and
    before them a power law of samples."""
    noise_from: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """Folder of a run: a power law fitted to the noise that it measured, by samples seen."""
    chain_file: NewFile | None = None
    """File for the chain, as `geojax train --chain` reads it."""
    switch_seconds: float = 5.0
    """What a change of strategy takes."""
    gpu_flops: float | None = None
    """Own GPU: dense bfloat16 FLOPs a second."""
    gpu_memory: Annotated[float | None, tyro.conf.arg(metavar="BYTES")] = None
    """Own GPU: bytes."""
    gpu_bandwidth: float | None = None
    """Own GPU: memory, bytes a second."""
    gpu_link: float | None = None
    """Own GPU: bytes a second to others of its node, each way."""


def run_plan(options: PlanOptions) -> None:
    """Print the plan; ConfigError where the options contradict each other or nothing fits."""
    console = Console(highlight=False)
    name, model = _model(options.model)
    job = _job(options, model)
    noise, total_samples = _chain_inputs(options, job)
    timing, far = read_timing(options.calibration)
    try:
        plan = make_plan(job, timing, far)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    plan, note = _counted(plan, job, options, console)
    cluster = f"{options.nodes} x {options.gpus_per_node} {options.gpu}"
    title = f"{name} on {cluster}, {job.seq_len} tokens, {options.optimizer}"
    console.print(Text(title, style="bold"))
    console.print(_table(plan, options.rows))
    for line in _notes(plan, job, options, note):
        console.print(Text(line), soft_wrap=False)
    if options.excluded:
        console.print(_reasons(plan))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    predicted = {}
    if noise:
        chain, choices = _predict(plan, noise, total_samples, options)
        print_chain(chain, choices, noise, job.seq_len, console)
        predicted["chain"] = chain_content(chain, choices, noise, job.seq_len)
        if options.out:
            path = options.out / "chain.png"
            plot_chain(chain, noise, job.seq_len, title, path)
            console.print(Text(f"wrote {path}"), soft_wrap=True)
        if options.chain_file:
            write_atomically(options.chain_file, chain_file(chain, job.seq_len))
            console.print(Text(f"wrote {options.chain_file}"), soft_wrap=True)
    if options.out:
        from geojax.plan.plot import plot_plan

        path = options.out / "plan.png"
        plot_plan(plan.candidates, job, title, path)
        console.print(Text(f"wrote {path}"), soft_wrap=True)
    if options.json:
        content = _content(plan, job, options, title) | predicted
        text = json.dumps(to_json(content), indent=2, allow_nan=False) + "\n"
        write_atomically(options.json, text)
        console.print(Text(f"wrote {options.json}"), soft_wrap=True)


def _model(name: str) -> tuple[str, TransformerConfig]:
    if (Path(name) / "config.json").is_file():
        from geojax.models.weights import read_config

        return Path(name).name, read_config(Path(name))
    try:
        return name, get_model(name)
    except ValueError as error:
        raise ConfigError(f"{error}; or give a folder with a config.json") from error


def _job(options: PlanOptions, model: TransformerConfig) -> Job:
    for field in ("nodes", "gpus_per_node", "top", "rows"):
        value = getattr(options, field)
        require(value >= 1, f"{field} {value} must be at least 1")
    for field in ("global_batches", "micro_batches"):
        values = getattr(options, field)
        require(values and min(values) >= 1, f"{field} {list(values)} must each be at least 1")
    require(
        0 < options.network < math.inf,
        f"network {options.network} must be a finite number of bytes a second, above 0",
    )
    require_gpus(options.nodes, options.gpus_per_node, "this plan")
    seq_len = (model.context or 2048) if options.seq_len is None else options.seq_len
    require(seq_len >= 1, f"seq_len {seq_len} must be at least 1")
    require(
        not model.context or seq_len <= model.context,
        f"seq_len {seq_len} exceeds the model's context {model.context}; use that or less",
    )
    figures = (options.gpu_flops, options.gpu_memory, options.gpu_bandwidth, options.gpu_link)
    if any(x is not None for x in figures):
        require(
            all(0 < (x or 0) < math.inf for x in figures),
            "a GPU of your own needs all of --gpu-flops, --gpu-memory, --gpu-bandwidth and "
            "--gpu-link, each finite and above 0",
        )
        flops, memory, bandwidth, link = (float(x or 0) for x in figures)
        gpu = Gpu(flops, int(memory), bandwidth, link)
    else:
        try:
            gpu = get_gpu(options.gpu)
        except ValueError as error:
            raise ConfigError(f"{error}; or give your own by --gpu-flops and the like") from error
    cluster = Cluster(gpu, options.nodes, options.gpus_per_node, options.network)
    batches, micros = (
        tuple(sorted(set(x))) for x in (options.global_batches, options.micro_batches)
    )
    return Job(model, seq_len, cluster, options.optimizer, batches, micros)


def _chain_inputs(options: PlanOptions, job: Job) -> tuple[Noise | None, int]:
    """Noise, None where no chain is asked for, and the samples of the run."""
    if not options.chain:
        for field in ("tokens", "noise", "noise_from", "chain_file", "switch_seconds"):
            value = getattr(options, field)
            require(
                value == getattr(PlanOptions, field),
                f"{field} {value} is of a chain, and none is asked for; add --chain",
            )
        return None, 0
    given = f"noise {options.noise} and noise_from {options.noise_from}"
    require(
        (options.noise is None) != (options.noise_from is None),
        f"{given}: a chain follows from one of them; give either --noise START END or "
        "--noise-from RUN",
    )
    require(
        0 <= options.switch_seconds < math.inf,
        f"switch_seconds {options.switch_seconds} must be at least 0 and finite",
    )
    tokens = 20 * job.model.num_params if options.tokens is None else options.tokens
    step_tokens = job.global_batches[-1] * job.seq_len
    require(
        step_tokens <= tokens < math.inf,
        f"tokens {tokens:g} must be finite and at least {step_tokens:,}, a step of the largest "
        "global batch; train for longer, or lower global_batches",
    )
    total_samples = math.ceil(tokens / job.seq_len)
    if options.noise_from:
        return measured_noise(options.noise_from, job.seq_len), total_samples
    assert options.noise
    return assumed_noise(*options.noise, total_samples), total_samples


def _predict(
    plan: Plan, noise: Noise, total_samples: int, options: PlanOptions
) -> tuple[Chain, list[Choice]]:
    strategies = [
        Option(str(c.strategy), c.strategy.global_batch, c.step_seconds) for c in plan.candidates
    ]
    chain = predict(strategies, noise.at, total_samples, options.switch_seconds)
    return chain, compare(chain, strategies)


def _counted(plan: Plan, job: Job, options: PlanOptions, console: Console) -> tuple[Plan, str]:
    """The plan with its leaders' memory counted by the compiler, and what is to be said of it.

    A leader that does not fit drops out, and the next is counted in its place.
    """
    estimated = f"memory is estimated, to within {STATED_ERROR:.0%} for 9 of 10"
    if not options.exact:
        return plan, estimated
    if options.gpu_flops:
        return plan, f"{estimated}: the compiler knows no GPU of your own"
    counted: list[Candidate] = []
    excluded = list(plan.excluded)
    waiting = _leaders_first(plan.candidates)
    while waiting and len(counted) < options.top:
        candidate = waiting.pop(0)
        console.print(
            f"compiling {len(counted) + 1} of {options.top}: {candidate.strategy}", soft_wrap=True
        )
        try:
            size = exact_bytes(job, options.gpu, candidate.strategy)
        except AotUnavailableError as error:
            return plan, f"{estimated}: {error}"
        if size <= job.usable_bytes:
            counted.append(with_exact_memory(candidate, size))
        else:
            reason = (
                f"needs {size / 1e9:.3g} GB of {job.usable_bytes / 1e9:.3g} GB, counted by the "
                f"compiler; {candidate.memory_bytes / 1e9:.3g} GB were estimated"
            )
            excluded.append((candidate.strategy, reason))
    candidates = sorted(counted + waiting, key=lambda c: (-c.samples_per_second, str(c.strategy)))
    require(candidates, f"no strategy fits: {excluded[-1][1] if excluded else ''}; use more GPUs")
    note = (
        f"memory marked * is counted by the compiler, the rest estimated to within "
        f"{STATED_ERROR:.0%} for 9 of 10"
    )
    return Plan(tuple(candidates), tuple(excluded)), note


def _leaders_first(candidates: tuple[Candidate, ...]) -> list[Candidate]:
    """The fastest of each batch, fastest first, then all others."""
    leaders = sorted(frontier(candidates), key=lambda c: -c.samples_per_second)
    return leaders + [c for c in candidates if c not in leaders]


def _table(plan: Plan, rows: int) -> Table:
    headings = ("GB\na GPU", "step\nmodelled", "samples/s\nmodelled", "\nMFU", "\nbubble")
    table = columns("\nstrategy", *headings)
    batches = sorted({c.strategy.global_batch for c in plan.candidates})
    for batch in batches:
        own = [c for c in plan.candidates if c.strategy.global_batch == batch][:rows]
        for candidate in own:
            table.add_row(
                str(candidate.strategy),
                f"{candidate.memory_bytes / 1e9:.1f}{'*' if candidate.exact else ' '}",
                format_seconds(candidate.step_seconds),
                f"{candidate.samples_per_second:.4g}",
                format_share(candidate.mfu),
                format_share(candidate.strategy.bubble),
                end_section=candidate is own[-1],
            )
    return table


def _notes(plan: Plan, job: Job, options: PlanOptions, note: str) -> list[str]:
    fastest = plan.candidates[0]
    lines = [
        f"Fastest: {fastest.strategy}, {fastest.samples_per_second:.4g} samples/s; "
        f"{len(plan.candidates):,} candidates fit, {len(plan.excluded):,} are out.",
        f"Times: {timing_source(options.calibration)}.",
        f"{note[0].upper()}{note[1:]}. Usable: {job.usable_bytes / 1e9:.1f} GB of "
        f"{job.cluster.gpu.memory_bytes / 1e9:.0f}, less {CONTEXT_BYTES / 1e9:.0f} GB for context "
        f"and NCCL and {FRAGMENTATION:.0%} for fragmentation.",
    ]
    reasons = Counter(c.extrapolated for c in plan.candidates if c.extrapolated)
    lines += [f"Times are extrapolations: {reason}." for reason, _ in reasons.most_common(1)]
    return lines


def _reasons(plan: Plan) -> Table:
    """Excluded strategies by reason, an example of each."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("out", justify="right")
    table.add_column("such as", no_wrap=True)
    table.add_column("reason", overflow="fold")
    groups: dict[str, list[tuple[str, str]]] = {}
    for strategy, reason in plan.excluded:
        kind = " ".join(word for word in reason.split() if not any(c.isdigit() for c in word))
        groups.setdefault(kind, []).append((str(strategy), reason))
    for group in sorted(groups.values(), key=len, reverse=True):
        table.add_row(f"{len(group):,}", group[0][0], Text(group[0][1]))
    return table


def _content(plan: Plan, job: Job, options: PlanOptions, title: str) -> dict[str, Any]:
    return {
        "title": title,
        "clock": "modelled",
        "model": asdict(job.model),
        "cluster": asdict(job.cluster),
        "seq_len": job.seq_len,
        "usable_bytes": job.usable_bytes,
        "candidates": [
            asdict(c)
            | {
                "strategy": str(c.strategy),
                "samples_per_second": c.samples_per_second,
                "bubble": c.strategy.bubble,
            }
            for c in plan.candidates
        ],
        "excluded": [[str(strategy), reason] for strategy, reason in plan.excluded],
        "calibration": str(options.calibration or "A100"),
        "versions": versions(),
        "machine": machine(),
    }
