"""Says who made a call inside an execution, from the text that the harness itself put there.

Harnesses announce summaries and sub-agents only by wording; which wording is a property of the
harness, so the rules are data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gyre.base.enums import AgentRole
from gyre.base.protocols import Message


@dataclasses.dataclass(frozen=True)
class RoleRules:
    """How a harness words what is not its main agent's ordinary call.

    Attributes:
      summary_markers: a call is a summary when its last user message starts with one of these.
      sub_agent_markers: a conversation is a sub-agent's when its system prompt (without one, its
        first user message) starts with one of these.

    Raises:
      ValueError: a string instead of a tuple of strings, or an empty marker, which fits every call.
    """

    summary_markers: tuple[str, ...] = ()
    sub_agent_markers: tuple[str, ...] = ()

    def __post_init__(self):
        for field in dataclasses.fields(self):
            markers = getattr(self, field.name)
            if not isinstance(markers, tuple) or not all(
                    isinstance(m, str) and m.strip() for m in markers):
                raise ValueError(
                    f"{field.name} must be a tuple of non-empty strings, got {markers!r}")

    def role(self, messages: Sequence[Message]) -> AgentRole:
        """Who asks with this history; MAIN when no marker fits. Leading white space is ignored."""
        opening = next((m for m in messages if m.role == "system"),
                       next((m for m in messages if m.role == "user"), None))
        asked = next((m for m in reversed(messages) if m.role == "user"), None)
        is_summary = _starts_with(asked, self.summary_markers)
        if _starts_with(opening, self.sub_agent_markers):
            return AgentRole.SUB_AGENT_SUMMARY if is_summary else AgentRole.SUB_AGENT
        return AgentRole.MAIN_SUMMARY if is_summary else AgentRole.MAIN


def _starts_with(message: Message | None, markers: tuple[str, ...]) -> bool:
    return message is not None and message.content.lstrip().startswith(markers)
