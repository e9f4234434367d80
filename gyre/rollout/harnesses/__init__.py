"""How to start a harness. A harness is a program of its own; gyre only knows its command line.

Adding one: register a function that returns a HarnessSpec, or use "command" with its argv.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gyre.base.errors import ConfigError
from gyre.base.protocols import Task
from gyre.base.registry import Registry
from gyre.rollout.harnesses.reference import BUDGET_EXIT, Settings
from gyre.rollout.sandboxes import Launch


@dataclasses.dataclass(frozen=True)
class HarnessSpec:
    """A kind of harness.

    Attributes:
      name: for people and reports.
      command: (task, workspace, instruction file) -> what to start. The runner adds
        OPENAI_BASE_URL, OPENAI_API_KEY and the like for other vendors to its environment.
      budget_exit_codes: exit codes that mean "my own time, turn or token budget ran out".
    """

    name: str
    command: Callable[[Task, Path, Path], Launch]
    budget_exit_codes: frozenset[int] = frozenset()


HARNESSES: Registry[Callable[..., HarnessSpec]] = Registry("harness")


@HARNESSES.register("reference")
def reference_harness(**settings) -> HarnessSpec:
    """The reference harness.

    Args:
      **settings: fields of `reference.Settings` (mode, max_completion_tokens, ...).

    Raises:
      ConfigError: unknown setting, or a value of another type than its default's.
    """
    known = {name: value for name, value in vars(Settings).items() if not name.startswith("_")}
    env = {}
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"unknown setting {name!r} of the reference harness; available: "
                              f"{', '.join(sorted(known))}")
        wanted = type(known[name])
        if not isinstance(value, (int, float) if wanted is float else wanted):
            raise ConfigError(f"setting {name!r} of the reference harness must be "
                              f"{wanted.__name__}, got {value!r}")
        env["GYRE_HARNESS_" + name.upper()] = str(int(value) if wanted is int else value)
    if settings.get("mode", "text") not in ("text", "tools"):
        raise ConfigError(f"mode must be text or tools, got {settings['mode']!r}")
    script = str(Path(__file__).with_name("reference.py"))

    def command(task: Task, workspace: Path, instruction_file: Path) -> Launch:
        del task, workspace
        return Launch((script,), {**env, "GYRE_HARNESS_INSTRUCTION_FILE": str(instruction_file)},
                      python_script=True)

    return HarnessSpec("reference", command, frozenset({BUDGET_EXIT}))


@HARNESSES.register("command")
def command_harness(argv: Sequence[str], env: Mapping[str, str] | None = None,
                    budget_exit_codes: Sequence[int] = ()) -> HarnessSpec:
    """Any program as a harness.

    Args:
      argv: program and arguments; "{instruction}", "{instruction_file}" and "{workspace}" are
        replaced inside each argument.
      env: more environment variables; values are replaced alike.
      budget_exit_codes: see HarnessSpec.
    """
    if not argv:
        raise ConfigError("argv is empty; it needs at least the program's path")

    def command(task: Task, workspace: Path, instruction_file: Path) -> Launch:
        fields = {"{instruction}": task.instruction, "{workspace}": str(workspace),
                  "{instruction_file}": str(instruction_file)}

        def fill(text: str) -> str:
            for name, value in fields.items():
                text = text.replace(name, value)
            return text

        return Launch(tuple(fill(part) for part in argv),
                      {name: fill(value) for name, value in (env or {}).items()},
                      system_programs=True)

    return HarnessSpec(Path(argv[0]).name, command, frozenset(budget_exit_codes))
