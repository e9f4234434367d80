"""Small clients of all four dialects: they keep a history on the wire, and change it, as harnesses do.

Every mutation is one that was seen on the wire of a real harness; none may keep a history from being
recognised.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from gyre.gateway.dialects import DIALECTS, Conversation, Dialect

TOOL_NAMES = ("bash", "write")
_BY_NAME = {d.name: d for d in DIALECTS}


def _rewritten(raw: str, rng: random.Random) -> str:
    """Arguments as clients write them anew: keys in another order, 60000 as 60000.0, other escapes."""
    try:
        value = json.loads(raw)
    except ValueError:
        return rng.choice([raw, json.dumps({"raw_input": raw}), raw + '"}'])  # kept, wrapped, repaired
    if isinstance(value, dict):
        items = list(value.items())
        rng.shuffle(items)
        value = {k: float(v) if isinstance(v, int) and not isinstance(v, bool) and rng.random() < 0.5 else v
                 for k, v in items}
    return json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 1]))


class WireClient:
    """The history of one conversation in one dialect.

    Attributes:
      dialect: what it speaks.
      history: the wire's messages, items or contents.
      in_order: whether all results so far came in the order of their calls.
    """

    in_order = True

    def __init__(self, name: str, system: str, prompt: str):
        self.dialect: Dialect = _BY_NAME[name]
        self.system = system
        self.history: list[dict[str, Any]] = []
        self.user(prompt)

    # What each dialect writes in its own way.
    def user(self, text: str) -> None: ...
    def echo(self, reply: dict[str, Any]) -> list[str]: ...
    def result(self, call_id: str, text: str) -> None: ...
    def body(self, rng: random.Random | None) -> dict[str, Any]: ...

    def conversation(self, rng: random.Random | None = None) -> Conversation:
        """What the gateway reads; with `rng`, of a mutated history."""
        raw = json.dumps(self.body(rng), ensure_ascii=rng is not None and rng.random() < 0.5).encode()
        return self.dialect.parse_request(raw, model="m", verb="generateContent")


class ChatClient(WireClient):
    """OpenAI chat completions."""

    def __init__(self, system: str, prompt: str):
        super().__init__("openai_chat", system, prompt)

    def user(self, text):
        self.history.append({"role": "user", "content": text})

    def echo(self, reply):
        message = reply["choices"][0]["message"]
        self.history.append(message)
        return [c["id"] for c in message.get("tool_calls", ())]

    def result(self, call_id, text):
        self.history.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def body(self, rng):
        messages = [{"role": "system", "content": self.system}, *copy.deepcopy(self.history)]
        if rng is not None:
            messages[0]["role"] = rng.choice(["system", "developer"])
            for m in messages:
                self._mutate(m, rng)
        return {"model": "m", "messages": messages, "unknown_field": 1, "tools": [
            {"type": "function", "function": {"name": n, "parameters": {"type": "object"}}}
            for n in TOOL_NAMES]}

    def _mutate(self, m, rng):
        if m["role"] == "assistant":
            if not m["content"]:
                m["content"] = rng.choice([None, ""])
            elif rng.random() < 0.3:
                m["content"] = m["content"].rstrip()
            thought = m.get("reasoning_content")
            if thought is not None:
                m.update(rng.choice([{}, {"reasoning_content": thought.rstrip()}, {"reasoning_content": None},
                                     {"reasoning": m.pop("reasoning_content")}]))
            for call in m.get("tool_calls", ()):
                call["function"]["arguments"] = _rewritten(call["function"]["arguments"], rng)
                if rng.random() < 0.2:
                    call["function"]["name"] = "invalid"
        if isinstance(m["content"], str) and rng.random() < 0.5:
            m["content"] = [{"type": "text", "text": m["content"], "cache_control": {"type": "ephemeral"}}]


class ResponsesClient(WireClient):
    """OpenAI Responses."""

    def __init__(self, system: str, prompt: str):
        super().__init__("openai_responses", system, prompt)

    def user(self, text):
        self.history.append({"type": "message", "role": "user", "id": "msg_u",
                             "content": [{"type": "input_text", "text": text}]})

    def echo(self, reply):
        self.history += reply["output"]
        return [i["call_id"] for i in reply["output"] if i["type"] == "function_call"]

    def result(self, call_id, text):
        self.history.append({"type": "function_call_output", "call_id": call_id, "output": text,
                             "id": "fco_1"})

    def body(self, rng):
        items = copy.deepcopy(self.history)
        if rng is not None:
            items = [i for i in items if i["type"] != "reasoning" or rng.random() < 0.7]
            for i in items:
                self._mutate(i, rng)
        return {"model": "m", "instructions": self.system, "input": items, "store": False, "tools": [
            {"type": "function", "name": n, "parameters": {"type": "object"}, "strict": False}
            for n in TOOL_NAMES]}

    def _mutate(self, item, rng):
        for field in ("id", "status"):
            if rng.random() < 0.3:
                item.pop(field, None)
        if item["type"] == "reasoning" and rng.random() < 0.5:
            item["summary"] = rng.choice([[], item["summary"]])
            item["content"] = None
        if item["type"] == "function_call":
            item["arguments"] = _rewritten(item["arguments"], rng)
        if item["type"] == "message" and rng.random() < 0.4:
            item["content"] = item["content"][0]["text"]
        if item["type"] == "function_call_output" and rng.random() < 0.3:
            item["output"] = [{"type": "input_text", "text": item["output"]}]


class MessagesClient(WireClient):
    """Anthropic Messages."""

    def __init__(self, system: str, prompt: str):
        super().__init__("anthropic", system, prompt)

    def user(self, text):
        last = self.history[-1] if self.history else {"role": ""}
        if last["role"] == "user":  # behind tool results
            last["content"].append({"type": "text", "text": text})
        else:
            self.history.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def echo(self, reply):
        self.history.append({"role": "assistant", "content": reply["content"]})
        return [b["id"] for b in reply["content"] if b["type"] == "tool_use"]

    def result(self, call_id, text):
        block = {"type": "tool_result", "tool_use_id": call_id, "content": text, "is_error": False}
        if self.history[-1]["role"] == "user":
            self.history[-1]["content"].append(block)
        else:
            self.history.append({"role": "user", "content": [block]})

    def body(self, rng):
        messages, system = copy.deepcopy(self.history), [{"type": "text", "text": self.system}]
        if rng is not None:
            if rng.random() < 0.5:
                system.insert(0, {"type": "text", "text": f"x-anthropic-billing-header: cc={rng.random()}"})
            for m in messages:
                self._mutate(m, rng)
        return {"model": "m", "system": system, "messages": messages, "max_tokens": 1000, "metadata": {},
                "tools": [{"name": n, "input_schema": {"type": "object"}, **(
                    {"cache_control": {"type": "ephemeral"}} if rng and rng.random() < 0.5 else {})}
                    for n in TOOL_NAMES]}

    def _mutate(self, m, rng):
        if rng.random() < 0.4:
            m["content"][-1]["cache_control"] = {"type": "ephemeral"}
        if m["role"] == "assistant":
            m["content"] = [b for b in m["content"] if b["type"] != "thinking" or rng.random() < 0.7]
        for b in m["content"]:
            if b["type"] == "tool_use":
                b["input"] = json.loads(_rewritten(json.dumps(b["input"]), rng))
                if rng.random() < 0.2:
                    b["name"] = "invalid"
            if b["type"] == "thinking" and rng.random() < 0.5:
                b["thinking"] = rng.choice(["", b["thinking"].rstrip()])
            if b["type"] == "tool_result" and rng.random() < 0.5:
                b["content"] = [{"type": "text", "text": b["content"]}]
        if len(m["content"]) == 1 and m["content"][0]["type"] == "text" and rng.random() < 0.5:
            m["content"] = m["content"][0]["text"]


class GoogleClient(WireClient):
    """Google generateContent."""

    def __init__(self, system: str, prompt: str):
        super().__init__("google", system, prompt)

    def user(self, text):
        last = self.history[-1] if self.history else {"role": ""}
        if last["role"] == "user":
            last["parts"].append({"text": text})
        else:
            self.history.append({"role": "user", "parts": [{"text": text}]})

    def echo(self, reply):
        content = reply["candidates"][0]["content"]
        self.history.append(content)
        return [p["functionCall"]["id"] for p in content["parts"] if "functionCall" in p]

    def result(self, call_id, text):
        name = next(p["functionCall"]["name"] for c in self.history for p in c["parts"]
                    if p.get("functionCall", {}).get("id") == call_id)
        part = {"functionResponse": {"id": call_id, "name": name, "response": {"output": text}}}
        if self.history[-1]["role"] == "user":
            self.history[-1]["parts"].append(part)
        else:
            self.history.append({"role": "user", "parts": [part]})

    def body(self, rng):
        contents = copy.deepcopy(self.history)
        if rng is not None:
            without_ids = self.in_order and rng.random() < 0.3
            for c in contents:
                kept = [p for p in c["parts"] if not p.get("thought") or rng.random() < 0.6]
                c["parts"] = kept or [{"text": ""}]
                for p in c["parts"]:
                    for kind in ("functionCall", "functionResponse"):
                        if kind in p and without_ids:
                            p[kind].pop("id")
                    if "functionCall" in p:
                        args = json.dumps(p["functionCall"]["args"])
                        p["functionCall"]["args"] = json.loads(_rewritten(args, rng))
                    elif "thoughtSignature" in p and rng.random() < 0.5:
                        p["thought_signature"] = p.pop("thoughtSignature")
        return {"contents": contents, "systemInstruction": {"parts": [{"text": self.system}]}, "tools": [
            {"functionDeclarations": [{"name": n, "parameters": {"type": "OBJECT"}} for n in TOOL_NAMES]}]}


CLIENTS = (ChatClient, ResponsesClient, MessagesClient, GoogleClient)
