"""The text of a completion as message parts: <think> reasoning, content, tool calls; whole or as it grows.

Invariant: nothing is written anew. Content is slices of what was sampled, and what cannot be read as a
tool call stays in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gyre.base.protocols import ParsedCompletion, ToolCall, Tools
from gyre.models.tool_formats import ToolFormat

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


def parse(text: str, tool_format: ToolFormat, tools: Tools = ()) -> ParsedCompletion:
    """Splits a completion into reasoning, content and tool calls.

    With calls, the content is what stands around them (as a rule: what precedes); without, it is the text
    exactly. A call that is not well-formed but has a name is a call, its arguments as they stand.
    """
    reasoning, body = _split_reasoning(text)
    pieces: list[str] = []
    calls: list[ToolCall] = []
    malformed = False
    start = search = 0
    while (at := _find_first(body, tool_format.openings, search)) >= 0:
        found = tool_format.read(body, at, tools)
        if found is None:
            malformed = True
            search = at + 1
            continue
        malformed |= not found.well_formed
        pieces.append(body[start:at])
        calls.append(found.call)
        start = search = found.end
    pieces.append(body[start:])
    if not calls:
        return ParsedCompletion(body, reasoning, (), malformed)
    content = "".join(p for p in pieces if p.strip()).rstrip()
    return ParsedCompletion(content, reasoning, tuple(calls), malformed)


def _find_first(text: str, marks: Sequence[str], start: int) -> int:
    return min((at for mark in marks if (at := text.find(mark, start)) >= 0), default=-1)


def _split_reasoning(text: str) -> tuple[str, str]:
    """(reasoning, rest). Thinking that was cut off is all reasoning."""
    head = text.lstrip()
    if not head.startswith(_THINK_OPEN):
        return "", text
    reasoning, close, rest = head[len(_THINK_OPEN):].partition(_THINK_CLOSE)
    return reasoning.strip(), rest.lstrip() if close else ""


class GrowingText:
    """Decodes ids as they come, each about once; half characters wait for their other half.

    A few ids before the new ones are decoded again with them, because a decoder may treat the first id of
    a text differently.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._context: list[int] = []
        self._context_chars = 0
        self._waiting: list[int] = []
        self._try_at = 1

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        self._waiting += ids
        if len(self._waiting) < self._try_at:
            return ""
        text = self._decode(self._context + self._waiting)
        if text.endswith("\ufffd"):  # maybe the first bytes of a character
            # Four tries find the end of any character; ids that are no text at all are tried ever less.
            n = len(self._waiting)
            self._try_at = n + 1 if n < 8 else 2 * n
            return ""
        new = text[self._context_chars:]
        self._context, self._waiting, self._try_at = self._waiting[-8:], [], 1
        self._context_chars = len(self._decode(self._context))
        return new


class CompletionReader:
    """A `gyre.base.protocols.CompletionStream`: text goes out as soon as no continuation takes it back.

    From the first thing on that may be a tool call, nothing more is shown; white space waits for what
    follows it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], tool_format: ToolFormat):
        self._text = GrowingText(decode)
        self._openings = tool_format.openings
        self._state = self._start
        self._held = ""

    def push(self, ids: Sequence[int]) -> tuple[str, str]:
        """Takes newly sampled ids. Returns what they add for sure to (reasoning, content)."""
        new = self._text.push(ids)
        reasoning, content = "", ""
        if not new:
            return reasoning, content
        self._held += new
        while True:
            state = self._state
            more_reasoning, more_content = state()
            reasoning += more_reasoning
            content += more_content
            if self._state == state:
                return reasoning, content

    def _start(self) -> tuple[str, str]:
        head = self._held.lstrip()
        if head.startswith(_THINK_OPEN):
            self._held = head[len(_THINK_OPEN):]
            self._state = self._before_thought
        elif not _THINK_OPEN.startswith(head):
            self._state = self._body
        return "", ""

    def _before_thought(self) -> tuple[str, str]:
        self._held = self._held.lstrip()
        if self._held:
            self._state = self._thought
        return "", ""

    def _thought(self) -> tuple[str, str]:
        thought, close, rest = self._held.partition(_THINK_CLOSE)
        if close:
            self._held, self._state = rest, self._after_thought
            return thought.rstrip(), ""
        return self._release([_THINK_CLOSE]), ""

    def _after_thought(self) -> tuple[str, str]:
        self._held = self._held.lstrip()
        if self._held:
            self._state = self._body
        return "", ""

    def _body(self) -> tuple[str, str]:
        at = _find_first(self._held, self._openings, 0)
        if at >= 0:
            shown = self._held[:at].rstrip()
            self._held, self._state = "", self._calls
            return "", shown
        return "", self._release(self._openings)

    def _calls(self) -> tuple[str, str]:
        self._held = ""
        return "", ""

    def _release(self, marks: Sequence[str]) -> str:
        """What is held, but for white space and what may be the beginning of a mark at its end."""
        text = self._held
        cut = min((len(text) - _partial(text, mark) for mark in marks), default=len(text))
        shown = text[:cut].rstrip()
        self._held = text[len(shown):]
        return shown


def _partial(text: str, mark: str) -> int:
    """How many characters at the end of the text may be the beginning of a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
