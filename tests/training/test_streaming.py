"""The batch in progress: what joins, what is claimed, what is done, what a dead cell gives back."""

import zlib

import numpy as np
import pytest

from gyre.training.streaming import Batch, TrainGroup
from gyre.trajectory.packing import TrainExecution, pack
from gyre.trajectory.tree import TreeTokens


def execution(name, group, n):
    """A single path of n tokens, the last half trained."""
    train = np.arange(n) >= n // 2
    tree = TreeTokens(tokens=(np.arange(n) + 1000 * (zlib.crc32(name.encode()) % 100_000)).astype(np.int32),
                      parent=np.arange(-1, n - 1, dtype=np.int32), train=train,
                      logprobs=np.where(train, -1.0, np.nan).astype(np.float32),
                      versions=np.zeros(n, np.int32), call=np.where(train, 0, -1).astype(np.int32),
                      call_ids=("c",))
    return TrainExecution(name, group, tree, 1.0, 1 / (n - n // 2))


def group(index, tokens=10, executions=2):
    return TrainGroup(index, tuple(execution(f"g{index}-{m}", index, tokens) for m in range(executions)),
                      in_baseline=executions + 1)


def small_pack(executions):
    return pack(executions, n_buckets=(32,), r_buckets=(32,))


def batch(groups=3, **kwargs):
    return Batch(7, groups, small_pack, **kwargs)


def test_micro_steps_appear_as_they_fill_and_the_rest_at_the_end():
    b = batch()
    b.add(group(0))  # 20 tokens of 32
    assert not b.supply_ready and b.room == 2
    b.add(group(1))  # 40: the first group's micro-step is complete
    assert b.supply_ready and len(b.micro_steps) == 1
    b.add(group(2))
    assert b.complete and len(b.micro_steps) == 3 and b.denominator == 9
    rows = sum(m.n_rows for m in b.micro_steps)
    assert rows == 3 * 2 * 5  # each trained token once


def test_without_streaming_nothing_is_claimed_before_the_batch_is_complete():
    b = batch(streaming=False)
    b.add(group(0))
    b.add(group(1))
    assert not b.supply_ready and b.claim(0) == []
    b.add(group(2))
    assert b.claim(0) == [0]


def test_micro_steps_do_not_depend_on_who_claims_when():
    def micro(claims):
        b = batch()
        for g in range(3):
            b.add(group(g))
            if claims:
                b.claim(g)
        return b.micro_steps
    for a, b in zip(micro(True), micro(False), strict=True):
        assert a.executions == b.executions and np.array_equal(a.tokens, b.tokens)


def test_claims_are_aligned_blocks():
    b = batch(groups=5, claim_block=2)
    for g in range(5):
        b.add(group(g))
    assert [b.claim(c) for c in (0, 1, 0, 2)] == [[0, 1], [2, 3], [4], []]


def test_done_once_and_only_by_its_claimer():
    b = batch(groups=2)
    b.add(group(0))
    b.add(group(1))
    assert b.claim(0) == [0] and b.claim(1) == [1] and not b.finished
    b.done(1, 1, {"loss_sum": 2.0})
    with pytest.raises(ValueError, match="claimed by 0"):
        b.done(0, 1, {})
    b.done(0, 0, {"loss_sum": 1.0})
    with pytest.raises(ValueError):
        b.done(0, 0, {})
    assert b.finished and b.metric_sums() == {"loss_sum": 3.0}


def test_a_dead_cell_gives_back_what_it_did_not_hand_over():
    b = batch()
    for g in range(3):
        b.add(group(g))
    b.claim(0), b.claim(1)
    b.done(1, 1, {"loss_sum": 5.0})
    assert b.give_back(1) == [1]
    assert b.metric_sums() == {} and b.claim(2) == [1]
    b.done(1, 2, {"loss_sum": 5.0})
    assert b.metric_sums() == {"loss_sum": 5.0}


def test_a_group_joins_once_and_only_while_there_is_room():
    b = batch(groups=1)
    b.add(group(0))
    with pytest.raises(ValueError, match="cannot join"):
        b.add(group(1))
    b = batch(groups=2)
    b.add(group(0))
    with pytest.raises(ValueError, match="cannot join"):
        b.add(group(0))


def test_groups_without_signal_count_in_the_mean_and_need_no_compute():
    b = batch(groups=2)
    b.add(TrainGroup(0, (), in_baseline=8))
    b.add(TrainGroup(1, (), in_baseline=8))
    assert b.finished and b.micro_steps == [] and b.denominator == 16
