"""Single dialects: items, blocks and parts of a request, tools that come back as they were declared."""

import json

import pytest

from gyre.gateway.dialects import RequestError
from gyre.gateway.scripted import ScriptedEndpoint
from tests.gateway.support import ids, run, serve, tool_call
from tests.gateway.test_dialects import BY_NAME, post


def _read(name, body, **groups):
    return BY_NAME[name].parse_request(json.dumps(body).encode(), **groups)


def test_responses_tools_with_a_namespace_custom_tools_and_hosted_ones():
    tools = [{"type": "function", "name": "run", "parameters": None},
             {"type": "namespace", "name": "agents", "tools": [
                 {"type": "function", "name": "wait"}, {"type": "function", "name": "run"}]},
             {"type": "custom", "name": "patch", "description": "d", "format": {"type": "grammar"}},
             {"type": "web_search", "external_web_access": True}]

    async def main():
        answer = ids(tool_call('{"a": 1}', "wait") + tool_call("{}", "agents__run")
                     + tool_call('{"input": "*** patch é"}', "patch"))
        async with serve(ScriptedEndpoint([answer, ids("done")])) as w:
            client = w.open()
            body = {"model": "gyre", "input": "hi", "tools": tools}
            _, _, raw = await post(w, client, "openai_responses", body)
            output = json.loads(raw)["output"]
            assert [(i["type"], i["name"], i.get("namespace")) for i in output] == [
                ("function_call", "wait", "agents"), ("function_call", "run", "agents"),
                ("custom_tool_call", "patch", None)]
            assert output[2]["input"] == "*** patch é"
            results = [{"type": "function_call_output", "call_id": i["call_id"], "output": "ok"}
                       for i in output[:2]]
            results.append({"type": "custom_tool_call_output", "call_id": output[2]["call_id"],
                            "output": "ok"})
            body["input"] = [{"role": "user", "content": "hi"}, *output, *results]
            _, _, raw = await post(w, client, "openai_responses", body)
            assert json.loads(raw)["output"][0]["content"][0]["text"] == "done"
            first, second = w.gateway.close_execution("g000000-0")
            assert second.prefix_call == first.call_id
            assert first.metadata["ignored_fields"] == ["tools[3] (web_search)"]

    run(main)


def test_responses_follow_an_answer_by_its_id():
    async def main():
        async with serve(ScriptedEndpoint(lambda r: ids("ok"))) as w:
            client = w.open()
            _, _, raw = await post(w, client, "openai_responses", {"model": "gyre", "input": "hi"})
            body = {"model": "gyre", "input": "more", "previous_response_id": json.loads(raw)["id"]}
            assert (await post(w, client, "openai_responses", body))[0] == 200
            body["previous_response_id"] = "resp_nothing"
            status, _, raw = await post(w, client, "openai_responses", body)
            assert (status, json.loads(raw)["error"]["code"]) == (404, "previous_response_not_found")
            first, second = w.gateway.close_execution("g000000-0")
            assert second.prefix_call == first.call_id

    run(main)


def test_responses_items_are_grouped_into_turns():
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}], "content": None}
    asked = _read("openai_responses", {"model": "m", "input": [
        {"role": "developer", "content": "d"}, {"role": "user", "content": "u"}, thought, text, call,
        {**call, "call_id": "c2"}, {"type": "function_call_output", "call_id": "c1", "output": "o"},
        call, text, text, {"type": "web_search_call", "id": "ws"}, thought, call]})
    shape = [(m.role, m.content, m.reasoning, len(m.tool_calls)) for m in asked.messages]
    assert shape == [("system", "d", "", 0), ("user", "u", "", 0), ("assistant", "t", "r", 2),
                     ("tool", "o", "", 0), ("assistant", "", "", 1), ("assistant", "t", "", 0),
                     ("assistant", "t", "", 0), ("assistant", "", "r", 1)]


def test_anthropic_results_stand_before_the_text_and_billing_blocks_are_dropped():
    asked = _read("anthropic", {"model": "m", "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1"}, {"type": "text", "text": "a"},
        {"type": "text", "text": "b"}], "messages": [
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "enc"},
                                              {"type": "tool_use", "id": "t1", "name": "f", "input": {}}]},
            {"role": "user", "content": [
                {"type": "text", "text": "reminder"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [
                    {"type": "text", "text": "o"}, {"type": "image", "source": {}}]}]}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}},
                  {"type": "web_search_20250305", "name": "web_search"}]})
    shape = [(m.role, m.content) for m in asked.messages]
    assert shape == [("system", "a\nb"), ("user", "u"), ("assistant", ""),
                     ("tool", "o\n[image left out: the model reads text only]"), ("user", "reminder")]
    assert asked.messages[2].refs == ("enc",)
    assert [t["function"]["name"] for t in asked.tools] == ["f"] and len(asked.ignored) == 1


def test_google_calls_without_ids_are_paired_by_signature_name_and_order():
    signature = "sig_" + "a" * 24 + "_call_" + "b" * 24
    asked = _read("google", {"contents": [
        {"role": "user", "parts": [{"text": "u"}]},
        {"role": "model", "parts": [
            {"text": "r", "thought": True}, {"functionCall": {"name": "f", "args": {"n": 60000}},
                                             "thoughtSignature": signature},
            {"functionCall": {"name": "g"}}, {"functionCall": {"name": "f"}}]},
        {"role": "user", "parts": [
            {"functionResponse": {"name": "g", "response": {"output": "G"}}},
            {"functionResponse": {"name": "f", "response": {"error": "F1"}}},
            {"functionResponse": {"name": "f", "response": {"a": 1, "b": 2}}}, {"text": "and"}]}]}, model="m")
    calls = asked.messages[1].tool_calls
    assert [c.call_id for c in calls] == ["call_" + "b" * 24, "call_1", "call_2"]
    assert calls[0].arguments == '{"n": 60000}'
    assert [(m.role, m.content, m.tool_call_id) for m in asked.messages[2:]] == [
        ("tool", "G", "call_1"), ("tool", "F1", calls[0].call_id), ("tool", '{"a": 1, "b": 2}', "call_2"),
        ("user", "and", "")]


@pytest.mark.parametrize("name, body, param", [
    ("anthropic", {"messages": [{"role": "user", "content": "x"}], "stop_sequences": ["a"]},
     "stop_sequences"),
    ("anthropic", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ("anthropic", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ("anthropic", {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]},
     "messages[0].content[0].name"),
    ("openai_responses", {"input": []}, "input"),
    ("openai_responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ("openai_responses", {"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    ("openai_responses", {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [3]}]},
     "tools[0].tools[0]"),
    ("google", {"contents": [{"role": "system", "parts": []}]}, "contents[0].role"),
    ("google", {"contents": [{"parts": [{"inlineData": {}}]}]}, "contents[0].parts[0].text"),
    ("google", {"contents": [{"parts": [{"text": "x"}]}], "generationConfig": {"candidateCount": 2}},
     "generationConfig.candidateCount")])
def test_what_cannot_be_done_names_the_field(name, body, param):
    with pytest.raises(RequestError) as e:
        _read(name, {"model": "m", **body}, model="m")
    assert (e.value.status, e.value.param) == (400, param)
