"""The loop that serves calls on one engine: admit, decode together, cancel, drain, hand over.

Owned by the cell's thread; only `submit`, `cancel` and the counters may be used from other threads.
Invariant: what a call emits depends only on its prompt, sampling parameters and the weights, not on
its slot, its neighbours, or how often it moved.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from typing import Any

import numpy as np

from gyre.base.enums import FinishReason
from gyre.base.errors import ContextOverflowError
from gyre.base.protocols import EngineCall, TokenChunk
from gyre.generation.engine import DecodeState, GyreEngine, Prefix
from gyre.generation.prefix_cache import PrefixCache


@dataclasses.dataclass(frozen=True)
class ParkedCall:
    """A call between engines.

    Attributes:
      call: with all that it has emitted.
      prefix: its KV on the source's devices, or None when it had none (queued, or KV cannot move).
      version: the weights that made the KV.
    """

    call: EngineCall
    prefix: Prefix | None
    version: int


@dataclasses.dataclass
class LoopStats:
    """Counters since the start: seconds at work, decode steps, tokens."""

    busy_s: float = 0.0
    decode_steps: int = 0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0


class DecodeLoop:
    """Continuous batching over the slots of one engine.

    Args:
      engine: the cell's engine.
      prefix_cache_bytes: KV kept for prompts to come.
    """

    def __init__(self, engine: GyreEngine, prefix_cache_bytes: int):
        self.engine = engine
        self.cache = PrefixCache(prefix_cache_bytes)
        self.stats = LoopStats()
        self.version = -1
        self.paused = False
        self._params: Any = None
        self._state: DecodeState | None = None
        self._slots: list[EngineCall | None] = [None] * engine.max_concurrent_decodes
        self._lock = threading.Lock()
        self._pending: collections.deque[ParkedCall] = collections.deque()
        self._cancelled: set[str] = set()

    # ------------------------------------------------------------------ from any thread

    def submit(self, call: EngineCall) -> None:
        """Queues a new call."""
        with self._lock:
            self._pending.append(ParkedCall(call, None, -1))

    def cancel(self, call_id: str) -> None:
        """Ends a call at the next step. Unknown ids are ignored."""
        with self._lock:
            self._cancelled.add(call_id)

    @property
    def in_flight(self) -> int:
        """Calls in slots or queued."""
        return len(self._pending) + self.live

    @property
    def live(self) -> int:
        """Calls in slots."""
        return sum(call is not None for call in self._slots)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return self.live > 0 or bool(self._cancelled) or (bool(self._pending) and not self.paused)

    # ------------------------------------------------------------------ from the owner

    def adopt(self, parked: ParkedCall) -> None:
        """Queues a call that may have begun elsewhere. KV of the same weights is moved here."""
        if parked.prefix is None or parked.version != self.version:
            with self._lock:
                self._pending.append(dataclasses.replace(parked, prefix=None))
            return
        here = dataclasses.replace(parked, prefix=self.engine.place(parked.prefix))
        with self._lock:
            self._pending.appendleft(here)  # calls under way go first

    def load(self, params: Any, version: int) -> None:
        """Takes new weights, already on this engine's mesh. No call may be in a slot.

        Raises:
          RuntimeError: calls are live; drain or export them first.
        """
        if self.live:
            raise RuntimeError(f"{self.live} calls are live; drain or export them before new weights")
        if version != self.version:
            self.cache.clear()
        self._params, self.version = params, version
        if self._state is None:
            self._state = self.engine.init_decode_state()

    def release(self) -> None:
        """Frees all KV; no call may be in a slot."""
        self.unload()
        self._state = None

    def unload(self) -> None:
        """Lets go of the weights and of the KV that belongs to them. No call may be in a slot."""
        if self.live:
            raise RuntimeError(f"{self.live} calls are live; drain or export them first")
        self._params = None
        self.cache.clear()

    def step(self) -> None:
        """Cancels, admits what fits, and samples one token for every live call."""
        began = time.monotonic()
        self._apply_cancellations()
        if not self.paused:
            self._admit()
        if self.live:
            self._decode()
        self.stats.busy_s += time.monotonic() - began

    def export(self) -> list[ParkedCall]:
        """Takes all calls off this loop, live ones with their KV, and pauses admission."""
        self.paused = True
        parked = []
        for slot, call in enumerate(self._slots):
            if call is not None:
                parked.append(ParkedCall(call, self._extract(slot, call), self.version))
                self._slots[slot] = None
        with self._lock:
            parked.extend(self._pending)
            self._pending.clear()
            cancelled, self._cancelled = self._cancelled, set()
        for p in parked:
            if p.call.request.call_id in cancelled:
                p.call.cancelled = True  # its next loop ends it
        return parked

    # ------------------------------------------------------------------ internals

    def _apply_cancellations(self) -> None:
        with self._lock:
            ids, self._cancelled = self._cancelled, set()
            queued = [p for p in self._pending
                      if p.call.cancelled or p.call.request.call_id in ids]
            for p in queued:
                self._pending.remove(p)
        for p in queued:
            self._end(p.call, FinishReason.CANCELLED)
        for slot, call in enumerate(self._slots):
            if call is not None and (call.cancelled or call.request.call_id in ids):
                self._slots[slot] = None
                self._end(call, FinishReason.CANCELLED)

    def _admit(self) -> None:
        for slot, occupant in enumerate(self._slots):
            if occupant is not None:
                continue
            with self._lock:
                if not self._pending:
                    return
                parked = self._pending.popleft()
            prefix = self._prefix_for(parked)
            if prefix is not None:
                self._state = self.engine.insert(prefix, self._state, slot)
                self._slots[slot] = parked.call

    def _prefix_for(self, parked: ParkedCall) -> Prefix | None:
        """KV for a call to start or go on with; None when the call is refused."""
        call, sampling = parked.call, parked.call.request.sampling
        if parked.prefix is not None and parked.version == self.version:
            return parked.prefix
        tokens = np.concatenate([call.request.prompt_ids, np.asarray(call.ids, np.int32)])
        limit = self.engine.config.max_context_tokens
        if tokens.size >= limit:
            call.emit(TokenChunk((), (), (), error=ContextOverflowError(tokens.size, limit)))
            return None
        cached = self.cache.match(tokens)
        known = cached.kv_tokens + 1 if cached is not None else 0
        if known < tokens.size:
            cached = self.engine.prefill(params=self._params, existing_prefix=cached,
                                         padded_tokens=tokens[known:], true_length=tokens.size - known)
            self.stats.prefilled_tokens += tokens.size - known
            self.cache.put(tokens[:-1], cached)
        return cached.replace(seed=sampling.seed, temperature=sampling.temperature)

    def _decode(self) -> None:
        longest = max(self._kv_tokens(c) for c in self._slots if c is not None)
        self._state, result = self.engine.generate(
            self._params, self._state, self.engine.config.bucket(longest + 1))
        data = np.asarray(result.data)
        logprobs = np.ascontiguousarray(data[:, 3]).view(np.float32)
        self.stats.decode_steps += 1
        for slot, call in enumerate(self._slots):
            if call is not None:
                self.stats.sampled_tokens += 1
                self._take_token(slot, call, int(data[slot, 0]), float(logprobs[slot]))

    def _take_token(self, slot: int, call: EngineCall, token: int, logprob: float) -> None:
        sampling = call.request.sampling
        finish = None
        if token in sampling.stop_ids:
            finish = FinishReason.STOP
        elif (len(call.ids) + 1 >= sampling.max_tokens
              or call.request.prompt_ids.size + len(call.ids) + 1 >= self.engine.config.max_context_tokens):
            finish = FinishReason.LENGTH
        call.ids.append(token)
        call.logprobs.append(logprob)
        call.versions.append(self.version)
        if finish is not None:
            tokens = np.concatenate([call.request.prompt_ids, np.asarray(call.ids[:-1], np.int32)])
            self.cache.put(tokens, self._extract(slot, call))
            self._slots[slot] = None
        call.emit(TokenChunk((token,), (logprob,), (self.version,), finish=finish))

    def _kv_tokens(self, call: EngineCall) -> int:
        return call.request.prompt_ids.size + len(call.ids) - 1

    def _extract(self, slot: int, call: EngineCall) -> Prefix:
        sampling = call.request.sampling
        last = call.ids[-1] if call.ids else int(call.request.prompt_ids[-1])
        return self.engine.extract(self._state, slot, kv_tokens=self._kv_tokens(call), last_token=last,
                                   seed=sampling.seed, temperature=sampling.temperature)

    @staticmethod
    def _end(call: EngineCall, reason: FinishReason) -> None:
        call.emit(TokenChunk((), (), (), finish=reason))
