import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.base.enums import AgentRole
from gyre.base.errors import ConfigError
from gyre.trajectory.sampling import choose_leaves, parse_role_order, sampling_rng, select_paths
from gyre.trajectory.tree import TrajectoryTree
from tests.trajectory.support import branching, call, executions, paths_of


def _forest(*roles: AgentRole) -> TrajectoryTree:
    """One conversation per role, the i-th with i + 1 sampled tokens."""
    return TrajectoryTree.from_records([
        call(f"c{i}", [i], [10] * (i + 1), role=role) for i, role in enumerate(roles)])


def test_better_roles_come_first():
    tree = _forest(AgentRole.SUB_AGENT_SUMMARY, AgentRole.SUB_AGENT, AgentRole.MAIN_SUMMARY,
                   AgentRole.MAIN)
    for seed in range(10):
        chosen = choose_leaves(tree, 5, np.random.default_rng(seed))
        assert [leaf.agent_role for leaf in chosen] == list(AgentRole)
    assert [leaf.agent_role for leaf in choose_leaves(tree, 2, np.random.default_rng(0))] == [
        AgentRole.MAIN, AgentRole.MAIN_SUMMARY]


def test_leaves_are_drawn_in_proportion_to_unmasked_trainable_tokens():
    tree = _forest(AgentRole.MAIN, AgentRole.MAIN, AgentRole.MAIN)  # 1, 2 and 3 tokens
    rng = np.random.default_rng(0)
    draws = collections.Counter(choose_leaves(tree, 1, rng)[0].call_id for _ in range(3000))
    for name, share in (("c0", 1 / 6), ("c1", 2 / 6), ("c2", 3 / 6)):
        assert abs(draws[name] / 3000 - share) < 0.04  # more than 4 standard deviations


def test_a_masked_path_counts_no_more():
    # b and c share a's 3 tokens; after one of them is chosen only 1 or 2 of the other are left.
    tree = TrajectoryTree.from_records(branching()[:3])
    first = [choose_leaves(tree, 1, np.random.default_rng(s))[0].call_id for s in range(2000)]
    assert abs(first.count("b") / 2000 - 4 / 9) < 0.05  # paths of 4 and 5 tokens
    records = [call("a", [1], [10] * 9), call("b", [2], [20], prefix="a"),
               call("c", [3], [30], prefix="a"), call("d", [4], [40] * 4)]
    tree = TrajectoryTree.from_records(records)
    second = collections.Counter()
    for seed in range(2000):
        one, two = choose_leaves(tree, 2, np.random.default_rng(seed))
        if one.call_id == "b":
            second[two.call_id] += 1
    # c has 1 token left of 10, d has 4.
    assert abs(second["d"] / second.total() - 0.8) < 0.05


def test_nothing_trainable_gives_an_empty_tree():
    tree = TrajectoryTree.from_records([call("a", [1], [10], delivered=False)])
    assert choose_leaves(tree, 5, np.random.default_rng(0)) == []
    assert len(select_paths(tree, 5)) == 0


def test_j_max_must_be_positive():
    with pytest.raises(ValueError, match="j_max must be at least 1, got 0"):
        select_paths(TrajectoryTree(), 0)


def test_without_a_limit_everything_trainable_is_taken():
    tree = TrajectoryTree.from_records(branching())
    assert len(choose_leaves(tree, None, np.random.default_rng(0))) == 4
    assert select_paths(tree, None).tokens.tolist() == tree.flatten().tokens.tolist()


def test_each_path_and_each_mask_by_hand():
    """Main paths first, each draw by what the masks left of b's 4 tokens, c's 5 and d's 3; then s."""
    tree = TrajectoryTree.from_records(branching())
    trainable = {"b": {10, 11, 12, 20}, "c": {10, 11, 12, 30, 31}, "d": {10, 11, 13}, "s": {40, 41}}
    names = [leaf.call_id for leaf in tree.leaves()]
    for seed in range(50):
        again = np.random.default_rng(seed)
        masked, classes = set(), ["b", "c", "d"]
        for leaf in choose_leaves(tree, None, np.random.default_rng(seed)):
            left = [len(trainable[n] - masked) if n in classes else 0 for n in names]
            if not sum(left):
                classes = ["s"]
                left = [2 * (n == "s") for n in names]
            assert leaf.call_id == names[int(again.choice(4, p=np.array(left) / sum(left)))]
            masked |= trainable[leaf.call_id]
        assert masked == set.union(*trainable.values())


def test_the_order_of_roles_is_a_choice():
    tree = _forest(*AgentRole)
    order = parse_role_order(["sub_agent", "main", "sub_agent_summary", "main_summary"])
    chosen = choose_leaves(tree, None, np.random.default_rng(0), order)
    assert [leaf.agent_role for leaf in chosen] == list(order)
    for names in ([], ["main"], [*AgentRole, "main"], ["main", "main_summary", "sub_agent", "boss"]):
        with pytest.raises(ConfigError, match="must name each of main, main_summary"):
            parse_role_order(names)


def test_paths_are_drawn_from_the_run_seed_and_the_execution():
    tree = _forest(*[AgentRole.MAIN] * 6)

    def draw(seed, execution):
        return [leaf.call_id for leaf in choose_leaves(tree, 3, sampling_rng(seed, execution))]

    assert draw(0, "g000001-2") == draw(0, "g000001-2")
    assert len({tuple(draw(s, f"g{i}-0")) for s in range(4) for i in range(8)}) > 20


@settings(max_examples=60, deadline=None)
@given(executions(), st.integers(1, 4), st.integers(0, 9))
def test_the_selection_is_a_union_of_paths_with_each_token_once(records, j_max, seed):
    tree = TrajectoryTree.from_records(records)
    chosen = choose_leaves(tree, j_max, np.random.default_rng(seed))
    picked = select_paths(tree, j_max, np.random.default_rng(seed))
    whole = tree.flatten()
    assert len(chosen) <= j_max
    paths = paths_of(picked)
    assert len(set(paths)) == len(paths)  # no token of a context twice, hence trained at most once
    labels = dict(zip(paths_of(whole), zip(whole.train, whole.versions, strict=True), strict=True))
    for path, train, version in zip(paths, picked.train, picked.versions, strict=True):
        assert labels[path] == (train, version)
    ends = [tuple(x for i in tree.path(leaf.segment) for x in tree.segments[i].tokens.tolist())
            for leaf in chosen]
    assert set(paths) == {end[:n] for end in ends for n in range(1, len(end) + 1)}
    if len(chosen) < j_max:  # it stopped because nothing trainable was left
        assert whole.trained.sum() == picked.trained.sum()
