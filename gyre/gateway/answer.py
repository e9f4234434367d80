"""Writes one answer to a client and knows when its last byte has left."""

from __future__ import annotations

import asyncio
import json
from types import ModuleType

from aiohttp import web

from gyre.base.enums import FinishReason
from gyre.base.protocols import Message, ParsedCompletion
from gyre.gateway.dialects import Conversation, Reply, RequestError
from gyre.gateway.session import PendingCall

_DRAIN_POLL_S = 0.005


class Answer:
    """One answer, streamed or not.

    Args:
      request: the client's.
      dialect: the module that formats.
      conversation: what was asked.
      pending: the call; read when the answer is finished.
      created_s: seconds since the epoch.
    """

    def __init__(self, request: web.Request, dialect: ModuleType, conversation: Conversation,
                 pending: PendingCall, created_s: int):
        self._request = request
        self._dialect = dialect
        self._conversation = conversation
        self._pending = pending
        self._created_s = created_s
        self._reply_id = "chatcmpl-" + pending.call_id.removeprefix("req-")
        self._stream = dialect.ChatStream(self._reply_id, conversation.model, created_s)
        self.response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        """Whether the status line is out."""
        return self.response is not None

    async def advance(self, stable: ParsedCompletion) -> None:
        """Streams what is new of an unfinished completion."""
        if events := self._stream.advance(stable.reasoning, stable.content):
            await self._write(events)

    async def finish(self, message: Message, finish: FinishReason) -> web.StreamResponse:
        """Sends the (rest of the) answer. Raises ConnectionError when the client has gone."""
        reply = Reply(self._reply_id, self._conversation.model, self._created_s, message, finish,
                      int(self._pending.request.prompt_ids.size), len(self._pending.ids))
        if self._conversation.stream:
            await self._write(self._stream.end(reply, self._conversation.include_usage))
        else:
            body = json.dumps(self._dialect.format_reply(reply), ensure_ascii=False).encode()
            self.response = web.Response(body=body, content_type="application/json")
            await self.response.prepare(self._request)
        await self.response.write_eof()
        await self._drain()
        return self.response

    async def fail(self, error: RequestError) -> web.StreamResponse:
        """Ends a stream that has begun with an error event."""
        try:
            await self._write(self._stream.fail(error))
            await self.response.write_eof()
        except ConnectionError:
            pass  # nobody listens; the record says undelivered already
        return self.response

    async def _write(self, data: bytes) -> None:
        if self.response is None:
            self.response = web.StreamResponse(headers={
                "Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"})
            await self.response.prepare(self._request)
        await self.response.write(data)

    async def _drain(self) -> None:
        """Waits until the kernel has everything."""
        while True:
            transport = self._request.transport
            if transport is None or transport.is_closing():
                raise ConnectionResetError("the client closed the connection")
            if transport.get_write_buffer_size() == 0:
                return
            await asyncio.sleep(_DRAIN_POLL_S)
