"""Moving a cell between roles while its live calls go on elsewhere (rules E4 and E5).

A transfer is a short chain of the cell's futures. Its continuations run on the controller's thread
through `post`, so that roles are read and written by one thread only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from gyre.base.enums import CellRole
from gyre.base.errors import EngineError
from gyre.elastic.cells import Cell, Weights
from gyre.generation.decode_loop import ParkedCall

Post = Callable[[Callable[[], None]], None]
Event = Callable[..., None]


class CallRouter(Protocol):
    """What transfers need of the gateway's router."""

    def add(self, endpoint: Any) -> None: ...

    def remove(self, name: str) -> None: ...


def then(future: Future, post: Post, on_result: Callable[[Any], None],
         on_error: Callable[[BaseException], None]) -> None:
    """Continues on the controller's thread when `future` is done."""
    def done(f: Future) -> None:
        error = f.exception()
        post(functools.partial(on_error, error) if error else functools.partial(on_result, f.result()))
    future.add_done_callback(done)


def destination(cells: Sequence[Cell], roles: Sequence[CellRole]) -> Cell:
    """Where a displaced call goes: the cell that will stay in rollout longest and has a free slot.

    Standalone cells stay longest, then the last in the order; when all are full, the least loaded.

    Raises:
      EngineError: no cell is in rollout.
    """
    serving = [c for c in cells if roles[c.index] is CellRole.ROLLOUT]
    if not serving:
        raise EngineError("no cell is in rollout to take over the calls of a leaving cell")
    by_stay = sorted(serving, key=lambda c: (not c.standalone, -c.index))
    free = [c for c in by_stay if c.in_flight < c.capacity]
    return free[0] if free else min(by_stay, key=lambda c: c.in_flight / c.capacity)


class ToTrainTransfer:
    """ROLLOUT -> TRAIN: no new calls, calls handed over, KV freed once confirmed, weights joined.

    Args:
      cell: the one that leaves.
      cells, roles: all cells and their roles (the leaving one is already TO_TRAIN).
      weights: what the core froze for the batch in progress.
      router, post, event: the gateway's router, the controller's inbox, the event log.
      on_done, on_error: called on the controller's thread.
    """

    def __init__(self, cell: Cell, cells: Sequence[Cell], roles: Sequence[CellRole], weights: Weights,
                 *, router: CallRouter, post: Post, event: Event, on_done: Callable[[], None],
                 on_error: Callable[[BaseException], None]):
        self._cell, self._cells, self._roles, self._weights = cell, cells, roles, weights
        self._router, self._post, self._event = router, post, event
        self._on_done, self._on_error = on_done, on_error
        self._unconfirmed: set[str] = set()

    def start(self) -> None:
        self._router.remove(self._cell.name)
        then(self._cell.export_calls(), self._post, self._exported, self._on_error)

    def _exported(self, parked: list[ParkedCall]) -> None:
        self._unconfirmed = {p.call.request.call_id for p in parked}
        for p in parked:
            self._hand_over(p)
        if not parked:
            self._confirmed_all()

    def _hand_over(self, parked: ParkedCall) -> None:
        target = destination(self._cells, self._roles)
        request = parked.call.request
        self._event("move_call", call=request.call_id, execution=request.execution_id,
                    source=self._cell.index, destination=target.index,
                    tokens=len(parked.call.ids), prompt_tokens=int(request.prompt_ids.size),
                    kv=parked.prefix is not None)
        then(target.adopt(parked), self._post,
             functools.partial(self._confirmed, request.call_id), self._on_error)

    def _confirmed(self, call_id: str, _: None) -> None:
        self._unconfirmed.discard(call_id)
        if not self._unconfirmed:
            self._confirmed_all()

    def _confirmed_all(self) -> None:
        then(self._cell.release(), self._post, self._released, self._on_error)

    def _released(self, _: None) -> None:
        then(self._cell.join(self._weights), self._post, lambda _: self._on_done(), self._on_error)
