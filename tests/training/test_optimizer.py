"""One update, against AdamW written out in numpy."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gyre.base.errors import ConfigError
from gyre.training.optimizer import Optimizer, decay_mask


def params():
    rng = np.random.default_rng(0)
    return {"embed": rng.normal(size=(5, 3)).astype(np.float32),
            "blocks": {"q": rng.normal(size=(2, 3, 3)).astype(np.float32),
                       "attn_norm": np.ones((2, 3), np.float32)},
            "final_norm": np.ones(3, np.float32)}


def random_like(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32) * 4, tree)


def by_hand(settings, params, grad_sums, denominator):
    """AdamW in float64 over a list of gradient sums -> parameters and norms."""
    leaves, treedef = jax.tree.flatten(params)
    decays = jax.tree.leaves(decay_mask(params))
    p = [x.astype(np.float64) for x in leaves]
    m, v, norms = [0.0] * len(p), [0.0] * len(p), []
    for t, grad_sum in enumerate(grad_sums):
        g = [x.astype(np.float64) / denominator for x in jax.tree.leaves(grad_sum)]
        norms.append(np.sqrt(sum((x**2).sum() for x in g)))
        if settings.clip_norm and norms[-1] > settings.clip_norm:
            g = [x * settings.clip_norm / norms[-1] for x in g]
        rate = settings.learning_rate
        if settings.warmup_steps:
            rate *= min(1.0, (t + 1) / settings.warmup_steps)
        for i in range(len(p)):
            m[i] = settings.b1 * m[i] + (1 - settings.b1) * g[i]
            v[i] = settings.b2 * v[i] + (1 - settings.b2) * g[i]**2
            mean, square = m[i] / (1 - settings.b1**(t + 1)), v[i] / (1 - settings.b2**(t + 1))
            step = mean / (np.sqrt(square) + settings.eps)
            p[i] = p[i] - rate * (step + settings.weight_decay * decays[i] * p[i])
    return jax.tree.unflatten(treedef, p), norms


@pytest.mark.parametrize("settings", [
    Optimizer(0.1), Optimizer(0.1, warmup_steps=2, weight_decay=0.1, b1=0.8, b2=0.9, clip_norm=0.5),
    Optimizer(0.1, clip_norm=0.0)])
def test_three_updates_equal_adamw_by_hand(settings):
    start, denominator = params(), 6
    grad_sums = [random_like(start, seed) for seed in range(3)]
    want, norms = by_hand(settings, start, grad_sums, denominator)
    optimizer = settings.on()
    now, state = jax.device_put(start), optimizer.init(start)
    for t, grad_sum in enumerate(grad_sums):
        now, state, norm, rate = optimizer.apply(now, state, jax.device_put(grad_sum), denominator)
        np.testing.assert_allclose(norm, norms[t], rtol=1e-5)
        np.testing.assert_allclose(rate, settings.rate(t), rtol=1e-6)
    for got, expected in zip(jax.tree.leaves(now), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_norm_scales_do_not_decay():
    assert decay_mask(params()) == {"embed": True, "final_norm": False,
                                    "blocks": {"q": True, "attn_norm": False}}


def test_warm_up_begins_above_zero():
    settings = Optimizer(1.0, warmup_steps=4)
    assert [float(settings.rate(t)) for t in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_state_and_gradients_are_donated_and_parameters_are_not():
    optimizer = Optimizer(0.1).on()
    start = jax.device_put(params())
    before = jax.tree.map(np.array, start)
    state, grads = optimizer.init(start), jax.device_put(random_like(params(), 0))
    moments = [x for x in jax.tree.leaves(state) if x.ndim]
    optimizer.apply(start, state, grads, 1)
    assert all(x.is_deleted() for x in moments)
    assert all(x.is_deleted() for x in jax.tree.leaves(grads))
    for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_step_without_micro_steps_is_a_gradient_of_zero():
    optimizer = Optimizer(0.1).on()
    start = jax.device_put(params())
    after, state, norm, _ = optimizer.apply(start, optimizer.init(start), None, 0)
    assert norm == 0
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(start), strict=True):
        np.testing.assert_array_equal(a, b)
    grads = jax.device_put(random_like(params(), 0))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        optimizer.apply(start, state, grads, 0)


def test_state_lies_where_the_parameters_lie():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"),
                axis_types=(AxisType.Auto,) * 2)
    shardings = jax.tree.map(
        lambda p: NamedSharding(mesh, PartitionSpec(*([None] * (p.ndim - 1)), "fsdp")), params())
    optimizer = Optimizer(0.1, warmup_steps=3, weight_decay=0.1).on(shardings)
    start = jax.device_put(params(), shardings)
    state, target = optimizer.init(start), optimizer.abstract_state(start)
    assert jax.tree.structure(state) == jax.tree.structure(target)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(target), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)
        assert want.sharding.spec == (PartitionSpec(*([None] * (got.ndim - 1)), "fsdp") if got.ndim
                                      else PartitionSpec())
    after, state, norm, rate = optimizer.apply(
        start, state, jax.device_put(random_like(params(), 0), shardings), 2)
    assert np.isfinite(norm) and np.isclose(rate, 0.1 / 3)
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(shardings), strict=True):
        assert got.sharding.is_equivalent_to(want, got.ndim)


@pytest.mark.parametrize("bad", [dict(learning_rate=0.0), dict(learning_rate=1.0, b1=1.0),
                                 dict(learning_rate=1.0, clip_norm=-1.0),
                                 dict(learning_rate=float("nan"))])
def test_settings_that_cannot_work_are_refused(bad):
    with pytest.raises(ConfigError, match="optimizer."):
        Optimizer(**bad)
