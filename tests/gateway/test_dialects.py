"""Each dialect over the wire: what an answer has to contain, streamed and not."""

import asyncio
import json

import pytest

from gyre.base.enums import FinishReason
from gyre.base.errors import EngineError
from gyre.base.protocols import TokenChunk
from gyre.gateway.dialects import DIALECTS
from gyre.gateway.limits import GatewayLimits
from gyre.gateway.scripted import ScriptedEndpoint
from tests.gateway.support import ids, run, serve, tool_call

BY_NAME = {d.name: d for d in DIALECTS}
SYSTEM, PROMPT = "Be good.", "hi"
_SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
REQUESTS = {
    "openai_chat": {"model": "gyre", "messages": [{"role": "system", "content": SYSTEM},
                                                  {"role": "user", "content": PROMPT}],
                    "tools": [{"type": "function", "function": {"name": "bash", "parameters": _SCHEMA}}]},
    "openai_responses": {"model": "gyre", "instructions": SYSTEM, "input": PROMPT,
                         "tools": [{"type": "function", "name": "bash", "parameters": _SCHEMA}]},
    "anthropic": {"model": "gyre", "system": SYSTEM, "messages": [{"role": "user", "content": PROMPT}],
                  "tools": [{"name": "bash", "input_schema": _SCHEMA}]},
    "google": {"systemInstruction": {"parts": [{"text": SYSTEM}]},
               "contents": [{"role": "user", "parts": [{"text": PROMPT}]}],
               "tools": [{"functionDeclarations": [{"name": "bash", "parameters": {
                   "type": "OBJECT", "properties": {"command": {"type": "STRING"}}}}]}]}}
PATHS = {"openai_chat": "/v1/chat/completions", "openai_responses": "/v1/responses",
         "anthropic": "/v1/messages", "google": "/v1beta/models/gyre:generateContent"}
COUNTS = {"openai_responses": ("/v1/responses/input_tokens", "input_tokens"),
          "anthropic": ("/v1/messages/count_tokens", "input_tokens"),
          "google": ("/v1beta/models/gyre:countTokens", "totalTokens")}
every = pytest.mark.parametrize("name", sorted(BY_NAME))
ANSWERS = [
    "plain é ✓ text  ", "<think>\nI should\nlook\n</think>\n\nLooking.\n" + tool_call('{"command": "ls"}'),
    tool_call('{"b": 60000,  "a": 1.50}') + "\n" + tool_call('{"command": "x"}'),
    "<think>\nonly\n</think>\n\n", "",
    "cut " + '<tool_call>\n{"name": "bash", "arguments": {"command": "l']


async def post(w, client, name, body, path=None, stream=False):
    """(status, content type, body bytes) of a request in a dialect, key in the path."""
    path = path or PATHS[name]
    if stream and name == "google":
        path = path.replace("generateContent", "streamGenerateContent") + "?alt=sse"
    elif stream:
        body = {**body, "stream": True}
    root = w.base_url.removesuffix("/v1")
    async with w.http.post(f"{root}/s/{client.key}{path}", json=body) as r:
        return r.status, r.content_type, await r.read()


def _events(raw):
    """(event name or "", data) of a stream; comments are left out."""
    out = []
    for block in raw.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            event = next((line[7:] for line in lines if line.startswith("event: ")), "")
            data = next(line[6:] for line in lines if line.startswith("data: "))
            out.append((event, data if data == "[DONE]" else json.loads(data)))
    return out


def _plain_message(name, body):
    """(reasoning, text, [(id, name, arguments)], how it ended, (prompt, completion tokens)) of an answer."""
    if name == "openai_chat":
        m, usage = body["choices"][0]["message"], body["usage"]
        calls = [(c["id"], c["function"]["name"], c["function"]["arguments"])
                 for c in m.get("tool_calls", ())]
        return (m.get("reasoning_content", ""), m["content"] or "", calls,
                body["choices"][0]["finish_reason"], (usage["prompt_tokens"], usage["completion_tokens"]))
    if name == "openai_responses":
        out, usage = body["output"], body["usage"]
        return ("".join(i["summary"][0]["text"] for i in out if i["type"] == "reasoning"),
                "".join(i["content"][0]["text"] for i in out if i["type"] == "message"),
                [(i["call_id"], i["name"], i["arguments"]) for i in out if i["type"] == "function_call"],
                body["status"], (usage["input_tokens"], usage["output_tokens"]))
    if name == "anthropic":
        out, usage = body["content"], body["usage"]
        assert all(b["signature"] for b in out if b["type"] == "thinking")
        return ("".join(b["thinking"] for b in out if b["type"] == "thinking"),
                "".join(b["text"] for b in out if b["type"] == "text"),
                [(b["id"], b["name"], json.dumps(b["input"])) for b in out if b["type"] == "tool_use"],
                body["stop_reason"], (usage["input_tokens"], usage["output_tokens"]))
    candidate, usage = body["candidates"][0], body["usageMetadata"]
    parts = candidate["content"]["parts"]
    return ("".join(p["text"] for p in parts if p.get("thought")),
            "".join(p["text"] for p in parts if "text" in p and not p.get("thought")),
            [(p["functionCall"]["id"], p["functionCall"]["name"], json.dumps(p["functionCall"]["args"]))
             for p in parts if "functionCall" in p],
            candidate["finishReason"], (usage["promptTokenCount"], usage["candidatesTokenCount"]))


def _assembled(name, events):
    """The answer that a client puts together from a stream, in the form of one that is not streamed."""
    if name == "openai_chat":
        *chunks, usage, done = [d for _, d in events]
        assert done == "[DONE]" and chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        deltas = [c["choices"][0]["delta"] for c in chunks]
        reasons = [c["choices"][0]["finish_reason"] for c in chunks]
        assert reasons[:-1] == [None] * (len(chunks) - 1)
        message = {"content": "".join(d.get("content", "") for d in deltas),
                   "reasoning_content": "".join(d.get("reasoning_content", "") for d in deltas),
                   "tool_calls": [c for d in deltas for c in d.get("tool_calls", ())]}
        return {"choices": [{"message": message, "finish_reason": reasons[-1]}], "usage": usage["usage"]}
    if name == "openai_responses":
        assert all(event == data["type"] for event, data in events)
        assert [d["sequence_number"] for _, d in events] == list(range(len(events)))
        kinds = [e for e, _ in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        done = [d["item"] for e, d in events if e == "response.output_item.done"]
        last = events[-1][1]["response"]
        assert last["output"] == done and kinds.count("response.output_item.added") == len(done)
        assert [d["output_index"] for e, d in events if e == "response.output_item.done"] == list(
            range(len(done)))
        said = "".join(d["delta"] for e, d in events if e == "response.output_text.delta")
        assert said == "".join(i["content"][0]["text"] for i in done if i["type"] == "message")
        return last
    if name == "anthropic":
        return _assembled_message(events)
    parts = [p for _, d in events for p in d["candidates"][0]["content"]["parts"]]
    last = events[-1][1]
    last["candidates"][0]["content"]["parts"] = parts
    return last


def _assembled_message(events):
    assert all(event == data["type"] for event, data in events)
    kinds = [e for e, _ in events]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    blocks = []
    for _, data in events:
        if data["type"] == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append({**data["content_block"], "partial": ""})
        elif data["type"] == "content_block_delta":
            delta, block = data["delta"], blocks[data["index"]]
            for field, into in (("thinking", "thinking"), ("text", "text"), ("signature", "signature"),
                                ("partial_json", "partial")):
                if field in delta:
                    block[into] += delta[field]
    for block in blocks:
        raw = block.pop("partial")
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(raw or "{}")
            except ValueError:
                block["input"] = {"_raw": raw}
    end = events[-2][1]
    return {"content": blocks, "stop_reason": end["delta"]["stop_reason"], "usage": end["usage"]}


@every
@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("cut", [False, True])
def test_a_stream_says_what_the_plain_answer_says(name, text, cut):
    async def main():
        completion = ids(text)[:-1] if cut else ids(text)
        endpoint = ScriptedEndpoint(lambda r: completion or [256], chunk_tokens=3)
        limit = {"openai_chat": {"max_tokens": len(completion)}, "anthropic": {"max_tokens": len(completion)},
                 "openai_responses": {"max_output_tokens": len(completion)},
                 "google": {"generationConfig": {"maxOutputTokens": len(completion)}}}[name]
        if cut:  # one token more than may be
            completion += [97]
        body = {**REQUESTS[name], **(limit if cut and len(completion) > 1 else {})}
        if name == "openai_chat":
            body["stream_options"] = {"include_usage": True}
        async with serve(endpoint) as w:
            client = w.open()
            status, kind, raw = await post(w, client, name, body)
            assert (status, kind) == (200, "application/json")
            plain = _plain_message(name, json.loads(raw))
            status, kind, raw = await post(w, client, name, body, stream=True)
            assert (status, kind) == (200, "text/event-stream")
            streamed = _plain_message(name, _assembled(name, _events(raw)))
            records = w.gateway.close_execution("g000000-0")
        strip = [(c[1:]) for c in plain[2]], [(c[1:]) for c in streamed[2]]
        assert strip[0] == strip[1]
        assert plain[:2] == streamed[:2] and plain[3:] == streamed[3:]
        assert len({c[0] for c in (*plain[2], *streamed[2])}) == len(plain[2]) + len(streamed[2])
        parsed = w.gateway._codec.parse(w.gateway._codec.decode(records[0].completion_ids))
        assert plain[:2] == (parsed.reasoning, parsed.content)
        assert [c[1] for c in plain[2]] == [c.name for c in parsed.tool_calls]
        assert plain[4] == (records[0].suffix_ids.size, records[0].completion_ids.size)
        was_cut = records[0].finish is FinishReason.LENGTH
        ends = {"openai_chat": ("length", "tool_calls" if parsed.tool_calls else "stop"),
                "openai_responses": ("incomplete", "completed"),
                "anthropic": ("max_tokens", "tool_use" if parsed.tool_calls else "end_turn"),
                "google": ("MAX_TOKENS", "STOP")}[name]
        assert plain[3] == ends[0 if was_cut else 1]

    run(main)


@every
def test_all_dialects_ask_the_engine_the_same(name):
    async def main():
        prompts = []
        async with serve(ScriptedEndpoint(lambda r: ids("ok"))) as w:
            for other in (name, "openai_chat"):
                client = w.open(other + "-x" if other in prompts else f"{other}{len(prompts)}")
                await post(w, client, other, REQUESTS[other])
                prompts.append(w.gateway.close_execution(f"{other}{len(prompts)}")[0].suffix_ids.tolist())
        assert prompts[0] == prompts[1]

    run(main)


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_tokens_are_counted_without_a_call(name):
    async def main():
        async with serve(ScriptedEndpoint(lambda r: ids("ok"))) as w:
            client = w.open()
            path, field = COUNTS[name]
            status, _, raw = await post(w, client, name, REQUESTS[name], path=path)
            assert status == 200
            counted = json.loads(raw)[field]
            await post(w, client, name, REQUESTS[name])
            record, = w.gateway.close_execution("g000000-0")
            assert counted == record.suffix_ids.size

    run(main)


OVERFLOW = {
    "openai_chat": ("error.code", "context_length_exceeded", "maximum context length is 300 tokens"),
    "openai_responses": ("error.code", "context_length_exceeded", "maximum context length is 300 tokens"),
    "anthropic": ("error.type", "invalid_request_error", "prompt is too long: "),
    "google": ("error.status", "INVALID_ARGUMENT", "exceeds the maximum number of tokens allowed (300)")}


@every
def test_a_prompt_that_is_too_long_is_answered_in_the_words_that_clients_compact_on(name):
    async def main():
        async with serve(ScriptedEndpoint([]), max_context_tokens=300) as w:
            client = w.open()
            for stream in (False, True):
                status, _, raw = await post(w, client, name, REQUESTS[name], stream=stream)
                field, value, words = OVERFLOW[name]
                error = json.loads(raw)["error"]
                assert (status, error[field.split(".")[1]]) == (400, value)
                assert words in error["message"]
            assert w.gateway.close_execution("g000000-0") == []

    run(main)


@every
def test_an_engine_that_fails_for_good_after_the_first_text_ends_the_stream_with_an_error(name):
    class Failing(ScriptedEndpoint):
        def submit(self, call):
            call.emit(TokenChunk(tuple(b"some text "), (-0.5,) * 10, (0,) * 10))
            asyncio.get_running_loop().call_later(
                0.05, call.emit, TokenChunk((), (), (), error=EngineError("cell lost")))

    async def main():
        async with serve(Failing([]), limits=GatewayLimits(engine_retries=0)) as w:
            client = w.open()
            status, _, raw = await post(w, client, name, REQUESTS[name], stream=True)
            assert status == 200 and b"some text" in raw and b"cell lost" in raw
            kinds = [e for e, _ in _events(raw)]
            assert not {"response.completed", "message_stop"} & set(kinds) and b"[DONE]" not in raw
            if name == "openai_responses":
                assert kinds[-1] == "response.failed"
            record, = w.gateway.close_execution("g000000-0")
            assert not record.trainable and len(record.completion_ids) == 10

    run(main)


@every
@pytest.mark.parametrize("live", [False, True])
def test_long_waits_are_broken_by_events_that_say_nothing(name, live):
    async def main():
        endpoint = ScriptedEndpoint(lambda r: ids("late"), delay_s=0.1, chunk_tokens=2)
        async with serve(endpoint, limits=GatewayLimits(keep_alive_s=0.03), live_streaming=live) as w:
            client = w.open()
            body = REQUESTS[name]
            if name == "openai_chat":
                body = {**body, "stream_options": {"include_usage": True}}
            _, _, raw = await post(w, client, name, body, stream=True)
            assert raw.count(b"event: ping" if name == "anthropic" else b": keep-alive") >= 3
            events = [e for e in _events(raw) if e[0] != "ping"]
            if name == "anthropic":
                events.insert(1, ("ping", {"type": "ping"}))
            assert _plain_message(name, _assembled(name, events))[1] == "late"
            assert w.gateway.close_execution("g000000-0")[0].trainable

    run(main)


def test_models_are_listed_in_each_vendor_s_form():
    async def main():
        async with serve(model_aliases=("alias",)) as w:
            root = f"{w.base_url.removesuffix('/v1')}/s/{w.open().key}"

            async def get(path, **headers):
                async with w.http.get(root + path, headers=headers) as r:
                    assert r.status == 200
                    return await r.json()

            listed = await get("/v1/models")
            assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == ["gyre", "alias"]
            listed = await get("/v1/models", **{"anthropic-version": "2023-06-01"})
            assert listed["first_id"] == "gyre" and listed["data"][1]["type"] == "model"
            listed = await get("/v1beta/models")
            assert [m["name"] for m in listed["models"]] == ["models/gyre", "models/alias"]

    run(main)


def test_health_and_metrics_need_no_key():
    async def main():
        async with serve(ScriptedEndpoint(lambda r: ids("ok"))) as w:
            client, root = w.open(), w.base_url.removesuffix("/v1")
            await client.chat([{"role": "user", "content": "hi"}])
            async with w.http.get(root + "/healthz") as r:
                assert (await r.json()) == {"status": "ok", "engines": 1, "executions": 1}
            async with w.http.get(root + "/metrics") as r:
                text = await r.text()
            assert 'gyre_gateway_requests_total{dialect="openai_chat",status="200"} 1.0' in text
            assert 'gyre_gateway_calls_total{delivered="true",finish="stop",role="main"} 1.0' in text
            assert "gyre_gateway_calls_running 0.0" in text
            assert client.key not in text

    run(main)


def test_the_gateway_listens_elsewhere_only_when_told_to(caplog):
    async def main():
        async with serve() as w:
            gateway = w.gateway
            with pytest.raises(ValueError, match="other machines"):
                await gateway._http.start("0.0.0.0", 0, None, False)

    run(main)
    from gyre.gateway.http_server import is_loopback
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org")
