"""OpenAI chat completions <-> gyre's conversation types. Pure: bytes and objects in and out.

Invariant: tool-call arguments pass through as strings, never parsed and written again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gyre.base.enums import FinishReason
from gyre.base.protocols import Message, ToolCall
from gyre.gateway.dialects.base import Conversation, Reply, RequestError

NAME = "openai_chat"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
          "tool": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text")
_USED = {"model", "messages", "tools", "max_tokens", "max_completion_tokens", "stream",
         "stream_options", "n"}
_VOLATILE = {"cache_control"}


# ------------------------------------------------------------------------------ requests


def parse_request(body: bytes) -> Conversation:
    """Reads a request body.

    Raises:
      RequestError: 400 with the field at fault.
    """
    data = _load(body)
    if not isinstance(data, dict):
        raise _bad("the request body must be a JSON object", None)
    model = data.get("model")
    if not isinstance(model, str) or not model:
        raise _bad(f"model must be a non-empty string, got {_show(model)}", "model")
    raw = data.get("messages")
    if not isinstance(raw, list) or not raw:
        raise _bad(f"messages must be a non-empty list, got {_show(raw)}", "messages")
    if data.get("n") not in (None, 1):
        raise _bad(f"n must be 1, got {_show(data['n'])}; send one request per sample", "n")
    if data.get("stop"):
        raise _bad("stop sequences are not supported; leave stop out", "stop",
                   code="unsupported_parameter")
    options = data.get("stream_options") or {}
    if not isinstance(options, dict):
        raise _bad(f"stream_options must be an object, got {_show(options)}", "stream_options")
    return Conversation(
        model=model,
        messages=tuple(_message(m, f"messages[{i}]") for i, m in enumerate(raw)),
        tools=_tools(data.get("tools")),
        max_tokens=_max_tokens(data),
        stream=_flag(data, "stream"),
        include_usage=_flag(options, "include_usage"),
        ignored=tuple(sorted(k for k, v in data.items() if k not in _USED and v is not None)))


def _load(body: bytes) -> Any:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError is a ValueError
        raise _bad(f"the request body is not JSON: {e}", None) from e
    # A lone surrogate is legal JSON and no text: it could be neither encoded nor hashed.
    return _without_surrogates(data) if b"\\ud" in body.lower() else data


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(v) for v in value]
    return value


def _message(m: Any, where: str) -> Message:
    if not isinstance(m, dict):
        raise _bad(f"{where} must be an object, got {_show(m)}", where)
    role = m.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _bad(f"{where}.role must be one of {', '.join(_ROLES)}; got {_show(role)}",
                   f"{where}.role")
    content = _text(m.get("content"), f"{where}.content")
    if role == "assistant":
        reasoning = m.get("reasoning_content") or ""
        if not isinstance(reasoning, str):
            raise _bad(f"{where}.reasoning_content must be a string", f"{where}.reasoning_content")
        return Message("assistant", content, reasoning,
                       _tool_calls(m.get("tool_calls"), f"{where}.tool_calls"))
    if role == "tool":
        call_id = m.get("tool_call_id")
        if not isinstance(call_id, str) or not call_id:
            raise _bad(f"{where}.tool_call_id must be a non-empty string, got {_show(call_id)}",
                       f"{where}.tool_call_id")
        name = m.get("name")
        return Message("tool", content, tool_call_id=call_id,
                       name=name if isinstance(name, str) else "")
    return Message(_ROLES[role], content)


def _text(content: Any, where: str) -> str:
    """Content as one string: a string, null, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(f"{where} must be a string, null or a list of parts, got {_show(content)}",
                   where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        key = "refusal" if kind == "refusal" else "text"
        if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(part.get(key), str):
            raise _bad(f"{where}[{i}] must be a text part, got {_show(kind)}; only text is "
                       "supported", f"{where}[{i}]")
        texts.append(part[key])
    return "".join(texts)


def _tool_calls(calls: Any, where: str) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise _bad(f"{where} must be a list, got {_show(calls)}", where)
    out = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise _bad(f"{where}[{i}] must be an object with a function", f"{where}[{i}]")
        call_id, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
        if arguments is None:
            arguments = "{}"
        elif isinstance(arguments, dict):  # some clients send the parsed object back
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, str)):
            raise _bad(f"{where}[{i}] needs the strings id, function.name and function.arguments",
                       f"{where}[{i}]")
        out.append(ToolCall(call_id, name, arguments))
    return tuple(out)


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise _bad(f"tools must be a list, got {_show(tools)}", "tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (not isinstance(function, dict) or tool.get("type") != "function"
                or not isinstance(function.get("name"), str)):
            raise _bad(f"tools[{i}] must be {{'type': 'function', 'function': {{'name': ...}}}}",
                       f"tools[{i}]")
    return tuple({k: v for k, v in t.items() if k not in _VOLATILE} for t in tools)


def _max_tokens(data: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = data.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _bad(f"{name} must be an integer of at least 1, got {_show(value)}", name)
            return value
    return None


def _flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise _bad(f"{name} must be true or false, got {_show(value)}", name)
    return bool(value)


def _bad(message: str, param: str | None, code: str | None = None) -> RequestError:
    return RequestError(400, message, param=param, code=code)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ------------------------------------------------------------------------------- answers


def finish_reason(reply: Reply) -> str:
    """The wire's finish reason. A cut completion says so even when it holds tool calls."""
    if reply.finish is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def usage(reply: Reply) -> dict[str, int]:
    """Counts of recorded ids. Cached tokens are left out: only the engine knows them."""
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens,
            "total_tokens": reply.prompt_tokens + reply.completion_tokens}


def format_reply(reply: Reply) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    m = reply.message
    message: dict[str, Any] = {"role": "assistant",
                               "content": m.content if m.content or not m.tool_calls else None}
    if m.reasoning:
        message["reasoning_content"] = m.reasoning
    if m.tool_calls:
        message["tool_calls"] = [_wire_call(c) for c in m.tool_calls]
    return {"id": reply.reply_id, "object": "chat.completion", "created": reply.created_s,
            "model": reply.model,
            "choices": [{"index": 0, "message": message, "logprobs": None,
                         "finish_reason": finish_reason(reply)}],
            "usage": usage(reply)}


def format_error(error: RequestError) -> dict[str, Any]:
    """The error shape of the dialect."""
    kinds = {401: "authentication_error", 404: "not_found_error", 410: "not_found_error",
             429: "rate_limit_error"}
    kind = kinds.get(error.status,
                     "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param,
                      "code": error.code}}


def format_models(names: tuple[str, ...], created_s: int) -> dict[str, Any]:
    """The body of GET /v1/models."""
    return {"object": "list", "data": [
        {"id": n, "object": "model", "created": created_s, "owned_by": "gyre"} for n in names]}


def _wire_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function",
            "function": {"name": call.name, "arguments": call.arguments}}


class ChatStream:
    """The events of one streamed answer, in order: `advance` any number of times, then `end`.

    Args:
      reply_id, model, created_s: repeated in every chunk.
    """

    def __init__(self, reply_id: str, model: str, created_s: int):
        self._head = {"id": reply_id, "object": "chat.completion.chunk", "created": created_s,
                      "model": model}
        self._content = ""
        self._reasoning = ""
        self._opened = False

    def advance(self, reasoning: str, content: str) -> bytes:
        """Events that take the client from what it has to these texts, which extend it."""
        out = b""
        if not self._opened:
            self._opened = True
            out += self._delta({"role": "assistant", "content": ""})
        if new := reasoning[len(self._reasoning):]:
            self._reasoning = reasoning
            out += self._delta({"reasoning_content": new})
        if new := content[len(self._content):]:
            self._content = content
            out += self._delta({"content": new})
        return out

    def end(self, reply: Reply, include_usage: bool) -> bytes:
        """What is left of the message, the finish reason, maybe the usage, and [DONE]."""
        out = self.advance(reply.message.reasoning, reply.message.content)
        for i, call in enumerate(reply.message.tool_calls):
            out += self._delta({"tool_calls": [{"index": i, **_wire_call(call)}]})
        out += self._delta({}, finish_reason(reply))
        if include_usage:
            out += _event({**self._head, "choices": [], "usage": usage(reply)})
        return out + b"data: [DONE]\n\n"

    @staticmethod
    def fail(error: RequestError) -> bytes:
        """An error after the stream began. No [DONE]: the answer is not complete."""
        return _event(format_error(error))

    def _delta(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        return _event({**self._head, "choices": [
            {"index": 0, "delta": delta, "finish_reason": reason}]})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
