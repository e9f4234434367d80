"""aiohttp's low-level server with the gateway's limits, and with error bodies that harnesses can read."""

from __future__ import annotations

import ipaddress
import json
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web, web_protocol

from gyre.gateway.limits import GatewayLimits

_LINGERING_S = 2.0  # a refused body is still read this long, so that its client sees the answer
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
FormatError = Callable[[int, str], dict[str, Any]]  # status, message -> body


class _Connection(web_protocol.RequestHandler):
    """One connection. What goes wrong outside of a handler has the same shape as what goes wrong in it."""

    format_error: FormatError

    def handle_error(self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None,
                     message: str | None = None) -> web.StreamResponse:
        if status >= 500:
            self.log_exception("the gateway failed to answer a request", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun; an error cannot follow it")
        text = message if status < 500 and message else "the gateway failed; its log says why"
        response = web.Response(status=status, body=json.dumps(self.format_error(status, text)).encode(),
                                content_type="application/json")
        response.force_close()
        return response


class HttpServer:
    """Listens, hands requests to `handler`, and cancels it when the client goes away.

    Args:
      handler: answers a request; what it raises becomes a 500.
      limits: of sizes and times.
      format_error: the body for errors that no handler saw.
    """

    def __init__(self, handler: Handler, limits: GatewayLimits, format_error: FormatError):
        self._handler, self._limits, self._format_error = handler, limits, format_error
        self._runner: web.ServerRunner | None = None

    async def start(self, host: str, port: int, ssl_context: ssl.SSLContext | None,
                    allow_remote: bool) -> str:
        """Listens. Returns the server's URL.

        Raises:
          ValueError: the host is not this machine's loopback, and `allow_remote` is not set.
        """
        if not is_loopback(host):
            if not allow_remote:
                raise ValueError(
                    f"host {host!r} can be reached from other machines; use 127.0.0.1, or allow remote "
                    "clients explicitly (allow_remote=True), with a TLS certificate")
            if ssl_context is None:
                logging.getLogger(__name__).warning(
                    "the gateway listens on %s without TLS: keys and texts can be read on the way", host)
        server = _Server(self._handler, self._limits, self._format_error)
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, ssl_context=ssl_context, backlog=1024)
        await site.start()
        name = f"[{host}]" if ":" in host else host
        return f"http{'s' if ssl_context else ''}://{name}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Stops listening and ends open connections."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


class _Server(web.Server):
    def __init__(self, handler: Handler, limits: GatewayLimits, format_error: FormatError):
        # Cancelled handlers are how a client's disconnect reaches the engine.
        super().__init__(handler, request_factory=self._request, handler_cancellation=True)
        self._limits = limits
        self._connection = type("Connection", (_Connection,), {"format_error": staticmethod(format_error)})

    def __call__(self) -> web_protocol.RequestHandler:
        size = self._limits.header_bytes
        return self._connection(
            self, loop=self._loop, keepalive_timeout=self._limits.idle_timeout_s, access_log=None,
            max_line_size=size, max_field_size=size, lingering_time=_LINGERING_S)

    def _request(self, message, payload, protocol, writer, task) -> web.BaseRequest:
        return web.BaseRequest(message, payload, protocol, writer, task, self._loop,
                               client_max_size=self._limits.body_bytes)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
