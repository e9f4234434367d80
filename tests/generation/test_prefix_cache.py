"""What the prefix cache finds, forgets and never returns."""

import numpy as np
import pytest

from gyre.generation.engine import Prefix
from gyre.generation.prefix_cache import PrefixCache


def prefix(n):
    k = np.zeros((1, 1, 16, 1), np.float32)
    return Prefix(k, k, n, 0)


def test_longest_match_leaves_a_token_to_feed():
    cache = PrefixCache(10_000)
    cache.put(np.arange(4), prefix(4))
    cache.put(np.array([0, 1, 9, 9]), prefix(4))
    hit = cache.match(np.array([0, 1, 2, 3, 4]))
    assert (hit.kv_tokens, hit.last_token) == (4, 4)
    hit = cache.match(np.array([0, 1, 2, 3]))  # all four are known, but one must be fed
    assert (hit.kv_tokens, hit.last_token) == (3, 3)
    hit = cache.match(np.array([0, 1, 7]))
    assert (hit.kv_tokens, hit.last_token) == (2, 7)
    assert cache.match(np.array([5, 1])) is None and cache.match(np.array([0])) is None


def test_longer_replaces_shorter_and_covered_is_not_stored():
    cache = PrefixCache(10_000)
    cache.put(np.arange(3), prefix(3))
    cache.put(np.arange(6), prefix(6))
    cache.put(np.arange(5), prefix(5))
    assert len(cache) == 1 and cache.size_bytes == 128


def test_least_recently_used_goes_first():
    cache = PrefixCache(300)  # two entries of 128 bytes
    cache.put(np.array([1, 1]), prefix(2))
    cache.put(np.array([2, 2]), prefix(2))
    cache.match(np.array([1, 1, 5]))
    cache.put(np.array([3, 3]), prefix(2))
    assert cache.match(np.array([2, 2, 5])) is None and cache.match(np.array([1, 1, 5])) is not None
    cache.clear()
    assert cache.size_bytes == 0 and cache.match(np.array([1, 1, 5])) is None


def test_wrong_length_is_refused():
    with pytest.raises(ValueError, match="3 tokens for a prefix of 2"):
        PrefixCache(1000).put(np.arange(3), prefix(2))
