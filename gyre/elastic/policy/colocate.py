"""The Colocate baseline: all cells roll out, then all cells train."""

from __future__ import annotations

import dataclasses

from gyre.base.enums import CellRole
from gyre.elastic.policy.base import (
    POLICIES,
    Action,
    ClusterView,
    Dispatch,
    ToRollout,
    ToTrain,
)


@POLICIES.register("colocate")
@dataclasses.dataclass(frozen=True)
class Colocate:
    """Drains every dispatched execution before any cell trains; returns all cells at the boundary."""

    def decide(self, view: ClusterView) -> tuple[Action, ...]:
        if view.in_transfer:
            return ()
        if view.burst_steps_left == 0:
            back = tuple(ToRollout(c.index, "burst end") for c in view.elastic_cells
                         if c.role is CellRole.TRAIN)
            return back or (Dispatch(view.groups_to_dispatch),)
        if view.waterlevel == 0:
            return tuple(ToTrain(c.index, "drained") for c in view.elastic_cells
                         if c.role is CellRole.ROLLOUT)
        return ()
