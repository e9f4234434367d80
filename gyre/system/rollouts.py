"""The rollout side of a run: gateway and runner on one asyncio thread.

An execution is opened at the gateway (its secret key), run by the runner, closed at the gateway (its
records) and written to the store, in this order; only then does the training loop hear of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from gyre.base import ids
from gyre.base.protocols import ExecutionResult, Task
from gyre.gateway.server import Gateway
from gyre.rollout.runner import Runner
from gyre.training.processor import FinishedExecution
from gyre.trajectory.store import Store

Event = Callable[..., None]


@dataclasses.dataclass(frozen=True)
class GroupStart:
    """A group to run: its index, task, attempt (after a restart) and the version it starts at."""

    index: int
    task: Task
    version: int
    attempt: int = 0


def execution_seed(run_seed: int, execution_id: str) -> int:
    """The sampling seed of an execution: 31 bits that differ between siblings and runs."""
    digest = hashlib.blake2b(f"{run_seed}/{execution_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


class Rollouts:
    """Runs groups of executions. Methods are thread-safe.

    Args:
      gateway, runner, store: what an execution passes through.
      seed: of the run.
      group_size: N.
      temperature: of training executions.
      max_completion_tokens: most tokens of one call.
      concurrency: executions under way at a time; more wait in dispatch order.
      event: the event log.
      on_execution: called on the asyncio thread as (group, member, FinishedExecution).
      on_error: called with what an execution raised; the run cannot go on.
    """

    def __init__(self, gateway: Gateway, runner: Runner, store: Store, *, seed: int, group_size: int,
                 temperature: float, max_completion_tokens: int, concurrency: int, event: Event,
                 on_execution: Callable[[int, int, FinishedExecution], None],
                 on_error: Callable[[BaseException], None]):
        self._gateway, self._runner, self._store = gateway, runner, store
        self._seed, self._group_size, self._temperature = seed, group_size, temperature
        self._max_completion_tokens, self._event = max_completion_tokens, event
        self._on_execution, self._on_error = on_execution, on_error
        self._slots = asyncio.Semaphore(concurrency)
        self._tasks: set[asyncio.Task] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self.base_url = ""

    def start(self) -> str:
        """Starts the thread and the gateway. Returns the base URL."""
        self._thread.start()
        self.base_url = asyncio.run_coroutine_threadsafe(self._gateway.start(), self._loop).result()
        return self.base_url

    def dispatch(self, group: GroupStart) -> None:
        """Starts the N executions of a group, as far as the concurrency allows."""
        self._loop.call_soon_threadsafe(self._start_group, group)

    def evaluate(self, tasks: Sequence[Task], label: str,
                 temperature: float) -> Future[list[ExecutionResult]]:
        """Runs each task once, outside of training; the results come in order."""
        async def run_all() -> list[ExecutionResult]:
            executions = [self._loop.create_task(self._in_slot(task, f"eval-{label}-{i}", temperature))
                          for i, task in enumerate(tasks)]
            self._tasks.update(executions)
            try:
                return [finished.result for finished in await asyncio.gather(*executions)]
            finally:
                self._tasks.difference_update(executions)
        return asyncio.run_coroutine_threadsafe(run_all(), self._loop)

    def stop(self) -> None:
        """Kills all harness processes and stops the gateway; unfinished executions leave no trace."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    # ------------------------------------------------------------------ on the asyncio thread

    def _start_group(self, group: GroupStart) -> None:
        for member in range(self._group_size):
            task = self._loop.create_task(self._member(group, member))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._on_error(task.exception())

    async def _member(self, group: GroupStart, member: int) -> None:
        execution_id = ids.execution_id(group.index, member, group.attempt)
        finished = await self._in_slot(group.task, execution_id, self._temperature)
        self._store.add_execution(group.index, member, finished.result, list(finished.records))
        self._on_execution(group.index, member, finished)

    async def _in_slot(self, task: Task, execution_id: str, temperature: float) -> FinishedExecution:
        async with self._slots:
            key = self._gateway.open_execution(
                execution_id, seed=execution_seed(self._seed, execution_id), temperature=temperature,
                max_completion_tokens=self._max_completion_tokens)
            with contextlib.ExitStack() as stack:
                stack.callback(functools.partial(self._gateway.close_execution, execution_id))
                result = await self._runner.run(task, execution_id, self.base_url, key)
                stack.pop_all()
            return FinishedExecution(result, tuple(self._gateway.close_execution(execution_id)))

    async def _stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._gateway.stop()
