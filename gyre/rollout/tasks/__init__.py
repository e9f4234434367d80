"""Where tasks come from. A source is an endless, seeded, random-access sequence and has its grader."""

from __future__ import annotations

from collections.abc import Callable

from gyre.base.protocols import TaskSource
from gyre.base.registry import Registry
from gyre.rollout.tasks.letters import Letters
from gyre.rollout.tasks.shell_jobs import ShellJobs

TASKS: Registry[Callable[..., TaskSource]] = Registry("task source")

TASKS.register("shell_jobs")(ShellJobs)
TASKS.register("letters")(Letters)
