"""The Async baseline: a fixed split of the cells between training and rollout."""

from __future__ import annotations

import dataclasses

from gyre.base.enums import CellRole
from gyre.base.errors import ConfigError
from gyre.elastic.policy.base import POLICIES, Action, ClusterView, Dispatch, ToTrain


@POLICIES.register("async")
@dataclasses.dataclass(frozen=True)
class StaticSplit:
    """The first `train_cells` cells always train, the others always roll out."""

    train_cells: int = 1

    def __post_init__(self):
        if self.train_cells < 1:
            raise ConfigError(f"async needs at least 1 training cell, got train_cells={self.train_cells}")

    def decide(self, view: ClusterView) -> tuple[Action, ...]:
        if view.in_transfer:
            return ()
        moves = tuple(ToTrain(c.index, "static split") for c in view.elastic_cells[:self.train_cells]
                      if c.role is CellRole.ROLLOUT)
        if moves:
            return moves
        if view.burst_steps_left == 0:
            return (Dispatch(view.groups_to_dispatch),)
        return ()
