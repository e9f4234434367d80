"""The http face of the gateway: executions talk to it as if to OpenAI, records come out.

Invariants:
  * A key belongs to one execution and sees nothing of any other.
  * An answer counts as delivered only after its last byte was written to a living connection.
  * By default nothing is sent before the call has ended, so an engine's failure is always a clean
    5xx that clients retry; `live_streaming` trades that for early tokens.
  * Every error has the dialect's own shape.

All http runs on the event loop that called `start`. `open_execution` and `close_execution` may be
called from any thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

from aiohttp import web

from gyre.base.enums import FinishReason
from gyre.base.errors import ContextOverflowError, EngineError, GyreError
from gyre.base.ids import new_key
from gyre.base.protocols import ChatCodec, EngineCall, ParsedCompletion, TokenChunk
from gyre.gateway.answer import Answer
from gyre.gateway.dialects import DIALECTS, Conversation, RequestError, openai_chat
from gyre.gateway.router import Router
from gyre.gateway.session import PendingCall, Session, SessionClosedError
from gyre.trajectory.agent_roles import RoleRules
from gyre.trajectory.record import CallRecord

_RETRY_AFTER_S = 1


class LiveCodec(ChatCodec, Protocol):
    """What live streaming asks of a codec on top of `ChatCodec`."""

    def stable_prefix(self, text: str) -> ParsedCompletion:
        """The reasoning and content of an unfinished completion that no continuation takes back."""


class Gateway:
    """Serves executions on loopback.

    Args:
      codec: conversation <-> ids of the served model; a `LiveCodec` for `live_streaming`.
      router: chooses engines.
      model_name: the model that GET /v1/models lists first.
      model_aliases: further names that are accepted and listed.
      role_rules: tell which agent made a call.
      max_context_tokens: of the model, prompt and completion together.
      max_body_bytes: larger requests get 413.
      engine_timeout_s: how long a call waits for an engine before it gets 503.
      live_streaming: send text of streamed answers while it is sampled.
      on_event: called as on_event(kind, **fields) for telemetry, kinds `call`, `retry`,
        `request_error`; it must not block.
      clock: seconds since the epoch.
    """

    def __init__(self, codec: ChatCodec, router: Router, *, model_name: str,
                 role_rules: RoleRules, max_context_tokens: int,
                 model_aliases: Sequence[str] = (), max_body_bytes: int = 16 * 2**20,
                 engine_timeout_s: float = 600.0, live_streaming: bool = False,
                 on_event: Callable[..., None] | None = None,
                 clock: Callable[[], float] = time.time):
        self._codec = codec
        self._router = router
        self._models = (model_name, *model_aliases)
        self._role_rules = role_rules
        self._max_context_tokens = max_context_tokens
        self._max_body_bytes = max_body_bytes
        self._engine_timeout_s = engine_timeout_s
        self._live_streaming = live_streaming
        self._on_event = on_event or (lambda kind, **fields: None)
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}  # key -> session
        self._keys: dict[str, str] = {}  # execution -> key
        self._ended_keys: set[str] = set()
        self._tasks: dict[Session, set[asyncio.Task]] = {}
        self._runner: web.AppRunner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # ------------------------------------------------------------------ life

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listens, on a free port when `port` is 0. Returns the base URL, which ends in /v1."""
        app = web.Application(client_max_size=self._max_body_bytes)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # Cancelled handlers are how a client's disconnect reaches the engine.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None,
                                     shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self._loop = asyncio.get_running_loop()
        return f"http://{host}:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        """Cancels all calls and stops listening. Executions still open keep their records."""
        for tasks in list(self._tasks.values()):
            for task in list(tasks):
                task.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def open_execution(self, execution_id: str, *, seed: int, temperature: float,
                       max_completion_tokens: int) -> str:
        """Makes a key for an execution. How it samples is decided here, not by its client.

        Raises:
          ValueError: the execution is open already, or the sampling cannot work.
        """
        session = Session(execution_id, self._codec, self._role_rules, seed=seed,
                          temperature=temperature, max_completion_tokens=max_completion_tokens,
                          max_context_tokens=self._max_context_tokens, clock=self._clock)
        key = new_key()
        with self._lock:
            if execution_id in self._keys:
                raise ValueError(f"execution {execution_id!r} is open; close it first, or give the "
                                 "next attempt an id of its own")
            self._keys[execution_id] = key
            self._sessions[key] = session
        return key

    def close_execution(self, execution_id: str) -> list[CallRecord]:
        """Ends an execution: running calls are cancelled, the key is dead. Returns its records.

        Raises:
          KeyError: no such execution is open.
        """
        with self._lock:
            if execution_id not in self._keys:
                raise KeyError(f"execution {execution_id!r} is not open")
            key = self._keys.pop(execution_id)
            session = self._sessions.pop(key)
            self._ended_keys.add(key)
        records = session.close()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel_tasks, session)
        return records

    def _cancel_tasks(self, session: Session) -> None:
        for task in list(self._tasks.get(session, ())):
            task.cancel()

    # ------------------------------------------------------------------ http

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        session: Session | None = None
        dialect: ModuleType = openai_chat
        try:
            key, path = _key_and_path(request)
            if request.method == "HEAD" and path in ("", "/", "/v1", "/v1/"):
                return web.Response()
            session = self._session(key)
            if request.method == "GET" and path == "/v1/models":
                models = openai_chat.format_models(self._models, int(self._clock()))
                return web.json_response(models)
            dialect = DIALECTS.get(path.rstrip("/"), openai_chat)
            if path.rstrip("/") not in DIALECTS:
                raise RequestError(404, f"unknown path {request.method} {path}; served are POST "
                                   f"{', '.join(DIALECTS)} and GET /v1/models", code="unknown_url")
            if request.method != "POST":
                raise RequestError(405, f"{path} takes POST, got {request.method}",
                                   code="method_not_allowed")
            conversation = dialect.parse_request(await self._body(request))
            if conversation.model not in self._models:
                raise RequestError(404, f"unknown model {conversation.model!r}; served: "
                                   f"{', '.join(self._models)}", code="model_not_found",
                                   param="model")
            return await self._call(request, session, dialect, conversation)
        except RequestError as e:
            self._on_event("request_error", status=e.status, code=e.code, message=e.message,
                           execution=session.execution_id if session else None)
            headers = {} if e.retry_after_s is None else {"Retry-After": str(e.retry_after_s)}
            return web.json_response(dialect.format_error(e), status=e.status, headers=headers)

    def _session(self, key: str) -> Session:
        with self._lock:
            session = self._sessions.get(key)
            ended = key in self._ended_keys
        if ended:
            raise _ended()
        if session is None:
            raise RequestError(401, "unknown API key; send the execution's key as a bearer token, "
                               "as x-api-key, or in the path /s/KEY/v1", code="invalid_api_key")
        return session

    async def _body(self, request: web.Request) -> bytes:
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge as e:
            raise RequestError(413, f"the body is larger than {self._max_body_bytes} bytes; "
                               "shorten the messages", code="request_too_large") from e

    # ------------------------------------------------------------------ one call

    async def _call(self, request: web.Request, session: Session, dialect: ModuleType,
                    conversation: Conversation) -> web.StreamResponse:
        pending = self._open(session, dialect, conversation)
        answer = Answer(request, dialect, conversation, pending, int(self._clock()))
        advance = None
        if conversation.stream and self._live_streaming:
            def advance():
                return answer.advance(self._codec.stable_prefix(self._codec.decode(pending.ids)))
        delivered = False
        try:
            finish = await self._generate(session, pending, advance)
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
            raise _ended() from None
        except ConnectionError:  # the client left while we wrote
            return answer.response or web.Response()
        finally:
            record = session.abandon(pending)
            self._on_event(
                "call", call=pending.call_id, execution=session.execution_id,
                role=record.agent_role.value, finish=record.finish.value, delivered=delivered,
                prompt_tokens=int(pending.request.prompt_ids.size),
                completion_tokens=len(pending.ids), wall_s=self._clock() - pending.started_s)

    def _open(self, session: Session, dialect: ModuleType,
              conversation: Conversation) -> PendingCall:
        metadata: dict[str, Any] = {"dialect": dialect.NAME, "model": conversation.model,
                                    "stream": conversation.stream}
        if conversation.ignored:
            metadata["ignored_fields"] = list(conversation.ignored)
        try:
            pending = session.open_call(conversation.messages, conversation.tools,
                                        conversation.max_tokens, metadata)
        except ContextOverflowError as e:
            raise _overflow(e) from e
        except SessionClosedError:
            raise _ended() from None
        except GyreError as e:  # the template refuses the conversation
            raise RequestError(400, str(e), param="messages") from e
        if "retry_of" in pending.metadata:
            self._on_event("retry", call=pending.call_id, execution=session.execution_id,
                           retry_of=pending.metadata["retry_of"])
        return pending

    async def _generate(self, session: Session, pending: PendingCall,
                        advance: Callable[[], Any] | None) -> FinishReason:
        """Runs the call in a task of its own, so that `close_execution` can end it with a 410."""
        task = asyncio.ensure_future(self._run_on_engine(pending, advance))
        tasks = self._tasks.setdefault(session, set())
        tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if session.closed and me is not None and not me.cancelling():
                raise _ended() from None
            raise  # the client has gone
        except ContextOverflowError as e:
            raise _overflow(e) from e
        except EngineError as e:
            raise RequestError(503, str(e), code="engine_unavailable",
                               retry_after_s=_RETRY_AFTER_S) from e
        finally:
            task.cancel()
            tasks.discard(task)
            if not tasks:
                self._tasks.pop(session, None)

    async def _run_on_engine(self, pending: PendingCall,
                             advance: Callable[[], Any] | None) -> FinishReason:
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[TokenChunk] = asyncio.Queue()

        def emit(chunk: TokenChunk) -> None:
            try:
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)
            except RuntimeError:  # the loop has ended; nobody waits for these tokens
                return

        call = EngineCall(pending.request, emit)
        ended = False
        try:
            await self._router.submit(call, self._engine_timeout_s)
            while True:
                chunk = await chunks.get()
                pending.take(chunk)
                if chunk.error is not None or chunk.finish is not None:
                    ended = True
                    return _finish(chunk)
                if advance is not None:
                    await advance()
        finally:
            if not ended:
                self._router.cancel(call)
            self._router.forget(pending.call_id)


def _key_and_path(request: web.Request) -> tuple[str, str]:
    """The key and the path without it. A key in the path wins over headers."""
    path = request.path
    if path.startswith("/s/"):
        key, _, rest = path[len("/s/"):].partition("/")
        return key, "/" + rest
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip(), path
    return request.headers.get("x-api-key", ""), path


def _finish(last: TokenChunk) -> FinishReason:
    """The finish reason of a call's last chunk. Raises the engine's error as one of ours."""
    if isinstance(last.error, ContextOverflowError | EngineError):
        raise last.error
    if last.error is not None:
        raise EngineError(f"the engine failed: {last.error!r}") from last.error
    if last.finish is FinishReason.CANCELLED:
        raise EngineError("the engine stopped this call")
    return last.finish


def _ended() -> RequestError:
    return RequestError(410, "this execution has ended; its key is no longer valid",
                        code="execution_ended")


def _overflow(e: ContextOverflowError) -> RequestError:
    return RequestError(400, str(e), code="context_length_exceeded", param="messages")
