"""How model families write tool calls: JSON in tags (Hermes, Qwen), XML parameters (Qwen3-Coder), not at all.

Invariant: nothing is written anew. Arguments are slices of what was sampled, except that the XML format's
text values are put into a JSON object, numbers as they stand.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gyre.base.protocols import ToolCall, Tools

_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclasses.dataclass(frozen=True)
class ReadCall:
    """A call that was found in a completion: where it ends, and whether it is written as it should be."""

    call: ToolCall
    end: int
    well_formed: bool = True


class ToolFormat(abc.ABC):
    """Reads the tool calls of one format.

    Attributes:
      openings: texts with which a call begins; a stream holds back what may be the start of one.
    """

    openings: tuple[str, ...] = ()

    @abc.abstractmethod
    def read(self, text: str, at: int, tools: Tools) -> ReadCall | None:
        """The call that begins with one of the openings at `at`; None when no name can be read."""


class PlainFormat(ToolFormat):
    """No tool calls: a completion is text."""

    def read(self, text: str, at: int, tools: Tools) -> ReadCall | None:
        return None


class HermesFormat(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    openings = (_CALL_OPEN,)

    def read(self, text: str, at: int, tools: Tools) -> ReadCall | None:
        start = at + len(_CALL_OPEN)
        return self._well_formed(text, start) or self._malformed(text, start)

    def _well_formed(self, text: str, start: int) -> ReadCall | None:
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
        return ReadCall(ToolCall("", name, arguments), end + len(_CALL_CLOSE))

    def _malformed(self, text: str, start: int) -> ReadCall | None:
        """What stands between the name and the closing tag, or the end, as the arguments."""
        head = _HERMES_HEAD.match(text, start)
        if head is None:
            return None
        try:
            name = json.loads(head["name"])
        except ValueError:
            return None
        close = text.find(_CALL_CLOSE, head.end())
        raw = text[head.end():close if close >= 0 else len(text)].strip()
        if close >= 0 and raw.endswith("}"):
            raw = raw[:-1].rstrip()  # that one closes the object around the arguments
        end = close + len(_CALL_CLOSE) if close >= 0 else len(text)
        return ReadCall(ToolCall("", name, raw), end, False) if name else None


_HERMES_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*(?:,\s*(?:"arguments"\s*:)?|(?=\}))', re.DOTALL)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


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


class XmlFormat(ToolFormat):
    """`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`.

    The outer tag is missing at times. A value's type is that of the tool's schema; without one, a value
    that is JSON but no string counts as JSON.
    """

    openings = (_CALL_OPEN, "<function=")

    def read(self, text: str, at: int, tools: Tools) -> ReadCall | None:
        wrapped = text.startswith(_CALL_OPEN, at)
        start = _skip(text, at + len(_CALL_OPEN)) if wrapped else at
        head = _XML_FUNCTION.match(text, start)
        if head is None:
            return None
        name, types = head["name"], _parameter_types(head["name"], tools)
        parts, end = [], head.end()
        while found := _XML_PARAMETER.match(text, end):
            key, end = found["key"], found.end()
            parts.append(f"{_dump(key)}: {_typed(found['value'], types.get(key))}")
        end = _skip(text, end)
        closed = text.startswith("</function>", end)
        end += len("</function>") if closed else 0
        if closed and wrapped:
            at_close = _skip(text, end)
            closed = text.startswith(_CALL_CLOSE, at_close)
            end = at_close + len(_CALL_CLOSE) if closed else end
        if closed:
            return ReadCall(ToolCall("", name, "{" + ", ".join(parts) + "}"), end)
        close = text.find(_CALL_CLOSE, head.end())
        end = len(text) if close < 0 else close + len(_CALL_CLOSE)
        raw = text[head.end():len(text) if close < 0 else close].strip()
        return ReadCall(ToolCall("", name, raw), end, False)


_XML_FUNCTION = re.compile(r"<function=(?P<name>[^<>\s]+)>")
# A value may hold anything, its own closing tag in mid-text included.
_XML_PARAMETER = re.compile(
    r"\s*<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
    r"(?=\s*(?:<parameter=|</function>|</tool_call>|\Z))", re.DOTALL)
_JSON_TYPES = {"integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list,
               "null": type(None)}


def _parameter_types(name: str, tools: Tools) -> Mapping[str, frozenset[str]]:
    """parameter -> names of its JSON types, as far as the tool's schema gives them."""
    for tool in tools:
        function = tool.get("function") or {}
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            if isinstance(properties, Mapping):
                return {key: types for key, schema in properties.items() if (types := _types(schema))}
    return {}


def _types(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    found: set[str] = set()
    kinds = schema.get("type")
    found.update([kinds] if isinstance(kinds, str) else
                 [k for k in kinds if isinstance(k, str)] if isinstance(kinds, list) else [])
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key) if isinstance(schema.get(key), list) else ():
            found |= _types(option)
    if not found and isinstance(schema.get("enum"), list):
        found = {"string"} if all(isinstance(v, str) for v in schema["enum"]) else set()
    return frozenset(found)


def _typed(text: str, types: frozenset[str] | None) -> str:
    """A value's JSON: as it stands where it is JSON of an admissible type that is no string."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _dump(text)
    if isinstance(value, str):
        return _dump(text)
    if types is None:
        return text.strip()
    kinds = [_JSON_TYPES[t] for t in types if t in _JSON_TYPES]
    fits = any(isinstance(value, k) and not (isinstance(value, bool) and k is not bool) for k in kinds)
    if "string" in types and not (value is None and "null" in types):
        return _dump(text)
    return text.strip() if fits else _dump(text)


def parameters(arguments: str) -> Sequence[tuple[str, str]]:
    """Raw arguments as (name, text) for templates that write them one by one.

    What is no JSON object stands under the name "arguments", as it was sampled.
    """
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return [("arguments", arguments)]
    if not isinstance(value, dict):
        return [("arguments", arguments)]
    return [(k, v if isinstance(v, str) else _dump(v)) for k, v in value.items()]


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HermesFormat(), "xml": XmlFormat(), "plain": PlainFormat()}
