"""From a history to the ids of a prompt: recorded ids as far as the history matches, then what is new.

Invariant: a sampled turn's ids are in the prompt as they were sampled, under whatever prefix it stands,
unless history='template' is asked for and the template shows the turn differently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from gyre.base.protocols import ChatCodec, Tools
from gyre.gateway.conversations import Node
from gyre.gateway.history import Entry, KnownTurns, Turn
from gyre.gateway.token_buffer import TokenBuffer

HISTORIES = ("exact", "template")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """How a prompt is made, and which sampled turns it holds.

    Attributes:
      prefix: the turn whose prompt and completion it starts with, or None.
      suffix_ids: i32[S], what follows.
      held: the sampled turns in it; those that `prefix` continues are left out from the first on that an
        earlier request held, too.
      as_text: see `Turn`.
    """

    prefix: Turn | None
    suffix_ids: np.ndarray
    held: tuple[Turn, ...]
    as_text: frozenset[int]

    @property
    def prefix_call(self) -> str | None:
        """The prefix' call."""
        return self.prefix.call_id if self.prefix is not None else None

    @property
    def tokens(self) -> int:
        """Its length."""
        return len(self.suffix_ids) + (self.prefix.path.length if self.prefix is not None else 0)

    def buffer(self) -> TokenBuffer:
        """All of its ids."""
        return (TokenBuffer.of(self.suffix_ids) if self.prefix is None
                else self.prefix.path.extended(self.suffix_ids))


class Prompts:
    """Makes the prompts of one execution.

    Args:
      codec: conversation <-> ids.
      history: one of `HISTORIES`.
      turns: what was sampled so far; it grows.

    Raises:
      ValueError: an unknown history mode.
    """

    def __init__(self, codec: ChatCodec, history: str, turns: KnownTurns):
        if history not in HISTORIES:
            raise ValueError(f"history must be one of {', '.join(HISTORIES)}; got {history!r}")
        self._codec, self._history, self._turns = codec, history, turns

    def make(self, node: Node, entries: Sequence[Entry], tools: Tools) -> Prompt:
        """The prompt of a request whose history ends at `node`."""
        path = node.path()
        shown = [e.shown for e in entries]
        as_text: frozenset[int] = frozenset()
        if self._history == "template":
            turns = {i: self._turn_at(path, entries, i) for i in range(len(path))}
            sampled = {i: t.ids for i, t in turns.items() if t is not None}
            as_text = frozenset(sampled) - self._codec.shown_as_sampled(shown, tools, sampled)
        for n in range(len(path), 0, -1):
            turn = self._continued_turn(path[n - 1], entries[n - 1], as_text, n - 1)
            if turn is not None:
                spliced = self._elsewhere(entries, n, as_text)
                suffix = np.asarray(self._codec.suffix_ids(
                    shown[:n], shown[n:], tools, int(turn.ids[-1]),
                    {i - n: t.ids for i, t in spliced.items()}), np.int32)
                held = (*turn.chain(), *spliced.values())
                return Prompt(turn, suffix, held, as_text)
        spliced = self._elsewhere(entries, 0, as_text)
        whole = np.asarray(self._codec.render_ids(
            shown, tools, True, {i: t.ids for i, t in spliced.items()}), np.int32)
        return Prompt(None, whole, tuple(spliced.values()), as_text)

    def _continued_turn(self, node: Node, entry: Entry, as_text: frozenset[int], at: int) -> Turn | None:
        """The turn at a node that a prompt may continue, by preference the one that the client names,
        then the latest that it got."""
        fitting = [t for t in node.turns if t.ids.size and at not in as_text
                   and t.as_text == frozenset(i for i in as_text if i < at)]
        if not fitting:
            return None
        if entry.turn in fitting:
            return entry.turn
        return next((t for t in reversed(fitting) if t.delivered), fitting[-1])

    @staticmethod
    def _turn_at(path: Sequence[Node], entries: Sequence[Entry], i: int) -> Turn | None:
        turns = path[i].turns
        return entries[i].turn or (turns[-1] if turns else None)

    def _elsewhere(self, entries: Sequence[Entry], start: int, as_text: frozenset[int]) -> dict[int, Turn]:
        """Sampled turns from position `start` on, which stand under a prefix they were not sampled
        under: their ids are kept, as context."""
        found = {}
        for i in range(start, len(entries)):
            entry = entries[i]
            turn = entry.turn
            if turn is None and entry.identity.role == "assistant" and not entry.identity.tool_calls:
                turn = self._turns.same_text(entry.identity.content)
            if turn is not None and turn.ids.size and i not in as_text:
                found[i] = turn
        return found
