# SPDX-License-Identifier: Apache-2.0
"""Requests that share prefixes, as batches that rows may join and leave.

Invariant: a request is answered as if it were alone; what it shares with others is memory. All
pages that a request holds, of its own or of the store, go back when it leaves, however it ends.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from geojax.bicache.build import Builds
from geojax.bicache.denoise import Carry, Denoiser
from geojax.bicache.depth import Depths, Guard
from geojax.bicache.lookup import Lookup
from geojax.bicache.pages import Memory, Sizes, pages_of
from geojax.bicache.policy import Policy
from geojax.bicache.shapes import Shape, Shapes, shapes_within
from geojax.bicache.slot import Job, Slot, page_counts
from geojax.bicache.store import Builder, Entry, Store
from geojax.config import RunError, require
from geojax.diffusion.canvas import Canvas, Rules, begin
from geojax.diffusion.request import Request, check, masks
from geojax.diffusion.sampler import Answer, Progress, Sampler, require_numbers

log = logging.getLogger("geojax.bicache")
_QUANTUM = 16  # steps a call, where the policy has no interval


class Engine:
    """Answers jobs under one policy. Threads may share it: one of them computes at a time."""

    def __init__(
        self,
        sampler: Sampler,
        policy: Policy,
        sizes: Sizes,
        depths: Depths | None = None,
        builder: Builder = "prefix",
        revision: str = "",
        guard: Guard | None = None,
    ):
        """`depths`: how deep a prefix is shared, by its share of the request; policies that share
        need it. ConfigError where it is missing, or memory is too small for a single page."""
        config = sampler.model.config
        require(
            depths is not None or not policy.shared or policy.whole,
            f"policy {policy.name!r} shares prefixes, and nothing says how deep; make a table with "
            "`geojax profile depth`, or give Depths",
        )
        deepest = max(depths.distinct, default=0) if depths else 0
        require(
            deepest <= config.layers,
            f"the table shares {deepest} layers, and the model has {config.layers}; make one for "
            "this model with `geojax profile depth`",
        )
        self.sampler, self.policy, self.builder = sampler, policy, builder
        self._lock = threading.RLock()
        self.depths = Depths(((0.0, config.layers),)) if policy.whole else depths
        shared = self.depths.distinct if policy.shared and self.depths else ()
        kept = tuple(d for d in shared if d < config.layers)
        self.memory = Memory(config, sampler.dtype, sizes, bool(kept))
        self.kv, self.page = self.memory.kv, self.memory.page
        self.store = Store(
            self.kv,
            self.memory.hidden,
            self.page,
            max(shared, default=0),
            len(kept),
            f"{revision}\0{jnp.dtype(sampler.dtype).name}\0{shared}",
            self.memory.quota,
        )
        self._builds = Builds(sampler, self.memory, self.store, builder, shared)
        self._kept = kept
        self.guard = guard
        self.retreats = 0
        """Requests that stopped sharing, as the guard saw them drift."""
        self.lookup = Lookup(self.store, self.page, self.page)
        self.shapes = Shapes(sampler.mask_id, config.layers, self.page, policy.window != "suffix")
        self.work = {"suffix": 0.0, "prefix": 0.0, "probes": 0.0, "computed": 0.0}
        """Row-layers so far that requests needed; and that were computed, with those of padding and
        of prefixes that did not refresh beside others that did. Builds apart
        (`store.counts.built_rows`)."""
        self.refreshes = 0
        """Of prefixes, summed over requests."""
        self._used: set[Any] = set()
        self._warned: set[str] = set()

    @property
    def programs(self) -> int:
        """Programs used so far; engines of one model and policy share them."""
        return len(self._used) + len(self._builds.used)

    def answer(
        self,
        jobs: Sequence[Job],
        on_step: Callable[[Progress], None] | None = None,
        steps_a_call: int | None = None,
    ) -> list[Answer]:
        """Answer the jobs as one batch; `on_step` as of `Sampler.sample`.

        ConfigError where one of them cannot be answered by this model; NoPagesError where memory is
        too small for all at once.
        """
        require(jobs, "there is no request to answer; give one")
        slots: list[Slot] = []
        try:
            for job in jobs:
                slots.append(self.admit(job))
            while not all(slot.done for slot in slots):
                self.run(slots, steps_a_call)
                require_numbers(np.array([slot.broken for slot in slots]))
                if on_step:
                    on_step(self.progress(slots))
            return [self.result(slot) for slot in slots]
        finally:
            for slot in slots:
                self.leave(slot)

    def segments(
        self, request: Request, salt: str = "", ends: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Segments of a request's prefix: those that end at `ends`, or else what `Lookup` finds,
        where prefixes are built alone."""
        hidden = masks(request, self.sampler.mask_id)
        most = int(hidden.argmax()) - self.sampler.model.config.shifted
        given = np.asarray(request.tokens)[: max(most, 0)]
        if not ends and self.builder != "prefix":
            return ()
        with self._lock:
            return self.lookup.segments(given, salt, self.builder, ends)

    def admit(self, job: Job) -> Slot:
        """Take memory for a job, and build of its prefix what is not stored.

        ConfigError where the model cannot answer it, or memory would not do for it alone;
        NoPagesError where others have too much of it.
        """
        with self._lock:
            return self._admit(job)

    def pin(self, job: Job, pinned: bool = True) -> None:
        """Build a job's prefix ahead of its requests and keep it, whatever else is wanted, until as
        many calls with `pinned` False have come, or a purge. The job's share says how deep, as in
        `admit`; nothing of it is answered.

        ConfigError where the job would share no prefix; NoPagesError as `admit`.
        """
        with self._lock:
            *_, shared = self._check(job)
            require(
                shared,
                f"segments {job.segments} of {len(job.request.tokens)} tokens are shared in no "
                f"layer under policy {self.policy.name!r}; pin a longer prefix",
            )
            if not pinned:
                self.store.pin(self._builds.stored(job), False)
                return
            chain = self._chain(job)
            self.store.pin(chain)
            self.store.release(chain)

    def _admit(self, job: Job) -> Slot:
        canvas, rules, prefix, depth, shared = self._check(job)
        chain = self._chain(job) if shared else []
        try:
            return self._slot(job, canvas, rules, prefix, depth, chain)
        except BaseException:
            self.store.release(chain)
            raise

    def _check(self, job: Job) -> tuple[Canvas, Rules, int, int, bool]:
        """Its state before the first step, its prefix, how deep that is shared, and whether."""
        config, request = self.sampler.model.config, job.request
        check(request, config, self.sampler.mask_id)
        require(
            not request.sampling.guidance,
            f"guidance {request.sampling.guidance}: the masked prompt shares nothing; use the "
            "sampler without reuse, or set it to 0",
        )
        canvas, rules = begin([request], self.sampler.mask_id, 1, len(request.tokens))
        self._check_segments(job, int(rules.begin[0]))
        prefix = 0 if self._plain(job) else job.prefix
        depth = self._depth(prefix, len(request.tokens))
        shared = bool(prefix and self.policy.shared and depth)
        self._check_memory(job, prefix, depth, shared)
        return canvas, rules, prefix, depth, shared

    def _plain(self, job: Job) -> bool:
        return job.exact or self.policy.name == "none"

    def _chain(self, job: Job) -> list[Entry]:
        """Its prefix, held; built where it is not stored."""
        self._warn_of(job)
        return self._builds.acquire(job)

    def _warn_of(self, job: Job) -> None:
        """Once, where the table of depths says nothing of prefixes that are built like this one."""
        kind = "chained" if len(job.segments) > 1 else "whole"
        if self.depths and self.depths.covers not in (kind, "both") and kind not in self._warned:
            self._warned.add(kind)
            log.warning(
                "the table of depths is of %s prefixes, and a %s one is shared by it; make one of "
                "both with `geojax profile depth --segments both`",
                self.depths.covers,
                kind,
            )

    def leave(self, slot: Slot) -> None:
        """Give back what a slot holds; once."""
        with self._lock:
            if slot.broken:  # its pages go to others, for whom they must hold numbers
                self.memory.clear(slot.own)
            self.kv.give(slot.own)
            self.store.release(slot.chain)
            slot.own, slot.chain = np.zeros(0, np.int32), []

    def run(self, slots: Sequence[Slot], steps: int | None = None) -> None:
        """Some denoising steps of all slots, by default 16, or up to the next refresh where that is
        later.

        Where a guard watches, refreshes are calls of their own.
        """
        left = steps or max(self.policy.every, _QUANTUM)
        with self._lock:
            while left > 0 and not all(slot.done for slot in slots):
                watched = [self._watched(slot) and slot.since == 0 for slot in slots]
                before = [(slot.canvas, slot.since) for slot in slots]
                drift, taken = self._run(slots, 1 if any(watched) else left, any(watched))
                left -= taken
                # What is no number is too far as well.
                far = [
                    slot
                    for slot, look, seen in zip(slots, watched, drift, strict=True)
                    if look and not seen <= self.guard_bound(slot)
                ]
                for slot in far:
                    slot.canvas, slot.since = before[slots.index(slot)]
                for slot in far:
                    self._retreat(slot)

    def guard_bound(self, slot: Slot) -> float:
        """The drift from which on a slot stops sharing."""
        return self.guard.bound(slot.depth) if self.guard else math.inf

    def _watched(self, slot: Slot) -> bool:
        return bool(slot.chain and not slot.done) and self._watches(slot.depth)

    def _watches(self, depth: int) -> bool:
        return self.guard is not None and math.isfinite(self.guard.bound(depth))

    def _count(self, suffix: int, prefix: int, depth: int | None = None) -> int:
        """Rows of a prefix that are looked at; no depth: the most at any."""
        assert self.guard is not None, "somebody is watched"
        layers = self.sampler.model.config.layers
        return self.guard.count(suffix, prefix, depth or self.guard.least, layers)

    def _retreat(self, slot: Slot) -> None:
        """A prefix of its own from now on, in pages that were kept for it, and all layers
        refreshed; its shape stays."""
        self.store.release(slot.chain)
        slot.table[: slot.depth] = slot.spare
        slot.chain, slot.depth, slot.since = [], 0, 0
        self.retreats += 1

    def _run(self, slots: Sequence[Slot], steps: int, probes: bool) -> tuple[np.ndarray, int]:
        """The drift of each slot [b], 0 without probes; and steps taken."""
        if any(slot.generation != self.memory.losses for slot in slots):
            raise RunError(
                "a call failed and took the memory of all requests with it; admit them again"
            )
        shape = self.shapes.of(slots)
        with self.memory.keeping(self.store.forget):
            carry = self._call(shape.looking if probes else shape, slots, probes, steps)
            canvas, since, work, drift, taken = jax.device_get(
                (carry.canvas, carry.since, carry.work, carry.drift, carry.steps)
            )
        for name in self.work:
            self.work[name] += float(getattr(work, name))
        self.refreshes += int(work.refreshes)
        for i, slot in enumerate(slots):
            row = Canvas(*(np.asarray(x)[i : i + 1] for x in canvas))
            slot.canvas = row._replace(tokens=row.tokens[:, : len(slot.job.request.tokens)])
            slot.since = int(since[i])
        return drift[: len(slots)], int(taken)

    def _call(self, shape: Shape, slots: Sequence[Slot], probes: bool, steps: int) -> Carry:
        most = self._count(shape.suffix_rows, shape.prefix_pages * self.page) if probes else 0
        looked = [
            self._count(len(slot.job.request.tokens) - slot.prefix, slot.prefix, slot.depth)
            if self._watched(slot)
            else 0
            for slot in slots
        ]
        rows, canvas, rules = self.shapes.assemble(slots, shape, most, looked)
        self._used.add((shape, most))
        carry = self._program(shape)(
            self.sampler.params, self.memory.pool, rows, canvas, rules, np.int32(steps)
        )
        self.memory.pool = carry.pool
        return carry

    def progress(self, slots: Sequence[Slot]) -> Progress:
        longest = max(s.canvas.tokens.shape[1] for s in slots)
        tokens = np.zeros((len(slots), longest), np.int32)
        filled, done = np.zeros(len(slots), np.int32), np.zeros(len(slots), bool)
        for i, slot in enumerate(slots):
            row = slot.canvas.tokens[0]
            tokens[i, : len(row)] = row
            hidden = (row == self.sampler.mask_id) & (np.arange(len(row)) >= slot.rules.begin[0])
            filled[i] = hidden.argmax() if hidden.any() else slot.rules.end[0]
            done[i] = slot.done
        return Progress(tokens, filled, done)

    def result(self, slot: Slot) -> Answer:
        """The answer of a slot that is done."""
        return self.sampler.make_answer(
            slot.job.request, slot.canvas.tokens[0], int(slot.canvas.steps[0])
        )

    def warm(
        self,
        rows: Sequence[int],
        prefix: int,
        suffix: int,
        block: int,
        segments: int = 1,
        between: Callable[[], None] | None = None,
    ) -> float:
        """Compile what requests within these sizes need, and the seconds that it took.

        `rows`: sizes of batches; `prefix`, `suffix`: most tokens of a prefix, and of what follows
        it; `block`: the widest; `segments`: most segments of a prefix, each of whole pages;
        `between`: called before each program, and may raise.
        """
        started = time.perf_counter()
        between = between or (lambda: None)
        reuses = prefix and self.policy.name != "none"
        most = pages_of(prefix, self.page) + segments - 1 if reuses else 0
        watched = bool(self.policy.shared and self.guard and self.guard.least)
        shapes = list(shapes_within(rows, most, suffix, block))
        for shape in shapes:
            between()
            self._call(shape, [], False, 1)
        if watched:
            for shape in sorted({shape.looking for shape in shapes if shape.prefix_pages}):
                between()
                self._call(shape, [], True, 1)
        if self.policy.shared and reuses:
            self._builds.warm(prefix, suffix, segments, between)
        return time.perf_counter() - started

    def probe(self) -> None:
        """A step of no request in the smallest size; raises where the device computes nothing."""
        (shape, *_) = shapes_within([1], 0, 1, 1)
        with self._lock, self.memory.keeping(self.store.forget):
            jax.block_until_ready(self._call(shape, [], False, 1).canvas)

    def check_books(self, slots: Sequence[Slot] = ()) -> None:
        """Whether every page that is taken is the store's or of one of `slots`, all that are alive;
        for tests, since a leak is a fault of the engine's."""
        stored = {id(e): e for e in [*self.store.entries, *(e for s in slots for e in s.chain)]}
        for books, parts in (
            (self.kv, [*(e.kv for e in stored.values()), *(s.own for s in slots)]),
            (self.memory.hidden, [e.hidden for e in stored.values()]),
        ):
            held = [int(page) for part in parts for page in part.flat]
            assert len(held) == len(set(held)) == books.taken
            assert books.free + books.taken == books.count - 1

    def _check_segments(self, job: Job, first_mask: int) -> None:
        shifted = self.sampler.model.config.shifted
        require(
            all(n >= 1 for n in job.segments),
            f"segments {job.segments} must have at least 1 token each; leave empty ones out",
        )
        require(
            job.prefix <= first_mask - shifted,
            f"segments {job.segments} are {job.prefix} tokens, and the prefix may have "
            f"{first_mask - shifted}: it ends before the first mask"
            + (", and its last token predicts that" if shifted else ""),
        )

    def _check_memory(self, job: Job, prefix: int, depth: int, shared: bool) -> None:
        """ConfigError where the pool is too small for the job alone."""
        layers = self.sampler.model.config.layers
        parts = job.segments if shared else (prefix,) if prefix else ()
        pages = sum(pages_of(rows, self.page) for rows in parts)
        stored = self.store.depth * pages if shared else 0
        own = (layers - depth) * pages if prefix else 0
        own += depth * pages if shared and self._watches(depth) else 0
        if self.policy.window != "suffix":
            own += layers * pages_of(len(job.request.tokens) - prefix, self.page)
        require(
            stored + own <= self.kv.count - 1,
            f"a request of {len(job.request.tokens)} tokens, {prefix} of them prefix, takes "
            f"{stored + own} pages, and there are {self.kv.count - 1}; raise kv_bytes",
        )
        hidden, most = len(self._kept) * pages if shared else 0, self.memory.hidden.count - 1
        require(
            hidden <= most,
            f"a prefix of {prefix} tokens takes {hidden} pages of hidden states, and there are "
            f"{most}; raise hidden_bytes",
        )
        require(
            self.store.quota is None or stored <= self.store.quota,
            f"a prefix of {prefix} tokens takes {stored} pages, and a tenant's quota is "
            f"{self.store.quota}; raise quota_bytes",
        )

    def _depth(self, prefix: int, length: int) -> int:
        layers = self.sampler.model.config.layers
        if not prefix:
            return layers
        if not self.policy.shared:
            return 0
        assert self.depths is not None
        return self.depths.at(prefix / length)

    def _slot(
        self, job: Job, canvas: Canvas, rules: Rules, prefix: int, depth: int, chain: list[Entry]
    ) -> Slot:
        layers, page = self.sampler.model.config.layers, self.page
        if chain:
            counts = np.concatenate([page_counts(e.rows, page) for e in chain])
        else:
            counts = page_counts(prefix, page)
        pages = len(counts)
        behind = 0
        if self.policy.window != "suffix":
            behind = pages_of(len(job.request.tokens) - prefix, page)
        spare = depth if chain and self._watches(depth) else 0
        wanted = (layers - depth + spare) * pages + layers * behind
        self.store.make_room(wanted, salt=job.salt)
        own = self.kv.take(wanted)
        table, hidden = np.zeros((layers, pages), np.int32), np.zeros(pages, np.int32)
        table[depth:] = own[: (layers - depth) * pages].reshape(layers - depth, pages)
        if chain:
            table[:depth] = np.concatenate([e.kv[:depth] for e in chain], axis=1)
            if depth in self._kept:
                number = self._kept.index(depth)
                hidden = np.concatenate([e.hidden[number] for e in chain])
        after = len(own) - layers * behind
        every = 1 if self._plain(job) else self.policy.every
        return Slot(
            job,
            canvas,
            rules,
            depth,
            0,
            every,
            counts,
            table,
            hidden,
            own[after:].reshape(layers, behind),
            own,
            own[after - spare * pages : after].reshape(spare, pages),
            list(chain),
            self.memory.losses,
        )

    def _program(self, shape: Shape) -> Callable[..., Carry]:
        sampler = self.sampler
        denoiser = Denoiser(
            sampler.model,
            sampler.mask_id,
            jnp.dtype(sampler.dtype).name,
            shape.suffix_rows,
            min(shape.window_rows, shape.suffix_rows),
            self.policy.window,
            sampler.read,
        )
        return partial(
            _compiled(denoiser),
            forbidden=sampler.padded_forbidden,
            end_ids=sampler.padded_ends,
        )


@lru_cache(maxsize=256)
def _compiled(denoiser: Denoiser) -> Callable[..., Carry]:
    """One program for all engines that would compile the same; the pool is taken over."""
    return jax.jit(denoiser.run, donate_argnums=1)
