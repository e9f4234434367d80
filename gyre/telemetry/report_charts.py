"""The charts of report.html, each a card: a heading, what to look for, the picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from gyre.telemetry import svg
from gyre.telemetry.report_data import RunData, thin
from gyre.telemetry.report_style import card

WIDE, HALF = 1060, 520
ROLES = {"rollout": ("c-rollout", "rollout"), "train": ("c-train", "train"),
         "to_train": ("c-transfer", "to train"), "to_rollout": ("c-transfer", "to rollout")}
OUTCOMES = {"completed": "c-good", "harness_timeout": "c-warn", "harness_crashed": "c-bad",
            "ungraded": "c-violet", "overall_timeout": "c-grey", "infra_failure": "c-ink"}
Series = tuple[str, str, str]  # field of a metrics row, class, name for people
NOTHING = '<p class="none">Nothing was measured yet.</p>'


def dig(tree: dict[str, Any], path: str) -> Any:
    """A nested value by its dotted name, None where there is none."""
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _values(rows: Sequence[dict[str, Any]], field: str) -> list[tuple[float, float]]:
    return [(row["step"], math.nan if row.get(field) is None else row[field]) for row in rows]


def _measured(rows: Sequence[dict[str, Any]], *fields: str) -> bool:
    return any(row.get(f) is not None for row in rows for f in fields)


def _top(values: Sequence[float], floor: float = 0.0) -> float:
    """A round upper end for an axis that starts at 0."""
    high = max([v for v in values if math.isfinite(v)] + [floor, 1e-9])
    scale = 10.0 ** math.floor(math.log10(high))
    return next(s * scale for s in (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12) if s * scale >= high * 0.9999)


def _name(row: dict[str, Any]) -> str:
    return f"steps {row['steps']}" if "steps" in row else f"step {row['step']:g}"


def _step_axis(low: float, high: float, width: int) -> dict[str, Any]:
    if high <= low:
        high = low + 1
    whole = [t for t in svg.ticks(low, high, max(2, width // 80)) if t == round(t)]
    return {"x": (low, high), "x_ticks": whole, "x_label": "optimizer step"}


def reward(data: RunData) -> str:
    """Mean reward with the spread between executions, and held-out evaluations."""
    rows = thin(data.metrics)
    evaluations = [e for e in data.evaluations if e.get("mean_score") is not None]
    caption = "Mean score of each step's executions, the policy's own samples, and their spread."
    if not _measured(rows, "reward_mean") and not evaluations:
        return card("Reward", caption, NOTHING, wide=True)
    mean = _values(rows, "reward_mean")
    std = [row.get("reward_std") or 0.0 for row in rows]
    low = [(x, max(0.0, y - s)) for (x, y), s in zip(mean, std, strict=True)]
    high = [(x, min(1.0, y + s)) for (x, y), s in zip(mean, std, strict=True)]
    scores = [(e["step"], e["mean_score"]) for e in evaluations]
    steps = [x for x, _ in mean + scores]
    first = 0 if min(steps) <= 1 else min(steps)
    chart = svg.Chart(
        WIDE, 300, y=(0, min(1.0, _top([y for _, y in high + scores], 0.1))), y_label="score",
        label="reward by optimizer step", **_step_axis(first, max(steps), WIDE))
    for x in _resumed_steps(data):
        chart.vertical(x, "c-grey", f"a later session resumed after step {x}")
    chart.band(low, high, "c-rollout")
    chart.line(mean, "c-rollout")
    chart.dots(mean, "c-rollout", [
        f"{_name(row)}: reward {svg.number(y)} ± {svg.number(s)}, "
        f"{svg.number(row.get('executions', math.nan))} executions"
        for row, (_, y), s in zip(rows, mean, std, strict=True)], 3 if len(rows) <= 80 else 0)
    chart.line(scores, "c-train", dash=True)
    chart.diamonds(scores, "c-train", [
        f"held-out tasks after step {e['step']}: mean score {svg.number(e['mean_score'])}, "
        f"passed {svg.percent(e.get('pass_rate'))} of {e.get('n', '?')}" for e in evaluations])
    entries = [("line", "c-rollout", "training reward"), ("outline", "c-rollout", "± 1 std")]
    if scores:
        entries.append(("diamond", "c-train", "held-out tasks"))
    return card("Reward", caption, svg.legend(entries) + chart.svg() + _by_kind(evaluations), True)


def _resumed_steps(data: RunData) -> list[int]:
    sessions = data.provenance.get("sessions", [])
    return [s["resumed_step"] for s in sessions if s.get("resumed_step")]


def _by_kind(evaluations: Sequence[dict[str, Any]]) -> str:
    """Held-out score per kind of task, before and after."""
    if len(evaluations) < 2 or not evaluations[-1].get("by_kind"):
        return ""
    first, last = evaluations[0].get("by_kind") or {}, evaluations[-1]["by_kind"]
    items = "".join(
        f"<span>{svg.esc(kind)} <b>{svg.number(first.get(kind))} → {svg.number(score)}</b></span>"
        for kind, score in sorted(last.items()))
    return f'<div class="facts"><span>held-out by kind of task:</span>{items}</div>'


def gantt(data: RunData) -> str:
    """Roles of the cells over time, with the live calls that moved between them."""
    caption = ("What each cell did. A mark joins two cells when live model calls moved from one to "
               "the other: the harness waits a moment and notices nothing.")
    if not data.cells:
        return card("Cells", caption, NOTHING, wide=True)
    cells = list(data.cells)
    row = {cell: i for i, cell in enumerate(cells)}
    height = max(14, min(34, 640 // len(cells)))
    names = {i: _cell_name(data, cell) for cell, i in row.items()}
    # Beyond some rows, not every one has its name.
    labelled = [i for i in names if i % math.ceil(len(names) / 40) == 0]
    chart = svg.Chart(
        WIDE, len(cells) * height + 54, (0, data.duration_s or 1), (len(cells), 0),
        "roles of the cells over time", "run time", left=112,
        x_ticks=svg.time_ticks(0, data.duration_s or 1, 9), x_format=svg.duration,
        y_ticks=[i + 0.5 for i in labelled], y_format=lambda y: names[int(y)])
    for cell, intervals in data.cells.items():
        for it in intervals:
            cls, role = ROLES.get(it.role, ("c-grey", it.role))
            chart.box(it.start_s, it.end_s, row[cell] + 0.12, row[cell] + 0.88, cls,
                      f"cell {cell}: {role}, {svg.duration(it.start_s)} to "
                      f"{svg.duration(it.end_s)} ({svg.duration(it.end_s - it.start_s)})",
                      gap=0.5 if len(intervals) < 100 else 0.0, rounded=2)
    _time_marks(chart, data)
    for move in data.moves:
        _move(chart, move, row)
    entries = [("box", "c-rollout", "rollout"), ("box", "c-train", "train"),
               ("box", "c-transfer", "between roles"),
               ("dot", "c-ink", f"live calls moved ({data.n_moves})")]
    if data.faults:
        entries.append(("dash", "c-bad", "fault"))
    return card("Cells", caption, svg.legend(entries) + chart.svg(), wide=True)


def _cell_name(data: RunData, cell: int) -> str:
    return f"cell {cell}" + (" core" if cell == 0 else " rollout only"
                             if cell in data.standalone else "")


def _time_marks(chart: svg.Chart, data: RunData) -> None:
    for time_s in data.resumes:
        chart.vertical(time_s, "c-grey", f"resumed at {svg.duration(time_s)}")
    for time_s, what in data.faults:
        chart.vertical(time_s, "c-bad", f"{what} at {svg.duration(time_s)}")


def _move(chart: svg.Chart, move, row: dict[int, int]) -> None:
    if move.source not in row or move.destination not in row:
        return
    calls = "1 live call" if move.calls == 1 else f"{move.calls} live calls"
    kv = "with KV" if move.with_kv == move.calls else (
        f"{move.with_kv} with KV, the others prefilled again")
    tip = (f"{calls} moved from cell {move.source} to cell {move.destination} at "
           f"{svg.duration(move.time_s)}, {kv}; {svg.number(move.tokens)} tokens sampled so far; "
           f"executions {', '.join(move.executions)}")
    x = chart.px(move.time_s)
    start, end = chart.py(row[move.source] + 0.5), chart.py(row[move.destination] + 0.5)
    chart.add(f'<g class="c-ink"><path class="line thin" d="M{x:g} {start:g}V{end:g}"/>'
              f'<circle class="fill ring" cx="{x:g}" cy="{end:g}" r="4"/>'
              f'<path class="line" stroke-opacity="0" style="stroke-width:9" '
              f'pointer-events="stroke" d="M{x:g} {start:g}V{end:g}">{svg.title(tip)}</path></g>')


def waterlevel(data: RunData) -> str:
    """Unfinished executions against what the rollout cells can hold."""
    caption = ("Executions dispatched but not finished, against what the cells in rollout can "
               "hold. A cell may leave for training once the rest covers the waterlevel.")
    if not data.waterlevel:
        return card("Waterlevel", caption, NOTHING, wide=True)
    values = [y for _, y in data.waterlevel + data.capacity]
    end = data.duration_s or 1
    chart = svg.Chart(WIDE, 220, (0, end), (0, _top(values, 1)), "waterlevel and rollout capacity",
                      "run time", "executions", x_ticks=svg.time_ticks(0, end, 9),
                      x_format=svg.duration)
    _time_marks(chart, data)
    chart.steps(data.waterlevel, end, "c-teal", area=True)
    chart.steps(data.capacity, end, "c-violet dash")
    entries = [("line", "c-teal", "waterlevel"), ("dash", "c-violet", "rollout capacity")]
    return card("Waterlevel", caption, svg.legend(entries) + chart.svg(), wide=True)


def lines(title: str, caption: str, rows: Sequence[dict[str, Any]], series: Sequence[Series],
          y_label: str = "", y_format: Callable[[float], str] = svg.number,
          top: float | None = None) -> str:
    """A card with one line per field that was measured."""
    series = [s for s in series if _measured(rows, s[0])]
    if not series:
        return card(title, caption, NOTHING)
    points = {field: _values(rows, field) for field, _, _ in series}
    measured = [y for line in points.values() for _, y in line]
    low = -_top([-y for y in measured]) if min(measured, default=0) < 0 else 0.0
    high = top or _top(measured)
    chart = svg.Chart(HALF, 220, y=(low, high), y_label=y_label, y_format=y_format, label=title,
                      **_step_axis(rows[0]["step"], rows[-1]["step"], HALF))
    for field, cls, name in series:
        chart.line(points[field], cls)
        tips = [f"{_name(row)}: {name} {y_format(y)}"
                for row, (_, y) in zip(rows, points[field], strict=True)]
        chart.dots(points[field], cls, tips, 2.5 if len(rows) <= 60 else 0)
    return card(title, caption,
                svg.legend([("line", cls, name) for _, cls, name in series]) + chart.svg())


def staleness(data: RunData) -> str:
    """Mean and largest staleness per step, and the bound that the schedule gives."""
    rows = thin(data.metrics)
    caption = "Version trained at less version dispatched at, over each step's groups."
    if not _measured(rows, "staleness_mean", "staleness_max"):
        return card("Staleness", caption, NOTHING)
    largest, mean = _values(rows, "staleness_max"), _values(rows, "staleness_mean")
    bound = _staleness_bound(data.config)
    high = _top([y for _, y in largest + mean] + [bound or 0], 1)
    low, last = rows[0]["step"] - 0.5, rows[-1]["step"] + 0.5
    chart = svg.Chart(HALF, 220, y=(0, high * 1.08), y_label="versions", label="staleness per step",
                      y_ticks=[t for t in svg.ticks(0, high, 5) if t == round(t)],
                      **_step_axis(low, last, HALF))
    half = (last - low) / len(rows) * 0.36
    for row, (x, y) in zip(rows, largest, strict=True):
        if math.isfinite(y):
            chart.box(x - half, x + half, 0, y, "c-transfer", f"{_name(row)}: at most {y:g}",
                      rounded=2)
    chart.line(mean, "c-train")
    chart.dots(mean, "c-train", [f"{_name(row)}: mean {svg.number(y)}"
                                 for row, (_, y) in zip(rows, mean, strict=True)],
               2.5 if len(rows) <= 60 else 0)
    entries = [("line", "c-train", "mean"), ("box", "c-transfer", "largest")]
    if bound is not None:
        chart.line([(low, bound), (last, bound)], "c-bad", dash=True)
        entries.append(("dash", "c-bad", f"bound ⌈φ⌉ + μ − 1 = {bound}"))
    return card("Staleness", caption, svg.legend(entries) + chart.svg())


def _staleness_bound(config: dict[str, Any]) -> int | None:
    phi, mu = dig(config, f"schedulers.{config.get('scheduler')}.phi"), config.get("mu")
    if not isinstance(phi, int | float) or not isinstance(mu, int):
        return None
    return math.ceil(phi) + mu - 1


def outcomes(data: RunData) -> str:
    """How the executions of each step ended, stacked."""
    rows = [r for r in thin(data.metrics) if r.get("outcomes")]
    caption = "How the executions of each step ended."
    if not rows:
        return card("Outcomes", caption, NOTHING)
    named = list(OUTCOMES) + sorted({n for r in rows for n in r["outcomes"]} - set(OUTCOMES))
    present = [n for n in named if any(r["outcomes"].get(n) for r in rows)]
    low, last = rows[0]["step"] - 0.5, rows[-1]["step"] + 0.5
    high = _top([sum(r["outcomes"].values()) for r in rows], 1)
    chart = svg.Chart(HALF, 220, y=(0, high), y_label="executions", label="outcomes per step",
                      **_step_axis(low, last, HALF))
    half = (last - low) / len(rows) * 0.36
    for row in rows:
        base = 0.0
        for name in present:
            count = row["outcomes"].get(name, 0)
            if count:
                chart.box(row["step"] - half, row["step"] + half, base, base + count,
                          OUTCOMES.get(name, "c-grey"), f"{_name(row)}: {svg.number(count)} {name}")
                base += count
    entries = [("box", OUTCOMES.get(n, "c-grey"), n.replace("_", " ")) for n in present]
    return card("Outcomes", caption, svg.legend(entries) + chart.svg())


def small_multiples(data: RunData) -> str:
    """Cards that share one shape: tokens, throughput, idle time, optimization."""
    rows = thin(data.metrics)
    parts = [
        lines("Tokens", "Per step. Shared prefixes are computed once: unique, not linearized.",
              rows, [("tokens_linearized", "c-grey", "linearized"),
               ("tokens_unique", "c-teal", "unique"),
               ("tokens_trained", "c-train", "trained"),
               ("tokens_sampled", "c-rollout", "sampled")], "tokens"),
        lines("Throughput", "Tokens sampled and trained per second of wall time.", rows,
              [("tokens_per_s", "c-rollout", "tokens/s")], "tokens per second"),
        lines("Idle time", "Share of the time in a role that cells had nothing to do.", rows,
              [("rollout_idle_fraction", "c-rollout", "cells in rollout"),
               ("train_idle_fraction", "c-train", "cells in training")], "idle", svg.percent, 1.0),
        lines("Step time", "Wall time from one optimizer step to the next.", rows,
              [("wall_s", "c-violet", "seconds")], "seconds"),
        lines("Entropy", "Mean over the trained tokens, of the tempered distribution.", rows,
              [("entropy", "c-teal", "nats per token")], "nats"),
        lines("Off-policy gap", "KL between the weights that sampled and those that trained, and "
              "the share of clipped tokens.", rows,
              [("mismatch_kl", "c-violet", "mismatch KL"),
               ("clip_fraction", "c-warn", "clip fraction")]),
        lines("Loss", "The policy loss; it need not fall for the reward to rise.",
              rows, [("loss", "c-rollout", "loss")]),
        lines("Gradient norm", "Before clipping.", rows, [("grad_norm", "c-train", "L2 norm")]),
    ]
    return "".join(parts)
