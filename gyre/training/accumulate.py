"""Sums gradients in an order fixed by micro-step index, whoever computed them and whenever.

Invariant (rule E6): float addition is not associative, so the sum of a batch is defined as one
expression, a canonical binary tree over the micro-step index: node (level, i) is the sum of
(level - 1, 2i) and (level - 1, 2i + 1), and the complete subtrees that cover [0, n) are added from
left to right. Any cell may compute any node whose halves it has; the bits cannot differ. What this
needs: the same micro-step program and the same layout on every cell.

Memory: a cell holds one gradient per root that it cannot merge yet. Claims in aligned blocks of a
power of two keep that to the blocks' roots and the logarithm of one block; claims of single
micro-steps spread over cells leave everything unmerged until the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

Grads = Any
Add = Callable[[Grads, Grads], Grads]
Node = tuple[int, int]  # (level, i): the sum of micro-steps [i << level, (i + 1) << level)


def make_add(shardings: Any = None) -> Add:
    """A compiled sum of two gradients: add(a, b) = a + b. Consumes `a`, whose memory it reuses.

    Args:
      shardings: NamedSharding of every leaf, of operands and result; None leaves it to jax.
    """
    def add(a: Grads, b: Grads) -> Grads:
        return jax.tree.map(jax.numpy.add, a, b)

    if shardings is None:
        return jax.jit(add, donate_argnums=(0,))
    return jax.jit(add, donate_argnums=(0,), in_shardings=(shardings, shardings),
                   out_shardings=shardings)


class GradientTree:
    """One cell's part of a batch's gradient: the roots of the subtrees it could merge.

    Not thread-safe; the owner thread of a cell uses it.

    Args:
      add: as from `make_add`. It may destroy its first argument: every gradient given to this
        object belongs to it from then on.
    """

    def __init__(self, add: Add):
        self._add = add
        self._roots: dict[Node, Grads] = {}

    @property
    def nodes(self) -> list[Node]:
        """The roots held, by the micro-steps they cover."""
        return sorted(self._roots, key=_first)

    def add(self, index: int, grads: Grads) -> None:
        """Adds the gradient sum of micro-step `index`.

        Raises:
          ValueError: a negative index, or one that is already in.
        """
        self._insert((0, index), grads)

    def merge(self, partials: Iterable[tuple[Node, Grads]]) -> None:
        """Adds another cell's roots, whose arrays must lie on this cell's devices.

        Raises:
          ValueError: a root covers a micro-step that is already in.
        """
        for node, grads in sorted(partials, key=lambda part: _first(part[0])):
            self._insert(node, grads)

    def partials(self) -> list[tuple[Node, Grads]]:
        """Gives up all roots, in order, for another cell to `merge`; leaves this tree empty."""
        roots, self._roots = self._roots, {}
        return [(node, roots[node]) for node in sorted(roots, key=_first)]

    def finish(self, micro_steps: int) -> Grads:
        """The sum over micro-steps [0, micro_steps); this tree is empty afterwards.

        Raises:
          ValueError: no micro-steps, a missing one, or one beyond the batch; nothing is lost then.
        """
        if micro_steps < 1:
            raise ValueError(f"a sum needs at least 1 micro-step, got {micro_steps}; a batch "
                             "without micro-steps has no gradient")
        wanted = complete_subtrees(micro_steps)
        if self.nodes != wanted:
            have = {i for node in self._roots for i in _covers(node)}
            missing = sorted(set(range(micro_steps)) - have)
            beyond = sorted(have - set(range(micro_steps)))
            raise ValueError(f"cannot finish a batch of {micro_steps} micro-steps: missing "
                             f"{missing}, beyond the batch {beyond}; merge every cell's part first")
        total = self._roots.pop(wanted[0])
        for node in wanted[1:]:
            total = self._add(total, self._roots.pop(node))
        return total

    def _insert(self, node: Node, grads: Grads) -> None:
        level, index = node
        if level < 0 or index < 0:
            raise ValueError(f"a node is (level >= 0, index >= 0), got {node}")
        clash = sorted(i for root in self._roots for i in _overlap(root, node))
        if clash:
            raise ValueError(f"micro-steps {clash} are already in the sum; each counts once")
        while (level, index ^ 1) in self._roots:
            other = self._roots.pop((level, index ^ 1))
            left, right = (other, grads) if index & 1 else (grads, other)
            grads = self._add(left, right)
            level, index = level + 1, index >> 1
        self._roots[level, index] = grads


def complete_subtrees(micro_steps: int) -> list[Node]:
    """The largest nodes that cover [0, micro_steps) exactly, from left to right.

    6 -> [(2, 0), (1, 2)]: micro-steps 0 to 3, then 4 and 5.
    """
    nodes, start = [], 0
    for level in reversed(range(micro_steps.bit_length())):
        if micro_steps >> level & 1:
            nodes.append((level, start >> level))
            start += 1 << level
    return nodes


def _first(node: Node) -> int:
    return node[1] << node[0]


def _covers(node: Node) -> range:
    level, index = node
    return range(index << level, (index + 1) << level)


def _overlap(a: Node, b: Node) -> range:
    """Micro-steps in both nodes."""
    a_range, b_range = _covers(a), _covers(b)
    return range(max(a_range.start, b_range.start), min(a_range.stop, b_range.stop))
