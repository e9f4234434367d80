"""The types that all dialects translate to and from. Pure data; no http, no sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gyre.base.enums import FinishReason
from gyre.base.protocols import Message


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A request in gyre's own terms.

    Attributes:
      model: the name that the client asked for.
      messages: the whole history, at least one message.
      tools: OpenAI function tool objects, as sent but for volatile fields.
      max_tokens: the client's limit on completion tokens, or None.
      stream: whether the answer is a stream of server-sent events.
      include_usage: whether a stream ends with a usage chunk.
      ignored: names of fields that were sent and have no effect (training decides how to sample).
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    ignored: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Reply:
    """A finished answer. Token counts are those of the recorded ids."""

    reply_id: str
    model: str
    created_s: int
    message: Message
    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int


class RequestError(Exception):
    """A request that is answered with an error of the dialect's own shape.

    Args:
      status: HTTP status.
      message: what was got, what is expected, what to do.
      code: the dialect's machine-readable code, or None.
      param: the field at fault, or None.
      retry_after_s: for 429 and 5xx, when to come back.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None,
                 param: str | None = None, retry_after_s: int | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
