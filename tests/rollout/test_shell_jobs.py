"""Shell jobs: pure, balanced, solvable, and never solved by doing nothing or by deleting."""

import re
import shutil
import subprocess

import pytest

from gyre.base.enums import ScoreStatus
from gyre.base.errors import ConfigError
from gyre.rollout.graders.checks import grade
from gyre.rollout.tasks import TASKS
from gyre.rollout.tasks.shell_jobs import KINDS, ShellJobs, solution

ALL = {"kinds": tuple(KINDS), "max_subgoals": 4, "multi_fraction": 0.5}


def lay_out(task, folder):
    folder.mkdir()
    for path, text in task.files.items():
        if path.endswith("/"):
            (folder / path).mkdir()
        else:
            (folder / path).write_text(text)
    return folder


def test_a_task_depends_on_seed_and_index_only():
    one, two = ShellJobs(seed=3, **ALL), ShellJobs(seed=3, **ALL)
    backwards = [two.task(i) for i in reversed(range(40))]
    assert [one.task(i) for i in range(40)] == backwards[::-1]
    assert ShellJobs(seed=4, **ALL).task(0) != one.task(0)
    assert len({one.task(i).instruction for i in range(200)}) == 200


def test_every_window_has_each_kind_once():
    source = ShellJobs(seed=0, **ALL)
    n = len(KINDS)
    for start in (0, n, 7 * n):
        assert [source.task(start + i).kind for i in range(n)] == list(KINDS)


def test_multi_fraction_is_met_in_short_windows_and_for_each_kind():
    source = ShellJobs(seed=0, kinds=("mkdir", "rm", "mv", "touch"), max_subgoals=3,
                       multi_fraction=0.25)
    sizes = [len(source.task(i).payload["checks"]) for i in range(64)]
    for start in range(0, 64, 16):
        assert sum(size > 1 for size in sizes[start:start + 16]) == 4  # 16 * 0.25
    for kind in range(4):
        assert sum(size > 1 for size in sizes[kind::4]) == 4  # 16 of each kind * 0.25
    assert set(sizes) == {1, 2, 3}
    assert all(len(ShellJobs(multi_fraction=1.0).task(i).payload["checks"]) == 1 for i in range(9))


def test_held_out_names_never_occur_in_training():
    source = ShellJobs(seed=1, held_out=48, **ALL)
    tests = source.held_out()
    assert len(tests) == 48

    def names(task):
        return set(re.split(r"[./\n]", "\n".join([*task.files, *task.files.values(),
                                                  *solution(task)]).replace(" ", "\n")))

    shared = set.intersection(set.union(*map(names, tests)),
                              set.union(*(names(source.task(i)) for i in range(500))))
    commands = {"mkdir", "touch", "rm", "mv", "cp", "rmdir", "wc", "-l", "sort", "echo", "sed",
                "-i", "s", "cat", ">", ">>", "<", "txt", "", "2", "3", "4", "5", "6"}
    assert shared <= commands


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_reference_solution_scores_one_and_nothing_scores_zero(tmp_path, split):
    source = ShellJobs(seed=5, held_out=48, **ALL)
    tasks = source.held_out() if split == "held_out" else [source.task(i) for i in range(100)]
    for task in tasks:
        folder = lay_out(task, tmp_path / "w")
        empty = grade(task, folder)
        assert (empty.value, empty.status) == (0.0, ScoreStatus.OK), task
        subprocess.run(["bash", "-c", "\n".join(solution(task))], cwd=folder, check=True)
        solved = grade(task, folder)
        assert solved.value == 1.0, (task, solved.detail)
        shutil.rmtree(folder)


def test_each_subgoal_is_graded_alone(tmp_path):
    source = ShellJobs(seed=2, kinds=tuple(KINDS), max_subgoals=4, multi_fraction=1.0)
    for index in range(24):
        task = source.task(index)
        commands = solution(task)
        for number, command in enumerate(commands):
            folder = lay_out(task, tmp_path / "w")
            subprocess.run(["bash", "-c", command], cwd=folder, check=True)
            score = grade(task, folder)
            assert score.value == 1 / len(commands)
            assert [": ok" in line for line in score.detail.split("\n")] == [
                other == number for other in range(len(commands))]
            shutil.rmtree(folder)


def test_deleting_everything_scores_zero(tmp_path):
    source = ShellJobs(seed=6, **ALL)
    for index in range(36):
        folder = lay_out(source.task(index), tmp_path / "w")
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert grade(source.task(index), folder).value == 0.0
        shutil.rmtree(folder)


@pytest.mark.parametrize("options, wanted", [
    ({"kinds": ("fly",)}, "fly"), ({"kinds": ()}, "kinds"), ({"kinds": ("rm", "rm")}, "different"),
    ({"max_subgoals": 5}, "max_subgoals"), ({"multi_fraction": 1.5}, "multi_fraction"),
    ({"held_out": -1}, "held_out")])
def test_bad_options_are_refused(options, wanted):
    with pytest.raises(ConfigError, match=wanted):
        TASKS.get("shell_jobs")(**options)
