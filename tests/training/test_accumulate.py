"""The gradient sum's bits depend on the micro-steps alone, not on who computed them or when."""

import numpy as np
import pytest

from gyre.training.accumulate import GradientTree, complete_subtrees, make_add


def gradients(count, seed=0):
    """float32 whose sum depends on the order of additions."""
    rng = np.random.default_rng(seed)
    return [{"w": (rng.normal(size=64) * 10.0 ** rng.integers(-3, 4, 64)).astype(np.float32)}
            for _ in range(count)]


def plain_add(a, b):
    return {"w": a["w"] + b["w"]}


def by_definition(grads):
    """The canonical sum, recursively over complete subtrees."""
    def node(start, size):
        if size == 1:
            return grads[start]
        return plain_add(node(start, size // 2), node(start + size // 2, size // 2))

    total = None
    for level, index in complete_subtrees(len(grads)):
        part = node(index << level, 1 << level)
        total = part if total is None else plain_add(total, part)
    return total


@pytest.mark.parametrize("count, nodes", [
    (1, [(0, 0)]), (2, [(1, 0)]), (6, [(2, 0), (1, 2)]), (7, [(2, 0), (1, 2), (0, 6)]),
    (13, [(3, 0), (2, 2), (0, 12)])])
def test_complete_subtrees(count, nodes):
    assert complete_subtrees(count) == nodes


def test_one_tree_merges_as_it_goes():
    tree, grads = GradientTree(plain_add), gradients(6)
    for index, nodes in [(0, [(0, 0)]), (3, [(0, 0), (0, 3)]), (1, [(1, 0), (0, 3)]),
                         (2, [(2, 0)]), (5, [(2, 0), (0, 5)]), (4, [(2, 0), (1, 2)])]:
        tree.add(index, grads[index])
        assert tree.nodes == nodes
    np.testing.assert_array_equal(tree.finish(6)["w"], by_definition(grads)["w"])
    assert tree.nodes == []


@pytest.mark.parametrize("count", [1, 2, 5, 8, 11])
def test_every_schedule_gives_the_same_bits(count):
    grads = gradients(count)
    want = by_definition(grads)["w"]
    rng = np.random.default_rng(count)
    for _ in range(20):
        trees = [GradientTree(plain_add) for _ in range(rng.integers(1, 5))]
        for index in rng.permutation(count):
            trees[rng.integers(len(trees))].add(int(index), grads[index])
        core = trees[0]
        for tree in rng.permutation(np.array(trees[1:], object)):
            parts = tree.partials()
            core.merge([parts[i] for i in rng.permutation(len(parts))])
            assert tree.nodes == []
        np.testing.assert_array_equal(core.finish(count)["w"], want)


def test_the_bits_would_differ_in_claim_order():
    """The case above can fail: plain sums of these numbers depend on the order."""
    grads = gradients(11)
    forward, backward = grads[0], grads[-1]
    for i in range(1, 11):
        forward, backward = plain_add(forward, grads[i]), plain_add(backward, grads[10 - i])
    assert not np.array_equal(forward["w"], backward["w"])
    assert not np.array_equal(forward["w"], by_definition(grads)["w"])


def test_aligned_blocks_ship_few_gradients():
    cells = [GradientTree(plain_add) for _ in range(3)]
    for index, grads in enumerate(gradients(16)):
        cells[index // 4 % 3].add(index, grads)
    assert [cell.nodes for cell in cells] == [[(2, 0), (2, 3)], [(2, 1)], [(2, 2)]]


def test_duplicates_raise():
    tree, grads = GradientTree(plain_add), gradients(4)
    for i in range(4):
        tree.add(i, grads[i])
    with pytest.raises(ValueError, match=r"micro-steps \[2\] are already"):
        tree.add(2, grads[2])
    with pytest.raises(ValueError, match=r"micro-steps \[2, 3\] are already"):
        tree.merge([((1, 1), grads[0])])
    other = GradientTree(plain_add)
    other.add(5, grads[0])
    with pytest.raises(ValueError, match=r"micro-steps \[5\] are already"):
        other.merge([((2, 1), grads[1])])
    with pytest.raises(ValueError, match="node"):
        tree.add(-1, grads[0])


def test_gaps_and_strangers_raise_and_lose_nothing():
    tree, grads = GradientTree(plain_add), gradients(6)
    for i in (0, 1, 3):
        tree.add(i, grads[i])
    with pytest.raises(ValueError, match=r"4 micro-steps: missing \[2\]"):
        tree.finish(4)
    tree.add(2, grads[2])
    tree.add(5, grads[5])
    with pytest.raises(ValueError, match=r"beyond the batch \[5\]"):
        tree.finish(4)
    with pytest.raises(ValueError, match="at least 1 micro-step"):
        tree.finish(0)
    tree.add(4, grads[4])
    np.testing.assert_array_equal(tree.finish(6)["w"], by_definition(grads)["w"])


def test_the_compiled_sum_reuses_its_first_operand():
    import jax
    a, b = jax.device_put((gradients(2)[0], gradients(2)[1]))
    want = np.asarray(a["w"]) + np.asarray(b["w"])
    total = make_add()(a, b)
    np.testing.assert_array_equal(total["w"], want)
    assert a["w"].is_deleted() and not b["w"].is_deleted()
