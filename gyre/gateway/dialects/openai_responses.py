"""OpenAI Responses.

A history is a flat list of items. Those of one assistant turn stand in the order reasoning, text, calls;
where that order starts anew, so does a message. A namespaced tool is shown to the model by its own name, or
with the namespace before it where two tools would have one name; a custom tool is a function of one string.
Tools that the vendor hosts do not exist here and are left out.

Token details in `usage` are zero: only the engine knows what it had cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gyre.base.enums import FinishReason
from gyre.base.protocols import Message, ToolCall
from gyre.gateway.dialects import wire
from gyre.gateway.dialects.base import Conversation, Dialect, Reply, ReplyHead, ReplyStream, RequestError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_USED = frozenset(("model", "input", "instructions", "tools", "max_output_tokens", "stream",
                   "previous_response_id"))
_HOSTED_CALLS = ("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call",
                 "computer_call", "mcp_list_tools", "mcp_call", "local_shell_call")
_REASONING, _TEXT, _CALL = range(3)
_CUSTOM_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class OpenAIResponses(Dialect):
    """POST /v1/responses."""

    name = "openai_responses"
    routes = (("POST", r"(?:/v1)?/responses", "generate"),
              ("POST", r"(?:/v1)?/responses/input_tokens", "count"))

    def parse_request(self, body: bytes, **groups: str) -> Conversation:
        """Reads a request body. Raises RequestError 400 with the field at fault."""
        data = wire.load_object(body)
        tools, shown, hosted = _read_tools(wire.a_list(data.get("tools"), "tools"))
        messages = _Items(shown).read(data.get("input"))
        instructions = wire.optional_string(data, "instructions")
        if instructions:
            messages.insert(0, Message("system", instructions))
        if not messages:
            raise wire.bad("input must hold at least one item", "input")
        return Conversation(
            model=wire.string(data, "model"), messages=tuple(messages), tools=tuple(tools),
            max_tokens=wire.token_limit(data, "max_output_tokens"), stream=wire.flag(data, "stream"),
            ignored=(*wire.ignored(data, _USED), *hosted),
            previous_id=wire.optional_string(data, "previous_response_id"), wire={"tools": shown})

    def format_reply(self, conversation: Conversation, reply: Reply) -> dict[str, Any]:
        return _response(reply.head, _status(reply), list(_items(conversation, reply)), reply)

    def stream(self, conversation: Conversation, head: ReplyHead) -> ReplyStream:
        return ResponsesStream(conversation, head)

    def format_count(self, prompt_tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": prompt_tokens}

    def format_models(self, names: Sequence[str], created_s: int) -> dict[str, Any]:
        return wire.openai_models(names, created_s)

    def format_error(self, error: RequestError) -> dict[str, Any]:
        return wire.openai_error(error)


# ------------------------------------------------------------------------------ requests


def _read_tools(raw: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]], list[str]]:
    """(tools for the model, its name for each -> {name, namespace, kind} on the wire, hosted ones)."""
    listed: list[tuple[dict[str, Any], str, str]] = []
    hosted = []
    for i, tool in enumerate(raw):
        where = f"tools[{i}]"
        wire.an_object(tool, where)
        kind = tool.get("type")
        if kind == "namespace":
            namespace = wire.string(tool, "name", f"{where}.")
            for j, inner in enumerate(wire.a_list(tool.get("tools"), f"{where}.tools")):
                wire.an_object(inner, f"{where}.tools[{j}]")
                listed.append((inner, f"{where}.tools[{j}]", namespace))
        elif kind in ("function", "custom"):
            listed.append((tool, where, ""))
        elif isinstance(kind, str):
            hosted.append(f"{where} ({kind})")
        else:
            raise wire.bad(f"{where}.type must be a string, got {wire.show(kind)}", f"{where}.type")
    names = [wire.string(tool, "name", f"{where}.") for tool, where, _ in listed]
    tools, shown = [], {}
    for (tool, where, namespace), name in zip(listed, names, strict=True):
        custom = tool.get("type") == "custom"
        visible = f"{namespace}__{name}" if namespace and names.count(name) > 1 else name
        shown[visible] = {"name": name, "namespace": namespace, "kind": "custom" if custom else "function"}
        source = {**tool, "parameters": _CUSTOM_PARAMETERS} if custom else tool
        tools.append(wire.function_tool(source, where, name=visible))
    return tools, shown, hosted


class _Items:
    """Turns input items into messages.

    Args:
      shown: the model's name for each tool -> what it is on the wire.
    """

    def __init__(self, shown: Mapping[str, Mapping[str, str]]):
        self._visible = {(t["namespace"], t["name"]): name for name, t in shown.items()}
        self._messages: list[Message] = []
        self._rank: int | None = None  # of the last item of an assistant turn that is still open

    def read(self, items: Any) -> list[Message]:
        """All messages of a request's `input`."""
        if isinstance(items, str):
            return [Message("user", items)]
        for i, item in enumerate(wire.a_list(items, "input")):
            self._read(wire.an_object(item, f"input[{i}]"), f"input[{i}]")
        return self._messages

    def _read(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._assistant(_REASONING, reasoning=_thought(item, where), item=item)
        elif kind in ("function_call", "custom_tool_call"):
            self._assistant(_CALL, call=self._call(item, where, kind), item=item)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            text = wire.result_text(item.get("output"), f"{where}.output", wire.OPENAI_TEXT_PARTS)
            self._add(Message("tool", text, tool_call_id=wire.string(item, "call_id", f"{where}.")))
        elif kind not in _HOSTED_CALLS:
            raise wire.bad(f"{where}.type must be message, reasoning, function_call, function_call_output, "
                           f"custom_tool_call or custom_tool_call_output; got {wire.show(kind)}",
                           f"{where}.type")

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise wire.bad(f"{where}.role must be one of {', '.join(_ROLES)}; got {wire.show(role)}",
                           f"{where}.role")
        text = wire.text_of(item.get("content"), f"{where}.content", wire.OPENAI_TEXT_PARTS)
        if role == "assistant":
            self._assistant(_TEXT, text=text, item=item)
        else:
            self._add(Message(_ROLES[role], text))

    def _call(self, item: Mapping[str, Any], where: str, kind: str) -> ToolCall:
        name = wire.string(item, "name", f"{where}.")
        name = self._visible.get((wire.optional_string(item, "namespace", f"{where}."), name), name)
        if kind == "custom_tool_call":
            arguments = wire.dump({"input": wire.optional_string(item, "input", f"{where}.")})
        else:
            arguments = wire.arguments_text(item.get("arguments"), f"{where}.arguments")
        return ToolCall(wire.string(item, "call_id", f"{where}."), name, arguments)

    def _add(self, message: Message) -> None:
        self._rank = None
        self._messages.append(message)

    def _assistant(self, rank: int, *, reasoning: str = "", text: str = "", call: ToolCall | None = None,
                   item: Mapping[str, Any]) -> None:
        """Adds an item to the open assistant turn, or opens one where the order starts anew."""
        again = self._rank is None or rank < self._rank or (rank == self._rank and rank != _CALL)
        last = Message("assistant") if again else self._messages.pop()
        self._rank = rank
        refs = tuple(v for k in ("id", "encrypted_content") if isinstance(v := item.get(k), str) and v)
        self._messages.append(Message(
            "assistant", last.content + text, last.reasoning + reasoning,
            (*last.tool_calls, call) if call else last.tool_calls, refs=(*last.refs, *refs)))


def _thought(item: Mapping[str, Any], where: str) -> str:
    """The reasoning's own text, else its summary."""
    return (wire.text_of(item.get("content"), f"{where}.content", {"reasoning_text": "text", "text": "text"})
            or wire.text_of(item.get("summary"), f"{where}.summary", {"summary_text": "text"}))


# ------------------------------------------------------------------------------- answers


def _status(reply: Reply) -> str:
    return "incomplete" if reply.finish is FinishReason.LENGTH else "completed"


def _response(head: ReplyHead, status: str, output: list[dict[str, Any]], reply: Reply | None = None,
              error: Mapping[str, Any] | None = None) -> dict[str, Any]:
    usage = None if reply is None else {
        "input_tokens": head.prompt_tokens, "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": reply.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": head.prompt_tokens + reply.completion_tokens}
    return {"id": f"resp_{head.turn_id}", "object": "response", "created_at": head.created_s,
            "status": status, "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None, "metadata": {}, "model": head.model, "output": output,
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": None,
            "top_p": None, "usage": usage}


def _reasoning_item(head: ReplyHead, text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": f"rs_{head.turn_id}",
            "summary": [{"type": "summary_text", "text": text}], "encrypted_content": f"enc_{head.turn_id}"}


def _text_item(head: ReplyHead, text: str, status: str) -> dict[str, Any]:
    return {"type": "message", "id": f"msg_{head.turn_id}", "status": status, "role": "assistant",
            "content": [_text_part(text)]}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _call_item(conversation: Conversation, head: ReplyHead, index: int, call: ToolCall) -> dict[str, Any]:
    unknown = {"name": call.name, "namespace": "", "kind": "function"}  # the client will say so
    tool = conversation.wire["tools"].get(call.name, unknown)
    item: dict[str, Any] = {"type": "function_call", "id": f"fc_{head.turn_id}_{index}",
                            "status": "completed", "call_id": call.call_id, "name": tool["name"]}
    if tool["kind"] == "custom":
        value = wire.arguments_object(call.arguments).get("input")
        item["type"] = "custom_tool_call"
        item["input"] = value if isinstance(value, str) else call.arguments
    else:
        item["arguments"] = call.arguments
    if tool["namespace"]:
        item["namespace"] = tool["namespace"]
    return item


def _items(conversation: Conversation, reply: Reply) -> Iterator[dict[str, Any]]:
    m = reply.message
    if m.reasoning:
        yield _reasoning_item(reply.head, m.reasoning)
    if m.content or not m.tool_calls:
        yield _text_item(reply.head, m.content, _status(reply))
    for i, call in enumerate(m.tool_calls):
        yield _call_item(conversation, reply.head, i, call)


class ResponsesStream(ReplyStream):
    """The events of one answer: each output item is added, grows, and is done; then the response is.

    Args:
      conversation: says how tools are named on the wire.
      head: repeated in the response objects.
    """

    def __init__(self, conversation: Conversation, head: ReplyHead):
        self._conversation, self._head = conversation, head
        self._sequence = 0
        self._open: dict[str, Any] | None = None  # the item that grows
        self._text = ""  # of that item
        self._done: list[dict[str, Any]] = []
        self._said = wire.Said()

    def delta(self, reasoning: str, content: str) -> bytes:
        self._said.add(reasoning, content)
        out = b""
        if reasoning:
            out += self._grow("reasoning", reasoning)
        if content:
            out += self._grow("message", content)
        return out

    def end(self, reply: Reply) -> bytes:
        out = self.delta(*self._said.rest(reply.message))
        if not self._done and not self._open and not reply.message.tool_calls:
            out += self._grow("message", "")
        out += self._close(_status(reply))
        for i, call in enumerate(reply.message.tool_calls):
            out += self._call(_call_item(self._conversation, self._head, i, call))
        status = _status(reply)
        return out + self._event(f"response.{status}",
                                 response=_response(self._head, status, self._done, reply))

    def fail(self, error: RequestError) -> bytes:
        described = {"code": error.code or "server_error", "message": wire.openai_message(error)}
        return self._event("response.failed", response=_response(self._head, "failed", self._done,
                                                                 error=described))

    def keep_alive(self) -> bytes:
        return wire.KEEP_ALIVE

    def _event(self, kind: str, **fields: Any) -> bytes:
        out = b""
        if self._sequence == 0 and kind != "response.created":
            started = _response(self._head, "in_progress", [])
            out = (self._event("response.created", response=started)
                   + self._event("response.in_progress", response=started))
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return out + wire.event(data, kind)

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._open["id"], "output_index": len(self._done)}

    def _grow(self, kind: str, text: str) -> bytes:
        out = b""
        if self._open is not None and self._open["type"] != kind:
            out += self._close("completed")
        thinking = kind == "reasoning"
        if self._open is None:
            self._text = ""
            self._open = ({**_reasoning_item(self._head, ""), "summary": []} if thinking else
                          {**_text_item(self._head, "", "in_progress"), "content": []})
            out += self._event("response.output_item.added", output_index=len(self._done), item=self._open)
            out += (self._event("response.reasoning_summary_part.added", **self._at(), summary_index=0,
                                part={"type": "summary_text", "text": ""}) if thinking else
                    self._event("response.content_part.added", **self._at(), content_index=0,
                                part=_text_part("")))
        self._text += text
        if not text:
            return out
        return out + (self._event("response.reasoning_summary_text.delta", **self._at(), summary_index=0,
                                  delta=text) if thinking else
                      self._event("response.output_text.delta", **self._at(), content_index=0, delta=text))

    def _close(self, status: str) -> bytes:
        """Finishes the item that grows, if there is one."""
        if self._open is None:
            return b""
        text, at = self._text, self._at()
        if self._open["type"] == "reasoning":
            item = _reasoning_item(self._head, text)
            out = (self._event("response.reasoning_summary_text.done", **at, summary_index=0, text=text)
                   + self._event("response.reasoning_summary_part.done", **at, summary_index=0,
                                 part={"type": "summary_text", "text": text}))
        else:
            item = _text_item(self._head, text, status)
            out = (self._event("response.output_text.done", **at, content_index=0, text=text)
                   + self._event("response.content_part.done", **at, content_index=0, part=_text_part(text)))
        self._open = None
        return out + self._finished(item)

    def _call(self, item: dict[str, Any]) -> bytes:
        field, kind = (("input", "custom_tool_call_input") if item["type"] == "custom_tool_call"
                       else ("arguments", "function_call_arguments"))
        self._open = {**item, "status": "in_progress", field: ""}
        out = self._event("response.output_item.added", output_index=len(self._done), item=self._open)
        at = self._at()
        out += self._event(f"response.{kind}.delta", **at, delta=item[field])
        out += self._event(f"response.{kind}.done", **at, **{field: item[field]})
        self._open = None
        return out + self._finished(item)

    def _finished(self, item: dict[str, Any]) -> bytes:
        out = self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        return out
