"""From a grader's value to a score with a status, and from an outcome to its place in the baseline.

Invariant: what could not be measured is never a 0. A NaN, a None or a value out of range makes an
execution UNGRADED; exclusion governs the baseline and the loss together.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

from gyre.base.enums import Outcome, ScoreStatus
from gyre.base.errors import ConfigError
from gyre.base.protocols import Score

INFRA_FAILURE_CHOICES = ("placeholder", "exclude")


def checked_score(value: Any, detail: str = "") -> Score:
    """A grader's value as a score; everything that is no number in [0, 1] gets a failing status.

    Args:
      value: what the grader gave; a bool counts as 0 or 1.
      detail: its raw output, for people.
    """
    if not isinstance(value, numbers.Real) or math.isnan(value):
        return Score(math.nan, ScoreStatus.GRADER_FAILED, detail or f"the grader gave {value!r}")
    if not 0 <= value <= 1:
        return Score(math.nan, ScoreStatus.OUT_OF_RANGE,
                     detail or f"the grader gave {value!r}; expected a number in [0, 1]")
    return Score(float(value), ScoreStatus.OK, detail)


def outcome_after_grading(ended: Outcome, score: Score) -> Outcome:
    """The outcome of an execution whose harness ended as `ended` and whose grader gave `score`.

    Raises:
      ValueError: `ended` is no way in which a harness ends.
    """
    if not ended.is_graded:
        raise ValueError(f"a harness ends as completed, harness_timeout or harness_crashed; got "
                         f"{ended.value}, which is not graded")
    return ended if is_measured(score) else Outcome.UNGRADED


def is_measured(score: Score) -> bool:
    """Whether a score is a number in [0, 1] that a grader measured."""
    return score.status is ScoreStatus.OK and 0 <= score.value <= 1


def score_for_training(outcome: Outcome, score: Score,
                       infra_failure: str = "placeholder") -> tuple[bool, float]:
    """Whether an execution counts in its group's baseline, and with what.

    Args:
      outcome: how it ended.
      score: its grade.
      infra_failure: what an execution with nothing to grade is: "placeholder" counts as 0.0,
        "exclude" does not count.

    Returns:
      (in_baseline, value); the value is NaN outside the baseline, so that a use of it shows.

    Raises:
      ConfigError: another `infra_failure`.
    """
    if infra_failure not in INFRA_FAILURE_CHOICES:
        raise ConfigError(f"rollout.infra_failure must be one of {INFRA_FAILURE_CHOICES}, got "
                          f"{infra_failure!r}")
    if outcome is Outcome.INFRA_FAILURE and infra_failure == "placeholder":
        return True, 0.0
    if outcome.is_graded and is_measured(score):
        return True, float(score.value)
    return False, math.nan
