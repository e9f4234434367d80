"""The loss over packed trees equals the loss path by path, and a number derived by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gyre.models import dense
from gyre.ops.tree_loss import micro_loss
from tests.ops.trees import (
    TINY,
    Forest,
    batch_of,
    clipped_loss,
    pad,
    per_path_loss,
    random_forest,
    relative_error,
    tiny_params,
)

TEMPERATURE = 0.8
N, R = 160, 128  # one bucket for most cases, so that they share compiled programs


@functools.partial(jax.jit, static_argnames=("block_size", "dense_below", "chunk_rows"))
def tree_loss_and_grads(params, batch, **options):
    def loss(params):
        def forward_hidden(tokens, pos, attend):
            return dense.forward(TINY, params, tokens, pos, attend)[0]
        return micro_loss(forward_hidden, dense.unembedding(TINY, params), batch, clipped_loss,
                          TEMPERATURE, **options)
    (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, metrics, grads


def case(seed, trees, dtype=np.float32, n_tokens=N, n_rows=R):
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, trees=trees, levels=2)
    params = jax.tree.map(lambda p: np.asarray(p, dtype), tiny_params())
    # Sharper than at initialisation, so that positions and ancestors matter; not so sharp that few
    # rows dominate the loss.
    params["embed"] = params["embed"] * 2
    return forest, batch_of(rng, forest, n_tokens, n_rows), params


def per_path(params, forest, batch):
    loss = jax.jit(jax.value_and_grad(lambda p: per_path_loss(p, forest, batch, TEMPERATURE)))
    return loss(params)


DENSE = dict(dense_below=4096)
BLOCKWISE = dict(dense_below=0, block_size=8, chunk_rows=8)


def test_equals_per_path_in_float32():
    forest, batch, params = case(1, 3)
    want, want_grads = per_path(params, forest, batch)
    for options in (DENSE, BLOCKWISE):
        value, _, grads = tree_loss_and_grads(params, batch, **options)
        assert abs(value - want) / abs(want) < 1e-5, options
        assert relative_error(grads, want_grads) < 1e-5, options


def test_equals_per_path_in_float64():
    with jax.enable_x64(True):
        forest, batch, params = case(2, 2, np.float64)
        for name in ("w", "adv", "old_logp"):
            batch[name] = batch[name].astype(np.float64)
        want, want_grads = per_path(params, forest, batch)
        for options in (DENSE, BLOCKWISE):
            value, _, grads = tree_loss_and_grads(params, batch, **options)
            assert grads["embed"].dtype == jnp.float64
            assert abs(value - want) / abs(want) < 1e-12, options
            assert relative_error(grads, want_grads) < 1e-12, options


def test_padding_changes_nothing():
    forest, batch, params = case(3, 2, n_tokens=None, n_rows=None)
    padded = pad(batch, N, R)
    assert forest.size < N and len(batch["rows"]) < R
    value, metrics, grads = tree_loss_and_grads(params, batch, **BLOCKWISE)
    value_p, metrics_p, grads_p = tree_loss_and_grads(params, padded, **BLOCKWISE)
    assert abs(value - value_p) / abs(value) < 1e-6
    assert relative_error(grads_p, grads) < 1e-6
    assert metrics["rows"] == metrics_p["rows"] == len(batch["rows"])
    for name in metrics:
        np.testing.assert_allclose(metrics[name], metrics_p[name], rtol=1e-5)


def test_a_wholly_empty_micro_step_is_zero():
    _, batch, params = case(3, 1)
    batch["w"] = np.zeros_like(batch["w"])
    value, metrics, grads = tree_loss_and_grads(params, batch, **BLOCKWISE)
    assert value == 0 and metrics["rows"] == 0
    assert all(not np.any(g) for g in jax.tree.leaves(grads))


def test_sums_add_up_over_any_split():
    """One micro-step of two trees = two micro-steps of one tree each."""
    rng = np.random.default_rng(4)
    first, second = (random_forest(rng, levels=1) for _ in range(2))
    n = first.size
    shifted = np.where(second.parent < 0, -1, second.parent + n)
    both = Forest(np.concatenate([first.tokens, second.tokens]),
                  np.concatenate([first.parent, shifted]))
    batch = batch_of(rng, both)
    params = tiny_params()
    left = batch["rows"] < n
    parts = []
    for forest, mine, start in ((first, left, 0), (second, ~left, n)):
        parts.append({"tokens": forest.tokens, "pos": forest.pos, "pred": forest.parent,
                      "sub_end": forest.sub_end, "rows": batch["rows"][mine] - start,
                      **{name: batch[name][mine] for name in ("w", "adv", "old_logp")}})
    value, metrics, grads = tree_loss_and_grads(params, pad(batch, N, R), **BLOCKWISE)
    (v1, m1, g1), (v2, m2, g2) = (
        tree_loss_and_grads(params, pad(p, N, R), **BLOCKWISE) for p in parts)
    np.testing.assert_allclose(v1 + v2, value, rtol=1e-5)
    assert relative_error(jax.tree.map(jnp.add, g1, g2), grads) < 1e-5
    np.testing.assert_allclose(m1["entropy_sum"] + m2["entropy_sum"], metrics["entropy_sum"],
                               rtol=1e-5)


def test_per_rollout_averaging_against_a_number_derived_by_hand():
    """Each execution counts once, however many tokens, rows or branches it has.

    The "model" gives every token the same logits (ln 4, ln 2, 0, 0), p = (1/2, 1/4, 1/8, 1/8), so
    that -logp = (1, 2, 3, 3) ln 2 for the tokens 0, 1, 2, 3. Loss of a token: -adv * logp.

    Execution A, adv 1, linear:     prompt 0, trains 0, 1        mean -logp = (1 + 2) / 2 = 3/2
    Execution B, adv -1/2, a tree:  prompt 0, trains 0, 2, then branches 1 and 3
                                                                 mean -logp = (1+3+2+3) / 4 = 9/4
    Mean over the 2 executions: (1 * 3/2 - 1/2 * 9/4) / 2 = 3/16, times ln 2.
    A mean over the 6 rows would be (3 - 9/2) / 6 = -1/4, over the 3 paths -2/9: the sign differs.
    """
    #                  A: 0  1  2   B: 3  4  5   6   7
    forest = Forest(np.array([0, 0, 1, 0, 0, 2, 1, 3], np.int32),
                    np.array([-1, 0, 1, -1, 3, 4, 5, 5], np.int32))
    batch = {"tokens": forest.tokens, "pos": forest.pos, "pred": forest.parent,
             "sub_end": forest.sub_end, "rows": np.array([1, 2, 4, 5, 6, 7], np.int32),
             "w": np.array([1 / 2] * 2 + [1 / 4] * 4, np.float32),
             "adv": np.array([1.0] * 2 + [-0.5] * 4, np.float32),
             "old_logp": np.zeros(6, np.float32)}
    unembed = np.log(np.array([[4.0], [2.0], [1.0], [1.0]], np.float32))

    def reinforce(logp, old_logp, adv, w):
        return (w * -adv * logp).sum(), {}

    loss_sum, metrics = micro_loss(lambda tokens, pos, attend: jnp.ones((len(tokens), 1)), unembed,
                                   pad(batch, 16, 8), reinforce, 1.0)
    executions = 2
    np.testing.assert_allclose(loss_sum / executions, 3 / 16 * np.log(2), rtol=1e-6)
    assert metrics["w_sum"] == executions and metrics["rows"] == 6
    np.testing.assert_allclose(metrics["entropy_sum"], executions * 1.75 * np.log(2), rtol=1e-6)


def test_a_metric_that_is_taken_is_refused():
    _, batch, params = case(0, 1)

    def greedy_namer(logp, old_logp, adv, w):
        return logp.sum(), {"entropy_sum": logp.sum()}

    with pytest.raises(ValueError, match="entropy_sum"):
        micro_loss(lambda tokens, pos, attend: params["embed"][tokens], params["embed"], batch,
                   greedy_namer, 1.0)
