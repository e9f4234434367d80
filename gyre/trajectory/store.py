"""The run's trajectories on disk: groups, executions and calls in one SQLite file.

Invariants:
- every change is one transaction: after a kill at any moment the file is valid and holds whole
  executions only;
- a group is consumed by at most one step; a rollback to a checkpoint makes it available again;
- a group that was dispatched is never forgotten: what was under way when the run ended is
  dispatched again under the next attempt;
- a file that gyre did not write is refused and not touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence

from gyre.base.errors import WorkdirError
from gyre.base.protocols import ExecutionResult
from gyre.trajectory.record import CallRecord
from gyre.trajectory.store_rows import (
    APPLICATION_ID,
    SCHEMA,
    SCHEMA_VERSION,
    call_row,
    marks,
    read_record,
    read_result,
)


@dataclasses.dataclass(frozen=True)
class StoredGroup:
    """A group's row. `finished_s` and `consumed_step` are None until then; `skipped` is the reason
    why it gave no gradient, or ""."""

    group_index: int
    task_id: str
    kind: str
    version_dispatched: int
    attempt: int
    finished_s: float | None
    consumed_step: int | None
    skipped: str


@dataclasses.dataclass(frozen=True)
class StoredExecution:
    """An execution with its calls in call order."""

    result: ExecutionResult
    member: int
    records: list[CallRecord]


class Store:
    """The file. Methods are thread-safe; one process writes at a time.

    Args:
      path: the file; made when it does not exist.
      read_only: for reports: the file must exist, and what changes it raises.

    Raises:
      WorkdirError: no such place, not SQLite, corrupt, another program's, another schema version.
    """

    def __init__(self, path: pathlib.Path | str, read_only: bool = False):
        self.path = pathlib.Path(path)
        self._lock = threading.RLock()
        mode = "ro" if read_only else "rwc"
        try:
            self._db = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?mode={mode}", uri=True, timeout=30.0,
                check_same_thread=False, isolation_level=None)
        except sqlite3.Error as error:
            raise WorkdirError(f"cannot open the trajectory store {self.path}: {error}") from error
        with contextlib.ExitStack() as stack:
            stack.callback(self._db.close)
            try:
                self._open(read_only)
            except sqlite3.Error as error:
                raise WorkdirError(f"{self.path} is not a usable trajectory store ({error}); move "
                                   "it away or choose another workdir") from error
            stack.pop_all()

    def _open(self, read_only: bool) -> None:
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA foreign_keys = ON")
        if self._is_blank() and not read_only:  # also after a kill before the schema was committed
            self._db.execute("PRAGMA journal_mode = WAL")
            with self._transaction():
                if self._is_blank():
                    for statement in SCHEMA:
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        application, version = self._pragma("application_id"), self._pragma("user_version")
        if application != APPLICATION_ID:
            raise WorkdirError(f"{self.path} was not written by gyre (application id "
                               f"{application}); it is left as it is; choose another workdir")
        if version != SCHEMA_VERSION:
            raise WorkdirError(f"{self.path} has schema version {version}, this gyre reads "
                               f"{SCHEMA_VERSION}; use the version of gyre that wrote it")
        # A kill of the process loses nothing; a power cut may lose the newest transactions.
        self._db.execute("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------ writing

    def add_group(self, group_index: int, task_id: str, kind: str, version: int, attempt: int,
                  time_s: float) -> None:
        """Records a dispatch.

        Args:
          group_index: its place in the data order.
          task_id, kind: of its task.
          version: of the weights that start it.
          attempt: 0, or one more than the attempt that was dropped (`drop`, `drop_unfinished`).
          time_s: seconds since the epoch.

        Raises:
          ValueError: the group is there and this is not its next attempt.
        """
        with self._transaction():
            row = self._db.execute(
                """SELECT attempt, finished_s, (SELECT count(*) FROM executions e
                   WHERE e.group_index = g.group_index) AS n FROM groups g WHERE group_index = ?""",
                (group_index,)).fetchone()
            if row and (row["finished_s"] is not None or row["n"] or attempt != row["attempt"] + 1):
                raise ValueError(
                    f"group {group_index} is in the store under attempt {row['attempt']} with "
                    f"{row['n']} executions; got attempt {attempt}. Drop it, then add the next one")
            self._db.execute(
                """INSERT OR REPLACE INTO groups(group_index, task_id, kind, version_dispatched,
                   attempt, dispatched_s) VALUES (?, ?, ?, ?, ?, ?)""",
                (group_index, task_id, kind, version, attempt, time_s))

    def add_execution(self, group_index: int, member: int, result: ExecutionResult,
                      records: Sequence[CallRecord]) -> None:
        """Records an execution that has ended, with all its calls, in one transaction.

        Raises:
          ValueError: an unknown or finished group, another task, or a member, execution or call
            that is there already.
        """
        with self._transaction():
            group = self._group(group_index)
            if group.finished_s is not None or group.task_id != result.task_id:
                raise ValueError(
                    f"execution {result.execution_id!r} of task {result.task_id!r} cannot join "
                    f"group {group_index} of task {group.task_id!r}, finished: {group.finished_s}")
            score = None if math.isnan(result.score.value) else result.score.value
            try:
                self._db.execute(
                    f"INSERT INTO executions VALUES ({marks(11)})",
                    (result.execution_id, group_index, member, result.outcome.value, score,
                     result.score.status.value, result.score.detail, result.started_s,
                     result.finished_s, result.exit_code, result.log_tail))
                self._db.executemany(
                    f"INSERT INTO calls VALUES ({marks(18)})",
                    [call_row(r, result.execution_id, i) for i, r in enumerate(records)])
            except sqlite3.IntegrityError as error:
                raise ValueError(f"execution {result.execution_id!r} (group {group_index}, member "
                                 f"{member}) or one of its calls is stored already: {error}"
                                 ) from error

    def finish_group(self, group_index: int, time_s: float, skipped: str = "") -> None:
        """Says that all members are in. `skipped`: why the group gives no gradient, or "".

        Raises:
          ValueError: the group is unknown or finished.
        """
        with self._transaction():
            if self._group(group_index).finished_s is not None:
                raise ValueError(f"group {group_index} is finished already")
            self._db.execute(
                """UPDATE groups SET finished_s = ?, skipped = ?, finished_order =
                   (SELECT coalesce(max(finished_order), 0) + 1 FROM groups)
                   WHERE group_index = ?""", (time_s, skipped or None, group_index))

    def consume(self, group_indices: Sequence[int], step: int) -> None:
        """Says that update number `step` consumed these groups; all of them or none.

        Raises:
          ValueError: a group is unknown, unfinished, consumed or named twice; nothing changes then.
        """
        with self._transaction():
            for index in group_indices:
                group = self._group(index)
                if group.finished_s is None or group.consumed_step is not None:
                    raise ValueError(f"step {step} cannot consume group {index}: finished "
                                     f"{group.finished_s}, consumed by step {group.consumed_step}")
                self._db.execute("UPDATE groups SET consumed_step = ? WHERE group_index = ?",
                                 (step, index))

    def rollback_consumption(self, after_step: int) -> list[int]:
        """Makes what steps later than `after_step` consumed available again; returns the groups."""
        with self._transaction():
            rows = self._db.execute(
                "SELECT group_index FROM groups WHERE consumed_step > ? ORDER BY group_index",
                (after_step,)).fetchall()
            self._db.execute("UPDATE groups SET consumed_step = NULL WHERE consumed_step > ?",
                             (after_step,))
            return [row["group_index"] for row in rows]

    def drop(self, group_index: int) -> tuple[int, int]:
        """Removes a group's executions; it counts as in flight until its next attempt is added.

        Returns:
          (group index, attempt that was dropped).

        Raises:
          ValueError: the group is unknown or consumed.
        """
        with self._transaction():
            group = self._group(group_index)
            if group.consumed_step is not None:
                raise ValueError(f"group {group_index} was consumed by step {group.consumed_step}; "
                                 "roll that back first")
            self._db.execute("DELETE FROM executions WHERE group_index = ?", (group_index,))
            self._db.execute(
                """UPDATE groups SET finished_s = NULL, finished_order = NULL, skipped = NULL
                   WHERE group_index = ?""", (group_index,))
            return group_index, group.attempt

    def drop_unfinished(self) -> list[tuple[int, int]]:
        """Drops all groups that were in flight; returns their (index, attempt) by index."""
        with self._transaction():
            return [self.drop(g.group_index) for g in self.groups() if g.finished_s is None]

    # ------------------------------------------------------------------ reading

    def groups(self) -> list[StoredGroup]:
        """All groups by index."""
        return self._groups("ORDER BY group_index")

    def unconsumed(self) -> list[StoredGroup]:
        """Finished groups that no step has consumed, in completion order."""
        return self._groups("WHERE finished_s IS NOT NULL AND consumed_step IS NULL "
                            "ORDER BY finished_order")

    def next_group_index(self) -> int:
        """The first index that was never dispatched."""
        with self._lock:
            return self._db.execute(
                "SELECT coalesce(max(group_index), -1) + 1 FROM groups").fetchone()[0]

    def consumption_counts(self) -> dict[int, int]:
        """Group index -> updates of the present history that consumed it: 0 or 1."""
        return {g.group_index: int(g.consumed_step is not None) for g in self.groups()}

    def executions(self, group_index: int) -> list[StoredExecution]:
        """A group's executions in member order, with their calls.

        Raises:
          ValueError: the group is unknown.
        """
        with self._lock:
            task_id = self._group(group_index).task_id
            rows = self._db.execute(
                "SELECT * FROM executions WHERE group_index = ? ORDER BY member",
                (group_index,)).fetchall()
            return [StoredExecution(read_result(row, task_id), row["member"],
                                    self.records(row["execution_id"])) for row in rows]

    def records(self, execution_id: str) -> list[CallRecord]:
        """An execution's calls in call order; [] when it has none or is unknown."""
        with self._lock:
            rows = self._db.execute("SELECT * FROM calls WHERE execution_id = ? ORDER BY ordinal",
                                    (execution_id,)).fetchall()
        return [read_record(row) for row in rows]

    # ------------------------------------------------------------------ internals

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """One transaction; inside another one it is part of that."""
        with self._lock:
            if self._db.in_transaction:
                yield
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite itself ends it on some errors
                    self._db.execute("ROLLBACK")
                raise

    def _pragma(self, name: str) -> int:
        return self._db.execute(f"PRAGMA {name}").fetchone()[0]

    def _is_blank(self) -> bool:
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        return not (tables or self._pragma("application_id") or self._pragma("user_version"))

    def _groups(self, tail: str, *args: int) -> list[StoredGroup]:
        with self._lock:
            rows = self._db.execute(f"SELECT * FROM groups {tail}", args).fetchall()
        return [StoredGroup(
            row["group_index"], row["task_id"], row["kind"], row["version_dispatched"],
            row["attempt"], row["finished_s"], row["consumed_step"], row["skipped"] or "")
            for row in rows]

    def _group(self, group_index: int) -> StoredGroup:
        found = self._groups("WHERE group_index = ?", group_index)
        if not found:
            raise ValueError(f"group {group_index} is not in the store; add_group comes first")
        return found[0]
