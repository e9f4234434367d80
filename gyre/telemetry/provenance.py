"""Where a run comes from: the code's commit and changes, the installed versions, the machine."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
import time
from typing import Any

_MOST_DIFF_CHARACTERS = 1_000_000


def session() -> dict[str, Any]:
    """Facts about this process as a JSON object."""
    return {
        "time_s": round(time.time(), 3),
        "argv": list(sys.argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "git": git_state(pathlib.Path(__file__).resolve().parents[2]),
        "packages": packages(),
    }


def packages() -> dict[str, str]:
    """Name -> version of every installed distribution, by name."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()
             if d.metadata["Name"]}  # a half-removed distribution has no name
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def git_state(root: pathlib.Path) -> dict[str, Any] | None:
    """Commit and uncommitted changes of the work tree that holds `root`.

    Args:
      root: the folder that has the `gyre` package.

    Returns:
      `commit`, `dirty_diff` (text; "" when clean), `untracked` (paths), or None where git does not
      track this copy of gyre (an installed one).
    """
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True,
                              timeout=30, text=True, errors="replace").stdout

    try:
        git("ls-files", "--error-unmatch", "gyre/__init__.py")
        diff = git("diff", "HEAD")
        if len(diff) > _MOST_DIFF_CHARACTERS:
            diff = (diff[:_MOST_DIFF_CHARACTERS]
                    + f"\n[cut: {len(diff) - _MOST_DIFF_CHARACTERS} more characters]\n")
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty_diff": diff,
                "untracked": git("ls-files", "--others", "--exclude-standard").splitlines()}
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or it hangs
        return None
