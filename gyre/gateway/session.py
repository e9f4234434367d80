"""The calls of one execution as exact token ids: what a history continues, and what is new in it.

Invariants:
  * Ids are never re-encoded. A history is matched by message identity against every earlier node; what
    matches keeps its recorded ids, sampled turns elsewhere in it keep theirs, the rest is rendered anew.
  * Every call that reached the engine leaves one record, delivered or not; only the server says
    that an answer was delivered.
  * Reasoning that a client does not send back is still in the recorded ids (history='exact'), or is left
    out where the chat template leaves it out, which makes a branch (history='template').

Thread-safe; knows no http.
"""

from __future__ import annotations

import dataclasses
import hashlib
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
    Tools,
)
from gyre.gateway.conversations import Conversations, Node
from gyre.gateway.history import Entry, KnownTurns, Turn
from gyre.gateway.pending import PendingCall
from gyre.gateway.prompts import Prompt, Prompts
from gyre.trajectory.agent_roles import RoleRules, Situation, spawned_by
from gyre.trajectory.record import CallRecord

_OPENING_MESSAGES = 8  # among which the task stands that a sub-agent was given


class SessionClosedError(GyreError):
    """The execution has ended; it takes no more calls."""

    def __init__(self, execution_id: str):
        super().__init__(f"execution {execution_id!r} has ended; its key is no longer valid")


class UnknownAnswerError(GyreError):
    """A request follows an answer by an id that this execution never gave."""

    def __init__(self, previous_id: str):
        super().__init__(f"previous_response_id {previous_id!r} names no answer of this execution; send "
                         "the whole history as input")


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
      history: "exact" keeps sampled ids, reasoning included; "template" shows old turns as the chat
        template does, at the cost of one whole render per call.
      clock: seconds since the epoch.
    """

    def __init__(self, execution_id: str, codec: ChatCodec, role_rules: RoleRules, *, seed: int,
                 temperature: float, max_completion_tokens: int, max_context_tokens: int,
                 history: str = "exact", clock: Callable[[], float] = time.time):
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
        self._records: dict[str, CallRecord] = {}  # as they were when the call ended, not delivered
        self._delivered_s: dict[str, float] = {}
        self._running: dict[str, PendingCall] = {}
        self._turns = KnownTurns()
        self._prompts = Prompts(codec, history, self._turns)
        self._answered: dict[str, tuple[Turn, Node]] = {}  # call -> its turn and where that stands
        self._conversations = Conversations()
        self._tools_seen = False
        self._written: list[str] = []  # arguments of all sampled tool calls
        self._asked_at: dict[str, Node] = {}  # call -> where its request ends
        self._n_calls = 0
        self.closed = False

    # ------------------------------------------------------------------ the life of a call

    def open_call(self, messages: Sequence[Message], tools: Tools, max_tokens: int | None = None,
                  metadata: Mapping[str, Any] | None = None, *, previous_id: str = "",
                  headers: Mapping[str, str] | None = None) -> PendingCall:
        """Finds what the history continues and makes the engine's request.

        Args:
          messages: the whole history as the client sent it (what is new, after `previous_id`).
          tools: OpenAI function tool objects; part of the identity.
          max_tokens: the client's limit, or None.
          metadata: JSON values that go into the record.
          previous_id: the answer that the messages follow.
          headers: of the request, names in lower case; harnesses say in them who asks.

        Raises:
          ContextOverflowError: the prompt leaves no room for a token.
          SessionClosedError: the execution has ended.
          UnknownAnswerError: `previous_id` is none of this execution's.
        """
        tools = tuple(tools)
        with self._lock:
            if self.closed:
                raise SessionClosedError(self.execution_id)
            entries = self._entries(messages, previous_id)
            node = self._conversations.insert(tools, entries)
            prompt = self._prompts.make(node, entries, tools)
            room = self._max_context_tokens - prompt.tokens
            if room < 1:
                raise ContextOverflowError(prompt.tokens, self._max_context_tokens)
            call_id, ordinal = new_request_id(), self._n_calls
            self._n_calls += 1
            buffer = prompt.buffer()
            request = CallRequest(call_id, self.execution_id, buffer.ids, SamplingParams(
                max_tokens=min(room, self._max_completion_tokens, max_tokens or room),
                temperature=self._temperature, seed=call_seed(self._seed, ordinal),
                stop_ids=tuple(self._codec.stop_ids)), continues=prompt.prefix_call or "")
            role = self._role(entries, tools, prompt, headers or {})
            for turn in prompt.held:
                turn.continued = True
            pending = PendingCall(request, role, node, tools, buffer, prompt.prefix,
                                  prompt.suffix_ids, self._clock(),
                                  self._metadata(metadata, ordinal, entries, node, prompt), prompt.as_text)
            node.asked.append(call_id)
            self._running[call_id] = pending
            return pending

    def count_tokens(self, messages: Sequence[Message], tools: Tools, previous_id: str = "") -> int:
        """Prompt tokens that a call with this history would have. Keeps nothing of it."""
        with self._lock:
            entries = self._entries(messages, previous_id)
            node = self._conversations.insert(tuple(tools), entries, keep=False)
            return self._prompts.make(node, entries, tuple(tools)).tokens

    def answer(self, pending: PendingCall, finish: FinishReason) -> Message:
        """Records a finished call, not delivered yet, and returns its message.

        From here on a history that holds this message continues the call.

        Raises:
          SessionClosedError: the execution ended meanwhile; the call is recorded as abandoned.
        """
        parsed = self._codec.parse(self._codec.decode(pending.ids), pending.tools)
        message = _with_call_ids(parsed)
        with self._lock:
            if self.closed:
                raise SessionClosedError(self.execution_id)
            record = self._record(pending, finish, malformed=parsed.malformed)
            turn = Turn(pending.call_id, message, record.completion_ids,
                        pending.buffer.extended(pending.ids), pending.prefix, pending.agent_role,
                        pending.as_text)
            self._turns.add(turn)
            self._written += [c.arguments for c in message.tool_calls]
            node = pending.node.extend(Entry(turn.identity, message))
            node.turns.append(turn)
            self._answered[pending.call_id] = (turn, node)
        return message

    def delivered(self, pending: PendingCall) -> None:
        """Says that the client has the whole answer; its tokens become trainable."""
        with self._lock:
            self._delivered_s[pending.call_id] = self._clock()
            self._answered[pending.call_id][0].delivered = True

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

        Of several calls with one history the client goes on with one, or at least keeps the last that it
        got: the others have `replaced_by` in their metadata and are not trainable.
        """
        with self._lock:
            ordered = sorted(self._records.values(), key=lambda r: r.metadata["ordinal"])
            return [self._final(r) for r in ordered]

    # ------------------------------------------------------------------ prompts

    def _entries(self, messages: Sequence[Message], previous_id: str) -> list[Entry]:
        if not previous_id:
            return self._turns.canonical(messages)
        turn = self._turns.find(previous_id)
        if turn is None:
            raise UnknownAnswerError(previous_id)
        node = self._answered[turn.call_id][1]
        before = [n.shown for n in node.path()]
        return self._turns.canonical([*before, *messages])

    # ------------------------------------------------------------------ roles and records

    def _role(self, entries: Sequence[Entry], tools: tuple, prompt: Prompt,
              headers: Mapping[str, str]) -> AgentRole:
        messages = [e.shown for e in entries]
        thread = prompt.held[0].agent_role if prompt.held else None
        first = next((m.content for m in messages if m.role == "user"), "")
        texts = [m.content for m in messages[:_OPENING_MESSAGES] if m.role == "user"]
        spawned = prompt.prefix_call is None and bool(first) and any(
            spawned_by(text, self._written) for text in texts)
        situation = Situation(headers, bool(tools), self._tools_seen, thread, spawned)
        self._tools_seen = self._tools_seen or bool(tools)
        return self._role_rules.role(messages, situation)

    def _metadata(self, given: Mapping[str, Any] | None, ordinal: int, entries: Sequence[Entry],
                  node: Node, prompt: Prompt) -> dict[str, Any]:
        meta = {**(given or {}), "ordinal": ordinal, "n_messages": len(entries)}
        if prompt.prefix_call is None and prompt.held:
            meta["origin_calls"] = [t.call_id for t in prompt.held]
        earlier = [c for c in node.asked if c in self._records and c not in self._delivered_s]
        if earlier:
            meta["retry_of"] = earlier[-1]
        return meta

    def _final(self, record: CallRecord) -> CallRecord:
        """The record with its delivery, or marked where another call with its history took its place."""
        if record.call_id in self._delivered_s:
            record = dataclasses.replace(record, delivered=True,
                                         finished_s=self._delivered_s[record.call_id])
        asked = self._asked_at[record.call_id].asked
        if len(asked) == 1:
            return record
        kept = [c for c in asked if c in self._answered and self._answered[c][0].continued
                and self._answered[c][0].delivered]
        if not kept:
            kept = [c for c in asked if c in self._answered and self._answered[c][0].delivered][-1:]
        later = kept or asked[-1:]
        if record.call_id in later:
            return record
        return dataclasses.replace(record, delivered=False, metadata={
            **record.metadata, "replaced_by": later[-1]})

    def _record(self, pending: PendingCall, finish: FinishReason, **metadata: Any) -> CallRecord:
        self._running.pop(pending.call_id, None)
        self._asked_at[pending.call_id] = pending.node
        record = self._records[pending.call_id] = CallRecord(
            call_id=pending.call_id, execution_id=self.execution_id,
            agent_role=pending.agent_role, prefix_call=pending.prefix_call,
            suffix_ids=pending.suffix_ids,
            completion_ids=np.asarray(pending.ids, np.int32),
            logprobs=np.asarray(pending.logprobs, np.float32),
            versions=np.asarray(pending.versions, np.int32),
            finish=finish, sampling=pending.request.sampling, delivered=False,
            started_s=pending.started_s, finished_s=self._clock(),
            metadata={**pending.metadata, **metadata})
        return record


def call_seed(execution_seed: int, ordinal: int) -> int:
    """The sampling seed of a call: 31 bits that differ between executions and between calls."""
    digest = hashlib.blake2b(f"{execution_seed}:{ordinal}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def _with_call_ids(parsed: ParsedCompletion) -> Message:
    calls = tuple(dataclasses.replace(c, call_id=new_call_id()) for c in parsed.tool_calls)
    return Message("assistant", parsed.content, parsed.reasoning, calls)
