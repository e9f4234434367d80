"""report.html: what happened in a run, in one file that works offline.

Reads whatever files the run's folder has, so that a report can be made while the run goes on or
after it was killed.
"""

from __future__ import annotations

import math
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gyre.telemetry import jsonl, report_charts, report_data, svg
from gyre.telemetry.report_charts import dig
from gyre.telemetry.report_data import RunData
from gyre.telemetry.report_style import page
from gyre.telemetry.report_tree import tree_card

FIRST_STEPS, LAST_STEPS = 3, 5


def build_report(workdir: str | os.PathLike,
                 example_tree: Mapping[str, Any] | None = None) -> pathlib.Path:
    """Writes report.html into a run's folder and returns its path.

    Args:
      workdir: the folder; any of its files may be missing.
      example_tree: one execution as report_tree.py describes it, or None.

    Raises:
      WorkdirError: a file of the folder is corrupt.
    """
    path = pathlib.Path(workdir)
    data = report_data.load(path)
    body = [
        _header(data), _tiles(data), '<div class="cards">',
        report_charts.reward(data), report_charts.gantt(data), report_charts.waterlevel(data),
        report_charts.staleness(data), report_charts.outcomes(data),
        report_charts.small_multiples(data),
        tree_card(dict(example_tree)) if example_tree else "", "</div>", _footer(data)]
    out = path / "report.html"
    jsonl.write_atomically(out, page(f"gyre: {svg.esc(data.name)}", "".join(body)))
    return out


def write_tree_page(path: pathlib.Path, tree: Mapping[str, Any]) -> None:
    """Writes one execution's tree as a page of its own."""
    name = svg.esc(tree["execution"])
    jsonl.write_atomically(path, page(
        f"gyre: {name}", "<header><h1>Trajectory tree</h1><p>&nbsp;</p></header>"
        f'<div class="cards">{tree_card(dict(tree))}</div>'))


def mean_of(rows: Sequence[Mapping[str, Any]], field: str) -> float:
    """Mean of a field over the rows that measured it; NaN when none did."""
    values = [row[field] for row in rows if row.get(field) is not None]
    return sum(values) / len(values) if values else math.nan


def _header(data: RunData) -> str:
    c = data.config
    facts = []
    if c:
        shape = dig(c, "cells.shape") or []
        count = dig(c, "cells.count")
        facts = [
            f"{dig(c, 'model.name')} trained by {dig(c, 'algorithm.name')}" if dig(c, "model.name")
            else "",
            f"{c['scheduler']} scheduler" if "scheduler" in c else "",
            f"{count} cells of {math.prod(shape)} device{'s' if math.prod(shape) != 1 else ''}"
            if count else "",
            f"{c['groups_per_step']} groups of {c['group_size']} executions a step"
            if "groups_per_step" in c and "group_size" in c else "",
            f"seed {c['seed']}" if "seed" in c else ""]
    state = {"": "still running, or killed", "finished": "finished"}.get(data.stopped, data.stopped)
    if data.steps or data.cells:
        facts.append(state)
    text = " · ".join(svg.esc(f) for f in facts if f)
    return f"<header><h1>{svg.esc(data.name)}</h1><p>{text}</p></header>"


def _tiles(data: RunData) -> str:
    rows = data.metrics
    scores = [e["mean_score"] for e in data.evaluations if e.get("mean_score") is not None]
    total = data.config.get("steps")
    wall_s = data.duration_s or sum(r.get("wall_s") or 0 for r in rows)
    tiles = [
        _tile(_change(mean_of(rows[:FIRST_STEPS], "reward_mean"),
                      mean_of(rows[-LAST_STEPS:], "reward_mean")),
              "reward, first 3 → last 5 steps"),
        _tile(_change(scores[0], scores[-1]) if len(scores) > 1 else
              f"{scores[0]:.2f}" if scores else "–", "held-out score, before → after"),
        _tile(f"{len(rows)}" + (f'<span class="arrow"> / {total}</span>' if total else ""),
              "optimizer steps"),
        _tile(svg.esc(svg.duration(wall_s)), "wall time"),
        _tile(_total(rows, "executions"), "executions"),
        _tile(_total(rows, "tokens_sampled"), "tokens sampled"),
        _tile(_total(rows, "tokens_trained"), "tokens trained"),
        _tile(str(data.n_moves), "live calls moved"),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(value: str, label: str) -> str:
    return f'<div class="tile"><b>{value}</b><span>{svg.esc(label)}</span></div>'


def _change(before: float, after: float) -> str:
    if not (math.isfinite(before) and math.isfinite(after)):
        return "–"
    return f'{before:.2f}<span class="arrow"> → </span>{after:.2f}'


def _total(rows: Sequence[Mapping[str, Any]], field: str) -> str:
    values = [row[field] for row in rows if row.get(field) is not None]
    return svg.esc(svg.number(sum(values))) if values else "–"


def _footer(data: RunData) -> str:
    sessions = data.provenance.get("sessions", [])
    facts = [f"made {time.strftime('%Y-%m-%d %H:%M')}"]
    if sessions:
        last = sessions[-1]
        git = last.get("git") or {}
        if git.get("commit"):
            dirty = " with uncommitted changes" if git.get("dirty_diff") else ""
            facts.append(f"commit {git['commit'][:12]}{dirty}")
        packages = last.get("packages", {})
        facts += [f"{name} {packages[name]}" for name in ("jax", "flax") if name in packages]
        facts += [f"Python {last.get('python')}", str(last.get("platform"))]
        if len(sessions) > 1:
            facts.append(f"{len(sessions)} sessions")
    return f"<footer>{svg.esc(' · '.join(facts))}</footer>"
