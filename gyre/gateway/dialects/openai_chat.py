"""OpenAI chat completions.

Invariant: tool-call arguments pass through as strings, never parsed and written again.

Texts of several parts of one message are joined with nothing between. Reasoning travels in
`reasoning_content`, as most open-model servers have it; a history may also call it `reasoning`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gyre.base.enums import FinishReason
from gyre.base.protocols import Message, ToolCall
from gyre.gateway.dialects import wire
from gyre.gateway.dialects.base import Conversation, Dialect, Reply, ReplyHead, ReplyStream, RequestError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
          "tool": "tool"}
_USED = frozenset(("model", "messages", "tools", "max_tokens", "max_completion_tokens", "stream",
                   "stream_options", "n"))


class OpenAIChat(Dialect):
    """POST /v1/chat/completions, and the list of models for every client that is not Anthropic's."""

    name = "openai_chat"
    routes = (("POST", r"(?:/v1)?/chat/completions", "generate"), ("GET", r"(?:/v1)?/models", "models"))

    def parse_request(self, body: bytes, **groups: str) -> Conversation:
        """Reads a request body. Raises RequestError 400 with the field at fault."""
        data = wire.load_object(body)
        model = wire.string(data, "model")
        raw = data.get("messages")
        if not isinstance(raw, list) or not raw:
            raise wire.bad(f"messages must be a non-empty list, got {wire.show(raw)}", "messages")
        if data.get("n") not in (None, 1):
            raise wire.bad(f"n must be 1, got {wire.show(data['n'])}; send one request per sample", "n")
        wire.no_stop_sequences(data, "stop")
        if data.get("functions"):
            raise wire.bad("functions is not supported; send tools", "functions",
                           code="unsupported_parameter")
        options = wire.an_object(data.get("stream_options") or {}, "stream_options")
        return Conversation(
            model=model,
            messages=tuple(_message(m, f"messages[{i}]") for i, m in enumerate(raw)),
            tools=tuple(_tool(t, f"tools[{i}]")
                        for i, t in enumerate(wire.a_list(data.get("tools"), "tools"))),
            max_tokens=wire.token_limit(data, "max_completion_tokens", "max_tokens"),
            stream=wire.flag(data, "stream"),
            include_usage=wire.flag(options, "include_usage", "stream_options."),
            ignored=tuple(wire.ignored(data, _USED)))

    def format_reply(self, conversation: Conversation, reply: Reply) -> dict[str, Any]:
        m = reply.message
        message: dict[str, Any] = {"role": "assistant",
                                   "content": m.content if m.content or not m.tool_calls else None}
        if m.reasoning:
            message["reasoning_content"] = m.reasoning
        if m.tool_calls:
            message["tool_calls"] = [_wire_call(c) for c in m.tool_calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(reply)}
        return {**_head(reply.head, "chat.completion"), "choices": [choice], "usage": _usage(reply)}

    def stream(self, conversation: Conversation, head: ReplyHead) -> ReplyStream:
        return ChatStream(head, conversation.include_usage)

    def format_count(self, prompt_tokens: int) -> dict[str, Any]:
        return {"prompt_tokens": prompt_tokens}

    def format_models(self, names: Sequence[str], created_s: int) -> dict[str, Any]:
        return wire.openai_models(names, created_s)

    def format_error(self, error: RequestError) -> dict[str, Any]:
        return wire.openai_error(error)


# ------------------------------------------------------------------------------ requests


def _message(m: Any, where: str) -> Message:
    wire.an_object(m, where)
    role = m.get("role")
    if role == "function" or m.get("function_call"):
        raise wire.bad(f"{where}: function calls in the legacy form are not supported; send tool_calls and "
                       "messages with the role tool", where)
    if not isinstance(role, str) or role not in _ROLES:
        raise wire.bad(f"{where}.role must be one of {', '.join(_ROLES)}; got {wire.show(role)}",
                       f"{where}.role")
    content = wire.text_of(m.get("content"), f"{where}.content", wire.OPENAI_TEXT_PARTS)
    if role == "assistant":
        return Message("assistant", content, _reasoning(m, where),
                       _tool_calls(m.get("tool_calls"), f"{where}.tool_calls"), refs=_refs(m))
    if role == "tool":
        name = m.get("name")
        return Message("tool", content, tool_call_id=wire.string(m, "tool_call_id", f"{where}."),
                       name=name if isinstance(name, str) else "")
    return Message(_ROLES[role], content)


def _reasoning(m: Mapping[str, Any], where: str) -> str:
    return (wire.optional_string(m, "reasoning_content", f"{where}.")
            or wire.optional_string(m, "reasoning", f"{where}."))


def _refs(m: Mapping[str, Any]) -> tuple[str, ...]:
    """Ids, signatures and encrypted contents in the two forms that proxies put around reasoning."""
    blocks = [block for field in ("reasoning_details", "thinking_blocks")
              if isinstance(m.get(field), list) for block in m[field] if isinstance(block, dict)]
    return tuple(block[key] for block in blocks for key in ("id", "signature", "data")
                 if isinstance(block.get(key), str) and block[key])


def _tool_calls(calls: Any, where: str) -> tuple[ToolCall, ...]:
    out = []
    for i, call in enumerate(wire.a_list(calls, where)):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise wire.bad(f"{where}[{i}] must be an object with a function, got {wire.show(call)}",
                           f"{where}[{i}]")
        arguments = wire.arguments_text(  # some clients send the parsed object back
            function.get("arguments"), f"{where}[{i}].function.arguments")
        out.append(ToolCall(wire.string(call, "id", f"{where}[{i}]."),
                            wire.string(function, "name", f"{where}[{i}].function."), arguments))
    return tuple(out)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise wire.bad(f"{where} must be {{\"type\": \"function\", \"function\": {{\"name\": ...}}}}, got "
                       f"{wire.show(tool)}; only function tools are supported", where)
    return wire.function_tool(function, f"{where}.function")


# ------------------------------------------------------------------------------- answers


def _head(head: ReplyHead, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.turn_id}", "object": kind, "created": head.created_s,
            "model": head.model}


def _finish(reply: Reply) -> str:
    """The wire's finish reason. A cut completion says so even when it holds tool calls."""
    if reply.finish is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def _usage(reply: Reply) -> dict[str, int]:
    """Counts of recorded ids. Cached tokens are left out: only the engine knows them."""
    return {"prompt_tokens": reply.head.prompt_tokens, "completion_tokens": reply.completion_tokens,
            "total_tokens": reply.head.prompt_tokens + reply.completion_tokens}


def _wire_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function",
            "function": {"name": call.name, "arguments": call.arguments}}


class ChatStream(ReplyStream):
    """The chunks of one answer. A tool call is one chunk, with all of its arguments.

    Args:
      head: repeated in every chunk.
      include_usage: a chunk with the usage comes before [DONE].
    """

    def __init__(self, head: ReplyHead, include_usage: bool):
        self._head = _head(head, "chat.completion.chunk")
        self._include_usage = include_usage
        self._said = wire.Said()
        self._started = False

    def delta(self, reasoning: str, content: str) -> bytes:
        self._said.add(reasoning, content)
        out = b""
        if reasoning:
            out += self._chunk({"reasoning_content": reasoning})
        if content:
            out += self._chunk({"content": content})
        return out

    def end(self, reply: Reply) -> bytes:
        out = self.delta(*self._said.rest(reply.message))
        for i, call in enumerate(reply.message.tool_calls):
            out += self._chunk({"tool_calls": [{"index": i, **_wire_call(call)}]})
        out += self._chunk({}, _finish(reply))
        if self._include_usage:
            out += wire.event({**self._head, "choices": [], "usage": _usage(reply)})
        return out + b"data: [DONE]\n\n"

    def fail(self, error: RequestError) -> bytes:
        """No finish reason and no [DONE]: the answer is not complete."""
        return wire.event(wire.openai_error(error))

    def keep_alive(self) -> bytes:
        return wire.KEEP_ALIVE

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        start = b""
        if not self._started:
            self._started = True
            start = self._chunk({"role": "assistant", "content": ""})
        return start + wire.event({**self._head, "choices": [
            {"index": 0, "delta": delta, "finish_reason": finish}]})
