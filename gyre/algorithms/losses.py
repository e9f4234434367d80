"""Per-token policy losses and estimators: pure functions of float[R] arrays, no reduction.

Losses are to be minimised. R is the axis of trained tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# exp(20) is 4.9e8: far beyond any clip range, and finite in every dtype with float32's exponent.
MAX_LOG_RATIO = 20.0


def clipped_log_ratio(logp: jax.Array, old_logp: jax.Array) -> jax.Array:
    """log(p / p_old), limited to +-MAX_LOG_RATIO so that its exponential is finite.

    Beyond the limit the gradient through the ratio is 0.
    """
    return jnp.clip(logp - old_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_k3(log_ratio: jax.Array) -> jax.Array:
    """The k3 estimate of KL(behaviour || current) from behaviour samples: exp(x) - 1 - x >= 0."""
    return jnp.expm1(log_ratio) - log_ratio


def ppo_clip(log_ratio: jax.Array, adv: jax.Array, clip_low: float,
             clip_high: float) -> tuple[jax.Array, jax.Array]:
    """PPO's clipped surrogate: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = p / p_old.

    Returns:
      The loss, and 1.0 where the clip took the gradient away, else 0.0.
    """
    ratio = jnp.exp(log_ratio)
    limited = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    is_clipped = limited * adv < ratio * adv
    return -jnp.minimum(ratio * adv, limited * adv), is_clipped.astype(ratio.dtype)


def truncated_importance_weight(log_ratio: jax.Array, cap: float) -> jax.Array:
    """min(p / p_old, cap) as a constant: no gradient flows through it."""
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio), cap))
