# SPDX-License-Identifier: Apache-2.0
"""A HALoS run: slices, regional servers and a global one, each going on without the others.

Inner steps are taken when their update arrives, from the parameters that the server had answered
with when they began: no other parameters are on the way to or from a slice. A round is what happens
until as many samples have come in as a GeoMesh round takes. Invariant: parameters follow from the
order of events, which follows from times alone (geojax.baselines.halos_events).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from geojax.baselines.halos_events import Event, halos_events
from geojax.baselines.ledger import Ledger
from geojax.baselines.loop import Loop, Part
from geojax.baselines.nesterov import delayed_nesterov
from geojax.baselines.setup import added, run_steps
from geojax.config import ServerConfig
from geojax.geomesh.outer import OuterCopy
from geojax.geomesh.worker import RoundProgress
from geojax.models.transformer import Params
from geojax.track.console import RunConsole, format_bytes, format_seconds
from geojax.train.step import TrainState


@dataclass
class Server:
    """Parameters that updates move, and what its optimizer keeps; host arrays."""

    params: Params
    opt_state: Any


class HalosTrainer(Loop):
    """One run in one process."""

    def _begin(self) -> None:
        config = self.config.halos
        assert config is not None, "a run by HALoS has its settings"
        self._halos = config
        self._hubs = [int(hub) for hub in self.setup.network.hubs]
        params = self.setup.params
        self._world = _server(config.global_server, params)
        self._regions = {hub: _server(config.local_server, params) for hub in set(self._hubs)}
        # By region: its parameters when it last met the global ones, and what is under way to or
        # from the global server (an update, then parameters).
        self._met = dict.fromkeys(self._regions, params)
        self._under_way = dict.fromkeys(self._regions, jax.tree.map(np.zeros_like, params))
        self._ledger = Ledger(len(self.workers))
        self._events = self._make_events()
        self._next: Event | None = next(self._events)
        self._count = 0  # events that are over

    def _make_events(self) -> Iterator[Event]:
        network, message = self.setup.network, self.setup.traffic.payload_bytes
        samples = -(-self.config.train.total_tokens // self.config.data.seq_len)
        return halos_events(
            self.setup.plan.work,
            self._hubs,
            self._halos.updates_per_push,
            samples,
            lambda index, begin, seconds: begin + seconds,
            lambda src, dst, number: network.link_seconds(src, dst, message),
        )

    @property
    def _finished(self) -> bool:
        return self._next is None

    def _take(self) -> Event:
        """The next event, its times in the ledger."""
        event = self._next
        assert event is not None, "a run that is not finished has an event left"
        if event.kind == "begin":
            self._ledger.compute(event.who, event.seconds, event.computed)
            self._ledger.transfer(event.who, event.computed, event.arrives)
        elif event.kind == "update" and event.arrives > event.seconds:
            self._ledger.transfer(event.who, event.seconds, event.arrives)
        self._count += 1
        self._next = next(self._events, None)
        return event

    def _round(self, console: RunConsole) -> tuple[list[Part], dict[str, Any]]:
        position, size = self.position, self.setup.plan.sequences
        target = (position.cursor // size + 1) * size
        progress = [RoundProgress() for _ in self.workers]
        pushes = [0] * len(self.workers)
        seconds = updated = position.seconds
        while self._next is not None:
            event = self._take()
            seconds = event.seconds
            if event.kind == "update":
                updated = seconds
                position.cursor += len(event.samples)
                progress[event.who] = added(progress[event.who], self._update(event))
                pushes[self._hubs[event.who]] += event.sends
                if position.cursor >= target and self._work_left:
                    break
            elif event.kind == "push":
                self._push(event.who)
            elif event.kind == "pull":
                self._pull(event.who)
        position.round += 1
        position.seconds = seconds
        span = self._ledger.close(seconds, updated)
        one = 4 * sum(x.size for x in jax.tree.leaves(self.setup.params))
        parts = [
            Part(p, compute, idle, transfer, sent, sent * one)
            for p, compute, idle, transfer, sent in zip(
                progress, span.compute, span.idle, span.transfer, pushes, strict=True
            )
        ]
        return parts, {}

    @property
    def _work_left(self) -> bool:
        """Whether slices still have tokens to see; what else is left belongs to the last round."""
        return self.tokens < self.config.train.total_tokens

    def _update(self, event: Event) -> RoundProgress:
        """The inner steps of a slice, and its region's step along them."""
        worker, hub = self.workers[event.who], self._hubs[event.who]
        total = self.config.train.total_tokens
        begin = event.samples.start
        span = tuple(
            min(1.0, at * self.config.data.seq_len / total)
            for at in (begin, begin + self.setup.plan.sequences)
        )
        worker.begin_round()
        steps = len(event.samples) // worker.work.batch
        progress = run_steps(worker, self.setup, begin, steps, (span[0], span[1]), self._beat)
        region = self._regions[hub]
        pseudo = worker.pseudo_gradient()
        finite = all(np.isfinite(x).all() for x in pseudo)
        skipped = progress.skipped > self.config.train.anomalies.max_skipped_fraction * steps
        if finite and not skipped:
            tree = jax.tree.unflatten(jax.tree.structure(region.params), pseudo)
            _step(region, tree, self._halos.local_server)
        worker.outer = OuterCopy(region.params, ())
        if event.sends:
            self._under_way[hub] = jax.tree.map(np.subtract, self._met[hub], region.params)
        return progress

    def _push(self, hub: int) -> None:
        _step(self._world, self._under_way[hub], self._halos.global_server)
        self._under_way[hub] = self._world.params

    def _pull(self, hub: int) -> None:
        own = np.float32(self._halos.local_weight)
        region = self._regions[hub]
        region.params = jax.tree.map(
            lambda mine, theirs: own * mine + (1 - own) * theirs,
            region.params,
            self._under_way[hub],
        )
        self._met[hub] = region.params

    def _params(self) -> Params:
        return self._world.params

    def _state(self) -> Any:
        slices = {}
        for worker in self.workers:
            state = worker.program.host(worker.state)
            slices[worker.work.name] = {
                "params": worker.outer.params,
                "opt_state": state.opt_state,
                "step": state.step,
                "mean_loss": state.mean_loss,
            }
        return {
            "params": self._world.params,
            "opt_state": self._world.opt_state,
            "regions": {
                str(hub): {
                    "params": server.params,
                    "opt_state": server.opt_state,
                    "met": self._met[hub],
                    "under_way": self._under_way[hub],
                }
                for hub, server in self._regions.items()
            },
            "slices": slices,
        }

    def _facts(self) -> dict[str, Any]:
        return {"events": self._count}

    def _restore(self, state: Any, facts: dict[str, Any]) -> None:
        state = jax.tree.map(np.array, state)
        self._world = Server(state["params"], state["opt_state"])
        for hub, kept in ((int(name), kept) for name, kept in state["regions"].items()):
            self._regions[hub] = Server(kept["params"], kept["opt_state"])
            self._met[hub], self._under_way[hub] = kept["met"], kept["under_way"]
        for worker in self.workers:
            kept = state["slices"][worker.work.name]
            worker.outer = OuterCopy(kept["params"], ())
            worker.state = worker.program.put_state(
                TrainState(kept["params"], kept["opt_state"], kept["step"], kept["mean_loss"])
            )
        while self._count < facts["events"]:
            self._take()
        self._ledger.close(self.position.seconds)

    def _exchange_row(self) -> str:
        halos, network = self._halos, self.setup.network
        size = self.setup.traffic.payload_bytes
        far = max(network.link_seconds(hub, 0, size) for hub in self._regions)
        return (
            f"fp32 to a server in each of {len(self._regions)} regions, and after "
            f"{halos.updates_per_push} updates to the one in {self.config.slices[0].region}: "
            f"{format_bytes(size)}, {format_seconds(far)} one way at most"
        )

    def _start_fields(self) -> dict[str, Any]:
        size = self.setup.traffic.payload_bytes
        return {"schedule": "halos", "wire_bytes": size}

    @property
    def _wire_bytes(self) -> int:
        return self.setup.traffic.payload_bytes


def _server(config: ServerConfig, params: Params) -> Server:
    return Server(params, delayed_nesterov(config.momentum, config.every).init(params))


def _step(server: Server, update: Params, config: ServerConfig) -> None:
    """One step of the server along an update (a pseudo-gradient)."""
    optimizer = delayed_nesterov(config.momentum, config.every)
    direction, server.opt_state = optimizer.update(update, server.opt_state)
    rate = np.float32(config.learning_rate)
    server.params = jax.tree.map(lambda p, d: p - rate * d, server.params, direction)
