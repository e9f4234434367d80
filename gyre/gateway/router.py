"""Chooses an engine for each call.

The engine that ran the call which a prompt continues has its keys and values; another call of the execution,
or of another execution with the same beginning, may share a prefix.

Invariant: a call is handed to exactly one endpoint. Endpoints come and go at any time and from any
thread; a call that finds none waits. The router does not follow calls that move between endpoints.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import threading
from collections.abc import Sequence

import numpy as np

from gyre.base.errors import EngineError, NoEngineError
from gyre.base.protocols import CallRequest, EngineCall, EngineEndpoint

_BLOCKS_TOKENS = (64, 256, 1024, 4096)  # prefixes of these lengths are remembered
_MAX_ATTEMPTS = 3


class Router:
    """Prefix affinity first, load second.

    A call goes where the call that it continues ran; else where its execution's last call went; else where
    the longest known prefix of its prompt was last sent. If that endpoint is full while another has a free
    slot, or nothing is known, it goes to the endpoint with the least load for its capacity; on a tie to the
    one that was added first.

    Args:
      remembered: how many calls, executions and prefixes are kept together; the least recently used go
        first.
    """

    def __init__(self, remembered: int = 32768):
        self._lock = threading.Lock()
        self._endpoints: dict[str, EngineEndpoint] = {}
        self._places: collections.OrderedDict[tuple[str, str | bytes], str] = collections.OrderedDict()
        self._remembered = remembered
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._sent: dict[str, EngineEndpoint] = {}

    # ------------------------------------------------------------------ from any thread

    def add(self, endpoint: EngineEndpoint) -> None:
        """Takes an endpoint into service and wakes the calls that wait.

        Raises:
          ValueError: another endpoint has this name.
        """
        with self._lock:
            if self._endpoints.get(endpoint.name, endpoint) is not endpoint:
                raise ValueError(f"an endpoint named {endpoint.name!r} exists; remove it first")
            self._endpoints[endpoint.name] = endpoint
            waiters = list(self._waiters)
        for loop, event in waiters:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # that loop has ended, and its calls with it
                continue

    def remove(self, name: str) -> None:
        """Takes an endpoint out: it gets no new calls; its running calls are not touched."""
        with self._lock:
            self._endpoints.pop(name, None)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Names of the endpoints in service, in the order they were added."""
        with self._lock:
            return tuple(self._endpoints)

    def pick(self, request: CallRequest) -> EngineEndpoint | None:
        """The endpoint for a call, remembered for those that follow; None if there is none."""
        prefixes = _prefix_keys(request.prompt_ids)
        with self._lock:
            if not self._endpoints:
                return None
            known = [("call", request.continues)] if request.continues else []
            chosen = self._choose([*known, ("execution", request.execution_id), *reversed(prefixes)])
            for key in (("call", request.call_id), ("execution", request.execution_id), *prefixes):
                self._places[key] = chosen.name
                self._places.move_to_end(key)
            while len(self._places) > self._remembered:
                self._places.popitem(last=False)
            return chosen

    def cancel(self, call: EngineCall) -> None:
        """Stops a call wherever it is, also when it has moved."""
        call.cancelled = True  # for a loop that takes it over later
        call_id = call.request.call_id
        with self._lock:
            places = dict(self._endpoints)
            sent = self._sent.get(call_id)
        if sent is not None:
            places[sent.name] = sent  # it may have left service
        for endpoint in places.values():
            endpoint.cancel(call_id)

    def forget(self, call_id: str) -> None:
        """Says that a call has ended."""
        with self._lock:
            self._sent.pop(call_id, None)

    # ------------------------------------------------------------------ from a loop

    async def submit(self, call: EngineCall, timeout_s: float) -> EngineEndpoint:
        """Hands a call to an endpoint; waits for one while there is none.

        Raises:
          NoEngineError: none came within `timeout_s`.
      EngineError: several refused the call.
        """
        endpoint = self.pick(call.request)
        try:
            if endpoint is not None and self._hand_over(call, endpoint):
                return endpoint  # as nearly always
            async with asyncio.timeout(timeout_s):
                return await self._submit(call)
        except TimeoutError as e:
            raise NoEngineError(
                f"no engine took the call within {timeout_s:g} s; endpoints in service: "
                f"{', '.join(self.endpoints) or 'none'}") from e

    # ------------------------------------------------------------------ internals

    async def _submit(self, call: EngineCall) -> EngineEndpoint:
        attempt = 0
        while True:
            endpoint = await self._wait_for_one(call.request)
            attempt += 1
            if self._hand_over(call, endpoint, last_try=attempt == _MAX_ATTEMPTS):
                return endpoint
            await asyncio.sleep(0.05 * attempt)

    def _hand_over(self, call: EngineCall, endpoint: EngineEndpoint, last_try: bool = False) -> bool:
        """Submits a call. Returns False when the endpoint refused it."""
        with self._lock:
            self._sent[call.request.call_id] = endpoint
        try:
            endpoint.submit(call)
        except EngineError:  # it stopped after it was picked
            if last_try:
                raise
            return False
        return True

    async def _wait_for_one(self, request: CallRequest) -> EngineEndpoint:
        while (endpoint := self.pick(request)) is None:
            waiter = (asyncio.get_running_loop(), asyncio.Event())
            with self._lock:
                self._waiters.add(waiter)
                arrived = bool(self._endpoints)
            try:
                if not arrived:
                    await waiter[1].wait()
            finally:
                with self._lock:
                    self._waiters.discard(waiter)
        return endpoint

    def _choose(self, keys: Sequence[tuple[str, str | bytes]]) -> EngineEndpoint:
        """The endpoint in service that the first known key names, if it has room; else the least loaded."""
        loads = {name: (e.in_flight, e.capacity) for name, e in self._endpoints.items()}
        someone_is_free = any(n < capacity for n, capacity in loads.values())
        for key in keys:
            name = self._places.get(key)
            if name in loads:
                n, capacity = loads[name]
                if n < capacity or not someone_is_free:
                    return self._endpoints[name]
                break
        least = min(loads, key=lambda name: loads[name][0] / max(loads[name][1], 1))
        return self._endpoints[least]


def _prefix_keys(prompt_ids: np.ndarray) -> list[tuple[str, bytes]]:
    """Keys for the prompt's first tokens, short prefixes first; a short prompt counts as a whole.

    The cost does not grow with the prompt.
    """
    data = np.ascontiguousarray(prompt_ids[:_BLOCKS_TOKENS[-1]], np.int32)
    sizes = [n for n in _BLOCKS_TOKENS if n <= data.size] or [data.size]
    return [("prefix", hashlib.blake2b(data[:n].tobytes(), digest_size=16).digest()) for n in sizes]
