"""Where harness processes live: what to start, and what a sandbox promises.

A sandbox owns one execution's folder and every process started in it. It is not told what a model,
a task's grader or a gateway is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Launch:
    """What to start in a sandbox.

    Attributes:
      argv: the program and its arguments.
      env: environment variables, beside those that the sandbox sets itself (PATH, HOME, TMPDIR).
      python_script: argv[0] is a standard-library-only Python file; it runs in the interpreter that
        sets up the sandbox, which saves a second start.
      system_programs: it may run any installed program, not only the tools on its PATH.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    python_script: bool = False
    system_programs: bool = False

    def __post_init__(self):
        if not self.argv:
            raise ValueError("Launch.argv is empty; it needs at least the program's path")


class SandboxError(Exception):
    """The sandbox could not come up: there is nothing to grade."""


class Sandbox(Protocol):
    """One execution's place to run. Methods are called from one event loop, in this order."""

    workspace: Path  # the harness' working folder, and what is graded
    instruction_file: Path  # readable by the harness
    isolation: str  # what confines the harness, for people and reports

    async def open(self, instruction: str, files: Mapping[str, str]) -> None:
        """Makes the workspace. Raises SandboxError, or ConfigError on a path outside of it."""

    async def start(self, what: Launch, env: Mapping[str, str], tcp_port: int | None) -> None:
        """Starts the harness. `tcp_port` is the gateway's. Raises SandboxError."""

    async def wait(self) -> int:
        """Exit code, negative for a signal. Raises SandboxError if the harness never started."""

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`, for all processes; returns when none is left."""

    def log_tail(self, max_chars: int) -> str:
        """The end of what the harness wrote to stdout and stderr."""

    async def close(self, keep: bool) -> None:
        """Kills what still runs and, unless `keep`, removes the folder. May be called twice."""


class SandboxFactory(Protocol):
    """Makes sandboxes; shared by all executions of a run."""

    def create(self, execution_id: str) -> Sandbox:
        """A sandbox that is not open yet."""
