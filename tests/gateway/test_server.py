"""The gateway over real sockets: what goes over the wire and what is recorded."""

import asyncio
import json
import time

import aiohttp
import numpy as np
import pytest

from gyre.base.enums import AgentRole, FinishReason
from gyre.base.errors import EngineError
from gyre.base.protocols import TokenChunk
from gyre.gateway.limits import GatewayLimits
from gyre.gateway.scripted import ScriptedEndpoint, scripted_logprob
from gyre.trajectory.record import all_ids, prompt_ids
from tests.gateway.support import CODEC, IM_END, TOOLS, ids, run, serve, tool_call, until

HI = [{"role": "user", "content": "hi"}]


def _user(text):
    return {"role": "user", "content": text}


def _tool(message, text):
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


def _check_records(records, endpoint, answers):
    """Recorded ids are exactly what the engine got and gave."""
    by_id = {r.call_id: r for r in records}
    requests = {r.call_id: r for r in endpoint.requests}
    assert set(requests) == set(by_id)
    for record, answer in zip(records, answers, strict=True):
        np.testing.assert_array_equal(prompt_ids(record, by_id),
                                      requests[record.call_id].prompt_ids)
        assert record.completion_ids.tolist() == answer
        np.testing.assert_array_equal(record.logprobs, np.asarray(
            [scripted_logprob(t, i) for i, t in enumerate(answer)], np.float32))
        assert record.trainable


def test_a_tool_conversation_is_recorded_as_it_was_sampled():
    answers = [ids("Look.\n" + tool_call('{"b": 1.50,  "a": "é"}')),
               ids("<think>why</think>" + tool_call("{}") + tool_call('{"x":2}')), ids("Done.")]

    async def main():
        endpoint = ScriptedEndpoint(answers)
        async with serve(endpoint) as w:
            client = w.open()
            history = [{"role": "developer", "content": "Be good."},
                       {"role": "user", "content": [{"type": "text", "text": "go"}]}]
            status, body = await client.post({"messages": history, "tools": TOOLS})
            first = body["choices"][0]["message"]
            assert (status, body["object"]) == (200, "chat.completion")
            assert body["choices"][0]["finish_reason"] == "tool_calls"
            assert first["content"] == "Look."
            assert first["tool_calls"][0]["function"] == {
                "name": "bash", "arguments": '{"b": 1.50,  "a": "é"}'}
            n = endpoint.requests[0].prompt_ids.size
            assert body["usage"] == {"prompt_tokens": n, "completion_tokens": len(answers[0]),
                                     "total_tokens": n + len(answers[0])}
            first["tool_calls"][0]["function"]["arguments"] = '{"a":"\\u00e9","b":1.5}'
            history += [first, _tool(first, "out<|im_end|>")]
            second = await client.chat(history, tools=TOOLS)
            assert (second["content"], second["reasoning_content"]) == (None, "why")
            call_ids = [c["id"] for c in first["tool_calls"] + second["tool_calls"]]
            assert len(set(call_ids)) == 3 and all(len(i) <= 40 for i in call_ids)
            history += [{**second, "reasoning_content": None, "content": ""}, _tool(second, "1")]
            third = await client.chat(history, tools=TOOLS)
            assert third == {"role": "assistant", "content": "Done."}
            records = w.gateway.close_execution("g000000-0")
        _check_records(records, endpoint, answers)
        assert [r.prefix_call for r in records] == [None, records[0].call_id, records[1].call_id]
        assert IM_END not in records[1].suffix_ids[:records[1].suffix_ids.tolist().index(ord("o"))]
        assert records[1].suffix_ids.tolist().count(IM_END) == 1  # the tool's text forged none
        calls = [f for kind, f in w.events if kind == "call"]
        assert [c["finish"] for c in calls] == ["stop"] * 3 and all(c["delivered"] for c in calls)

    run(main)


def test_compaction_and_an_interleaved_sub_agent():
    def script(request):
        return ids(f"answer {request.prompt_ids.size}")

    async def main():
        endpoint = ScriptedEndpoint(script)
        async with serve(endpoint) as w:
            client = w.open()
            sub = [{"role": "system", "content": "You are a sub-agent."}, _user("part")]
            conversation = [{"role": "system", "content": "Work."}, _user("all")]
            answers = []

            async def turn(history, text, stream=False):
                if stream:
                    chunks = await client.stream(history)
                    reply = {"role": "assistant", "content": "".join(
                        c["choices"][0]["delta"].get("content", "") for c in chunks)}
                else:
                    reply = await client.chat(history)
                answers.append(ids(reply["content"]))
                history += [reply, _user(text)]
                return reply

            await turn(conversation, "go on")
            await turn(sub, "deeper")
            await turn(conversation, "Summarize the conversation so far", stream=True)
            await turn(sub, "deeper", stream=True)
            summary = await turn(conversation, "unused")
            fresh = [{"role": "system", "content": "Work."},
                     _user("Summary: " + summary["content"])]
            await turn(fresh, "go on")
            await turn(sub, "end")
            await turn(fresh, "end")
            records = w.gateway.close_execution("g000000-0")
        _check_records(records, endpoint, answers)
        order = {r.call_id: i for i, r in enumerate(records)}
        assert [order.get(r.prefix_call) for r in records] == [None, None, 0, 1, 2, None, 3, 5]
        main_, sub_ = AgentRole.MAIN, AgentRole.SUB_AGENT
        assert [r.agent_role for r in records] == [
            main_, sub_, main_, sub_, AgentRole.MAIN_SUMMARY, main_, sub_, main_]

    run(main)


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("text, fields", [
    ("héllo ✓ 𝄞  ", {}), ("before\n" + tool_call('{"a": "✓"}') + tool_call("{}"), {}),
    ("<think>\nlet me\n</think>\n\nyes <tool_call>no", {}), ("", {}), (tool_call("{}"), {}),
    ("cut é here", {"max_tokens": 6})])
def test_a_stream_says_what_the_plain_answer_says(live, text, fields):
    async def main():
        endpoint = ScriptedEndpoint(lambda request: ids(text))
        async with serve(endpoint, live_streaming=live) as w:
            status, plain = await w.open("a").post({"messages": HI, **fields})
            chunks = await w.open("b").stream(HI, stream_options={"include_usage": True}, **fields)
            records = [w.gateway.close_execution(e)[0] for e in "ab"]
        assert records[0].completion_ids.tolist() == records[1].completion_ids.tolist()
        assert all(r.delivered for r in records)
        want = plain["choices"][0]
        *chunks, usage = chunks
        assert (usage["choices"], usage["usage"]) == ([], plain["usage"])
        deltas = [c["choices"][0]["delta"] for c in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(d.get("content", "") for d in deltas) == (want["message"]["content"] or "")
        assert "".join(d.get("reasoning_content", "") for d in deltas) == want["message"].get(
            "reasoning_content", "")
        calls = [c for d in deltas for c in d.get("tool_calls", ())]
        assert [c["index"] for c in calls] == list(range(len(calls)))
        assert [c["function"] for c in calls] == [
            c["function"] for c in want["message"].get("tool_calls", ())]
        reasons = [c["choices"][0]["finish_reason"] for c in chunks]
        assert reasons == [None] * (len(chunks) - 1) + [want["finish_reason"]]
        assert len({c["id"] for c in chunks}) == 1
        if "max_tokens" not in fields:
            assert not any("\ufffd" in json.dumps(d, ensure_ascii=False) for d in deltas)

    run(main)


def test_live_text_arrives_before_the_call_ends_and_never_splits_characters():
    async def main():
        endpoint = ScriptedEndpoint([ids("ab✓✓cd" * 3)], delay_s=0.005)
        async with serve(endpoint, live_streaming=True) as w:
            chunks = await w.open().stream(HI)
        parts = [c["choices"][0]["delta"].get("content", "") for c in chunks]
        assert "".join(parts) == "ab✓✓cd" * 3
        assert len([p for p in parts if p]) > 5

    run(main)


def test_a_sampled_special_token_does_not_leak():
    async def main():
        sampled = [*b"a", 256, *b"b", IM_END, *b"never"]
        async with serve(ScriptedEndpoint([sampled])) as w:
            client = w.open()
            assert (await client.chat(HI))["content"] == "ab"
            assert w.gateway.close_execution("g000000-0")[0].completion_ids.tolist() == sampled[:4]

    run(main)


def test_length_and_temperature():
    async def main():
        endpoint = ScriptedEndpoint(lambda r: ids("x" * 500))
        async with serve(endpoint) as w:
            client = w.open(temperature=0.25, max_completion_tokens=9)
            status, body = await client.post({"messages": HI, "temperature": 2, "seed": 1, "n": 1})
            assert body["choices"][0]["finish_reason"] == "length"
            assert body["usage"]["completion_tokens"] == 9
            record = w.gateway.close_execution("g000000-0")[0]
        assert record.finish is FinishReason.LENGTH
        assert record.sampling.temperature == 0.25
        assert record.metadata["ignored_fields"] == ["seed", "temperature"]

    run(main)


@pytest.mark.parametrize("body, status, code, param", [
    (b"{", 400, None, None), (b"\xff\xfe", 400, None, None), (b"[" * 100_000, 400, None, None),
    (b"[]", 400, None, None), ({"messages": []}, 400, None, "messages"),
    ({"messages": "hi"}, 400, None, "messages"), ({"messages": [3]}, 400, None, "messages[0]"),
    ({"messages": [{"role": "root", "content": "x"}]}, 400, None, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, 400, None, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, None, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None,
     "messages[0].content[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, None, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, 400, None,
     "messages[0].tool_calls[0]"),
    ({"messages": HI, "tools": [{"type": "web"}]}, 400, None, "tools[0]"),
    ({"messages": HI, "max_tokens": 0}, 400, None, "max_tokens"),
    ({"messages": HI, "max_completion_tokens": True}, 400, None, "max_completion_tokens"),
    ({"messages": HI, "stream": "yes"}, 400, None, "stream"),
    ({"messages": HI, "n": 2}, 400, None, "n"),
    ({"messages": HI, "stop": ["x"]}, 400, "unsupported_parameter", "stop"),
    ({"messages": HI, "model": ""}, 400, None, "model"),
    ({"messages": HI, "model": "other"}, 404, "model_not_found", "model"),
    ({"messages": [_user("x" * 5000)]}, 400, "context_length_exceeded", "messages"),
    ({"messages": [_user("x" * 200_000)]}, 413, "request_too_large", None),
])
def test_bad_requests_get_openai_errors_and_leave_no_record(body, status, code, param):
    async def main():
        async with serve(ScriptedEndpoint([]), limits=GatewayLimits(body_bytes=150_000)) as w:
            client = w.open()
            got, answer = await client.post(body)
            assert got == status, answer
            assert set(answer) == {"error"}
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            assert (answer["error"]["code"], answer["error"]["param"]) == (code, param)
            assert w.gateway.close_execution("g000000-0") == []
            assert ("request_error", status) in [(k, f["status"]) for k, f in w.events]

    run(main)


def test_lone_surrogates_are_text_that_can_be_encoded():
    async def main():
        async with serve(ScriptedEndpoint([ids("ok")])) as w:
            body = (b'{"model": "gyre", "messages": '
                    b'[{"role": "user", "content": "a\\uD800b \\ud83d\\ude00"}]}')
            status, answer = await w.open().post(body)
            assert status == 200, answer
            prompt = w.gateway.close_execution("g000000-0")[0].suffix_ids
            assert "a\ufffdb 😀" in CODEC.decode(prompt)

    run(main)


def test_keys_paths_and_models():
    async def main():
        async with serve(ScriptedEndpoint(lambda r: ids("ok")), model_aliases=("alias",)) as w:
            client = w.open()
            root = w.base_url.removesuffix("/v1")

            async def get(method, url, **headers):
                async with w.http.request(method, url, headers=headers) as r:
                    return r.status, await r.json() if method != "HEAD" else None

            for headers in ({}, {"Authorization": "Bearer nope"}):
                status, body = await get("GET", w.base_url + "/models", **headers)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            status, body = await get("GET", w.base_url + "/models", **{"x-api-key": "nope"})
            assert (status, body["error"]["type"]) == (401, "authentication_error")
            assert (await get("GET", root + "/s/nope/v1/models"))[0] == 401
            for headers, prefix in (({"Authorization": "bearer " + client.key}, ""),
                                    ({"x-api-key": client.key}, ""), ({}, "/s/" + client.key)):
                status, body = await get("GET", f"{root}{prefix}/v1/models", **headers)
                assert status == 200
                assert [m["id"] for m in body["data"]] == ["gyre", "alias"]
                for path in ("/v1/chat", "/nowhere", "/v1/responses/resp_1/cancel"):
                    status, body = await get("POST", root + prefix + path, **headers)
                    assert (status, "unknown path" in body["error"]["message"]) == (404, True)
                status, body = await get("GET", f"{root}{prefix}/v1/chat/completions", **headers)
                assert status == 405
                assert (await get("HEAD", root + prefix + "/"))[0] == 200
            assert (await client.post({"messages": HI, "model": "alias"}))[0] == 200
            w.gateway.close_execution("g000000-0")
            status, body = await client.post({"messages": HI})
            assert (status, body["error"]["code"]) == (410, "execution_ended")
            with pytest.raises(KeyError, match="not open"):
                w.gateway.close_execution("g000000-0")

    run(main)


def test_executions_are_isolated():
    async def main():
        endpoint = ScriptedEndpoint(lambda r: ids("same"))
        async with serve(endpoint) as w:
            a, b = w.open("a", seed=1), w.open("b", seed=2)
            with pytest.raises(ValueError, match="open"):
                w.open("a")
            reply = await a.chat(HI)
            await b.chat([*HI, reply, _user("more")])  # b's history is not b's own: a branch
            await asyncio.gather(*(c.chat(HI) for c in (a, b) for _ in range(5)))
            records_a, records_b = (w.gateway.close_execution(e) for e in "ab")
        assert [len(records_a), len(records_b)] == [6, 6]
        assert records_b[0].prefix_call is None
        assert {r.execution_id for r in records_a} == {"a"}
        assert len({r.sampling.seed for r in records_a + records_b}) == 12

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_stops_the_engine_and_the_retry_replaces_it(stream):
    async def main():
        slow = ScriptedEndpoint([ids("x" * 200), ids("ok")], delay_s=0.01)
        async with serve(slow, live_streaming=stream) as w:
            client = w.open()
            async with aiohttp.ClientSession() as gone:
                doomed = type(client)(gone, w.base_url, client.key)
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(doomed.stream(HI) if stream else doomed.chat(HI), 0.15)
            began = time.monotonic()
            await until(lambda: slow.cancelled and slow.in_flight == 0)
            assert time.monotonic() - began < 1.0
            assert (await client.chat(HI))["content"] == "ok"
            records = w.gateway.close_execution("g000000-0")
        assert [r.delivered for r in records] == [False, True]
        assert records[0].finish is FinishReason.CANCELLED
        assert 0 < len(records[0].completion_ids) < 100
        assert not records[0].trainable
        assert records[0].metadata["replaced_by"] == records[1].call_id
        assert [k for k, _ in w.events].count("retry") == 1

    run(main)


def test_final_engine_failures_are_retryable_and_untrained():
    async def main():
        endpoint = ScriptedEndpoint([EngineError("cell lost"), RuntimeError("boom"), ids("ok")])
        async with serve(endpoint, limits=GatewayLimits(engine_retries=0)) as w:
            client = w.open()
            for _ in range(2):
                async with w.http.post(
                        w.base_url + "/chat/completions", json={"model": "gyre", "messages": HI},
                        headers={"Authorization": "Bearer " + client.key}) as r:
                    assert (r.status, r.headers["Retry-After"]) == (503, "1")
                    assert (await r.json())["error"]["type"] == "server_error"
            assert (await client.chat(HI))["content"] == "ok"
            records = w.gateway.close_execution("g000000-0")
        assert [r.trainable for r in records] == [False, False, True]
        assert "cell lost" in records[0].metadata["error"]

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_in_mid_call_is_replaced_unseen(stream):
    class Failing(ScriptedEndpoint):
        """Fails the first call after a few tokens; goes on with the rest elsewhere."""
        failed = False

        def submit(self, call):
            if not self.failed:
                self.failed = True
                emit = call.emit

                def fail_late(chunk):
                    if len(call.ids) == 4:
                        call.cancelled = True
                        emit(TokenChunk((), (), (), error=EngineError("cell lost")))
                    elif not call.cancelled:
                        emit(chunk)

                call.emit = fail_late
            super().submit(call)

    async def main():
        answer = ids("first words ✓ and last")
        endpoint = Failing(lambda request: answer, delay_s=0.002)
        async with serve(endpoint) as w:
            client = w.open()
            if stream:
                chunks = await client.stream(HI)
                text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
            else:
                text = (await client.chat(HI))["content"]
            assert text == "first words ✓ and last"
            record, = w.gateway.close_execution("g000000-0")
        assert record.completion_ids.tolist() == answer
        assert record.trainable
        assert [k for k, _ in w.events] == ["engine_retry", "call"]

    run(main)


def test_closing_an_execution_cancels_its_calls_with_410():
    async def main():
        slow = ScriptedEndpoint([ids("x" * 200)], delay_s=0.01)
        async with serve(slow) as w:
            running = asyncio.create_task(w.open().post({"messages": HI}))
            await until(lambda: slow.requests)
            await asyncio.sleep(0.05)
            records = w.gateway.close_execution("g000000-0")
            status, body = await running
            assert (status, body["error"]["code"]) == (410, "execution_ended")
            await until(lambda: slow.in_flight == 0)
        assert [(r.finish, r.delivered) for r in records] == [(FinishReason.CANCELLED, False)]

    run(main)


def test_calls_wait_for_an_engine_and_give_up_in_time():
    async def main():
        async with serve(limits=GatewayLimits(engine_timeout_s=0.1)) as w:
            client = w.open()
            assert (await client.post({"messages": HI}))[0] == 503
        async with serve() as w:
            client = w.open()
            waiting = asyncio.create_task(client.chat(HI))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await asyncio.to_thread(w.router.add, ScriptedEndpoint([ids("late")]))
            assert (await waiting)["content"] == "late"

    run(main)


def test_the_tree_of_a_conversation_holds_each_token_once():
    async def main():
        endpoint = ScriptedEndpoint(lambda r: ids("a"))
        async with serve(endpoint) as w:
            client = w.open()
            history = list(HI)
            for _ in range(4):
                history += [await client.chat(history), _user("next")]
            records = w.gateway.close_execution("g000000-0")
        by_id = {r.call_id: r for r in records}
        stored = sum(len(r.suffix_ids) + len(r.completion_ids) for r in records)
        assert stored == len(all_ids(records[-1], by_id))

    run(main)
