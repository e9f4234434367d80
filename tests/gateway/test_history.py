"""What clients make of a history, one mutation a test, and where it lands in the tree."""

import dataclasses

import pytest

from gyre.base.protocols import Message, ToolCall
from gyre.gateway.session import UnknownAnswerError
from gyre.models.chat import JinjaChat
from gyre.trajectory.record import all_ids, prompt_ids
from tests.gateway.support import CODEC, RULES, TOKENIZER, TOOLS, ids, tool_call
from tests.gateway.test_session import _ask, _session, _user


def _result(call, text="ok"):
    return Message("tool", text, tool_call_id=call.call_id)


def _by_id(session):
    return {r.call_id: r for r in session.records()}


def test_a_renamed_call_is_shown_as_it_was_sampled():
    session = _session()
    first, answer = _ask(session, [_user("hi")], ids(tool_call('{"a": 1}', name="bsh")), TOOLS)
    call, = answer.tool_calls
    renamed = dataclasses.replace(answer, tool_calls=(ToolCall(call.call_id, "bash", '{"a":1.0}'),))
    pending = session.open_call([_user("hi"), renamed, _result(call)], TOOLS)
    assert pending.prefix_call == first.call_id
    elsewhere = session.open_call([_user("ho"), renamed, _result(call)], TOOLS)
    assert '"name": "bsh", "arguments": {"a": 1}' in CODEC.decode(elsewhere.request.prompt_ids)


def test_a_message_that_merges_several_turns_is_split():
    session = _session()
    history = [_user("hi")]
    turns = []
    for n in range(3):
        pending, answer = _ask(session, history, ids(f"turn {n}\n" + tool_call(f'{{"n": {n}}}')), TOOLS)
        history += [answer, _result(answer.tool_calls[0], f"out {n}")]
        turns.append((pending, answer))
    calls = tuple(a.tool_calls[0] for _, a in turns)
    merged = Message("assistant", "turn 0\nturn 1\n\nturn 2", tool_calls=calls)
    results = [_result(c, f"out {n}") for n, c in enumerate(calls)]
    for shuffled in (results, results[::-1]):
        pending = session.open_call([_user("hi"), merged, *shuffled], TOOLS)
        assert pending.prefix_call == turns[-1][0].call_id
    assert pending.request.prompt_ids.tolist()[:-len(pending.suffix_ids)] == all_ids(
        _by_id(session)[turns[-1][0].call_id], _by_id(session)).tolist()


def test_a_turn_torn_into_its_calls_is_put_together():
    session = _session()
    sampled = ids("two\n" + tool_call('{"n": 1}') + "\n" + tool_call('{"n": 2}'))
    first, answer = _ask(session, [_user("hi")], sampled, TOOLS)
    one, two = answer.tool_calls
    whole = [_user("hi"), answer, _result(one, "1"), _result(two, "2")]
    torn = [_user("hi"), Message("assistant", "two", tool_calls=(one,)), _result(one, "1"),
            Message("assistant", "", tool_calls=(two,)), _result(two, "2")]
    a, b = session.open_call(whole, TOOLS), session.open_call(torn, TOOLS)
    assert a.prefix_call == b.prefix_call == first.call_id
    assert a.suffix_ids.tolist() == b.suffix_ids.tolist()


def test_a_synthetic_message_in_front_of_a_sampled_call_is_apart():
    session = _session()
    first, answer = _ask(session, [_user("hi")], ids("look\n" + tool_call("{}")), TOOLS)
    call, = answer.tool_calls
    merged = Message("assistant", "I am a summary.\n\nlook", tool_calls=(call,))
    pending = session.open_call([_user("new"), merged, _result(call)], TOOLS)
    assert pending.prefix_call is None
    assert pending.metadata["origin_calls"] == [first.call_id]
    text = TOKENIZER.decode(pending.request.prompt_ids, skip_special=False)
    assert "assistant\nI am a summary.<|im_end|>\n<|im_start|>assistant\nlook" in text


def test_a_known_call_under_an_unknown_prefix_is_context_with_its_origin():
    session = _session()
    # What re-encoding would not give: a special token and half a character in the middle.
    sampled = [*b"keep \xc3", 258, *tool_call('{"a": 1}').encode(), TOKENIZER.special_ids["<|im_end|>"]]
    first, answer = _ask(session, [_user("hi")], sampled, TOOLS)
    call, = answer.tool_calls
    root, last = _ask(session, [_user("Summary of it."), answer, _result(call)], ids("done"), TOOLS)
    assert root.prefix_call is None and root.metadata["origin_calls"] == [first.call_id]
    prompt = root.request.prompt_ids.tolist()
    assert any(prompt[i:i + len(sampled)] == sampled for i in range(len(prompt)))
    follow = session.open_call([_user("Summary of it."), answer, _result(call), last, _user("x")], TOOLS)
    assert follow.prefix_call == root.call_id
    assert root.agent_role is first.agent_role


@pytest.mark.parametrize("ending, position", [("same", True), ("differ", False)])
def test_a_text_turn_is_known_again_by_its_text_unless_that_is_ambiguous(ending, position):
    session = _session()
    sampled = [*b"the same text", 258, 257]
    _, answer = _ask(session, [_user("a")], sampled)
    _ask(session, [_user("b")], sampled if ending == "same" else [*b"the same text", 257])
    kept = Message("assistant", answer.content)  # no id came back
    prompt = session.open_call([_user("new"), kept, _user("go on")], []).request.prompt_ids.tolist()
    assert any(prompt[i:i + len(sampled)] == sampled for i in range(len(prompt))) is position


def test_another_tool_list_is_another_root():
    session = _session()
    _, answer = _ask(session, [_user("hi")], ids("x"), TOOLS)
    history = [_user("hi"), answer, _user("go on")]
    assert session.open_call(history, []).prefix_call is None
    assert session.open_call(history, TOOLS).prefix_call is not None


# --------------------------------------------------------------------------------- retries


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_of_identical_requests_the_one_the_client_goes_on_with_is_trained(kept):
    session = _session()
    asked = [_ask(session, [_user("hi")], ids(f"answer {n}"), max_tokens=50 + n) for n in range(3)]
    assert [r.trainable for r in session.records()] == [False, False, True]  # so far, the last
    session.open_call([_user("hi"), asked[kept][1], _user("more")], [])
    records = session.records()[:3]
    assert [r.trainable for r in records] == [n == kept for n in range(3)]
    winner = asked[kept][0].call_id
    assert {r.metadata.get("replaced_by") for r in records} == {None, winner}
    assert [r.prefix_call for r in records] == [None] * 3


def test_both_are_trained_when_the_client_goes_on_with_both():
    session = _session()
    asked = [_ask(session, [_user("hi")], ids(f"answer {n}")) for n in range(2)]
    for _, answer in asked:
        _ask(session, [_user("hi"), answer, _user("more")], ids("x"))
    assert all(r.trainable for r in session.records())


def test_twins_with_one_text_are_told_apart_by_id():
    session = _session()
    twins = [_ask(session, [_user("hi")], ids("same")) for _ in range(2)]
    first = twins[0][0].call_id
    echoed = dataclasses.replace(twins[0][1], refs=(f"msg_{first.removeprefix('req-')}",))
    pending = session.open_call([_user("hi"), echoed, _user("more")], [])
    assert pending.prefix_call == first
    assert [r.trainable for r in session.records()] == [True, False]


# --------------------------------------------------------- reasoning and the two histories

THINKING = [*b"<think>\nhm\n</think>\n\nanswer", TOKENIZER.special_ids["<|im_end|>"]]
QWEN3 = JinjaChat(TOKENIZER, "qwen3")


def _qwen3_session(history):
    from gyre.gateway.session import Session
    return Session("g0-0", QWEN3, RULES, seed=7, temperature=0.5, max_completion_tokens=100,
                   max_context_tokens=4096, history=history)


def test_exact_history_keeps_reasoning_that_the_client_drops():
    session = _qwen3_session("exact")
    first, answer = _ask(session, [_user("q")], THINKING)
    echoed = Message("assistant", answer.content)
    pending = session.open_call([_user("q"), echoed, _user("r")], [])
    assert pending.prefix_call == first.call_id
    assert THINKING == pending.request.prompt_ids.tolist()[first.request.prompt_ids.size:][:len(THINKING)]


def test_template_history_shows_old_turns_as_the_template_does():
    session = _qwen3_session("template")
    _, answer = _ask(session, [_user("q")], THINKING)
    second = session.open_call([_user("q"), answer, _user("r")], [])
    # The template leaves out the reasoning of a turn before the last question: a branch.
    assert second.prefix_call is None
    history = [_user("q"), answer, _user("r")]
    assert second.request.prompt_ids.tolist() == QWEN3.render_ids(history, [], True)
    assert "hm" not in QWEN3.decode(second.request.prompt_ids)
    # Within one question it stays, and so does the path.
    session = _qwen3_session("template")
    call_turn = [*b"<think>\nhm\n</think>\n\n", *tool_call("{}").encode(), 257]
    first, answer = _ask(session, [_user("q")], call_turn, TOOLS)
    history = [_user("q"), answer, _result(answer.tool_calls[0])]
    second, last = _ask(session, history, ids("<think>\n\n</think>\n\nx"), TOOLS)
    assert second.prefix_call == first.call_id
    # The next question cuts the reasoning of both turns: a branch, which the turns after it continue.
    third, more = _ask(session, [*history, last, _user("r")], ids("<think>\nwherefore\n</think>\n\ny"), TOOLS)
    assert third.prefix_call is None
    fourth = session.open_call([*history, last, _user("r"), more, _user("s")], TOOLS)
    assert fourth.prefix_call is None
    assert "wherefore" not in QWEN3.decode(fourth.request.prompt_ids)


@pytest.mark.parametrize("reasoning, refs, found", [
    ("hm", False, True), ("hm \n", False, True), ("", True, True), ("", False, False),
    ("other", True, False)])
def test_reasoning_is_found_again_by_its_text_or_by_what_names_the_turn(reasoning, refs, found):
    session = _qwen3_session("template")
    call_turn = [*b"<think>\nhm\n</think>\n\n", *tool_call("{}").encode(), 257]
    first, answer = _ask(session, [_user("q")], call_turn, TOOLS)
    named = (f"sig_{first.call_id.removeprefix('req-')}",) if refs else ()
    echoed = dataclasses.replace(answer, reasoning=reasoning, refs=named)
    pending = session.open_call([_user("q"), echoed, _result(answer.tool_calls[0])], TOOLS)
    assert (pending.prefix_call == first.call_id) is found
    if reasoning == "other":
        assert "other" in QWEN3.decode(pending.request.prompt_ids)


def test_an_unknown_history_mode_is_refused():
    with pytest.raises(ValueError, match="exact, template"):
        _session(history="both")


# ------------------------------------------------------------------------- by id, counting


def test_a_request_may_follow_an_answer_by_its_id():
    session = _session()
    first, answer = _ask(session, [Message("system", "s"), _user("hi")], ids(tool_call("{}")), TOOLS)
    by_id = f"resp_{first.call_id.removeprefix('req-')}"
    a = session.open_call([_result(answer.tool_calls[0])], TOOLS, previous_id=by_id)
    b = session.open_call([Message("system", "s"), _user("hi"), answer, _result(answer.tool_calls[0])], TOOLS)
    assert a.prefix_call == b.prefix_call == first.call_id
    assert a.request.prompt_ids.tolist() == b.request.prompt_ids.tolist()
    with pytest.raises(UnknownAnswerError, match="whole history"):
        session.open_call([_user("x")], [], previous_id="resp_" + "0" * 24)


def test_counting_tokens_is_exact_and_leaves_no_call():
    session = _session()
    _, answer = _ask(session, [_user("hi")], ids("x"), TOOLS)
    history = [_user("hi"), answer, _user("go on")]
    count = session.count_tokens(history, TOOLS)
    assert count == session.open_call(history, TOOLS).request.prompt_ids.size
    assert len(session.close()) == 2


def test_a_request_may_end_with_an_assistant_message():
    session = _session()
    first, answer = _ask(session, [_user("hi")], ids("half"))
    pending, _ = _ask(session, [_user("hi"), answer], ids("rest"))
    assert pending.prefix_call == first.call_id
    prompt = prompt_ids(_by_id(session)[pending.call_id], _by_id(session))
    assert TOKENIZER.decode(prompt, skip_special=False).endswith("half<|im_end|>\n<|im_start|>assistant\n")
    foreign = session.open_call([_user("other"), Message("assistant", "begin")], [])
    assert CODEC.decode(foreign.request.prompt_ids).endswith("begin\nassistant\n")
