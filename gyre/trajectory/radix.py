"""Token sequences as a path-compressed prefix forest in flat arrays.

A node is a run of ids without a branch. Ids lie in one pool in the order they came and never move, so a
node is a range of the pool, and a split cuts the range; whatever a user keeps per token in arrays of its
own, aligned with the pool, stays right. Inserting costs the comparison of what is known, vectorised, and a
copy of what is new.
"""

from __future__ import annotations

import array
from collections.abc import Sequence

import numpy as np

_GROWTH = 1.2  # of arrays; at most a fifth of their memory waits for more
_FIRST_CAPACITY = 256
_WIDE = 16  # children from which on they are found by a dictionary


class GrowingArray:
    """A 1-D array that is appended to."""

    def __init__(self, dtype: type):
        self._data = np.empty(_FIRST_CAPACITY, dtype)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def view(self) -> np.ndarray:
        """The values; valid until the next `extend`."""
        return self._data[:self._size]

    def extend(self, values: np.ndarray | float, n: int | None = None) -> None:
        """Appends values, or one value n times."""
        n = len(values) if n is None else n
        end = self._size + n
        if end > self._data.size:
            data = np.empty(max(int(end * _GROWTH), _FIRST_CAPACITY), self._data.dtype)
            data[:self._size] = self.view
            self._data = data
        self._data[self._size:end] = values
        self._size = end


class RadixForest:
    """The forest. Nodes are numbered from 0 as they come; -1 stands for what is above the roots.

    Attributes:
      ids: the pool.
      start, length: of each node's range of the pool.
      parent: of each node, -1 at a root.
      depth: ids on the path before the node.
    """

    def __init__(self):
        self.ids = GrowingArray(np.int32)
        self.start, self.length = array.array("q"), array.array("i")
        self.parent, self.depth = array.array("i"), array.array("i")
        self._first_id = array.array("i")
        # Children are linked lists; those of -1 begin in `_root_ends`.
        self._child, self._last, self._next = (array.array("i") for _ in range(3))
        self._root_ends = [-1, -1]
        self._wide: dict[int, dict[int, int]] = {}
        self._columns: list[tuple[array.array, int]] = []

    def __len__(self) -> int:
        return len(self.start)

    def column(self, default: int, typecode: str = "b") -> array.array:
        """A value per node: `default` in new ones, the same in both parts of one that is split."""
        values = array.array(typecode, [default] * len(self))
        self._columns.append((values, default))
        return values

    def node_ids(self, node: int) -> np.ndarray:
        """i32[length] of a node; valid until the next insertion."""
        return self.ids.view[self.start[node]:self.start[node] + self.length[node]]

    def insert(self, node: int, ids: np.ndarray) -> list[int]:
        """Adds ids below the end of a node, -1 for a new path from the top.

        Returns:
          The nodes that are these ids, after splits: all but the last were there, the last one ends with
          them. [] for no ids.
        """
        nodes, done = [], 0
        while done < len(ids):
            child = self.find(node, int(ids[done]))
            if child < 0:
                nodes.append(self._append(node, ids[done:]))
                break
            n = self._common(child, ids, done)
            if n < self.length[child]:
                self._split(child, n)
            nodes.append(child)
            node, done = child, done + n
        return nodes

    def count_new(self, node: int, ids: np.ndarray) -> tuple[int, int]:
        """How many of the ids `insert` would add, and the node that they leave the forest in or end in.

        The node is -2 when more ids below these would all be new.
        """
        done = 0
        while done < len(ids):
            child = self.find(node, int(ids[done]))
            if child < 0:
                return len(ids) - done, -2
            n = self._common(child, ids, done)
            done += n
            if n < self.length[child]:
                return len(ids) - done, -2
            node = child
        return 0, node

    def locate(self, node: int, ids: np.ndarray) -> tuple[int, list[int]]:
        """(Node that ids which were inserted below `node` end with, all of their nodes)."""
        nodes, done = [], 0
        while done < len(ids):
            node = self.find(node, int(ids[done]))
            nodes.append(node)
            done += self.length[node]
        return node, nodes

    def ending_at(self, node: int, depth: int) -> int:
        """Where a path that ended with `node` at `depth` ids ends after later splits.

        A split leaves the front under the old number; the rest becomes its first child.
        """
        while self.depth[node] + self.length[node] < depth:
            node = self._child[node]
        return node

    def find(self, node: int, first: int) -> int:
        """The child of `node` that begins with an id, or -1."""
        wide = self._wide.get(node)
        if wide is not None:
            return wide.get(first, -1)
        child, seen = self._ends(node)[0], 0
        while child >= 0 and self._first_id[child] != first:
            child = self._next[child]
            seen += 1
        if seen > _WIDE:
            self._wide[node] = {self._first_id[c]: c for c in self.children(node)}
        return child

    def children(self, node: int) -> list[int]:
        """The nodes below, in the order they were added (the rest of a split node first)."""
        out, child = [], self._ends(node)[0]
        while child >= 0:
            out.append(child)
            child = self._next[child]
        return out

    def is_leaf(self, node: int) -> bool:
        """Whether nothing follows."""
        return self._child[node] < 0

    def path(self, node: int) -> list[int]:
        """Nodes from a root to `node`."""
        out = []
        while node >= 0:
            out.append(node)
            node = self.parent[node]
        return out[::-1]

    def depth_first(self) -> list[int]:
        """All nodes, each after its parent and before its parent's next child."""
        order, node = [], self._root_ends[0]
        while node >= 0:
            order.append(node)
            if self._child[node] >= 0:
                node = self._child[node]
                continue
            while node >= 0 and self._next[node] < 0:
                node = self.parent[node]
            node = self._next[node] if node >= 0 else -1
        return order

    # ------------------------------------------------------------------ internals

    def _common(self, node: int, ids: np.ndarray, done: int) -> int:
        """How many ids from `done` on the node begins with."""
        known = self.node_ids(node)
        n = min(len(known), len(ids) - done)
        differs = known[:n] != ids[done:done + n]
        at = int(differs.argmax()) if n else 0
        return at if n and differs[at] else n

    def _ends(self, node: int) -> Sequence[int]:
        return self._root_ends if node < 0 else (self._child[node], self._last[node])

    def _append(self, parent: int, ids: np.ndarray) -> int:
        depth = self.depth[parent] + self.length[parent] if parent >= 0 else 0
        node = self._new(len(self.ids), len(ids), parent, depth, int(ids[0]))
        self.ids.extend(ids)
        for values, default in self._columns:
            values.append(default)
        last = self._ends(parent)[1]
        if last >= 0:
            self._next[last] = node
        if parent < 0:
            self._root_ends = [node if last < 0 else self._root_ends[0], node]
        else:
            self._last[parent] = node
            if last < 0:
                self._child[parent] = node
        if parent in self._wide:
            self._wide[parent][int(ids[0])] = node
        return node

    def _split(self, node: int, n: int) -> None:
        """Cuts a node after n ids; the rest becomes a new node that takes the children."""
        start = self.start[node] + n
        rest = self._new(start, self.length[node] - n, node, self.depth[node] + n,
                         int(self.ids.view[start]))
        for values, _ in self._columns:
            values.append(values[node])
        self._child[rest], self._last[rest] = self._child[node], self._last[node]
        for child in self.children(rest):
            self.parent[child] = rest
        if node in self._wide:
            self._wide[rest] = self._wide.pop(node)
        self._child[node] = self._last[node] = rest
        self.length[node] = n

    def _new(self, start: int, length: int, parent: int, depth: int, first: int) -> int:
        node = len(self.start)
        for values, value in ((self.start, start), (self.length, length), (self.parent, parent),
                              (self.depth, depth), (self._first_id, first), (self._child, -1),
                              (self._last, -1), (self._next, -1)):
            values.append(value)
        return node


def spans(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """i64[sum(length)]: the ranges start[k] .. start[k] + length[k] - 1, one after the other."""
    before = np.cumsum(length) - length
    return np.arange(int(length.sum())) + np.repeat(start - before, length)
