"""The report and trees commands over a store written by hand."""

import subprocess
import sys

import numpy as np
import pytest

from experiments import report, trees
from gyre.base.enums import AgentRole, FinishReason, Outcome, ScoreStatus
from gyre.base.errors import WorkdirError
from gyre.base.protocols import ExecutionResult, SamplingParams, Score
from gyre.trajectory.record import CallRecord
from gyre.trajectory.store import Store
from tests.source_tree import ROOT
from tests.telemetry import fake_run


def call(execution, name, suffix, completion, prefix=None, role=AgentRole.MAIN, delivered=True):
    n = len(completion)
    return CallRecord(
        call_id=name, execution_id=execution, agent_role=role, prefix_call=prefix,
        suffix_ids=np.array(suffix, np.int32), completion_ids=np.array(completion, np.int32),
        logprobs=np.full(n, -1.0, np.float32), versions=np.full(n, 2, np.int32),
        finish=FinishReason.STOP, sampling=SamplingParams(max_tokens=8), delivered=delivered,
        started_s=1.0, finished_s=2.0, metadata={})


def result(execution, task="t0"):
    return ExecutionResult(execution, task, Outcome.COMPLETED, Score(0.5, ScoreStatus.OK), 1.0, 9.0)


@pytest.fixture
def workdir(tmp_path):
    path = fake_run.make(tmp_path / "run")
    with Store(path / "trajectories.sqlite") as store:
        store.add_group(0, "t0", "rm", 2, 0, 1.0)
        store.add_execution(0, 0, result("g0-0"), [call("g0-0", "a", [1, 2, 3], [4, 5])])
        store.add_execution(0, 1, result("g0-1"), [
            call("g0-1", "b", [1, 2, 3], [4, 6]),
            call("g0-1", "c", [7], [8, 9], prefix="b"),
            call("g0-1", "d", [1, 2, 20], [21], role=AgentRole.SUB_AGENT)])
        store.finish_group(0, 9.0)
    return path


def test_the_structure_of_a_tree(workdir):
    with Store(workdir / "trajectories.sqlite", read_only=True) as store:
        execution = report.most_interesting(store)
    tree = report.tree_to_dict(execution, decode=lambda ids: "-".join(map(str, ids)))
    assert tree["execution"] == "g0-1" and tree["calls"] == 3 and tree["wall_s"] == 8.0
    # Prompt and completion of each call on its own: 5, 5 + 3, 4.
    assert tree["tokens_linearized"] == 17
    rows = [(s["parent"], s["tokens"], s["trainable"], s["call"], s["text"])
            for s in tree["segments"]]
    assert rows == [
        (-1, 2, False, None, "1-2"), (0, 1, False, None, "3"), (1, 2, True, 1, "4-6"),
        (2, 1, False, None, "7"), (3, 2, True, 2, "8-9"), (0, 1, False, None, "20"),
        (5, 1, True, 3, "21")]
    assert [s["agent_role"] for s in tree["segments"]][-1] == "sub_agent"
    assert tree["segments"][2]["versions"] == [2, 2]


def test_report_shows_the_tree_with_most_branches(workdir):
    source = report.write(workdir, decode=lambda ids: f"<{len(ids)}>").read_text()
    assert "One execution: g0-1" in source and "&lt;2&gt;" in source


def test_report_without_trajectories(tmp_path):
    path = fake_run.make(tmp_path / "run")
    assert "One execution" not in report.write(path).read_text()


def test_trees_names_what_exists(workdir):
    text, page = trees.show(workdir, "g0-0")
    assert text.startswith("g0-0: task t0, completed, score 0.5, 1 calls")
    assert page == workdir / "tree-g0-0.html" and page.exists()
    with pytest.raises(WorkdirError, match="no execution 'g9-9'; the newest are g0-0, g0-1"):
        trees.show(workdir, "g9-9")


@pytest.mark.parametrize("module, wanted", [
    ("experiments.report", "report.html"), ("experiments.trees", "g0-1: task t0")])
def test_commands(workdir, tmp_path, module, wanted):
    def run(folder):
        return subprocess.run([sys.executable, "-m", module, f"--workdir={folder}"], cwd=ROOT,
                              capture_output=True, text=True, timeout=60)

    done = run(workdir)
    assert done.returncode == 0 and wanted in done.stdout, done.stderr
    refused = run(tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.strip().startswith("WorkdirError:") and "Traceback" not in refused.stderr
