"""The contracts between layers that must not import one another.

The gateway asks an `EngineEndpoint` for tokens and a `ChatCodec` for text; the generation and model
layers provide them. The runner gets `Task`s from a `TaskSource`. None of these types knows jax.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gyre.base.enums import FinishReason, Outcome, ScoreStatus

# ---------------------------------------------------------------------------------- calls


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one call is sampled.

    Attributes:
      max_tokens: most completion tokens, stop id included.
      temperature: 0.0 is greedy; the recorded log-probs are those of the tempered distribution.
      seed: with the token's position it keys the sampler, so the tokens of a call do not depend on
        the slot, batch or cell it runs in.
      stop_ids: token ids that end the call; the sampled one is part of the completion.
    """

    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature <= 10.0:
            raise ValueError(f"temperature must be in [0, 10], got {self.temperature}")


@dataclasses.dataclass(frozen=True)
class CallRequest:
    """One model call as the engine sees it.

    Attributes:
      call_id, execution_id: whose call it is.
      prompt_ids: i32[P], P >= 1.
      sampling: how it is sampled.
      continues: the earlier call whose prompt and completion this prompt starts with, or "".
    """

    call_id: str
    execution_id: str
    prompt_ids: np.ndarray
    sampling: SamplingParams
    continues: str = ""


@dataclasses.dataclass(frozen=True)
class TokenChunk:
    """Newly sampled tokens of a call: three lists of one length, maybe a finish reason.

    The last chunk of a call, and only it, has `finish` (its lists may be empty) or `error`.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: FinishReason | None = None
    error: Exception | None = None


@dataclasses.dataclass
class EngineCall:
    """A call on its way through engines. It survives a move between cells.

    `emit` is thread-safe, never blocks, and is called by whichever cell runs the call now.
    The three lists hold all that was emitted so far.
    """

    request: CallRequest
    emit: Callable[[TokenChunk], None]
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    cancelled: bool = False


class EngineEndpoint(Protocol):
    """A place that can run calls (a cell in ROLLOUT, a scripted engine). Methods are thread-safe."""

    name: str
    capacity: int  # calls decoded together; more are queued

    @property
    def in_flight(self) -> int:
        """Calls running or queued here."""

    def submit(self, call: EngineCall) -> None:
        """Starts a call; its tokens come through `call.emit`."""

    def cancel(self, call_id: str) -> None:
        """Stops a call within a decode step; it emits a CANCELLED chunk. Unknown ids are ignored."""


# ------------------------------------------------------------------------- conversations


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A tool call of the policy. `arguments` is the raw string as sampled, never re-serialised."""

    call_id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True)
class Message:
    """One message of the internal conversation type that all dialects translate to.

    Attributes:
      role: system, user, assistant or tool.
      content: text ("" when there is none).
      reasoning: the assistant's thinking, or "".
      tool_calls: the assistant's calls, in order.
      tool_call_id: for role tool, the call that this answers.
      name: for role tool, the tool's name where the client gave it.
      refs: the assistant's ids, signatures and encrypted contents as they came back; those that the
        gateway made name the recorded turn. No part of a message's identity.
    """

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    refs: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ParsedCompletion:
    """A completion's text as message parts. Tool calls have call_id "" until the gateway gives one.

    `malformed` says that a tool call was not written as the family writes them. One whose name can be
    read is still in `tool_calls`, its arguments as they were sampled; else it stays in `content`.
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: bool = False


Tools = Sequence[Mapping[str, Any]]  # OpenAI function tool objects
Turns = Mapping[int, Sequence[int]]  # index of an assistant message -> its completion ids as sampled
NO_TURNS: Turns = types.MappingProxyType({})


class CompletionStream(Protocol):
    """One completion on its way, as text that no continuation takes back."""

    def push(self, ids: Sequence[int]) -> tuple[str, str]:
        """Takes newly sampled ids. Returns what they add for sure to (reasoning, content).

        All that `push` returned for a completion, joined, is a prefix of what `parse` gives for it.
        """


class ChatCodec(Protocol):
    """Conversation <-> token ids of one model family. Stateless and thread-safe.

    Sampled turns are never encoded again: where `turns` has an assistant message's completion ids, they
    stand in place of its body, from behind the generation prompt to the end-of-turn token.
    """

    stop_ids: tuple[int, ...]
    vocab_size: int

    def render_ids(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool,
                   turns: Turns = NO_TURNS) -> list[int]:
        """Full render of a conversation."""

    def suffix_ids(self, history: Sequence[Message], new: Sequence[Message], tools: Tools, last_id: int,
                   turns: Turns = NO_TURNS) -> list[int]:
        """Ids that follow a recorded history whose last message is a sampled assistant turn.

        `last_id` is the recorded history's last token id: whether the turn's end marker was sampled
        decides whether the suffix starts with it. `turns` counts in `new`. Ends with the generation
        prompt. The cost is that of `new`, however long the history is.
        """

    def shown_as_sampled(self, messages: Sequence[Message], tools: Tools, turns: Turns) -> frozenset[int]:
        """Those of `turns` whose body in a full render is the text of their ids, unchanged."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out. Incomplete UTF-8 at the end becomes U+FFFD."""

    def parse(self, text: str, tools: Tools = ()) -> ParsedCompletion:
        """Splits a completion into reasoning, content and tool calls.

        `tools` give parameter types to formats that do not write them.
        """

    def stream(self) -> CompletionStream:
        """A reader of one completion for live streaming."""


# ------------------------------------------------------------------------ tasks and grades


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem for an agent.

    Attributes:
      task_id: unique and stable; the data cursor and the store refer to it.
      instruction: what the agent is told.
      files: relative path -> text, put into the workspace before the harness starts.
      kind: stratum for balanced batches and for reports.
      payload: what the grader needs (JSON-serialisable); never shown to the harness.
    """

    task_id: str
    instruction: str
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kind: str = ""
    payload: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class TaskSource(Protocol):
    """An endless, seeded, random-access sequence of tasks, with their grader: `task(i)` is pure."""

    def task(self, index: int) -> Task:
        """The i-th training task."""

    def held_out(self) -> Sequence[Task]:
        """Tasks for evaluation that `task` never gives."""

    def grade(self, task: Task, workspace: Path) -> Score:
        """Scores what a harness left in its workspace. Called in worker threads."""


@dataclasses.dataclass(frozen=True)
class Score:
    """A grade with a status. `value` is in [0, 1] when status is OK or PLACEHOLDER, else NaN."""

    value: float
    status: ScoreStatus
    detail: str = ""  # the grader's raw output


@dataclasses.dataclass(frozen=True)
class ExecutionResult:
    """What is known of an execution once it has ended. Times are seconds since the epoch."""

    execution_id: str
    task_id: str
    outcome: Outcome
    score: Score
    started_s: float
    finished_s: float
    exit_code: int | None = None
    log_tail: str = ""  # the harness' last output, for people
