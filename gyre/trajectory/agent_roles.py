"""Says who made a call inside an execution: the main agent, a sub-agent, or either of them summarising.

Some harnesses say so in headers, others by wording only; both are properties of a harness, so the rules are
data. What no rule knows is told by structure. A wrong guess changes the order in which paths are sampled
for training, never a token.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence

from gyre.base.enums import AgentRole
from gyre.base.protocols import Message

_SUMMARY = re.compile(r"summar|compact|checkpoint|hand-?off", re.IGNORECASE)
_TEXT_ONLY = re.compile(r"text only|(?:do not|don't|without|never) (?:call|us)\w* (?:any )?(?:more )?tools?",
                        re.IGNORECASE)
_HEAD_CHARS = 400  # an instruction says early on what it wants; a transcript behind it says anything
_SHORTEST_TASK_CHARS = 12


@dataclasses.dataclass(frozen=True)
class HeaderRule:
    """A header by which a harness says what a call is.

    Attributes:
      header: its name, in lower case.
      says: "summary" or "sub_agent".
      field: for a header that holds JSON, the field to look at.
      values: the values that count; any, when empty.
      but: values that do not.
    """

    header: str
    says: str
    field: str = ""
    values: tuple[str, ...] = ()
    but: tuple[str, ...] = ()

    def __post_init__(self):
        if self.says not in ("summary", "sub_agent") or self.header != self.header.lower():
            raise ValueError(f"says must be 'summary' or 'sub_agent', header in lower case; got {self}")

    def fits(self, headers: Mapping[str, str]) -> bool:
        """Whether the request's headers (names in lower case) say so."""
        value = headers.get(self.header, "")
        if self.field and value:
            try:
                fields = json.loads(value)
            except (ValueError, RecursionError):
                return False
            value = str(fields.get(self.field, "")) if isinstance(fields, dict) else ""
        return bool(value) and value not in self.but and (not self.values or value in self.values)


@dataclasses.dataclass(frozen=True)
class Situation:
    """What a session knows of a call beside its messages.

    Attributes:
      headers: of the request, names in lower case.
      has_tools: whether it offers tools.
      tools_seen: whether any earlier call of the execution did.
      thread: the role of the call that it continues, or that its kept messages come from.
      spawned: whether its first user text stands in a tool call of an earlier turn.
    """

    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_tools: bool = False
    tools_seen: bool = False
    thread: AgentRole | None = None
    spawned: bool = False


@dataclasses.dataclass(frozen=True)
class RoleRules:
    """How harnesses announce what is not their main agent's ordinary call.

    Attributes:
      summary_markers: a call is a summary when its last user message, or its system prompt, starts with
        one of these.
      sub_agent_markers: a conversation is a sub-agent's when its system prompt (without one, its first
        user message) starts with one of these.
      headers: rules on headers, which go before wording.

    Raises:
      ValueError: a string instead of a tuple of strings, or an empty marker, which fits every call.
    """

    summary_markers: tuple[str, ...] = ()
    sub_agent_markers: tuple[str, ...] = ()
    headers: tuple[HeaderRule, ...] = ()

    def __post_init__(self):
        for name in ("summary_markers", "sub_agent_markers"):
            markers = getattr(self, name)
            if not isinstance(markers, tuple) or not all(
                    isinstance(m, str) and m.strip() for m in markers):
                raise ValueError(f"{name} must be a tuple of non-empty strings, got {markers!r}")

    def __or__(self, other: RoleRules) -> RoleRules:
        """The rules of both."""
        return RoleRules(*(tuple(dict.fromkeys((*getattr(self, f.name), *getattr(other, f.name))))
                           for f in dataclasses.fields(self)))

    def role(self, messages: Sequence[Message], situation: Situation = Situation()) -> AgentRole:
        """Who asks with this history; MAIN when nothing says otherwise. Leading white space is ignored."""
        sub_agent = self._is_sub_agent(messages, situation)
        if self._is_summary(messages, situation):
            return AgentRole.SUB_AGENT_SUMMARY if sub_agent else AgentRole.MAIN_SUMMARY
        return AgentRole.SUB_AGENT if sub_agent else AgentRole.MAIN

    def _said(self, says: str, situation: Situation) -> bool:
        return any(rule.says == says and rule.fits(situation.headers) for rule in self.headers)

    def _is_sub_agent(self, messages: Sequence[Message], situation: Situation) -> bool:
        opening = _first(messages, "system") or _first(messages, "user")
        return (self._said("sub_agent", situation) or situation.spawned
                or situation.thread in (AgentRole.SUB_AGENT, AgentRole.SUB_AGENT_SUMMARY)
                or opening.startswith(self.sub_agent_markers))

    def _is_summary(self, messages: Sequence[Message], situation: Situation) -> bool:
        asked = _last_asked(messages)
        system = _first(messages, "system")
        if (self._said("summary", situation) or asked.startswith(self.summary_markers)
                or system.startswith(self.summary_markers)):
            return True
        if situation.tools_seen and not situation.has_tools:
            return bool(_SUMMARY.search(asked[:_HEAD_CHARS]) or _SUMMARY.search(system[:_HEAD_CHARS]))
        head = asked[:_HEAD_CHARS]
        return situation.thread is not None and bool(_TEXT_ONLY.search(head) and _SUMMARY.search(asked))


def _first(messages: Sequence[Message], role: str) -> str:
    return next((m.content.lstrip() for m in messages if m.role == role), "")


def _last_asked(messages: Sequence[Message]) -> str:
    return next((m.content.lstrip() for m in reversed(messages) if m.role == "user"), "")


def spawned_by(text: str, arguments: Sequence[str]) -> bool:
    """Whether a conversation's first user text was written by a tool call with one of these arguments.

    A harness may put words around the task that the agent wrote ("Task: ..."), or the agent may have
    written a whole command line around it.
    """
    text = text.strip()
    if len(text) < _SHORTEST_TASK_CHARS:
        return False
    for raw in arguments:
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        for written in _strings(value):
            written = written.strip()
            if len(written) >= _SHORTEST_TASK_CHARS and (text in written or text.endswith(written)):
                return True
    return False


def _strings(value: object) -> list[str]:
    """All strings of a JSON value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [s for v in value.values() for s in _strings(v)]
    if isinstance(value, list):
        return [s for v in value for s in _strings(v)]
    return []


# What is known of the harnesses that the README has recipes for. A key is the harness' name.
HARNESS_RULES: Mapping[str, RoleRules] = {
    "codex": RoleRules(
        summary_markers=("You are performing a CONTEXT CHECKPOINT COMPACTION",),
        headers=(HeaderRule("x-codex-turn-metadata", "summary", field="request_kind",
                            values=("compaction",)),
                 HeaderRule("x-openai-subagent", "summary", values=("compact",)),
                 HeaderRule("x-openai-subagent", "sub_agent", but=("compact",)),
                 HeaderRule("x-codex-parent-thread-id", "sub_agent"))),
    "claude_code": RoleRules(
        summary_markers=("CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.",
                         "Your task is to create a detailed summary of the conversation"),
        headers=(HeaderRule("x-claude-code-agent-id", "sub_agent"),)),
    "pi": RoleRules(summary_markers=("You are a context summarization assistant",)),
}


def all_harness_rules() -> RoleRules:
    """The rules of all known harnesses together; they do not contradict one another."""
    rules = RoleRules()
    for known in HARNESS_RULES.values():
        rules |= known
    return rules
