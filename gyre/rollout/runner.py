"""Runs one execution from sandbox to grade, and gives it exactly one outcome.

Knows a base URL and a key, not what answers there. Invariants: no process of the harness survives
`run`, also when it is cancelled; what the workspace holds is graded after a time-out or a crash,
too; a grader's failure is never a score. Owns no event loop and no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from gyre.base.enums import Outcome, ScoreStatus
from gyre.base.errors import ConfigError
from gyre.base.protocols import ExecutionResult, Score, Task
from gyre.rollout.graders import GRADER_ERRORS, Grader, checked_score, failed_score
from gyre.rollout.harnesses import HarnessSpec
from gyre.rollout.sandboxes import Sandbox, SandboxError, SandboxFactory

_LOG_TAIL_CHARS = 4000


@dataclasses.dataclass(frozen=True)
class RunnerLimits:
    """Limits of executions.

    Attributes:
      harness_timeout_s: from the harness' start; then it is stopped and its workspace graded.
      overall_timeout_s: from the sandbox' start to the grade; longer than harness_timeout_s.
      term_grace_s: between SIGTERM and SIGKILL.
      concurrent_starts: sandboxes that come up at the same time; the rest wait, at no cost to their
        time limits.
      start_retries: more attempts when a sandbox does not come up.
      grader_retries: more attempts when the grader fails.
      retry_delay_s: pause before either retry, doubled each time.
    """

    harness_timeout_s: float = 120.0
    overall_timeout_s: float = 180.0
    term_grace_s: float = 1.0
    concurrent_starts: int = 4
    start_retries: int = 1
    grader_retries: int = 2
    retry_delay_s: float = 0.1

    def __post_init__(self):
        if not 0 < self.harness_timeout_s < self.overall_timeout_s:
            raise ConfigError(
                f"need 0 < harness_timeout_s < overall_timeout_s, got {self.harness_timeout_s} and "
                f"{self.overall_timeout_s}; what is left of the overall time is for grading")
        if self.concurrent_starts < 1:
            raise ConfigError(f"concurrent_starts must be at least 1, got {self.concurrent_starts}")


@dataclasses.dataclass
class _Progress:
    """What is known so far of a running execution; read when a time limit strikes."""

    sandbox: Sandbox | None = None
    outcome: Outcome | None = None
    exit_code: int | None = None
    score: Score | None = None


class Runner:
    """Runs executions of one kind of harness, any number at a time, in the caller's event loop.

    Args:
      harness: what to start.
      sandboxes: where.
      grader: scores a kept workspace; called in a worker thread.
      limits: see RunnerLimits.
      on_event: called as on_event(kind, **fields) with kinds start, finish, grade, retry; `fields`
        are JSON values and always include `execution`.
      keep_workspaces: leave the folders (workspace, harness.log) for people to look at.
      clock: seconds since the epoch.
    """

    def __init__(self, harness: HarnessSpec, sandboxes: SandboxFactory, grader: Grader,
                 limits: RunnerLimits | None = None,
                 on_event: Callable[..., None] = lambda kind, **fields: None,
                 keep_workspaces: bool = False, clock: Callable[[], float] = time.time):
        self.limits = limits or RunnerLimits()
        self._harness = harness
        self._sandboxes = sandboxes
        self._grader = grader
        self._on_event = on_event
        self._keep = keep_workspaces
        self._clock = clock
        self._starting = asyncio.Semaphore(self.limits.concurrent_starts)

    async def run(self, task: Task, execution_id: str, base_url: str, key: str) -> ExecutionResult:
        """Runs one execution. Cancelling it kills its processes and removes its folder.

        Args:
          task: what to do and how it is graded.
          execution_id: unique among the running ones; a plain file name.
          base_url: where the model answers, ending in /v1.
          key: the execution's secret.

        Returns:
          The result, with exactly one outcome.

        Raises:
          ConfigError: the task's files or the execution id cannot be used.
        """
        progress = _Progress()
        await self._starting.acquire()
        release = _once(self._starting.release)
        started_s = self._clock()
        try:
            async with asyncio.timeout(self.limits.overall_timeout_s):
                await self._run(progress, task, execution_id, base_url, key, release)
        except TimeoutError:
            progress.outcome = Outcome.OVERALL_TIMEOUT
            progress.score = failed_score("not graded: the overall time limit of "
                                          f"{self.limits.overall_timeout_s:g} s passed")
        finally:
            release()
            log_tail = await self._close(progress.sandbox)
        result = ExecutionResult(
            execution_id=execution_id, task_id=task.task_id, outcome=progress.outcome,
            score=progress.score, started_s=started_s, finished_s=self._clock(),
            exit_code=progress.exit_code, log_tail=log_tail)
        self._on_event("finish", execution=execution_id, outcome=result.outcome.value,
                       exit_code=result.exit_code, wall_s=result.finished_s - started_s)
        return result

    async def _close(self, sandbox: Sandbox | None) -> str:
        """Closes the sandbox, whatever is cancelled meanwhile. Returns the end of its log."""
        if sandbox is None:
            return ""
        closing = asyncio.ensure_future(self._stop_and_close(sandbox))
        try:
            return await asyncio.shield(closing)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError, OSError):
                await closing
            raise

    async def _stop_and_close(self, sandbox: Sandbox) -> str:
        await sandbox.stop(0.0)
        log_tail = sandbox.log_tail(_LOG_TAIL_CHARS)
        await sandbox.close(self._keep)
        return log_tail

    async def _run(self, progress: _Progress, task: Task, execution_id: str, base_url: str,
                   key: str, release: Callable[[], None]) -> None:
        limits = self.limits
        for attempt in range(limits.start_retries + 1):
            try:
                await self._start(progress, task, execution_id, base_url, key)
                release()
                progress.outcome, progress.exit_code = await self._await_harness(progress.sandbox)
                break
            except SandboxError as error:
                if attempt == limits.start_retries:
                    progress.outcome = Outcome.INFRA_FAILURE
                    progress.score = Score(0.0, ScoreStatus.PLACEHOLDER, str(error))
                    return
                self._on_event("retry", execution=execution_id, what="sandbox", error=str(error))
                await self._close(progress.sandbox)
                await asyncio.sleep(limits.retry_delay_s * 2 ** attempt)
        score = await self._grade(task, execution_id, progress.sandbox)
        if score.status is not ScoreStatus.OK:
            progress.outcome = Outcome.UNGRADED
        progress.score = score
        self._on_event("grade", execution=execution_id, status=score.status.value,
                       score=None if math.isnan(score.value) else score.value)

    async def _start(self, progress: _Progress, task: Task, execution_id: str, base_url: str,
                     key: str) -> None:
        sandbox = progress.sandbox = self._sandboxes.create(execution_id)
        await sandbox.open(task.instruction, task.files)
        launch = self._harness.command(task, sandbox.workspace, sandbox.instruction_file)
        url = urllib.parse.urlsplit(base_url)
        port = url.port or {"https": 443, "http": 80}.get(url.scheme)
        env = _model_variables(base_url, key)
        await sandbox.start(launch, env, port)
        self._on_event("start", execution=execution_id, task=task.task_id)

    async def _await_harness(self, sandbox: Sandbox) -> tuple[Outcome, int | None]:
        """Waits for the harness' end or its time limit. Afterwards nothing of it runs."""
        try:
            async with asyncio.timeout(self.limits.harness_timeout_s):
                code = await sandbox.wait()
        except TimeoutError:
            await sandbox.stop(self.limits.term_grace_s)
            return Outcome.HARNESS_TIMEOUT, None
        await sandbox.stop(0.0)  # what it left running must not change the workspace any more
        if code == 0:
            return Outcome.COMPLETED, code
        if code in self._harness.budget_exit_codes:
            return Outcome.HARNESS_TIMEOUT, code
        return Outcome.HARNESS_CRASHED, code

    async def _grade(self, task: Task, execution_id: str, sandbox: Sandbox) -> Score:
        attempt = 0
        while True:
            try:
                score = checked_score(
                    await asyncio.to_thread(self._grader, task, sandbox.workspace))
            except GRADER_ERRORS as error:
                score = failed_score(f"{type(error).__name__}: {error}")
            if score.status is ScoreStatus.OK or attempt == self.limits.grader_retries:
                return score
            self._on_event("retry", execution=execution_id, what="grader", error=score.detail)
            await asyncio.sleep(self.limits.retry_delay_s * 2 ** attempt)
            attempt += 1


def _once(function: Callable[[], Any]) -> Callable[[], None]:
    """A function that calls `function` the first time only."""
    pending = [function]

    def call() -> None:
        if pending:
            pending.pop()()

    return call


def _model_variables(base_url: str, key: str) -> dict[str, str]:
    """Where the model is, in the variables that each vendor's clients read."""
    root = base_url.removesuffix("/v1")
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": key,
            "GOOGLE_GEMINI_BASE_URL": root, "GEMINI_API_KEY": key}
