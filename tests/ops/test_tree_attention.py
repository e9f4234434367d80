import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gyre.ops.tree_attention import (
    ancestor_mask,
    block_pairs,
    blockwise_tree_attention,
    dense_tree_attention,
    tree_attention,
)
from tests.ops.trees import Forest, random_forest


def qkv(rng, n, heads=6, kv_heads=2, width=8, dtype=np.float32):
    return (rng.normal(size=(n, heads, width)).astype(dtype),
            rng.normal(size=(n, kv_heads, width)).astype(dtype),
            rng.normal(size=(n, kv_heads, width)).astype(dtype))


def test_mask_is_exactly_the_ancestors():
    forest = random_forest(np.random.default_rng(0), trees=3)
    mask = np.asarray(ancestor_mask(jnp.asarray(forest.sub_end)))
    for i in range(forest.size):
        assert np.flatnonzero(mask[i]).tolist() == forest.path(i)


@pytest.mark.parametrize("block_size", [5, 16, 64])
def test_blockwise_equals_dense_with_gradients(block_size):
    rng = np.random.default_rng(11)
    forest = random_forest(rng, trees=2)
    assert forest.size % block_size, "the case must need padding inside"
    q, k, v = qkv(rng, forest.size)
    weight = rng.normal(size=q.shape).astype(np.float32)

    def value_and_grads(attention):
        def f(q, k, v):
            out = attention(q, k, v)
            return (out * weight).sum(), out
        (_, out), grads = jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(q, k, v)
        return out, grads

    sub_end = jnp.asarray(forest.sub_end)
    out, grads = value_and_grads(lambda *a: blockwise_tree_attention(*a, sub_end, block_size))
    want, want_grads = value_and_grads(lambda *a: dense_tree_attention(*a, sub_end))
    np.testing.assert_allclose(out, want, atol=2e-6)
    for got, expected in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_blockwise_is_exact_in_float64():
    with jax.enable_x64(True):
        rng = np.random.default_rng(5)
        forest = random_forest(rng, trees=2)
        q, k, v = qkv(rng, forest.size, dtype=np.float64)
        out = blockwise_tree_attention(q, k, v, jnp.asarray(forest.sub_end), 8)
        want = dense_tree_attention(q, k, v, jnp.asarray(forest.sub_end))
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, want, atol=1e-14)


def test_only_non_empty_block_pairs_are_visited():
    def count(forest, size):
        return int(block_pairs(jnp.asarray(forest.sub_end).reshape(-1, size))[2])

    tokens = np.zeros(16, np.int32)
    chain = Forest(tokens, np.arange(-1, 15))
    assert count(chain, 4) == 10  # 4 blocks, every key block before its query block or at it
    # Four chains of one block each see nothing of one another.
    four = Forest(tokens, np.array([-1, 0, 1, 2, -1, 4, 5, 6, -1, 8, 9, 10, -1, 12, 13, 14]))
    assert count(four, 4) == 4
    # A trunk of one block with three branches of one block each: each branch sees trunk and itself.
    trunk = Forest(tokens, np.array([-1, 0, 1, 2, 3, 4, 5, 6, 3, 8, 9, 10, 3, 12, 13, 14]))
    assert count(trunk, 4) == 1 + 3 * 2


def test_one_program_serves_every_tree_of_a_size():
    rng = np.random.default_rng(1)
    traces = []

    @jax.jit
    def attend(q, k, v, sub_end):
        traces.append(1)
        return tree_attention(q, k, v, sub_end, block_size=8, dense_below=0)

    q, k, v = qkv(rng, 32)
    for parent in (np.arange(-1, 31), np.full(32, -1)):
        forest = Forest(np.zeros(32, np.int32), parent)
        np.testing.assert_allclose(attend(q, k, v, forest.sub_end),
                                   dense_tree_attention(q, k, v, jnp.asarray(forest.sub_end)),
                                   atol=2e-6)
    assert len(traces) == 1


def test_memory_is_linear_in_tokens():
    def temp_bytes(n):
        x = jax.ShapeDtypeStruct((n, 2, 8), jnp.float32)
        f = jax.grad(lambda q, k, v, e: blockwise_tree_attention(q, k, v, e, 128).sum(), (0, 1, 2))
        program = jax.jit(f).lower(x, x, x, jax.ShapeDtypeStruct((n,), jnp.int32)).compile()
        return program.memory_analysis().temp_size_in_bytes

    small, large = temp_bytes(1024), temp_bytes(8192)
    assert large < 10 * small, (small, large)  # 8 times the tokens; quadratic would be 64
    assert large < 8192 * 8192  # far below one bool mask


@pytest.mark.parametrize("make", [
    lambda q, k, v, e: (q, k[:-1], v[:-1], e),
    lambda q, k, v, e: (q[:, :5], k, v, e),
    lambda q, k, v, e: (q, k, v, e[:-1]),
])
def test_shapes_that_do_not_belong_together_are_refused(make):
    args = make(*qkv(np.random.default_rng(0), 12), np.arange(1, 13, dtype=np.int32))
    with pytest.raises(ValueError, match="expected"):
        tree_attention(*args)
