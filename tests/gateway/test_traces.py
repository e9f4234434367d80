"""Recorded traffic of real harnesses: every request finds its place in the tree by token ids."""

import functools

import pytest

from gyre.base.enums import AgentRole, FinishReason
from gyre.trajectory.record import prompt_ids
from gyre.trajectory.tree import TrajectoryTree
from tests.gateway import trace_replay
from tests.gateway.trace_replay import is_held, parents, replay, sampled_ids

# Worked out with the slow matcher of `trace_replay` and checked by eye where a harness compacts, forks or
# retries: (requests, answers that the client has, prompts that continue nothing, answers that nothing
# continues). Refused and cut requests count as requests only.
EXPECTED = {
    "claudemin/compact": (8, 8, 2, 3),
    "claudemin/subagent": (6, 6, 2, 2),
    "claudemin/subparallel": (8, 8, 3, 3),
    "claudemin/tools": (5, 5, 1, 1),
    "claudemin/weirdid": (3, 3, 1, 1),
    "codex/badargs": (5, 5, 1, 1),
    "codex/compact": (8, 8, 3, 3),
    "codex/ctxerr": (3, 2, 1, 0),
    "codex/cut": (4, 3, 1, 1),
    "codex/hang": (2, 1, 1, 0),
    "codex/parallel": (3, 3, 1, 1),
    "codex/retry": (8, 4, 1, 1),
    "codex/stall": (2, 1, 1, 0),
    "codex/subagent": (7, 7, 2, 2),
    "codex/subparallel": (9, 9, 3, 3),
    "codex/tools": (5, 5, 1, 1),
    "codex/weirdid": (3, 3, 1, 1),
    "mini/compact": (7, 7, 1, 1),
    "mini/ctxerr": (2, 1, 1, 0),
    "mini/cut": (4, 4, 1, 1),
    "mini/length": (6, 6, 1, 4),
    "mini/parallel": (3, 3, 1, 1),
    "mini/resume": (6, 6, 1, 4),
    "mini/retry": (8, 5, 1, 1),
    "mini/subagent": (5, 5, 2, 4),
    "mini/subcompact": (5, 5, 2, 4),
    "mini/subparallel": (5, 5, 2, 4),
    "mini/tools": (5, 5, 1, 1),
    "mini/weirdid": (3, 3, 1, 1),
    "pi/badargs": (5, 5, 1, 1),
    "pi/compact": (8, 8, 4, 4),
    "pi/cut": (4, 3, 1, 1),
    "pi/hang": (2, 1, 1, 0),
    "pi/length": (2, 2, 1, 1),
    "pi/parallel": (3, 3, 1, 1),
    "pi/resume": (4, 4, 1, 1),
    "pi/retry": (8, 4, 1, 1),
    "pi/stall": (2, 1, 1, 0),
    "pi/subagent": (6, 6, 2, 2),
    "pi/subparallel": (8, 8, 3, 3),
    "pi/tools": (5, 5, 1, 1),
    "pi/weirdid": (3, 3, 1, 1),
    "pianth/badargs": (5, 5, 1, 1),
    "pianth/parallel": (3, 3, 1, 1),
    "pianth/subagent": (6, 6, 2, 2),
    "pianth/tools": (5, 5, 1, 1),
    "pianth/weirdid": (3, 3, 1, 1),
}
ROLES = {"main": AgentRole.MAIN, "sub": AgentRole.SUB_AGENT, "summary": AgentRole.MAIN_SUMMARY}
# Answers that the client has but went past: asked twice with one history, it kept the later one.
PASSED_OVER = {"pi/compact": [4]}
_replay = functools.cache(replay)
each_trace = pytest.mark.parametrize("name", trace_replay.NAMES)


def _answered(request):
    return request.get("status") == 200 and not is_held(request)


def test_all_traces_are_expected():
    assert trace_replay.NAMES == sorted(EXPECTED) and len(EXPECTED) == 47


@each_trace
def test_the_tree_has_the_expected_shape(name):
    result = _replay(name)
    order = {r.call_id: i for i, r in enumerate(result.records)}
    found = [order.get(r.prefix_call) for r in result.records]
    assert found == parents(result.requests)
    answered = [i for i, r in enumerate(result.requests) if _answered(r)]
    assert (len(result.records), len(answered), found.count(None),
            len(set(answered) - set(found))) == EXPECTED[name]


@each_trace
def test_every_answer_is_recorded_as_it_was_sampled(name):
    result = _replay(name)
    assert len(result.records) == len(result.requests)
    by_id = {r.call_id: r for r in result.records}
    for i, (request, record) in enumerate(zip(result.requests, result.records, strict=True)):
        assert prompt_ids(record, by_id).tolist() == result.prompts[record.call_id]
        if _answered(request):
            assert record.completion_ids.tolist() == sampled_ids(request["plan"])
            assert record.trainable == (i not in PASSED_OVER.get(name, []))
            assert record.finish is (FinishReason.LENGTH if request["plan"].get("finish") == "length"
                                     else FinishReason.STOP)
        else:
            assert not record.trainable and record.finish is FinishReason.CANCELLED


@each_trace
def test_no_sampled_token_is_lost_or_doubled(name):
    result = _replay(name)
    flat = TrajectoryTree.from_records(result.records).flatten()
    sampled = {(*result.prompts[r.call_id], *r.completion_ids[:n + 1].tolist())
               for r in result.records if r.trainable for n in range(len(r.completion_ids))}
    assert int(flat.train.sum()) == len(sampled)


@each_trace
def test_roles_are_those_of_the_labels(name):
    result = _replay(name)
    assert [r.agent_role for r in result.records] == [ROLES[r["plan"]["role"]] for r in result.requests]


def test_nearly_all_requests_of_tool_users_extend_a_recorded_path():
    extended = asked = 0
    for name in trace_replay.NAMES:
        result = _replay(name)
        for i, (request, record) in enumerate(zip(result.requests, result.records, strict=True)):
            follows = any(m.get("role") in ("assistant", "tool") or m.get("type") in (
                "function_call", "function_call_output") for m in trace_replay.history(request))
            compacted = request["plan"]["role"] == "summary" or (
                i > 0 and result.requests[i - 1]["plan"]["role"] == "summary")
            if follows and not compacted:
                asked += 1
                extended += record.prefix_call is not None
    assert asked > 150
    assert extended / asked >= 0.95
