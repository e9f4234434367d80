"""What report.html needs of a run's files, reduced to what a picture can show.

Times become seconds since the run's first event, with the pauses between sessions taken out. Long
runs are reduced to a bounded number of intervals, points and marks.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from gyre.telemetry import jsonl
from gyre.telemetry.events import read_events
from gyre.telemetry.metrics import Mean

MOST_POINTS = 240  # of one line
MOST_BINS = 500  # time bins of a Gantt row
_KINDS = ("run_start", "role", "move_call", "waterlevel", "step", "publish", "fault", "stop")


@dataclasses.dataclass(frozen=True)
class Interval:
    """A cell in one role from `start_s` to `end_s`."""

    role: str
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class Move:
    """Live calls that went from one cell to another at about the same time."""

    time_s: float
    source: int
    destination: int
    calls: int
    with_kv: int
    tokens: int
    executions: tuple[str, ...]  # the first few


@dataclasses.dataclass
class RunData:
    """Everything the report shows; empty lists where a file is missing.

    Attributes:
      name: of the run's folder.
      config, provenance: as in their files, {} without.
      metrics, evaluations: rows in step order.
      cells: cell -> intervals; standalone: cells that never train.
      moves: moved calls, gathered.
      n_moves: how many calls moved in all.
      waterlevel, capacity: (time_s, executions), step functions.
      steps: (time_s, step) when each optimizer step ended.
      resumes: times at which a later session began.
      faults: (time_s, what).
      duration_s: of all sessions together.
      stopped: why the last session ended, "" while it runs or after a kill.
    """

    name: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)
    metrics: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    evaluations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    cells: dict[int, list[Interval]] = dataclasses.field(default_factory=dict)
    standalone: set[int] = dataclasses.field(default_factory=set)
    moves: list[Move] = dataclasses.field(default_factory=list)
    n_moves: int = 0
    waterlevel: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    capacity: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    steps: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    resumes: list[float] = dataclasses.field(default_factory=list)
    faults: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    duration_s: float = 0.0
    stopped: str = ""


def load(path: pathlib.Path) -> RunData:
    """Reads a run's folder; any of its files may be missing.

    Raises:
      WorkdirError: a file is corrupt.
    """
    data = RunData(path.resolve().name)
    data.config, data.provenance = _object(path / "config.json"), _object(path / "provenance.json")
    data.metrics = sorted(jsonl.read(path / "metrics.jsonl"), key=lambda row: row["step"])
    data.evaluations = sorted(jsonl.read(path / "eval.jsonl"), key=lambda row: row["step"])
    _load_events(data, path / "events.jsonl")
    return data


def _object(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _load_events(data: RunData, path: pathlib.Path) -> None:
    """Replays the event log; `now` is run time: pauses between sessions do not count."""
    began = last = None
    pause_s = now = 0.0
    open_roles: dict[int, tuple[str, float]] = {}
    moves: list[dict[str, Any]] = []

    def close(cell: int) -> None:
        role, since = open_roles.pop(cell)
        if now > since:
            data.cells.setdefault(cell, []).append(Interval(role, since, now))

    for event in read_events(path, _KINDS):
        kind, time_s = event["kind"], event["time_s"]
        if began is None:
            began = time_s
        elif kind == "run_start":
            pause_s += time_s - last
            data.resumes.append(now)
            data.stopped = ""
            for cell in list(open_roles):
                close(cell)
        last, now = time_s, time_s - began - pause_s
        if kind == "run_start":
            data.standalone = {c["cell"] for c in event.get("cells", []) if c.get("standalone")}
        elif kind == "role":
            cell = event["cell"]
            if cell in open_roles:
                close(cell)
            data.cells.setdefault(cell, [])
            open_roles[cell] = event["role"], now
        elif kind == "move_call":
            moves.append({**event, "now": now})
        elif kind == "waterlevel":
            data.waterlevel.append((now, event["w"]))
            data.capacity.append((now, event["capacity"]))
        elif kind == "step":
            data.steps.append((now, event["step"]))
        elif kind == "fault":
            what = f"cell {event.get('cell', '?')}: {event.get('what', 'fault')}"
            data.faults.append((now, what))
        elif kind == "stop":
            data.stopped = str(event.get("reason", "stopped"))
    for cell in list(open_roles):
        close(cell)
    data.duration_s = now
    data.cells = {c: coarse_intervals(rows, now) for c, rows in sorted(data.cells.items())}
    data.n_moves, data.moves = len(moves), gather_moves(moves, now)
    data.waterlevel = envelope(data.waterlevel, now)
    data.capacity = changes(data.capacity)


def coarse_intervals(rows: list[Interval], duration_s: float) -> list[Interval]:
    """At most MOST_BINS intervals: beyond that, a time bin has the role that fills most of it."""
    if len(rows) <= MOST_BINS:
        return rows
    width = duration_s / MOST_BINS
    bins: list[dict[str, float]] = [{} for _ in range(MOST_BINS)]
    for row in rows:
        for i in range(int(row.start_s / width), min(int(row.end_s / width), MOST_BINS - 1) + 1):
            inside = min(row.end_s, (i + 1) * width) - max(row.start_s, i * width)
            bins[i][row.role] = bins[i].get(row.role, 0.0) + max(inside, 0.0)
    out: list[Interval] = []
    for i, shares in enumerate(bins):
        if not shares:
            continue
        role = max(shares, key=lambda r: (shares[r], r))
        start = i * width
        if out and out[-1].role == role and math.isclose(out[-1].end_s, start):
            out[-1] = Interval(role, out[-1].start_s, start + width)
        else:
            out.append(Interval(role, start, start + width))
    return out


def gather_moves(events: Sequence[dict[str, Any]], duration_s: float) -> list[Move]:
    """Moves between the same cells within 1/200 of the run become one mark."""
    width = max(duration_s / 200, 1e-9)

    def key(event: dict[str, Any]) -> tuple[int, int, int]:
        return int(event["now"] / width), event["source"], event["destination"]

    out = []
    for (_, source, destination), group in itertools.groupby(sorted(events, key=key), key):
        rows = list(group)
        out.append(Move(
            rows[0]["now"], source, destination, len(rows), sum(bool(r.get("kv")) for r in rows),
            sum(r.get("tokens", 0) for r in rows),
            tuple(dict.fromkeys(r.get("execution", "?") for r in rows))[:4]))
    return out


def changes(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A step function without the points at which nothing changes."""
    kept = [p for i, p in enumerate(points) if i == 0 or p[1] != points[i - 1][1]]
    return kept if len(kept) <= 2 * MOST_POINTS else envelope(kept, kept[-1][0])


def envelope(points: Sequence[tuple[float, float]], end_s: float) -> list[tuple[float, float]]:
    """At most 2 * MOST_POINTS points of a step function, extremes kept: each bin's low and high."""
    if len(points) <= 2 * MOST_POINTS:
        return list(points)
    width = max(end_s, 1e-9) / MOST_POINTS
    out: list[tuple[float, float]] = []
    for _, group in itertools.groupby(points, lambda p: min(int(p[0] / width), MOST_POINTS - 1)):
        rows = list(group)
        ends = {min(rows, key=lambda p: p[1]), max(rows, key=lambda p: p[1])}
        out += sorted(ends)
    return out


def thin(rows: Sequence[dict[str, Any]], most: int = MOST_POINTS) -> list[dict[str, Any]]:
    """At most `most` rows: neighbours are averaged field by field, counts included.

    Nested numbers (outcomes) are averaged too; fields that are not numbers keep the last value. A
    row that stands for several has `steps` = "first to last".
    """
    size = math.ceil(len(rows) / most) or 1
    if size == 1:
        return list(rows)
    out = []
    for start in range(0, len(rows), size):
        part = rows[start:start + size]
        row = _average(part)
        row["steps"] = f"{part[0]['step']} to {part[-1]['step']}"
        out.append(row)
    return out


def _average(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Field by field; a number that only some rows have is averaged over those that have it, in a
    nested dict over all rows (an outcome that is not listed happened 0 times)."""
    out: dict[str, Any] = {}
    for name in dict.fromkeys(n for row in rows for n in row):
        values = [row[name] for row in rows if row.get(name) is not None]
        if values and all(isinstance(v, dict) for v in values):
            keys = dict.fromkeys(k for v in values for k in v)
            out[name] = {k: sum(v.get(k, 0) for v in values) / len(values) for k in keys}
        elif values and all(isinstance(v, int | float) for v in values):
            mean = Mean()
            for value in values:
                mean.add(value)
            out[name] = mean.value
        else:
            out[name] = values[-1] if values else None
    return out
