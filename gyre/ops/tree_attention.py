"""Causal attention over token trees, each tree token computed once.

Invariant: in depth-first order token j is an ancestor-or-self of token i exactly when `j <= i` and
`sub_end[i] <= sub_end[j]`, so one int array is the whole mask; a forest is concatenated trees.
Two forms compute the same thing: `dense_tree_attention` writes the mask down (the oracle, and as
good within one block), `blockwise_tree_attention` visits only the block pairs that hold a visible
pair, with memory linear in N. `tree_attention` chooses between them by the static size.

Axes: N tokens, H query heads, K key/value heads, G = H/K queries per key head, h head width,
B block, P block pairs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

# Not -inf: a row can meet blocks where it sees nothing before its own, and inf - inf is nan.
_MASKED = -1e30


def tree_attention(q: jax.Array, k: jax.Array, v: jax.Array, sub_end: jax.Array, *,
                   block_size: int | None = None, dense_below: int = 64) -> jax.Array:
    """Attention of every token to its ancestors and itself.

    Args:
      q: float[N, H, h], not scaled; logits are scaled by h**-0.5 here.
      k: float[N, K, h], K divides H.
      v: float[N, K, h].
      sub_end: i32[N], exclusive end of each token's subtree in depth-first order (padding: i + 1).
      block_size: tokens of a block of the blockwise form; None chooses by N.
      dense_below: static; the dense form runs when N <= dense_below. On CPU its gradient took 1.8,
        5 and 17 times the CPU seconds of the blockwise one at N = 256, 512 and 1024 (a forest of
        256-token trees, H=9, K=3, h=64, blocks of 64).

    Returns:
      float[N, H, h].

    Raises:
      ValueError: shapes that do not belong together.
    """
    _check(q, k, v, sub_end)
    if q.shape[0] <= dense_below:
        return dense_tree_attention(q, k, v, sub_end)
    return blockwise_tree_attention(q, k, v, sub_end, block_size)


def ancestor_mask(sub_end: jax.Array) -> jax.Array:
    """bool[N, N]: row i is true at the ancestors of token i and at i itself."""
    index = jnp.arange(sub_end.shape[0])
    return (index[None, :] <= index[:, None]) & (sub_end[:, None] <= sub_end[None, :])


def dense_tree_attention(q: jax.Array, k: jax.Array, v: jax.Array, sub_end: jax.Array) -> jax.Array:
    """`tree_attention` by a dense [N, N] mask; memory is quadratic in N. Same arguments."""
    _check(q, k, v, sub_end)
    n, num_heads, width = q.shape
    kv_heads = k.shape[1]
    q = q.reshape(n, kv_heads, num_heads // kv_heads, width) * width**-0.5
    logits = jnp.einsum("nkgh,mkh->kgnm", q, k)
    logits = jnp.where(ancestor_mask(sub_end), logits, _MASKED)
    out = jnp.einsum("kgnm,mkh->nkgh", jax.nn.softmax(logits, axis=-1), v)
    return out.reshape(n, num_heads, width)


def blockwise_tree_attention(q: jax.Array, k: jax.Array, v: jax.Array, sub_end: jax.Array,
                             block_size: int | None = None) -> jax.Array:
    """`tree_attention` over non-empty block pairs with a running softmax; memory linear in N.

    The list of pairs is computed on the device, so one compiled program serves every tree of a
    padded size. The backward pass recomputes each pair's probabilities from the saved log-sum-exp.
    Same arguments as `tree_attention`; N need not be a multiple of `block_size`.
    """
    _check(q, k, v, sub_end)
    if block_size is None:
        # Small blocks skip more of a short row; large ones multiply faster.
        block_size = 64 if q.shape[0] <= 1024 else 128
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    n, num_heads, width = q.shape
    kv_heads = k.shape[1]
    padding = -n % block_size
    pad_rows = ((0, padding), (0, 0), (0, 0))
    q, k, v = (jnp.pad(x, pad_rows) for x in (q * width**-0.5, k, v))
    # A padded token is a tree of its own: nobody sees it and it sees only itself.
    sub_end = jnp.concatenate([sub_end, jnp.arange(n + 1, n + padding + 1, dtype=sub_end.dtype)])
    blocks = (n + padding) // block_size
    ends = sub_end.reshape(blocks, block_size)
    q = q.reshape(blocks, block_size, kv_heads, num_heads // kv_heads, width)
    q = q.transpose(0, 2, 3, 1, 4)  # [blocks, K, G, B, h]
    k, v = (x.reshape(blocks, block_size, kv_heads, width).swapaxes(1, 2) for x in (k, v))
    out = _attend_blocks(q, k, v, ends)
    out = out.transpose(0, 3, 1, 2, 4).reshape(n + padding, num_heads, width)
    return out[:n]


def _check(q: jax.Array, k: jax.Array, v: jax.Array, sub_end: jax.Array) -> None:
    n = q.shape[0]
    if (q.ndim != 3 or k.shape != v.shape or k.shape[::2] != q.shape[::2]
            or q.shape[1] % k.shape[1]):
        raise ValueError("expected q [N, H, h] and k, v [N, K, h] with K dividing H, got "
                         f"{q.shape}, {k.shape}, {v.shape}")
    if sub_end.shape != (n,):
        raise ValueError(f"expected sub_end [{n}], one entry per token, got {sub_end.shape}")


def block_pairs(ends: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The block pairs that hold a visible pair of tokens, by query block and then key block.

    Args:
      ends: i32[blocks, B], `sub_end` in blocks.

    Returns:
      i32[P] query blocks, i32[P] key blocks (P is the most there can be; the rest is 0), i32 count.
    """
    blocks, size = ends.shape
    index = jnp.arange(blocks, dtype=jnp.int32)
    reach = ends.max(axis=1)
    # A key block is seen when it starts no later and some subtree of it reaches beyond the query
    # block's first token.
    seen = (index[None, :] <= index[:, None]) & (reach[None, :] > index[:, None] * size)
    most = blocks * (blocks + 1) // 2
    query, key = jnp.nonzero(seen, size=most, fill_value=0)
    return query.astype(jnp.int32), key.astype(jnp.int32), seen.sum(dtype=jnp.int32)


def _take(x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x: jax.Array, row: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, row, i, 0)


def _pair_logits(q: jax.Array, k: jax.Array, ends: jax.Array, i: jax.Array,
                 j: jax.Array) -> jax.Array:
    """Masked logits [K, G, B, B] of query block i and key block j."""
    size = ends.shape[1]
    within = jnp.arange(size)
    visible = (j * size + within[None, :] <= i * size + within[:, None]) & (
        _take(ends, i)[:, None] <= _take(ends, j)[None, :])
    logits = jnp.einsum("kgnh,kmh->kgnm", _take(q, i), _take(k, j))
    return jnp.where(visible, logits, _MASKED)


@functools.partial(jax.custom_vjp)
def _attend_blocks(q: jax.Array, k: jax.Array, v: jax.Array, ends: jax.Array) -> jax.Array:
    """q [blocks, K, G, B, h] (scaled), k, v [blocks, K, B, h], ends [blocks, B] -> like q."""
    return _attend_blocks_fwd(q, k, v, ends)[0]


def _attend_blocks_fwd(q, k, v, ends):
    query, key, count = block_pairs(ends)

    def visit(p, carry):
        top, total, out = carry
        i, j = query[p], key[p]
        logits = _pair_logits(q, k, ends, i, j)
        old_top = _take(top, i)
        new_top = jnp.maximum(old_top, logits.max(axis=-1))
        probs = jnp.exp(logits - new_top[..., None])
        decay = jnp.exp(old_top - new_top)
        # A row that saw nothing so far holds exp(0) terms; they decay to 0 at its first real logit,
        # and every row sees at least itself.
        new_total = _take(total, i) * decay + probs.sum(axis=-1)
        seen = jnp.einsum("kgnm,kmh->kgnh", probs, _take(v, j))
        new_out = _take(out, i) * decay[..., None] + seen
        return _put(top, new_top, i), _put(total, new_total, i), _put(out, new_out, i)

    rows = q.shape[:-1]
    start = (jnp.full(rows, _MASKED, q.dtype), jnp.zeros(rows, q.dtype), jnp.zeros_like(q))
    top, total, out = jax.lax.fori_loop(0, count, visit, start)
    out = out / total[..., None]
    return out, (q, k, v, ends, out, top + jnp.log(total))


def _attend_blocks_bwd(saved, d_out):
    q, k, v, ends, out, log_total = saved
    query, key, count = block_pairs(ends)
    inner = (d_out * out).sum(axis=-1)  # [blocks, K, G, B]: the softmax's own correction

    def visit(p, carry):
        dq, dk, dv = carry
        i, j = query[p], key[p]
        probs = jnp.exp(_pair_logits(q, k, ends, i, j) - _take(log_total, i)[..., None])
        g = _take(d_out, i)
        dv_j = jnp.einsum("kgnm,kgnh->kmh", probs, g)
        d_probs = jnp.einsum("kgnh,kmh->kgnm", g, _take(v, j))
        d_logits = probs * (d_probs - _take(inner, i)[..., None])
        dq_i = jnp.einsum("kgnm,kmh->kgnh", d_logits, _take(k, j))
        dk_j = jnp.einsum("kgnm,kgnh->kmh", d_logits, _take(q, i))
        return (_put(dq, _take(dq, i) + dq_i, i), _put(dk, _take(dk, j) + dk_j, j),
                _put(dv, _take(dv, j) + dv_j, j))

    start = tuple(jnp.zeros_like(x) for x in (q, k, v))
    dq, dk, dv = jax.lax.fori_loop(0, count, visit, start)
    return dq, dk, dv, None


_attend_blocks.defvjp(_attend_blocks_fwd, _attend_blocks_bwd)
