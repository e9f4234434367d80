"""The one interface of all schedulers: `decide(view) -> actions`.

A policy is stateless: the same view gives the same actions, so a run's log of (view, actions) pairs
can be replayed through the policy object, and the simulator and the mesh manager cannot disagree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol

from gyre.base.enums import CellRole
from gyre.base.errors import ConfigError
from gyre.base.registry import Registry


@dataclasses.dataclass(frozen=True)
class CellView:
    """What a policy sees of one cell.

    Attributes:
      index: position in the fixed order; 0 is the core.
      role: what the cell does now.
      capacity: executions that it covers while in ROLLOUT (C_e of the paper).
      load: model calls in flight on it.
      standalone: it only ever does rollout.
    """

    index: int
    role: CellRole
    capacity: int
    load: int = 0
    standalone: bool = False


@dataclasses.dataclass(frozen=True)
class ClusterView:
    """Counters of a run at one moment (paper: d(t), f(t), C_R(t), burst position).

    Attributes:
      time_s: seconds since the run began.
      cells: all cells in their fixed order.
      dispatched: executions dispatched since the run began.
      finished: executions that have ended since the run began.
      supply_ready: training has something to claim now: a packed micro-step when streaming, a whole
        batch otherwise.
      next_batch_ready: the next batch is complete: at a boundary the one that the next burst begins
        with, within a burst the one after that in progress.
      burst_steps_left: optimizer steps before the next weight publication; 0 = at the boundary.
      groups_to_dispatch: groups that the boundary may dispatch, (phi + mu) B less those outstanding,
        and never more than the run still needs.
      group_size: executions per group (N).
    """

    time_s: float
    cells: tuple[CellView, ...]
    dispatched: int
    finished: int
    supply_ready: bool
    next_batch_ready: bool
    burst_steps_left: int
    groups_to_dispatch: int
    group_size: int

    @property
    def waterlevel(self) -> int:
        """w(t): unfinished executions (E1)."""
        return self.dispatched - self.finished

    @property
    def rollout_capacity(self) -> int:
        """C_R(t): executions covered by the cells in ROLLOUT or about to be."""
        return sum(c.capacity for c in self.cells
                   if c.role in (CellRole.ROLLOUT, CellRole.TO_ROLLOUT))

    @property
    def in_transfer(self) -> bool:
        """Whether a cell is between roles."""
        return any(c.role in (CellRole.TO_TRAIN, CellRole.TO_ROLLOUT) for c in self.cells)

    @property
    def elastic_cells(self) -> tuple[CellView, ...]:
        """The cells that may train, in order."""
        return tuple(c for c in self.cells if not c.standalone)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form; `from_dict` inverts it."""
        d = dataclasses.asdict(self)
        for c in d["cells"]:
            c["role"] = CellRole(c["role"]).value
        d["cells"] = list(d["cells"])
        return d

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> ClusterView:
        cells = tuple(CellView(**{**c, "role": CellRole(c["role"])}) for c in d["cells"])
        return cls(**{**d, "cells": cells})


@dataclasses.dataclass(frozen=True)
class ToTrain:
    """Move a cell from ROLLOUT to TRAIN."""

    cell: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class ToRollout:
    """Move a cell from TRAIN to ROLLOUT."""

    cell: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Start this many groups and with them the next burst."""

    groups: int


Action = ToTrain | ToRollout | Dispatch
_ACTIONS = {cls.__name__: cls for cls in (ToTrain, ToRollout, Dispatch)}


def action_to_dict(action: Action) -> dict[str, Any]:
    """JSON-serialisable form of an action."""
    return {"action": type(action).__name__, **dataclasses.asdict(action)}


def action_from_dict(d: Mapping[str, Any]) -> Action:
    """Inverse of `action_to_dict`."""
    return _ACTIONS[d["action"]](**{k: v for k, v in d.items() if k != "action"})


class Policy(Protocol):
    """Decides who trains, who rolls out, and when to dispatch."""

    def decide(self, view: ClusterView) -> tuple[Action, ...]:
        """Actions for this moment; () to stay. Deterministic, without side effects."""


POLICIES: Registry[type] = Registry("scheduler")


def make_policy(name: str, **options: Any) -> Policy:
    """Builds the registered policy `name`. Raises ConfigError on an unknown name or option."""
    cls = POLICIES.get(name)
    known = {f.name for f in dataclasses.fields(cls)}
    if unknown := set(options) - known:
        raise ConfigError(f"scheduler {name!r} has no option {sorted(unknown)}; known: {sorted(known)}")
    return cls(**options)


def boundary_depth(phi: float, mu: int, groups_per_step: int) -> int:
    """Q_b = (phi + mu) B, in groups, rounded up: what is outstanding at a burst boundary."""
    return math.ceil((phi + mu) * groups_per_step - 1e-9)
