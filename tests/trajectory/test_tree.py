import numpy as np
import pytest
from hypothesis import given, settings

from gyre.base.enums import AgentRole, FinishReason
from gyre.trajectory.record import all_ids, prompt_ids
from gyre.trajectory.tree import TrajectoryTree, TreeTokens, ascii
from tests.trajectory.support import branching, call, executions, paths_of, tree_of


def test_segments_split_where_branches_start():
    tree = TrajectoryTree.from_records(branching())
    shape = {tuple(x for i in tree.path(s.index) for x in tree.segments[i].tokens.tolist()):
             (len(s.tokens), s.call_id) for s in tree.segments}
    assert shape == {
        (1, 2): (2, ""), (1, 2, 3): (1, ""), (1, 2, 3, 10, 11): (2, "a"),
        (1, 2, 3, 10, 11, 12): (1, "a"), (1, 2, 3, 10, 11, 12, 4): (1, ""),
        (1, 2, 3, 10, 11, 12, 4, 20): (1, "b"), (1, 2, 3, 10, 11, 12, 5): (1, ""),
        (1, 2, 3, 10, 11, 12, 5, 30, 31): (2, "c"), (1, 2, 3, 10, 11, 13): (1, "d"),
        (1, 2, 6): (1, ""), (1, 2, 6, 40, 41): (2, "s")}


def test_leaves_are_the_calls_that_nothing_continues():
    leaves = TrajectoryTree.from_records(branching()).leaves()
    assert {(leaf.call_id, leaf.agent_role) for leaf in leaves} == {
        ("b", AgentRole.MAIN), ("c", AgentRole.MAIN), ("d", AgentRole.MAIN),
        ("s", AgentRole.SUB_AGENT)}


def test_flatten_is_depth_first_with_labels():
    tree = tree_of(branching())
    assert tree.tokens.tolist() == [1, 2, 3, 10, 11, 12, 4, 20, 5, 30, 31, 13, 6, 40, 41]
    assert tree.parent.tolist() == [-1, 0, 1, 2, 3, 4, 5, 6, 5, 8, 9, 4, 1, 12, 13]
    assert tree.train.tolist() == [x >= 10 for x in tree.tokens.tolist()]
    assert [tree.call_ids[c] if c >= 0 else "" for c in tree.call] == [
        "", "", "", "a", "a", "a", "", "b", "", "c", "c", "d", "", "s", "s"]
    assert tree.versions.tolist() == [-1, -1, -1, 0, 0, 0, -1, 1, -1, 1, 1, 2, -1, 0, 0]
    np.testing.assert_allclose(tree.logprobs[tree.train], -tree.tokens[tree.train] / 100)
    assert np.isnan(tree.logprobs[~tree.train]).all()


def test_a_delivered_call_takes_tokens_over_from_an_abandoned_one():
    cut = call("cut", [1], [10, 11], delivered=False, finish=FinishReason.CANCELLED)
    tree = tree_of([cut, call("again", [1], [10, 11, 12], version=3)])
    assert tree.train.tolist() == [False, True, True, True]
    assert tree.versions.tolist() == [-1, 3, 3, 3] and tree.call_ids == ("again",)


def test_text_that_another_call_sampled_is_trained_once_whatever_the_order():
    text = call("text", [1, 10, 5], [20])  # its prompt has 10 as text
    sampled = call("sampled", [1], [10])
    for records in ([text, sampled], [sampled, text]):
        tree = tree_of(records)
        assert tree.tokens.tolist() == [1, 10, 5, 20]
        assert tree.train.tolist() == [False, True, False, True]


def test_an_abandoned_call_conditions_but_does_not_train():
    cut = call("cut", [1], [10], delivered=False)
    tree = tree_of([cut, call("next", [2], [20], prefix="cut")])
    assert tree.tokens.tolist() == [1, 10, 2, 20]
    assert tree.train.tolist() == [False, False, False, True]


def test_errors():
    tree = TrajectoryTree.from_records([call("a", [1], [2])])
    with pytest.raises(ValueError, match="in the tree already"):
        tree.add(call("a", [1], [2]))
    with pytest.raises(ValueError, match="not in the tree; add calls in call order"):
        tree.add(call("b", [1], [2], prefix="c"))
    with pytest.raises(ValueError, match="without its parent"):
        tree.flatten(keep={1})
    i32, one = np.zeros(1, np.int32), np.ones(1, bool)
    with pytest.raises(ValueError, match="no finite log-prob"):
        TreeTokens(i32, i32 - 1, one, np.full(1, np.nan, np.float32), i32, i32)
    with pytest.raises(ValueError, match="predecessor comes before"):
        TreeTokens(i32, i32, ~one, np.zeros(1, np.float32), i32, i32)
    with pytest.raises(ValueError, match="logprobs must be float32"):
        TreeTokens(i32, i32 - 1, ~one, np.zeros(1), i32, i32)


def test_empty_tree():
    assert len(TrajectoryTree().flatten()) == 0 and TrajectoryTree().leaves() == []


def test_ascii_shows_every_segment():
    tree = TrajectoryTree.from_records(branching())
    lines = ascii(tree).splitlines()
    assert len(lines) == len(tree.segments)
    assert lines[0] == "└─ [main 2 tokens] 1 2" and "*[sub_agent 2 tokens] 40 41" in lines[-1]
    assert "«40,41»" in ascii(tree, lambda ids: "«" + ",".join(map(str, ids)) + "»")


@settings(max_examples=60, deadline=None)
@given(executions())
def test_the_tree_is_the_set_of_prefixes_of_the_calls(records):
    by_id = {r.call_id: r for r in records}
    tree = TrajectoryTree.from_records(records)
    flat = tree.flatten()
    paths = paths_of(flat)
    expected, trainable = set(), set()
    for record in records:
        whole = tuple(all_ids(record, by_id).tolist())
        expected |= {whole[:n] for n in range(1, len(whole) + 1)}
        if record.trainable:
            start = len(prompt_ids(record, by_id))
            trainable |= {whole[:n] for n in range(start + 1, len(whole) + 1)}
    assert len(paths) == len(set(paths)) and set(paths) == expected
    assert {p for p, train in zip(paths, flat.train, strict=True) if train} == trainable
    for i, parent in enumerate(flat.parent.tolist()):  # depth-first: the parent is on the stack
        assert parent == -1 or all(flat.parent[j] >= parent for j in range(parent + 1, i + 1))
    wholes = [tuple(all_ids(r, by_id).tolist()) for r in records]
    ends = {w for w in wholes if not any(o[:len(w)] == w and len(o) > len(w) for o in wholes)}
    leaf_paths = [
        tuple(x for i in tree.path(leaf.segment) for x in tree.segments[i].tokens.tolist())
        for leaf in tree.leaves()]
    assert sorted(leaf_paths) == sorted(ends)
