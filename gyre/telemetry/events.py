"""The event log of a run: what happened when, one JSON object per line.

Every line starts with `time_s` (seconds since the epoch) and `kind`, in this order, so that a
reader can choose lines without parsing them (`read_events`).
"""

from __future__ import annotations

import pathlib
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from gyre.telemetry import jsonl

_HEAD = re.compile(r'\{"time_s": [^,]+, "kind": "([^"]*)"')


class EventLog:
    """Appends events to a file. Thread-safe; use as a context manager or call `close`.

    Args:
      path: the file; created, or continued after cutting off a torn last line.
      clock: gives seconds since the epoch.
    """

    def __init__(self, path: pathlib.Path, clock: Callable[[], float] = time.time):
        path = pathlib.Path(path)
        jsonl.cut_torn_line(path)
        self._clock, self._lock = clock, threading.Lock()
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **fields: Any) -> None:
        """Writes one event and flushes it. After `close` it does nothing.

        Args:
          kind: what happened.
          **fields: values that `jsonl.plain` can write; not `time_s`.
        """
        if "time_s" in fields:
            raise ValueError(f"event {kind!r} has a field time_s, which the log itself sets; "
                             "rename the field")
        with self._lock:
            if self._file.closed:  # a thread that outlives the run by a moment is no error
                return
            # The time is read under the lock, so that times never go back within a file.
            time_s = round(self._clock(), 4)
            self._file.write(jsonl.line({"time_s": time_s, "kind": kind, **fields}))
            self._file.flush()

    def close(self) -> None:
        """Closes the file. May be called twice."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_events(path: pathlib.Path,
                kinds: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yields a log's events in the order they were written.

    Args:
      path: the log; a missing one has no events.
      kinds: only these are parsed and given; None gives all.

    Raises:
      WorkdirError: a chosen line before the last is not a JSON object.
    """
    def wanted(text: str) -> bool:
        head = _HEAD.match(text)
        return head is None or head[1] in kinds

    return jsonl.read(pathlib.Path(path), wanted if kinds is not None else None)
