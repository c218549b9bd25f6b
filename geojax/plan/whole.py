# SPDX-License-Identifier: Apache-2.0
"""One plan for a whole run: strategies in the slices, their shares of a round, the exchange, time.

The parts are those of runs: strategies and step times as `geojax plan` finds them for one cluster
(meshes/candidates.py), (batch, inner steps) as training plans them (geomesh/balance.py), rounds as
`geojax simulate` counts them. Invariant: for the same slices and links a plan's rounds take what
the modelled clock of training says; prices change costs and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from geojax.config import ClockConfig, RunConfig, SliceConfig, require
from geojax.geomesh.balance import SliceWork, make_plan
from geojax.geomesh.clock import Traffic, gpu_profile, naming, traffic
from geojax.meshes.candidates import (
    MICRO_BATCHES,
    Candidate,
    Far,
    Job,
    frontier,
    with_exact_memory,
)
from geojax.meshes.candidates import make_plan as make_candidates
from geojax.meshes.network import PATTERNS, Exchanged, Network, Pattern
from geojax.meshes.strategy import Strategy
from geojax.meshes.timing import TimingModel
from geojax.plan.cluster import ClusterFile, Site
from geojax.simulate.command import simulate
from geojax.simulate.outcome import Outcome, outcome
from geojax.simulate.rounds import Round
from geojax.simulate.setting import How, Setting, choose_pattern

_ROUNDS = 2000
"""That are counted one by one; further ones take what these do in the mean."""


class Search:
    """Candidates and messages, each found once for all plans that ask for them.

    `counted`: bytes by (job, strategy) as the compiler counted them, in place of estimates.
    """

    def __init__(self, timing: TimingModel, far: Far):
        self.timing = timing
        self.counted: dict[tuple[Job, Strategy], int] = {}
        self._far = far
        self._candidates: dict[Job, tuple[Candidate, ...]] = {}
        self._traffic: dict[tuple, Traffic] = {}

    def best(self, job: Job) -> list[Candidate]:
        """The fastest strategy of each batch that fits. ValueError where none does."""
        if job not in self._candidates:
            self._candidates[job] = make_candidates(job, self.timing, self._far).candidates
        sizes = {s: size for (other, s), size in self.counted.items() if other == job}
        found = [
            with_exact_memory(c, sizes[c.strategy]) if c.strategy in sizes else c
            for c in self._candidates[job]
        ]
        fits = [c for c in found if c.memory_bytes <= job.usable_bytes]
        if not fits:
            raise ValueError(
                f"no strategy fits {job.usable_bytes / 1e9:.3g} GB by the compiler's count; use "
                "more GPUs or a smaller micro-batch"
            )
        return frontier(fits)

    def traffic(self, config: RunConfig) -> Traffic:
        key = (config.model, config.exchange, len(config.slices))
        if key not in self._traffic:
            self._traffic[key] = traffic(config)
        return self._traffic[key]


@dataclass(frozen=True)
class Timed:
    """A planned run to its token budget."""

    outcome: Outcome
    rounds: list[Round]

    def shares(self, index: int) -> dict[str, float]:
        """Of the run's time, what slice `index` computes and waits."""
        whole = self.rounds[-1].end
        parts = ("compute", "straggler", "wan")
        return {part: sum(getattr(r, part)[index] for r in self.rounds) / whole for part in parts}


@dataclass(frozen=True)
class Whole:
    """A planned run: one `Site`, job and candidate a slice."""

    cluster: ClusterFile
    setting: Setting
    jobs: tuple[Job, ...]
    chosen: tuple[Candidate, ...]

    @property
    def work(self) -> tuple[SliceWork, ...]:
        return self.setting.plan.work

    @cached_property
    def plain(self) -> Timed:
        return self._timed(False)

    @cached_property
    def overlapped(self) -> Timed:
        """With each exchange beside the next round's steps."""
        return self._timed(True)

    def timed(self, overlap: bool) -> Timed:
        return self.overlapped if overlap else self.plain

    def tokens_per_second(self, overlap: bool = False) -> float:
        found = self.timed(overlap).outcome
        return found.tokens_per_round / found.round_seconds

    def cost(self, overlap: bool = False) -> float | None:
        """None where a slice has no price."""
        return self.cluster.cost(self.timed(overlap).outcome.hours)

    def exchanges(self) -> dict[Pattern, Exchanged]:
        """What each pattern would take."""
        network, size = self.setting.network, self.setting.traffic.payload_bytes
        return {pattern: network.exchange(pattern, size) for pattern in PATTERNS}

    def _timed(self, overlap: bool) -> Timed:
        share = float(overlap)  # of the next round's steps: all, or none
        rounds = simulate(self.setting, overlap=share, rounds=_ROUNDS)
        return Timed(outcome(self.setting, rounds, share), rounds)


def placed(config: RunConfig, cluster: ClusterFile, tokens: float | None = None) -> RunConfig:
    """`config` with a cluster's slices, of the model and sequences that its clock counts.

    `config` has slices. `tokens`: budget; unset: the config's, as many sequences of them.
    ConfigError for a run by CONA, and methods without rounds.
    """
    require(
        not (config.cona or config.halos or config.streaming),
        f"{config.name} has no plan that lasts from round to round: under cona it follows the "
        "gradient's noise, and halos and streaming have loops of their own, which `geojax "
        "simulate` times; take a preset without",
    )
    seq_len = config.clock.seq_len or config.data.seq_len
    total = -(-config.train.total_tokens * seq_len // config.data.seq_len)
    if tokens is not None:
        total = tokens
    require(
        seq_len <= total < float("inf"),
        f"tokens {tokens} must be finite and at least a sequence, {seq_len}; train for longer",
    )
    return replace(
        config,
        model=config.clocked_model(),
        data=replace(config.data, seq_len=seq_len),
        train=replace(config.train, total_tokens=round(total), compute_dtype="bfloat16"),
        slices=tuple(SliceConfig(site.name, site.region) for site in cluster.sites),
        clock=ClockConfig(),
    )


def plan_whole(config: RunConfig, cluster: ClusterFile, how: How, search: Search) -> Whole:
    """The plan of a config that is `placed` on the cluster. ConfigError where nothing fits."""
    jobs = tuple(_job(config, site) for site in cluster.sites)
    profiles, found = [], []
    for site, job in zip(cluster.sites, jobs, strict=True):
        with naming(site.name):
            best = search.best(job)
        found.append({c.strategy.global_batch: c for c in best})
        profiles.append(gpu_profile(site.name, job, best))
    moved = search.traffic(config)
    network = Network(cluster.wan, cluster.regions)
    pattern = choose_pattern(how, config, network, moved.payload_bytes)
    seconds = network.exchange(pattern, moved.payload_bytes).seconds
    plan = make_plan(profiles, config.balance, seconds)
    setting = Setting(config, network, pattern, plan, tuple(profiles), moved)
    chosen = tuple(of[work.batch] for of, work in zip(found, plan.work, strict=True))
    return Whole(cluster, setting, jobs, chosen)


def count_memory(
    make: Callable[[], Whole], search: Search, count: Callable[[Job, str, Strategy], int]
) -> Whole:
    """The plan that `make` gives once every strategy in it has its bytes counted by `count`, and
    fits: where one does not, the next is planned with. Own kinds of GPU keep their estimates."""
    while True:
        whole = make()
        pairs = zip(whole.jobs, whole.cluster.sites, whole.chosen, strict=True)
        missing = {
            (job, c.strategy): site.gpu
            for job, site, c in pairs
            if site.gpu not in whole.cluster.own and not c.exact
        }
        if not missing:
            return whole
        for (job, strategy), gpu in missing.items():
            search.counted[job, strategy] = count(job, gpu, strategy)


def _job(config: RunConfig, site: Site) -> Job:
    """What is planned for one slice: the batches of `balance.batch_sizes`, and each of them rounded
    down to one that its GPUs divide."""
    sizes, gpus = config.balance.batch_sizes, site.cluster.gpus
    batches = {*sizes, *(batch // gpus * gpus for batch in sizes)} - {0}
    micro = (config.train.micro_batch,) if config.train.micro_batch else MICRO_BATCHES
    optimizer = config.train.optimizer.name
    return Job(
        config.model,
        config.data.seq_len,
        site.cluster,
        optimizer,
        tuple(sorted(batches)),
        micro,
    )
