"""The calls of one execution as exact token ids: what a history continues, and what is new in it.

Invariants:
  * Ids are never re-encoded. A history is matched by message identity; what matches keeps its
    recorded ids, what does not is rendered anew as a branch.
  * Every call that reached the engine leaves one record, delivered or not; only the server says
    that an answer was delivered.
  * Reasoning that a client does not send back is still in the recorded ids (history='exact').

Thread-safe; knows no http.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gyre.base.enums import AgentRole, FinishReason
from gyre.base.errors import ContextOverflowError, GyreError
from gyre.base.ids import new_call_id, new_request_id
from gyre.base.protocols import (
    CallRequest,
    ChatCodec,
    Message,
    ParsedCompletion,
    SamplingParams,
    TokenChunk,
    ToolCall,
)
from gyre.trajectory.agent_roles import RoleRules
from gyre.trajectory.record import CallRecord, all_ids


@dataclasses.dataclass
class PendingCall:
    """A call between its request and its record.

    Attributes:
      request: what the engine gets.
      messages, chain: the history and its identity, one hash per prefix.
      prefix_call, suffix_ids: how the prompt is made (see `CallRecord`).
      ids, logprobs, versions: what the engine has emitted so far.
    """

    request: CallRequest
    agent_role: AgentRole
    messages: tuple[Message, ...]
    chain: list[bytes]
    prefix_call: str | None
    suffix_ids: np.ndarray
    started_s: float
    metadata: dict[str, Any]
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)

    @property
    def call_id(self) -> str:
        return self.request.call_id

    def take(self, chunk: TokenChunk) -> None:
        """Adds newly sampled tokens."""
        self.ids.extend(chunk.ids)
        self.logprobs.extend(chunk.logprobs)
        self.versions.extend(chunk.versions)


class SessionClosedError(GyreError):
    """The execution has ended; it takes no more calls."""

    def __init__(self, execution_id: str):
        super().__init__(f"execution {execution_id!r} has ended; its key is no longer valid")


class Session:
    """All conversations of one execution.

    Args:
      execution_id: goes into every record.
      codec: conversation <-> ids.
      role_rules: tell who made a call.
      seed: with a call's ordinal it keys the sampling of that call.
      temperature: of every call; the client has no say.
      max_completion_tokens: upper limit of one completion.
      max_context_tokens: of the model, prompt and completion together.
      clock: seconds since the epoch.
    """

    def __init__(self, execution_id: str, codec: ChatCodec, role_rules: RoleRules, *, seed: int,
                 temperature: float, max_completion_tokens: int, max_context_tokens: int,
                 clock: Callable[[], float] = time.time):
        if max_completion_tokens < 1:
            raise ValueError(
                f"max_completion_tokens must be at least 1, got {max_completion_tokens}")
        SamplingParams(max_tokens=1, temperature=temperature)  # refuses a bad one now
        self.execution_id = execution_id
        self._codec = codec
        self._role_rules = role_rules
        self._seed = seed
        self._temperature = temperature
        self._max_completion_tokens = max_completion_tokens
        self._max_context_tokens = max_context_tokens
        self._clock = clock
        self._lock = threading.RLock()
        self._records: dict[str, CallRecord] = {}
        self._running: dict[str, PendingCall] = {}
        self._nodes: dict[bytes, list[str]] = {}  # identity of a history with its answer -> calls
        self._last_request: dict[bytes, str] = {}  # identity of a request -> its latest call
        self._raw_arguments: dict[str, ToolCall] = {}  # tool-call id -> the call as sampled
        self._n_calls = 0
        self.closed = False

    # ------------------------------------------------------------------ the life of a call

    def open_call(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]],
                  max_tokens: int | None = None,
                  metadata: Mapping[str, Any] | None = None) -> PendingCall:
        """Finds what the history continues and makes the engine's request.

        Args:
          messages: the whole history as the client sent it.
          tools: OpenAI function tool objects; part of the identity.
          max_tokens: the client's limit, or None.
          metadata: JSON values that go into the record.

        Raises:
          ContextOverflowError: the prompt leaves no room for a token.
          SessionClosedError: the execution has ended.
        """
        messages = tuple(messages)
        tools_hash = _digest("tools", json.dumps(list(tools), sort_keys=True))
        with self._lock:
            if self.closed:
                raise SessionClosedError(self.execution_id)
            chain = _identity_chain(messages, tools_hash)
            prefix_call, suffix, prompt = self._make_prompt(messages, tools, chain)
            room = self._max_context_tokens - prompt.size
            if room < 1:
                raise ContextOverflowError(prompt.size, self._max_context_tokens)
            ordinal = self._n_calls
            self._n_calls += 1
            call_id = new_request_id()
            request = CallRequest(call_id, self.execution_id, prompt, SamplingParams(
                max_tokens=min(room, self._max_completion_tokens, max_tokens or room),
                temperature=self._temperature, seed=call_seed(self._seed, ordinal),
                stop_ids=tuple(self._codec.stop_ids)))
            meta = {**(metadata or {}), "ordinal": ordinal, "n_messages": len(messages),
                    "tools_hash": tools_hash.hex(), "request_hash": chain[-1].hex()}
            earlier = self._last_request.get(chain[-1])
            if earlier is not None and not self._is_delivered(earlier):
                meta["retry_of"] = earlier
            self._last_request[chain[-1]] = call_id
            pending = PendingCall(request, self._role_rules.role(messages), messages, chain,
                                  prefix_call, suffix, self._clock(), meta)
            self._running[call_id] = pending
            return pending

    def answer(self, pending: PendingCall, finish: FinishReason) -> Message:
        """Records a finished call, not delivered yet, and returns its message.

        From here on a history that holds this message continues the call.

        Raises:
          SessionClosedError: the execution ended meanwhile; the call is recorded as abandoned.
        """
        parsed = self._codec.parse(self._codec.decode(pending.ids))
        message = _with_call_ids(parsed)
        with self._lock:
            if self.closed:
                raise SessionClosedError(self.execution_id)
            self._record(pending, finish, malformed=parsed.malformed)
            for call in message.tool_calls:
                self._raw_arguments[call.call_id] = call
            node = _extend(pending.chain[-1], message)
            self._nodes.setdefault(node, []).append(pending.call_id)
        return message

    def delivered(self, pending: PendingCall) -> CallRecord:
        """Says that the client has the whole answer; its tokens become trainable."""
        with self._lock:
            record = dataclasses.replace(self._records[pending.call_id], delivered=True,
                                         finished_s=self._clock())
            self._records[pending.call_id] = record
            return record

    def abandon(self, pending: PendingCall, **why: Any) -> CallRecord:
        """Keeps a call that the client did not get: conditioning text at most, never trained.

        Does nothing to a call that has its record already. `why` goes into the metadata.
        """
        with self._lock:
            if pending.call_id not in self._records:
                self._record(pending, FinishReason.CANCELLED, **why)
            return self._records[pending.call_id]

    def close(self) -> list[CallRecord]:
        """Ends the session; running calls are abandoned. Returns all records in call order."""
        with self._lock:
            self.closed = True
            for pending in list(self._running.values()):
                self.abandon(pending, closed=True)
            return self.records()

    def records(self) -> list[CallRecord]:
        """Records of the calls that have ended, in call order.

        An undelivered call that was asked again has `replaced_by` in its metadata.
        """
        with self._lock:
            ordered = sorted(self._records.values(), key=lambda r: r.metadata["ordinal"])
        asked_again: dict[str, str] = {}  # request identity -> next call with it
        out = []
        for record in reversed(ordered):
            request = record.metadata["request_hash"]
            if not record.delivered and request in asked_again:
                record = dataclasses.replace(
                    record, metadata={**record.metadata, "replaced_by": asked_again[request]})
            asked_again[request] = record.call_id
            out.append(record)
        return out[::-1]

    # ------------------------------------------------------------------ internals

    def _make_prompt(self, messages: tuple[Message, ...], tools: Sequence[Mapping[str, Any]],
                     chain: list[bytes]) -> tuple[str | None, np.ndarray, np.ndarray]:
        """(prefix_call, suffix i32[S], prompt i32[P]) of a history."""
        faithful = [self._with_sampled_arguments(m) for m in messages]
        for n in range(len(messages), 0, -1):
            call_ids = self._nodes.get(chain[n])
            if messages[n - 1].role != "assistant" or not call_ids:
                continue
            # Of calls with the same text the client has seen the delivered one, the latest of them.
            delivered = [c for c in call_ids if self._is_delivered(c)]
            prefix_call = (delivered or call_ids)[-1]
            known = all_ids(self._records[prefix_call], self._records)
            suffix = np.asarray(self._codec.suffix_ids(
                faithful[:n], faithful[n:], tools, int(known[-1])), np.int32)
            return prefix_call, suffix, np.concatenate([known, suffix])
        whole = np.asarray(self._codec.render_ids(faithful, tools, True), np.int32)
        return None, whole, whole

    def _with_sampled_arguments(self, message: Message) -> Message:
        """The message with tool calls as they were sampled, where the client's have their value."""
        if not message.tool_calls:
            return message
        calls = []
        for call in message.tool_calls:
            sampled = self._raw_arguments.get(call.call_id)
            same = sampled is not None and _call_identity(sampled) == _call_identity(call)
            calls.append(sampled if same else call)
        return dataclasses.replace(message, tool_calls=tuple(calls))

    def _is_delivered(self, call_id: str) -> bool:
        record = self._records.get(call_id)
        return record is not None and record.delivered

    def _record(self, pending: PendingCall, finish: FinishReason, **metadata: Any) -> None:
        self._running.pop(pending.call_id, None)
        self._records[pending.call_id] = CallRecord(
            call_id=pending.call_id, execution_id=self.execution_id,
            agent_role=pending.agent_role, prefix_call=pending.prefix_call,
            suffix_ids=pending.suffix_ids,
            completion_ids=np.asarray(pending.ids, np.int32),
            logprobs=np.asarray(pending.logprobs, np.float32),
            versions=np.asarray(pending.versions, np.int32),
            finish=finish, sampling=pending.request.sampling, delivered=False,
            started_s=pending.started_s, finished_s=self._clock(),
            metadata={**pending.metadata, **metadata})


def call_seed(execution_seed: int, ordinal: int) -> int:
    """The sampling seed of a call: 31 bits that differ between executions and between calls."""
    digest = hashlib.blake2b(f"{execution_seed}:{ordinal}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def _with_call_ids(parsed: ParsedCompletion) -> Message:
    calls = tuple(dataclasses.replace(c, call_id=new_call_id()) for c in parsed.tool_calls)
    return Message("assistant", parsed.content, parsed.reasoning, calls)


# ------------------------------------------------------------------------ message identity


def _identity_chain(messages: Sequence[Message], tools_hash: bytes) -> list[bytes]:
    """Identities of all prefixes of a history: entry n covers the tools and n messages."""
    chain = [tools_hash]
    for message in messages:
        chain.append(_extend(chain[-1], message))
    return chain


def _extend(prefix: bytes, message: Message) -> bytes:
    """The identity of a prefix and one more message: role, text, tool-call ids and values.

    Reasoning is left out (clients drop or trim it), white space around an assistant's text and a
    tool's name, too.
    """
    text = message.content.strip() if message.role == "assistant" else message.content
    return _digest(prefix.hex(), message.role, text, message.tool_call_id,
                   *(part for call in message.tool_calls for part in _call_identity(call)))


def _call_identity(call: ToolCall) -> tuple[str, str, str]:
    """Id, name and arguments by value: keys in any order, 60000.0 is 60000."""
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.call_id, call.name, call.arguments
    return call.call_id, call.name, json.dumps(_plain_numbers(value), sort_keys=True)


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {k: _plain_numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(v) for v in value]
    return value


def _digest(*parts: str) -> bytes:
    """A hash of several strings; lengths keep ("ab", "c") apart from ("a", "bc")."""
    h = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        h.update(len(data).to_bytes(8, "little") + data)
    return h.digest()
