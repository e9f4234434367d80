"""The core's optimizer step: mean of the summed gradient, clip, AdamW with warm-up.

Invariant: losses and gradients travel as sums; this is the only place that divides them, by the
executions in the baseline of the whole step. Parameters are never donated, because snapshots of
them may be in use by rollout cells; optimizer state and gradients are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gyre.base.errors import ConfigError

Params = Any


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW's settings. Raises ConfigError when they cannot work.

    Attributes:
      learning_rate: after warm-up, constant.
      warmup_steps: updates over which the rate rises linearly; update t (from 0) of W uses
        (t + 1) / W of the rate, so that no update is wasted on a rate of 0.
      b1, b2, eps: Adam's.
      weight_decay: decoupled, times the rate; norms' scales are exempt.
      clip_norm: largest global norm of the mean gradient; 0 turns clipping off.
    """

    learning_rate: float
    warmup_steps: int = 0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self):
        for name in ("b1", "b2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"optimizer.{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("learning_rate", "eps"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"optimizer.{name} must be positive, got {getattr(self, name)}")
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"optimizer.{name} must not be negative, got {getattr(self, name)}")

    def rate(self, update: Any) -> Any:
        """Learning rate of update number `update` (from 0), a number or a traced scalar."""
        if self.warmup_steps == 0:
            return jnp.asarray(self.learning_rate, jnp.float32)
        return self.learning_rate * jnp.minimum(1.0, (update + 1) / self.warmup_steps)

    def transform(self) -> optax.GradientTransformation:
        """The optax chain: clip, Adam, decay, rate."""
        clip = optax.clip_by_global_norm(self.clip_norm) if self.clip_norm else optax.identity()
        decay = (optax.add_decayed_weights(self.weight_decay, mask=decay_mask) if self.weight_decay
                 else optax.identity())
        return optax.chain(clip, optax.scale_by_adam(self.b1, self.b2, self.eps), decay,
                           optax.scale_by_learning_rate(self.rate))

    def on(self, param_shardings: Any = None) -> PlacedOptimizer:
        """The optimizer over a cell's devices.

        Args:
          param_shardings: NamedSharding of every parameter; None leaves placement to jax.
        """
        return PlacedOptimizer(self, param_shardings)


def decay_mask(params: Params) -> Any:
    """True for what weight decay applies to: all but the scales of norms (`*norm*` in the path)."""
    def decays(path, _):
        return not any("norm" in str(getattr(key, "key", key)) for key in path)
    return jax.tree_util.tree_map_with_path(decays, params)


class PlacedOptimizer:
    """`Optimizer` compiled for one placement. Its programs compile on first use.

    Args:
      settings: the optimizer.
      param_shardings: see `Optimizer.on`.
    """

    def __init__(self, settings: Optimizer, param_shardings: Any = None):
        self.settings, self._shardings = settings, param_shardings
        self._transform = settings.transform()
        self._apply = None  # needs the state's structure, hence the parameters'

    def init(self, params: Params) -> Any:
        """Zero state for `params` (arrays or ShapeDtypeStructs), placed like them."""
        abstract = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)

        def make():
            zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), abstract)
            return self._transform.init(zeros)
        return jax.jit(make, out_shardings=self.state_shardings(abstract))()

    def abstract_state(self, params: Params) -> Any:
        """Shapes, dtypes and (where given) shardings of the state: the target of a restore."""
        state = jax.eval_shape(self._transform.init, params)
        shardings = self.state_shardings(params)
        if shardings is None:
            return state
        return jax.tree.map(lambda s, sh: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sh),
                            state, shardings)

    def state_shardings(self, params: Params) -> Any:
        """Sharding of every leaf of the state: moments like parameters, counters whole."""
        if self._shardings is None:
            return None
        state = jax.eval_shape(self._transform.init, params)
        mesh = jax.tree.leaves(self._shardings)[0].mesh
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return optax.tree_utils.tree_map_params(
            self._transform, lambda _, sharding: sharding, state, self._shardings,
            transform_non_params=lambda _: whole)

    def apply(self, params: Params, opt_state: Any, grad_sum: Params | None,
              denominator: int) -> tuple[Params, Any, jax.Array, jax.Array]:
        """One update.

        Args:
          params: kept intact.
          opt_state: donated.
          grad_sum: gradient sum of the step, donated; None when the step had no micro-step, which
            is a gradient of 0 (Adam's momentum still moves the parameters).
          denominator: E, executions in the step's baseline.

        Returns:
          New params, new state, global norm of grad_sum / E before clipping, learning rate.

        Raises:
          ValueError: a gradient without executions to average over.
        """
        if denominator < 1 and grad_sum is not None:
            raise ValueError(f"the mean over executions needs at least 1, got {denominator}")
        if self._apply is None:
            self._apply = self._compile(params)
        if grad_sum is None:
            abstract = jax.tree.map(lambda p: (p.shape, p.dtype), params)
            grad_sum = jax.jit(
                lambda: jax.tree.map(lambda a: jnp.zeros(*a), abstract,
                                     is_leaf=lambda a: isinstance(a, tuple)),
                out_shardings=self._shardings)()
        return self._apply(params, opt_state, grad_sum, np.float32(max(denominator, 1)))

    def _compile(self, params: Params) -> Any:
        transform, settings = self._transform, self.settings

        def apply(params, opt_state, grad_sum, denominator):
            grads = jax.tree.map(lambda g: g / denominator.astype(g.dtype), grad_sum)
            rate = settings.rate(_updates_done(opt_state))
            updates, opt_state = transform.update(grads, opt_state, params)
            norm = optax.tree_utils.tree_norm(grads)
            return optax.apply_updates(params, updates), opt_state, norm, rate

        if self._shardings is None:
            return jax.jit(apply, donate_argnums=(1, 2))
        state = self.state_shardings(params)
        whole = jax.sharding.NamedSharding(jax.tree.leaves(self._shardings)[0].mesh,
                                           jax.sharding.PartitionSpec())
        return jax.jit(apply, donate_argnums=(1, 2),
                       in_shardings=(self._shardings, state, self._shardings, whole),
                       out_shardings=(self._shardings, state, whole, whole))


def _updates_done(opt_state: Any) -> jax.Array:
    """Updates that went into a state."""
    return optax.tree_utils.tree_get(
        opt_state, "count", filtering=lambda path, _: "ScaleByScheduleState" in str(path[-1]))
