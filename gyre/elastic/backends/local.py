"""Cells in this process: one owner thread per cell, over a mesh of local devices.

Only a cell's thread runs programs on its devices; callers queue closures and get futures. Snapshots of
weights are immutable and never donated, so a cell may read the core's arrays while the core goes on.
"""

from __future__ import annotations

import collections
import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from gyre.base.errors import EngineError
from gyre.base.protocols import EngineCall
from gyre.elastic.cells import Partial, Update, Weights
from gyre.generation.decode_loop import DecodeLoop, LoopStats, ParkedCall
from gyre.generation.engine import EngineConfig, GyreEngine
from gyre.models import dense
from gyre.models.sharding import MESH_AXES
from gyre.training.accumulate import GradientTree
from gyre.training.optimizer import Optimizer
from gyre.training.step import TrainPrograms
from gyre.trajectory.packing import MicroStep


def cell_meshes(count: int, shape: tuple[int, int]) -> list[Mesh]:
    """Splits the visible devices into `count` meshes of `shape` = (fsdp, tensor), in device order."""
    size, devices = shape[0] * shape[1], jax.devices()
    if count * size > len(devices):
        raise ValueError(f"{count} cells of {size} devices need {count * size}, "
                         f"but {len(devices)} are visible")
    return [Mesh(np.array(devices[i * size:(i + 1) * size]).reshape(shape), MESH_AXES,
                 axis_types=(AxisType.Auto,) * len(MESH_AXES)) for i in range(count)]


class LocalCell:
    """A cell as a thread. See `gyre.elastic.cells.Cell` for the contract of its methods.

    Args:
      index: position in the cell order.
      mesh: its devices.
      model, engine_config: what it generates with.
      programs: builds the micro-step program for its mesh.
      micro_shapes: (N, R) of every micro-step it may get, to compile ahead.
      prefix_cache_bytes: see `DecodeLoop`.
      standalone: it never trains.
    """

    def __init__(self, index: int, mesh: Mesh, model: dense.ModelConfig, engine_config: EngineConfig,
                 programs: TrainPrograms, micro_shapes: Sequence[tuple[int, int]],
                 prefix_cache_bytes: int, standalone: bool = False):
        self.index, self.mesh, self.standalone = index, mesh, standalone
        self.name = f"cell{index}"
        self.capacity = engine_config.slots
        self.engine = GyreEngine(model, engine_config, mesh)
        self.loop = DecodeLoop(self.engine, prefix_cache_bytes)
        self._train = programs.on(mesh)
        self._micro_shapes = tuple(micro_shapes)
        self._tree: GradientTree | None = None
        self._weights: Weights | None = None  # placed on this cell's mesh
        self._serving = False
        self._publication: tuple[Weights, Future[None]] | None = None
        self._train_busy_s = 0.0
        self._commands: collections.deque[tuple[Callable[[], Any], Future]] = collections.deque()
        self._wake = threading.Condition()
        self._closed = False
        self.fault: Future[None] = Future()  # gets the exception that killed the decode loop
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ from any thread

    @property
    def in_flight(self) -> int:
        return self.loop.in_flight

    @property
    def stats(self) -> LoopStats:
        return self.loop.stats

    @property
    def train_busy_s(self) -> float:
        return self._train_busy_s

    def submit(self, call: EngineCall) -> None:
        with self._wake:
            if not self._serving:
                raise EngineError(f"{self.name} does not serve calls now")
            self.loop.submit(call)
            self._wake.notify_all()

    def cancel(self, call_id: str) -> None:
        self.loop.cancel(call_id)
        self._notify()

    def adopt(self, parked: ParkedCall) -> Future[None]:
        return self._command(functools.partial(self.loop.adopt, parked))

    def start(self, weights: Weights, train: bool = True) -> Future[None]:
        return self._command(functools.partial(self._start, weights, train))

    def publish(self, weights: Weights) -> Future[None]:
        done: Future[None] = Future()

        def begin():
            if self._publication is not None:
                self._publication[1].set_result(None)  # overtaken by this newer version
            self.loop.paused = True
            self._publication = (weights, done)

        self._command(begin).add_done_callback(
            lambda f: done.set_exception(f.exception()) if f.exception() else None)
        return done

    def export_calls(self) -> Future[list[ParkedCall]]:
        return self._command(self._export)

    def release(self) -> Future[None]:
        return self._command(self.loop.release)

    def serve(self, weights: Weights) -> Future[None]:
        return self._command(functools.partial(self._serve, weights))

    def join(self, weights: Weights) -> Future[None]:
        return self._command(functools.partial(self._join, weights))

    def accumulate(self, index: int, micro: MicroStep) -> Future[dict[str, float]]:
        return self._command(functools.partial(self._accumulate, index, micro))

    def take_gradients(self) -> Future[Partial]:
        return self._command(self._take_gradients)

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join()

    # ------------------------------------------------------------------ the owner thread

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _command(self, work: Callable[[], Any]) -> Future:
        future: Future = Future()
        with self._wake:
            if self._closed:
                raise RuntimeError(f"{self.name} is closed")
            self._commands.append((work, future))
            self._wake.notify_all()
        return future

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._closed or self._commands or self._can_step()):
                    self._wake.wait()
                if self._closed:
                    return
                command = self._commands.popleft() if self._commands else None
            if command is not None:
                work, future = command
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: B036 - it belongs to whoever waits for it
                    future.set_exception(error)
                continue
            try:
                self.loop.step()
                self._finish_publication()
            except BaseException as error:  # noqa: B036 - reported as the cell's death
                self.fault.set_exception(error)
                return

    def _can_step(self) -> bool:
        return self._serving and (self.loop.has_work or self._publication is not None)

    def _finish_publication(self) -> None:
        if self._publication is None or self.loop.live:
            return
        (weights, done), self._publication = self._publication, None
        self._load(weights)
        self.loop.paused = False
        done.set_result(None)

    def _place(self, weights: Weights) -> Weights:
        """The snapshot on this mesh. On the same devices it is the same arrays, not a copy."""
        if self._weights is not None and self._weights.version == weights.version:
            return self._weights
        self._weights = None  # frees the old copy before the new one arrives
        self.loop.unload()
        params = self.engine.load_params(weights.params)
        jax.block_until_ready(params)
        return Weights(weights.version, params)

    def _start(self, weights: Weights, train: bool) -> None:
        self._weights = self._place(weights)
        self.engine.warm(self._weights.params)
        if train and not self.standalone:
            for shape in self._micro_shapes:
                self._train.warm(self._weights.params, shape)
        self._serve(weights)

    def _load(self, weights: Weights) -> None:
        self._weights = self._place(weights)
        self.loop.load(self._weights.params, self._weights.version)

    def _serve(self, weights: Weights) -> None:
        self._load(weights)
        self.loop.paused = False
        self._serving = True

    def _export(self) -> list[ParkedCall]:
        with self._wake:  # from here on `submit` refuses, so that no call is left behind
            self._serving = False
        parked = self.loop.export()
        self._finish_publication()  # nothing is live any more: a waiting one is done now
        self.loop.paused = True
        return parked

    def _join(self, weights: Weights) -> None:
        if self._tree is not None and self._tree.nodes:
            raise RuntimeError(f"{self.name} joins version {weights.version} but still holds the "
                               f"gradients of micro-steps {self._tree.nodes}; take them first")
        self._weights = self._place(weights)
        self._tree = GradientTree(self._train.add)

    def _accumulate(self, index: int, micro: MicroStep) -> dict[str, float]:
        began = time.monotonic()
        grads, metrics = self._train.micro_step(self._weights.params, micro)
        self._tree.add(index, grads)
        host = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self._train_busy_s += time.monotonic() - began
        return host

    def _take_gradients(self) -> Partial:
        tree, self._tree = self._tree, GradientTree(self._train.add)
        return Partial(self.index, tuple(tree.partials()) if tree is not None else ())


class LocalCore(LocalCell):
    """Cell 0. Owns the optimizer state; see `gyre.elastic.cells.Core`."""

    def __init__(self, *args: Any, optimizer: Optimizer, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._optimizer = optimizer.on(self.engine.param_shardings)
        self._opt_state: Any = None
        self._trained: Weights | None = None

    def start(self, weights: Weights, train: bool = True, opt_state: Any = None) -> Future[None]:
        """As for any cell; `opt_state` continues a checkpoint."""
        def begin():
            self._start(weights, train)
            self._trained = self._weights
            if train:
                self._opt_state = (self._optimizer.init(self._weights.params) if opt_state is None
                                   else opt_state)
        return self._command(begin)

    def apply(self, partials: list[Partial], micro_steps: int, denominator: int) -> Future[Update]:
        return self._command(functools.partial(self._apply, partials, micro_steps, denominator))

    def snapshot(self) -> Future[Weights]:
        """The newest trained weights."""
        return self._command(lambda: self._trained)

    def abstract_train_state(self) -> dict[str, Any]:
        """Shapes, dtypes and shardings of `train_state`, to restore a checkpoint into."""
        shapes = dense.abstract_params(self.engine.model)
        params = jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            shapes, self.engine.param_shardings)
        return {"params": params, "opt_state": self._optimizer.abstract_state(params)}

    def train_state(self) -> Future[dict[str, Any]]:
        return self._command(lambda: {"params": self._trained.params, "opt_state": self._opt_state})

    def _apply(self, partials: list[Partial], micro_steps: int, denominator: int) -> Update:
        tree, self._tree = self._tree or GradientTree(self._train.add), None
        for partial in partials:
            for key, grads in partial.roots:  # one at a time, so that each is freed early
                tree.merge([(key, jax.device_put(grads, self.engine.param_shardings))])
        total = tree.finish(micro_steps) if micro_steps else None
        params, self._opt_state, grad_norm, rate = self._optimizer.apply(
            self._trained.params, self._opt_state, total, denominator)
        self._trained = Weights(self._trained.version + 1, params)
        jax.block_until_ready(params)
        return Update(self._trained, float(grad_norm), float(rate))
