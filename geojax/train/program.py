# SPDX-License-Identifier: Apache-2.0
"""A program: the compiled training steps of one strategy on one set of devices.

Invariant: every program of a model works on the same state - same leaves, same shapes - and differs
in where it lies and in which order layers are stored. `move` takes a state from one to another.
"""

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.cona.rules import beta2_for
from geojax.config import ConfigError, OptimizerConfig, TrainConfig, require
from geojax.data import Batch, empty_batch
from geojax.meshes.axes import strategy_mesh
from geojax.meshes.gradient import Sequences, ShardedModel
from geojax.meshes.pipeline import storage_order
from geojax.meshes.reshard import in_stack, reshard
from geojax.meshes.rules import state_specs
from geojax.meshes.squares import gradient_parts
from geojax.meshes.strategy import Strategy, require_legal
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Params, abstract_params, init_params
from geojax.train.evaluate import Evaluation, summarize
from geojax.train.losses import Losses
from geojax.train.noise import Metric, in_halves, make_measure
from geojax.train.optim import make_optimizer
from geojax.train.step import StepStats, TrainState, init_state, make_loop, make_train_step


@dataclass(frozen=True)
class Task:
    """What is trained, apart from the strategy: programs of one task share their states."""

    model: TransformerConfig
    train: TrainConfig
    seq_len: int
    documents: bool = False
    """Whether positions see their own document only."""
    seed: int = 0
    """Of dropout."""
    noise: Metric | None = None
    """The norm in which the gradient's noise is measured; None: it is not."""
    base_batch: int | None = None
    """Sequences a step that the optimizer's config is for; decay and Adam's second moment then go
    by tokens under any batch. None: by steps."""
    eval_rows: int = 0
    """Sequences of an evaluation's batch, to be compiled for beforehand; 0: when one comes."""

    def optimizer(self, batch: int) -> OptimizerConfig:
        """The optimizer of steps of `batch` sequences."""
        config = self.train.optimizer
        if self.base_batch is None or config.name != "adamw":
            return config
        b2 = 0.95 if config.b2 is None else config.b2
        return replace(config, b2=beta2_for(b2, batch, self.base_batch))


class Program:
    """Steps of `task` by `strategy` on `devices`."""

    def __init__(
        self,
        task: Task,
        strategy: Strategy,
        devices: Sequence[jax.Device],
        compiler_options: dict[str, Any] | None = None,
        losses: Losses | None = None,
    ):
        """ConfigError where the strategy cannot train the model on as many devices.

        `compiler_options`: of XLA, for whatever is compiled here; `losses`: to be shared with other
        programs of the task and the devices.
        """
        try:
            require_legal(strategy, task.model, len(devices))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.task = task
        self.strategy = strategy
        self.devices = tuple(devices)
        self.mesh: Mesh = strategy_mesh(strategy, devices)
        self.order = storage_order(task.model.layers, strategy)
        self._sharded = self._lay_out(strategy)
        if self.order is not None:
            self._require_stacked()
        self.parts = gradient_parts(strategy)
        self._steps = {probe: self._make_step(probe) for probe in (False, True)}
        self._compiled: dict[tuple[int, bool], jax.stages.Compiled] = {}
        self._losses = losses or Losses()
        self._jit = partial(jax.jit, compiler_options=compiler_options)
        self._lock = threading.Lock()

    @property
    def wants_probes(self) -> bool:
        """Whether noise is measured, and of the whole gradient only by probes."""
        one_part = self.parts < 2 and self.strategy.global_batch > 1
        return self.task.noise is not None and one_part

    @cached_property
    def state_shardings(self) -> TrainState:
        """Where each leaf of the state lies."""
        params, final = state_specs(self._sharded.rules, self.strategy)
        shapes = abstract_params(self.task.model)
        opt_state = jax.eval_shape(make_optimizer(self.task.train.optimizer).init, shapes)
        specs: Any = _as_parameters(opt_state, shapes, final)
        whole: Any = PartitionSpec()
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), TrainState(params, specs, whole, whole)
        )

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, types and places of the state."""
        train = self.task.train
        state = jax.eval_shape(lambda p: init_state(p, train), abstract_params(self.task.model))
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            state,
            self.state_shardings,
        )

    @cached_property
    def state_bytes(self) -> int:
        """Of the state, on each device."""
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(self.abstract_state)
        )

    @cached_property
    def chunk_sharding(self) -> NamedSharding:
        """Of batch arrays [c, m, b, ...]."""
        return NamedSharding(self.mesh, PartitionSpec(None, *self._sharded.batch_spec))

    def init(self, params_seed: int) -> TrainState:
        """A first state, made where it lies; the same on every mesh."""

        def make() -> TrainState:
            params = init_params(self.task.model, params_seed)
            return self._stored(init_state(params, self.task.train))

        return self._jit(make, out_shardings=self.state_shardings)()

    def init_from(self, params: Params) -> TrainState:
        """A first state of parameters that lie where its own do, layers in the model's order. They
        are donated."""

        def make(params: Params) -> TrainState:
            return self._stored(init_state(params, self.task.train))

        return self._jit(make, donate_argnums=0, out_shardings=self.state_shardings)(params)

    def put_state(self, state: TrainState) -> TrainState:
        """A host state, layers in the model's order, on the devices."""
        return self._put(state, self.state_shardings)

    def put_params(self, params: Params) -> Params:
        """Host parameters, layers in the model's order, on the devices."""
        return self._put(params, self.state_shardings.params)

    def move(self, taken: list[TrainState], before: "Program") -> TrainState:
        """A state of another program, the one item of `taken`, popped; see meshes.reshard."""
        return reshard(taken, self.state_shardings, before.order, self.order)

    def host(self, tree: Any) -> Any:
        """A state or a part of it as host arrays, layers in the model's order; whole in every
        process, all of which call this."""
        place = None if self.order is None else np.argsort(self.order)
        return _reorder(jax.tree.map(_gathered, tree), place)

    @cached_property
    def local_sequences(self) -> list[int] | None:
        """Places in a batch of the sequences that this process feeds; None: all of them."""
        if jax.process_count() == 1:
            return None
        rows = self.strategy.dp * self.strategy.micro_batch
        shape = (1, 1, rows, self.task.seq_len)
        local = self.chunk_sharding.addressable_devices_indices_map(shape).values()
        mine = sorted({row for index in local if index for row in range(rows)[index[2]]})
        return [m * rows + row for m in range(self.strategy.micro_batches) for row in mine]

    def put_chunk(self, chunk: Batch) -> Batch:
        """A host chunk [c, B, ...] of batches on the devices as [c, m, b, ...].

        Of each batch a process gives its `local_sequences`.
        """
        m, rows = self.strategy.micro_batches, self.strategy.dp * self.strategy.micro_batch

        def put(x: np.ndarray) -> jax.Array:
            split = x.reshape(x.shape[0], m, -1, *x.shape[2:])
            if self.local_sequences is None:
                return jax.device_put(split, self.chunk_sharding)
            shape = (x.shape[0], m, rows, *x.shape[2:])
            return jax.make_array_from_process_local_data(self.chunk_sharding, split, shape)

        return jax.tree.map(put, chunk)

    def lower(self, steps: int, probe: bool = False) -> jax.stages.Lowered:
        """The loop over chunks of `steps`, not yet compiled; costs no memory on the devices."""
        b = self.strategy.dp * self.strategy.micro_batch
        lead = (steps, self.strategy.micro_batches, b)
        chunk = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.chunk_sharding),
            jax.eval_shape(lambda: empty_batch(lead, self.task.seq_len)),
        )
        whole = NamedSharding(self.mesh, PartitionSpec())
        loop = self._jit(
            make_loop(self._steps[probe]),
            donate_argnums=0,
            out_shardings=(self.state_shardings, whole),
        )
        types = (jnp.int32, jnp.float32, jnp.float32, jnp.int32, jnp.float32)
        scalars = (jax.ShapeDtypeStruct((), t) for t in types)
        return loop.lower(self.abstract_state, chunk, *scalars)

    def compile(self, steps: int, probe: bool = False) -> jax.stages.Compiled:
        """The same, compiled; once for each length of chunk, from any thread. What is compiled is
        there at once, whatever another thread compiles meanwhile."""
        if found := self._compiled.get((steps, probe)):
            return found
        with self._lock:
            if (steps, probe) not in self._compiled:
                self._compiled[steps, probe] = self.lower(steps, probe).compile()
            return self._compiled[steps, probe]

    def compile_all(self, steps: int) -> None:
        """All that training in chunks of `steps` will run, evaluations among it where the task says
        of how many rows."""
        self.compile(steps)
        if self.wants_probes:
            self.compile(1, probe=True)
        if self.task.eval_rows:
            self._loss(self.task.eval_rows)
        if self.task.base_batch is not None and self.task.train.optimizer.name == "adamw":
            _ = self._scale_moment  # for a state that comes from another batch

    def run(
        self,
        state: TrainState,
        chunk: Batch,
        count: int,
        begin: float,
        stride: float,
        done: int,
        scale: float = 1.0,
        probe: bool = False,
    ) -> tuple[TrainState, StepStats]:
        """`count` steps over a chunk [c, m, b, t] on the devices; the state is donated.

        Step i of the chunk runs at progress begin + stride * (done + i), so the bits do not depend
        on where a round is cut into chunks. `scale` multiplies the learning rate. `probe`: measure
        noise between two halves of each batch, which takes twice as long, where the strategy has
        no `parts`.
        """
        loop = self.compile(chunk.tokens.shape[0], probe)
        types = (np.int32, np.float32, np.float32, np.int32, np.float32)
        numbers = (count, begin, stride, done, scale)
        return loop(state, chunk, *(t(x) for t, x in zip(types, numbers, strict=True)))

    def rehearse(self, state: TrainState, steps: int) -> TrainState:
        """`state`, after no step of chunks of `steps`, and no probe or evaluation where there will
        be any: whatever memory these need is taken, and must be there."""
        for length, probe in ((steps, False), (1, True))[: 1 + self.wants_probes]:
            lead = (length, len(self.local_sequences or range(self.strategy.global_batch)))
            chunk = self.put_chunk(empty_batch(lead, self.task.seq_len))
            state, _ = self.run(state, chunk, 0, 0.0, 0.0, 0, probe=probe)
            state = jax.block_until_ready(state)
        if self.task.eval_rows:
            strategy, loss = self._loss(self.task.eval_rows)
            batch = empty_batch((strategy.global_batch,), self.task.seq_len)
            jax.block_until_ready(loss(state.params, self._put_held_out(batch)))
        return state

    def carry_over(self, state: TrainState, batch: int) -> TrainState:
        """`state` after steps of `batch` sequences, for steps of this program's, where Adam's
        memory goes by samples.

        Adam divides its moments, which start at 0, by the weight of what they have seen so far,
        1 - b2^steps. Under another b2 that weight is another one: the second moment is scaled, so
        that what Adam makes of it stays the same.
        """
        before, after = (self.task.optimizer(b).b2 for b in (batch, self.strategy.global_batch))
        if before == after or self.task.train.optimizer.name != "adamw":
            return state
        steps = int(optax.tree_utils.tree_get(state.opt_state, "count"))
        if not steps or before is None or after is None:
            return state
        factor = np.float32((1 - after**steps) / (1 - before**steps))
        moment = optax.tree_utils.tree_get(state.opt_state, "nu")
        scaled = self._scale_moment(moment, factor)
        return replace(state, opt_state=optax.tree_utils.tree_set(state.opt_state, nu=scaled))

    @cached_property
    def _scale_moment(self) -> jax.stages.Compiled:
        """Adam's second moment, which is donated, times a factor."""
        moment = optax.tree_utils.tree_get(self.abstract_state.opt_state, "nu")
        scale = self._jit(
            lambda tree, factor: jax.tree.map(lambda x: x * factor, tree),
            donate_argnums=0,
            out_shardings=jax.tree.map(lambda x: x.sharding, moment),
        )
        return scale.lower(moment, jax.ShapeDtypeStruct((), jnp.float32)).compile()

    def evaluate(
        self, params: Params, batches: Callable[[int], Iterable[Batch]], rows: int, draws: int = 1
    ) -> Evaluation:
        """Loss on held-out batches, nothing dropped; params on the devices.

        `batches(b)` yields host batches [b, T], all of them `draws` times; b is `rows`, raised to
        what the mesh divides.
        """
        strategy, loss = self._loss(rows)
        held_out = batches(strategy.global_batch)
        return summarize([loss(params, self._put_held_out(b)) for b in held_out], draws)

    def _loss(self, rows: int) -> tuple[Strategy, jax.stages.Compiled]:
        """Of each sequence of a batch of `rows` or a few more, compiled; and by which strategy."""
        unit = self.strategy.dp * self.strategy.pp
        micro = -(-rows // unit)

        def lower(strategy: Strategy) -> jax.stages.Lowered:
            batch = empty_batch((strategy.global_batch,), self.task.seq_len)
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._held_out_sharding),
                self._in_micro_batches(batch),
            )
            loss = self._jit(self._lay_out(strategy).loss)
            return loss.lower(self.abstract_state.params, shapes)

        strategy = replace(self.strategy, micro_batch=micro, global_batch=micro * unit)
        return strategy, self._losses.get(strategy, lower)

    @property
    def _held_out_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self._sharded.batch_spec)

    def _in_micro_batches(self, batch: Batch) -> Sequences:
        split = jax.tree.map(lambda x: x.reshape(self.strategy.pp, -1, *x.shape[1:]), batch)
        return Sequences(*split)

    def _put_held_out(self, batch: Batch) -> Sequences:
        """A host batch [b, T] on the devices."""
        return self._place(self._in_micro_batches(batch), self._held_out_sharding)

    def _require_stacked(self) -> None:
        """ConfigError where an optimizer keeps of the layers what storage orders cannot move."""
        layers = self.task.model.layers
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.abstract_state):
            require(
                not in_stack(path) or leaf.shape[:1] == (layers,),
                f"the optimizer keeps {jax.tree_util.keystr(path)} of shape {leaf.shape}, not by "
                f"layer, and strategy {self.strategy} stores layers in another order; use "
                "interleave 1, or another optimizer",
            )

    def _lay_out(self, strategy: Strategy) -> ShardedModel:
        task = self.task
        return ShardedModel(
            task.model,
            strategy,
            self.mesh,
            task.train.compute_dtype,
            task.documents,
            task.seq_len,
        )

    def _make_step(self, probe: bool) -> Callable[..., tuple[TrainState, StepStats]]:
        task, batch = self.task, self.strategy.global_batch
        optimizer = task.optimizer(batch)
        gradient, measure = self._sharded.gradient, None
        if task.noise:
            gradient = in_halves(self._sharded.measured) if probe else self._sharded.measured
            source = "probe" if probe else "parts" if self.parts > 1 else None
            measure = make_measure(task.noise, optimizer, batch, source)

        def seeded(params: Params, batch: Batch, step):
            key = jax.random.fold_in(jax.random.key(task.seed), step)
            return gradient(params, Sequences(*batch), key)

        config = replace(task.train, optimizer=optimizer)
        factor = batch / task.base_batch if task.base_batch else 1.0
        return make_train_step(seeded, config, self._settle, measure, factor)

    def _settle(self, state: TrainState) -> TrainState:
        return jax.lax.with_sharding_constraint(state, self.state_shardings)

    def _stored(self, tree: Any) -> Any:
        return _reorder(tree, self.order)

    def _put(self, tree: Any, shardings: Any) -> Any:
        # A copy: the loop donates its state, and host arrays may be shared with the device.
        host = jax.tree.map(lambda x: np.array(x, copy=True), tree)
        return self._place(self._stored(host), shardings)

    def _place(self, tree: Any, shardings: Any) -> Any:
        """Host arrays, the same in all processes, where these say."""
        if not self.mesh.is_multi_process:
            return jax.device_put(tree, shardings)
        # device_put would have the processes compare the arrays first.
        return jax.tree.map(
            lambda x, s: jax.make_array_from_callback(x.shape, s, lambda place: x[place]),
            tree,
            jax.tree.broadcast(shardings, tree),
        )


def _gathered(x: jax.Array) -> np.ndarray:
    """An array on the host, whole in every process."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def _as_parameters(opt_state: Any, params: Any, specs: Any) -> Any:
    """Of each leaf the spec of the parameter that its path ends with, where it has its shape; what
    else an optimizer keeps lies whole on every device."""

    def keys(path: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(getattr(entry, "key", None) for entry in path)

    leaves = jax.tree_util.tree_leaves_with_path(params)
    flat = jax.tree.structure(params).flatten_up_to(specs)
    known = {
        (keys(path), leaf.shape): spec for (path, leaf), spec in zip(leaves, flat, strict=True)
    }

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        ends = (keys(path)[start:] for start in range(len(path)))
        found = (known.get((end, leaf.shape)) for end in ends)
        return next((s for s in found if s is not None), PartitionSpec())

    return jax.tree_util.tree_map_with_path(spec, opt_state)


def _reorder(tree: Any, order: np.ndarray | None) -> Any:
    """Stacked layers of host or traced arrays in another order."""
    if order is None:
        return tree
    return jax.tree_util.tree_map_with_path(lambda p, x: x[order] if in_stack(p) else x, tree)
