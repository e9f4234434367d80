"""The loop alone: fake cells that finish at once, real policies, a real store."""

import itertools
import types
from concurrent.futures import Future

import numpy as np
import pytest

from gyre.base.enums import Outcome, ScoreStatus
from gyre.base.protocols import ExecutionResult, Score, Task
from gyre.elastic.cells import Partial, Update, Weights
from gyre.elastic.mesh_manager import MeshManager
from gyre.elastic.policy import make_policy
from gyre.system.loop import LoopConfig, TrainingLoop
from gyre.training.processor import FinishedExecution, ProcessedGroup
from gyre.training.streaming import TrainGroup
from gyre.trajectory.packing import TrainExecution, pack
from gyre.trajectory.store import Store
from gyre.trajectory.tree import TreeTokens

STEPS, GROUPS, SIZE, MU = 6, 2, 2, 2


def now(value=None):
    future = Future()
    future.set_result(value)
    return future


class FakeCell:
    capacity, standalone, in_flight = 4, False, 0

    def __init__(self, index):
        self.index, self.name, self.steps = index, f"cell{index}", 0
        self.published, self.micro_steps = [], 0

    def publish(self, weights):
        self.published.append(weights.version)
        return now()

    def accumulate(self, index, micro):
        self.micro_steps += 1
        return now({})

    def take_gradients(self):
        return now(Partial(self.index, ()))

    def export_calls(self):
        return now([])

    def nothing(self, *args):
        return now()

    release = serve = join = nothing

    def apply(self, partials, micro_steps, denominator):
        self.steps += 1
        return now(Update(Weights(self.steps, None), 0.0, 0.0))


def one_path():
    n = 8
    train = np.arange(n) >= 4
    return TreeTokens(tokens=np.arange(n, dtype=np.int32), parent=np.arange(-1, n - 1, dtype=np.int32),
                      train=train, logprobs=np.where(train, -1.0, np.nan).astype(np.float32),
                      versions=np.zeros(n, np.int32), call=np.where(train, 0, -1).astype(np.int32),
                      call_ids=("c",))


class Run:
    """A loop over three fake cells; `has_gradient(group)` says whether a group trains anything."""

    def __init__(self, tmp_path, policy, phi, has_gradient):
        self.events, self.steps, self.versions_at_dispatch = [], [], {}
        self.cells = [FakeCell(i) for i in range(3)]
        self._has_gradient = has_gradient

        def event(kind, **data):
            self.events.append((kind, data))
        self.store = Store(tmp_path / "store.db")
        tasks = types.SimpleNamespace(task=lambda i: Task(f"task-{i}", "do it"))
        self.loop = TrainingLoop(
            LoopConfig(STEPS, GROUPS, SIZE, MU, phi, 1, True, 5.0), core=self.cells[0],
            store=self.store, tasks=tasks, dispatch=self._dispatch, process=self._process,
            pack=lambda executions: pack(executions, n_buckets=(16,), r_buckets=(16,)),
            event=event, on_step=self.steps.append)
        router = types.SimpleNamespace(add=lambda cell: None, remove=lambda name: None)
        manager = MeshManager(self.cells, 4, policy, router, self.loop.post, event,
                              self.loop.joined, self.loop.raise_error)
        self.loop.attach(manager, Weights(0, None))
        manager.start()

    def _dispatch(self, start):
        self.versions_at_dispatch[start.index] = start.version
        for member in range(SIZE):
            result = ExecutionResult(execution_id=f"g{start.index}-{member}", task_id=start.task.task_id,
                                     outcome=Outcome.COMPLETED, score=Score(1.0, ScoreStatus.OK),
                                     started_s=0.0, finished_s=1.0)
            self.store.add_execution(start.index, member, result, [])
            self.loop.on_execution(start.index, member, FinishedExecution(result, ()))

    def _process(self, group, executions):
        train = ()
        if self._has_gradient(group):
            train = (TrainExecution(f"g{group}-0", group, one_path(), 1.0, 0.25),)
        return ProcessedGroup(TrainGroup(group, train, SIZE), (1.0, 1.0), "" if train else "no variance",
                              8, 8, 4)


POLICIES = {"elastic": 1.0, "colocate": 0.0, "async": 1.0}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("without", ["all", "none", "every second step", "first burst", "last burst"])
def test_a_run_ends_whatever_groups_carry_a_gradient(tmp_path, name, without):
    first_burst, last = GROUPS * MU, GROUPS * STEPS - GROUPS * MU
    has_gradient = {"all": lambda g: False, "none": lambda g: True,
                    "every second step": lambda g: g // GROUPS % 2 == 0,
                    "first burst": lambda g: g >= first_burst, "last burst": lambda g: g < last}[without]
    run = Run(tmp_path, make_policy(name), POLICIES[name], has_gradient)
    assert run.loop.run()
    assert [s.step for s in run.steps] == list(range(1, STEPS + 1))
    consumed = list(itertools.chain.from_iterable(s.batch.groups for s in run.steps))
    assert sorted(consumed) == list(range(STEPS * GROUPS))  # each exactly once
    assert sum(c.micro_steps for c in run.cells) == sum(len(s.batch.micro_steps) for s in run.steps)
    for step in run.steps:
        stale = [step.batch.version - g.version for g in step.groups]
        assert max(stale) <= POLICIES[name] + MU - 1
    bursts = [data["version"] for kind, data in run.events if kind == "burst_start"]
    assert bursts == list(range(0, STEPS, MU))  # a dispatch at every boundary, and nowhere else


def test_the_core_stays_for_a_batch_that_is_already_complete(tmp_path):
    run = Run(tmp_path, make_policy("elastic"), 1.0, lambda g: True)
    assert run.loop.run()
    moves = [action for kind, data in run.events if kind == "decide" for action in data["actions"]
             if action.get("cell") == 0]
    assert [m["action"] for m in moves] == ["ToTrain"]  # once, and never back at a boundary
