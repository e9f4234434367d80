import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gyre.algorithms import make_algorithm
from gyre.base.errors import ConfigError


def test_advantages_by_hand():
    # mean 1/4, variance (9/16 + 3 * 1/16) / 4 = 3/16, std sqrt(3)/4:
    # (3/4) / (sqrt(3)/4) = sqrt(3), (-1/4) / (sqrt(3)/4) = -1/sqrt(3).
    adv = make_algorithm("grpo").advantages([1, 0, 0, 0], np.ones(4, bool))
    np.testing.assert_allclose(adv, [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], rtol=1e-6)
    adv = make_algorithm("grpo", normalize_by_std=False).advantages([1, 0, 0, 0], np.ones(4, bool))
    np.testing.assert_allclose(adv, [0.75, -0.25, -0.25, -0.25], rtol=1e-6)


def test_loss_by_hand():
    # ratios 2, 2, 1/2, 1/2 with advantages 1, -1, 1, -1 and the clip [0.8, 1.2]:
    #   A=+1 r=2:   -min(2, 1.2)     = -1.2, clipped, no gradient
    #   A=-1 r=2:   -min(-2, -1.2)   =  2.0, gradient  r = 2
    #   A=+1 r=1/2: -min(0.5, 0.8)   = -0.5, gradient -r = -1/2
    #   A=-1 r=1/2: -min(-0.5, -0.8) =  0.8, clipped, no gradient
    # weights 1, 1/2, 1/4, 1/8: -1.2 + 1.0 - 0.125 + 0.1 = -0.225
    algorithm = make_algorithm("grpo")
    old = jnp.full(4, -2.0)
    logp = old + jnp.log(jnp.array([2.0, 2.0, 0.5, 0.5]))
    adv, w = jnp.array([1.0, -1.0, 1.0, -1.0]), jnp.array([1.0, 0.5, 0.25, 0.125])
    (loss, metrics), grad = jax.value_and_grad(algorithm.loss, has_aux=True)(logp, old, adv, w)
    assert float(loss) == pytest.approx(-0.225, rel=1e-5)
    np.testing.assert_allclose(grad, [0, 1.0, -0.125, 0], atol=1e-6)
    assert float(metrics["clip_fraction_sum"]) == pytest.approx(1 + 0.125)


def test_a_higher_upper_clip_keeps_the_gradient_of_rising_tokens():
    logp, old, one = jnp.log(jnp.array([1.25])), jnp.zeros(1), jnp.ones(1)
    for high, expected in ((0.2, 0.0), (0.28, -1.25)):
        loss = make_algorithm("grpo", clip_high=high).loss
        grad, _ = jax.grad(loss, has_aux=True)(logp, old, one, one)
        assert float(grad[0]) == pytest.approx(expected)


@pytest.mark.parametrize("options", [{"clip_low": -0.1}, {"clip_low": 1.1}, {"clip_high": -0.1},
                                     {"normalize_by_std": 1.0}])
def test_bad_settings(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_algorithm("grpo", **options)
