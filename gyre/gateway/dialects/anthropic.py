"""Anthropic Messages.

Arguments travel as parsed objects: what is no JSON object is wrapped where an answer is not streamed, and
streamed as it was sampled. Thinking blocks carry a signature that names the turn. Texts of several blocks are
joined by line ends; tool results go before the text of their message.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from gyre.base.enums import FinishReason
from gyre.base.protocols import Message, ToolCall
from gyre.gateway.dialects import wire
from gyre.gateway.dialects.base import Conversation, Dialect, Reply, ReplyHead, ReplyStream, RequestError

_USED = frozenset(("model", "messages", "system", "tools", "max_tokens", "stream"))
_TEXT_PARTS = {"text": "text"}
_BILLING = "x-anthropic-billing-header:"  # a system block that changes with every request
_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
           404: "not_found_error", 408: "timeout_error", 410: "not_found_error", 413: "request_too_large",
           429: "rate_limit_error", 503: "overloaded_error"}


class AnthropicMessages(Dialect):
    """POST /v1/messages."""

    name = "anthropic"
    routes = (("POST", r"(?:/v1)?/messages", "generate"),
              ("POST", r"(?:/v1)?/messages/count_tokens", "count"),
              ("GET", r"/v1/models", "models"))

    def parse_request(self, body: bytes, **groups: str) -> Conversation:
        """Reads a request body. Raises RequestError 400 with the field at fault."""
        data = wire.load_object(body)
        raw = data.get("messages")
        if not isinstance(raw, list) or not raw:
            raise wire.bad(f"messages must be a non-empty list, got {wire.show(raw)}", "messages")
        wire.no_stop_sequences(data, "stop_sequences")
        messages = _system(data.get("system"), "system")
        for i, m in enumerate(raw):
            messages += _messages(wire.an_object(m, f"messages[{i}]"), f"messages[{i}]")
        tools, hosted = _tools(wire.a_list(data.get("tools"), "tools"))
        return Conversation(
            model=wire.string(data, "model"), messages=tuple(messages), tools=tuple(tools),
            max_tokens=wire.token_limit(data, "max_tokens"), stream=wire.flag(data, "stream"),
            ignored=(*wire.ignored(data, _USED), *hosted))

    def format_reply(self, conversation: Conversation, reply: Reply) -> dict[str, Any]:
        m = reply.message
        content: list[dict[str, Any]] = []
        if m.reasoning:
            content.append({"type": "thinking", "thinking": m.reasoning, "signature": _signature(reply.head)})
        if m.content or not (m.reasoning or m.tool_calls):
            content.append({"type": "text", "text": m.content})
        content += [{"type": "tool_use", "id": c.call_id, "name": c.name,
                     "input": wire.arguments_object(c.arguments)} for c in m.tool_calls]
        return {**_message(reply.head), "content": content, "stop_reason": _stop_reason(reply),
                "usage": _usage(reply.head, reply.completion_tokens)}

    def stream(self, conversation: Conversation, head: ReplyHead) -> ReplyStream:
        return MessagesStream(head)

    def format_count(self, prompt_tokens: int) -> dict[str, Any]:
        return {"input_tokens": prompt_tokens}

    def format_models(self, names: Sequence[str], created_s: int) -> dict[str, Any]:
        created = datetime.datetime.fromtimestamp(created_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"data": [{"type": "model", "id": n, "display_name": n, "created_at": created} for n in names],
                "has_more": False, "first_id": names[0], "last_id": names[-1]}

    def format_error(self, error: RequestError) -> dict[str, Any]:
        kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        message = error.message
        if wire.is_overflow(error):  # the words that clients compact on
            message = (f"prompt is too long: {error.details['prompt_tokens']} tokens > "
                       f"{error.details['max_context_tokens']} maximum")
        return {"type": "error", "error": {"type": kind, "message": message}}


# ------------------------------------------------------------------------------ requests


def _system(value: Any, where: str) -> list[Message]:
    """The system prompt as a message, without what changes from call to call."""
    if isinstance(value, list):
        value = [b for b in value if not (isinstance(b, dict) and isinstance(b.get("text"), str)
                                          and b["text"].startswith(_BILLING))]
    text = wire.text_of(value, where, _TEXT_PARTS, join="\n")
    return [Message("system", text)] if text else []


def _messages(m: Mapping[str, Any], where: str) -> list[Message]:
    role, content = m.get("role"), m.get("content")
    if role == "system":
        return _system(content, f"{where}.content")
    if role not in ("user", "assistant"):
        raise wire.bad(f"{where}.role must be user, assistant or system; got {wire.show(role)}",
                       f"{where}.role")
    if content is None or isinstance(content, str):
        return [Message(role, content or "")]
    if not isinstance(content, list):
        raise wire.bad(f"{where}.content must be a string or a list of blocks, got {wire.show(content)}",
                       f"{where}.content")
    blocks = [(wire.an_object(b, f"{where}.content[{i}]"), f"{where}.content[{i}]")
              for i, b in enumerate(content)]
    return _user(blocks) if role == "user" else [_assistant(blocks)]


def _user(blocks: Sequence[tuple[Mapping[str, Any], str]]) -> list[Message]:
    results, texts = [], []
    for block, where in blocks:
        if block.get("type") == "tool_result":
            text = wire.result_text(block.get("content"), f"{where}.content", _TEXT_PARTS)
            results.append(Message("tool", text, tool_call_id=wire.string(block, "tool_use_id", f"{where}.")))
        else:
            texts.append(wire.part_text(block, where, _TEXT_PARTS))
    return [*results, Message("user", "\n".join(texts))] if texts or not results else results


def _assistant(blocks: Sequence[tuple[Mapping[str, Any], str]]) -> Message:
    texts, thoughts, calls, refs = [], [], [], []
    for block, where in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(wire.optional_string(block, "thinking", f"{where}."))
            refs.append(wire.optional_string(block, "signature", f"{where}."))
        elif kind == "redacted_thinking":
            refs.append(wire.optional_string(block, "data", f"{where}."))
        elif kind == "tool_use":
            arguments = wire.arguments_text(block.get("input"), f"{where}.input")
            calls.append(ToolCall(wire.string(block, "id", f"{where}."),
                                  wire.string(block, "name", f"{where}."), arguments))
        else:
            texts.append(wire.part_text(block, where, _TEXT_PARTS))
    return Message("assistant", "\n".join(texts), "\n".join(thoughts), tuple(calls),
                   refs=tuple(r for r in refs if r))


def _tools(raw: Sequence[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """(tools for the model, hosted ones, which do not exist here)."""
    tools, hosted = [], []
    for i, tool in enumerate(raw):
        where = f"tools[{i}]"
        kind = wire.an_object(tool, where).get("type")
        if kind in (None, "custom"):
            tools.append(wire.function_tool(tool, where, parameters="input_schema"))
        else:
            hosted.append(f"{where} ({wire.show(kind)})")
    return tools, hosted


# ------------------------------------------------------------------------------- answers


def _message(head: ReplyHead) -> dict[str, Any]:
    return {"id": f"msg_{head.turn_id}", "type": "message", "role": "assistant", "model": head.model,
            "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(head, 0)}


def _signature(head: ReplyHead) -> str:
    return f"sig_{head.turn_id}"


def _stop_reason(reply: Reply) -> str:
    if reply.finish is FinishReason.LENGTH:
        return "max_tokens"
    return "tool_use" if reply.message.tool_calls else "end_turn"


def _usage(head: ReplyHead, output_tokens: int) -> dict[str, int]:
    """Counts of recorded ids. Nothing counts as cached: only the engine knows that."""
    return {"input_tokens": head.prompt_tokens, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0, "output_tokens": output_tokens}


class MessagesStream(ReplyStream):
    """The events of one answer: a message that starts, its content blocks one by one, its end."""

    def __init__(self, head: ReplyHead):
        self._head = head
        self._started = False
        self._index = -1
        self._open = ""  # type of the block that grows
        self._said = wire.Said()

    def delta(self, reasoning: str, content: str) -> bytes:
        self._said.add(reasoning, content)
        out = b""
        if reasoning:
            out += self._grow("thinking", {"type": "thinking", "thinking": "", "signature": ""},
                              {"type": "thinking_delta", "thinking": reasoning})
        if content:
            out += self._grow("text", {"type": "text", "text": ""}, {"type": "text_delta", "text": content})
        return out

    def end(self, reply: Reply) -> bytes:
        out = self._start() + self.delta(*self._said.rest(reply.message))
        if self._index < 0 and not reply.message.tool_calls:
            out += self._grow("text", {"type": "text", "text": ""}, {"type": "text_delta", "text": ""})
        for call in reply.message.tool_calls:
            block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
            out += self._close()
            out += self._grow("tool_use", block,
                              {"type": "input_json_delta", "partial_json": call.arguments})
        out += self._close()
        out += self._event("message_delta", delta={"stop_reason": _stop_reason(reply), "stop_sequence": None},
                           usage=_usage(reply.head, reply.completion_tokens))
        return out + self._event("message_stop")

    def fail(self, error: RequestError) -> bytes:
        return wire.event(AnthropicMessages().format_error(error), "error")

    def keep_alive(self) -> bytes:
        return self._start() + self._event("ping")

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        return self._event("message_start", message=_message(self._head)) + self._event("ping")

    def _grow(self, kind: str, block: Mapping[str, Any], delta: Mapping[str, Any]) -> bytes:
        out = self._start()
        if self._open != kind:
            out += self._close()
            self._index += 1
            self._open = kind
            out += self._event("content_block_start", index=self._index, content_block=block)
        return out + self._event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        out = b""
        if self._open == "thinking":
            out = self._event("content_block_delta", index=self._index,
                              delta={"type": "signature_delta", "signature": _signature(self._head)})
        self._open = ""
        return out + self._event("content_block_stop", index=self._index)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return wire.event({"type": kind, **fields}, kind)
