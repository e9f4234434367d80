"""Graders: (task, kept workspace) -> Score. They run in this process, on what the harness left."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from gyre.base.enums import ScoreStatus
from gyre.base.protocols import Score, Task

Grader = Callable[[Task, Path], Score]


class GraderError(Exception):
    """A grader could not grade. This is never a score of 0."""


GRADER_ERRORS = (GraderError, ArithmeticError, LookupError, OSError, TypeError, ValueError)
"""What a grader may raise to say that it failed; anything else is a bug and propagates."""


def failed_score(detail: str) -> Score:
    """The score of an execution that has none."""
    return Score(math.nan, ScoreStatus.GRADER_FAILED, detail)


def checked_score(score: Score) -> Score:
    """The score itself, or one with status OUT_OF_RANGE if it claims OK for a non-measurement."""
    if score.status is not ScoreStatus.OK:
        return score
    value = score.value
    if isinstance(value, (int, float)) and math.isfinite(value) and 0.0 <= value <= 1.0:
        return score
    return Score(math.nan, ScoreStatus.OUT_OF_RANGE,
                 f"got {value!r}, expected a number in [0, 1]; {score.detail}")
