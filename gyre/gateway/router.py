"""Chooses an engine for each call.

Invariant: a call is handed to exactly one endpoint. Endpoints come and go at any time and from any
thread; a call that finds none waits. The router does not follow calls that move between endpoints.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import threading

import numpy as np

from gyre.base.errors import EngineError
from gyre.base.protocols import EngineCall, EngineEndpoint

_FIRST_BLOCK_TOKENS = 64  # prefixes of 64, 128, 256, ... tokens are remembered
_MAX_ATTEMPTS = 3


class Router:
    """Prefix affinity first, load second.

    A call goes where the longest known prefix of its prompt was last sent, unless that endpoint is
    full while another has a free slot. Otherwise it goes to the endpoint with the least load for
    its capacity; on a tie to the one that was added first.

    Args:
      remembered_prefixes: how many prefixes are kept, the least recently used go first.
    """

    def __init__(self, remembered_prefixes: int = 8192):
        self._lock = threading.Lock()
        self._endpoints: dict[str, EngineEndpoint] = {}
        self._prefixes: collections.OrderedDict[bytes, str] = collections.OrderedDict()
        self._remembered = remembered_prefixes
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

    def pick(self, prompt_ids: np.ndarray) -> EngineEndpoint | None:
        """The endpoint for a prompt i32[P], remembered for its prefixes; None if there is none."""
        keys = _prefix_keys(prompt_ids)
        with self._lock:
            if not self._endpoints:
                return None
            chosen = self._choose(keys)
            for key in keys:
                self._prefixes[key] = chosen.name
                self._prefixes.move_to_end(key)
            while len(self._prefixes) > self._remembered:
                self._prefixes.popitem(last=False)
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
          EngineError: none came within `timeout_s`, or several refused the call.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._submit(call)
        except TimeoutError as e:
            raise EngineError(
                f"no engine took the call within {timeout_s:g} s; endpoints in service: "
                f"{', '.join(self.endpoints) or 'none'}") from e

    # ------------------------------------------------------------------ internals

    async def _submit(self, call: EngineCall) -> EngineEndpoint:
        attempt = 0
        while True:
            endpoint = await self._wait_for_one(call.request.prompt_ids)
            with self._lock:
                self._sent[call.request.call_id] = endpoint
            try:
                endpoint.submit(call)
            except EngineError:  # it stopped after it was picked
                attempt += 1
                if attempt == _MAX_ATTEMPTS:
                    raise
                await asyncio.sleep(0.05 * attempt)
            else:
                return endpoint

    async def _wait_for_one(self, prompt_ids: np.ndarray) -> EngineEndpoint:
        while (endpoint := self.pick(prompt_ids)) is None:
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

    def _choose(self, keys: list[bytes]) -> EngineEndpoint:
        loads = {name: (e.in_flight, e.capacity) for name, e in self._endpoints.items()}
        someone_is_free = any(n < capacity for n, capacity in loads.values())
        for key in reversed(keys):
            name = self._prefixes.get(key)
            if name in loads:
                n, capacity = loads[name]
                if n < capacity or not someone_is_free:
                    return self._endpoints[name]
                break
        least = min(loads, key=lambda name: loads[name][0] / max(loads[name][1], 1))
        return self._endpoints[least]


def _prefix_keys(prompt_ids: np.ndarray) -> list[bytes]:
    """Hashes of the prompt's first 64, 128, 256, ... tokens and of the whole, short ones first.

    A prompt that grows turn by turn, and the prompts of one group, share all but their last ones.
    """
    data = np.ascontiguousarray(prompt_ids, np.int32)
    keys = []
    size = _FIRST_BLOCK_TOKENS
    while size < data.size:
        keys.append(hashlib.blake2b(data[:size].tobytes(), digest_size=16).digest())
        size *= 2
    keys.append(hashlib.blake2b(data.tobytes(), digest_size=16).digest())
    return keys
