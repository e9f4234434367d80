"""Small hand-made calls and random executions that one can check by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import strategies as st

from gyre.base.enums import AgentRole, FinishReason
from gyre.base.protocols import SamplingParams
from gyre.trajectory.record import CallRecord
from gyre.trajectory.tree import TrajectoryTree, TreeTokens


def call(call_id: str, suffix: list[int], completion: list[int], prefix: str | None = None,
         role: AgentRole = AgentRole.MAIN, version: int = 0, execution_id: str = "g000000-0",
         **fields) -> CallRecord:
    """A delivered call whose id number t has log-prob -t / 100."""
    record = CallRecord(
        call_id=call_id, execution_id=execution_id, agent_role=role, prefix_call=prefix,
        suffix_ids=np.array(suffix, np.int32), completion_ids=np.array(completion, np.int32),
        logprobs=np.array(completion, np.float32) / -100, finish=FinishReason.STOP,
        versions=np.full(len(completion), version, np.int32), sampling=SamplingParams(64),
        delivered=True, started_s=1.0, finished_s=2.0)
    return dataclasses.replace(record, **fields)


def branching() -> list[CallRecord]:
    """Branches at every level: in the prompt, in a completion, after a completion.

        1 2 3 | 10 11 12 | 4 | 20          a, then b
                         | 5 | 30 31       c (another continuation of a)
                  11 13                    d (leaves a's completion after 10 11)
          2 6 | 40 41                      s, a sub-agent (leaves the prompt after 1 2)
    """
    return [
        call("a", [1, 2, 3], [10, 11, 12]),
        call("b", [4], [20], prefix="a", version=1),
        call("c", [5], [30, 31], prefix="a", version=1),
        call("d", [1, 2, 3], [10, 11, 13], version=2),
        call("s", [1, 2, 6], [40, 41], role=AgentRole.SUB_AGENT),
    ]


def paths_of(tree: TreeTokens) -> list[tuple[int, ...]]:
    """Token ids from the root to each token, token by token."""
    out: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parent.tolist(), strict=True):
        out.append((out[parent] if parent >= 0 else ()) + (token,))
    return out


@st.composite
def executions(draw, max_calls: int = 7) -> list[CallRecord]:
    """Random calls over a small alphabet, so that they share, branch and repeat at every level."""
    ids = st.lists(st.integers(0, 2), min_size=0, max_size=4)
    records: list[CallRecord] = []
    for i in range(draw(st.integers(1, max_calls))):
        earlier = [r.call_id for r in records]
        prefix = draw(st.sampled_from([None, *earlier]))
        suffix = draw(ids)
        if prefix is None and not suffix:
            suffix = [0]
        records.append(call(f"c{i}", suffix, draw(ids), prefix=prefix, version=i,
                            role=draw(st.sampled_from(list(AgentRole))),
                            delivered=draw(st.integers(0, 4)) > 0))
    return records


def tree_of(records: list[CallRecord]) -> TreeTokens:
    """The whole tree, token by token."""
    return TrajectoryTree.from_records(records).flatten()
