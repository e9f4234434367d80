"""Runs one optimizer step over many schedules on 8 virtual devices and compares the bits.

Usage: gradient_tree_script.py FSDPxTENSOR (the shape of each of the 4 cells). Prints one line per
schedule, and `identical` at the end.
"""

import concurrent.futures
import hashlib
import sys
import threading
import types

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from gyre.models import dense
from gyre.models.sharding import MESH_AXES
from gyre.training.accumulate import GradientTree
from gyre.training.optimizer import Optimizer
from gyre.training.step import TrainPrograms
from tests.ops.trees import batch_of, clipped_loss, random_forest

MODEL = dense.ModelConfig(vocab_size=37, num_layers=2, d_model=16, num_heads=4, num_kv_heads=2,
                          head_dim=8, d_ff=24, max_context_tokens=64)
MICRO_STEPS, N, R, CELLS = 11, 160, 128, 4
EXECUTIONS = 5


class Cells:
    """Four cells of one shape, each with the parameters and its compiled programs."""

    def __init__(self, shape):
        size = shape[0] * shape[1]
        meshes = [Mesh(np.array(jax.devices()[i * size:(i + 1) * size]).reshape(shape), MESH_AXES,
                       axis_types=(AxisType.Auto,) * 2) for i in range(CELLS)]
        programs = TrainPrograms(MODEL, clipped_loss, 1.0, block_size=64)
        self.placed = [programs.on(mesh) for mesh in meshes]
        params = jax.tree.map(np.asarray, jax.jit(lambda: dense.init_params(MODEL, 0))())
        self.params = [jax.device_put(params, p.param_shardings) for p in self.placed]
        self.optimizer = Optimizer(1e-3).on(self.placed[0].param_shardings)
        rng = np.random.default_rng(0)
        self.micro = [types.SimpleNamespace(**batch_of(rng, random_forest(rng, levels=2), N, R))
                      for _ in range(MICRO_STEPS)]

    def gradient(self, cell, index):
        return self.placed[cell].micro_step(self.params[cell], self.micro[index])[0]

    def update(self, core, trees):
        """The core merges the satellites' parts and applies; -> digest of all bits."""
        for tree in trees:
            core.merge([(node, jax.device_put(grads, self.placed[0].param_shardings))
                        for node, grads in tree.partials()])
        return self.apply(core.finish(MICRO_STEPS))

    def apply(self, total):
        state = self.optimizer.init(self.params[0])
        params, state, norm, _ = self.optimizer.apply(self.params[0], state, total, EXECUTIONS)
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves((params, state, norm)):
            digest.update(np.asarray(leaf).tobytes())
        return digest.hexdigest()


def scheduled(cells, rng, count, block, late=False, dies=False):
    """A random claim order of aligned blocks over `count` cells.

    late: the last cell claims nothing in the first half. dies: the last cell loses what it did, and
    the others do it again.
    """
    trees = [GradientTree(cells.placed[c].add) for c in range(count)]
    blocks = [list(range(i, min(i + block, MICRO_STEPS))) for i in range(0, MICRO_STEPS, block)]
    lost = []
    for turn, b in enumerate(rng.permutation(len(blocks))):
        cell = int(rng.integers(count - 1 if late and turn < len(blocks) / 2 else count))
        for index in blocks[b]:
            trees[cell].add(index, cells.gradient(cell, index))
            if dies and cell == count - 1:
                lost.append(index)
    if dies:
        trees[-1] = GradientTree(cells.placed[count - 1].add)
        for index in rng.permutation(lost):
            cell = int(rng.integers(count - 1))
            trees[cell].add(int(index), cells.gradient(cell, int(index)))
    order = [trees[1:][i] for i in rng.permutation(count - 1)]
    return cells.update(trees[0], order)


def threaded(cells, block):
    """Four threads race for the blocks, so that the operating system decides who gets which."""
    trees = [GradientTree(p.add) for p in cells.placed]
    blocks = iter([range(i, min(i + block, MICRO_STEPS)) for i in range(0, MICRO_STEPS, block)])
    lock = threading.Lock()

    def work(cell):
        while True:
            with lock:
                claimed = next(blocks, None)
            if claimed is None:
                return
            for index in claimed:
                trees[cell].add(index, cells.gradient(cell, index))

    with concurrent.futures.ThreadPoolExecutor(CELLS) as pool:
        list(pool.map(work, range(CELLS)))
    return cells.update(trees[0], trees[1:])


def in_claim_order(cells, order):
    """What gyre does not do: a running sum. Shows that the comparison can fail."""
    total = cells.gradient(0, order[0])
    for index in order[1:]:
        total = cells.placed[0].add(total, cells.gradient(0, index))
    return cells.apply(total)


def main(shape):
    cells, rng = Cells(shape), np.random.default_rng(1)
    want = scheduled(cells, rng, 1, 1)
    schedules = {}
    for count in (1, 2, 4):
        for block in (1, 2, 4):
            schedules[f"{count} cells, blocks of {block}"] = scheduled(cells, rng, count, block)
    for count in (2, 4):
        schedules[f"{count} cells, one late"] = scheduled(cells, rng, count, 2, late=True)
        schedules[f"{count} cells, one dies"] = scheduled(cells, rng, count, 2, dies=True)
    for block in (1, 4):
        schedules[f"4 threads, blocks of {block}"] = threaded(cells, block)
    for name, digest in schedules.items():
        print(name, digest[:16])
    different = [name for name, digest in schedules.items() if digest != want]
    running = {in_claim_order(cells, list(order))
               for order in (range(MICRO_STEPS), reversed(range(MICRO_STEPS)))}
    if len(running) == 1:
        sys.exit("running sums agree in both orders: these gradients cannot show a difference")
    if different:
        sys.exit(f"not the bits of one cell in order: {different}")
    print("identical")


if __name__ == "__main__":
    main(tuple(int(n) for n in sys.argv[1].split("x")))
