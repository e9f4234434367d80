"""Prompts that share memory never see one another's tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.gateway.token_buffer import TokenBuffer

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@given(first=IDS, steps=st.lists(st.tuples(st.integers(0, 99), IDS), max_size=30))
def test_every_buffer_keeps_its_ids_whatever_grows_from_it(first, steps):
    buffers, wanted = [TokenBuffer.of(first)], [first]
    for choice, more in steps:  # forks and continuations in any order
        at = choice % len(buffers)
        buffers.append(buffers[at].extended(more))
        wanted.append(wanted[at] + more)
    for buffer, ids in zip(buffers, wanted, strict=True):
        assert buffer.ids.dtype == np.int32
        assert buffer.ids.tolist() == ids


def test_a_continuation_shares_memory_and_a_fork_copies():
    root = TokenBuffer.of(range(10))
    child = root.extended([1, 2])
    fork = root.extended([3])
    assert np.shares_memory(root.ids, child.ids)
    assert not np.shares_memory(root.ids, fork.ids)


def test_memory_grows_by_doubling():
    buffer = TokenBuffer.of(range(10))
    memories = set()
    for _ in range(200):
        buffer = buffer.extended([7] * 1000)
        memories.add(id(buffer.memory))
    assert buffer.length == 200_010 and len(memories) < 12


def test_ids_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        TokenBuffer.of([1, 2]).ids[0] = 3
