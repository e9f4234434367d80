"""JSON-lines files after kills, and what is written into them."""

import json
import math

import numpy as np
import pytest

from gyre.base.enums import Outcome
from gyre.base.errors import WorkdirError
from gyre.telemetry import jsonl


def test_plain_writes_what_runs_measure():
    row = {"a": np.float32(0.5), "b": np.array([1, 2]), Outcome.COMPLETED: math.nan,
           "c": (1, {"d": np.int64(3)}), "e": Outcome.UNGRADED, "f": True, "g": math.inf}
    assert json.loads(jsonl.line(row)) == {
        "a": 0.5, "b": [1, 2], "completed": None, "c": [1, {"d": 3}], "e": "ungraded", "f": True,
        "g": None}


def test_plain_refuses_objects():
    with pytest.raises(TypeError, match="cannot write a object as JSON"):
        jsonl.plain({"a": object()})


@pytest.mark.parametrize("torn", ['{"step": 3, "re', '{"step": 3}', "\x00\x00", "x" * 200_000])
def test_a_torn_last_line_is_cut(tmp_path, torn):
    path = tmp_path / "f.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + torn)
    jsonl.cut_torn_line(path)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_file_of_one_torn_line_becomes_empty(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text("{" * 100_000)
    jsonl.cut_torn_line(path)
    assert path.read_text() == ""


def test_reading_skips_a_torn_last_line(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text('{"step": 1}\n{"st')
    assert list(jsonl.read(path)) == [{"step": 1}]
    assert list(jsonl.read(tmp_path / "missing.jsonl")) == []


@pytest.mark.parametrize("bad", ["{", "[1]", "7"])
def test_reading_refuses_a_bad_line_in_the_middle(tmp_path, bad):
    path = tmp_path / "f.jsonl"
    path.write_text('{"step": 1}\n' + bad + '\n{"step": 3}\n')
    with pytest.raises(WorkdirError, match="line 2 is not a JSON object"):
        list(jsonl.read(path))


def test_appending_after_a_kill(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text('{"step": 1}\n{"st')
    jsonl.append(path, {"step": 2})
    assert list(jsonl.read(path)) == [{"step": 1}, {"step": 2}]


def test_keep_rows(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text("".join(f'{{"step": {i}}}\n' for i in range(5)) + '{"st')
    assert jsonl.keep_rows(path, lambda row: row["step"] <= 2) == 2
    assert [r["step"] for r in jsonl.read(path)] == [0, 1, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["f.jsonl"]
