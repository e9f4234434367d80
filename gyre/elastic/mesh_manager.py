"""Keeps the roles of the cells and carries out what the scheduling policy decides.

The manager is the only writer of roles. Every decision is logged with the view it was made from, so
that a run's log replays through the policy object.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

from gyre.base.enums import CellRole
from gyre.elastic.cells import Cell, Weights
from gyre.elastic.policy import Action, CellView, ClusterView, Policy, ToRollout, ToTrain
from gyre.elastic.policy.base import action_to_dict
from gyre.elastic.role_transfer import CallRouter, Event, Post, ToTrainTransfer, then

_LETTER = {CellRole.ROLLOUT: "R", CellRole.TRAIN: "T", CellRole.TO_TRAIN: ">", CellRole.TO_ROLLOUT: "<"}


class MeshManager:
    """Roles of all cells of a run.

    Args:
      cells: in their fixed order; all start in ROLLOUT.
      executions_per_cell: C_e, the executions one rollout cell covers.
      policy: decides.
      router: the gateway's; it sends calls to the cells that are added to it.
      post: puts a continuation on the controller's thread.
      event: the event log.
      on_change: called after a transfer has ended.
      on_error: called with what a cell raised.
    """

    def __init__(self, cells: Sequence[Cell], executions_per_cell: int, policy: Policy,
                 router: CallRouter, post: Post, event: Event, on_change: Callable[[int], None],
                 on_error: Callable[[BaseException], None]):
        self.cells = list(cells)
        self.roles = [CellRole.ROLLOUT] * len(cells)
        self._executions_per_cell, self._policy = executions_per_cell, policy
        self._router, self._post, self._event = router, post, event
        self._on_change, self._on_error = on_change, on_error
        self._since_s = [time.monotonic()] * len(cells)
        self._spent_s: collections.Counter[tuple[int, CellRole]] = collections.Counter()

    def start(self) -> None:
        """Opens all cells to calls."""
        for cell in self.cells:
            self._event("role", cell=cell.index, role=CellRole.ROLLOUT.value, reason="start")
            self._router.add(cell)

    def views(self) -> tuple[CellView, ...]:
        """The cells as the policy sees them."""
        return tuple(CellView(c.index, self.roles[c.index], self._executions_per_cell, c.in_flight,
                              c.standalone) for c in self.cells)

    def in_role(self, role: CellRole) -> list[Cell]:
        """Cells in `role`, in order."""
        return [c for c in self.cells if self.roles[c.index] is role]

    @property
    def letters(self) -> str:
        """Roles for people: R rollout, T train, > and < on the way."""
        return "".join(_LETTER[r] for r in self.roles)

    def decide(self, view: ClusterView) -> tuple[Action, ...]:
        """Asks the policy, logs the pair when there is something to do."""
        actions = self._policy.decide(view)
        if actions:
            self._event("decide", view=view.to_dict(), actions=[action_to_dict(a) for a in actions])
        return actions

    def carry_out(self, action: ToTrain | ToRollout, weights: Weights) -> None:
        """Begins a transfer. `weights` are the core's newest snapshot.

        Raises:
          ValueError: the cell is not in the role that the action leaves.
        """
        cell = self.cells[action.cell]
        leaves = CellRole.ROLLOUT if isinstance(action, ToTrain) else CellRole.TRAIN
        if self.roles[cell.index] is not leaves or (isinstance(action, ToTrain) and cell.standalone):
            raise ValueError(f"{action} but {cell.name} is in {self.roles[cell.index].value}"
                             f"{' and standalone' if cell.standalone else ''}")
        if isinstance(action, ToTrain):
            self._set(cell, CellRole.TO_TRAIN, action.reason)
            ToTrainTransfer(cell, self.cells, self.roles, weights, router=self._router,
                            post=self._post, event=self._event, on_error=self._on_error,
                            on_done=lambda: self._arrived(cell, CellRole.TRAIN)).start()
        else:
            self._set(cell, CellRole.TO_ROLLOUT, action.reason)
            then(cell.serve(weights), self._post,
                 lambda _: self._arrived(cell, CellRole.ROLLOUT), self._on_error)

    def _arrived(self, cell: Cell, role: CellRole) -> None:
        self._set(cell, role)
        if role is CellRole.ROLLOUT:
            self._router.add(cell)
        self._on_change(cell.index)

    def seconds_in(self, role: CellRole) -> float:
        """Seconds that all cells together have spent in `role` so far."""
        for cell in self.cells:
            self._account(cell.index)
        return sum(s for (_, r), s in self._spent_s.items() if r is role)

    def _account(self, cell: int) -> None:
        now = time.monotonic()
        self._spent_s[cell, self.roles[cell]] += now - self._since_s[cell]
        self._since_s[cell] = now

    def _set(self, cell: Cell, role: CellRole, reason: str = "") -> None:
        self._account(cell.index)
        self.roles[cell.index] = role
        extra: dict[str, Any] = {"reason": reason} if reason else {}
        self._event("role", cell=cell.index, role=role.value, **extra)

