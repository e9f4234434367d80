import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.trajectory.packing import (
    MicroStep,
    TrainExecution,
    execution_weight,
    pack,
    packing_stats,
)
from tests.trajectory.support import branching, call, executions, paths_of, tree_of


def _execution(records, name="e", advantage=1.0, group=0) -> TrainExecution:
    tree = tree_of(records)
    return TrainExecution(name, group, tree, advantage, execution_weight(tree))


def _check_layout(micro: MicroStep) -> None:
    """The invariants of one micro-step, by brute force."""
    n, size = micro.n_tokens, len(micro.tokens)
    ancestors = []  # each token's root path, itself included
    for i in range(n):
        p = int(micro.pred[i])
        assert -1 <= p < i
        ancestors.append((ancestors[p] if p >= 0 else []) + [i])
        assert micro.pos[i] == len(ancestors[i]) - 1
    for i in range(n):
        below = [k for k in range(n) if i in ancestors[k]]
        assert below == list(range(i, int(micro.sub_end[i])))  # contiguous: depth-first
        by_interval = [j for j in range(i + 1) if micro.sub_end[i] <= micro.sub_end[j]]
        assert by_interval == ancestors[i]
    siblings = collections.Counter(zip(micro.pred[:n].tolist(), micro.tokens[:n].tolist(),
                                       strict=True))
    assert max(siblings.values()) == 1  # nothing is computed twice
    assert (micro.tokens[n:] == 0).all() and (micro.pos[n:] == 0).all()
    assert (micro.pred[n:] == -1).all()
    assert (micro.sub_end[n:] == np.arange(n + 1, size + 1)).all()
    r = micro.n_rows
    assert (micro.pred[micro.rows[:r]] >= 0).all() and (micro.w[:r] > 0).all()
    assert (micro.rows[r:] == 0).all() and (micro.w[r:] == 0).all()
    assert (micro.row_exec[r:] == -1).all()
    dtypes = {"tokens": "i4", "pos": "i4", "pred": "i4", "sub_end": "i4", "rows": "i4",
              "row_exec": "i4", "w": "f4", "adv": "f4", "old_logp": "f4", "version": "i4"}
    assert all(getattr(micro, k).dtype == np.dtype(v) for k, v in dtypes.items())


def _rows(micro: MicroStep) -> list[tuple]:
    """Each row as (execution, root path of ids, w, adv, old_logp, version)."""
    out = []
    for r in range(micro.n_rows):
        path, i = [], int(micro.rows[r])
        while i >= 0:
            path.append(int(micro.tokens[i]))
            i = int(micro.pred[i])
        out.append((micro.executions[micro.row_exec[r]], tuple(path[::-1]), micro.w[r],
                    micro.adv[r], micro.old_logp[r], micro.version[r]))
    return out


def _expected_rows(trains: list[TrainExecution]) -> list[tuple]:
    out = []
    for e in trains:
        paths = paths_of(e.tree)
        out += [(e.execution_id, paths[i], np.float32(e.weight), np.float32(e.advantage),
                 e.tree.logprobs[i], e.tree.versions[i]) for i in np.flatnonzero(e.tree.trained)]
    return sorted(out)


def test_branches_at_every_level_by_hand():
    (micro,) = pack([_execution(branching(), advantage=-2.0, group=7)], (16,), (12,))
    _check_layout(micro)
    assert micro.tokens.tolist() == [1, 2, 3, 10, 11, 12, 4, 20, 5, 30, 31, 13, 6, 40, 41, 0]
    assert micro.pred.tolist() == [-1, 0, 1, 2, 3, 4, 5, 6, 5, 8, 9, 4, 1, 12, 13, -1]
    assert micro.pos.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 5, 2, 3, 4, 0]
    assert micro.sub_end.tolist() == [15, 15, 12, 12, 12, 11, 8, 8, 11, 11, 11, 12, 15, 15, 15, 16]
    assert micro.rows.tolist() == [3, 4, 5, 7, 9, 10, 11, 13, 14, 0, 0, 0]
    assert micro.version.tolist() == [0, 0, 0, 1, 1, 1, 2, 0, 0, -1, -1, -1]
    # 9 trained tokens: each has weight 1/9, however often its path is shared.
    np.testing.assert_allclose(micro.w, [1 / 9] * 9 + [0] * 3, rtol=1e-6)
    np.testing.assert_allclose(micro.old_logp[:4], [-0.10, -0.11, -0.12, -0.20], rtol=1e-6)
    assert (micro.adv[:9] == -2).all()
    assert (micro.executions, micro.groups) == (("e",), (7,))
    assert (micro.n_tokens, micro.n_rows) == (15, 9)


def test_a_prompt_that_executions_share_is_computed_once():
    prompt = list(range(1, 11))
    one = _execution([call("a", prompt, [20, 21])], "one", advantage=1.0, group=4)
    two = _execution([call("b", prompt, [20, 22, 23])], "two", advantage=-1.0, group=4)
    (micro,) = pack([one, two], (16,), (8,))
    _check_layout(micro)
    assert micro.n_tokens == 10 + 2 + 2  # the prompt, 20 21, then 22 23 after the shared 20
    assert micro.n_rows == 5 and micro.rows[:5].tolist() == [10, 10, 11, 12, 13]
    assert micro.row_exec[:5].tolist() == [0, 1, 0, 1, 1]  # both executions trained the token 20
    np.testing.assert_allclose(micro.w[:5], [1 / 2, 1 / 3, 1 / 2, 1 / 3, 1 / 3], rtol=1e-6)
    assert micro.adv[:5].tolist() == [1, -1, 1, -1, -1]
    assert micro.groups == (4,)
    assert packing_stats([one, two]) == (14, 12 + 13, 5)


def test_weights_average_within_executions_then_over_them():
    # By hand: an execution with 2 trained tokens of loss 1 and 3, one with 4 of loss 5: the mean
    # over executions is ((1 + 3) / 2 + (4 * 5) / 4) / 2 = (2 + 5) / 2 = 3.5; over tokens it is 4.
    linear = _execution([call("a", [1], [10, 11])], "linear")
    branchy = _execution([call("b", [2], [20]), call("c", [2, 3], [21]), call("d", [2, 4], [22]),
                          call("e", [2, 5], [23])], "branchy")
    loss_of = {10: 1.0, 11: 3.0, 20: 5.0, 21: 5.0, 22: 5.0, 23: 5.0}
    for n_buckets, r_buckets in (((16,), (8,)), ((3,), (2,)), ((3, 8), (1, 2))):
        micros = pack([linear, branchy], n_buckets, r_buckets)
        total = sum(m.w[r] * loss_of[int(m.tokens[m.rows[r]])]
                    for m in micros for r in range(m.n_rows))
        assert total / 2 == pytest.approx(3.5)


def test_greedy_in_the_given_order_with_the_smallest_buckets():
    trains = [_execution([call(f"c{i}", [100 + i], [1, 2, 3])], f"e{i}", group=i) for i in range(5)]
    micros = pack(trains, (4, 8), (3, 6))
    assert [m.executions for m in micros] == [("e0", "e1"), ("e2", "e3"), ("e4",)]
    assert [m.groups for m in micros] == [(0, 1), (2, 3), (4,)]
    assert [(len(m.tokens), len(m.rows)) for m in micros] == [(8, 6), (8, 6), (4, 3)]
    assert [m.executions for m in pack(trains, (64,), (3, 6))] == [
        ("e0", "e1"), ("e2", "e3"), ("e4",)]  # the rows are full first


def test_an_execution_larger_than_a_micro_step_is_split_by_paths():
    records = [call("a", [1, 2], [10, 11])] + [
        call(f"b{i}", [20 + i], [30, 31], prefix="a") for i in range(4)]
    train = _execution(records)  # 4 + 4 * 3 = 16 tokens in 4 paths of 7, 10 trained
    micros = pack([train], (10,), (8,))
    for micro in micros:
        _check_layout(micro)
    assert [m.n_tokens for m in micros] == [10, 10]  # the prefix of 4 is computed again
    assert [m.n_rows for m in micros] == [6, 4]  # its 2 trained tokens are not
    assert sorted(row for m in micros for row in _rows(m)) == _expected_rows([train])
    assert {float(w) for m in micros for w in m.w[:m.n_rows]} == {np.float32(0.1)}


def test_a_path_with_more_rows_than_a_micro_step_is_computed_again():
    train = _execution([call("a", [1], list(range(10, 17)))])
    micros = pack([train], (8,), (3,))
    assert [(m.n_tokens, m.n_rows) for m in micros] == [(4, 3), (7, 3), (8, 1)]
    assert sorted(row for m in micros for row in _rows(m)) == _expected_rows([train])


def test_a_path_longer_than_a_micro_step_is_an_error_that_names_the_setting():
    with pytest.raises(ValueError, match=r"path of 9 tok.* has 8; raise .*trajectory\.n_buckets"):
        pack([_execution([call("a", [1], list(range(10, 18)))])], (8,), (8,))


def test_what_no_trained_token_depends_on_is_left_out():
    records = [call("a", [1], [10]), call("b", [2, 3], [20], prefix="a", delivered=False)]
    (micro,) = pack([_execution(records)], (8,), (8,))
    assert micro.n_tokens == 2
    assert pack([_execution([call("a", [1], [10], delivered=False)])], (8,), (8,)) == []
    assert pack([], (8,), (8,)) == []


@pytest.mark.parametrize("buckets", [(), (0, 4), (4, 4), (8, 4)])
def test_buckets_must_ascend(buckets):
    with pytest.raises(ValueError, match="n_buckets must be ascending positive"):
        pack([], buckets, (4,))
    with pytest.raises(ValueError, match="r_buckets must be ascending positive"):
        pack([], (4,), buckets)


def test_an_execution_needs_finite_numbers():
    tree = tree_of([call("a", [1], [10])])
    for advantage, weight in ((np.nan, 1.0), (1.0, np.inf), (1.0, -1.0)):
        with pytest.raises(ValueError, match="must be finite"):
            TrainExecution("e", 0, tree, advantage, weight)


def test_weight_of_an_execution():
    assert execution_weight(tree_of(branching())) == 1 / 9
    assert execution_weight(tree_of([call("a", [1], [10], delivered=False)])) == 0.0


@settings(max_examples=60, deadline=None)
@given(st.lists(executions(max_calls=5), min_size=1, max_size=4), st.booleans())
def test_rows_of_all_micro_steps_are_the_trained_tokens_exactly_once(many, small):
    trains = [_execution(records, f"e{i}", advantage=i + 1.0, group=i // 2)
              for i, records in enumerate(many)]
    longest = max(max(map(len, paths_of(e.tree)), default=1) for e in trains)
    n_buckets, r_buckets = ((longest, longest + 3), (1, 4)) if small else ((128,), (128,))
    micros = pack(trains, n_buckets, r_buckets)
    for micro in micros:
        _check_layout(micro)
        assert set(micro.executions) == {row[0] for row in _rows(micro)}
        assert len(micro.tokens) in n_buckets and len(micro.rows) in r_buckets
    assert sorted(row for m in micros for row in _rows(m)) == _expected_rows(trains)
    for execution in trains:
        total = sum(row[2] for m in micros for row in _rows(m) if row[0] == execution.execution_id)
        assert total == pytest.approx(1.0 if execution.tree.trained.any() else 0.0, rel=1e-5)
    again = pack(trains, n_buckets, r_buckets)
    assert len(again) == len(micros)
    for one, two in zip(micros, again, strict=True):
        for name, value in vars(one).items():
            np.testing.assert_array_equal(value, getattr(two, name))
    if not small:  # one micro-step: as many tokens as distinct prefixes of trained tokens
        needed = {row[1][:k] for m in micros for row in _rows(m) for k in range(1, len(row[1]) + 1)}
        assert sum(m.n_tokens for m in micros) == len(needed)


@settings(max_examples=30, deadline=None)
@given(st.lists(executions(max_calls=5), min_size=1, max_size=3))
def test_packing_stats(many):
    trains = [_execution(records, f"e{i}") for i, records in enumerate(many)]
    paths = [paths_of(e.tree) for e in trains]
    leaves = [[p for p in ps if not any(len(q) == len(p) + 1 and q[:-1] == p for q in ps)]
              for ps in paths]
    assert packing_stats(trains) == (
        len({p for ps in paths for p in ps}), sum(len(p) for ps in leaves for p in ps),
        sum(int(e.tree.trained.sum()) for e in trains))
