"""Log-probabilities of given tokens under a tempered output distribution, in bounded memory.

Invariant: logits are never held for more than `chunk_rows` rows at once, in the backward pass
neither. The numbers are those of the sampling distribution `softmax(logits / temperature)` over the
whole vocabulary, which is what the engine records.

Axes: R rows, D model width, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token_logprobs(hidden: jax.Array, unembed: jax.Array, targets: jax.Array,
                   temperature: float | jax.Array = 1.0,
                   chunk_rows: int = 256) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each row's target and the entropy of its distribution.

    Args:
      hidden: float[R, D], after the final norm.
      unembed: float[V, D].
      targets: i32[R], each in [0, V).
      temperature: positive; divides the logits.
      chunk_rows: static; rows whose logits exist together. Up to this many rows nothing is computed
        twice; above it each chunk's logits are recomputed in the backward pass.

    Returns:
      logp float[R], differentiable, and entropy float[R] in nats, a metric without gradient.

    Raises:
      ValueError: shapes that do not belong together, a temperature known to be 0 or less.
    """
    if hidden.ndim != 2 or unembed.ndim != 2 or hidden.shape[1] != unembed.shape[1]:
        raise ValueError(f"expected hidden [R, D] and unembed [V, D], got {hidden.shape} and "
                         f"{unembed.shape}")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"expected targets [{hidden.shape[0]}], got {targets.shape}")
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
    if isinstance(temperature, int | float) and temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}: greedy decoding has no "
                         "log-probabilities; train on calls that were sampled")
    rows = hidden.shape[0]
    if rows <= chunk_rows:
        return _chunk_logprobs(hidden, unembed, targets, temperature)

    padding = -rows % chunk_rows
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, chunk_rows, hidden.shape[1])
    targets = jnp.pad(targets, (0, padding)).reshape(-1, chunk_rows)
    # prevent_cse is for code outside loops; inside a scan it only blocks fusion.
    chunk = jax.checkpoint(_chunk_logprobs, prevent_cse=False)

    def visit(_, part):
        return None, chunk(part[0], unembed, part[1], temperature)

    _, (logp, entropy) = jax.lax.scan(visit, None, (hidden, targets))
    return logp.reshape(-1)[:rows], entropy.reshape(-1)[:rows]


def _chunk_logprobs(hidden, unembed, targets, temperature):
    """One chunk, its logits [C, V] in one piece."""
    logits = jnp.einsum("cd,vd->cv", hidden, unembed) / temperature
    log_total = jax.nn.logsumexp(logits, axis=-1)
    # A comparison instead of a gather: it fuses, and it partitions when V lies over devices.
    hit = jnp.arange(unembed.shape[0], dtype=targets.dtype)[None, :] == targets[:, None]
    logp = jnp.where(hit, logits, 0).sum(axis=-1) - log_total
    z = jax.lax.stop_gradient(logits)
    z_total = jax.lax.stop_gradient(log_total)
    entropy = z_total - (jnp.exp(z - z_total[:, None]) * z).sum(axis=-1)
    return logp, entropy
