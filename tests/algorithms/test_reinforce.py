import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gyre.algorithms import make_algorithm
from gyre.base.errors import ConfigError


def test_leave_one_out_by_hand():
    # 1 - (0.5 + 0) / 2 = 0.75;  0.5 - (1 + 0) / 2 = 0;  0 - (1 + 0.5) / 2 = -0.75
    adv = make_algorithm("reinforce").advantages([1.0, 0.5, 0.0], np.ones(3, bool))
    np.testing.assert_allclose(adv, [0.75, 0.0, -0.75], atol=1e-7)


def test_loss_by_hand():
    # ratios 4 and 1/2; -A log p * w = -2 * (-1) * 0.5 = 1 and -(-1) * (-3) * 1 = -3
    logp = jnp.array([-1.0, -3.0])
    old = logp - jnp.log(jnp.array([4.0, 0.5]))
    adv, w = jnp.array([2.0, -1.0]), jnp.array([0.5, 1.0])

    def run(**options):
        algorithm = make_algorithm("reinforce", **options)
        return jax.value_and_grad(algorithm.loss, has_aux=True)(logp, old, adv, w)

    (loss, metrics), grad = run()
    assert float(loss) == pytest.approx(-2.0)
    np.testing.assert_allclose(grad, [-1.0, 1.0], rtol=1e-6)
    assert float(metrics["clip_fraction_sum"]) == 0
    # Importance weights min(4, 2) = 2 and 1/2, constants: 2 * 1 and -3 / 2.
    (loss, metrics), grad = run(importance_cap=2.0)
    assert float(loss) == pytest.approx(2.0 - 1.5, rel=1e-5)
    np.testing.assert_allclose(grad, [-2.0, 0.5], rtol=1e-5)
    assert float(metrics["clip_fraction_sum"]) == pytest.approx(0.5)


def test_bad_settings():
    with pytest.raises(ConfigError, match="importance_cap must not be negative, got -1"):
        make_algorithm("reinforce", importance_cap=-1)
