"""The types that all dialects translate to and from. Pure data; no http, no sessions.

A dialect is one file with one subclass of `Dialect`; `gyre/gateway/dialects/__init__.py` lists them.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gyre.base.enums import FinishReason
from gyre.base.protocols import Message


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A request in gyre's own terms.

    Attributes:
      model: the name that the client asked for.
      messages: the whole history (what is new, after `previous_id`), at least one message.
      tools: OpenAI function tool objects, as sent but for volatile fields.
      max_tokens: the client's limit on completion tokens, or None.
      stream: whether the answer is a stream of server-sent events.
      include_usage: whether a stream ends with a usage chunk, where the client decides that.
      ignored: names of fields that were sent and have no effect (training decides how to sample).
      previous_id: the answer that the messages follow, where the client sends its id and not the history.
      wire: what the dialect itself needs to shape the answer, e.g. the namespaces of its tools.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    ignored: tuple[str, ...] = ()
    previous_id: str = ""
    wire: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ReplyHead:
    """What is known of an answer before its first token. Token counts are those of the recorded ids.

    Attributes:
      turn_id: 24 hex digits, unique over the run. Every id, signature and encrypted content that a
        dialect makes up for this answer contains it, so that whatever comes back names the turn.
      model: the name that the client asked for.
      created_s: seconds since the epoch.
      prompt_tokens: of the whole prompt.
    """

    turn_id: str
    model: str
    created_s: int
    prompt_tokens: int


@dataclasses.dataclass(frozen=True)
class Reply:
    """A finished answer."""

    head: ReplyHead
    message: Message
    finish: FinishReason
    completion_tokens: int


class RequestError(Exception):
    """A request that is answered with an error of the dialect's own shape.

    Args:
      status: HTTP status.
      message: what was got, what is expected, what to do.
      code: a machine-readable code in OpenAI's terms, or None; dialects map it to theirs.
      param: the field at fault, or None.
      retry_after_s: for 429 and 5xx, when to come back.
      details: numbers that a dialect's own wording needs; for code `context_length_exceeded` these are
        `prompt_tokens` and `max_context_tokens`.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None,
                 param: str | None = None, retry_after_s: int | None = None,
                 details: Mapping[str, int] | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.details = dict(details or {})


class ReplyStream(abc.ABC):
    """The server-sent events of one answer: any number of `delta`, then `end` or `fail`.

    What starts the answer (a first chunk with the role, `message_start`) goes out with the first bytes.
    """

    @abc.abstractmethod
    def delta(self, reasoning: str, content: str) -> bytes:
        """Events for more text of either kind; reasoning comes before content. May be b""."""

    @abc.abstractmethod
    def end(self, reply: Reply) -> bytes:
        """What of the message the deltas have not said, its tool calls, how it ended, the usage."""

    @abc.abstractmethod
    def fail(self, error: RequestError) -> bytes:
        """An error after the stream began; nothing that reads as a complete answer."""

    @abc.abstractmethod
    def keep_alive(self) -> bytes:
        """An event that says nothing, for long waits; legal before the answer starts and in it."""


class Dialect(abc.ABC):
    """A wire protocol. Instances are stateless.

    Attributes:
      name: for records and metrics.
      routes: (HTTP method, regular expression that the whole path has to match, operation), operation
        being `generate`, `count` (prompt tokens of a request) or `models`. Named groups of the
        expression are given to `parse_request`.
    """

    name: str
    routes: Sequence[tuple[str, str, str]]

    @abc.abstractmethod
    def parse_request(self, body: bytes, **groups: str) -> Conversation:
        """Reads the body of a `generate` or `count` request. Raises RequestError 400."""

    @abc.abstractmethod
    def format_reply(self, conversation: Conversation, reply: Reply) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    @abc.abstractmethod
    def stream(self, conversation: Conversation, head: ReplyHead) -> ReplyStream:
        """The events of an answer that is streamed."""

    @abc.abstractmethod
    def format_count(self, prompt_tokens: int) -> dict[str, Any]:
        """The body that answers `count`."""

    @abc.abstractmethod
    def format_models(self, names: Sequence[str], created_s: int) -> dict[str, Any]:
        """The body that lists the models."""

    @abc.abstractmethod
    def format_error(self, error: RequestError) -> dict[str, Any]:
        """The body of an error."""
