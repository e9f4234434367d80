import math

import numpy as np
import pytest

from gyre.base.enums import Outcome, ScoreStatus
from gyre.base.errors import ConfigError
from gyre.base.protocols import Score
from gyre.trajectory.outcomes import checked_score, outcome_after_grading, score_for_training

OK, FAILED = Score(0.25, ScoreStatus.OK), Score(math.nan, ScoreStatus.GRADER_FAILED)
PLACEHOLDER = Score(0.0, ScoreStatus.PLACEHOLDER)

# outcome, its score -> in the baseline, value, tokens trained
TABLE = [
    (Outcome.COMPLETED, OK, True, 0.25, True),
    (Outcome.HARNESS_TIMEOUT, OK, True, 0.25, True),
    (Outcome.HARNESS_CRASHED, OK, True, 0.25, True),
    (Outcome.UNGRADED, FAILED, False, None, False),
    (Outcome.OVERALL_TIMEOUT, FAILED, False, None, False),
    (Outcome.INFRA_FAILURE, PLACEHOLDER, True, 0.0, False),
]


def test_the_table_has_every_outcome():
    assert [row[0] for row in TABLE] == list(Outcome)


@pytest.mark.parametrize(("outcome", "score", "in_baseline", "value", "trains"), TABLE)
def test_outcome_table(outcome, score, in_baseline, value, trains):
    counted, got = score_for_training(outcome, score)
    assert counted is in_baseline and outcome.trains_tokens is trains
    assert got == value if in_baseline else math.isnan(got)


def test_infra_failures_can_be_excluded():
    counted, value = score_for_training(Outcome.INFRA_FAILURE, PLACEHOLDER, "exclude")
    assert not counted and math.isnan(value)
    assert score_for_training(Outcome.COMPLETED, OK, "exclude") == (True, 0.25)
    with pytest.raises(ConfigError, match="must be one of .* got 'drop'"):
        score_for_training(Outcome.COMPLETED, OK, "drop")


@pytest.mark.parametrize("score", [
    FAILED, Score(math.nan, ScoreStatus.OK), Score(2.0, ScoreStatus.OK), PLACEHOLDER,
    Score(0.5, ScoreStatus.OUT_OF_RANGE)])
def test_a_score_that_is_no_measurement_never_counts(score):
    assert not score_for_training(Outcome.COMPLETED, score)[0]
    assert outcome_after_grading(Outcome.COMPLETED, score) is Outcome.UNGRADED


@pytest.mark.parametrize("value", [0, 0.0, 1, 0.5, True, np.float32(0.5), np.float64(1)])
def test_numbers_in_range_are_scores(value):
    score = checked_score(value, "3 of 4")
    assert (score.value, score.status, score.detail) == (float(value), ScoreStatus.OK, "3 of 4")
    for ended in (Outcome.COMPLETED, Outcome.HARNESS_TIMEOUT, Outcome.HARNESS_CRASHED):
        assert outcome_after_grading(ended, score) is ended


@pytest.mark.parametrize(("value", "status"), [
    (None, ScoreStatus.GRADER_FAILED), (math.nan, ScoreStatus.GRADER_FAILED),
    ("0.5", ScoreStatus.GRADER_FAILED), (1j, ScoreStatus.GRADER_FAILED),
    (-0.01, ScoreStatus.OUT_OF_RANGE), (1.5, ScoreStatus.OUT_OF_RANGE),
    (math.inf, ScoreStatus.OUT_OF_RANGE)])
def test_everything_else_is_a_failed_grade_never_zero(value, status):
    score = checked_score(value)
    assert score.status is status and math.isnan(score.value) and "the grader gave" in score.detail


def test_only_a_way_to_end_can_be_graded():
    with pytest.raises(ValueError, match="got overall_timeout"):
        outcome_after_grading(Outcome.OVERALL_TIMEOUT, OK)
