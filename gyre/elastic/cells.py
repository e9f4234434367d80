"""What a cell is to the rest of the system: a handle with asynchronous methods, and nothing else.

A cell is a homogeneous set of devices with one parallel layout. Whoever holds a handle never touches
the cell's devices; every method returns at once, with a future where there is something to wait for.
The local backend runs a thread per cell; other backends may run a process or a Ray actor.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any, Protocol

from gyre.base.protocols import EngineCall
from gyre.generation.decode_loop import LoopStats, ParkedCall
from gyre.trajectory.packing import MicroStep


@dataclasses.dataclass(frozen=True)
class Weights:
    """An immutable snapshot of the parameters at a version, on the core's devices."""

    version: int
    params: Any


@dataclasses.dataclass(frozen=True)
class Partial:
    """A cell's part of a batch's gradient: subtree roots ((level, index), gradients)."""

    cell: int
    roots: tuple[tuple[tuple[int, int], Any], ...]


@dataclasses.dataclass(frozen=True)
class Update:
    """What an optimizer step gives back: the new snapshot and scalars for metrics."""

    weights: Weights
    grad_norm: float
    learning_rate: float


class Cell(Protocol):
    """Handle of one cell. Also an `EngineEndpoint`: calls are submitted to it while it rolls out."""

    index: int
    name: str
    capacity: int
    standalone: bool

    @property
    def in_flight(self) -> int:
        """Calls running or queued here."""

    @property
    def stats(self) -> LoopStats:
        """Decoding counters since the start."""

    @property
    def train_busy_s(self) -> float:
        """Seconds spent in micro-steps since the start."""

    def start(self, weights: Weights, train: bool = True) -> Future[None]:
        """Places the weights, compiles every program (training's if `train`), begins to serve."""

    def submit(self, call: EngineCall) -> None: ...

    def cancel(self, call_id: str) -> None: ...

    def publish(self, weights: Weights) -> Future[None]:
        """Changes the rollout weights once running calls have ended; queued calls wait for it."""

    def export_calls(self) -> Future[list[ParkedCall]]:
        """Stops serving and gives up all calls (rule E4). KV stays valid until `release`."""

    def adopt(self, parked: ParkedCall) -> Future[None]:
        """Takes over a call of another cell; done once its KV is here (the confirmation of E4)."""

    def release(self) -> Future[None]:
        """Frees KV: destinations have confirmed, or the cell is empty."""

    def serve(self, weights: Weights) -> Future[None]:
        """Returns to rollout with these weights."""

    def join(self, weights: Weights) -> Future[None]:
        """Takes the weights frozen for the batch in progress (rule E5)."""

    def accumulate(self, index: int, micro: MicroStep) -> Future[dict[str, float]]:
        """Runs micro-step `index` and adds its gradient to this cell's part; gives metric sums."""

    def take_gradients(self) -> Future[Partial]:
        """Hands over this cell's part of the batch and forgets it."""

    def close(self) -> None:
        """Stops the cell's thread after what it is doing."""


class Core(Cell, Protocol):
    """Cell 0: the authoritative weights and the only optimizer state."""

    def apply(self, partials: list[Partial], micro_steps: int, denominator: int) -> Future[Update]:
        """Sums all parts in the canonical order and takes one optimizer step.

        Args:
          partials: the satellites' parts; the core's own part is taken from itself.
          micro_steps: micro-steps in the batch.
          denominator: executions in the baseline.
        """

    def train_state(self) -> Future[dict[str, Any]]:
        """Parameters and optimizer state, for a checkpoint."""
