"""What the dialects share: reading JSON that may be anything, checks that name the field at fault, events.

Invariant: whatever `load_object` returns can be walked, written as JSON and encoded again. Lone surrogates,
numbers without a finite value and endless nesting do not get past it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from gyre.base.protocols import Message
from gyre.gateway.dialects.base import RequestError

MAX_DEPTH = 100
OPENAI_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_RAW = "_raw"
_SHOWN_CHARS = 60
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


# ------------------------------------------------------------------------------- reading


def load_object(body: bytes) -> dict[str, Any]:
    """A request body.

    Raises:
      RequestError: 400; it is not UTF-8, not JSON, not an object, or nested deeper than `MAX_DEPTH`.
    """
    try:
        data = _decode(body.decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError is a ValueError
        raise bad(f"the request body is not JSON: {e}", None) from e
    if not isinstance(data, dict):
        raise bad(f"the request body must be a JSON object, got {show(data)}", None)
    return data


def arguments_object(raw: str) -> dict[str, Any]:
    """Tool arguments as sampled, for wires that carry an object.

    What is not a JSON object goes under the one key `_raw`; `arguments_text` takes it out again.
    """
    value = _object_or_none(raw)
    return {_RAW: raw} if value is None else value


def arguments_text(value: Any, where: str) -> str:
    """Tool arguments of a history as text: a string as it is, an object written anew, null as "{}".

    Integers stay as they are, other numbers keep their value as doubles (60000.0 stays 60000.0). Raises
    RequestError 400 for anything else.
    """
    if value is None:
        return "{}"
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise bad(f"{where} must be an object, got {show(value)}", where)
    raw = value.get(_RAW)
    if len(value) == 1 and isinstance(raw, str) and _object_or_none(raw) is None:
        return raw
    return dump(value)


def _object_or_none(raw: str) -> dict[str, Any] | None:
    try:
        value = _decode(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _decode(text: str) -> Any:
    data = _DECODER.decode(text)
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [child for value in level if isinstance(value, dict | list)
                 for child in (value.values() if isinstance(value, dict) else value)]
        if not level:
            break
    else:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    # A lone surrogate is legal JSON and no text: it could be neither encoded nor hashed.
    return _without_surrogates(data) if _SURROGATE_ESCAPE.search(text) else data


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {show(text)} is too large")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(k): _without_surrogates(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(v) for v in value]
    return value


def clean(text: str) -> str:
    """The text with U+FFFD for every lone surrogate."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# -------------------------------------------------------------------------------- checks


def bad(message: str, param: str | None, code: str | None = None) -> RequestError:
    """A 400 to raise."""
    return RequestError(400, message, param=param, code=code)


def show(value: Any) -> str:
    """A value for an error message: short, in JSON's terms."""
    if isinstance(value, dict):
        keys = ", ".join(show(k) for k in list(value)[:5])
        return f"an object with the keys {keys or '(none)'}{', ...' if len(value) > 5 else ''}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = dump(value[:_SHOWN_CHARS + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS - 3] + "..."


def an_object(value: Any, where: str) -> dict[str, Any]:
    """The value, which has to be an object."""
    if not isinstance(value, dict):
        raise bad(f"{where} must be an object, got {show(value)}", where)
    return value


def a_list(value: Any, where: str) -> list[Any]:
    """The value, which has to be a list; null is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad(f"{where} must be a list, got {show(value)}", where)
    return value


def string(data: Mapping[str, Any], name: str, where: str = "") -> str:
    """A field that has to be a non-empty string."""
    value = data.get(name)
    if not isinstance(value, str) or not value:
        raise bad(f"{where}{name} must be a non-empty string, got {show(value)}", f"{where}{name}")
    return value


def optional_string(data: Mapping[str, Any], name: str, where: str = "") -> str:
    """A field that is a string, or "" where it is absent or null."""
    value = data.get(name)
    if value is not None and not isinstance(value, str):
        raise bad(f"{where}{name} must be a string, got {show(value)}", f"{where}{name}")
    return value or ""


def string_or_empty(data: Mapping[str, Any], name: str, where: str = "") -> str:
    """A field that has to be a string, which may be empty."""
    value = data.get(name)
    if not isinstance(value, str):
        raise bad(f"{where}{name} must be a string, got {show(value)}; only text is supported",
                  f"{where}{name}")
    return value


def flag(data: Mapping[str, Any], name: str, where: str = "") -> bool:
    """A field that is a boolean, or False where it is absent or null."""
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad(f"{where}{name} must be true or false, got {show(value)}", f"{where}{name}")
    return bool(value)


def token_limit(data: Mapping[str, Any], *names: str, where: str = "") -> int | None:
    """The first of the fields that is there, an integer of at least 1; None without any."""
    for name in names:
        value = data.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise bad(f"{where}{name} must be an integer of at least 1, got {show(value)}",
                          f"{where}{name}")
            return value
    return None


def no_stop_sequences(data: Mapping[str, Any], name: str, where: str = "") -> None:
    """Raises RequestError 400 where the client wants answers cut at texts: the engine stops at ids only."""
    if data.get(name):
        raise bad(f"{where}{name}: stop sequences are not supported; leave {name} out", f"{where}{name}",
                  code="unsupported_parameter")


def ignored(data: Mapping[str, Any], used: Sequence[str] | frozenset[str], where: str = "") -> list[str]:
    """Names of the fields that were sent and have no effect, sorted."""
    return sorted(where + name for name, value in data.items() if name not in used and value is not None)


def text_of(content: Any, where: str, kinds: Mapping[str, str], join: str = "") -> str:
    """Content as one string, the same for a string and for a list with one part of that text.

    Args:
      content: a string, null (""), or a list of parts with a `type`.
      where: for messages.
      kinds: type of an admissible part -> its field with the text.
      join: stands between the texts of several parts.

    Raises:
      RequestError: 400; there is something that is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(f"{where} must be a string, null or a list of parts, got {show(content)}", where)
    return join.join(part_text(part, f"{where}[{i}]", kinds) for i, part in enumerate(content))


def part_text(part: Any, where: str, kinds: Mapping[str, str]) -> str:
    """The text of one part. Raises RequestError 400 for any other kind of part."""
    kind = part.get("type") if isinstance(part, dict) else None
    field = kinds.get(kind) if isinstance(kind, str) else None
    if field is None:
        got = f"type {show(kind)}" if isinstance(part, dict) else show(part)
        raise bad(f"{where} must be a text part, got {got}; only text is supported", where)
    text = part.get(field)
    if not isinstance(text, str):
        raise bad(f"{where}.{field} must be a string, got {show(text)}", f"{where}.{field}")
    return text


def result_text(content: Any, where: str, kinds: Mapping[str, str]) -> str:
    """A tool's output as one string. What is no text (an agent cannot help what its tools give) is named."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(a_list(content, where)):
        kind = an_object(part, f"{where}[{i}]").get("type")
        known = isinstance(kind, str) and kind in kinds
        left_out = f"[{kind if isinstance(kind, str) else 'part'} left out: the model reads text only]"
        texts.append(part_text(part, f"{where}[{i}]", kinds) if known else left_out)
    return "\n".join(texts)


def function_tool(data: Mapping[str, Any], where: str, parameters: str = "parameters",
                  name: str = "") -> dict[str, Any]:
    """A tool in OpenAI's form, with the fields that the model is shown and no others.

    Args:
      data: has `name`, `description` and `strict`.
      where: for messages, e.g. "tools[0]".
      parameters: the field with the JSON schema of the arguments; absent, the tool takes none.
      name: the name for the model, where it is not the tool's own.
    """
    function: dict[str, Any] = {"name": string(data, "name", f"{where}.")}
    function["name"] = name or function["name"]
    if data.get("description") is not None:
        function["description"] = optional_string(data, "description", f"{where}.")
    schema = data.get(parameters)
    function["parameters"] = ({"type": "object", "properties": {}} if schema is None
                              else an_object(schema, f"{where}.{parameters}"))
    if data.get("strict") is not None:
        function["strict"] = flag(data, "strict", f"{where}.")
    return {"type": "function", "function": function}


# ------------------------------------------------------------------------------- writing


def dump(value: Any) -> str:
    """JSON text with characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {dump(data)}\n\n".encode()


KEEP_ALIVE = b": keep-alive\n\n"  # a comment; every reader of server-sent events skips it


@dataclasses.dataclass
class Said:
    """How much of a message a stream has sent, in characters."""

    reasoning: int = 0
    content: int = 0

    def add(self, reasoning: str, content: str) -> None:
        """Notes two increments."""
        self.reasoning += len(reasoning)
        self.content += len(content)

    def rest(self, message: Message) -> tuple[str, str]:
        """What of (reasoning, content) is still to be sent."""
        return message.reasoning[self.reasoning:], message.content[self.content:]


# --------------------------------------------------------------- what both OpenAI wires use


def openai_error(error: RequestError) -> dict[str, Any]:
    """OpenAI's error body. That of a prompt that is too long has the wording that clients look for."""
    kinds = {401: "authentication_error", 404: "not_found_error", 410: "not_found_error",
             429: "rate_limit_error"}
    kind = kinds.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": openai_message(error), "type": kind, "param": error.param,
                      "code": error.code}}


def openai_message(error: RequestError) -> str:
    """The error's text, in OpenAI's words where clients match those."""
    if is_overflow(error):
        return (f"This model's maximum context length is {error.details['max_context_tokens']} tokens. "
                f"However, your messages resulted in {error.details['prompt_tokens']} tokens. Please "
                "reduce the length of the messages.")
    return error.message


def is_overflow(error: RequestError) -> bool:
    """Whether the prompt is too long and the numbers are known."""
    return (error.code == "context_length_exceeded"
            and error.details.keys() >= {"prompt_tokens", "max_context_tokens"})


def openai_models(names: Sequence[str], created_s: int) -> dict[str, Any]:
    """OpenAI's list of models."""
    return {"object": "list", "data": [
        {"id": n, "object": "model", "created": created_s, "owned_by": "gyre"} for n in names]}
