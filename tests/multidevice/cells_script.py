"""Local cells on virtual devices: hand-over, publication, joining and the update. Prints JSON."""

import json
import queue
import sys
import threading

import jax
import numpy as np

from gyre.algorithms import make_algorithm
from gyre.base.enums import CellRole
from gyre.base.errors import EngineError
from gyre.elastic.backends.local import LocalCell, LocalCore, cell_meshes
from gyre.elastic.cells import Weights
from gyre.elastic.role_transfer import ToTrainTransfer, destination
from gyre.generation.engine import EngineConfig
from gyre.training.optimizer import Optimizer
from gyre.training.step import TrainPrograms
from gyre.trajectory.packing import TrainExecution, pack
from gyre.trajectory.tree import TreeTokens
from tests.generation import helpers as h

ENGINE = EngineConfig(4, 64, (64,), (16,))
SHAPE = (64, 32)


def make_cells(count, shape):
    programs = TrainPrograms(h.MODEL, make_algorithm("grpo").loss, 1.0)
    meshes = cell_meshes(count, shape)
    common = (h.MODEL, ENGINE, programs, [SHAPE], 1 << 20)
    cells = [LocalCore(0, meshes[0], *common, optimizer=Optimizer(1e-3))]
    cells += [LocalCell(i, meshes[i], *common) for i in range(1, count)]
    weights = Weights(0, h.params())
    cells[0].start(weights).result()
    snapshot = cells[0].snapshot().result()
    for cell in cells[1:]:
        cell.start(snapshot).result()
    return cells


class Call:
    """A call whose end can be waited for."""

    def __init__(self, prompt, call_id, max_tokens=40, temperature=0.0, after=None):
        self.done, self.reached, self._after = threading.Event(), threading.Event(), after
        self.call = h.call(prompt, max_tokens, temperature, seed=5, call_id=call_id)
        self.call.emit = self._emit

    def _emit(self, chunk):
        if self._after is not None and len(self.call.ids) >= self._after:
            self.reached.set()
        if chunk.finish is not None or chunk.error is not None:
            self.done.set()

    def result(self):
        assert self.done.wait(60), "the call does not end"
        return list(self.call.ids)


class Router:
    def __init__(self):
        self.removed = []

    def remove(self, name):
        self.removed.append(name)


def move(cells, roles, leaving, weights):
    """Runs a ToTrainTransfer on this thread; returns its events."""
    inbox, events, finished = queue.SimpleQueue(), [], []

    def fail(error):
        raise error
    roles[leaving] = CellRole.TO_TRAIN
    ToTrainTransfer(cells[leaving], cells, roles, weights, router=Router(), post=inbox.put,
                    event=lambda kind, **f: events.append((kind, f)),
                    on_done=lambda: finished.append(True), on_error=fail).start()
    while not finished:
        inbox.get(timeout=60)()
    roles[leaving] = CellRole.TRAIN
    return events


def check_hand_over(cells):
    """Calls of a leaving cell go on elsewhere with exactly the tokens of calls that stayed."""
    snapshot = cells[0].snapshot().result()
    roles = [CellRole.ROLLOUT] * len(cells)
    out = {}
    for temperature in (0.0, 0.9):
        prompts = [np.arange(3 + i, 15 + 2 * i) for i in range(6)]  # 4 get slots, 2 are queued
        stayed = [Call(p, f"s{i}-{temperature}", temperature=temperature) for i, p in enumerate(prompts)]
        for c in stayed:
            cells[2].submit(c.call)
        expected = [c.result() for c in stayed]
        moved = [Call(p, f"m{i}-{temperature}", temperature=temperature, after=5)
                 for i, p in enumerate(prompts)]
        for c in moved:
            cells[1].submit(c.call)
        assert moved[0].reached.wait(60)
        events = move(cells, roles, 1, snapshot)
        tokens = [c.result() for c in moved]
        out[str(temperature)] = {
            "equal": tokens == expected,
            "moved_live": sum(e[1]["kv"] and 0 < e[1]["tokens"] < 40 for e in events),
            "moved": len(events), "first_destination": events[0][1]["destination"]}
        try:
            cells[1].submit(Call(prompts[0], "late").call)
            out[str(temperature)]["refused"] = False
        except EngineError:
            out[str(temperature)]["refused"] = True
        cells[1].take_gradients().result()
        cells[1].serve(snapshot).result()
        roles[1] = CellRole.ROLLOUT
    out["destination_prefers_last"] = destination(cells, roles).index == len(cells) - 1
    return out


def check_publication(cells):
    """A publication waits for running calls, holds queued ones back, and changes the weights."""
    new = Weights(1, jax.device_put(h.params(1), cells[0].engine.param_shardings))
    running = Call(np.arange(9), "running", max_tokens=40, after=3)
    cells[2].submit(running.call)
    assert running.reached.wait(60)
    published = cells[2].publish(new)
    later = Call(np.arange(9), "later", max_tokens=6)
    cells[2].submit(later.call)
    published.result(60)
    running.result(), later.result()
    return {"running_versions": sorted(set(running.call.versions)),
            "later_versions": sorted(set(later.call.versions)),
            "later_is_new_policy": later.call.ids == h.greedy(h.params(1), np.arange(9), 6)}


def micro_steps(count):
    rng = np.random.default_rng(0)
    steps = []
    for i in range(count):
        n = 30
        train = np.arange(n) >= 10
        tree = TreeTokens(tokens=rng.integers(0, 300, n).astype(np.int32),
                          parent=np.arange(-1, n - 1, dtype=np.int32), train=train,
                          logprobs=np.where(train, -5.0, np.nan).astype(np.float32),
                          versions=np.zeros(n, np.int32), call=np.where(train, 0, -1).astype(np.int32),
                          call_ids=("c",))
        steps += pack([TrainExecution(f"e{i}", i, tree, float(rng.normal()), 1 / 20)], (SHAPE[0],),
                      (SHAPE[1],))
    return steps


def check_update(cells, owners):
    """One step of five micro-steps on the given owners; returns the new parameters' bits."""
    snapshot = cells[0].snapshot().result()
    for index in sorted(set(owners) | {0}):
        cells[index].join(snapshot).result()
    for i, micro in enumerate(micro_steps(len(owners))):
        cells[owners[i]].accumulate(i, micro).result()
    partials = [cells[i].take_gradients().result() for i in sorted(set(owners)) if i != 0]
    update = cells[0].apply(partials, len(owners), 8).result()
    return jax.device_get(update.weights.params), update.grad_norm


def main():
    shape = tuple(json.loads(sys.argv[1]))
    cells = make_cells(3, shape)
    result = {"hand_over": check_hand_over(cells), "publication": check_publication(cells)}
    alone, norm = check_update(cells, [0, 0, 0, 0, 0])
    for cell in cells:
        cell.close()
    cells = make_cells(3, shape)
    spread, norm_spread = check_update(cells, [2, 0, 1, 2, 1])
    result["update_equal"] = norm == norm_spread and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True))
    result["update_moves"] = not np.array_equal(alone["embed"], np.asarray(h.params()["embed"]))
    for cell in cells:
        cell.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
