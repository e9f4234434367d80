"""One call on its engines: submitted, followed where it moves, given to another engine when one fails."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable

from gyre.base.enums import FinishReason
from gyre.base.errors import ContextOverflowError, EngineError, NoEngineError
from gyre.base.protocols import EngineCall, TokenChunk
from gyre.gateway.limits import GatewayLimits
from gyre.gateway.pending import PendingCall
from gyre.gateway.router import Router

_FIRST_PAUSE_S = 0.05


class EngineRun:
    """Runs a pending call to its end.

    A failed engine is no failure of the call: it is submitted again and goes on behind the tokens that it
    has, up to `limits.engine_retries` times. Cancelling `run` stops the call on its engine.

    Args:
      router: chooses engines.
      pending: takes the tokens.
      limits: of time and retries.
      on_retry: called as on_retry(error) before another engine is tried.
    """

    def __init__(self, router: Router, pending: PendingCall, limits: GatewayLimits,
                 on_retry: Callable[[EngineError], None]):
        self._router, self._pending, self._limits, self._on_retry = router, pending, limits, on_retry
        self._loop = asyncio.get_running_loop()
        self._chunks: collections.deque[TokenChunk] = collections.deque()
        self._arrived = asyncio.Event()
        self._awake = False

    async def run(self, advance: Callable[[], Awaitable[None]] | None) -> FinishReason:
        """Returns why the completion ended. `advance` is awaited after new tokens.

        Raises:
          ContextOverflowError: the engine's context is smaller than the prompt.
          EngineError: no engine finished the call.
        """
        for attempt in range(self._limits.engine_retries + 1):
            try:
                return await self._once(advance)
            except EngineError as error:
                if attempt == self._limits.engine_retries or isinstance(error, NoEngineError):
                    raise
                self._on_retry(error)
                await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _once(self, advance: Callable[[], Awaitable[None]] | None) -> FinishReason:
        self._chunks.clear()
        p = self._pending
        call = EngineCall(p.request, self._emit, list(p.ids), list(p.logprobs), list(p.versions))
        ended = False
        try:
            await self._router.submit(call, self._limits.engine_timeout_s)
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                self._awake = False
                while self._chunks:
                    chunk = self._chunks.popleft()
                    p.take(chunk)
                    if chunk.error is not None or chunk.finish is not None:
                        ended = True
                        return _finish(chunk)
                if advance is not None:
                    await advance()
        finally:
            if not ended:
                self._router.cancel(call)
            self._router.forget(p.call_id)

    def _emit(self, chunk: TokenChunk) -> None:
        """Called on an engine's thread. Wakes the loop once for any number of chunks."""
        self._chunks.append(chunk)
        if not self._awake:
            self._awake = True
            try:
                self._loop.call_soon_threadsafe(self._arrived.set)
            except RuntimeError:  # the loop has ended; nobody waits for these tokens
                return


def _finish(last: TokenChunk) -> FinishReason:
    """The finish reason of a call's last chunk. Raises the engine's error as one of ours."""
    if isinstance(last.error, ContextOverflowError | EngineError):
        raise last.error
    if last.error is not None:
        raise EngineError(f"the engine failed: {last.error!r}") from last.error
    if last.finish is FinishReason.CANCELLED:
        raise EngineError("the engine stopped this call")
    return last.finish
