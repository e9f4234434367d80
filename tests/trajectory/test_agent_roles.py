import json

import pytest

from gyre.base.enums import AgentRole
from gyre.base.protocols import Message
from gyre.trajectory.agent_roles import (
    HARNESS_RULES,
    HeaderRule,
    RoleRules,
    Situation,
    all_harness_rules,
    spawned_by,
)

RULES = RoleRules(("Summarize the conversation so far",), ("You are a sub-agent", "Sub:"))
SUMMARIZE = Message("user", "Summarize the conversation so far, in 200 words.")


@pytest.mark.parametrize(("messages", "role"), [
    ([Message("system", "You are an agent"), Message("user", "hi")], AgentRole.MAIN),
    ([Message("system", "You are an agent"), SUMMARIZE], AgentRole.MAIN_SUMMARY),
    ([Message("system", " You are a sub-agent."), Message("user", "hi")], AgentRole.SUB_AGENT),
    ([Message("system", "You are a sub-agent."), Message("user", "hi"), SUMMARIZE],
     AgentRole.SUB_AGENT_SUMMARY),
    ([Message("user", "Sub: count files")], AgentRole.SUB_AGENT),  # no system prompt
    ([Message("system", "agent"), Message("user", "Sub: count files")], AgentRole.MAIN),
    ([SUMMARIZE, Message("assistant", "x"), Message("user", "go on")], AgentRole.MAIN),
    ([SUMMARIZE, Message("assistant", "x"), Message("tool", "y")], AgentRole.MAIN_SUMMARY),
    ([Message("user", "Do not Summarize the conversation so far")], AgentRole.MAIN),
    ([], AgentRole.MAIN),
])
def test_role(messages, role):
    assert RULES.role(messages) is role


def test_no_markers_means_main():
    assert RoleRules().role([Message("system", "You are a sub-agent"), SUMMARIZE]) is AgentRole.MAIN


@pytest.mark.parametrize("markers", ["Summarize", ("",), (" ",), (3,), ["a"]])
def test_markers_that_fit_everything_are_refused(markers):
    with pytest.raises(ValueError, match="summary_markers must be a tuple of non-empty strings"):
        RoleRules(summary_markers=markers)


def headers(**named):
    return Situation(headers={name.replace("_", "-"): value for name, value in named.items()})


@pytest.mark.parametrize(("harness", "situation", "role"), [
    ("codex", headers(x_codex_turn_metadata='{"request_kind": "compaction"}'), AgentRole.MAIN_SUMMARY),
    ("codex", headers(x_codex_turn_metadata='{"request_kind": "turn"}'), AgentRole.MAIN),
    ("codex", headers(x_codex_turn_metadata="compaction"), AgentRole.MAIN),  # not JSON
    ("codex", headers(x_codex_turn_metadata='["compaction"]'), AgentRole.MAIN),
    ("codex", headers(x_codex_turn_metadata="[" * 100_000), AgentRole.MAIN),
    ("codex", headers(x_openai_subagent="compact"), AgentRole.MAIN_SUMMARY),
    ("codex", headers(x_openai_subagent="review"), AgentRole.SUB_AGENT),
    ("codex", headers(x_openai_subagent="compact", x_codex_parent_thread_id="t"),
     AgentRole.SUB_AGENT_SUMMARY),
    ("claude_code", headers(x_claude_code_agent_id="a1"), AgentRole.SUB_AGENT),
    ("claude_code", headers(x_claude_code_agent_id=""), AgentRole.MAIN),
    ("pi", headers(x_claude_code_agent_id="a1"), AgentRole.MAIN),  # another harness' header
])
def test_headers_say_the_role(harness, situation, role):
    messages = [Message("system", "You are an agent"), Message("user", "hi")]
    assert HARNESS_RULES[harness].role(messages, situation) is role


@pytest.mark.parametrize("rule", [dict(header="X-Agent", says="summary"), dict(header="x", says="main")])
def test_header_rules_that_never_fit_are_refused(rule):
    with pytest.raises(ValueError, match="header in lower case"):
        HeaderRule(**rule)


@pytest.mark.parametrize(("asked", "situation", "role"), [
    # No tools where there were some, and an instruction that asks for a summary.
    ("Summarise our work.", Situation(tools_seen=True), AgentRole.MAIN_SUMMARY),
    ("Write a hand-off for a colleague.", Situation(tools_seen=True), AgentRole.MAIN_SUMMARY),
    ("Name this chat.", Situation(tools_seen=True), AgentRole.MAIN),
    ("Summarise our work.", Situation(tools_seen=True, has_tools=True), AgentRole.MAIN),
    ("Summarise our work.", Situation(), AgentRole.MAIN),  # it may be the task of an agent without tools
    # The whole history behind it, and text only, please.
    ("Do not call tools. Summarise.", Situation(has_tools=True, thread=AgentRole.MAIN),
     AgentRole.MAIN_SUMMARY),
    ("Do not call tools. Summarise.", Situation(has_tools=True, thread=AgentRole.SUB_AGENT),
     AgentRole.SUB_AGENT_SUMMARY),
    ("Do not call tools. Summarise.", Situation(has_tools=True), AgentRole.MAIN),
    ("Do not call tools. Tell a joke.", Situation(has_tools=True, thread=AgentRole.MAIN), AgentRole.MAIN),
    ("Count the files.", Situation(spawned=True), AgentRole.SUB_AGENT),
    ("Go on.", Situation(thread=AgentRole.SUB_AGENT), AgentRole.SUB_AGENT),
    ("Go on.", Situation(thread=AgentRole.SUB_AGENT_SUMMARY), AgentRole.SUB_AGENT),
    ("Go on.", Situation(thread=AgentRole.MAIN_SUMMARY), AgentRole.MAIN),
])
def test_structure_says_the_role_of_an_unknown_harness(asked, situation, role):
    assert RoleRules().role([Message("system", "agent"), Message("user", asked)], situation) is role


@pytest.mark.parametrize(("text", "arguments", "spawned"), [
    ("Count the files.", [{"prompt": "Count the files."}], True),
    ("Task: Count the files.", [{"prompt": "Count the files."}], True),  # the harness' own words before it
    ("Count the files.", [{"command": "agent -p 'Count the files.'"}], True),  # a command line around it
    ("Count the files.", [{"tasks": [{"n": 1}, {"prompt": " Count the files.\n"}]}], True),
    ("Count the files.", [{"prompt": "Count the lines."}], False),
    ("Hello", [{"prompt": "Hello"}], False),  # too short to be told from chance
    ("Count the files. Then go.", [{"prompt": "Count the files."}], False),
    ("", [{"prompt": ""}], False),
])
def test_a_text_that_stands_in_a_tool_call_was_spawned_by_it(text, arguments, spawned):
    raw = ["{broken", "[" * 100_000, "7", *map(json.dumps, arguments)]
    assert spawned_by(text, raw) is spawned


def test_the_rules_of_all_harnesses_are_those_of_each():
    rules = all_harness_rules()
    for known in HARNESS_RULES.values():
        assert rules | known == rules
        for marker in known.summary_markers:
            assert rules.role([Message("user", marker)]) is AgentRole.MAIN_SUMMARY
    assert RoleRules(("a",)) | RoleRules(("b", "a"), ("c",)) == RoleRules(("a", "b"), ("c",))
