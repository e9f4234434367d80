"""Message identity and exact token ids, without http."""

import dataclasses
import json
import tracemalloc

import numpy as np
import pytest

from gyre.base.enums import AgentRole, FinishReason
from gyre.base.errors import ContextOverflowError
from gyre.base.protocols import Message, TokenChunk
from gyre.gateway.session import Session, SessionClosedError, call_seed
from gyre.trajectory.record import all_ids, prompt_ids
from tests.gateway.support import CODEC, IM_END, RULES, TOOLS, ids, tool_call


def _session(**options):
    return Session("g000000-0", CODEC, RULES, **{
        "seed": 7, "temperature": 0.5, "max_completion_tokens": 100, "max_context_tokens": 4096,
        **options})


def _ask(session, messages, completion, tools=(), delivered=True, finish=FinishReason.STOP,
         **options):
    """One whole call. Returns (pending, answer)."""
    pending = session.open_call(messages, tools, **options)
    for t in completion:
        pending.take(TokenChunk((t,), (-0.5,), (3,)))
    answer = session.answer(pending, finish)
    if delivered:
        session.delivered(pending)
    return pending, answer


def _user(text):
    return Message("user", text)


def test_a_conversation_is_one_chain_of_recorded_ids():
    session = _session()
    # Ids that re-encoding the text would not give: a special token in mid-text, a byte that is no
    # UTF-8, reasoning that the client drops.
    sampled = [*b"<think>\nhm\n</think>\n\nhello", 258, IM_END]
    first, answer = _ask(session, [_user("hi")], sampled)
    assert (answer.content, answer.reasoning) == ("hello", "hm")
    echoed = dataclasses.replace(answer, reasoning="", content=" hello\n")
    second, _ = _ask(session, [_user("hi"), echoed, _user("more")], ids("bye"))
    records = session.close()
    by_id = {r.call_id: r for r in records}
    assert [r.prefix_call for r in records] == [None, first.call_id]
    assert CODEC.tokenizer.decode(records[1].suffix_ids, skip_special=False) == (
        "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    for pending, record in zip([first, second], records, strict=True):
        np.testing.assert_array_equal(prompt_ids(record, by_id), pending.request.prompt_ids)
    assert list(all_ids(records[1], by_id)) == [
        *first.request.prompt_ids, *sampled, *records[1].suffix_ids, *ids("bye")]
    assert records[0].versions.tolist() == [3] * len(sampled)
    assert records[0].trainable and records[1].trainable


def test_a_cut_turn_is_closed_before_the_next():
    session = _session()
    _, answer = _ask(session, [_user("hi")], [*b"hel"], finish=FinishReason.LENGTH)
    pending, _ = _ask(session, [_user("hi"), answer, _user("go on")], ids("lo"))
    assert bytes(CODEC.decode(pending.suffix_ids), "utf8") == b"\nuser\ngo on\nassistant\n"
    assert pending.suffix_ids[0] == IM_END


@pytest.mark.parametrize("mutated", [
    '{"b": 60000, "a": "é"}', '{"a":"\\u00e9","b":60000.0}', '{ "b" : 6e4, "a" : "é" }'])
def test_tool_arguments_match_by_value(mutated):
    session = _session()
    raw = '{"b": 60000, "a": "é"}'
    first, answer = _ask(session, [_user("hi")], ids("x\n" + tool_call(raw)), TOOLS)
    assert answer.tool_calls[0].arguments == raw
    call = dataclasses.replace(answer.tool_calls[0], arguments=mutated)
    history = [_user("hi"), dataclasses.replace(answer, tool_calls=(call,)),
               Message("tool", "ok", tool_call_id=call.call_id)]
    pending = session.open_call(history, TOOLS)
    assert pending.prefix_call == first.call_id


@pytest.mark.parametrize("change", ["text", "id", "tools", "earlier"])
def test_what_does_not_match_is_a_branch(change):
    session = _session()
    sampled = ids("x" + tool_call('{"a": 1}'))
    first, answer = _ask(session, [_user("hi")], sampled, TOOLS)
    call, tools, start = answer.tool_calls[0], TOOLS, _user("hi")
    if change == "text":
        answer = dataclasses.replace(answer, content="y")
    elif change == "id":
        call = dataclasses.replace(call, call_id="call_other")
    elif change == "tools":
        tools = []
    else:
        start = _user("ho")
    answer = dataclasses.replace(answer, tool_calls=(call,))
    history = [start, answer, Message("tool", "ok", tool_call_id=call.call_id)]
    pending, last = _ask(session, history, ids("done"), tools)
    assert pending.prefix_call is None
    # The turn itself is never encoded again, under whatever prefix it comes back.
    turns = {1: sampled} if change in ("tools", "earlier") else {}
    assert list(pending.request.prompt_ids) == CODEC.render_ids(history, tools, True, turns)
    assert pending.metadata.get("origin_calls") == ([first.call_id] if turns else None)
    # The branch itself goes on as a chain.
    later = session.open_call([*history, last, _user("and")], tools)
    assert later.prefix_call == pending.call_id


def test_a_branch_renders_tool_arguments_as_they_were_sampled():
    session = _session()
    raw = '{"b": 60000,   "a": 1}'
    _, answer = _ask(session, [_user("hi")], ids(tool_call(raw)), TOOLS)
    call = dataclasses.replace(answer.tool_calls[0], arguments='{"a":1,"b":60000.0}')
    echoed = dataclasses.replace(answer, tool_calls=(call,))
    pending = session.open_call([_user("changed"), echoed], [])
    assert raw in CODEC.decode(pending.request.prompt_ids)


def test_the_deepest_match_wins_and_sub_agents_interleave():
    session = _session()
    sub = [Message("system", "You are a sub-agent."), _user("task")]
    main = [_user("hi")]
    calls = []
    for turn in range(3):
        for chain, history in (("main", main), ("sub", sub)):
            pending, answer = _ask(session, history, ids(f"{chain} {turn}"))
            history += [answer, _user("next")]
            calls.append(pending)
    assert [c.prefix_call for c in calls] == [None, None, *[c.call_id for c in calls[:4]]]
    roles = [r.agent_role for r in session.close()]
    assert roles == [AgentRole.MAIN, AgentRole.SUB_AGENT] * 3


def test_an_abandoned_call_is_kept_and_its_retry_replaces_it():
    session = _session()
    lost, _ = _ask(session, [_user("hi")], ids("same"), delivered=False)
    cut = session.open_call([_user("hi")], [])
    cut.take(TokenChunk((1, 2), (-1.0, -1.0), (0, 0)))
    assert session.abandon(cut) is session.abandon(cut)
    kept, answer = _ask(session, [_user("hi")], ids("same"))
    follow = session.open_call([_user("hi"), answer, _user("more")], [])
    assert follow.prefix_call == kept.call_id  # not the abandoned twin with the same text
    records = session.close()
    assert [r.delivered for r in records] == [False, False, True, False]
    assert [r.trainable for r in records] == [False, False, True, False]
    assert [r.finish for r in records][1] is FinishReason.CANCELLED
    assert records[1].completion_ids.tolist() == [1, 2]
    assert [r.metadata.get("replaced_by") for r in records] == [
        kept.call_id, kept.call_id, None, None]
    assert kept.metadata["retry_of"] == cut.call_id
    seeds = {r.sampling.seed for r in records}
    assert len(seeds) == 4  # a retry is not the same sample


def test_history_that_rests_on_an_undelivered_answer_still_matches():
    """A client may have got the answer although the connection broke."""
    session = _session()
    lost, answer = _ask(session, [_user("hi")], ids("half"), delivered=False)
    assert session.open_call([_user("hi"), answer], []).prefix_call == lost.call_id


def test_sampling_is_training_s_decision_clipped_to_the_room():
    session = _session(max_context_tokens=60)
    sampling = session.open_call([_user("hi")], [], max_tokens=5).request.sampling
    assert (sampling.max_tokens, sampling.temperature) == (5, 0.5)
    assert sampling.stop_ids == CODEC.stop_ids
    prompt = session.open_call([_user("hi")], []).request
    assert prompt.sampling.max_tokens == 60 - prompt.prompt_ids.size < 100
    long = "x" * (60 - prompt.prompt_ids.size)
    assert session.open_call([_user("hi" + long[1:])], []).request.sampling.max_tokens == 1
    with pytest.raises(ContextOverflowError) as e:
        session.open_call([_user("hi" + long)], [])
    assert (e.value.prompt_tokens, e.value.max_context_tokens) == (60, 60)


def test_seeds_differ_between_calls_and_siblings_and_are_stable():
    seeds = {call_seed(e, n) for e in range(20) for n in range(20)}
    assert len(seeds) == 400
    assert all(0 <= s < 2**31 for s in seeds)
    assert call_seed(1, 2) == call_seed(1, 2)


def test_a_closed_session_takes_nothing_more():
    session = _session()
    pending = session.open_call([_user("hi")], [])
    records = session.close()
    assert [r.finish for r in records] == [FinishReason.CANCELLED]
    with pytest.raises(SessionClosedError):
        session.answer(pending, FinishReason.STOP)
    with pytest.raises(SessionClosedError):
        session.open_call([_user("hi")], [])


def test_metadata_is_json():
    session = _session()
    _ask(session, [_user("hi")], ids("x<tool_call>"), metadata={"dialect": "d"})
    metadata = session.close()[0].metadata
    assert json.loads(json.dumps(metadata)) == metadata
    assert (metadata["dialect"], metadata["n_messages"], metadata["malformed"]) == ("d", 1, True)


def test_counting_tokens_keeps_nothing():
    session = _session(max_context_tokens=1 << 20)
    _, answer = _ask(session, [_user("hi")], ids("hello"), TOOLS)
    history = [_user("hi"), answer, _user("more")]
    session.count_tokens(history, TOOLS)  # warms caches
    tracemalloc.start()
    try:
        for i in range(20):
            session.count_tokens([*history, _user(f"{i}" + 50_000 * "x")], TOOLS)
            session.count_tokens([_user(f"{i}" + 50_000 * "x")], [{**TOOLS[0], "n": i}])
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept_bytes < 500_000, kept_bytes  # of 2 MB that were counted
    counted = session.count_tokens(history, TOOLS)
    pending = session.open_call(history, TOOLS)
    assert pending.request.prompt_ids.size == counted
    assert pending.prefix_call is not None
