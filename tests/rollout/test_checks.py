"""The checks grader: fractions, tolerance, and nothing read outside the workspace."""

import math
import os

import pytest

from gyre.base.enums import ScoreStatus
from gyre.base.protocols import Score, Task
from gyre.rollout.graders import checked_score
from gyre.rollout.graders.checks import grade


def task(*checks):
    return Task("t", "", payload={"checks": list(checks)})


def test_score_is_the_fraction_of_subgoals_that_hold(tmp_path):
    (tmp_path / "plum").mkdir()
    (tmp_path / "a.txt").write_text("one\n")
    score = grade(task({"folders": ["plum"]}, {"files": {"a.txt": "one"}},
                       {"files": {"a.txt": "two\n"}}, {"absent": ["a.txt"]}), tmp_path)
    assert score.value == 2 / 4  # by hand: the first two hold
    lines = score.detail.split("\n")
    assert lines[:2] == ["1: ok", "2: ok"]
    assert "'one\\n'" in lines[2] and "'two\\n'" in lines[2]
    assert "a.txt is still there (file)" in lines[3]


@pytest.mark.parametrize("text, holds", [
    ("3\n", True), ("3 a.txt\n", True), ("  3", True), ("4\n", False), ("33", False), ("", False),
    ("3 2 1", False)])
def test_first_words(tmp_path, text, holds):
    (tmp_path / "n.txt").write_text(text)
    assert grade(task({"first_words": {"n.txt": "3"}}), tmp_path).value == float(holds)


def test_bystanders_must_be_intact(tmp_path):
    check = task({"absent": ["a"], "intact": {"b": "b\n"}})
    assert grade(check, tmp_path).value == 0.0
    (tmp_path / "b").write_text("b\n")
    assert grade(check, tmp_path).value == 1.0


def test_links_are_never_followed(tmp_path):
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "a.txt").write_text("secret")
    (inside / "a.txt").symlink_to(outside / "a.txt")
    (inside / "folder").symlink_to(outside)
    score = grade(task({"files": {"a.txt": "secret"}}, {"files": {"folder/a.txt": "secret"}},
                       {"folders": ["folder"]}), inside)
    assert score.value == 0.0 and "secret" not in score.detail.replace("expected 'secret'", "")


def test_special_files_do_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert grade(task({"files": {"pipe": "x"}}), tmp_path).value == 0.0


@pytest.mark.parametrize("payload", [
    {}, {"checks": []}, {"checks": [{}]}, {"checks": [{"intact": {"a": "b"}}]},
    {"checks": [{"absent": ["../x"]}]}, {"checks": [{"absent": ["/etc/passwd"]}]}])
def test_a_malformed_payload_is_a_grader_failure_not_a_zero(tmp_path, payload):
    score = grade(Task("t", "", payload=payload), tmp_path)
    assert score.status is ScoreStatus.GRADER_FAILED and math.isnan(score.value)


def test_a_missing_workspace_is_a_grader_failure(tmp_path):
    score = grade(task({"absent": ["a"]}), tmp_path / "gone")
    assert score.status is ScoreStatus.GRADER_FAILED


@pytest.mark.parametrize("value", [math.nan, None, -0.1, 1.5, math.inf, "1"])
def test_what_is_no_measurement_is_out_of_range(value):
    assert checked_score(Score(value, ScoreStatus.OK)).status is ScoreStatus.OUT_OF_RANGE


def test_zero_and_one_are_measurements():
    for value in (0, 0.0, 1.0):
        assert checked_score(Score(value, ScoreStatus.OK)).status is ScoreStatus.OK
