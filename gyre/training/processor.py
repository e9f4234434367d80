"""From finished executions to what training consumes: baseline, advantages, sampled paths, weights.

Pure: the same records, scores and seed give the same tokens. An execution that is outside the baseline
trains nothing, and one that trains nothing for lack of signal still counts in the step's mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from gyre.algorithms import Algorithm
from gyre.base.enums import AgentRole
from gyre.base.protocols import ExecutionResult
from gyre.training.streaming import TrainGroup
from gyre.trajectory.outcomes import score_for_training
from gyre.trajectory.packing import TrainExecution, execution_weight, packing_stats
from gyre.trajectory.record import CallRecord
from gyre.trajectory.sampling import ROLE_ORDER, sampling_rng, select_paths
from gyre.trajectory.tree import TrajectoryTree


@dataclasses.dataclass(frozen=True)
class FinishedExecution:
    """An execution with its grade and its calls in order."""

    result: ExecutionResult
    records: tuple[CallRecord, ...]


@dataclasses.dataclass(frozen=True)
class ProcessedGroup:
    """A group ready for training and its numbers for metrics.

    Attributes:
      train: what joins a batch.
      scores: of the executions in the baseline.
      skipped: why it has no gradient ("" when it has): fewer than two scores, or no variance.
      tokens_unique, tokens_linearized, tokens_trained: tokens of the pruned trees, of their paths one
        by one, and those in the loss.
    """

    train: TrainGroup
    scores: tuple[float, ...]
    skipped: str
    tokens_unique: int
    tokens_linearized: int
    tokens_trained: int


def process_group(group: int, executions: Sequence[FinishedExecution], algorithm: Algorithm, *,
                  j_max: int | None, seed: int, infra_failure: str,
                  role_order: Sequence[AgentRole] = ROLE_ORDER) -> ProcessedGroup:
    """Prepares a complete group (paper: trajectory processor).

    Args:
      group: its index.
      executions: all members, in member order.
      algorithm: gives the advantages.
      j_max: most paths per execution; None for all.
      seed: of the run; paths are drawn from it and the execution's id.
      infra_failure: "placeholder" or "exclude", see `trajectory.outcomes`.
      role_order: agent roles by the priority of their paths.
    """
    counted = [score_for_training(e.result.outcome, e.result.score, infra_failure)
               for e in executions]
    in_baseline = np.array([c[0] for c in counted], bool)
    scores = np.array([c[1] if c[0] else 0.0 for c in counted], np.float64)
    kept = tuple(float(s) for s in scores[in_baseline])
    if len(kept) < 2:
        return ProcessedGroup(TrainGroup(group, (), 0), kept, "fewer than two scores", 0, 0, 0)
    advantages = algorithm.advantages(scores, in_baseline)
    train = []
    for member, execution in enumerate(executions):
        if advantages[member] == 0.0 or not execution.result.outcome.trains_tokens:
            continue
        rng = sampling_rng(seed, execution.result.execution_id)
        tree = select_paths(TrajectoryTree.from_records(execution.records), j_max, rng, role_order)
        weight = execution_weight(tree)
        if weight:
            train.append(TrainExecution(execution.result.execution_id, group, tree,
                                        float(advantages[member]), weight))
    stats = packing_stats(train)
    return ProcessedGroup(
        TrainGroup(group, tuple(train), int(in_baseline.sum())), kept, "" if train else "no variance",
        stats.tokens_unique, stats.tokens_linearized, stats.tokens_trained)
