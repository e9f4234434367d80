"""A client's history in the gateway's own terms: sampled turns found again, whatever the client did.

Clients reorder the keys of tool arguments, rewrite numbers, repair cut JSON, rename calls, tear a turn's
calls apart or merge several turns into one message. The id of a tool call survives all of that, so a call
with a known id stands for what was sampled, name and raw arguments included; parsed JSON is never compared.
Reasoning is no part of a message's identity: clients drop it, trim it or send a signature in its place.

Invariant: what `canonical` makes of a history that the gateway itself produced, mutated in these ways, is
the same sequence of messages. A wrong guess makes a branch, never an error.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from gyre.base.enums import AgentRole
from gyre.base.protocols import Message, ToolCall
from gyre.gateway.token_buffer import TokenBuffer

_TURN_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{24}(?![0-9a-f])")


@dataclasses.dataclass(eq=False)
class Turn:
    """A sampled assistant turn.

    Attributes:
      call_id: of its record.
      message: as it was given to the client, the raw tool calls with their ids.
      ids: i32[C], as sampled.
      path: the prompt and the completion.
      prefix: the turn that its prompt continues, or None.
      agent_role: who asked for it.
      as_text: positions of its prompt's history whose sampled turns the template showed as text of their
        own and not as sampled (history='template').
      delivered: the client has the whole of it.
      continued: a later request holds it.
    """

    call_id: str
    message: Message
    ids: np.ndarray
    path: TokenBuffer
    prefix: Turn | None = None
    agent_role: AgentRole = AgentRole.MAIN
    as_text: frozenset[int] = frozenset()
    delivered: bool = False
    continued: bool = False

    def __post_init__(self):
        self.text = self.message.content.strip()
        self.identity = Message("assistant", self.text, tool_calls=self.message.tool_calls)
        self.entry = Entry(self.identity, self.message, self)
        self.bare_entry = (Entry(self.identity, dataclasses.replace(self.message, reasoning=""), self)
                           if self.message.reasoning else self.entry)


    def chain(self) -> list[Turn]:
        """The turn and those that its prompt continues, up to one that a later request held already."""
        turns = [self]
        while (prefix := turns[-1].prefix) is not None:
            turns.append(prefix)
            if prefix.continued:
                break  # and so are all before it
        return turns


@dataclasses.dataclass(frozen=True)
class Entry:
    """One message of a canonical history.

    Attributes:
      identity: what is compared, by value.
      shown: what is rendered where the message's ids are not recorded.
      turn: the sampled turn that the message is, where its ids say so.
    """

    identity: Message
    shown: Message
    turn: Turn | None = None


class KnownTurns:
    """The sampled turns of one execution, by everything that a client may send back of them."""

    def __init__(self):
        self._by_turn_id: dict[str, Turn] = {}
        self._by_tool_call: dict[str, tuple[Turn, ToolCall]] = {}
        self._by_text: dict[str, list[Turn]] = collections.defaultdict(list)

    def add(self, turn: Turn) -> None:
        """Makes a turn findable."""
        self._by_turn_id[turn_id(turn.call_id)] = turn
        for call in turn.message.tool_calls:
            self._by_tool_call[call.call_id] = (turn, call)
        if turn.text and not turn.message.tool_calls:
            self._by_text[turn.text].append(turn)

    def find(self, ref: str) -> Turn | None:
        """The turn that an id, signature or encrypted content of the gateway's own names."""
        for match in _TURN_ID.finditer(ref):
            if turn := self._by_turn_id.get(match.group()):
                return turn
        return None

    def same_text(self, text: str) -> Turn | None:
        """The turn without tool calls that has this text, unless several that differ have it."""
        turns = self._by_text.get(text, [])
        if turns and all(np.array_equal(t.ids, turns[0].ids) for t in turns[1:]):
            return turns[-1]
        return None

    def canonical(self, messages: Sequence[Message]) -> list[Entry]:
        """The history with every known tool call as sampled and every sampled turn in one piece."""
        entries: list[Entry] = []
        i = 0
        while i < len(messages):
            message = messages[i]
            i += 1
            if message.role != "assistant":
                entries.append(Entry(message, message))
                continue
            entry = self._unchanged(message)
            if entry is not None:
                entries.append(entry)
                continue
            pieces = self._pieces(message)
            if len(pieces) == 1:
                self._append(entries, *pieces[0])
                continue
            results = []
            while i < len(messages) and messages[i].role == "tool":
                results.append(messages[i])
                i += 1
            for k, (piece, turn) in enumerate(pieces):
                self._append(entries, piece, turn)
                ids = {c.call_id for c in piece.tool_calls}
                mine = [r for r in results if r.tool_call_id in ids or k == len(pieces) - 1]
                entries += [Entry(r, r) for r in mine]
                results = [r for r in results if r not in mine]
        return entries

    def _unchanged(self, message: Message) -> Entry | None:
        """The entry of a turn that came back in one piece, which nearly all do; None for the long way."""
        calls = message.tool_calls
        known = self._by_tool_call.get(calls[0].call_id) if calls else None
        if known is None or len(calls) != len(known[0].message.tool_calls):
            return None
        turn = known[0]
        if any(a.call_id != b.call_id for a, b in zip(calls, turn.message.tool_calls, strict=True)):
            return None
        if message.content != turn.message.content and message.content.strip() != turn.text:
            return None
        if message.reasoning == turn.message.reasoning:
            return turn.entry
        return turn.bare_entry if not message.reasoning and not message.refs else None

    def _append(self, entries: list[Entry], piece: Message, turn: Turn | None) -> None:
        """Adds a piece, to the message that it was torn from where the client did that."""
        if turn is not None and not piece.content and piece.tool_calls:
            at = len(entries) - 1
            while at >= 0 and entries[at].identity.role == "tool":
                at -= 1
            if at >= 0 and at < len(entries) - 1 and self._is_part(entries[at].shown, turn):
                calls = (*entries[at].shown.tool_calls, *piece.tool_calls)
                whole = dataclasses.replace(entries[at].shown, tool_calls=calls,
                                            refs=(*entries[at].shown.refs, *piece.refs))
                entries[at] = self._entry(whole, turn)
                return
        entries.append(self._entry(piece, turn))

    def _is_part(self, message: Message, turn: Turn) -> bool:
        """Whether the message holds some, not all, of the turn's calls and no other."""
        held = {c.call_id for c in message.tool_calls}
        return bool(held) and held < {c.call_id for c in turn.message.tool_calls}

    def _entry(self, piece: Message, turn: Turn | None) -> Entry:
        text = piece.content.strip()
        if turn is None and not piece.tool_calls:
            turn = next((t for t in map(self.find, piece.refs) if t is not None and t.text == text
                         and not t.message.tool_calls), None)
        if turn is not None and text == turn.text and (
                {c.call_id for c in piece.tool_calls} == {c.call_id for c in turn.message.tool_calls}):
            reasoning = self._reasoning(piece, turn)
            shown = (turn.message if reasoning == turn.message.reasoning
                     else dataclasses.replace(turn.message, reasoning=reasoning))
            return Entry(turn.identity, shown, turn)
        return Entry(Message("assistant", text, tool_calls=piece.tool_calls), piece)

    def _reasoning(self, piece: Message, turn: Turn) -> str:
        """What the client says the turn's reasoning was: its own text, or a signature for it."""
        sampled = turn.message.reasoning
        if piece.reasoning:
            return sampled if piece.reasoning.strip() == sampled.strip() else piece.reasoning
        return sampled if any(self.find(ref) is turn for ref in piece.refs) else ""

    def _pieces(self, message: Message) -> list[tuple[Message, Turn | None]]:
        """The message with sampled calls as sampled, one piece per turn that it was merged from."""
        if not message.tool_calls:
            return [(message, None)]
        groups: dict[int, tuple[Turn | None, list[ToolCall]]] = {}
        for call in message.tool_calls:
            turn, sampled = self._by_tool_call.get(call.call_id, (None, call))
            groups.setdefault(id(turn), (turn, []))[1].append(sampled)
        turns = [turn for turn, _ in groups.values()]
        if turns == [None]:
            return [(message, None)]
        texts, synthetic = _split_text(message.content, [t.text if t else "" for t in turns])
        pieces: list[tuple[Message, Turn | None]] = []
        if synthetic:
            pieces.append((Message("assistant", synthetic), None))
        for k, (turn, calls) in enumerate(groups.values()):
            first = k == 0
            pieces.append((Message("assistant", texts[k], message.reasoning if first else "", tuple(calls),
                                   refs=message.refs), turn))
        return pieces


def _split_text(content: str, texts: list[str]) -> tuple[list[str], str]:
    """A merged message's text as that of its turns, and what stands before them.

    A text that does not end in the turns' own is the first turn's as it is.
    """
    rest = content.strip()
    for text in reversed(texts):
        if not rest.endswith(text):
            return [content, *[""] * (len(texts) - 1)], ""
        rest = rest[:len(rest) - len(text)].rstrip()
    return texts, rest


def turn_id(call_id: str) -> str:
    """The 24 hex digits that name a call's turn in everything that clients get."""
    return call_id.removeprefix("req-")
