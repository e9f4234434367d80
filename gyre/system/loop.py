"""The one training loop of all schedulers: events in, policy's actions out.

Everything here runs on the thread that calls `run`; cells, executions and timers reach it through
`post`. After each event the loop fills the batch, feeds idle training cells, finishes a batch that is
done, and asks the policy. What differs between elastic, colocate and async is the policy alone.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import time
from collections.abc import Callable

from gyre.base.enums import CellRole
from gyre.base.errors import StalledError
from gyre.base.protocols import TaskSource
from gyre.elastic.cells import Cell, Core, Partial, Update, Weights
from gyre.elastic.mesh_manager import MeshManager
from gyre.elastic.policy import ClusterView, Dispatch, GroupView, release
from gyre.elastic.policy.base import boundary_depth
from gyre.elastic.role_transfer import then
from gyre.system.rollouts import GroupStart
from gyre.training.processor import FinishedExecution, ProcessedGroup
from gyre.training.streaming import Batch
from gyre.trajectory.store import Store


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """Counts that shape a run; see configs/base.py. `streaming` lets training begin mid-batch."""

    steps: int
    groups_per_step: int
    group_size: int
    mu: int
    phi: float
    claim_block: int
    streaming: bool
    stall_timeout_s: float


@dataclasses.dataclass
class GroupState:
    """A dispatched group that no step has consumed."""

    index: int
    version: int
    members: dict[int, FinishedExecution] = dataclasses.field(default_factory=dict)
    processed: ProcessedGroup | None = None
    completed_order: int | None = None


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a finished step hands to the metrics."""

    step: int
    batch: Batch
    update: Update
    groups: tuple[GroupState, ...]
    waterlevel: int
    roles: str


class TrainingLoop:
    """See the module's docstring.

    Args:
      config: counts.
      core: cell 0.
      store: groups and their consumption are written here.
      tasks: group g runs task g.
      dispatch: starts a group's executions.
      process: (group index, executions in member order) -> ProcessedGroup.
      pack: executions -> micro-steps.
      event: the event log.
      on_step: called after each optimizer step, before anything of the next one.
    """

    def __init__(self, config: LoopConfig, *, core: Core, store: Store, tasks: TaskSource,
                 dispatch: Callable[[GroupStart], None],
                 process: Callable[[int, list[FinishedExecution]], ProcessedGroup], pack,
                 event: Callable[..., None], on_step: Callable[[StepResult], None]):
        self.config, self._core, self._store, self._tasks = config, core, store, tasks
        self._dispatch_group, self._process, self._pack = dispatch, process, pack
        self._event, self._on_step = event, on_step
        self.manager: MeshManager | None = None  # set by `attach`
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.step, self.weights = 0, Weights(0, None)
        self.dispatched = self.finished = 0  # executions
        self._groups: dict[int, GroupState] = {}
        self._requeue: list[tuple[int, int]] = []  # (group, attempt) that a restart interrupted
        self._next_group = self._completed = self._burst_steps_left = 0
        self._working: dict[int, int] = {}  # cell -> micro-steps it has in hand
        self._trained_by: set[int] = set()  # cells with a part of this batch
        self._joined: dict[int, int] = {}  # cell -> version it accumulates for
        self._applying = self._settling = self._stop = False
        self._began = time.monotonic()

    # ------------------------------------------------------------------ wiring

    def post(self, work: Callable[[], None]) -> None:
        """Puts work on the loop's thread. Thread-safe."""
        self._inbox.put(work)

    def attach(self, manager: MeshManager, weights: Weights) -> None:
        """Gives the loop its cells and the core's first snapshot."""
        self.manager, self.weights = manager, weights
        self._batch = self._new_batch()

    def resume(self, step: int, finished: list[tuple[GroupState, list[FinishedExecution]]],
               requeue: list[tuple[int, int]], next_group: int) -> None:
        """Continues after `step` steps.

        Args:
          step: optimizer steps applied.
          finished: unconsumed groups in completion order, with their executions.
          requeue: (group, attempt) of those that must run again.
          next_group: first index that was never dispatched.
        """
        self.step, self._next_group, self._requeue = step, next_group, list(requeue)
        for state, executions in finished:
            state.processed = self._process(state.index, executions)
            state.members = dict(enumerate(executions))
            state.completed_order, self._completed = self._completed, self._completed + 1
            self._groups[state.index] = state

    def raise_error(self, error: BaseException) -> None:
        """Ends `run` with this error. Thread-safe."""
        def fail():
            raise error
        self.post(fail)

    def stop(self) -> None:
        """Ends `run` after the event in hand. Thread-safe, callable from a signal handler."""
        def set_flag():
            self._stop = True
        self.post(set_flag)

    def on_execution(self, group: int, member: int, finished: FinishedExecution) -> None:
        """An execution has ended and is stored. Thread-safe."""
        self.post(functools.partial(self._execution_done, group, member, finished))

    # ------------------------------------------------------------------ the loop

    def run(self) -> bool:
        """Runs until all steps are done. Returns False when `stop` ended it early.

        Raises:
          StalledError: no event for `stall_timeout_s`.
        """
        self._react()
        while self.step < self.config.steps and not self._stop:
            self._next_event()
            if self.step < self.config.steps:
                self._react()
        return self.step >= self.config.steps

    def settle(self) -> None:
        """Lets transfers end and, where the policy wants it, cells return to rollout."""
        self._settling = True
        self._react()
        while self.manager.views() and self.view().in_transfer:
            self._next_event()
            self._react()
        self._settling = False

    def _next_event(self) -> None:
        try:
            work = self._inbox.get(timeout=self.config.stall_timeout_s)
        except queue.Empty:
            raise StalledError(self._describe_stall()) from None
        work()

    def _describe_stall(self) -> str:
        cells = "; ".join(f"{c.name}: {self.manager.roles[c.index].value}, {c.in_flight} calls, "
                          f"{self._working.get(c.index, 0)} micro-steps" for c in self.manager.cells)
        return (f"nothing happened for {self.config.stall_timeout_s:g} s at step {self.step}; "
                f"{self.dispatched - self.finished} executions unfinished, batch "
                f"{len(self._batch.groups)}/{self._batch.groups_wanted} groups; {cells}. If executions "
                "may be silent for so long, raise stall_timeout_s")

    def _react(self) -> None:
        while True:
            self._fill_batch()
            self._feed()
            if self._applying:
                return
            if self._may_finish_batch():
                self._finish_batch()
                return
            actions = self.manager.decide(self.view())
            if self._settling:
                actions = tuple(a for a in actions if not isinstance(a, Dispatch))
            if not actions:
                return
            for action in actions:
                if isinstance(action, Dispatch):
                    self._dispatch(action.groups)
                else:
                    self.manager.carry_out(action, self.weights)

    def _may_finish_batch(self) -> bool:
        """A batch without gradient is finished when it is complete; at a boundary it too waits for the
        policy, or the burst would run past its end and nothing would be dispatched again."""
        return (self._batch.finished and self._burst_steps_left > 0 and not self._settling
                and not self.view().in_transfer)

    def view(self) -> ClusterView:
        """What the policy sees now."""
        c = self.config
        complete = sum(g.completed_order is not None for g in self._groups.values())
        if self._burst_steps_left == 0:  # the batch in hand is the next one
            complete += len(self._batch.groups)
        return ClusterView(
            time_s=round(time.monotonic() - self._began, 3), cells=self.manager.views(),
            dispatched=self.dispatched, finished=self.finished,
            supply_ready=self._batch.supply_ready, next_batch_ready=complete >= c.groups_per_step,
            burst_steps_left=self._burst_steps_left, groups_to_dispatch=self._groups_to_dispatch(),
            group_size=c.group_size)

    def _groups_to_dispatch(self) -> int:
        c = self.config
        depth = boundary_depth(c.phi, c.mu, c.groups_per_step)
        consumed = self.step * c.groups_per_step
        outstanding = len(self._groups) + len(self._batch.groups)
        return max(0, min(depth, c.steps * c.groups_per_step - consumed) - outstanding)

    # ------------------------------------------------------------------ rollout side

    def _dispatch(self, groups: int) -> None:
        self._burst_steps_left = self.config.mu
        self._event("burst_start", version=self.weights.version, step=self.step, groups=groups)
        for _ in range(groups):
            if self._requeue:
                index, attempt = self._requeue.pop(0)
            else:
                index, attempt = self._next_group, 0
                self._next_group += 1
            task = self._tasks.task(index)
            self._groups[index] = GroupState(index, self.weights.version)
            self._store.add_group(index, task.task_id, task.kind, self.weights.version, attempt,
                                  time.time())
            self.dispatched += self.config.group_size
            self._event("dispatch", group=index, task=task.task_id, kind_of_task=task.kind,
                        version=self.weights.version, executions=self.config.group_size)
            self._dispatch_group(GroupStart(index, task, self.weights.version, attempt))
        self._log_waterlevel()

    def _execution_done(self, group: int, member: int, finished: FinishedExecution) -> None:
        self.finished += 1
        state = self._groups[group]
        state.members[member] = finished
        if len(state.members) == self.config.group_size:
            executions = [state.members[m] for m in sorted(state.members)]
            state.processed = self._process(group, executions)
            state.completed_order, self._completed = self._completed, self._completed + 1
            self._store.finish_group(group, time.time(), state.processed.skipped)
            self._event("group_done", group=group, version=state.version,
                        scores=list(state.processed.scores), skipped=state.processed.skipped)
        self._log_waterlevel()

    def _log_waterlevel(self) -> None:
        view = self.view()
        self._event("waterlevel", w=view.waterlevel, capacity=view.rollout_capacity,
                    dispatched=self.dispatched, finished=self.finished)

    # ------------------------------------------------------------------ training side

    def _new_batch(self) -> Batch:
        c = self.config
        self._taken: list[GroupState] = []
        self._trained_by = set()
        return Batch(self.weights.version, c.groups_per_step, self._pack, c.claim_block, c.streaming)

    def _fill_batch(self) -> None:
        if self._applying or not self._batch.room:
            return
        c = self.config
        views = [GroupView(g.index, g.version, g.completed_order) for g in self._groups.values()]
        for index in release(views, self._batch.version, self._batch.room, c.phi, c.mu):
            state = self._groups.pop(index)
            self._batch.add(state.processed.train)
            self._taken.append(state)

    def _feed(self) -> None:
        if self._burst_steps_left == 0:
            return  # at a boundary the policy first says who goes on training
        for cell in self.manager.in_role(CellRole.TRAIN):
            if self._working.get(cell.index):
                continue
            if self._joined.get(cell.index) != self._batch.version:
                self._join(cell)
            for index in self._batch.claim(cell.index):
                micro = self._batch.micro_steps[index]
                self._working[cell.index] = self._working.get(cell.index, 0) + 1
                self._trained_by.add(cell.index)
                then(cell.accumulate(index, micro), self.post,
                     functools.partial(self._micro_done, self._batch, index, cell.index,
                                       time.monotonic()), self._fail)

    def _join(self, cell: Cell) -> None:
        """The cell accumulates for the batch in progress from now on (E5)."""
        self._joined[cell.index] = self._batch.version
        then(cell.join(self.weights), self.post, lambda _: None, self._fail)

    def joined(self, cell: int) -> None:
        """A transfer has ended; a cell that came to train takes part in the batch in progress."""
        role = self.manager.roles[cell]
        if role is CellRole.TRAIN:
            self._joined.pop(cell, None)
            self._event("join", cell=cell, step=self.step, in_progress=len(self._batch.groups))

    def _micro_done(self, batch: Batch, index: int, cell: int, began: float, metrics) -> None:
        self._working[cell] -= 1
        batch.done(index, cell, metrics)
        micro = batch.micro_steps[index]
        self._event("micro_step", cell=cell, step=self.step, index=index, tokens=micro.n_tokens,
                    rows=micro.n_rows, wall_s=round(time.monotonic() - began, 3))

    def _finish_batch(self) -> None:
        """Collects the satellites' gradients, then lets the core step."""
        self._applying = True
        others = [self.manager.cells[i] for i in sorted(self._trained_by) if i != self._core.index]
        partials: list[Partial] = []

        def arrived(partial: Partial | None) -> None:
            if partial is not None:
                partials.append(partial)
            if len(partials) == len(others):
                then(self._core.apply(partials, len(self._batch.micro_steps), self._batch.denominator),
                     self.post, self._updated, self._fail)

        if not others:
            arrived(None)
        for cell in others:
            then(cell.take_gradients(), self.post, arrived, self._fail)

    def _updated(self, update: Update) -> None:
        batch, taken = self._batch, tuple(self._taken)
        self.step += 1
        self._burst_steps_left -= 1
        self.weights = update.weights
        self._store.consume(batch.groups, self.step)
        self._event("step", step=self.step, version=update.weights.version)
        self._batch = self._new_batch()
        self._applying = False
        if self._burst_steps_left == 0:
            for cell in self.manager.in_role(CellRole.ROLLOUT):
                self._publish(cell)
        self._on_step(StepResult(self.step, batch, update, taken, self.dispatched - self.finished,
                                 self.manager.letters))

    def _publish(self, cell: Cell) -> None:
        version, began = self.weights.version, time.monotonic()

        def published(_: None) -> None:
            self._event("publish", version=version, step=self.step, cell=cell.index,
                        wall_s=round(time.monotonic() - began, 3))
        then(cell.publish(self.weights), self.post, published, self._fail)

    @staticmethod
    def _fail(error: BaseException) -> None:
        raise error
