"""Which dialect a request is written in, and what the gateway's own refusals look like before a dialect words
them."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gyre.base.errors import ContextOverflowError, GyreError
from gyre.gateway.dialects import ANTHROPIC, DIALECTS, GOOGLE, OPENAI_CHAT, Dialect, RequestError
from gyre.gateway.session import SessionClosedError, UnknownAnswerError

_ROUTES = [(method, re.compile(path), dialect, operation)
           for dialect in DIALECTS for method, path, operation in dialect.routes]
_SERVED = ", ".join(d.name for d in DIALECTS)



def route(method: str, path: str, headers: Mapping[str, str]) -> tuple[Dialect, str | None, dict[str, str]]:
    """The dialect and operation of a request, and what its path says. Without an operation, the dialect is
    the one that the client probably speaks."""
    fitting = list(_fitting(path))
    spoken = _spoken(headers)
    fitting.sort(key=lambda found: found[1] is not spoken)  # one path may be served in two dialects
    for m, dialect, operation, groups in fitting:
        if m == method:
            return dialect, operation, groups
    return (fitting[0][1] if fitting else spoken), None, {}


@functools.lru_cache(maxsize=256)
def _fitting(path: str) -> tuple[tuple[str, Dialect, str, dict[str, str]], ...]:
    """(method, dialect, operation, groups) of the routes with this path."""
    return tuple((m, d, operation, match.groupdict()) for m, pattern, d, operation in _ROUTES
                 if (match := pattern.fullmatch(path)))


def _spoken(headers: Mapping[str, str]) -> Dialect:
    if "anthropic-version" in headers or "x-api-key" in headers:
        return ANTHROPIC
    return GOOGLE if "x-goog-api-key" in headers else OPENAI_CHAT


def no_route(method: str, path: str) -> RequestError:
    """Nothing is served there, or not by this method."""
    methods = sorted({m for m, pattern, *_ in _ROUTES if pattern.fullmatch(path.rstrip("/"))})
    if methods:
        return RequestError(405, f"{path} takes {', '.join(methods)}, got {method}",
                            code="method_not_allowed")
    return RequestError(404, f"unknown path {method} {path}; the dialects served are {_SERVED}",
                        code="unknown_url")


def unhandled(status: int, message: str) -> dict[str, Any]:
    """The body of an error of which not even the path is known."""
    return OPENAI_CHAT.format_error(RequestError(status, message))


# -------------------------------------------------------------------------------- errors


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What a session refuses, as answers."""
    try:
        yield
    except ContextOverflowError as e:
        raise overflow(e) from e
    except SessionClosedError:
        raise ended() from None
    except UnknownAnswerError as e:
        raise RequestError(404, str(e), param="previous_response_id",
                           code="previous_response_not_found") from e
    except GyreError as e:  # the template refuses the conversation
        raise RequestError(400, str(e), param="messages") from e


def ended() -> RequestError:
    """The execution is over."""
    return RequestError(410, "this execution has ended; its key is no longer valid",
                        code="execution_ended")


def overflow(e: ContextOverflowError) -> RequestError:
    """The prompt is too long."""
    return RequestError(400, str(e), code="context_length_exceeded", param="messages", details={
        "prompt_tokens": e.prompt_tokens, "max_context_tokens": e.max_context_tokens})


