"""Replays recorded traffic of real harnesses against the gateway.

The recorded server's answers become what the engine samples. In later requests the gateway's ids take the
place of those that the recorded server gave, as text, so that all else stays as the client wrote it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import pathlib
import re
from typing import Any

from gyre.base.enums import FinishReason
from gyre.base.errors import ContextOverflowError, EngineError
from gyre.base.protocols import EngineCall, TokenChunk
from gyre.gateway.limits import GatewayLimits
from gyre.gateway.scripted import scripted_logprob
from gyre.trajectory.agent_roles import all_harness_rules
from gyre.trajectory.record import CallRecord
from tests.gateway.support import IM_END, serve, until

FOLDER = pathlib.Path(__file__).parent / "harness_traces"
NAMES = sorted(p.relative_to(FOLDER).as_posix().removesuffix(".jsonl.gz") for p in FOLDER.rglob("*.jsonl.gz"))
_OUR_CALL = re.compile(rb"call_[0-9a-f]{24}")
_OUR_TURN = re.compile(rb"(?:chatcmpl-|msg_|resp_)([0-9a-f]{24})")


def load(name: str) -> list[dict[str, Any]]:
    """The requests of a trace that ask the model something, in order."""
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt", encoding="utf-8") as f:
        return [r for r in map(json.loads, f) if r["method"] == "POST" and r.get("plan")]


def sampled_ids(plan: dict[str, Any]) -> list[int]:
    """What an engine would have to sample for the recorded answer."""
    text = f"<think>\n{plan['reasoning']}\n</think>\n\n" if plan.get("reasoning") else ""
    text += plan.get("text") or ""
    for call in plan.get("calls") or []:
        text += (f'\n<tool_call>\n{{"name": {json.dumps(call["name"])}, "arguments": {call["raw"]}}}'
                 "\n</tool_call>")
    ids = list(text.encode())
    return ids if plan.get("finish") == "length" else [*ids, IM_END]


def history(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages or items of a request, as the client wrote them."""
    body = json.loads(request["body_raw"])
    return body.get("messages") or body.get("input")


def is_held(request: dict[str, Any]) -> bool:
    """Whether the client was left, or left, without the whole answer."""
    streamed = json.loads(request["body_raw"]).get("stream")
    plan = request["plan"]
    return request.get("status") is None or bool(streamed and ("cut" in plan or "stall" in plan))


class TraceEngine:
    """Answers calls as the trace's server did: whole, cut, refused, or never."""

    name, capacity, in_flight = "trace", 64, 0

    def __init__(self):
        self.next: dict[str, Any] = {}
        self.held: dict[str, EngineCall] = {}
        self.prompts: dict[str, list[int]] = {}

    def submit(self, call: EngineCall) -> None:
        plan = self.next["plan"]
        self.prompts[call.request.call_id] = call.request.prompt_ids.tolist()
        if self.next.get("status") not in (200, None):
            error = (ContextOverflowError(40000, 32768) if plan.get("code") == "context_length_exceeded"
                     else EngineError("refused"))
            call.emit(TokenChunk((), (), (), error=error))
            return
        ids = sampled_ids(plan)
        held = is_held(self.next)
        ids = ids[:len(ids) // 2] if held else ids
        finish = FinishReason.LENGTH if plan.get("finish") == "length" else FinishReason.STOP
        if held:
            self.held[call.request.call_id] = call
        call.ids.extend(ids)
        call.emit(TokenChunk(tuple(ids), tuple(scripted_logprob(t, i) for i, t in enumerate(ids)),
                             (0,) * len(ids), None if held else finish))

    def cancel(self, call_id: str) -> None:
        call = self.held.pop(call_id, None)
        if call is not None:
            call.emit(TokenChunk((), (), (), finish=FinishReason.CANCELLED))


@dataclasses.dataclass
class Replay:
    """What came of a trace: its requests, the records in the same order, and the prompts of the calls."""

    requests: list[dict[str, Any]]
    records: list[CallRecord]
    prompts: dict[str, list[int]]


def replay(name: str) -> Replay:
    """Sends a trace's requests in order."""
    requests = load(name)

    async def main() -> Replay:
        engine = TraceEngine()
        async with serve(engine, role_rules=all_harness_rules(), max_context_tokens=1 << 20,
                         accept_any_model=True, limits=GatewayLimits(engine_retries=0)) as w:
            client = w.open(max_completion_tokens=1 << 16)
            root = w.base_url.removesuffix("/v1")
            ours: list[tuple[str, str]] = []
            for request in requests:
                engine.next = request
                body = request["body_raw"]
                for old, new in ours:
                    body = body.replace(old, new)
                headers = {k: v for k, v in request["headers"]
                           if k.lower().startswith(("x-", "anthropic-")) and k.lower() != "x-api-key"}
                post = w.http.post(f"{root}/s/{client.key}{request['path']}", data=body.encode(),
                                   headers=headers)
                if is_held(request):
                    await _leave(post, engine)
                    continue
                async with post as response:
                    answer = await response.read()
                    assert (response.status == 200) == (request.get("status") == 200), answer
                if response.status == 200:
                    ours += _new_ids(request["plan"], answer)
            records = w.gateway.close_execution("g000000-0")
        return Replay(requests, records, engine.prompts)

    return asyncio.run(asyncio.wait_for(main(), 60))


async def _leave(post: Any, engine: TraceEngine) -> None:
    """Closes the connection when the engine has begun to answer."""
    async def read() -> None:
        async with post as response:
            await response.read()

    reading = asyncio.ensure_future(read())
    await until(lambda: engine.held)
    await asyncio.sleep(0.02)
    reading.cancel()
    await asyncio.wait([reading])
    await until(lambda: not engine.held)  # the engine was told


def _new_ids(plan: dict[str, Any], answer: bytes) -> list[tuple[str, str]]:
    """(id in the trace, id that the gateway gave), as they stand in JSON text."""
    calls = list(dict.fromkeys(m.decode() for m in _OUR_CALL.findall(answer)))
    pairs = list(zip([c["id"] for c in plan.get("calls") or []], calls, strict=True))
    turn = _OUR_TURN.search(answer)[1].decode()
    for item in plan.get("items") or []:
        if item["type"] == "reasoning":
            pairs += [(item["id"], f"rs_{turn}"), (item["encrypted_content"], f"enc_{turn}")]
        elif item["type"] == "message":
            pairs.append((item["id"], f"msg_{turn}"))
    return [(json.dumps(old, ensure_ascii=ascii)[1:-1], new) for old, new in pairs for ascii in (True, False)]


# ------------------------------------------------------------------- a slow, obvious matcher


def atoms(request: dict[str, Any]) -> list[Any]:
    """A request's history as a list of comparable things, read off the wire without any of gyre's code.

    Dropped: ids of items, cache marks, reasoning, empty texts. A tool call is its id, nothing else.
    """
    body = json.loads(request["body_raw"])
    out: list[Any] = [("tools", json.dumps(_unmarked(body.get("tools") or []), sort_keys=True))]
    for key in ("instructions", "system"):
        out += [("system", t) for t in _texts(body.get(key))]
    for m in history(request):
        kind = m.get("type", "message")
        if kind in ("function_call", "custom_tool_call"):
            out.append(("call", m["call_id"]))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            out.append(("result", m["call_id"], "".join(_texts(m["output"]))))
        elif kind == "message" and m["role"] == "tool":
            out.append(("result", m["tool_call_id"], "".join(_texts(m["content"]))))
        elif kind == "message":
            blocks = m.get("content") if isinstance(m.get("content"), list) else []
            out += [("result", b["tool_use_id"], "".join(_texts(b.get("content")))) for b in blocks
                    if b.get("type") == "tool_result"]
            role = {"developer": "system"}.get(m["role"], m["role"])
            out += [(role, t) for t in _texts(m.get("content"))]
            out += [("call", b["id"]) for b in blocks if b.get("type") == "tool_use"]
            out += [("call", c["id"]) for c in m.get("tool_calls") or []]
    return out


def answer_atoms(plan: dict[str, Any]) -> list[Any]:
    """A recorded answer in the same terms."""
    text = (plan.get("text") or "").strip()
    return [*([("assistant", text)] if text else []), *(("call", c["id"]) for c in plan.get("calls") or [])]


def parents(requests: list[dict[str, Any]]) -> list[int | None]:
    """For each request, the index of the answered one whose history and answer are its longest beginning."""
    histories = [atoms(r) for r in requests]
    whole = [h + answer_atoms(r["plan"]) for h, r in zip(histories, requests, strict=True)]
    found: list[int | None] = []
    for i, history in enumerate(histories):
        fitting = [j for j in range(i) if requests[j].get("status") == 200
                   and answer_atoms(requests[j]["plan"]) and history[:len(whole[j])] == whole[j]]
        found.append(max(fitting, key=lambda j: (len(whole[j]), j), default=None))
    return found


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    return [t for part in content or [] if part.get("type") in ("text", "input_text", "output_text")
            and (t := part["text"].strip())]


def _unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _unmarked(v) for k, v in value.items() if k != "cache_control"}
    return [_unmarked(v) for v in value] if isinstance(value, list) else value
