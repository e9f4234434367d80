"""GRPO: group-standardised advantages with PPO's clip (Shao et al., arXiv 2402.03300).

    A_i = (r_i - mean(r)) / std(r)
    L_t = -min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A),   r_t = p(t) / p_behaviour(t)

No penalty towards a reference policy: the policy that sampled is the only anchor.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gyre.algorithms.advantages import centred, standardised
from gyre.algorithms.core import ALGORITHMS, Algorithm
from gyre.algorithms.losses import ppo_clip
from gyre.base.errors import ConfigError


@ALGORITHMS.register("grpo")
@dataclasses.dataclass(frozen=True)
class Grpo(Algorithm):
    """GRPO.

    Attributes:
      clip_low, clip_high: the ratio is held in [1 - clip_low, 1 + clip_high]. A higher upper bound,
        0.28, is "clip-higher" of DAPO (arXiv 2503.14476).
      normalize_by_std: divide by the group's standard deviation; without it groups of any spread
        weigh by their spread (Dr. GRPO, arXiv 2503.20783).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    normalize_by_std: bool = True

    def __post_init__(self):
        super().__post_init__()
        if not 0.0 <= self.clip_low <= 1.0:
            raise ConfigError(f"clip_low must be in [0, 1], got {self.clip_low}")
        if self.clip_high < 0.0:
            raise ConfigError(f"clip_high must not be negative, got {self.clip_high}")

    def group_advantages(self, scores: np.ndarray) -> np.ndarray:
        return standardised(scores) if self.normalize_by_std else centred(scores)

    def token_loss(self, logp, log_ratio, adv):
        loss, is_clipped = ppo_clip(log_ratio, adv, self.clip_low, self.clip_high)
        return loss, {"clip_fraction": is_clipped}
