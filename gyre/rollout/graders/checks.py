"""Grades a workspace by declarative checks: the score is the fraction of sub-goals that hold.

A task's payload has `checks`, one object per sub-goal, each with any of:
  folders: paths that must be folders
  files: path -> text that must be its content (line ends and trailing blanks do not count)
  first_words: path -> first word of its content, with at most one word (a file name) behind it
  absent: paths at which nothing may be
  intact: path -> text, as `files`; what an honest solution leaves alone
Invariant: nothing outside the workspace is read. No path component may be a symbolic link, only
regular files are opened, and only their first 64 KiB are read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from gyre.base.enums import ScoreStatus
from gyre.base.protocols import Score, Task
from gyre.rollout.graders import GraderError, failed_score

_MAX_READ_BYTES = 64 << 10
_CONDITIONS = ("folders", "files", "first_words", "absent")


def grade(task: Task, workspace: Path) -> Score:
    """Scores what a workspace holds.

    Args:
      task: its payload has `checks`, a non-empty list.
      workspace: the kept folder.

    Returns:
      Score in [0, 1] with one line per sub-goal in `detail`; status GRADER_FAILED when the payload
      is malformed or the workspace cannot be read.
    """
    try:
        checks = task.payload.get("checks")
        if not isinstance(checks, (list, tuple)) or not checks:
            raise GraderError(f"payload of task {task.task_id} has no list of checks: {checks!r}")
        if not os.path.isdir(workspace):
            raise GraderError(f"there is no workspace at {workspace}")
        problems = [_first_problem(check, workspace) for check in checks]
    except (GraderError, OSError) as error:
        return failed_score(f"{type(error).__name__}: {error}")
    lines = [f"{number}: " + ("ok" if problem is None else f"failed, {problem}")
             for number, problem in enumerate(problems, 1)]
    value = sum(problem is None for problem in problems) / len(problems)
    return Score(value, ScoreStatus.OK, "\n".join(lines))


def _first_problem(check: Mapping[str, Any], workspace: Path) -> str | None:
    if not any(check.get(field) for field in _CONDITIONS):
        raise GraderError(f"a check without conditions holds trivially: {check!r}")
    for path in check.get("folders", ()):
        found = _kind(workspace, path)
        if found != "folder":
            return f"{path} is {found}, not a folder"
    for path in check.get("absent", ()):
        found = _kind(workspace, path)
        if found != "missing":
            return f"{path} is still there ({found})"
    for path, text in check.get("files", {}).items():
        found = _read(workspace, path)
        if _normal(found) != _normal(text):
            return f"{path} {_show(found)}, expected {text[:40]!r}"
    for path, word in check.get("first_words", {}).items():
        found = _read(workspace, path)
        words = (found or "").split()
        if words[:1] != [word] or len(words) > 2:
            return f"{path} {_show(found)}, expected {word!r}"
    for path, text in check.get("intact", {}).items():
        found = _read(workspace, path)
        if _normal(found) != _normal(text):
            return f"{path} should be untouched, but {_show(found)}"
    return None


def _normal(text: str | None) -> str | None:
    if text is None:
        return None
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


def _show(text: str | None) -> str:
    return "is no regular file" if text is None else f"holds {text[:40]!r}"


def _kind(workspace: Path, path: str) -> str:
    """missing, folder, file, or link (also when a folder on the way is one) or special."""
    parts = PurePosixPath(path).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise GraderError(f"a check's path must stay in the workspace, got {path!r}")
    at, mode = str(workspace), 0
    for number, part in enumerate(parts, 1):
        at = os.path.join(at, part)
        try:
            mode = os.lstat(at).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return "missing"
        if stat.S_ISLNK(mode):
            return "link"
        if number < len(parts) and not stat.S_ISDIR(mode):
            return "missing"
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "special"


def _read(workspace: Path, path: str) -> str | None:
    """Text of a regular file, or None if it is anything else."""
    if _kind(workspace, path) != "file":
        return None
    fd = os.open(workspace / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        return file.read(_MAX_READ_BYTES).decode("utf-8", "replace")
