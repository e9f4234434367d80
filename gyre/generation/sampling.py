"""Sampling keyed by (seed, position): a call's tokens do not depend on where or beside whom it runs.

Axes: S slots, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_CHUNK = 128


def uniform_at(seed: jax.Array, position: jax.Array) -> jax.Array:
    """One uniform number in [0, 1) per slot from its seed u32[S] and position i32[S] -> f32[S]."""
    def one(s, p):
        return jax.random.uniform(jax.random.fold_in(jax.random.key(s), p))
    return jax.vmap(one)(seed, position)


def sample(logits: jax.Array, u: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws one token per slot by inverting the cumulative distribution at `u`.

    The sums run over chunks of 128 tokens first, which needs one random number a token instead of V
    and is cheap on every backend.

    Args:
      logits: f32[S, V].
      u: f32[S] in [0, 1).
      temperature: f32[S]; 0 takes the most probable token.

    Returns:
      tokens i32[S] and log-probs f32[S] of the distribution that was sampled from: the tempered one,
      or the plain one (temperature 1) for greedy slots.
    """
    vocab = logits.shape[1]
    greedy = temperature <= 0.0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    logz = jax.nn.logsumexp(scaled, axis=-1)
    pad = -vocab % _CHUNK
    probs = jnp.pad(jnp.exp(scaled - logz[:, None]), ((0, 0), (0, pad)))
    chunks = probs.reshape(probs.shape[0], -1, _CHUNK)
    below = jnp.cumsum(chunks.sum(-1), axis=-1)  # [S, C]
    total = below[:, -1]  # differs from 1 by rounding
    target = jnp.minimum(u * total, jnp.nextafter(total, 0.0))  # so that some sum is above it
    chunk = jnp.argmax(below > target[:, None], axis=-1)
    start = jnp.where(chunk > 0, jnp.take_along_axis(below, jnp.maximum(chunk - 1, 0)[:, None],
                                                     axis=1)[:, 0], 0.0)
    inside = jnp.take_along_axis(chunks, chunk[:, None, None], axis=1)[:, 0]  # [S, 128]
    cumulative = start[:, None] + jnp.cumsum(inside, axis=-1)
    # Only tokens with probability count; rounding may leave the target above the last sum.
    hit = (cumulative > target[:, None]) & (inside > 0)
    last = _CHUNK - 1 - jnp.argmax(inside[:, ::-1] > 0, axis=-1)
    offset = jnp.where(hit.any(-1), jnp.argmax(hit, axis=-1), last)
    tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1), chunk * _CHUNK + offset)
    logp = jnp.take_along_axis(scaled, tokens[:, None], axis=1)[:, 0] - logz
    return tokens.astype(jnp.int32), logp
