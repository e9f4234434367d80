"""REINFORCE with a leave-one-out baseline, RLOO (Ahmadian et al., arXiv 2402.14740).

    A_i = r_i - mean over j != i of r_j
    L_t = -c_t A log p(t),   c_t = 1, or min(p(t) / p_behaviour(t), importance_cap) as a constant
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from gyre.algorithms.advantages import leave_one_out
from gyre.algorithms.core import ALGORITHMS, Algorithm
from gyre.algorithms.losses import truncated_importance_weight
from gyre.base.errors import ConfigError


@ALGORITHMS.register("reinforce")
@dataclasses.dataclass(frozen=True)
class Reinforce(Algorithm):
    """RLOO.

    Attributes:
      importance_cap: corrects for stale tokens by their probability ratio, at most this; 0 turns
        the correction off, which is the published, on-policy setting.
    """

    importance_cap: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.importance_cap < 0:
            raise ConfigError(f"importance_cap must not be negative, got {self.importance_cap}")

    def group_advantages(self, scores: np.ndarray) -> np.ndarray:
        return leave_one_out(scores)

    def token_loss(self, logp, log_ratio, adv):
        if self.importance_cap == 0:
            return -adv * logp, {"clip_fraction": jnp.zeros_like(logp)}
        weight = truncated_importance_weight(log_ratio, self.importance_cap)
        is_capped = (jnp.exp(log_ratio) > self.importance_cap).astype(logp.dtype)
        return -weight * adv * logp, {"clip_fraction": is_capped}
