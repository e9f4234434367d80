"""From outcomes and records to trainable groups."""

import math

import numpy as np
import pytest

from gyre.algorithms import make_algorithm
from gyre.base.enums import AgentRole, FinishReason, Outcome, ScoreStatus
from gyre.base.protocols import ExecutionResult, SamplingParams, Score
from gyre.training.processor import FinishedExecution, process_group
from gyre.trajectory.record import CallRecord


def finished(member, score, outcome=Outcome.COMPLETED, status=ScoreStatus.OK, tokens=4, delivered=True):
    name = f"g000000-{member}"
    record = CallRecord(
        f"{name}-c", name, AgentRole.MAIN, None, np.arange(3, dtype=np.int32),
        np.arange(tokens, dtype=np.int32) + 10 * member, np.full(tokens, -0.5, np.float32),
        np.zeros(tokens, np.int32), FinishReason.STOP, SamplingParams(8, 1.0), delivered, 0.0, 1.0)
    return FinishedExecution(ExecutionResult(name, "t", outcome, Score(score, status), 0.0, 1.0), (record,))


def process(*executions, name="reinforce", infra_failure="placeholder"):
    return process_group(0, list(executions), make_algorithm(name), j_max=5, seed=0,
                         infra_failure=infra_failure)


def test_weights_and_advantages_by_hand():
    # Leave-one-out: 1 - mean(0, 0) = 1 for the first, 0 - mean(1, 0) = -1/2 for the others.
    group = process(finished(0, 1.0, tokens=4), finished(1, 0.0, tokens=2), finished(2, 0.0, tokens=5))
    assert [e.advantage for e in group.train.executions] == [1.0, -0.5, -0.5]
    assert [e.weight for e in group.train.executions] == [1 / 4, 1 / 2, 1 / 5]
    assert group.train.in_baseline == 3 and group.tokens_trained == 11
    assert group.tokens_unique == 3 + 11 and group.tokens_linearized == 3 * 3 + 11


def test_exclusion_governs_baseline_and_loss():
    nan = math.nan
    group = process(finished(0, 1.0), finished(1, 0.0),
                    finished(2, nan, Outcome.UNGRADED, ScoreStatus.GRADER_FAILED),
                    finished(3, nan, Outcome.OVERALL_TIMEOUT, ScoreStatus.GRADER_FAILED))
    assert group.scores == (1.0, 0.0) and group.train.in_baseline == 2
    assert [e.execution_id for e in group.train.executions] == ["g000000-0", "g000000-1"]
    assert [e.advantage for e in group.train.executions] == [1.0, -1.0]


@pytest.mark.parametrize("infra_failure, scores", [("placeholder", (1.0, 1.0, 0.0)), ("exclude", (1.0, 1.0))])
def test_nothing_to_grade(infra_failure, scores):
    group = process(finished(0, 1.0), finished(1, 1.0),
                    finished(2, 0.0, Outcome.INFRA_FAILURE, ScoreStatus.PLACEHOLDER),
                    infra_failure=infra_failure)
    assert group.scores == scores
    assert bool(group.skipped) == (infra_failure == "exclude")
    assert "g000000-2" not in [e.execution_id for e in group.train.executions]


def test_timeouts_and_crashes_train_with_their_partial_score():
    group = process(finished(0, 0.5, Outcome.HARNESS_TIMEOUT), finished(1, 0.0, Outcome.HARNESS_CRASHED))
    assert [e.advantage for e in group.train.executions] == [0.5, -0.5]


def test_groups_without_signal_say_why():
    assert process(finished(0, 1.0), finished(1, 1.0)).skipped == "no variance"
    lone = process(finished(0, 1.0), finished(1, math.nan, Outcome.UNGRADED, ScoreStatus.GRADER_FAILED))
    assert lone.skipped == "fewer than two scores" and lone.train.in_baseline == 0


def test_an_abandoned_call_trains_nothing_but_its_execution_counts():
    group = process(finished(0, 1.0, delivered=False), finished(1, 0.0))
    assert [e.execution_id for e in group.train.executions] == ["g000000-1"]
    assert group.train.in_baseline == 2
