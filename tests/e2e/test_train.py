"""Whole runs of configs/tiny.py through the command line: train, inspect, interrupt, resume, refuse."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from gyre.elastic.policy import ClusterView, action_from_dict, make_policy
from gyre.telemetry.events import read_events
from gyre.trajectory.store import Store

ROOT = pathlib.Path(__file__).resolve().parents[2]


def start(workdir, *flags, module="experiments.train"):
    return subprocess.Popen(
        [sys.executable, "-m", module, "--config=configs/tiny.py", f"--workdir={workdir}", *flags],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""})


def finish(process, timeout=280):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    """One finished run, looked at by many tests."""
    workdir = tmp_path_factory.mktemp("runs") / "elastic"
    code, out, err = finish(start(workdir))
    assert code == 0, err[-3000:]
    return workdir, out


def test_the_command_says_what_it_did(elastic):
    workdir, out = elastic
    progress = [line for line in out.splitlines() if "step " in line and "cells" in line]
    assert len(progress) == 6
    for word in ("reward", "staleness", "cells", "waterlevel", "tok/s", "ETA"):
        assert word in progress[0]
    assert f"report: {workdir / 'report.html'}" in out
    assert "reward: 0." in out and "held-out: 0." in out


def test_the_folder_holds_what_the_contract_says(elastic):
    workdir, _ = elastic
    metrics = rows(workdir / "metrics.jsonl")
    assert [r["step"] for r in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(r["executions"] == 8 and sum(r["outcomes"].values()) == 8 for r in metrics)
    assert all(r["tokens_trained"] > 0 and r["grad_norm"] > 0 for r in metrics)
    assert all(r["tokens_unique"] < r["tokens_linearized"] for r in metrics)
    assert all(0 <= r["rollout_idle_fraction"] <= 1 for r in metrics)
    assert max(r["staleness_max"] for r in metrics) <= 1  # phi + mu - 1
    config = json.loads((workdir / "config.json").read_text())
    assert config["steps"] == 6 and config["scheduler"] == "elastic"
    assert json.loads((workdir / "provenance.json").read_text())["sessions"][0]["devices"]
    assert len(rows(workdir / "eval.jsonl")) == 2
    assert list((workdir / "tensorboard").iterdir()) and list((workdir / "checkpoints").iterdir())
    assert "<svg" in (workdir / "report.html").read_text()


def test_cells_moved_and_the_log_replays_through_the_policy(elastic):
    workdir, _ = elastic
    events = list(read_events(workdir / "events.jsonl"))
    roles = [(e["cell"], e["role"]) for e in events if e["kind"] == "role"]
    assert (0, "train") in roles and (1, "train") in roles and roles.count((0, "to_train")) >= 1
    decisions = [e for e in events if e["kind"] == "decide"]
    policy = make_policy("elastic")
    assert len(decisions) >= 6
    for e in decisions:
        actions = policy.decide(ClusterView.from_dict(e["view"]))
        assert actions == tuple(action_from_dict(a) for a in e["actions"])
    for before, after in zip(roles, roles[1:], strict=False):  # E2: one transfer at a time
        if before[1] in ("to_train", "to_rollout"):
            assert after == (before[0], before[1].removeprefix("to_"))


def test_trees_branch_by_sub_agents_and_compaction_and_are_trained(elastic):
    workdir, _ = elastic
    with Store(workdir / "trajectories.sqlite", read_only=True) as store:
        assert store.consumption_counts() == {g: 1 for g in range(12)}
        roles = {r.agent_role.value for g in store.groups()
                 for e in store.executions(g.group_index) for r in e.records}
    assert {"main", "sub_agent", "main_summary"} <= roles


def test_resuming_a_finished_run_does_nothing(elastic):
    workdir, _ = elastic
    before = (workdir / "metrics.jsonl").read_text()
    code, out, err = finish(start(workdir))
    assert code == 0, err[-2000:]
    assert "resuming after step 6" in out and (workdir / "metrics.jsonl").read_text() == before


def test_another_config_and_a_foreign_folder_are_refused(elastic, tmp_path):
    workdir, _ = elastic
    code, _, err = finish(start(workdir, "--config.mu=2"))
    assert code == 2 and "WorkdirError" in err and "mu: 1 in the folder, 2 now" in err
    (tmp_path / "thesis.tex").write_text("precious")
    code, _, err = finish(start(tmp_path))
    assert code == 2 and "thesis.tex" in err and [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("flag, message", [
    ("--config.group_size=1", "group_size must be at least 2"),
    ("--config.scheduler=elastik", "unknown scheduler 'elastik'"),
    ("--config.algorithm.options=clip_hgih=0.3", "no option 'clip_hgih'"),
])
def test_a_config_that_cannot_work_is_refused_at_once(tmp_path, flag, message):
    code, _, err = finish(start(tmp_path / "run", flag))
    assert code == 2 and message in err
    assert not (tmp_path / "run").exists()


def harness_processes(marker):
    """Command lines of live processes that mention `marker`."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker in entry.read_bytes():
                found.append(entry.parent.name)
        except OSError:
            continue  # it has just ended, or is not ours
    return found


def test_ctrl_c_stops_cleanly_and_the_same_command_resumes(tmp_path):
    """Each group is consumed exactly once over an interruption, and no harness survives it."""
    workdir = tmp_path / "run"
    process = start(workdir, "--config.steps=8")
    deadline = time.monotonic() + 250
    metrics = workdir / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 4:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130, err[-3000:]
    assert "the same command resumes" in out
    url = re.search(r"gateway at (http://[0-9.:]+)/v1", out)[1]
    assert not harness_processes(url.encode())
    done = len(rows(metrics))
    assert 4 <= done < 8
    with Store(workdir / "trajectories.sqlite", read_only=True) as store:
        consumed = {g.group_index: g.consumed_step for g in store.groups() if g.consumed_step}
        assert len(consumed) == 2 * done
    code, out, err = finish(start(workdir, "--config.steps=8"))
    assert code == 0, err[-3000:]
    assert f"resuming after step {done}" in out
    assert [r["step"] for r in rows(metrics)] == list(range(1, 9))
    with Store(workdir / "trajectories.sqlite", read_only=True) as store:
        groups = store.groups()
        assert [g.group_index for g in groups] == list(range(16))
        steps = {g.group_index: g.consumed_step for g in groups}
    assert sorted(steps.values()) == sorted(list(range(1, 9)) * 2)
    assert {g: s for g, s in steps.items() if g in consumed} == consumed


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path):
    """SIGKILL after step 4: steps after the checkpoint of step 3 are done again, nothing twice."""
    workdir = tmp_path / "run"
    process = start(workdir)
    deadline = time.monotonic() + 250
    metrics = workdir / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 4:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.kill()
    process.wait()
    code, out, err = finish(start(workdir))
    assert code == 0, err[-3000:]
    assert "resuming after step 3" in out
    assert [r["step"] for r in rows(metrics)] == [1, 2, 3, 4, 5, 6]
    with Store(workdir / "trajectories.sqlite", read_only=True) as store:
        assert sorted(g.consumed_step for g in store.groups()) == sorted(list(range(1, 7)) * 2)


@pytest.mark.parametrize("scheduler", ["colocate", "async"])
def test_the_baselines_run_through_the_same_loop(tmp_path, scheduler):
    workdir = tmp_path / scheduler
    code, _, err = finish(start(workdir, f"--config.scheduler={scheduler}", "--config.steps=3"))
    assert code == 0, err[-3000:]
    metrics = rows(workdir / "metrics.jsonl")
    assert len(metrics) == 3 and all(r["tokens_trained"] > 0 for r in metrics)
    staleness = max(r["staleness_max"] for r in metrics)
    assert staleness == 0 if scheduler == "colocate" else staleness <= 1
    events = list(read_events(workdir / "events.jsonl"))
    decisions = [e for e in events if e["kind"] == "decide"]
    options = {"train_cells": 1} if scheduler == "async" else {}
    for e in decisions:
        actions = make_policy(scheduler, **options).decide(ClusterView.from_dict(e["view"]))
        assert actions == tuple(action_from_dict(a) for a in e["actions"])
    trained_on = {e["cell"] for e in events if e["kind"] == "micro_step"}
    assert trained_on == {0} if scheduler == "async" else trained_on <= {0, 1, 2, 3}


def test_evaluate_scores_a_checkpoint(elastic):
    workdir, _ = elastic
    code, out, err = finish(start(workdir, "--step=3", module="experiments.evaluate"))
    assert code == 0, err[-3000:]
    last = rows(workdir / "eval.jsonl")[-1]
    assert last["step"] == 3 and last["n"] == 4 and f"mean score {last['mean_score']:.3f}" in out
    code, _, err = finish(start(workdir, "--step=5", module="experiments.evaluate"))
    assert code == 2 and "no checkpoint of step 5; it has [3, 6]" in err
