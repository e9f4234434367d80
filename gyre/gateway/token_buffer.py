"""Prompts of a growing conversation without a copy of it per call.

A conversation of n calls and m tokens would take n * m / 2 ids in whole prompts. Here, a prompt that
continues another shares its memory: ids are written behind those that are there, and a view of the first ones
stays what it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

_FIRST_TOKENS = 4096


class _Memory:
    """Ids that are only ever added. `used` of them are taken."""

    def __init__(self, capacity: int):
        self.ids = np.empty(capacity, np.int32)
        self.used = 0


@dataclasses.dataclass(frozen=True)
class TokenBuffer:
    """The first `length` ids of a memory that others may share. Make one with `TokenBuffer.of(ids)`."""

    memory: _Memory
    length: int

    @classmethod
    def of(cls, ids: Sequence[int] | np.ndarray) -> TokenBuffer:
        """A buffer with these ids."""
        return cls(_Memory(max(_FIRST_TOKENS, len(ids))), 0).extended(ids)

    @property
    def ids(self) -> np.ndarray:
        """i32[length], read-only; it never changes."""
        view = self.memory.ids[:self.length]
        view.flags.writeable = False
        return view

    def extended(self, more: Sequence[int] | np.ndarray) -> TokenBuffer:
        """These ids and `more`: in the same memory where nobody has written behind them, else in a copy."""
        memory, end = self.memory, self.length + len(more)
        if memory.used != self.length or end > memory.ids.size:
            memory = _Memory(max(_FIRST_TOKENS, 2 * end))
            memory.ids[:self.length] = self.memory.ids[:self.length]
        memory.ids[self.length:end] = more
        memory.used = end
        return TokenBuffer(memory, end)
