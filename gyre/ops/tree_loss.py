"""The policy loss of one packed micro-step of trees, as sums that add up over any split.

Invariants:
- every trained token is scored once, by the hidden state of its predecessor in the tree (never by
  the row before it, which is wrong at every branch and at every tree's start);
- nothing is divided here: weights come with the batch (1/n_train of the row's execution), and the
  number of executions divides the summed gradient of the whole step once.

This module knows neither models nor algorithms; it is given a forward function and a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from gyre.ops.token_logprobs import token_logprobs
from gyre.ops.tree_attention import tree_attention

Batch = Mapping[str, jax.Array]
Attend = Callable[..., tuple[jax.Array, None]]
# (tokens i32[N], pos i32[N], attend) -> hidden float[N, D] after the final norm.
ForwardHidden = Callable[[jax.Array, jax.Array, Attend], jax.Array]
# (logp, old_logp, adv, w), each float[R] -> (sum of w * loss, metrics as sums).
PolicyLoss = Callable[[jax.Array, jax.Array, jax.Array, jax.Array],
                      tuple[jax.Array, dict[str, jax.Array]]]

BATCH_FIELDS = {"tokens": "int32", "pos": "int32", "pred": "int32", "sub_end": "int32",
                "rows": "int32", "w": "float32", "adv": "float32", "old_logp": "float32"}


def micro_loss(forward_hidden: ForwardHidden, unembed: jax.Array, batch: Batch,
               policy_loss: PolicyLoss, temperature: float | jax.Array, *, chunk_rows: int = 256,
               block_size: int | None = None, dense_below: int = 64,
               remat_attention: bool = False) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss and metrics of one micro-step.

    Args:
      forward_hidden: runs the model with the given attention.
      unembed: float[V, D].
      batch: arrays of `BATCH_FIELDS`. i32[N]: tokens, pos (depth in the tree), pred (index of the
        predecessor, -1 at a root), sub_end (exclusive end of the subtree). Per trained row [R]:
        rows i32 (index of the trained token), w f32 (its execution's weight; 0 is padding), adv f32
        (advantage), old_logp f32 (log-prob when it was sampled).
      policy_loss: the algorithm's loss.
      temperature: of the sampling distribution; see `token_logprobs`.
      chunk_rows: see `token_logprobs`.
      block_size, dense_below: see `tree_attention`.
      remat_attention: recompute the attention of each layer in the backward pass, where the model
        does not recompute whole layers itself.

    Returns:
      loss_sum, a scalar: the sum over rows of w * loss; and metrics, scalars that are sums too:
      `loss_sum`, `w_sum`, `rows` (rows with weight), `entropy_sum` (w * nats) and the algorithm's.

    Raises:
      ValueError: the algorithm names a metric that is taken.
    """
    attention = _attention(batch["sub_end"], block_size, dense_below)
    if remat_attention:
        attention = jax.checkpoint(attention, prevent_cse=False)

    hidden = forward_hidden(batch["tokens"], batch["pos"],
                            lambda q, k, v, _: (attention(q, k, v), None))
    logp, entropy = row_logprobs(hidden, unembed, batch, temperature, chunk_rows)
    loss_sum, algorithm_metrics = policy_loss(logp, batch["old_logp"], batch["adv"], batch["w"])
    metrics = {"loss_sum": loss_sum, "w_sum": batch["w"].sum(),
               "rows": (batch["w"] > 0).sum().astype(logp.dtype),
               "entropy_sum": (batch["w"] * entropy).sum()}
    taken = sorted(set(metrics) & set(algorithm_metrics))
    if taken:
        raise ValueError(f"the algorithm's loss returns metrics {taken}, which every step has "
                         "already; name them differently")
    return loss_sum, metrics | algorithm_metrics


def _attention(sub_end, block_size, dense_below):
    return lambda q, k, v: tree_attention(q, k, v, sub_end, block_size=block_size,
                                          dense_below=dense_below)


def row_logprobs(hidden: jax.Array, unembed: jax.Array, batch: Batch,
                 temperature: float | jax.Array,
                 chunk_rows: int = 256) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy of every trained row: hidden[pred[row]] predicts tokens[row].

    Args:
      hidden: float[N, D].
      unembed: float[V, D].
      batch: needs `tokens`, `pred` and `rows`; see `micro_loss`.
      temperature, chunk_rows: see `token_logprobs`.

    Returns:
      logp float[R] and entropy float[R]. Padded rows have finite numbers without meaning.
    """
    # Padding points at row 0, a root without predecessor; the clamp keeps its index valid.
    sources = jnp.maximum(batch["pred"][batch["rows"]], 0)
    return token_logprobs(hidden[sources], unembed, batch["tokens"][batch["rows"]], temperature,
                          chunk_rows)
