"""KV of recent sequences, so that a prompt that continues or shares one is not computed again.

One cache belongs to one engine and one weight version: `clear` it whenever the weights change.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from gyre.generation.engine import Prefix


@dataclasses.dataclass(frozen=True)
class _Entry:
    tokens: np.ndarray  # i32[n], the tokens whose KV the prefix holds
    prefix: Prefix


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading tokens that two i32 sequences share."""
    n = min(a.size, b.size)
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


class PrefixCache:
    """Least-recently-used entries within `max_bytes`.

    Counters `hit_tokens` and `asked_tokens` are for metrics.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self.hit_tokens = 0
        self.asked_tokens = 0
        self._entries: collections.OrderedDict[int, _Entry] = collections.OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, tokens: np.ndarray, prefix: Prefix) -> None:
        """Remembers the KV of `tokens` (i32[prefix.kv_tokens]); drops what it makes redundant."""
        if tokens.size != prefix.kv_tokens:
            raise ValueError(f"{tokens.size} tokens for a prefix of {prefix.kv_tokens} KV entries")
        if prefix.size_bytes > self.max_bytes or not tokens.size:
            return
        for key, entry in list(self._entries.items()):
            shared = common_length(entry.tokens, tokens)
            if shared == tokens.size:
                self._entries.move_to_end(key)
                return  # covered
            if shared == entry.tokens.size:
                self._drop(key)
        self._entries[self._next] = _Entry(np.array(tokens, np.int32), prefix)
        self._next += 1
        self.size_bytes += prefix.size_bytes
        while self.size_bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))

    def match(self, tokens: np.ndarray) -> Prefix | None:
        """The longest cached start of a prompt, cut so that at least its last token is left to feed.

        Args:
          tokens: i32[P], P >= 1.

        Returns:
          A prefix with `kv_tokens` <= P - 1 and `last_token` = tokens[kv_tokens], or None.
        """
        self.asked_tokens += tokens.size - 1
        best, best_key = 0, None
        for key, entry in self._entries.items():
            shared = common_length(entry.tokens, tokens[:-1])
            if shared > best:
                best, best_key = shared, key
        if best_key is None:
            return None
        self.hit_tokens += best
        self._entries.move_to_end(best_key)
        return self._entries[best_key].prefix.replace(kv_tokens=best, last_token=int(tokens[best]))

    def clear(self) -> None:
        """Forgets everything: the weights have changed."""
        self._entries.clear()
        self.size_bytes = 0

    def _drop(self, key: int) -> None:
        self.size_bytes -= self._entries.pop(key).prefix.size_bytes
