"""A call between its request and its record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from gyre.base.enums import AgentRole
from gyre.base.protocols import CallRequest, TokenChunk
from gyre.gateway.conversations import Node
from gyre.gateway.history import Turn
from gyre.gateway.token_buffer import TokenBuffer


@dataclasses.dataclass
class PendingCall:
    """A call between its request and its record.

    Attributes:
      request: what the engine gets.
      node: where its history ends.
      tools: that it offers.
      buffer: the prompt, for those that continue it.
      prefix, suffix_ids: how the prompt is made (see `CallRecord`).
      as_text: see `Turn`.
      ids, logprobs, versions: what the engine has emitted so far.
      first_token_s: when the first came, seconds since the epoch.
    """

    request: CallRequest
    agent_role: AgentRole
    node: Node
    tools: tuple[Mapping[str, Any], ...]
    buffer: TokenBuffer
    prefix: Turn | None
    suffix_ids: np.ndarray
    started_s: float
    metadata: dict[str, Any]
    as_text: frozenset[int] = frozenset()
    first_token_s: float | None = None
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)

    @property
    def call_id(self) -> str:
        return self.request.call_id

    @property
    def prefix_call(self) -> str | None:
        """The call that the prompt continues."""
        return self.prefix.call_id if self.prefix is not None else None

    def take(self, chunk: TokenChunk) -> None:
        """Adds newly sampled tokens."""
        self.ids.extend(chunk.ids)
        self.logprobs.extend(chunk.logprobs)
        self.versions.extend(chunk.versions)
