"""What an RL algorithm is: advantages within a group, and a per-token policy loss.

The base class keeps what the trainer relies on, so that an algorithm is only its maths:
- executions outside the baseline get 0 and do not shift the others;
- a group without variance, or with fewer than two scores, gets zeros;
- a loss is a sum over rows times their weights, never a mean: denominators come from outside;
- a row with weight 0 (padding, whose numbers mean nothing) changes neither value nor gradient.

Not for schedules, sampling or data: the trainer knows no algorithm and an algorithm no trainer.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gyre.algorithms.advantages import has_signal
from gyre.algorithms.losses import clipped_log_ratio, kl_k3
from gyre.base.errors import ConfigError
from gyre.base.registry import Registry

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Algorithm(abc.ABC):
    """Base of all algorithms. Fields are its settings; their defaults are the published ones.

    Attributes:
      variance_tolerance: scores of a group that differ by no more than this carry no signal; it
        keeps float noise from being blown up by a division by the standard deviation.
    """

    variance_tolerance: float = 1e-6

    def __post_init__(self):
        if self.variance_tolerance < 0:
            raise ConfigError(
                f"variance_tolerance must not be negative, got {self.variance_tolerance}")

    @abc.abstractmethod
    def group_advantages(self, scores: np.ndarray) -> np.ndarray:
        """Advantages f64[m] of scores f64[m] that differ; m >= 2, all of them in the baseline."""

    @abc.abstractmethod
    def token_loss(self, logp: jax.Array, log_ratio: jax.Array,
                   adv: jax.Array) -> tuple[jax.Array, Metrics]:
        """The loss of each trained token, to be minimised.

        Args:
          logp: float[R], log-prob under the weights that are trained.
          log_ratio: float[R], logp less the behaviour log-prob, limited so that exp is finite.
          adv: float[R].

        Returns:
          float[R], and metrics float[R] by name; the step reports their weighted means.
        """

    def advantages(self, scores: np.ndarray, in_baseline: np.ndarray) -> np.ndarray:
        """Advantages of a group's executions.

        Args:
          scores: float[n]; the values outside the baseline are ignored (NaN is fine there).
          in_baseline: bool[n].

        Returns:
          f32[n]; 0 outside the baseline, all 0 when the baseline has no signal.

        Raises:
          ValueError: shapes that differ, a score in the baseline that is not finite.
        """
        scores = np.asarray(scores, np.float64)
        in_baseline = np.asarray(in_baseline, bool)
        if scores.ndim != 1 or scores.shape != in_baseline.shape:
            raise ValueError("scores and in_baseline must be vectors of one length, got shapes "
                             f"{scores.shape} and {in_baseline.shape}")
        kept = scores[in_baseline]
        if not np.isfinite(kept).all():
            raise ValueError(f"scores in the baseline must be finite, got {kept.tolist()}; exclude "
                             "executions without a measured score")
        out = np.zeros(scores.shape, np.float32)
        if has_signal(kept, self.variance_tolerance):
            out[in_baseline] = self.group_advantages(kept)
        return out

    def loss(self, logp: jax.Array, old_logp: jax.Array, adv: jax.Array,
             w: jax.Array) -> tuple[jax.Array, Metrics]:
        """The policy loss of a micro-step's rows.

        Args:
          logp: float[R], log-probs under the weights that are trained; carries the gradient.
          old_logp: float[R], behaviour log-probs.
          adv: float[R], advantages.
          w: float[R], weights; 0 is padding.

        Returns:
          The sum over rows of w * loss, and metrics as such sums too (divide by the sum of w):
          `mismatch_kl_sum`, KL(behaviour || current) by the k3 estimator; `ratio_sum`, the
          probability ratio; `NAME_sum` for each metric of the algorithm.
        """
        live = w > 0
        # Selected before any maths: 0 * inf is NaN, and so is the gradient of a masked overflow.
        logp, old_logp, adv = (jnp.where(live, x, 0.0) for x in (logp, old_logp, adv))
        log_ratio = clipped_log_ratio(logp, old_logp)
        per_token, extra = self.token_loss(logp, log_ratio, adv)
        metrics = {"mismatch_kl": kl_k3(log_ratio), "ratio": jnp.exp(log_ratio), **extra}
        return (w * per_token).sum(), {
            f"{name}_sum": jax.lax.stop_gradient((w * value).sum())
            for name, value in metrics.items()}


ALGORITHMS: Registry[type[Algorithm]] = Registry("algorithm")


def make_algorithm(name: str, **options: Any) -> Algorithm:
    """The algorithm called `name`.

    Args:
      name: as registered in `ALGORITHMS`.
      **options: settings that differ from the published ones.

    Raises:
      ConfigError: an unknown name or option, a value of the wrong type or out of range.
    """
    cls = ALGORITHMS.get(name)
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    for option, value in options.items():
        if option not in defaults:
            raise ConfigError(f"algorithm {name!r} has no option {option!r}; available: "
                              f"{', '.join(sorted(defaults))}")
        default = defaults[option]
        if isinstance(default, bool):
            fits, expected = isinstance(value, bool), "true or false"
        else:
            fits = (isinstance(value, int | float) and not isinstance(value, bool)
                    and math.isfinite(value))
            expected = "a finite number"
        if not fits:
            raise ConfigError(
                f"option {option!r} of algorithm {name!r} must be {expected}, got {value!r}")
    return cls(**options)
