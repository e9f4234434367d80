"""JSON-lines files that stay valid when the process is killed.

A line is written in one call and flushed, so that a kill can tear only the last one. Readers skip a
torn last line; a writer cuts it off before it appends. A bad line anywhere else is corruption and
is refused.
"""

from __future__ import annotations

import enum
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gyre.base.errors import WorkdirError


def plain(value: Any) -> Any:
    """Returns `value` as JSON knows it.

    Numpy scalars and arrays become Python numbers and lists, enums their values, tuples and sets
    lists, keys strings. NaN and infinities become None: JSON has neither, and "no measurement" must
    not break other readers of the file.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(plain(k)): plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return [plain(v) for v in sorted(value)]
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return plain(value.tolist())
    raise TypeError(f"cannot write a {type(value).__name__} as JSON: {value!r}; "
                    "convert it to numbers, text, lists or dicts first")


def line(row: Mapping[str, Any]) -> str:
    """One row as a line, newline included."""
    return json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n"


def cut_torn_line(path: pathlib.Path) -> None:
    """Cuts off what follows the file's last newline. Does nothing when the file does not exist."""
    if not path.exists():
        return
    with path.open("r+b") as f:
        end = size = f.seek(0, os.SEEK_END)
        while end > 0:  # a torn line may be longer than one block
            start = max(0, end - 65536)
            f.seek(start)
            newline = f.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end != size:
            f.truncate(end)


def append(path: pathlib.Path, row: Mapping[str, Any]) -> None:
    """Appends one row to a file that this process alone writes."""
    cut_torn_line(path)
    with path.open("a", encoding="utf-8") as f:
        f.write(line(row))


def read(path: pathlib.Path,
         wanted: Callable[[str], bool] | None = None) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file; a missing file has none.

    Args:
      path: the file.
      wanted: tells from the raw line whether to parse it; for files too large to parse as a whole.

    Raises:
      WorkdirError: a line before the last is not a JSON object.
    """
    if not path.exists():
        return
    bad: tuple[int, str] | None = None
    with path.open(encoding="utf-8", errors="replace") as f:
        for number, text in enumerate(f, 1):
            if bad is not None:
                raise WorkdirError(f"{path} line {bad[0]} is not a JSON object: {bad[1][:80]!r}; "
                                   "the file is corrupt, move it away or restore it")
            if wanted is not None and not wanted(text):
                continue
            row = _parse(text)
            if row is None:
                bad = (number, text)
            else:
                yield row


def _parse(text: str) -> dict[str, Any] | None:
    try:
        row = json.loads(text)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def keep_rows(path: pathlib.Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Drops rows that `keep` refuses, and a torn last line. Returns how many rows it dropped.

    The file is replaced in one step; a kill leaves the old or the new one.
    """
    if not path.exists():
        return 0
    rows = list(read(path))
    kept = [row for row in rows if keep(row)]
    write_atomically(path, "".join(line(row) for row in kept))
    return len(rows) - len(kept)


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Replaces a file in one step: after a kill it has the old text or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
