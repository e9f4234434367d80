import pytest

from gyre.base.enums import AgentRole
from gyre.base.protocols import Message
from gyre.trajectory.agent_roles import RoleRules

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
