"""Writes one answer to a client and knows when its last byte has left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from aiohttp import web

from gyre.base.enums import FinishReason
from gyre.base.protocols import CompletionStream, Message
from gyre.gateway.dialects import Conversation, Dialect, Reply, ReplyHead, RequestError
from gyre.gateway.limits import GatewayLimits
from gyre.gateway.pending import PendingCall

_DRAIN_POLL_S = 0.005


class Answer:
    """One answer, streamed or not. Nothing is sent before there is something to say, or a keep-alive.

    Args:
      request: the client's.
      dialect: formats.
      conversation: what was asked.
      pending: the call, whose ids grow.
      head: what is known beforehand.
      completion: reads the ids for live streaming; None holds a streamed answer back until it is whole.
      limits: of time.
      on_keep_alive: called after each.
    """

    def __init__(self, request: web.Request, dialect: Dialect, conversation: Conversation,
                 pending: PendingCall, head: ReplyHead, completion: CompletionStream | None,
                 limits: GatewayLimits, on_keep_alive: Callable[[], None]):
        self._request, self._dialect, self._conversation = request, dialect, conversation
        self._pending, self._head, self._completion = pending, head, completion
        self._limits, self._on_keep_alive = limits, on_keep_alive
        self._events = dialect.stream(conversation, head) if conversation.stream else None
        self._read = 0  # ids that `completion` has taken
        self._writing = asyncio.Lock()
        self._last_write_s = asyncio.get_running_loop().time()
        self.response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        """Whether the status line is out."""
        return self.response is not None

    async def advance(self) -> None:
        """Streams what is sure of the ids so far. Raises ConnectionError when the client has gone."""
        new = self._pending.ids[self._read:]
        if self._completion is None or not new:
            return
        self._read += len(new)
        reasoning, content = self._completion.push(new)
        if reasoning or content:
            await self._write(self._events.delta(reasoning, content))

    async def keep_alive(self) -> None:
        """Breaks long silences of a stream until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            wait_s = self._last_write_s + self._limits.keep_alive_s - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            try:
                await self._write(self._events.keep_alive())
            except ConnectionError:
                return  # whoever writes the answer finds out, too
            self._on_keep_alive()

    async def finish(self, message: Message, finish: FinishReason) -> web.StreamResponse:
        """Sends the (rest of the) answer. Raises ConnectionError when the client has gone."""
        reply = Reply(self._head, message, finish, len(self._pending.ids))
        if self._events is not None:
            await self._write(self._events.end(reply))
        else:
            body = json.dumps(self._dialect.format_reply(self._conversation, reply), ensure_ascii=False)
            self.response = web.Response(body=body.encode(), content_type="application/json")
            await self.response.prepare(self._request)
        await self.response.write_eof()
        await self._drain()
        return self.response

    async def fail(self, error: RequestError) -> web.StreamResponse:
        """Ends a stream that has begun with an error event."""
        try:
            await self._write(self._events.fail(error))
            await self.response.write_eof()
        except ConnectionError:
            pass  # nobody listens; the record says undelivered already
        return self.response

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        async with self._writing:
            if self.response is None:
                self.response = web.StreamResponse(headers={
                    "Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache",
                    "X-Accel-Buffering": "no"})
                await self.response.prepare(self._request)
            try:
                async with asyncio.timeout(self._limits.write_timeout_s):
                    await self.response.write(data)
            except TimeoutError:
                raise self._too_slow() from None
            self._last_write_s = asyncio.get_running_loop().time()

    async def _drain(self) -> None:
        """Waits until the kernel has everything."""
        deadline_s = asyncio.get_running_loop().time() + self._limits.write_timeout_s
        while True:
            transport = self._request.transport
            if transport is None or transport.is_closing():
                raise ConnectionResetError("the client closed the connection")
            if transport.get_write_buffer_size() == 0:
                return
            if asyncio.get_running_loop().time() > deadline_s:
                raise self._too_slow()
            await asyncio.sleep(_DRAIN_POLL_S)

    def _too_slow(self) -> ConnectionError:
        if self._request.transport is not None:
            self._request.transport.abort()
        return ConnectionResetError(
            f"the client took nothing for {self._limits.write_timeout_s:g} s")
