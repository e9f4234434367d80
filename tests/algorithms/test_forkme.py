import jax.numpy as jnp
import numpy as np
import pytest

from gyre.algorithms import make_algorithm
from gyre.base.errors import ConfigError


def test_the_example_by_hand():
    algorithm = make_algorithm("forkme", scale=2.0)
    adv = algorithm.advantages([1.0, 0.0], np.ones(2, bool))
    np.testing.assert_allclose(adv, [1.0, -1.0])
    # ratios 2 and 1/2: -(1 * 2) / 2 and -(-1 * 1/2) / 2
    loss, _ = algorithm.loss(jnp.log(jnp.array([2.0, 0.5])), jnp.zeros(2), jnp.asarray(adv),
                             jnp.full(2, 0.5))
    assert float(loss) == pytest.approx(-1.0 + 0.25)


def test_bad_settings():
    with pytest.raises(ConfigError, match="scale must be positive"):
        make_algorithm("forkme", scale=0)
