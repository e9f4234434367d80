"""An engine endpoint whose answers are written in advance, for tests and dry runs. Needs no model.

Its log-probs can be computed by hand: token i of a completion has `scripted_logprob(token, i)`.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from gyre.base.enums import FinishReason
from gyre.base.errors import EngineError
from gyre.base.protocols import CallRequest, EngineCall, TokenChunk


@dataclasses.dataclass(frozen=True)
class ScriptedAnswer:
    """A completion with a pace and an end of its own.

    Attributes:
      ids: as sampled.
      delay_s: pause before each chunk; the endpoint's own when 0.
      finish: how it ends; None for what the ids say.
    """

    ids: Sequence[int]
    delay_s: float = 0.0
    finish: FinishReason | None = None


Answer = Sequence[int] | ScriptedAnswer | Exception
Script = Callable[[CallRequest], Answer]


_IDLE_S = 0.5  # after which a thread without work ends


def scripted_logprob(token: int, index: int) -> float:
    """The log-prob of a completion's `index`-th token: -(token % 7 + 1) / 8 - index / 1024."""
    return -(token % 7 + 1) / 8 - index / 1024


def _logprobs(tokens: Sequence[int], start: int) -> tuple[float, ...]:
    """`scripted_logprob` of tokens from index `start` on, all at once."""
    at = np.arange(start, start + len(tokens))
    return tuple((-(np.asarray(tokens) % 7 + 1) / 8 - at / 1024).tolist())


class ScriptedEndpoint:
    """An `EngineEndpoint` that plays a script on threads of its own.

    Args:
      script: a function of the request, or an iterable of answers that is used up in call order.
        An answer is the completion's ids, a `ScriptedAnswer`, or an exception to emit. Ids are cut at
        max_tokens (LENGTH) and behind the first stop id (STOP); ids that just end count as STOP.
      name: the endpoint's name.
      capacity: calls answered together; more are queued.
      version: the weights' version that every token carries.
      chunk_tokens: tokens per emitted chunk.
      delay_s: pause before each chunk.
    """

    def __init__(self, script: Script | Iterable[Answer], *, name: str = "scripted",
                 capacity: int = 8, version: int = 0, chunk_tokens: int = 1, delay_s: float = 0.0):
        self.name = name
        self.capacity = capacity
        self.version = version
        self.requests: list[CallRequest] = []  # in the order of submission
        self.cancelled: list[str] = []
        self.sampled: dict[str, list[int]] = {}  # call -> the ids it has had so far
        self._script = script if callable(script) else None
        self._answers = iter(()) if callable(script) else iter(script)
        self._chunk_tokens = chunk_tokens
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[EngineCall, Answer]] = queue.SimpleQueue()
        self._calls: dict[str, EngineCall] = {}
        self._threads = 0

    @property
    def in_flight(self) -> int:
        """Calls running or queued here."""
        return len(self._calls)

    def submit(self, call: EngineCall) -> None:
        """Starts a call. Raises EngineError when the script has no more answers."""
        with self._lock:
            answer = self._next_answer(call.request)
            self.requests.append(call.request)
            self._calls[call.request.call_id] = call
            self.sampled[call.request.call_id] = call.ids
            self._queue.put((call, answer))
            if self._threads < min(len(self._calls), self.capacity):
                self._threads += 1
                threading.Thread(target=self._work, name=self.name, daemon=True).start()

    def cancel(self, call_id: str) -> None:
        """Stops a call before its next chunk. Unknown ids are ignored."""
        with self._lock:
            call = self._calls.get(call_id)
            if call is not None:
                call.cancelled = True
                self.cancelled.append(call_id)

    def _next_answer(self, request: CallRequest) -> Answer:
        if self._script is not None:
            return self._script(request)
        try:
            return next(self._answers)
        except StopIteration:
            raise EngineError(f"{self.name}: the script has no answer for call "
                              f"{len(self.requests) + 1}; add one") from None

    def _work(self) -> None:
        while True:
            try:
                call, answer = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty():
                        self._threads -= 1
                        return
                continue
            last = self._play(call, answer)
            del self._calls[call.request.call_id]
            call.emit(last)

    def _play(self, call: EngineCall, answer: Answer) -> TokenChunk:
        """Emits all chunks of a call but the last, which is returned."""
        if isinstance(answer, Exception):
            return TokenChunk((), (), (), error=answer)
        if not isinstance(answer, ScriptedAnswer):
            answer = ScriptedAnswer(answer)
        delay_s = answer.delay_s or self._delay_s
        sampling = call.request.sampling
        ids = list(answer.ids)
        stop = next((i for i, t in enumerate(ids) if t in sampling.stop_ids), len(ids) - 1)
        ids = ids[:stop + 1]
        finish = answer.finish or FinishReason.STOP
        if len(ids) > sampling.max_tokens:
            ids, finish = ids[:sampling.max_tokens], FinishReason.LENGTH
        for start in range(len(call.ids), len(ids), self._chunk_tokens):  # it may come from another engine
            if delay_s:
                time.sleep(delay_s)
            if call.cancelled:
                return TokenChunk((), (), (), finish=FinishReason.CANCELLED)
            part = tuple(ids[start:start + self._chunk_tokens])
            logprobs = _logprobs(part, start)
            versions = (self.version,) * len(part)
            call.ids.extend(part)
            call.logprobs.extend(logprobs)
            call.versions.extend(versions)
            if start + len(part) == len(ids):
                return TokenChunk(part, logprobs, versions, finish=finish)
            call.emit(TokenChunk(part, logprobs, versions))
        return TokenChunk((), (), (), finish=finish)
