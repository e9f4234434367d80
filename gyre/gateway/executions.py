"""Which execution a key belongs to.

Keys are 128 random bits. They are kept as digests, compared in constant time, and never logged. A key says
which execution, and nothing else does, so no client can name another's conversations.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Callable, Mapping

from gyre.base.ids import new_key
from gyre.gateway.session import Session


class Executions:
    """Open executions and their keys. Methods are thread-safe."""

    def __init__(self):
        self._lock = threading.Lock()
        self._open: dict[bytes, Session] = {}  # digest of the key -> session
        self._digests: dict[str, bytes] = {}  # execution -> digest
        self._ended: set[bytes] = set()

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def open(self, session: Session) -> str:
        """Takes an execution in. Returns its key. Raises ValueError when it is open already."""
        key = new_key()
        with self._lock:
            if session.execution_id in self._digests:
                raise ValueError(f"execution {session.execution_id!r} is open; close it first, or give "
                                 "the next attempt an id of its own")
            self._digests[session.execution_id] = _digest(key)
            self._open[_digest(key)] = session
        return key

    def close(self, execution_id: str) -> Session:
        """Ends an execution; its key is dead. Raises KeyError when it is not open."""
        with self._lock:
            if execution_id not in self._digests:
                raise KeyError(f"execution {execution_id!r} is not open")
            digest = self._digests.pop(execution_id)
            self._ended.add(digest)
            return self._open.pop(digest)

    def find(self, key: str) -> tuple[Session | None, bool]:
        """(the key's session or None, whether the key was one of an execution that has ended)."""
        digest = _digest(key)
        with self._lock:
            session = self._open.get(digest)
            if session is not None and hmac.compare_digest(self._digests[session.execution_id], digest):
                return session, False
            return None, digest in self._ended


def key_and_path(path: str, headers: Mapping[str, str],
                 query: Callable[[], Mapping[str, str]]) -> tuple[str, str]:
    """The key and the path without it. A key in the path (`/s/KEY/...`) goes before headers."""
    if path.startswith("/s/"):
        key, _, rest = path[len("/s/"):].partition("/")
        return key, "/" + rest
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip(), path
    return (headers.get("x-api-key") or headers.get("x-goog-api-key") or query().get("key", "")), path


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
