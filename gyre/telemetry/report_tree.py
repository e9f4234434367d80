"""One execution's trajectory tree for report.html, from a plain structure.

The structure is made by whoever can read trajectories (this package cannot, by the layer rules):

    {"execution": str, "task": str, "outcome": str, "score": float | None, "calls": int,
     "wall_s": float, "tokens_linearized": int,
     "segments": [{"parent": int, "tokens": int, "trainable": bool, "agent_role": str,
                   "call": int | None, "versions": [low, high] | None, "text": str | None}, ...]}

Segments come in depth-first order; `parent` is a place in the list, -1 at a root; `call` is the
ordinal of the call that sampled the segment, None for prompt text.
"""

from __future__ import annotations

from typing import Any

from gyre.telemetry import svg
from gyre.telemetry.report_style import card

ROLE_CLASSES = {"main": "c-rollout", "main_summary": "c-violet", "sub_agent": "c-teal",
                "sub_agent_summary": "c-warn"}
MOST_TEXT_CHARACTERS = 6_000  # of one segment
MOST_TEXTS_CHARACTERS = 400_000  # of all segments together
Tree = dict[str, Any]


def tree_card(tree: Tree) -> str:
    """The card: facts, the tree as a picture, and its text to unfold."""
    caption = ("All model calls of one execution as one tree of tokens. What calls share is stored "
               "and computed once; filled segments were sampled by the policy and are trained, "
               "outlined ones only condition.")
    return card(f"One execution: {svg.esc(tree['execution'])}", caption,
                facts(tree) + picture(tree) + outline(tree), wide=True)


def facts(tree: Tree) -> str:
    """Numbers of the execution."""
    segments = tree["segments"]
    unique = sum(s["tokens"] for s in segments)
    trained = sum(s["tokens"] for s in segments if s["trainable"])
    score = tree.get("score")
    items = [
        ("task", tree.get("task", "?")), ("outcome", tree.get("outcome", "?").replace("_", " ")),
        ("score", "none" if score is None else f"{score:.2f}"), ("calls", tree.get("calls", "?")),
        ("wall time", svg.duration(tree["wall_s"]) if "wall_s" in tree else "?"),
        ("paths", len(_leaves(segments))), ("unique tokens", f"{unique:,}"),
        ("if each call stood alone", f"{tree['tokens_linearized']:,}"),
        ("trainable", f"{trained:,}")]
    return '<div class="facts">' + "".join(
        f"<span>{svg.esc(name)} <b>{svg.esc(value)}</b></span>" for name, value in items) + "</div>"


def picture(tree: Tree) -> str:
    """The tree drawn to scale: along x the tokens from the start, a row per path."""
    segments = tree["segments"]
    if not segments:
        return '<p class="none">The execution made no calls.</p>'
    leaves = _leaves(segments)
    starts, rows = _starts(segments), _rows(segments, leaves)
    end = max(start + s["tokens"] for start, s in zip(starts, segments, strict=True))
    names = {i: segments[leaf]["agent_role"].replace("_", " ") for i, leaf in enumerate(leaves)}
    height = max(8, min(26, 900 // len(leaves)))
    labelled = [i for i in names if i % -(-len(names) // 36) == 0]
    chart = svg.Chart(1060, len(leaves) * height + 54, (0, end), (len(leaves), 0),
                      f"trajectory tree of {tree['execution']}",
                      "tokens from the start of the prompt", left=132,
                      y_ticks=[i + 0.5 for i in labelled], y_format=lambda y: names[int(y)])
    for i, segment in enumerate(segments):
        parent = segment["parent"]
        if parent >= 0 and rows[parent] != rows[i]:
            x, top, bottom = chart.px(starts[i]), *(chart.py(rows[j] + 0.5) for j in (parent, i))
            chart.add(f'<path class="line thin c-grey" d="M{x:g} {top:g}V{bottom:g}"/>')
    for i, segment in enumerate(segments):
        cls = ROLE_CLASSES.get(segment["agent_role"], "c-grey")
        left, right = chart.px(starts[i]), chart.px(starts[i] + segment["tokens"])
        top, bottom = chart.py(rows[i] + 0.16), chart.py(rows[i] + 0.84)
        shape = "fill" if segment["trainable"] else "outline"
        chart.add(f'<rect class="{shape} {cls}" x="{left:g}" y="{top:g}" rx="2" '
                  f'width="{max(right - left - 1, 1):.1f}" height="{bottom - top:.1f}">'
                  f"{svg.title(describe(segment))}</rect>")
    used = dict.fromkeys(s["agent_role"] for s in segments)
    entries = [("box", ROLE_CLASSES.get(r, "c-grey"), f"{r.replace('_', ' ')}, trained")
               for r in used] + [("outline", "c-grey", "prompt or not trained")]
    return svg.legend(entries) + chart.svg()


def describe(segment: Tree) -> str:
    """One line about a segment."""
    role = segment["agent_role"].replace("_", " ")
    tokens = f"{segment['tokens']} token{'s' if segment['tokens'] != 1 else ''}"
    if segment["call"] is None:
        return f"{tokens} of prompt, first sent by {role}"
    versions = segment.get("versions")
    by = "" if not versions else (
        f", version {versions[0]}" if versions[0] == versions[1]
        else f", versions {versions[0]} to {versions[1]}")
    what = "trained" if segment["trainable"] else "not trained"
    return f"{tokens} sampled by {role} in call {segment['call']}{by}, {what}"


def outline(tree: Tree) -> str:
    """The tree as nested HTML; each segment's text unfolds where there is one."""
    segments = tree["segments"]
    children: dict[int, list[int]] = {}
    for i, segment in enumerate(segments):
        children.setdefault(segment["parent"], []).append(i)
    budget = MOST_TEXTS_CHARACTERS
    parts: list[str] = []
    # What to write next: a segment to begin, or closing tags.
    stack: list[int | str] = ["</ul>", *children.get(-1, [])[::-1], "<ul>"]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            parts.append(item)
            continue
        text = segments[item].get("text")
        if text is not None:
            text = cut(text, min(MOST_TEXT_CHARACTERS, max(budget, 0)))
            budget -= len(text)
        parts.append(f"<li>{_segment(segments[item], text)}")
        below = children.get(item, [])
        if len(below) == 1:  # a chain stays in its column
            stack += ["</li>", below[0]]
        elif below:
            stack += ["</li>", "</ul>", *below[::-1], "<ul>"]
        else:
            stack.append("</li>")
    return f'<div class="tree">{"".join(parts)}</div>'


def cut(text: str, most: int) -> str:
    """A text without its middle when it is longer than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[len(text) - half:]}"


def _segment(segment: Tree, text: str | None) -> str:
    cls = ROLE_CLASSES.get(segment["agent_role"], "c-grey")
    mark = f'<i class="{"" if segment["trainable"] else "text"}"></i>'
    line = f'{mark}{svg.esc(describe(segment))}'
    if text is None:
        return f'<div class="leaf seg {cls}">{line}</div>'
    is_open = " open" if segment["call"] is not None else ""
    return (f'<details class="{cls}"{is_open}><summary class="seg">{line}</summary>'
            f"<pre>{svg.esc(text)}</pre></details>")


def _leaves(segments: list[Tree]) -> list[int]:
    parents = {s["parent"] for s in segments}
    return [i for i in range(len(segments)) if i not in parents]


def _starts(segments: list[Tree]) -> list[int]:
    """Tokens before each segment on its path."""
    starts: list[int] = []
    for segment in segments:
        parent = segment["parent"]
        starts.append(0 if parent < 0 else starts[parent] + segments[parent]["tokens"])
    return starts


def _rows(segments: list[Tree], leaves: list[int]) -> list[int]:
    """The row of each segment: that of the first leaf below it."""
    rows = [-1] * len(segments)
    for row, leaf in enumerate(leaves):
        at = leaf
        while at >= 0 and rows[at] < 0:
            rows[at] = row
            at = segments[at]["parent"]
    return rows
