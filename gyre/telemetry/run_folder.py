"""A run's folder: who may use it, what is in it, and where its files lie.

Invariants: a folder that gyre did not make is never written to; one process at a time uses a
folder; the config in it is the one that the run uses. After a kill at any moment it opens again.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from gyre.base.errors import WorkdirError
from gyre.telemetry import jsonl
from gyre.telemetry.provenance import session

_FORMAT = 1
_LOCK, _CONFIG, _PROVENANCE = ".gyre.lock", "config.json", "provenance.json"
_ABSENT = object()


@dataclasses.dataclass
class RunFolder:
    """An opened run folder; holds its lock until `close`. Make one with `RunFolder.open`.

    Attributes:
      path: the folder.
      config: resolved config, as JSON has it.
      resumed: whether the folder had a run before.
    """

    path: pathlib.Path
    config: dict[str, Any]
    resumed: bool
    _lock: BinaryIO = dataclasses.field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike, config: Mapping[str, Any],
             may_differ: Sequence[str] = ()) -> RunFolder:
        """Creates a run's folder, or opens it again for the same config.

        Args:
          path: a new or empty folder, or one with a run.
          config: resolved config.
          may_differ: dotted names of fields, or groups of fields, that a resumed run may change;
            the folder then takes the new value.

        Raises:
          WorkdirError: the folder is foreign, corrupt, in use by another process, or has a run of
            another config (the message names the differing fields with both values).
        """
        path = pathlib.Path(path)
        wanted = jsonl.plain(config)
        _refuse_foreign(path)
        path.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(path)
        try:
            _refuse_foreign(path)  # another process may have been faster
            resumed = (path / _CONFIG).exists()
            if resumed:
                _check_same(path, _read_object(path / _CONFIG), wanted, may_differ)
            else:
                # The mark of a gyre folder comes first: with it alone the folder counts as new.
                _write_object(path / _PROVENANCE, {"gyre_run_format": _FORMAT, "sessions": []})
            _write_object(path / _CONFIG, wanted)
        except BaseException:
            lock.close()
            raise
        return cls(path, wanted, resumed, lock)

    # ------------------------------------------------------------------ files

    @property
    def metrics_path(self) -> pathlib.Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluations_path(self) -> pathlib.Path:
        return self.path / "eval.jsonl"

    @property
    def events_path(self) -> pathlib.Path:
        return self.path / "events.jsonl"

    @property
    def store_path(self) -> pathlib.Path:
        return self.path / "trajectories.sqlite"

    @property
    def checkpoints_path(self) -> pathlib.Path:
        return self.path / "checkpoints"

    @property
    def tensorboard_path(self) -> pathlib.Path:
        return self.path / "tensorboard"

    # ------------------------------------------------------------------ what a session does

    def record_session(self, devices: Sequence[str], resumed_step: int = 0) -> None:
        """Adds this process to provenance.json: code, versions, machine, and the given devices."""
        provenance = _read_object(self.path / _PROVENANCE)
        provenance["sessions"].append(
            {"resumed_step": resumed_step, "devices": list(devices), **session()})
        _write_object(self.path / _PROVENANCE, provenance)

    def truncate_after(self, step: int) -> None:
        """Drops metrics and evaluations of steps that the checkpoint at `step` does not have.

        Call before a writer of these files is opened.
        """
        for path in (self.metrics_path, self.evaluations_path):
            jsonl.keep_rows(path, lambda row: row["step"] <= step)

    def append_evaluation(self, row: Mapping[str, Any]) -> None:
        """Adds a line to eval.jsonl: step, version, mean_score, pass_rate, n, by_kind, wall_s."""
        jsonl.append(self.evaluations_path, {"time_s": round(time.time(), 3), **row})

    def close(self) -> None:
        """Lets other processes use the folder. May be called twice."""
        self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_config(path: str | os.PathLike) -> dict[str, Any]:
    """The config of the run in a folder, for tools that only read. WorkdirError without one."""
    path = pathlib.Path(path)
    if not (path / _CONFIG).exists():
        raise WorkdirError(f"{path} has no {_CONFIG}: it is not the folder of a run")
    return _read_object(path / _CONFIG)


def _refuse_foreign(path: pathlib.Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise WorkdirError(f"{path} is a file; a workdir is a folder, choose another name")
    names = {p.name for p in path.iterdir()}
    if _PROVENANCE in names:
        found = _read_object(path / _PROVENANCE)
        if "gyre_run_format" in found:
            if found["gyre_run_format"] != _FORMAT:
                raise WorkdirError(f"{path} holds a run of format {found['gyre_run_format']!r}, "
                                   f"this version of gyre reads {_FORMAT}; use a new folder")
            others = names - {_LOCK, _PROVENANCE, f"{_PROVENANCE}.tmp", f"{_CONFIG}.tmp"}
            if others and _CONFIG not in names:
                raise WorkdirError(f"{path} is corrupt: it holds a run ({_some(others)}) but no "
                                   f"{_CONFIG}; restore that file or use a new folder")
            return
    others = names - {_LOCK, f"{_PROVENANCE}.tmp"}
    if others:
        raise WorkdirError(f"{path} is not empty and not the folder of a gyre run (it holds "
                           f"{_some(others)}); nothing was changed, use a new or empty folder")


def _some(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def _take_lock(path: pathlib.Path) -> BinaryIO:
    lock = (path / _LOCK).open("a+b")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read(32).decode("ascii", "replace").strip() or "unknown"
        lock.close()
        raise WorkdirError(f"{path} is in use by another process (pid {owner}); wait for it to "
                           "end, or use another folder") from None
    lock.truncate(0)
    lock.write(str(os.getpid()).encode())
    lock.flush()
    return lock


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:  # not JSON, or not UTF-8
        raise WorkdirError(f"{path} is not valid JSON ({e}); the folder is corrupt or foreign, use "
                           "another one") from e
    if not isinstance(value, dict):
        raise WorkdirError(f"{path} must hold a JSON object, got a {type(value).__name__}")
    return value


def _write_object(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(jsonl.plain(value), indent=2, ensure_ascii=False)
    jsonl.write_atomically(path, text + "\n")


def _check_same(path: pathlib.Path, old: Mapping[str, Any], new: Mapping[str, Any],
                may_differ: Sequence[str]) -> None:
    before, now = _flat(old), _flat(new)
    groups = tuple(f"{name}." for name in may_differ)
    differing = [
        f"  {name}: {_shown(before, name)} in the folder, {_shown(now, name)} now"
        for name in sorted(before.keys() | now.keys())
        if before.get(name, _ABSENT) != now.get(name, _ABSENT)
        and name not in may_differ and not name.startswith(groups)]
    if differing:
        raise WorkdirError(f"{path} holds a run of another config:\n" + "\n".join(differing) +
                           "\nuse the folder's values to resume, or another folder for a new run")


def _shown(fields: Mapping[str, Any], name: str) -> str:
    return json.dumps(fields[name]) if name in fields else "absent"


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names -> leaves; an empty group is a leaf, so that it differs from an absent one."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
