# SPDX-License-Identifier: Apache-2.0
"""What a server says of itself to Prometheus: vLLM's names where they exist, else geojax's.

Invariant: no metric names a tenant or a prompt. What clients were told is counted where they are
told it, once for each answer, so that sums equal a client's own.
"""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from geojax.serve.ticket import Ticket

if TYPE_CHECKING:
    from geojax.serve.loop import EngineLoop

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_LABEL = ["model_name"]


class Metrics:
    """Of one server."""

    def __init__(self, model_name: str):
        self.registry, self._name = CollectorRegistry(), model_name
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts that were answered.")
        self._new = self._counter("vllm:generation_tokens", "New tokens that clients were sent.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Tokens that were looked up.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Tokens of stored prefixes.")
        self._ends = Counter(
            "vllm:request_success",
            "Answers that ended, by reason: stop, length, abort (the client went away), error.",
            [*_LABEL, "finished_reason"],
            registry=self.registry,
        )
        self._refused = Counter(
            "geojax_refused",
            "Requests of which nothing was accepted, by status.",
            [*_LABEL, "status"],
            registry=self.registry,
        )
        self._queue = self._histogram("vllm:request_queue_time_seconds", "From arrival to a row.")
        self._first = self._histogram("vllm:time_to_first_token_seconds", "Until text was sent.")
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Until the end.")
        self._shared = self._counter("geojax_shared_layers", "Layers shared, summed over answers.")
        self._sharing = self._counter("geojax_sharing_answers", "Answers that share a prefix.")
        self._steps = self._counter("geojax_denoising_steps", "Steps, summed over rows.")
        self._quanta = self._histogram("geojax_quantum_seconds", "Calls of the engine.")

    def watch(self, loop: "EngineLoop") -> None:
        """What the engine itself counts, read when it is asked for."""
        self.registry.register(_Engine(loop, self._name))

    def on_admitted(self, ticket: Ticket) -> None:
        """On the engine's thread; once a ticket."""
        rows = len(ticket.ask.prompt) + len(ticket.ask.suffix)
        self._queries.inc(rows)
        self._hits.inc(ticket.cached)
        assert ticket.admitted is not None
        self._queue.observe(ticket.admitted - ticket.arrived)

    def on_quantum(self, steps: int, seconds: float) -> None:
        """`steps`: summed over rows."""
        self._steps.inc(steps)
        self._quanta.observe(seconds)

    def on_first(self, ticket: Ticket) -> None:
        """Its first text is sent."""
        self._first.observe(time.monotonic() - ticket.arrived)

    def on_end(self, ticket: Ticket, reason: str, tokens: int) -> None:
        """What the client was told of an answer: why it ended, and of how many tokens."""
        self._ends.labels(self._name, reason).inc()
        self._new.inc(tokens)
        self._whole.observe(time.monotonic() - ticket.arrived)
        if ticket.depth:
            self._shared.inc(ticket.depth)
            self._sharing.inc()

    def on_answered(self, prompt_tokens: int) -> None:
        """All answers of a request are its client's; `prompt_tokens` as its usage has them."""
        self._prompt.inc(prompt_tokens)

    def on_refused(self, status: int) -> None:
        """Nothing of it was accepted."""
        self._refused.labels(self._name, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, help_: str):
        return Counter(name, help_, _LABEL, registry=self.registry).labels(self._name)

    def _histogram(self, name: str, help_: str):
        found = Histogram(name, help_, _LABEL, registry=self.registry, buckets=_SECONDS)
        return found.labels(self._name)


class _Engine(Collector):
    """Of the engine and of who waits for it."""

    def __init__(self, loop: "EngineLoop", model_name: str):
        self._loop, self._labels = loop, [model_name]

    def collect(self) -> Iterable[Metric]:
        loop, engine = self._loop, self._loop.engine
        counts, taken = engine.store.counts, engine.kv.taken - engine.store.idle_pages
        used = taken / max(engine.kv.count - 1, 1)
        yield self._gauge("vllm:num_requests_running", "Answers in rows.", loop.running)
        yield self._gauge("vllm:num_requests_waiting", "Answers that wait.", len(loop.waiting))
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of key/value pages in use; idle prefixes are free.",
            used,
        )
        yield self._gauge("geojax_prefixes", "Stored segments.", len(engine.store))
        yield self._count("geojax_guard_events", "Requests that stopped sharing.", engine.retreats)
        yield self._count("geojax_refreshes", "Refreshes of prefixes.", engine.refreshes)
        yield self._count("geojax_built_tokens", "Tokens of segments built.", counts.built_rows)
        yield self._count("geojax_evictions", "Segments that made room.", counts.evictions)
        help_ = "Rows times layers needed: suffix, refreshes of prefixes, the guard's probes."
        found = CounterMetricFamily("geojax_row_layers", help_, labels=[*_LABEL, "part"])
        for part in ("suffix", "prefix", "probes"):
            found.add_metric([*self._labels, part], engine.work[part])
        yield found
        help_ = "Rows times layers computed, with those of padding."
        yield self._count("geojax_computed_row_layers", help_, engine.work["computed"])

    def _gauge(self, name: str, help_: str, value: float) -> Metric:
        found = GaugeMetricFamily(name, help_, labels=_LABEL)
        found.add_metric(self._labels, value)
        return found

    def _count(self, name: str, help_: str, value: float) -> Metric:
        found = CounterMetricFamily(name, help_, labels=_LABEL)
        found.add_metric(self._labels, value)
        return found
