"""Who may use a run's folder, and what survives a kill."""

import json
import subprocess
import sys

import pytest

from gyre.base.errors import WorkdirError
from gyre.telemetry.provenance import git_state
from gyre.telemetry.run_folder import RunFolder, read_config
from tests.source_tree import ROOT

CONFIG = {"seed": 0, "steps": 16, "cells": {"count": 3, "shape": (1, 2)}}


def listing(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


def test_a_new_folder(tmp_path):
    path = tmp_path / "runs" / "x"
    with RunFolder.open(path, CONFIG) as folder:
        assert not folder.resumed
        folder.record_session(devices=["cpu:0"], resumed_step=0)
    assert json.loads((path / "config.json").read_text()) == {
        "seed": 0, "steps": 16, "cells": {"count": 3, "shape": [1, 2]}}
    assert read_config(path)["seed"] == 0


def test_an_empty_folder_is_as_good_as_none(tmp_path):
    with RunFolder.open(tmp_path, CONFIG) as folder:
        assert not folder.resumed


def test_resuming_adds_a_session(tmp_path):
    for step in (0, 8):
        with RunFolder.open(tmp_path, CONFIG) as folder:
            assert folder.resumed == (step == 8)
            folder.record_session(devices=["cpu:0"], resumed_step=step)
    sessions = json.loads((tmp_path / "provenance.json").read_text())["sessions"]
    assert [s["resumed_step"] for s in sessions] == [0, 8]
    for field in ("git", "packages", "python", "platform", "devices", "argv", "time_s"):
        assert field in sessions[0]
    assert "numpy" in sessions[0]["packages"]


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "metrics.jsonl"])
def test_a_foreign_folder_is_refused_and_not_touched(tmp_path, name):
    (tmp_path / name).write_text('{"seed": 0}')
    before = listing(tmp_path)
    with pytest.raises(WorkdirError, match=f"not the folder of a gyre run.*{name}"):
        RunFolder.open(tmp_path, CONFIG)
    assert listing(tmp_path) == before


def test_a_file_is_refused(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(WorkdirError, match="is a file"):
        RunFolder.open(tmp_path / "x", CONFIG)


def test_another_config_is_refused_naming_the_fields(tmp_path):
    RunFolder.open(tmp_path, CONFIG).close()
    before = listing(tmp_path)
    other = {"seed": 1, "steps": 16, "cells": {"count": 4, "shape": (1, 2)}, "mu": 2}
    with pytest.raises(WorkdirError) as e:
        RunFolder.open(tmp_path, other)
    for part in ("cells.count: 3 in the folder, 4 now", "seed: 0 in the folder, 1 now",
                 "mu: absent in the folder, 2 now"):
        assert part in str(e.value)
    assert "shape" not in str(e.value) and "steps" not in str(e.value)
    after = listing(tmp_path)
    assert {n: after[n] for n in ("config.json", "provenance.json")} == {
        n: before[n] for n in ("config.json", "provenance.json")}


def test_fields_that_may_differ_take_the_new_value(tmp_path):
    RunFolder.open(tmp_path, CONFIG).close()
    new = {"seed": 0, "steps": 32, "cells": {"count": 4, "shape": (1, 2)}}
    with pytest.raises(WorkdirError, match="cells.count"):
        RunFolder.open(tmp_path, new, may_differ=("steps",))
    with RunFolder.open(tmp_path, new, may_differ=("steps", "cells")) as folder:
        assert folder.resumed
    assert read_config(tmp_path)["steps"] == 32


def test_corrupt_folders_are_refused(tmp_path):
    RunFolder.open(tmp_path, CONFIG).close()
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config[:20])
    with pytest.raises(WorkdirError, match="not valid JSON"):
        RunFolder.open(tmp_path, CONFIG)
    (tmp_path / "config.json").unlink()
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(WorkdirError, match="no config.json"):
        RunFolder.open(tmp_path, CONFIG)


@pytest.mark.parametrize("left", [
    {".gyre.lock": "1"}, {"provenance.json.tmp": "{"},
    {"provenance.json": '{"gyre_run_format": 1, "sessions": []}', "config.json.tmp": "{"}])
def test_a_kill_while_the_folder_is_made_leaves_it_usable(tmp_path, left):
    for name, text in left.items():
        (tmp_path / name).write_text(text)
    with RunFolder.open(tmp_path, CONFIG) as folder:
        assert not folder.resumed
    with RunFolder.open(tmp_path, CONFIG) as folder:
        assert folder.resumed


def test_a_run_of_another_format_is_refused(tmp_path):
    (tmp_path / "provenance.json").write_text('{"gyre_run_format": 99}')
    with pytest.raises(WorkdirError, match="format 99"):
        RunFolder.open(tmp_path, CONFIG)


def test_two_processes_never_share_a_folder(tmp_path):
    code = (f"from gyre.telemetry.run_folder import RunFolder\n"
            f"from gyre.base.errors import WorkdirError\n"
            f"try: RunFolder.open({str(tmp_path)!r}, {CONFIG!r})\n"
            f"except WorkdirError as e: print(e)\nelse: print('opened')\n")

    def other():
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True,
                              text=True, timeout=30).stdout

    with RunFolder.open(tmp_path, CONFIG):
        assert "in use by another process" in other()
    assert other().strip() == "opened"


def test_rows_of_lost_steps_are_dropped(tmp_path):
    with RunFolder.open(tmp_path, CONFIG) as folder:
        folder.metrics_path.write_text("".join(f'{{"step": {i}}}\n' for i in range(1, 6)) + "{")
        for step in (0, 5):
            folder.append_evaluation({"step": step, "mean_score": 0.5})
        folder.truncate_after(3)
        steps = [json.loads(line)["step"] for line in folder.metrics_path.read_text().splitlines()]
        assert steps == [1, 2, 3]
        [evaluation] = folder.evaluations_path.read_text().splitlines()
        assert json.loads(evaluation)["step"] == 0


def test_reading_the_config_of_no_run(tmp_path):
    with pytest.raises(WorkdirError, match="not the folder of a run"):
        read_config(tmp_path)


def test_git_state(tmp_path):
    assert git_state(tmp_path) is None

    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c",
                        *arguments], check=True, capture_output=True)

    (tmp_path / "gyre").mkdir()
    (tmp_path / "gyre" / "__init__.py").write_text("a = 1\n")
    git("init")
    assert git_state(tmp_path) is None  # somebody's repository that does not track gyre
    git("add", ".")
    git("commit", "-m", "x")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty_diff"] == "" and clean["untracked"] == []
    (tmp_path / "gyre" / "__init__.py").write_text("a = 2\n")
    (tmp_path / "new.py").write_text("")
    dirty = git_state(tmp_path)
    assert "+a = 2" in dirty["dirty_diff"] and dirty["untracked"] == ["new.py"]
