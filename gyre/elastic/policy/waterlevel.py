"""The paper's policy: cells follow the waterlevel of unfinished executions (rules E1 to E3)."""

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


@POLICIES.register("elastic")
@dataclasses.dataclass(frozen=True)
class Waterlevel:
    """E1: a cell leaves rollout only when the rest covers all unfinished executions.

    E2: one transfer at a time, core first, so that the training cells are a growing prefix of the
    order. E3: at the burst's end the satellites return; the core stays only if its next batch is
    complete and the others cover what is to be dispatched.
    """

    def decide(self, view: ClusterView) -> tuple[Action, ...]:
        if view.in_transfer:
            return ()  # E2: serial
        if view.burst_steps_left == 0:
            return self._boundary(view)
        return self._within_burst(view)

    def _within_burst(self, view: ClusterView) -> tuple[Action, ...]:
        for cell in view.elastic_cells:
            if cell.role is CellRole.TRAIN:
                continue
            remaining = view.rollout_capacity - cell.capacity
            if view.supply_ready and view.waterlevel <= remaining:  # E1
                return (ToTrain(cell.index, f"w={view.waterlevel}<={remaining}"),)
            return ()  # E2: no later cell may overtake this one
        return ()

    def _boundary(self, view: ClusterView) -> tuple[Action, ...]:
        core, satellites = view.elastic_cells[0], view.elastic_cells[1:]
        for cell in satellites:
            if cell.role is CellRole.TRAIN:
                return (ToRollout(cell.index, "burst end"),)
        if core.role is CellRole.TRAIN:
            unfinished = view.waterlevel + view.groups_to_dispatch * view.group_size
            covered = unfinished <= view.rollout_capacity
            if not (view.next_batch_ready and covered):
                why = "next batch not ready" if not view.next_batch_ready else (
                    f"w={unfinished}>{view.rollout_capacity}")
                return (ToRollout(core.index, f"burst end, {why}"),)
        return (Dispatch(view.groups_to_dispatch),)
