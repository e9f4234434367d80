"""Chooses the paths of a trajectory tree that training uses (paper: trajectory processor, J_max).

Invariant: every trained token is trained once, however many chosen paths pass through it, because
the result is the union of the paths as a tree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from gyre.base.enums import AgentRole
from gyre.base.errors import ConfigError
from gyre.trajectory.tree import Leaf, TrajectoryTree, TreeTokens

ROLE_ORDER = tuple(AgentRole)


def sampling_rng(seed: int, execution_id: str) -> np.random.Generator:
    """The generator that draws an execution's paths: the same for the same run seed and execution, whatever
    else was drawn before."""
    digest = hashlib.blake2b(f"{seed}:{execution_id}".encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def parse_role_order(names: Sequence[str]) -> tuple[AgentRole, ...]:
    """Agent roles by priority, from a config. Raises ConfigError: each of them has to be there once."""
    if sorted(names) != sorted(ROLE_ORDER):
        raise ConfigError(f"the order of agent roles must name each of {', '.join(ROLE_ORDER)} once; got "
                          f"{', '.join(map(str, names)) or 'none'}")
    return tuple(map(AgentRole, names))


def choose_leaves(tree: TrajectoryTree, j_max: int | None, rng: np.random.Generator,
                  role_order: Sequence[AgentRole] = ROLE_ORDER) -> list[Leaf]:
    """The ends of at most `j_max` paths, in the order they were drawn.

    Each draw takes the best class of agent roles that still has trainable tokens outside the chosen paths,
    and in it a leaf with probability proportional to its path's number of such tokens.

    Args:
      tree: of one execution.
      j_max: most paths, at least 1; None for as many as there are.
      rng: the only randomness.
      role_order: roles, the best first.

    Raises:
      ValueError: j_max below 1.
    """
    if j_max is not None and j_max < 1:
        raise ValueError(f"j_max must be at least 1, got {j_max}; None takes all paths")
    left = tree.trained_counts()
    leaves = tree.leaves()
    ends = np.array([leaf.segment for leaf in leaves], np.int64)
    rank = np.array([role_order.index(leaf.agent_role) for leaf in leaves], np.int64)
    order = tree.depth_first()
    parents = [tree.parent(i) for i in order]
    chosen: list[Leaf] = []
    while j_max is None or len(chosen) < j_max:
        counts = _path_sums(left, order, parents)[ends]
        open_ = counts > 0
        if not open_.any():
            break
        weights = np.where(open_ & (rank == rank[open_].min()), counts, 0)
        leaf = leaves[int(rng.choice(len(leaves), p=weights / weights.sum()))]
        chosen.append(leaf)
        left[tree.path(leaf.segment)] = 0
    return chosen


def _path_sums(values: np.ndarray, order: Sequence[int], parents: Sequence[int]) -> np.ndarray:
    """i64[segments]: the sum of `values` over each segment's path."""
    sums = values.tolist()
    for index, parent in zip(order, parents, strict=True):
        if parent >= 0:
            sums[index] += sums[parent]
    return np.array(sums, np.int64)


def select_paths(tree: TrajectoryTree, j_max: int | None = 5, rng: np.random.Generator | None = None,
                 role_order: Sequence[AgentRole] = ROLE_ORDER) -> TreeTokens:
    """The tree pruned to the union of the chosen paths, in depth-first order.

    Args:
      tree: of one execution.
      j_max: most paths, at least 1; None for as many as there are.
      rng: draws the paths; None is a generator of seed 0.
      role_order: roles, the best first.

    Returns:
      The pruned tree; empty when nothing in the tree is trainable.

    Raises:
      ValueError: j_max below 1.
    """
    leaves = choose_leaves(tree, j_max, np.random.default_rng(0) if rng is None else rng, role_order)
    return tree.flatten(keep={i for leaf in leaves for i in tree.path(leaf.segment)})
