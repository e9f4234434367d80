"""The trajectory tree: all calls of an execution as one path-compressed prefix tree of token ids.

Invariants:
- a token is in the tree once per context: calls that agree on a prefix share its segments;
- a segment has one origin, a completion or prompt text, so its tokens are trainable together;
- a token is trainable iff some trainable record sampled it in this context. Trainability is decided
  before ownership: an abandoned call that was there first gives its tokens up to a later call that
  sampled the same ones and was delivered.

Memory: 12 bytes per token (id, log-prob, version), a fifth more while arrays grow, and about 100 bytes per
segment and per call. Records are not kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import numpy as np

from gyre.base.enums import AgentRole, SegmentKind
from gyre.trajectory.radix import GrowingArray, RadixForest, spans
from gyre.trajectory.record import CallRecord

Decode = Callable[[Sequence[int]], str]
_DTYPES = {"tokens": np.int32, "parent": np.int32, "train": np.bool_, "logprobs": np.float32,
           "versions": np.int32, "call": np.int32}
_ROLES, _KINDS = tuple(AgentRole), tuple(SegmentKind)


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A run of n tokens without a branch, as it is now: a later call may split it.

    Attributes:
      index: its place in `TrajectoryTree.segments`; stable, but a split shortens the segment.
      parent: index of the segment it follows, -1 at a root.
      tokens: i32[n].
      trainable: whether its tokens are.
      logprobs: f32[n], NaN where the token is not trainable.
      versions: i32[n], -1 where the token was not sampled.
      call_id: the completion it came from, "" for prompt text.
      agent_role: of the call that it came from (of the first one, for prompt text).
      kind: what it is.
      origin_calls: for prompt text that a compaction or an edited history re-rooted: the calls whose
        sampled turns the new prompt still holds.
    """

    index: int
    parent: int
    tokens: np.ndarray
    trainable: bool
    logprobs: np.ndarray
    versions: np.ndarray
    call_id: str
    agent_role: AgentRole
    kind: SegmentKind
    origin_calls: tuple[str, ...]


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
        self._forest = RadixForest()
        self._logprobs, self._versions = GrowingArray(np.float32), GrowingArray(np.int32)
        self._call = self._forest.column(-1, "i")  # index in `_call_ids`, -1 for text
        self._role, self._kind = self._forest.column(0), self._forest.column(0)
        self._trainable = self._forest.column(0)
        self._origins: dict[int, tuple[str, ...]] = {}  # segment -> calls
        self._call_ids: list[str] = []
        self._call_roles: list[AgentRole] = []
        self._ends: dict[str, tuple[int, int]] = {}  # call -> segment that it ended with, and its depth

    @classmethod
    def from_records(cls, records: Iterable[CallRecord]) -> TrajectoryTree:
        """The tree of an execution's calls, in call order. Raises as `add`."""
        tree = cls()
        for record in records:
            tree.add(record)
        return tree

    @property
    def segments(self) -> Segments:
        """All segments by index, made when asked for."""
        return Segments(self)

    @property
    def n_tokens(self) -> int:
        """Tokens of all segments: the unique ones."""
        return len(self._forest.ids)

    def add(self, record: CallRecord) -> None:
        """Adds a call; splits a segment where its path leaves it.

        Raises:
          ValueError: the call is in the tree, or the call that it continues is not.
        """
        if record.call_id in self._ends:
            raise ValueError(f"call {record.call_id!r} is in the tree already")
        start = -1
        if record.prefix_call is not None:
            if record.prefix_call not in self._ends:
                raise ValueError(f"call {record.call_id!r} continues {record.prefix_call!r}, which "
                                 "is not in the tree; add calls in call order")
            start = self.end_of(record.prefix_call)
        role = _ROLES.index(record.agent_role)
        prompt, is_new = self._insert(start, record.suffix_ids)
        if is_new:
            self._role[prompt[-1]] = role
            if origins := record.metadata.get("origin_calls"):
                self._origins[prompt[-1]] = tuple(origins)
        start = prompt[-1] if prompt else start
        sampled, is_new = self._insert(start, record.completion_ids)
        done = 0
        for node in sampled:
            n = self._forest.length[node]
            if (is_new and node == sampled[-1]) or (record.trainable and not self._trainable[node]):
                self._label(node, record, role, done)
            done += n
        end = sampled[-1] if sampled else start
        self._ends[record.call_id] = end, self._forest.depth[end] + self._forest.length[end]
        self._call_ids.append(record.call_id)
        self._call_roles.append(record.agent_role)

    def end_of(self, call_id: str) -> int:
        """The segment that a call's path ends with. Raises KeyError for an unknown call."""
        return self._forest.ending_at(*self._ends[call_id])

    def children(self, index: int) -> list[int]:
        """Segments that follow segment `index` (-1: the roots), in the order they were added."""
        return self._forest.children(index)

    def parent(self, index: int) -> int:
        """The segment that segment `index` follows, -1 at a root."""
        return self._forest.parent[index]

    def path(self, index: int) -> list[int]:
        """Segments from a root to segment `index`."""
        return self._forest.path(index)

    def leaves(self) -> list[Leaf]:
        """Ends of the paths that no other call continues, in depth-first order."""
        last = {self.end_of(call): i for i, call in enumerate(self._call_ids)}
        return [Leaf(index, self._call_roles[last[index]], self._call_ids[last[index]])
                for index in self._forest.depth_first() if self._forest.is_leaf(index)]

    def depth_first(self) -> list[int]:
        """All segments, each after its parent and before its parent's next child."""
        return self._forest.depth_first()

    def trained_counts(self) -> np.ndarray:
        """i64[segments]: tokens with a place in the loss; a root's first token has no prediction."""
        parent, length = np.array(self._forest.parent), np.array(self._forest.length, np.int64)
        return np.array(self._trainable, bool) * (length - (parent < 0))

    def flatten(self, keep: Container[int] | None = None) -> TreeTokens:
        """The tree token by token, in depth-first order.

        Args:
          keep: segments to take, closed under parents; None takes all.

        Raises:
          ValueError: a kept segment's parent is left out.
        """
        forest = self._forest
        order = [i for i in forest.depth_first() if keep is None or i in keep]
        nodes = np.array(order, np.int64)
        length = np.array(forest.length, np.int64)[nodes]
        above = np.array(forest.parent, np.int64)[nodes]
        first = np.cumsum(length) - length
        last = np.full(len(forest) + 1, -2, np.int64)  # of each segment; the extra place is that of -1
        last[nodes], last[-1] = first + length - 1, -1
        if (last[above] == -2).any():
            index = order[int(np.flatnonzero(last[above] == -2)[0])]
            raise ValueError(f"segment {index} is kept without its parent {forest.parent[index]}; "
                             "keep whole paths")
        pool = spans(np.array(forest.start, np.int64)[nodes], length)
        parent = np.arange(-1, len(pool) - 1, dtype=np.int32)
        parent[first] = last[above]
        # Calls are numbered in order of first appearance.
        call = np.array(self._call, np.int64)[nodes]
        used = list(dict.fromkeys(c for c in call.tolist() if c >= 0))
        place = np.full(len(self._call_ids) + 1, -1, np.int32)
        place[used] = np.arange(len(used))
        return TreeTokens(
            tokens=forest.ids.view[pool], parent=parent,
            train=np.repeat(np.array(self._trainable, bool)[nodes], length),
            logprobs=self._logprobs.view[pool], versions=self._versions.view[pool],
            call=np.repeat(place[call], length), call_ids=tuple(self._call_ids[c] for c in used))

    # ------------------------------------------------------------------ internals

    def _insert(self, node: int, ids: np.ndarray) -> tuple[list[int], bool]:
        """(segments that are these ids, whether the last one is new)."""
        before = len(self._forest.ids)
        nodes = self._forest.insert(node, ids)
        added = len(self._forest.ids) - before
        self._logprobs.extend(np.nan, added)
        self._versions.extend(-1, added)
        return nodes, bool(added)

    def _label(self, node: int, record: CallRecord, role: int, done: int) -> None:
        """Makes a segment a part of the record's completion, from its id `done` on."""
        n, start = self._forest.length[node], self._forest.start[node]
        self._call[node], self._role[node] = len(self._call_ids), role
        self._versions.view[start:start + n] = record.versions[done:done + n]
        kind = SegmentKind.ABANDONED
        if record.trainable:
            self._trainable[node] = 1
            self._logprobs.view[start:start + n] = record.logprobs[done:done + n]
            kind = SegmentKind.SUMMARY if record.agent_role.is_summary else SegmentKind.SAMPLED
        self._kind[node] = _KINDS.index(kind)

    def _segment(self, index: int) -> Segment:
        forest = self._forest
        part = slice(forest.start[index], forest.start[index] + forest.length[index])
        call = self._call[index]
        return Segment(
            index, forest.parent[index], forest.ids.view[part], bool(self._trainable[index]),
            self._logprobs.view[part], self._versions.view[part], self._call_ids[call] if call >= 0 else "",
            _ROLES[self._role[index]], _KINDS[self._kind[index]], self._origins.get(index, ()))


class Segments(Sequence[Segment]):
    """A tree's segments; each is made when it is asked for."""

    def __init__(self, tree: TrajectoryTree):
        self._tree = tree

    def __len__(self) -> int:
        return len(self._tree._forest)

    def __getitem__(self, index: int) -> Segment:
        if not 0 <= index < len(self):
            raise IndexError(f"segment {index} of {len(self)}")
        return self._tree._segment(index)

    def __iter__(self) -> Iterator[Segment]:
        return (self[i] for i in range(len(self)))


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
        mark = "*" if segment.trainable else " "
        lines.append(f"{indent}{'└─' if is_last else '├─'}{mark}[{segment.agent_role.value} "
                     f"{len(segment.tokens)} tokens] {text}")
        below = tree.children(index)
        deeper = indent + ("   " if is_last else "│  ")
        if len(below) == 1:  # a chain stays in its column
            stack.append((below[0], indent, is_last))
        else:
            stack += [(c, deeper, i == 0) for i, c in enumerate(below[::-1])]
    return "\n".join(lines)
