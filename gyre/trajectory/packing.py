"""Packs the trees of executions into micro-steps of few fixed shapes.

Invariants:
- the rows of all micro-steps together are every execution's trained tokens, each exactly once;
- a row has the weight of its whole execution, whichever micro-steps the execution is spread over,
  so the summed loss does not depend on buckets, order or splits;
- what executions share as a token prefix (a group's prompt) is computed once per micro-step;
- the result depends on the arguments only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gyre.trajectory.tree import TreeTokens


@dataclasses.dataclass(frozen=True, eq=False)
class TrainExecution:
    """An execution as the loss sees it.

    Attributes:
      execution_id, group_index: where it comes from.
      tree: its pruned tree.
      advantage: of all its tokens.
      weight: of each of its trained tokens, 1 over their number; see `execution_weight`.

    Raises:
      ValueError: an advantage or weight that is not finite, a negative weight.
    """

    execution_id: str
    group_index: int
    tree: TreeTokens
    advantage: float
    weight: float

    def __post_init__(self):
        if not np.isfinite(self.advantage) or not (np.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"execution {self.execution_id!r} has advantage {self.advantage} and "
                             f"weight {self.weight}; both must be finite, the weight >= 0")


def execution_weight(tree: TreeTokens) -> float:
    """1 / (trained tokens of the execution), or 0.0 when it has none."""
    n = int(tree.trained.sum())
    return 1.0 / n if n else 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class MicroStep:
    """One forward-backward: a forest in depth-first order and the rows of its loss.

    Axes: N tokens, R rows, both padded. hidden[pred[rows[r]]] predicts tokens[rows[r]].

    Attributes:
      tokens: i32[N] (padding 0).
      pos: i32[N], depth in the tree (padding 0).
      pred: i32[N], index of the predecessor, -1 at a root (padding -1).
      sub_end: i32[N], exclusive end of the subtree: j is an ancestor of i, or i itself, iff j <= i
        and sub_end[i] <= sub_end[j] (padding i + 1).
      rows: i32[R], index of a trained token; its pred is >= 0 (padding 0).
      row_exec: i32[R], index in `executions` (padding -1).
      w: f32[R], weight of the row's execution; not divided by the number of executions (padding 0).
      adv: f32[R], advantage of the row's execution (padding 0).
      old_logp: f32[R], log-prob when sampled (padding 0).
      version: i32[R], weights that sampled it (padding -1).
      n_tokens, n_rows: without padding.
      executions, groups: what has rows here, in order of first appearance.
    """

    tokens: np.ndarray
    pos: np.ndarray
    pred: np.ndarray
    sub_end: np.ndarray
    rows: np.ndarray
    row_exec: np.ndarray
    w: np.ndarray
    adv: np.ndarray
    old_logp: np.ndarray
    version: np.ndarray
    n_tokens: int
    n_rows: int
    executions: tuple[str, ...]
    groups: tuple[int, ...]


class PackingStats(NamedTuple):
    """Tokens of some executions.

    Attributes:
      tokens_unique: nodes of their merged tree: the least that can be computed.
      tokens_linearized: of all root-to-leaf paths, what a trainer without trees computes.
      tokens_trained: rows of the loss.
    """

    tokens_unique: int
    tokens_linearized: int
    tokens_trained: int


def pack(executions: Sequence[TrainExecution], n_buckets: Sequence[int] = (512, 1024),
         r_buckets: Sequence[int] = (256, 512)) -> list[MicroStep]:
    """Fills micro-steps with whole executions, greedily, in the given order.

    An execution that is larger than the largest bucket is split by paths; the pieces recompute the
    prefix that they share. Tokens that no trained token depends on are left out.

    Args:
      executions: with their pruned trees; those without trained tokens are passed over.
      n_buckets: sizes N of micro-steps, ascending.
      r_buckets: sizes R of their rows, ascending.

    Raises:
      ValueError: buckets that are not ascending positive numbers; a single path with more tokens
        than the largest n_bucket.
    """
    for name, buckets in (("n_buckets", n_buckets), ("r_buckets", r_buckets)):
        if not buckets or buckets[0] < 1 or any(a >= b for a, b in zip(
                buckets, buckets[1:], strict=False)):
            raise ValueError(f"{name} must be ascending positive numbers, got {tuple(buckets)}")
    n_max, r_max = n_buckets[-1], r_buckets[-1]
    out: list[MicroStep] = []
    forest = _Forest()
    for execution in executions:
        for piece in _pieces(execution, n_max, r_max):
            new = forest.count_new(piece)
            if forest.rows and (len(forest.tokens) + new > n_max
                                or len(forest.rows) + len(piece.rows) > r_max):
                out.append(forest.micro_step(n_buckets, r_buckets))
                forest = _Forest()
            forest.add(piece)
    if forest.rows:
        out.append(forest.micro_step(n_buckets, r_buckets))
    return out


def packing_stats(executions: Sequence[TrainExecution]) -> PackingStats:
    """What the executions' trees hold, untrained tails included, before padding and splits."""
    forest = _Forest()
    linearized = trained = 0
    for execution in executions:
        tree = execution.tree
        everything = np.arange(len(tree))
        forest.add(_Piece(execution, everything, everything[:0]))
        is_leaf = np.ones(len(tree), bool)
        is_leaf[tree.parent[tree.parent >= 0]] = False
        linearized += int((_depths(tree.parent) + 1)[is_leaf].sum())
        trained += int(tree.trained.sum())
    return PackingStats(len(forest.tokens), linearized, trained)


class _Piece(NamedTuple):
    """Part of an execution: token indices in its tree (ascending, closed under parents), rows."""

    execution: TrainExecution
    tokens: np.ndarray
    rows: np.ndarray


def _depths(parent: np.ndarray) -> np.ndarray:
    depth = np.zeros(len(parent), np.int32)
    for i, p in enumerate(parent.tolist()):
        if p >= 0:
            depth[i] = depth[p] + 1
    return depth


def _pieces(execution: TrainExecution, n_max: int, r_max: int) -> list[_Piece]:
    """The execution in pieces that fit a micro-step: one where it does, else split by paths."""
    tree = execution.tree
    trained, parent = tree.trained, tree.parent
    needed, leads_on = trained.copy(), np.zeros(len(tree), bool)
    for i in range(len(tree) - 1, -1, -1):
        if needed[i] and parent[i] >= 0:
            needed[parent[i]] = leads_on[parent[i]] = True
    rows = np.flatnonzero(trained)
    if not rows.size:
        return []
    if needed.sum() <= n_max and rows.size <= r_max:
        return [_Piece(execution, np.flatnonzero(needed), rows)]
    pieces: list[_Piece] = []
    tokens_in: set[int] = set()
    rows_in: list[int] = []
    assigned: set[int] = set()

    def close():
        pieces.append(_Piece(execution, np.array(sorted(tokens_in)), np.array(rows_in)))
        tokens_in.clear()
        rows_in.clear()

    for leaf in np.flatnonzero(needed & ~leads_on).tolist():
        path = _path(parent, leaf)
        if len(path) > n_max:
            raise ValueError(
                f"execution {execution.execution_id!r} has a path of {len(path)} tokens, but the "
                f"largest micro-step has {n_max}; raise the largest of trajectory.n_buckets to the "
                "longest context")
        todo = [i for i in path if trained[i] and i not in assigned]
        assigned.update(todo)
        if rows_in and (len(tokens_in.union(path)) > n_max or len(rows_in) + len(todo) > r_max):
            close()
        while len(todo) > r_max:  # more rows than a micro-step has: its path is computed again
            rows_in.extend(todo[:r_max])
            tokens_in.update(path[:path.index(rows_in[-1]) + 1])
            todo = todo[r_max:]
            close()
        tokens_in.update(path)
        rows_in.extend(todo)
    close()
    return pieces


def _path(parent: np.ndarray, leaf: int) -> list[int]:
    path = []
    while leaf >= 0:
        path.append(leaf)
        leaf = int(parent[leaf])
    return path[::-1]


class _Forest:
    """Pieces merged on their shared token prefixes: a trie over executions."""

    def __init__(self):
        self.tokens: list[int] = []
        self.parent: list[int] = []
        self.rows: list[tuple[int, TrainExecution, int]] = []  # node, execution, token in its tree
        self._child: dict[tuple[int, int], int] = {}  # (node, token) -> node

    def count_new(self, piece: _Piece) -> int:
        """Nodes that `add` would make."""
        new, node_of = 0, {-1: -1}
        tokens, parent = piece.execution.tree.tokens.tolist(), piece.execution.tree.parent.tolist()
        for i in piece.tokens.tolist():
            above = node_of.get(parent[i])
            node = None if above is None else self._child.get((above, tokens[i]))
            if node is None:
                new += 1
            else:
                node_of[i] = node
        return new

    def add(self, piece: _Piece) -> None:
        """Merges a piece."""
        node_of = {-1: -1}
        tokens, parent = piece.execution.tree.tokens.tolist(), piece.execution.tree.parent.tolist()
        for i in piece.tokens.tolist():
            key = (node_of[parent[i]], tokens[i])
            node = self._child.get(key)
            if node is None:
                node = self._child[key] = len(self.tokens)
                self.tokens.append(tokens[i])
                self.parent.append(key[0])
            node_of[i] = node
        self.rows += [(node_of[i], piece.execution, i) for i in piece.rows.tolist()]

    def micro_step(self, n_buckets: Sequence[int], r_buckets: Sequence[int]) -> MicroStep:
        """The forest in depth-first order, padded to the smallest buckets that hold it."""
        n, r = len(self.tokens), len(self.rows)
        size = next(b for b in n_buckets if b >= n)
        n_rows = next(b for b in r_buckets if b >= r)
        order = self._depth_first()
        place = np.empty(n, np.int32)
        place[order] = np.arange(n, dtype=np.int32)
        pred = np.full(size, -1, np.int32)
        parent = np.array(self.parent, np.int32)[order]
        pred[:n] = np.where(parent >= 0, place[np.maximum(parent, 0)], -1)
        sub_end = np.arange(1, size + 1, dtype=np.int32)
        for i in range(n - 1, -1, -1):
            if pred[i] >= 0:
                sub_end[pred[i]] = max(sub_end[pred[i]], sub_end[i])
        ids: dict[str, int] = {}
        for _, execution, _ in self.rows:
            ids.setdefault(execution.execution_id, len(ids))
        rows = sorted((int(place[node]), ids[e.execution_id], i, e)
                      for node, e, i in self.rows)

        def column(values: list, padding: int, dtype: type) -> np.ndarray:
            return np.array(values + [padding] * (n_rows - r), dtype)

        return MicroStep(
            tokens=np.pad(np.array(self.tokens, np.int32)[order], (0, size - n)),
            pos=np.pad(_depths(pred[:n]), (0, size - n)), pred=pred, sub_end=sub_end,
            rows=column([row[0] for row in rows], 0, np.int32),
            row_exec=column([row[1] for row in rows], -1, np.int32),
            w=column([row[3].weight for row in rows], 0, np.float32),
            adv=column([row[3].advantage for row in rows], 0, np.float32),
            old_logp=column([row[3].tree.logprobs[row[2]] for row in rows], 0, np.float32),
            version=column([row[3].tree.versions[row[2]] for row in rows], -1, np.int32),
            n_tokens=n, n_rows=r, executions=tuple(ids),
            groups=tuple(dict.fromkeys(e.group_index for _, e, _ in self.rows)))

    def _depth_first(self) -> list[int]:
        children: list[list[int]] = [[] for _ in self.tokens]
        roots = []
        for node, parent in enumerate(self.parent):
            (children[parent] if parent >= 0 else roots).append(node)
        order, stack = [], roots[::-1]
        while stack:
            order.append(stack.pop())
            stack += children[order[-1]][::-1]
        return order
