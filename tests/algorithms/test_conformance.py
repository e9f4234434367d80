"""What every registered algorithm must keep; a new one is tested by being registered."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.algorithms import ALGORITHMS, Algorithm, make_algorithm
from gyre.base.errors import ConfigError

every_algorithm = pytest.mark.parametrize("algorithm", [make_algorithm(n) for n in ALGORITHMS],
                                          ids=list(ALGORITHMS))
ALL = np.ones(4, bool)


def _value_and_grad(algorithm, logp, old_logp, adv, w):
    arrays = [jnp.asarray(x, jnp.float32) for x in (logp, old_logp, adv, w)]
    (loss, metrics), grad = jax.value_and_grad(algorithm.loss, has_aux=True)(*arrays)
    return float(loss), {k: float(v) for k, v in metrics.items()}, np.asarray(grad)


def test_the_published_methods_and_the_example_are_registered():
    assert {"grpo", "reinforce", "forkme"} <= set(ALGORITHMS)


# ---------------------------------------------------------------------------- advantages


@every_algorithm
def test_advantages_are_centred_and_ordered_like_the_scores(algorithm):
    adv = algorithm.advantages([0.2, 1.0, 0.0, 0.5], ALL)
    assert adv.dtype == np.float32 and adv.shape == (4,)
    assert np.argsort(adv).tolist() == [2, 0, 3, 1]
    assert abs(adv.sum()) < 1e-6


@every_algorithm
def test_a_group_without_variance_gets_zeros(algorithm):
    for scores in ([0.3] * 4, [0.3, 0.3 + 1e-9, 0.3, 0.3 - 1e-9], [0.1 + 0.2, 0.3, 0.3, 0.3]):
        assert algorithm.advantages(scores, ALL).tolist() == [0, 0, 0, 0]
    assert algorithm.advantages([0.3, 0.3001, 0.3, 0.3], ALL).any()


@every_algorithm
def test_fewer_than_two_scores_give_zeros(algorithm):
    assert algorithm.advantages([1.0, 0.0], [True, False]).tolist() == [0, 0]
    assert algorithm.advantages([1.0, 0.0], [False, False]).tolist() == [0, 0]
    assert algorithm.advantages([], []).shape == (0,)


@every_algorithm
def test_excluded_executions_do_not_shift_the_baseline(algorithm):
    alone = algorithm.advantages([1.0, 0.0, 0.25], np.ones(3, bool))
    for junk in (0.0, 1.0, -1e9, np.nan, np.inf):
        adv = algorithm.advantages([1.0, junk, 0.0, 0.25, junk], [True, False, True, True, False])
        np.testing.assert_array_equal(adv[[0, 2, 3]], alone)
        assert adv[1] == adv[4] == 0


@every_algorithm
def test_a_score_that_is_not_finite_cannot_be_in_the_baseline(algorithm):
    with pytest.raises(ValueError, match="must be finite"):
        algorithm.advantages([1.0, np.nan], [True, True])
    with pytest.raises(ValueError, match="one length"):
        algorithm.advantages([1.0, 0.0], [True])


@every_algorithm
@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_advantages_are_finite(algorithm, scores):
    assert np.isfinite(algorithm.advantages(scores, np.ones(len(scores), bool))).all()


# ---------------------------------------------------------------------------- loss


@every_algorithm
def test_values_and_gradients_are_finite_far_off_policy(algorithm):
    logp = [-1e4, -50.0, -1.0, -1e-6, 0.0, -300.0]
    old = [-1.0, -1e-3, -200.0, -90.0, -1e4, -300.0]
    for sign in (1.0, -1.0):
        loss, metrics, grad = _value_and_grad(algorithm, logp, old, [sign * 3] * 6, [0.1] * 6)
        assert np.isfinite(loss) and np.isfinite(grad).all() and np.isfinite(list(
            metrics.values())).all()


@every_algorithm
def test_padding_changes_nothing_whatever_is_in_it(algorithm):
    logp, old, adv, w = [-1.0, -2.0], [-1.1, -1.9], [1.0, -0.5], [0.25, 0.5]
    loss, metrics, grad = _value_and_grad(algorithm, logp, old, adv, w)
    assert grad.all()
    junk = [np.nan, np.inf, -np.inf, 1e30]
    padded = _value_and_grad(algorithm, logp + junk, old + junk[::-1], adv + junk, w + [0.0] * 4)
    assert padded[0] == pytest.approx(loss, rel=1e-6)
    assert padded[1] == pytest.approx(metrics, rel=1e-6)
    np.testing.assert_allclose(padded[2], [*grad, 0, 0, 0, 0], rtol=1e-6)


@every_algorithm
def test_losses_and_metrics_are_sums(algorithm):
    rng = np.random.default_rng(0)
    logp, old = rng.normal(-2, 0.3, (2, 12))
    adv, w = rng.normal(0, 1, 12), rng.uniform(0.1, 1, 12)
    whole = _value_and_grad(algorithm, logp, old, adv, w)
    parts = [_value_and_grad(algorithm, logp[p], old[p], adv[p], w[p])
             for p in (slice(0, 5), slice(5, 12))]
    assert whole[0] == pytest.approx(sum(p[0] for p in parts), rel=1e-5)
    for name, value in whole[1].items():
        assert name.endswith("_sum")
        assert value == pytest.approx(sum(p[1][name] for p in parts), rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(whole[2], np.concatenate([p[2] for p in parts]), rtol=1e-5)
    doubled = _value_and_grad(algorithm, logp, old, adv, 2 * w)
    assert doubled[0] == pytest.approx(2 * whole[0], rel=1e-5)


@every_algorithm
def test_on_policy_the_gradient_is_the_policy_gradient(algorithm):
    logp, adv, w = [-1.0, -0.2, -3.0], [1.0, -2.0, 0.5], [0.5, 0.25, 0.125]
    _, metrics, grad = _value_and_grad(algorithm, logp, logp, adv, w)
    np.testing.assert_allclose(grad, -np.multiply(adv, w), rtol=1e-6)
    assert metrics["mismatch_kl_sum"] == 0
    assert metrics["ratio_sum"] == pytest.approx(sum(w))


@every_algorithm
def test_the_mismatch_metric_is_k3(algorithm):
    # Current minus behaviour log-prob is log 2 and log 1/2: k3 = e^x - 1 - x.
    x = np.log([2.0, 0.5])
    _, metrics, _ = _value_and_grad(algorithm, -3 + x, [-3.0, -3.0], [1.0, 1.0], [0.5, 0.25])
    expected = 0.5 * (2 - 1 - x[0]) + 0.25 * (0.5 - 1 - x[1])
    assert metrics["mismatch_kl_sum"] == pytest.approx(expected, rel=1e-5)
    assert metrics["ratio_sum"] == pytest.approx(0.5 * 2 + 0.25 * 0.5, rel=1e-6)


@every_algorithm
def test_loss_compiles_and_keeps_float32(algorithm):
    loss, metrics = jax.jit(algorithm.loss)(*jnp.ones((4, 3), jnp.float32))
    assert loss.shape == () and loss.dtype == jnp.float32
    assert all(m.shape == () and m.dtype == jnp.float32 for m in metrics.values())


# ---------------------------------------------------------------------------- settings


@every_algorithm
def test_algorithms_are_frozen_values(algorithm):
    assert isinstance(algorithm, Algorithm) and hash(algorithm) == hash(type(algorithm)())
    with pytest.raises(dataclasses.FrozenInstanceError):
        algorithm.variance_tolerance = 1.0


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_options_are_checked(name):
    assert make_algorithm(name, variance_tolerance=0.5).variance_tolerance == 0.5
    assert not make_algorithm(name, variance_tolerance=0.5).advantages([0.2, 0.6], [True] * 2).any()
    with pytest.raises(ConfigError, match=f"{name!r} has no option 'nonsense'; available: .*toler"):
        make_algorithm(name, nonsense=1)
    for value in ("0.1", None, True, float("nan")):
        with pytest.raises(ConfigError, match="'variance_tolerance' .* must be a finite number"):
            make_algorithm(name, variance_tolerance=value)
    with pytest.raises(ConfigError, match="must not be negative"):
        make_algorithm(name, variance_tolerance=-1)


def test_unknown_names_list_what_exists():
    with pytest.raises(ConfigError, match="unknown algorithm 'gpro'; available: .*grpo"):
        make_algorithm("gpro")
