"""The text of a completion as message parts: <think> reasoning, content, <tool_call> JSON.

Invariant: nothing is written anew. Content and arguments are slices of what was sampled, and
what is not a well-formed call stays in the content.
"""

from __future__ import annotations

import json
import re

from gyre.base.protocols import ParsedCompletion, ToolCall

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"


def parse(text: str) -> ParsedCompletion:
    """Splits a completion into reasoning, content and tool calls.

    Arguments are the raw characters that were sampled. With calls, the content is what stands
    around them (as a rule: what precedes); without, it is the text exactly.
    """
    reasoning, body = _split_reasoning(text)
    pieces: list[str] = []
    calls: list[ToolCall] = []
    malformed = False
    start = search = 0
    while (at := body.find(_CALL_OPEN, search)) >= 0:
        found = _read_call(body, at + len(_CALL_OPEN))
        if found is None:
            malformed = True
            search = at + len(_CALL_OPEN)
            continue
        call, end = found
        pieces.append(body[start:at])
        calls.append(call)
        start = search = end
    pieces.append(body[start:])
    if not calls:
        return ParsedCompletion(body, reasoning, (), malformed)
    content = "".join(p for p in pieces if p.strip()).rstrip()
    return ParsedCompletion(content, reasoning, tuple(calls), malformed)


def stable_prefix(text: str) -> ParsedCompletion:
    """What of an unfinished completion can be shown: no continuation takes it back.

    For live streaming: `parse(text + more)` has reasoning and content that start with these.
    """
    text = text.rstrip("\ufffd")  # maybe the first bytes of a character
    head = text.lstrip()
    if len(head) < len(_THINK_OPEN) and _THINK_OPEN.startswith(head):
        return ParsedCompletion("")
    if head.startswith(_THINK_OPEN) and _THINK_CLOSE not in head:
        thought = head[len(_THINK_OPEN):].lstrip()
        return ParsedCompletion("", _hold_back(thought, _THINK_CLOSE).rstrip())
    reasoning, body = _split_reasoning(text)
    shown = _hold_back(body.split(_CALL_OPEN)[0], _CALL_OPEN).rstrip()
    return ParsedCompletion(shown, reasoning)


def _hold_back(text: str, tag: str) -> str:
    """Takes off the end of a text what may be the beginning of a tag."""
    for n in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:n]):
            return text[:-n]
    return text


def _split_reasoning(text: str) -> tuple[str, str]:
    """(reasoning, rest). Thinking that was cut off is all reasoning."""
    head = text.lstrip()
    if not head.startswith(_THINK_OPEN):
        return "", text
    reasoning, close, rest = head[len(_THINK_OPEN):].partition(_THINK_CLOSE)
    return reasoning.strip(), rest.lstrip() if close else ""


# ---------------------------------------------------------------------- tool-call JSON


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_SPACE = re.compile(r"[ \t\r\n]*")


def _read_call(text: str, start: int) -> tuple[ToolCall, int] | None:
    """The call whose JSON starts at `start`, and where its closing tag ends; None if malformed."""
    try:
        fields, end = _raw_fields(text, _skip(text, start))
        end = _skip(text, end)
        if not text.startswith(_CALL_CLOSE, end):
            return None
        name = json.loads(fields["name"])
        arguments = fields.get("arguments", "{}")
        value = json.loads(arguments)
        if isinstance(value, str):  # some models quote the arguments once more
            arguments, value = value, json.loads(value)
    except (ValueError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not name or not isinstance(value, dict):
        return None
    return ToolCall("", name, arguments), end + len(_CALL_CLOSE)


def _raw_fields(text: str, at: int) -> tuple[dict[str, str], int]:
    """The object at `at` as field -> raw JSON of its value, and its end; ValueError if none.

    Python's decoder gives values only; the raw characters are needed because arguments are handed
    on as they were sampled (60000 stays 60000, keys keep their order).
    """
    fields: dict[str, str] = {}
    if text[at:at + 1] != "{":
        raise ValueError("no object")
    at = _skip(text, at + 1)
    while text[at:at + 1] == '"':
        key, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at)
        if text[at:at + 1] != ":":
            raise ValueError("no colon")
        start = _skip(text, at + 1)
        _, end = _DECODER.raw_decode(text, start)
        fields[key] = text[start:end]
        at = _skip(text, end)
        if text[at:at + 1] == "}":
            return fields, at + 1
        if text[at:at + 1] != ",":
            raise ValueError("no comma")
        at = _skip(text, at + 1)
    raise ValueError("no field")


def _skip(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()
