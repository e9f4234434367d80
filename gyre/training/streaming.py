"""Streaming training: micro-steps of the batch in progress, claimed by cells as groups finish.

Pure bookkeeping on the host: no threads, no devices. The invariants it keeps:
- the micro-steps of a batch and their indices depend only on which groups joined and in which order;
- each index is claimed by one cell at a time, in aligned blocks, and is done exactly once;
- sums over executions are divided once, by the executions in the baseline of the whole step.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

from gyre.trajectory.packing import MicroStep, TrainExecution

Pack = Callable[[Sequence[TrainExecution]], list[MicroStep]]


@dataclasses.dataclass(frozen=True)
class TrainGroup:
    """A finished group as training sees it.

    Attributes:
      group: its index.
      executions: those with trainable tokens and a non-zero advantage.
      in_baseline: executions that count in the step's mean (also those without gradient).
    """

    group: int
    executions: tuple[TrainExecution, ...]
    in_baseline: int


class Batch:
    """The batch of one optimizer step.

    Args:
      version: v_t that it trains.
      groups: B, how many groups complete it.
      pack: turns executions into micro-steps (`trajectory.packing.pack` with this run's shapes).
      claim_block: micro-steps per claim; claims are aligned, so that few gradients are shipped.
      streaming: False holds all micro-steps back until the batch is complete.
    """

    def __init__(self, version: int, groups: int, pack: Pack, claim_block: int = 1,
                 streaming: bool = True):
        self.version, self.groups_wanted = version, groups
        self.groups: list[int] = []
        self.denominator = 0
        self.micro_steps: list[MicroStep] = []
        self._pack, self._block, self._streaming = pack, claim_block, streaming
        self._waiting: list[TrainExecution] = []
        self._open: collections.deque[int] = collections.deque()
        self._claimed: dict[int, int] = {}  # micro-step index -> cell
        self._done: dict[int, dict[str, float]] = {}  # micro-step index -> metric sums

    @property
    def complete(self) -> bool:
        """All groups are in, so that no more micro-steps will come."""
        return len(self.groups) == self.groups_wanted

    @property
    def room(self) -> int:
        """Groups that still fit."""
        return self.groups_wanted - len(self.groups)

    @property
    def supply_ready(self) -> bool:
        """Whether a cell would find something to claim."""
        return bool(self._open) and (self._streaming or self.complete)

    @property
    def finished(self) -> bool:
        """All groups are in and every micro-step is done."""
        return self.complete and len(self._done) == len(self.micro_steps)

    def metric_sums(self) -> dict[str, float]:
        """Sums over the finished micro-steps, added in index order."""
        totals: collections.Counter[str] = collections.Counter()
        for index in sorted(self._done):
            totals.update(self._done[index])
        return dict(totals)

    def add(self, group: TrainGroup) -> None:
        """Joins a group. Raises ValueError when the batch is complete or has the group already."""
        if self.complete or group.group in self.groups:
            raise ValueError(f"group {group.group} cannot join a batch of {self.groups}, "
                             f"{self.groups_wanted} wanted")
        self.groups.append(group.group)
        self.denominator += group.in_baseline
        merged = [*self._waiting, *group.executions]
        if len(self._pack(merged)) > 1 and self._waiting:
            self._emit(self._waiting)
            merged = list(group.executions)
        self._waiting = merged
        if self.complete:
            self._emit(self._waiting)
            self._waiting = []

    def _emit(self, executions: list[TrainExecution]) -> None:
        for micro in self._pack(executions):
            self._open.append(len(self.micro_steps))
            self.micro_steps.append(micro)

    def claim(self, cell: int) -> list[int]:
        """Takes the next aligned block of open micro-steps for `cell`; [] when there is none."""
        if not self.supply_ready:
            return []
        block = self._open[0] // self._block
        taken = []
        while self._open and self._open[0] // self._block == block:
            index = self._open.popleft()
            self._claimed[index] = cell
            taken.append(index)
        return taken

    def done(self, index: int, cell: int, metrics: dict[str, float]) -> None:
        """Records a finished micro-step. Raises ValueError when `cell` had not claimed it."""
        if self._claimed.get(index) != cell or index in self._done:
            raise ValueError(f"cell {cell} finished micro-step {index}, which is claimed by "
                             f"{self._claimed.get(index)} and {'' if index in self._done else 'not '}done")
        self._done[index] = metrics

    def give_back(self, cell: int) -> list[int]:
        """Returns everything that a dead cell had claimed or done but not handed over (rule E5)."""
        lost = sorted(i for i, owner in self._claimed.items() if owner == cell)
        for index in lost:
            del self._claimed[index]
            self._done.pop(index, None)
        self._open = collections.deque(sorted([*self._open, *lost]))
        return lost
