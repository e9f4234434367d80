"""Copy this file to make an algorithm of your own, then:

1. rename the file, the class and the registered name, and import the module in `__init__.py`;
2. write the maths here, in the docstring, with its reference;
3. change the two methods. Masking, weights, sums and groups without signal are the base class's.

The test battery in tests/algorithms runs over every registered algorithm, yours included; train
with `--config.algorithm.name=NAME`.

As it stands this is the plain importance-sampled policy gradient with a mean baseline:

    A_i = r_i - mean(r)
    L_t = -A p(t) / p_behaviour(t)
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from gyre.algorithms.advantages import centred
from gyre.algorithms.core import ALGORITHMS, Algorithm
from gyre.base.errors import ConfigError


@ALGORITHMS.register("forkme")
@dataclasses.dataclass(frozen=True)
class ForkMe(Algorithm):
    """An algorithm to copy.

    Attributes:
      scale: multiplies every advantage: a setting, to show where settings go.
    """

    scale: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if self.scale <= 0:
            raise ConfigError(f"scale must be positive, got {self.scale}")

    def group_advantages(self, scores: np.ndarray) -> np.ndarray:
        return self.scale * centred(scores)

    def token_loss(self, logp, log_ratio, adv):
        return -adv * jnp.exp(log_ratio), {}
