"""The runner: one outcome each, what is kept, and no process left behind."""

import asyncio
import math
import os
import stat
import time

import pytest

from gyre.base.enums import Outcome, ScoreStatus
from gyre.base.errors import ConfigError
from gyre.base.protocols import Score, Task
from gyre.rollout.graders.checks import grade
from gyre.rollout.harnesses import HARNESSES
from gyre.rollout.runner import Runner, RunnerLimits
from gyre.rollout.sandboxes import SandboxError
from gyre.rollout.sandboxes.local import LocalSandboxes

URL = "http://127.0.0.1:9/v1"
TASK = Task("t", "Make a and b.", files={"in/x.txt": "x", "empty/": ""}, payload={
    "checks": [{"folders": ["a"]}, {"folders": ["b"]}]})


def shell(script):
    return HARNESSES.get("command")(["bash", "-c", script], budget_exit_codes=(75,))


def run(tmp_path, script, limits=None, grader=grade, sandboxes=None, **options):
    events = []
    runner = Runner(shell(script), sandboxes or LocalSandboxes(tmp_path / "s"), grader,
                    limits or RunnerLimits(20.0, 30.0, retry_delay_s=0.01),
                    on_event=lambda kind, **fields: events.append((kind, fields)), **options)
    result = asyncio.run(runner.run(TASK, "e0", URL, "gk-1"))
    return result, events


def alive(word):
    """Whether a process that has `word` in its command line runs."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if word.encode() in file.read():
                    return True
        except (FileNotFoundError, ProcessLookupError):
            pass
    return False


def test_a_black_box_harness_completes(tmp_path):
    result, events = run(tmp_path, 'cat in/x.txt; ls -d empty; echo $OPENAI_BASE_URL '
                         '$OPENAI_API_KEY; echo "secret=$SECRET"; mkdir a b')
    assert (result.outcome, result.score.value, result.exit_code) == (Outcome.COMPLETED, 1.0, 0)
    assert result.log_tail.split() == ["xempty", URL, "gk-1", "secret="]
    assert [kind for kind, _ in events] == ["start", "grade", "finish"]
    assert events[2][1]["outcome"] == "completed" and events[2][1]["wall_s"] > 0
    assert not (tmp_path / "s" / "e0").exists()


@pytest.mark.parametrize("script, outcome, code, score", [
    ("mkdir a; exit 7", Outcome.HARNESS_CRASHED, 7, 0.5),
    ("mkdir a; exit 71", Outcome.HARNESS_CRASHED, 71, 0.5),
    ("mkdir a b; kill -11 $$", Outcome.HARNESS_CRASHED, -11, 1.0),
    ("mkdir a; exit 75", Outcome.HARNESS_TIMEOUT, 75, 0.5)])
def test_what_is_left_is_graded(tmp_path, script, outcome, code, score):
    result, _ = run(tmp_path, script)
    assert (result.outcome, result.exit_code, result.score.value) == (outcome, code, score)


@pytest.mark.parametrize("trap", ["", "trap '' TERM; "])
def test_a_timeout_grades_and_leaves_no_process(tmp_path, trap):
    begin = time.monotonic()
    result, _ = run(tmp_path, trap + "mkdir a; setsid sleep 31.4151; sleep 31.4151",
                    RunnerLimits(0.5, 20.0, term_grace_s=0.3))
    assert (result.outcome, result.score.value) == (Outcome.HARNESS_TIMEOUT, 0.5)
    assert time.monotonic() - begin < 8
    assert not alive("31.4151")


def test_background_processes_die_before_the_grade(tmp_path):
    result, _ = run(tmp_path, "mkdir a; (setsid sleep 31.4152 &) ; sleep 31.4152 & exit 0")
    assert result.outcome is Outcome.COMPLETED and not alive("31.4152")


def test_cancelling_kills_and_cleans_up(tmp_path):
    async def scenario():
        started = asyncio.Event()
        runner = Runner(shell("trap '' TERM; setsid sleep 31.4153 & sleep 31.4153"),
                        LocalSandboxes(tmp_path), grade,
                        on_event=lambda kind, **_: started.set())
        running = asyncio.ensure_future(runner.run(TASK, "e0", URL, "k"))
        await started.wait()
        await asyncio.sleep(0.3)
        assert alive("31.4153")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())
    assert not alive("31.4153") and not (tmp_path / "e0").exists()


def test_grader_failures_are_retried_and_never_a_zero(tmp_path):
    def broken(task, workspace):
        raise KeyError("no such key")

    result, events = run(tmp_path, "true", grader=broken)
    assert result.outcome is Outcome.UNGRADED and math.isnan(result.score.value)
    assert result.score.status is ScoreStatus.GRADER_FAILED
    assert [kind for kind, _ in events].count("retry") == 2
    grades = [fields for kind, fields in events if kind == "grade"]
    assert grades == [{"execution": "e0", "status": "grader_failed", "score": None}]

    calls = []

    def flaky(task, workspace):
        calls.append(1)
        return Score(math.nan if len(calls) < 3 else 0.25, ScoreStatus.OK)

    result, _ = run(tmp_path, "true", grader=flaky)
    assert (result.outcome, result.score.value) == (Outcome.COMPLETED, 0.25)


def test_a_graders_zero_is_a_score(tmp_path):
    result, events = run(tmp_path, "true")
    assert (result.outcome, result.score.value) == (Outcome.COMPLETED, 0.0)
    assert result.score.status is ScoreStatus.OK


def test_the_overall_limit_passes_before_a_grade(tmp_path):
    def slow(task, workspace):
        time.sleep(1.5)
        return Score(1.0, ScoreStatus.OK)

    result, _ = run(tmp_path, "true", RunnerLimits(0.8, 1.0), grader=slow)
    assert result.outcome is Outcome.OVERALL_TIMEOUT
    assert result.score.status is not ScoreStatus.OK


def test_a_program_that_is_not_there_is_an_infra_failure(tmp_path):
    events = []
    runner = Runner(HARNESSES.get("command")(["/no/such/program"]), LocalSandboxes(tmp_path), grade,
                    RunnerLimits(retry_delay_s=0.01),
                    on_event=lambda kind, **_: events.append(kind))
    result = asyncio.run(runner.run(TASK, "e0", URL, "k"))
    assert result.outcome is Outcome.INFRA_FAILURE
    assert (result.score.value, result.score.status) == (0.0, ScoreStatus.PLACEHOLDER)
    assert "/no/such/program" in result.score.detail and "retry" in events


def test_a_sandbox_that_comes_up_at_the_second_attempt(tmp_path):
    class Flaky(LocalSandboxes):
        attempts = 0

        def create(self, execution_id):
            sandbox = super().create(execution_id)
            self.attempts += 1
            if self.attempts == 1:
                async def fail(*_):
                    raise SandboxError("disk is full")
                sandbox.open = fail
            return sandbox

    result, _ = run(tmp_path, "mkdir a", sandboxes=Flaky(tmp_path / "f"))
    assert (result.outcome, result.score.value) == (Outcome.COMPLETED, 0.5)


def test_kept_workspaces(tmp_path):
    run(tmp_path, "mkdir a; echo hello", keep_workspaces=True)
    assert (tmp_path / "s/e0/workspace/a").is_dir()
    assert (tmp_path / "s/e0/harness.log").read_text() == "hello\n"


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", ""])
def test_files_outside_the_workspace_are_refused(tmp_path, path):
    runner = Runner(shell("true"), LocalSandboxes(tmp_path), grade)
    with pytest.raises(ConfigError, match="must stay in the workspace"):
        asyncio.run(runner.run(Task("t", "", files={path: "x"}), "e0", URL, "k"))


def test_many_executions_at_once_with_limited_starts(tmp_path):
    runner = Runner(shell("mkdir a; sleep 0.3"), LocalSandboxes(tmp_path), grade,
                    RunnerLimits(concurrent_starts=2))

    async def scenario():
        return await asyncio.gather(*(runner.run(TASK, f"e{i}", URL, "k") for i in range(12)))

    results = asyncio.run(scenario())
    assert {(r.outcome, r.score.value) for r in results} == {(Outcome.COMPLETED, 0.5)}
    assert [r.execution_id for r in results] == [f"e{i}" for i in range(12)]


def test_unreadable_folders_are_removed_and_limits_are_checked(tmp_path):
    folder = tmp_path / "s" / "e0" / "workspace"
    (folder / "locked" / "deep").mkdir(parents=True)
    os.chmod(folder / "locked", 0)
    result, _ = run(tmp_path, "mkdir a")  # opening removes what a killed run left
    assert result.score.value == 0.5 and not folder.exists()
    assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) & 0o700 == 0o700
    with pytest.raises(ConfigError, match="overall_timeout_s"):
        RunnerLimits(harness_timeout_s=10.0, overall_timeout_s=5.0)
    with pytest.raises(ConfigError, match="concurrent_starts"):
        RunnerLimits(concurrent_starts=0)
