"""The http face of the gateway: harnesses talk to it as if to their vendor's API, records come out.

Invariants:
  * A key belongs to one execution and sees nothing of any other.
  * An answer counts as delivered only after its last byte was written to a living connection.
  * Nothing is sent before there is text that no engine trouble can take back; until then, and after it
    as long as an engine goes on, trouble is not seen by the client.
  * Every error has the shape of the dialect that was spoken.

All http runs on the event loop that called `start`. `open_execution` and `close_execution` may be
called from any thread.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from gyre.base.enums import FinishReason
from gyre.base.errors import ContextOverflowError, EngineError
from gyre.base.protocols import ChatCodec
from gyre.gateway.answer import Answer
from gyre.gateway.dialects import Conversation, Dialect, ReplyHead, RequestError
from gyre.gateway.engine_run import EngineRun
from gyre.gateway.executions import Executions, key_and_path
from gyre.gateway.history import turn_id
from gyre.gateway.http_server import HttpServer
from gyre.gateway.limits import GatewayLimits
from gyre.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from gyre.gateway.pending import PendingCall
from gyre.gateway.router import Router
from gyre.gateway.routes import ended, no_route, overflow, refusals, route, unhandled
from gyre.gateway.session import Session, SessionClosedError
from gyre.trajectory.agent_roles import RoleRules
from gyre.trajectory.record import CallRecord

_LIMITS = GatewayLimits()


class Gateway:
    """Serves executions, on loopback unless told otherwise.

    Args:
      codec: conversation <-> ids of the served model.
      router: chooses engines.
      model_name: the model that lists of models give first.
      role_rules: tell which agent made a call.
      max_context_tokens: of the model, prompt and completion together.
      model_aliases: further names that are accepted and listed.
      accept_any_model: take every name; harnesses ask for side requests by names of their own.
      history: "exact" or "template" (see `Session`).
      limits: what a client is granted.
      live_streaming: send text of streamed answers while it is sampled; else when the call has ended, so
        that an engine's final failure is always a clean 5xx, which every client retries.
      on_event: called as on_event(kind, **fields) for telemetry, kinds `call`, `retry`, `engine_retry`,
        `request_error`; it must not block.
      clock: seconds since the epoch.
    """

    def __init__(self, codec: ChatCodec, router: Router, *, model_name: str,
                 role_rules: RoleRules, max_context_tokens: int,
                 model_aliases: Sequence[str] = (), accept_any_model: bool = False,
                 history: str = "exact", limits: GatewayLimits = _LIMITS,
                 live_streaming: bool = True, on_event: Callable[..., None] | None = None,
                 clock: Callable[[], float] = time.time):
        self._codec, self._router = codec, router
        self._models, self._any_model = (model_name, *model_aliases), accept_any_model
        self._role_rules = role_rules
        self._max_context_tokens = max_context_tokens
        self._history = history
        self._limits = limits
        self._live_streaming = live_streaming
        self._on_event = on_event or (lambda kind, **fields: None)
        self._clock = clock
        self._executions = Executions()
        self._tasks: dict[Session, set[asyncio.Task]] = {}
        self._running: collections.Counter[Session] = collections.Counter()
        self._http = HttpServer(self._handle, limits, unhandled)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.metrics = GatewayMetrics()
        self.metrics.executions.set_function(lambda: len(self._executions))

    # ------------------------------------------------------------------ life

    async def start(self, host: str = "127.0.0.1", port: int = 0, *,
                    ssl_context: ssl.SSLContext | None = None, allow_remote: bool = False) -> str:
        """Listens, on a free port when `port` is 0. Returns the base URL, which ends in /v1.

        Raises:
          ValueError: other machines could reach `host`, and `allow_remote` is not set.
        """
        self._loop = asyncio.get_running_loop()
        return await self._http.start(host, port, ssl_context, allow_remote) + "/v1"

    async def stop(self) -> None:
        """Cancels all calls and stops listening. Executions still open keep their records."""
        for tasks in list(self._tasks.values()):
            for task in list(tasks):
                task.cancel()
        await self._http.stop()

    def open_execution(self, execution_id: str, *, seed: int, temperature: float,
                       max_completion_tokens: int) -> str:
        """Makes a key for an execution. How it samples is decided here, not by its client.

        Raises:
          ValueError: the execution is open already, or the sampling cannot work.
        """
        return self._executions.open(Session(
            execution_id, self._codec, self._role_rules, seed=seed, temperature=temperature,
            max_completion_tokens=max_completion_tokens, max_context_tokens=self._max_context_tokens,
            history=self._history, clock=self._clock))

    def close_execution(self, execution_id: str) -> list[CallRecord]:
        """Ends an execution: running calls are cancelled, the key is dead. Returns its records.

        Raises:
          KeyError: no such execution is open.
        """
        session = self._executions.close(execution_id)
        records = session.close()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel_tasks, session)
        return records

    def _cancel_tasks(self, session: Session) -> None:
        for task in list(self._tasks.get(session, ())):
            task.cancel()

    # ------------------------------------------------------------------ http

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        key, path = key_and_path(request.path, request.headers, lambda: request.query)
        if request.method == "HEAD" and path.rstrip("/") in ("", "/v1"):
            return web.Response()
        if request.method == "GET" and request.path in ("/healthz", "/metrics"):
            return self._page(request.path)
        dialect, operation, groups = route(request.method, path.rstrip("/"), request.headers)
        execution = None
        try:
            session = self._session(key)
            execution = session.execution_id
            if operation is None:
                raise no_route(request.method, path)
            response = await self._operate(request, session, dialect, operation, groups)
            self.metrics.requests.labels(dialect.name, response.status).inc()
            return response
        except RequestError as e:
            self._on_event("request_error", status=e.status, code=e.code, message=e.message,
                           execution=execution)
            self.metrics.requests.labels(dialect.name, e.status).inc()
            headers = {} if e.retry_after_s is None else {"Retry-After": str(e.retry_after_s)}
            response = web.json_response(dialect.format_error(e), status=e.status, headers=headers)
            if e.status in (408, 413):
                response.force_close()  # the rest of the body may never come
            return response

    def _page(self, path: str) -> web.Response:
        if path == "/metrics":
            return web.Response(body=self.metrics.page(), headers={"Content-Type": CONTENT_TYPE})
        return web.json_response({"status": "ok", "engines": len(self._router.endpoints),
                                  "executions": len(self._executions)})

    def _session(self, key: str) -> Session:
        session, has_ended = self._executions.find(key)
        if has_ended:
            raise ended()
        if session is None:
            raise RequestError(401, "unknown API key; send the execution's key as a bearer token, "
                               "as x-api-key, or in the path /s/KEY/v1", code="invalid_api_key")
        return session

    async def _operate(self, request: web.BaseRequest, session: Session, dialect: Dialect, operation: str,
                       groups: Mapping[str, str]) -> web.StreamResponse:
        if operation == "models":
            return web.json_response(dialect.format_models(self._models, int(self._clock())))
        conversation = dialect.parse_request(await self._body(request), **groups)
        if not self._any_model and conversation.model not in self._models:
            raise RequestError(404, f"unknown model {conversation.model!r}; served: "
                               f"{', '.join(self._models)}", code="model_not_found", param="model")
        if operation == "count":
            with refusals():
                tokens = session.count_tokens(conversation.messages, conversation.tools,
                                              conversation.previous_id)
            return web.json_response(dialect.format_count(tokens))
        limits, running = self._limits, self._running
        if running[session] >= limits.calls_per_execution or running.total() >= limits.calls:
            raise RequestError(
                429, f"{running[session]} calls of this execution and {running.total()} in all are running; "
                f"at most {limits.calls_per_execution} and {limits.calls} may; try again later",
                code="rate_limit_exceeded", retry_after_s=limits.retry_after_s)
        running[session] += 1
        try:
            return await self._call(request, session, dialect, conversation)
        finally:
            running[session] -= 1
            if not running[session]:
                del running[session]

    async def _body(self, request: web.BaseRequest) -> bytes:
        too_large = RequestError(413, f"the body is larger than {self._limits.body_bytes} bytes; shorten the "
                                 "messages", code="request_too_large")
        if (request.content_length or 0) > self._limits.body_bytes:
            raise too_large
        try:
            if request.content.is_eof():  # all of it is here
                return await request.read()
            async with asyncio.timeout(self._limits.body_timeout_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge as e:
            raise too_large from e
        except TimeoutError as e:
            raise RequestError(408, f"the body did not arrive within {self._limits.body_timeout_s:g} s",
                               code="request_timeout") from e
        except (web.RequestPayloadError, aiohttp.http_exceptions.HttpProcessingError) as e:
            raise RequestError(400, f"the body cannot be read: {e}", code="invalid_body") from e

    # ------------------------------------------------------------------ one call

    async def _call(self, request: web.BaseRequest, session: Session, dialect: Dialect,
                    conversation: Conversation) -> web.StreamResponse:
        pending = self._open(request, session, dialect, conversation)
        head = ReplyHead(turn_id(pending.call_id), conversation.model, int(self._clock()),
                         int(pending.request.prompt_ids.size))
        live = conversation.stream and self._live_streaming
        answer = Answer(request, dialect, conversation, pending, head, self._codec.stream() if live else None,
                        self._limits, self.metrics.keep_alives.inc)
        delivered = False
        self.metrics.running.inc()
        try:
            async with _background(answer.keep_alive() if conversation.stream else None):
                finish = await self._generate(session, pending, answer.advance)
            message = session.answer(pending, finish)
            response = await answer.finish(message, finish)
            # No await since the last byte: the harness may end the execution right after it.
            session.delivered(pending)
            delivered = True
            return response
        except RequestError as e:
            session.abandon(pending, error=e.message)
            if answer.begun:
                return await answer.fail(e)
            raise
        except SessionClosedError:
            if answer.begun:
                return await answer.fail(ended())
            raise ended() from None
        except ConnectionError:  # the client left while we wrote
            return answer.response or web.Response()
        finally:
            record = session.abandon(pending)
            self._ended_call(record, pending, delivered)

    def _open(self, request: web.BaseRequest, session: Session, dialect: Dialect,
              conversation: Conversation) -> PendingCall:
        metadata: dict[str, Any] = {"dialect": dialect.name, "model": conversation.model,
                                    "stream": conversation.stream}
        if conversation.ignored:
            metadata["ignored_fields"] = list(conversation.ignored)
        headers = {name.lower(): value for name, value in request.headers.items()}
        with refusals():
            pending = session.open_call(
                conversation.messages, conversation.tools, conversation.max_tokens, metadata,
                previous_id=conversation.previous_id, headers=headers)
        if "retry_of" in pending.metadata:
            self._on_event("retry", call=pending.call_id, execution=session.execution_id,
                           retry_of=pending.metadata["retry_of"])
        return pending

    async def _generate(self, session: Session, pending: PendingCall,
                        advance: Callable[[], Awaitable[None]]) -> FinishReason:
        """Runs the call in a task of its own, so that `close_execution` can end it with a 410."""
        def on_retry(error: EngineError) -> None:
            self.metrics.retries.inc()
            self._on_event("engine_retry", call=pending.call_id, execution=session.execution_id,
                           error=str(error))

        async def first_token() -> None:
            if pending.first_token_s is None and pending.ids:
                pending.first_token_s = self._clock()
                self.metrics.first_token_s.observe(pending.first_token_s - pending.started_s)
            await advance()

        task = asyncio.ensure_future(
            EngineRun(self._router, pending, self._limits, on_retry).run(first_token))
        tasks = self._tasks.setdefault(session, set())
        tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if session.closed and me is not None and not me.cancelling():
                raise ended() from None
            raise  # the client has gone
        except ContextOverflowError as e:
            raise overflow(e) from e
        except EngineError as e:
            raise RequestError(503, str(e), code="engine_unavailable",
                               retry_after_s=self._limits.retry_after_s) from e
        finally:
            task.cancel()
            tasks.discard(task)
            if not tasks:
                self._tasks.pop(session, None)

    def _ended_call(self, record: CallRecord, pending: PendingCall, delivered: bool) -> None:
        wall_s = self._clock() - pending.started_s
        self.metrics.running.dec()
        self.metrics.calls.labels(record.agent_role.value, record.finish.value, str(delivered).lower()).inc()
        self.metrics.tokens.labels("prompt").inc(int(pending.request.prompt_ids.size))
        self.metrics.tokens.labels("completion").inc(len(pending.ids))
        self.metrics.call_s.observe(wall_s)
        self._on_event(
            "call", call=pending.call_id, execution=record.execution_id,
            role=record.agent_role.value, finish=record.finish.value, delivered=delivered,
            prompt_tokens=int(pending.request.prompt_ids.size),
            completion_tokens=len(pending.ids), wall_s=wall_s)


@contextlib.asynccontextmanager
async def _background(work: Awaitable[None] | None):
    """Runs a coroutine beside the body, which ends it. An error in it is the body's own to find."""
    task = asyncio.ensure_future(work) if work is not None else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
