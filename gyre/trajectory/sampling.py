"""Chooses the paths of a trajectory tree that training uses (paper: trajectory processor, J_max).

Invariant: every trained token is trained once, however many chosen paths pass through it, because
the result is the union of the paths as a tree.
"""

from __future__ import annotations

import numpy as np

from gyre.base.enums import AgentRole
from gyre.trajectory.tree import Leaf, TrajectoryTree, TreeTokens


def choose_leaves(tree: TrajectoryTree, j_max: int, rng: np.random.Generator) -> list[Leaf]:
    """The ends of at most `j_max` paths, in the order they were drawn.

    Each draw takes the best class of agent roles (declaration order of `AgentRole`) that still has
    trainable tokens outside the chosen paths, and in it a leaf with probability proportional to its
    path's number of such tokens.

    Args:
      tree: of one execution.
      j_max: most paths, at least 1.
      rng: the only randomness.

    Raises:
      ValueError: j_max below 1.
    """
    if j_max < 1:
        raise ValueError(f"j_max must be at least 1, got {j_max}")
    # A root token has no predecessor, hence no prediction and no place in the count.
    left = [int(s.trainable[s.parent < 0:].sum()) for s in tree.segments]
    leaves = tree.leaves()
    chosen: list[Leaf] = []
    while len(chosen) < j_max:
        counts = {leaf.segment: sum(left[i] for i in tree.path(leaf.segment)) for leaf in leaves}
        for role in AgentRole:
            candidates = [x for x in leaves if x.agent_role is role and counts[x.segment]]
            if candidates:
                break
        else:
            return chosen
        weights = np.array([counts[x.segment] for x in candidates], np.float64)
        leaf = candidates[int(rng.choice(len(candidates), p=weights / weights.sum()))]
        chosen.append(leaf)
        for index in tree.path(leaf.segment):
            left[index] = 0
    return chosen


def select_paths(tree: TrajectoryTree, j_max: int = 5,
                 rng: np.random.Generator | None = None) -> TreeTokens:
    """The tree pruned to the union of the chosen paths, in depth-first order.

    Args:
      tree: of one execution.
      j_max: most paths, at least 1.
      rng: draws the paths; None is a generator of seed 0.

    Returns:
      The pruned tree; empty when nothing in the tree is trainable.

    Raises:
      ValueError: j_max below 1.
    """
    leaves = choose_leaves(tree, j_max, np.random.default_rng(0) if rng is None else rng)
    return tree.flatten(keep={i for leaf in leaves for i in tree.path(leaf.segment)})
