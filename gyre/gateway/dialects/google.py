"""Google generateContent and streamGenerateContent. A stream is always one of server-sent events.

Names of fields are taken in camel and in snake case. Calls carry an id and a thought signature that holds it;
a client that sends back neither has its calls and results paired by order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gyre.base.enums import FinishReason
from gyre.base.protocols import Message, ToolCall
from gyre.gateway.dialects import wire
from gyre.gateway.dialects.base import Conversation, Dialect, Reply, ReplyHead, ReplyStream, RequestError

_USED = frozenset(("contents", "systemInstruction", "tools", "generationConfig", "model",
                   "generateContentRequest"))
_USED_CONFIG = frozenset(("maxOutputTokens", "candidateCount"))
_STATUS = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
           408: "DEADLINE_EXCEEDED", 410: "NOT_FOUND", 413: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED",
           503: "UNAVAILABLE"}
_CALL_ID = re.compile(r"call_[0-9a-f]{24}")
_MODEL = r"/(?:v1beta|v1)/models/(?P<model>[^:]+)"


class GoogleGenerate(Dialect):
    """POST /v1beta/models/MODEL:generateContent and its kin."""

    name = "google"
    routes = (("POST", _MODEL + r":(?P<verb>generateContent|streamGenerateContent)", "generate"),
              ("POST", _MODEL + r":countTokens", "count"),
              ("GET", r"/v1beta/models", "models"))

    def parse_request(self, body: bytes, **groups: str) -> Conversation:
        """Reads a request body; `groups` are `model` and `verb` of the path. Raises RequestError 400."""
        data = _camel(wire.load_object(body))
        inner = data.get("generateContentRequest")
        if inner is not None:
            data = _camel(wire.an_object(inner, "generateContentRequest"))
        raw = data.get("contents")
        if not isinstance(raw, list) or not raw:
            raise wire.bad(f"contents must be a non-empty list, got {wire.show(raw)}", "contents")
        config = _camel(wire.an_object(data.get("generationConfig") or {}, "generationConfig"))
        if config.get("candidateCount") not in (None, 1):
            raise wire.bad(f"generationConfig.candidateCount must be 1, got "
                           f"{wire.show(config['candidateCount'])}", "generationConfig.candidateCount")
        wire.no_stop_sequences(config, "stopSequences", "generationConfig.")
        messages: list[Message] = []
        if data.get("systemInstruction") is not None:
            text = _instruction(data["systemInstruction"])
            messages += [Message("system", text)] if text else []
        reader = _Contents()
        for i, content in enumerate(raw):
            messages += reader.read(content, f"contents[{i}]")
        tools, hosted = _tools(wire.a_list(data.get("tools"), "tools"))
        ignored = [*wire.ignored(data, _USED), *hosted,
                   *wire.ignored(config, _USED_CONFIG, "generationConfig.")]
        return Conversation(
            model=groups.get("model", ""), messages=tuple(messages), tools=tuple(tools),
            max_tokens=wire.token_limit(config, "maxOutputTokens", where="generationConfig."),
            stream=groups.get("verb") == "streamGenerateContent", ignored=tuple(ignored))

    def format_reply(self, conversation: Conversation, reply: Reply) -> dict[str, Any]:
        m = reply.message
        parts: list[dict[str, Any]] = []
        if m.reasoning:
            parts.append({"text": m.reasoning, "thought": True})
        if m.content or not m.tool_calls:
            parts.append({"text": m.content, "thoughtSignature": f"sig_{reply.head.turn_id}"})
        return _answer(reply.head, [*parts, *_call_parts(reply)], reply)

    def stream(self, conversation: Conversation, head: ReplyHead) -> ReplyStream:
        return GenerateStream(head)

    def format_count(self, prompt_tokens: int) -> dict[str, Any]:
        return {"totalTokens": prompt_tokens}

    def format_models(self, names: Sequence[str], created_s: int) -> dict[str, Any]:
        return {"models": [{"name": f"models/{n}", "displayName": n, "supportedGenerationMethods": [
            "generateContent", "countTokens"]} for n in names]}

    def format_error(self, error: RequestError) -> dict[str, Any]:
        message = error.message
        if wire.is_overflow(error):
            message = (f"The input token count ({error.details['prompt_tokens']}) exceeds the maximum number "
                       f"of tokens allowed ({error.details['max_context_tokens']}).")
        status = _STATUS.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
        return {"error": {"code": error.status, "message": message, "status": status}}


# ------------------------------------------------------------------------------ requests


def _camel(data: Mapping[str, Any]) -> dict[str, Any]:
    """The object with the names of its own fields in camel case."""
    return {re.sub(r"_([a-z])", lambda m: m.group(1).upper(), k): v for k, v in data.items()}


def _parts(content: Any, where: str) -> list[tuple[dict[str, Any], str]]:
    wire.an_object(content, where)
    return [(_camel(wire.an_object(p, f"{where}.parts[{i}]")), f"{where}.parts[{i}]")
            for i, p in enumerate(wire.a_list(content.get("parts"), f"{where}.parts"))]


def _instruction(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(wire.string_or_empty(p, "text", f"{where}.")
                     for p, where in _parts(value, "systemInstruction"))


class _Contents:
    """Turns contents into messages, in order; remembers the calls that have no result yet."""

    def __init__(self):
        self._waiting: list[ToolCall] = []
        self._n_calls = 0

    def read(self, content: Any, where: str) -> list[Message]:
        """The messages of one content."""
        parts = _parts(content, where)
        role = content.get("role", "user")
        if role == "model":
            return [self._model(parts)]
        if role not in ("user", "function"):
            raise wire.bad(f"{where}.role must be user, model or function; got {wire.show(role)}",
                           f"{where}.role")
        results, texts = [], []
        for part, at in parts:
            if "functionResponse" in part:
                at += ".functionResponse"
                results.append(self._result(wire.an_object(part["functionResponse"], at), at))
            else:
                texts.append(wire.string_or_empty(part, "text", f"{at}."))
        return [*results, Message("user", "\n".join(texts))] if texts or not results else results

    def _model(self, parts: Sequence[tuple[dict[str, Any], str]]) -> Message:
        texts, thoughts, calls, refs = [], [], [], []
        for part, at in parts:
            signature = wire.optional_string(part, "thoughtSignature", f"{at}.")
            refs += [signature] if signature else []
            if "functionCall" in part:
                calls.append(self._call(wire.an_object(part["functionCall"], f"{at}.functionCall"),
                                        f"{at}.functionCall", signature))
            elif wire.flag(part, "thought", f"{at}."):
                thoughts.append(wire.string_or_empty(part, "text", f"{at}."))
            else:
                texts.append(wire.string_or_empty(part, "text", f"{at}."))
        self._waiting += calls
        return Message("assistant", "".join(texts), "".join(thoughts), tuple(calls), refs=tuple(refs))

    def _call(self, call: Mapping[str, Any], where: str, signature: str) -> ToolCall:
        call_id = wire.optional_string(call, "id", f"{where}.")
        if not call_id:
            signed = _CALL_ID.search(signature)
            call_id = signed.group() if signed else f"call_{self._n_calls}"
        self._n_calls += 1
        return ToolCall(call_id, wire.string(call, "name", f"{where}."),
                        wire.arguments_text(call.get("args"), f"{where}.args"))

    def _result(self, result: Mapping[str, Any], where: str) -> Message:
        name = wire.string(result, "name", f"{where}.")
        call_id = wire.optional_string(result, "id", f"{where}.")
        call = next((c for c in self._waiting if (c.call_id == call_id if call_id else c.name == name)), None)
        if call is not None:
            self._waiting.remove(call)
            call_id = call.call_id
        return Message("tool", _result_text(result.get("response"), f"{where}.response"),
                       tool_call_id=call_id or f"call_for_{name}", name=name)


def _result_text(response: Any, where: str) -> str:
    """A tool's output: the one text in the usual object around it, else the object as JSON."""
    if response is None:
        return ""
    fields = wire.an_object(response, where)
    if len(fields) == 1:
        (name, value), = fields.items()
        if name in ("output", "result", "content", "error") and isinstance(value, str):
            return value
    return wire.dump(fields)


def _tools(raw: Sequence[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """(tools for the model, hosted ones, which do not exist here)."""
    tools, hosted = [], []
    for i, tool in enumerate(raw):
        fields = _camel(wire.an_object(tool, f"tools[{i}]"))
        hosted += [f"tools[{i}].{name}" for name in sorted(fields) if name != "functionDeclarations"]
        where = f"tools[{i}].functionDeclarations"
        for j, declared in enumerate(wire.a_list(fields.get("functionDeclarations"), where)):
            declaration = _camel(wire.an_object(declared, f"{where}[{j}]"))
            schema = "parametersJsonSchema" if "parametersJsonSchema" in declaration else "parameters"
            made = wire.function_tool(declaration, f"{where}[{j}]", parameters=schema)
            made["function"]["parameters"] = _lower_types(made["function"]["parameters"])
            tools.append(made)
    return tools, hosted


def _lower_types(schema: Any) -> Any:
    """A schema with OpenAPI's OBJECT, STRING, ... as JSON schema writes them."""
    if isinstance(schema, list):
        return [_lower_types(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    return {k: v.lower() if k == "type" and isinstance(v, str) else _lower_types(v)
            for k, v in schema.items()}


# ------------------------------------------------------------------------------- answers


def _call_parts(reply: Reply) -> list[dict[str, Any]]:
    return [{"functionCall": {"id": c.call_id, "name": c.name, "args": wire.arguments_object(c.arguments)},
             "thoughtSignature": f"sig_{reply.head.turn_id}_{c.call_id}"} for c in reply.message.tool_calls]


def _answer(head: ReplyHead, parts: Sequence[Mapping[str, Any]],
            reply: Reply | None = None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"index": 0, "content": {"role": "model", "parts": list(parts)}}
    usage = {"promptTokenCount": head.prompt_tokens}
    if reply is not None:
        candidate["finishReason"] = "MAX_TOKENS" if reply.finish is FinishReason.LENGTH else "STOP"
        usage |= {"candidatesTokenCount": reply.completion_tokens,
                  "totalTokenCount": head.prompt_tokens + reply.completion_tokens}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": head.model,
            "responseId": head.turn_id}


class GenerateStream(ReplyStream):
    """The chunks of one answer; the last has the calls, the finish reason and the usage."""

    def __init__(self, head: ReplyHead):
        self._head = head
        self._said = wire.Said()

    def delta(self, reasoning: str, content: str) -> bytes:
        self._said.add(reasoning, content)
        parts = self._text_parts(reasoning, content)
        return wire.event(_answer(self._head, parts)) if parts else b""

    def end(self, reply: Reply) -> bytes:
        parts = self._text_parts(*self._said.rest(reply.message))
        if not parts and not reply.message.tool_calls:
            parts = [{"text": ""}]
        return wire.event(_answer(self._head, [*parts, *_call_parts(reply)], reply))

    def fail(self, error: RequestError) -> bytes:
        return wire.event(GoogleGenerate().format_error(error))

    def keep_alive(self) -> bytes:
        return wire.KEEP_ALIVE

    def _text_parts(self, reasoning: str, content: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"text": reasoning, "thought": True}] if reasoning else []
        return [*parts, {"text": content}] if content else parts
