"""The TITO record: one model call as exact token ids in and out, with what sampled them.

Invariant: token ids are the ones the engine took and gave; nothing here encodes or decodes text. A
prompt that continues an earlier call stores only what is new, so that an execution's records take
space linear in its tokens and share prefixes by construction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from gyre.base.enums import AgentRole, FinishReason
from gyre.base.protocols import SamplingParams

_ARRAYS = {"suffix_ids": np.int32, "completion_ids": np.int32, "logprobs": np.float32,
           "versions": np.int32}


@dataclasses.dataclass(frozen=True, eq=False)
class CallRecord:
    """One call and its answer. Axes: S new prompt tokens, C completion tokens.

    Attributes:
      call_id: unique over the run.
      execution_id: whose call it is.
      agent_role: who made it.
      prefix_call: the earlier call of this execution whose prompt and completion this prompt starts
        with; None when `suffix_ids` is the whole prompt.
      suffix_ids: i32[S], what follows the prefix in the prompt.
      completion_ids: i32[C], as sampled, stop id included.
      logprobs: f32[C], of the sampled ids under the distribution they were sampled from; f32[0]
        when the engine gave none, which makes the call untrainable.
      versions: i32[C], weights that sampled each id.
      finish: the engine's word on why it stopped.
      sampling: how it was sampled.
      delivered: whether the client got the whole answer.
      started_s, finished_s: seconds since the epoch.
      metadata: JSON values for people and for counting; nothing trains by them.

    Raises:
      ValueError: arrays of wrong rank, dtype or length, negative ids, a call without a prompt.
    """

    call_id: str
    execution_id: str
    agent_role: AgentRole
    prefix_call: str | None
    suffix_ids: np.ndarray
    completion_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish: FinishReason
    sampling: SamplingParams
    delivered: bool
    started_s: float
    finished_s: float
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name, dtype in _ARRAYS.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
                got = (f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray)
                       else type(array).__name__)
                raise ValueError(f"call {self.call_id!r}: {name} must be a 1-D "
                                 f"{np.dtype(dtype).name} array, got {got}")
        n = len(self.completion_ids)
        if len(self.versions) != n:
            raise ValueError(f"call {self.call_id!r}: got {len(self.versions)} versions for {n} "
                             "completion ids; give one per id")
        if len(self.logprobs) not in (0, n):
            raise ValueError(f"call {self.call_id!r}: got {len(self.logprobs)} logprobs for {n} "
                             "completion ids; give one per id, or none; never pad")
        for name in ("suffix_ids", "completion_ids"):
            array = getattr(self, name)
            if array.size and array.min() < 0:
                raise ValueError(f"call {self.call_id!r}: {name} has the id {array.min()}; token "
                                 "ids are not negative")
        if self.prefix_call is None and not self.suffix_ids.size:
            raise ValueError(f"call {self.call_id!r}: the prompt is empty; it needs a prefix_call "
                             "or at least 1 suffix id")
        if self.prefix_call == self.call_id:
            raise ValueError(f"call {self.call_id!r} names itself as its prefix_call")

    @property
    def trainable(self) -> bool:
        """Whether its completion may be trained: the client has it and its log-probs are known."""
        return (self.delivered and self.finish is not FinishReason.CANCELLED
                and len(self.logprobs) == len(self.completion_ids)
                and bool(np.isfinite(self.logprobs).all()))


def prompt_ids(record: CallRecord, by_id: Mapping[str, CallRecord]) -> np.ndarray:
    """The whole prompt of a call, i32[P].

    Args:
      record: the call.
      by_id: call_id -> record, with at least the calls that its prompt continues.

    Raises:
      ValueError: a prefix call is missing, or the chain of prefixes is a circle.
    """
    pieces = [record.suffix_ids]
    seen = {record.call_id}
    current = record
    while current.prefix_call is not None:
        prefix = by_id.get(current.prefix_call)
        if prefix is None or prefix.call_id in seen:
            problem = "is not among the records" if prefix is None else "continues it in turn"
            raise ValueError(f"call {current.call_id!r} continues {current.prefix_call!r}, which "
                             f"{problem}; keep every record of an execution, in call order")
        seen.add(prefix.call_id)
        pieces += [prefix.completion_ids, prefix.suffix_ids]
        current = prefix
    return np.concatenate(pieces[::-1])


def all_ids(record: CallRecord, by_id: Mapping[str, CallRecord]) -> np.ndarray:
    """Prompt and completion of a call, i32[P + C]. Args and raises as `prompt_ids`."""
    return np.concatenate([prompt_ids(record, by_id), record.completion_ids])
