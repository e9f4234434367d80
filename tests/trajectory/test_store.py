import dataclasses
import math
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import threading

import numpy as np
import pytest

from gyre.base.enums import AgentRole, FinishReason, Outcome, ScoreStatus
from gyre.base.errors import WorkdirError
from gyre.base.ids import execution_id
from gyre.base.protocols import ExecutionResult, SamplingParams, Score
from gyre.trajectory.store import Store
from tests.trajectory.support import branching, call

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "trajectories.sqlite") as s:
        yield s


def _result(group: int, member: int = 0, attempt: int = 0, **fields) -> ExecutionResult:
    return dataclasses.replace(ExecutionResult(
        execution_id(group, member, attempt), f"task-{group}", Outcome.COMPLETED,
        Score(0.5, ScoreStatus.OK, "1 of 2"), 10.0, 20.5, 0, "bye"), **fields)


def _records(result: ExecutionResult) -> list:
    """The branching calls, renamed for an execution."""
    def own(name):
        return f"{result.execution_id}/{name}"
    return [dataclasses.replace(r, call_id=own(r.call_id), execution_id=result.execution_id,
                                prefix_call=r.prefix_call and own(r.prefix_call))
            for r in branching()]


def _add(store: Store, group: int, attempt: int = 0, finish: bool = True, members: int = 2) -> None:
    store.add_group(group, f"task-{group}", "mkdir", 3, attempt, 1.0)
    for member in range(members):
        result = _result(group, member, attempt)
        store.add_execution(group, member, result, _records(result))
    if finish:
        store.finish_group(group, 100.0 - group)


def test_what_is_read_is_what_was_written(tmp_path):
    rich = call("x", [1, 2], [70000, 5], role=AgentRole.SUB_AGENT_SUMMARY, version=4,
                finish=FinishReason.LENGTH, sampling=SamplingParams(9, 0.7, 2**31 - 1, (5, 7)),
                delivered=False, metadata={"dialect": "d", "n_messages": 2, "text": "é\n"},
                logprobs=np.array([-0.1, np.nan], np.float32))
    bare = call("y", [3], [], prefix="x")
    result = _result(0, execution_id="g000000-0", exit_code=None, outcome=Outcome.UNGRADED,
                     score=Score(math.nan, ScoreStatus.GRADER_FAILED, "boom"))
    with Store(tmp_path / "s") as store:
        store.add_group(0, "task-0", "rm", 2, 0, 1.0)
        store.add_execution(0, 1, result, [rich, bare])
        store.add_execution(0, 0, _result(0, 5), [])
    with Store(tmp_path / "s") as store:  # from disk
        first, second = store.executions(0)
        assert (first.member, first.result, first.records) == (0, _result(0, 5), [])
        assert second.member == 1 and math.isnan(second.result.score.value)
        assert dataclasses.replace(second.result, score=None) == dataclasses.replace(
            result, score=None)
        assert second.result.score.status is ScoreStatus.GRADER_FAILED
        for got, expected in zip(second.records, [rich, bare], strict=True):
            for name, value in vars(expected).items():
                if isinstance(value, np.ndarray):
                    np.testing.assert_array_equal(getattr(got, name), value)
                    assert getattr(got, name).dtype == value.dtype
                else:
                    assert getattr(got, name) == value
        assert [r.call_id for r in store.records("g000000-0")] == ["x", "y"]
        assert store.records("nobody") == []


def test_groups_come_in_completion_order(store):
    for group in (0, 1, 2):
        _add(store, group, finish=False)
    assert store.unconsumed() == []
    for group in (2, 0, 1):
        store.finish_group(group, 50.0, "no variance" if group == 0 else "")  # the clock stands
    assert [g.group_index for g in store.unconsumed()] == [2, 0, 1]
    group = store.unconsumed()[1]
    assert (group.task_id, group.kind, group.version_dispatched, group.attempt, group.finished_s,
            group.consumed_step, group.skipped) == (
        "task-0", "mkdir", 3, 0, 50.0, None, "no variance")
    assert store.next_group_index() == 3


def test_each_group_is_consumed_exactly_once(store):
    for group in range(4):
        _add(store, group, finish=group < 3)
    store.consume([0, 1], step=1)
    for groups in ([2, 0], [2, 2], [2, 3], [2, 9]):  # consumed, twice, unfinished, unknown
        with pytest.raises(ValueError, match=r"cannot consume group|is not in the store"):
            store.consume(groups, step=2)
        assert store.consumption_counts() == {0: 1, 1: 1, 2: 0, 3: 0}  # all or nothing
    assert [g.group_index for g in store.unconsumed()] == [2]
    store.consume([2], step=2)
    assert store.consumption_counts() == {0: 1, 1: 1, 2: 1, 3: 0}


def test_consumption_is_rolled_back_to_a_checkpoint(store):
    for group in range(3):
        _add(store, group)
        store.consume([group], step=group + 1)
    assert store.rollback_consumption(after_step=1) == [1, 2]
    assert store.consumption_counts() == {0: 1, 1: 0, 2: 0}
    assert store.rollback_consumption(after_step=1) == []
    store.consume([1, 2], step=2)
    assert set(store.consumption_counts().values()) == {1}


def test_what_was_in_flight_is_dispatched_again(store):
    _add(store, 0)
    _add(store, 1, finish=False, members=1)
    store.add_group(2, "task-2", "rm", 3, 1, 1.0)
    assert store.drop_unfinished() == [(1, 0), (2, 1)]
    assert store.executions(1) == [] and len(store.executions(0)) == 2
    assert store.records("g000001-0") == []
    # Killed before they start again: the next resume finds them again.
    assert store.drop_unfinished() == [(1, 0), (2, 1)]
    _add(store, 1, attempt=1)
    assert store.executions(1)[0].result.execution_id == "g000001-0.r1"
    assert store.drop_unfinished() == [(2, 1)]
    assert store.next_group_index() == 3


def test_a_finished_group_can_be_dropped_but_not_a_consumed_one(store):
    _add(store, 0)
    assert store.drop(0) == (0, 0)
    assert store.unconsumed() == [] and store.executions(0) == []
    _add(store, 0, attempt=1)
    store.consume([0], step=1)
    with pytest.raises(ValueError, match="consumed by step 1; roll that back first"):
        store.drop(0)


def test_wrong_orders_are_refused(store):
    with pytest.raises(ValueError, match="group 0 is not in the store"):
        store.add_execution(0, 0, _result(0), [])
    store.add_group(0, "task-0", "", 0, 0, 1.0)
    for attempt in (0, 2):
        with pytest.raises(ValueError, match=f"under attempt 0 with 0 exec.*got attempt {attempt}"):
            store.add_group(0, "task-0", "", 0, attempt, 1.0)
    store.add_execution(0, 0, _result(0), _records(_result(0)))
    with pytest.raises(ValueError, match="attempt 0 with 1 executions"):
        store.add_group(0, "task-0", "", 0, 1, 1.0)
    with pytest.raises(ValueError, match="stored already"):  # the member
        store.add_execution(0, 0, _result(0, 1), [])
    with pytest.raises(ValueError, match="is of execution 'g000000-0', not 'g000000-1'"):
        store.add_execution(0, 1, _result(0, 1), _records(_result(0)))
    stolen = [dataclasses.replace(_records(_result(0))[0], execution_id="g000000-1")]
    with pytest.raises(ValueError, match="stored already"):  # the call; nothing of it stays
        store.add_execution(0, 1, _result(0, 1), stolen)
    assert len(store.executions(0)) == 1
    with pytest.raises(ValueError, match="cannot join group 0 of task 'task-0'"):
        store.add_execution(0, 1, _result(1), [])
    store.finish_group(0, 2.0)
    with pytest.raises(ValueError, match="finished already"):
        store.finish_group(0, 2.0)
    with pytest.raises(ValueError, match="cannot join"):
        store.add_execution(0, 1, _result(0, 1), [])


def test_threads_share_a_store(store):
    errors = []

    def work(group):
        try:
            _add(store, group)
            store.unconsumed()
        except (ValueError, sqlite3.Error) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(g,)) for g in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(g.group_index for g in store.unconsumed()) == list(range(8))
    assert all(len(store.executions(g)) == 2 for g in range(8))


_WRITER = """
import sys
from gyre.trajectory.store import Store
from tests.trajectory.test_store import _add, _records, _result
store = Store(sys.argv[1])
for group in range(10**6):
    _add(store, group, finish=False)
    if group == 5:  # leave a transaction open, as a kill in the middle of a write does
        print("busy", flush=True)
        with store._transaction():
            result = _result(group, 9)
            store.add_execution(group, 9, result, _records(result))
            sys.stdin.read()
    store.finish_group(group, 1.0)
"""


def test_the_file_is_valid_after_a_kill_in_the_middle_of_a_write(tmp_path):
    path = tmp_path / "trajectories.sqlite"
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert writer.stdout.readline() == "busy\n"
        os.kill(writer.pid, signal.SIGKILL)
    finally:
        writer.kill()
        writer.communicate()
    with Store(path) as store:
        assert store._db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        assert [g.group_index for g in store.unconsumed()] == [0, 1, 2, 3, 4]
        executions = store.executions(5)
        assert [e.member for e in executions] == [0, 1]  # what was not committed is not there
        assert all(len(e.records) == 5 for e in executions)
        assert store.drop_unfinished() == [(5, 0)]


def test_a_foreign_or_corrupt_file_is_refused_and_not_touched(tmp_path):
    text, other = tmp_path / "notes.txt", tmp_path / "other.sqlite"
    text.write_text("my diary, which is no database at all\n" * 100)
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE groups(group_index INTEGER)")
    db.close()
    with Store(tmp_path / "good"):
        pass
    broken = tmp_path / "broken"
    broken.write_bytes((tmp_path / "good").read_bytes()[:3000])
    for path, message in ((text, "not a usable trajectory store"), (other, "not written by gyre"),
                          (broken, "not a usable trajectory store")):
        before = path.read_bytes()
        with pytest.raises(WorkdirError, match=message):
            Store(path)
        assert path.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"notes.txt", "other.sqlite", "good", "broken"}


def test_another_schema_version_is_refused(tmp_path):
    with Store(tmp_path / "s") as store:
        store._db.execute("PRAGMA user_version = 99")
    with pytest.raises(WorkdirError, match="schema version 99, this gyre reads 1"):
        Store(tmp_path / "s")


def test_a_file_that_was_made_but_not_filled_is_a_new_one(tmp_path):
    (tmp_path / "s").touch()
    with Store(tmp_path / "s") as store:
        assert store.groups() == []


def test_reports_read_while_a_run_writes(tmp_path, store):
    _add(store, 0)
    with Store(store.path, read_only=True) as reader:
        assert len(reader.executions(0)) == 2
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.consume([0], 1)
    with pytest.raises(WorkdirError, match="cannot open|not a usable"):
        Store(tmp_path / "missing", read_only=True)
    assert not (tmp_path / "missing").exists()


def test_no_such_folder(tmp_path):
    with pytest.raises(WorkdirError, match="cannot open the trajectory store"):
        Store(tmp_path / "no" / "s")
