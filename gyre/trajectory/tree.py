"""The trajectory tree: all calls of an execution as one path-compressed prefix tree of token ids.

Invariants:
- a token is in the tree once per context: calls that agree on a prefix share its segments;
- a segment has one origin, a completion or prompt text, so its tokens are trainable together;
- a token is trainable iff some trainable record sampled it in this context. Trainability is decided
  before ownership: an abandoned call that was there first gives its tokens up to a later call that
  sampled the same ones and was delivered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np

from gyre.base.enums import AgentRole
from gyre.trajectory.record import CallRecord

Decode = Callable[[Sequence[int]], str]
_DTYPES = {"tokens": np.int32, "parent": np.int32, "train": np.bool_, "logprobs": np.float32,
           "versions": np.int32, "call": np.int32}


@dataclasses.dataclass
class Segment:
    """A run of n tokens without a branch.

    Attributes:
      index: its place in `TrajectoryTree.segments`; stable, but a split shortens the segment.
      parent: index of the segment it follows, -1 at a root.
      tokens: i32[n].
      trainable: bool[n], uniform.
      logprobs: f32[n], NaN where the token is not trainable.
      versions: i32[n], -1 where the token was not sampled.
      call_id: the completion it came from, "" for prompt text.
      agent_role: of the call that it came from (of the first one, for prompt text).
    """

    index: int
    parent: int
    tokens: np.ndarray
    trainable: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    call_id: str
    agent_role: AgentRole


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The end of a path: `segment` has no children; role and id are those of its last call."""

    segment: int
    agent_role: AgentRole
    call_id: str


@dataclasses.dataclass(frozen=True, eq=False)
class TreeTokens:
    """A tree token by token, every token after its predecessor. Axis n.

    Attributes:
      tokens: i32[n].
      parent: i32[n], index of the predecessor in these arrays, -1 at a root.
      train: bool[n], what the loss may use (a root token has no prediction: callers also ask
        `parent >= 0`).
      logprobs: f32[n], when sampled; NaN where not trainable.
      versions: i32[n], weights that sampled it, -1 for text.
      call: i32[n], index in `call_ids`, -1 for text.
      call_ids: the completions that the tokens come from.

    Raises:
      ValueError: arrays of wrong rank, dtype or length, a token before its predecessor, a trainable
        token without a finite log-prob.
    """

    tokens: np.ndarray
    parent: np.ndarray
    train: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    call: np.ndarray
    call_ids: tuple[str, ...] = ()

    def __post_init__(self):
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            if array.shape != (len(self.tokens),) or array.dtype != dtype:
                raise ValueError(f"{name} must be {np.dtype(dtype).name}[{len(self.tokens)}], got "
                                 f"{array.dtype}{list(array.shape)}")
        bad = np.flatnonzero((self.parent >= np.arange(len(self))) | (self.parent < -1))
        if bad.size:
            raise ValueError(f"token {bad[0]} has parent {self.parent[bad[0]]}; a predecessor "
                             "comes before its token, -1 marks a root")
        if not np.isfinite(self.logprobs[self.train]).all():
            raise ValueError("a trainable token has no finite log-prob; clear its train flag")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def trained(self) -> np.ndarray:
        """bool[n]: tokens that get a row in the loss, trainable and with a predecessor."""
        return self.train & (self.parent >= 0)


class TrajectoryTree:
    """The tree of one execution, grown call by call."""

    def __init__(self):
        self.segments: list[Segment] = []
        self._children: dict[int, dict[int, int]] = {-1: {}}  # segment -> first token -> segment
        self._ends: dict[int, list[CallRecord]] = {}  # segment -> records that end with it
        self._end_of: dict[str, int] = {}  # call_id -> segment that it ends with

    @classmethod
    def from_records(cls, records: Iterable[CallRecord]) -> TrajectoryTree:
        """The tree of an execution's calls, in call order. Raises as `add`."""
        tree = cls()
        for record in records:
            tree.add(record)
        return tree

    def add(self, record: CallRecord) -> None:
        """Adds a call; splits a segment where its path leaves it.

        Raises:
          ValueError: the call is in the tree, or the call that it continues is not.
        """
        if record.call_id in self._end_of:
            raise ValueError(f"call {record.call_id!r} is in the tree already")
        start = -1
        if record.prefix_call is not None:
            if record.prefix_call not in self._end_of:
                raise ValueError(f"call {record.call_id!r} continues {record.prefix_call!r}, which "
                                 "is not in the tree; add calls in call order")
            start = self._end_of[record.prefix_call]
        end = self._walk(self._walk(start, record, completion=False), record, completion=True)
        self._ends.setdefault(end, []).append(record)
        self._end_of[record.call_id] = end

    def children(self, index: int) -> list[int]:
        """Segments that follow segment `index` (-1: the roots), in the order they were added."""
        return list(self._children[index].values())

    def path(self, index: int) -> list[int]:
        """Segments from a root to segment `index`."""
        out = []
        while index >= 0:
            out.append(index)
            index = self.segments[index].parent
        return out[::-1]

    def leaves(self) -> list[Leaf]:
        """Ends of the paths that no other call continues, in depth-first order."""
        out = []
        for index in self.depth_first():
            if not self._children[index]:
                last = self._ends[index][-1]
                out.append(Leaf(index, last.agent_role, last.call_id))
        return out

    def depth_first(self) -> list[int]:
        """All segments, each after its parent and before its parent's next child."""
        order, stack = [], self.children(-1)[::-1]
        while stack:
            order.append(stack.pop())
            stack += self.children(order[-1])[::-1]
        return order

    def flatten(self, keep: Container[int] | None = None) -> TreeTokens:
        """The tree token by token, in depth-first order.

        Args:
          keep: segments to take, closed under parents; None takes all.

        Raises:
          ValueError: a kept segment's parent is left out.
        """
        last: dict[int, int] = {-1: -1}  # segment -> index of its last token
        call_ids: dict[str, int] = {"": -1}
        parts: list[Segment] = []
        parents, calls, n = [], [], 0
        for index in self.depth_first():
            if keep is not None and index not in keep:
                continue
            segment = self.segments[index]
            if segment.parent not in last:
                raise ValueError(f"segment {index} is kept without its parent {segment.parent}; "
                                 "keep whole paths")
            parts.append(segment)
            size = len(segment.tokens)
            parents.append(np.arange(n - 1, n + size - 1, dtype=np.int32))
            parents[-1][0] = last[segment.parent]
            call = call_ids.setdefault(segment.call_id, len(call_ids) - 1)
            calls.append(np.full(size, call, np.int32))
            n += size
            last[index] = n - 1

        def joined(arrays: Iterable[np.ndarray], dtype: type) -> np.ndarray:
            return np.concatenate([np.zeros(0, dtype), *arrays])

        return TreeTokens(
            tokens=joined((s.tokens for s in parts), np.int32), parent=joined(parents, np.int32),
            train=joined((s.trainable for s in parts), np.bool_),
            logprobs=joined((s.logprobs for s in parts), np.float32),
            versions=joined((s.versions for s in parts), np.int32),
            call=joined(calls, np.int32), call_ids=tuple(c for c in call_ids if c))

    # ------------------------------------------------------------------ internals

    def _walk(self, node: int, record: CallRecord, completion: bool) -> int:
        """Follows the record's prompt suffix or completion from the end of segment `node`.

        Returns the segment that it ends with, after splits and additions.
        """
        ids = record.completion_ids if completion else record.suffix_ids
        done = 0
        while done < len(ids):
            child = self._children[node].get(int(ids[done]))
            if child is None:
                return self._append(node, record, completion, done)
            tokens = self.segments[child].tokens
            n = min(len(tokens), len(ids) - done)
            differs = np.flatnonzero(tokens[:n] != ids[done:done + n])
            n = int(differs[0]) if differs.size else n
            if n < len(tokens):
                self._split(child, n)
            if completion and record.trainable and not self.segments[child].trainable[0]:
                self._label(self.segments[child], record, done)
            node, done = child, done + n
        return node

    def _append(self, parent: int, record: CallRecord, completion: bool, start: int) -> int:
        ids = record.completion_ids if completion else record.suffix_ids
        n = len(ids) - start
        index = len(self.segments)
        segment = Segment(
            index, parent, ids[start:].copy(), np.zeros(n, bool), np.full(n, np.nan, np.float32),
            np.full(n, -1, np.int32), "", record.agent_role)
        if completion:
            self._label(segment, record, start)
        self.segments.append(segment)
        self._children[parent][int(segment.tokens[0])] = index
        self._children[index] = {}
        return index

    @staticmethod
    def _label(segment: Segment, record: CallRecord, start: int) -> None:
        """Makes the segment a part of the record's completion, from its id `start` on."""
        part = slice(start, start + len(segment.tokens))
        segment.call_id, segment.agent_role = record.call_id, record.agent_role
        segment.versions = record.versions[part].copy()
        if record.trainable:
            segment.trainable = np.ones(len(segment.tokens), bool)
            segment.logprobs = record.logprobs[part].copy()

    def _split(self, index: int, n: int) -> None:
        """Cuts a segment after n tokens; the rest becomes a new segment that takes the children."""
        head, new = self.segments[index], len(self.segments)
        tail = dataclasses.replace(
            head, index=new, parent=index, tokens=head.tokens[n:], trainable=head.trainable[n:],
            logprobs=head.logprobs[n:], versions=head.versions[n:])
        head.tokens, head.trainable = head.tokens[:n], head.trainable[:n]
        head.logprobs, head.versions = head.logprobs[:n], head.versions[:n]
        self.segments.append(tail)
        self._children[new] = self._children[index]
        for child in self._children[new].values():
            self.segments[child].parent = new
        self._children[index] = {int(tail.tokens[0]): new}
        if index in self._ends:  # they end where the segment ended
            self._ends[new] = self._ends.pop(index)
            self._end_of.update((record.call_id, new) for record in self._ends[new])


def ascii(tree: TrajectoryTree, decode: Decode | None = None, width: int = 60) -> str:
    """The tree as text for people: a line per segment, trainable ones marked with `*`.

    Args:
      tree: what to draw.
      decode: ids -> text; None shows the ids.
      width: most characters of a segment's content; its middle is cut.
    """
    lines: list[str] = []
    stack = [(child, "", i == 0) for i, child in enumerate(tree.children(-1)[::-1])]
    while stack:
        index, indent, is_last = stack.pop()
        segment = tree.segments[index]
        text = (decode(segment.tokens.tolist()) if decode
                else " ".join(map(str, segment.tokens.tolist())))
        text = text.replace("\n", "\\n")
        if len(text) > width:
            half = (width - 5) // 2
            text = f"{text[:half]} ... {text[-half:]}"
        mark = "*" if segment.trainable[0] else " "
        lines.append(f"{indent}{'└─' if is_last else '├─'}{mark}[{segment.agent_role.value} "
                     f"{len(segment.tokens)} tokens] {text}")
        below = tree.children(index)
        deeper = indent + ("   " if is_last else "│  ")
        if len(below) == 1:  # a chain stays in its column
            stack.append((below[0], indent, is_last))
        else:
            stack += [(c, deeper, i == 0) for i, c in enumerate(below[::-1])]
    return "\n".join(lines)
