"""Chat templates of model families, with the format in which each family writes tool calls.

A template is jinja2 with the usual names: messages (role, content, reasoning_content, tool_calls,
tool_call_id, name), tools, add_generation_prompt, raise_exception, tojson. `arguments` of a call are the
raw string; the filter `parameters` splits it into (name, text) pairs. A model's own template, which its
checkpoint carries, goes before these.
"""

from __future__ import annotations

import dataclasses
from importlib import resources

from gyre.base.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ChatFamily:
    """How one family of models writes conversations.

    Attributes:
      name: of its template, without `.jinja`.
      tool_format: of its tool calls, a key of `gyre.models.completion.TOOL_FORMATS`.
    """

    name: str
    tool_format: str

    def template(self) -> str:
        """The jinja2 source."""
        return (resources.files(__package__) / f"{self.name}.jinja").read_text(encoding="utf-8")


CHAT_FAMILIES = {family.name: family for family in (
    ChatFamily("chatml", "hermes"),
    ChatFamily("qwen2_5", "hermes"),
    ChatFamily("qwen3", "hermes"),
    ChatFamily("qwen3_coder", "xml"),
    ChatFamily("plain", "plain"),
)}


def chat_family(name: str) -> ChatFamily:
    """The family of this name. Raises ConfigError where there is none."""
    if name not in CHAT_FAMILIES:
        raise ConfigError(f"unknown chat template {name!r}; there are {', '.join(CHAT_FAMILIES)}")
    return CHAT_FAMILIES[name]
