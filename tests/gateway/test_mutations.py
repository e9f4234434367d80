"""Random conversations with random legal changes of the history: every request extends the recorded path."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.base.enums import FinishReason
from gyre.base.protocols import TokenChunk
from gyre.gateway.dialects import Reply, ReplyHead
from gyre.gateway.history import turn_id
from gyre.trajectory.record import all_ids
from gyre.trajectory.tree import TrajectoryTree
from tests.gateway.support import IM_END, tool_call
from tests.gateway.test_session import _session
from tests.gateway.wire_clients import CLIENTS, TOOL_NAMES

_TEXT = st.text(st.sampled_from("ab é✓\n\t𝄞<>|{}\"\\"), max_size=8)
_ARGUMENTS = st.sampled_from([
    "{}", '{"command": "ls -la"}', '{"timeout": 60000, "b": "é"}', '{"b": 6e4,  "a": [1, 2.50]}',
    '{"command": "x', "[1]", '{"deep": {"a": null, "b": true}}', '{"n": 12345678901234567890}'])
_CALLS = st.lists(st.tuples(st.sampled_from(TOOL_NAMES), _ARGUMENTS), max_size=3)
_TURNS = st.lists(st.tuples(_TEXT, _TEXT, _CALLS, _TEXT), min_size=1, max_size=4)


def _completion(reasoning, text, calls):
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning.strip() else ""
    return (thought + text + "".join("\n" + tool_call(a, n) for n, a in calls)).encode()


def _answer(session, client, completion, rng):
    """One request with a mutated history and its answer, as the client gets it."""
    asked = client.conversation(rng)
    pending = session.open_call(asked.messages, asked.tools)
    ids = [*completion, IM_END]
    pending.take(TokenChunk(tuple(ids), (-0.5,) * len(ids), (0,) * len(ids)))
    message = session.answer(pending, FinishReason.STOP)
    session.delivered(pending)
    head = ReplyHead(turn_id(pending.call_id), "m", 0, pending.request.prompt_ids.size)
    return pending, client.dialect.format_reply(asked, Reply(head, message, FinishReason.STOP, len(ids)))


@pytest.mark.parametrize("client_type", CLIENTS, ids=lambda c: c.__name__)
@settings(max_examples=50, deadline=None)
@given(turns=_TURNS, other=_TURNS, seed=st.integers(0, 2**32))
def test_every_request_extends_the_recorded_path(client_type, turns, other, seed):
    session, rng = _session(max_context_tokens=1 << 20, max_completion_tokens=4096), random.Random(seed)
    threads = [(client_type("Be good.", "main task"), turns, []),
               (client_type("You are a sub-agent.", "part"), other, [])]
    for n in range(max(len(turns), len(other))):
        for client, script, pendings in threads:  # interleaved
            if n >= len(script):
                continue
            reasoning, text, calls, user = script[n]
            pending, reply = _answer(session, client, _completion(reasoning, text, calls), rng)
            assert pending.prefix_call == (pendings[-1].call_id if pendings else None)
            if pendings:
                recorded = {r.call_id: r for r in session.records()}
                before = all_ids(recorded[pendings[-1].call_id], recorded)
                assert pending.request.prompt_ids[:before.size].tolist() == before.tolist()
            pendings.append(pending)
            call_ids = client.echo(reply)
            assert len(call_ids) == len(set(call_ids))
            shuffled = rng.sample(call_ids, len(call_ids)) if rng.random() < 0.3 else call_ids
            client.in_order &= shuffled == call_ids
            for call_id in shuffled:
                client.result(call_id, f"out {n}")
            if not call_ids or rng.random() < 0.3:
                client.user("go on " + user)
    records = session.close()
    assert all(r.trainable for r in records)
    flat = TrajectoryTree.from_records(records).flatten()
    assert int(flat.train.sum()) == sum(len(r.completion_ids) for r in records)


@pytest.mark.parametrize("client_type", CLIENTS, ids=lambda c: c.__name__)
@settings(max_examples=30, deadline=None)
@given(turns=_TURNS, seed=st.integers(0, 2**32))
def test_histories_with_anything_left_out_never_fail(client_type, turns, seed):
    """Turns and results that are gone: a branch at worst."""
    session, rng = _session(max_context_tokens=1 << 20, max_completion_tokens=4096), random.Random(seed)
    client = client_type("Be good.", "main task")
    for reasoning, text, calls, user in turns:
        _, reply = _answer(session, client, _completion(reasoning, text, calls), rng)
        for call_id in client.echo(reply):
            if rng.random() < 0.8:  # else the result never comes
                client.result(call_id, "out")
        client.user("go on " + user)
        if len(client.history) > 2 and rng.random() < 0.4:
            del client.history[rng.randrange(1, len(client.history) - 1)]
    assert len(session.close()) == len(turns)
