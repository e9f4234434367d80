"""Tokenizers behind one small interface: bytes for tests, a `tokenizers` object for real models.

Invariant: `encode` recognises special tokens, `encode_plain` can never produce one, whatever the
text says. Both are lossless for text without special tokens: `decode(encode_plain(s)) == s`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import tokenizers

from gyre.base.errors import ConfigError

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"


class Tokenizer(Protocol):
    """Text <-> ids. Implementations are stateless and thread-safe."""

    vocab_size: int
    special_ids: Mapping[str, int]  # name as it stands in text -> id

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which special-token names stand for special tokens."""

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing is special."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids. Bytes that are not UTF-8 become U+FFFD."""


def _names_pattern(names: Sequence[str]) -> re.Pattern[str]:
    """Matches any special-token name, the longest first."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(re.escape(n) for n in longest_first) or r"(?!)")


class ByteTokenizer:
    """One token per UTF-8 byte (ids 0 to 255), then the special tokens from 256 on.

    Ids beyond the vocabulary (a model may pad its own) decode to U+FFFD.
    """

    def __init__(self, special_tokens: Sequence[str] = (IM_START, IM_END, END_OF_TEXT)):
        if len(set(special_tokens)) != len(special_tokens) or "" in special_tokens:
            raise ConfigError(
                f"special tokens must be distinct and not empty, got {special_tokens}")
        self.special_ids: Mapping[str, int] = {n: 256 + i for i, n in enumerate(special_tokens)}
        self.vocab_size = 256 + len(special_tokens)
        self._names = {i: n for n, i in self.special_ids.items()}
        self._pattern = _names_pattern(special_tokens)

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which special-token names stand for special tokens."""
        ids: list[int] = []
        start = 0
        for match in self._pattern.finditer(text):
            ids.extend(text[start:match.start()].encode())
            ids.append(self.special_ids[match.group()])
            start = match.end()
        ids.extend(text[start:].encode())
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing is special: its UTF-8 bytes."""
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids. Bytes that are not UTF-8 become U+FFFD."""
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        if skip_special:
            ids = [i for i in ids if i not in self._names]
            if not ids or (min(ids) >= 0 and max(ids) < 256):
                return bytes(ids).decode("utf-8", "replace")
        out = bytearray()
        for i in ids:
            if 0 <= i < 256:
                out.append(i)
            elif i not in self._names:
                out.extend("\ufffd".encode())
            elif not skip_special:
                out.extend(self._names[i].encode())
        return out.decode("utf-8", "replace")


class HfTokenizer:
    """A `tokenizers.Tokenizer` (read from a GGUF or a tokenizer.json) behind our interface.

    Args:
      tokenizer: its added tokens with `special=True` are the special ones.

    Raises:
      ConfigError: it has no special token, so no turn could end.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        self.special_ids: Mapping[str, int] = {
            t.content: i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        if not self.special_ids:
            raise ConfigError("the tokenizer has no special tokens; add them with "
                              "Tokenizer.add_special_tokens before wrapping it")
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        # A look-ahead finds overlapping names, too.
        self._starts = re.compile(f"(?={_names_pattern(tuple(self.special_ids)).pattern})")

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which special-token names stand for special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing is special.

        Every special-token name is cut after its first character and the pieces are encoded apart,
        so that no piece holds a whole name.
        """
        ids: list[int] = []
        start = 0
        for match in self._starts.finditer(text):
            ids.extend(self.encode(text[start:match.start() + 1]))
            start = match.start() + 1
        ids.extend(self.encode(text[start:]))
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids. Bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special)


def as_tokenizer(tokenizer: Tokenizer | tokenizers.Tokenizer) -> Tokenizer:
    """Wraps a `tokenizers.Tokenizer`; returns our own kind unchanged."""
    return HfTokenizer(tokenizer) if isinstance(tokenizer, tokenizers.Tokenizer) else tokenizer
