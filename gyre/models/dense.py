"""The dense decoder (Llama/SmolLM2 family) as a flax nnx module with scanned layers.

One forward serves training over trees, prefill and decoding: what differs is how a layer attends, so
`forward` takes an `attend` function and per-layer inputs (`xs`, for example a KV cache) and returns
per-layer outputs (`ys`). Parameters travel as a plain nested dict, layers stacked on a leading axis,
matrices stored [out, in].

Axes: N tokens, D model width, H query heads, K key/value heads, h head width, F MLP width, L layers,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gyre.base.errors import ConfigError

Params = dict[str, Any]
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]

_FEW_ROWS = 64


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a dense decoder. Raises ConfigError when the numbers cannot make one."""

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    max_context_tokens: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = True

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "tie_embeddings" and value <= 0:
                raise ConfigError(f"model.{field.name} must be positive, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"model.num_heads={self.num_heads} must be a multiple of "
                              f"model.num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim must be even for rotary embedding, got {self.head_dim}")


def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [N, in] times w [out, in] -> [N, out].

    With few rows the weight is the left operand: XLA's CPU matmul then runs 2-3 times faster.
    """
    if x.shape[0] <= _FEW_ROWS:
        return jnp.einsum("oi,ni->on", w, x).T
    return jnp.einsum("ni,oi->no", x, w)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation of x [..., D]."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def rope_tables(pos: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin [N, h/2] for positions i32[N]."""
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angle = pos[:, None].astype(jnp.float32) / theta**exponent[None, :]
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [N, H, h]; the two halves of the head are the pairs (Hugging Face layout)."""
    x1, x2 = jnp.split(x, 2, axis=-1)
    c, s = cos[:, None, :].astype(x.dtype), sin[:, None, :].astype(x.dtype)
    return jnp.concatenate([x1 * c - x2 * s, x2 * c + x1 * s], axis=-1)


def _matrix(rngs: nnx.Rngs, out_dim: int, in_dim: int) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), (out_dim, in_dim), jnp.float32) * in_dim**-0.5)


class Block(nnx.Module):
    """One pre-norm decoder layer: grouped-query attention with rotary positions, then SwiGLU."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c = config
        q_dim, kv_dim = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.config = c
        self.attn_norm = nnx.Param(jnp.ones((c.d_model,), jnp.float32))
        self.q = _matrix(rngs, q_dim, c.d_model)
        self.k = _matrix(rngs, kv_dim, c.d_model)
        self.v = _matrix(rngs, kv_dim, c.d_model)
        self.o = _matrix(rngs, c.d_model, q_dim)
        self.mlp_norm = nnx.Param(jnp.ones((c.d_model,), jnp.float32))
        self.gate = _matrix(rngs, c.d_ff, c.d_model)
        self.up = _matrix(rngs, c.d_ff, c.d_model)
        self.down = _matrix(rngs, c.d_model, c.d_ff)

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], attend: Attend,
                 x_layer: Any) -> tuple[jax.Array, Any]:
        """x [N, D] -> (x [N, D], what `attend` returned for this layer)."""
        c, n = self.config, x.shape[0]
        y = rms_norm(x, self.attn_norm[...], c.rms_norm_eps)
        q = apply_rope(linear(y, self.q[...]).reshape(n, c.num_heads, c.head_dim), *rope)
        k = apply_rope(linear(y, self.k[...]).reshape(n, c.num_kv_heads, c.head_dim), *rope)
        v = linear(y, self.v[...]).reshape(n, c.num_kv_heads, c.head_dim)
        out, y_layer = attend(q, k, v, x_layer)
        x = x + linear(out.reshape(n, c.num_heads * c.head_dim), self.o[...])
        y = rms_norm(x, self.mlp_norm[...], c.rms_norm_eps)
        x = x + linear(jax.nn.silu(linear(y, self.gate[...])) * linear(y, self.up[...]), self.down[...])
        return x, y_layer


class Decoder(nnx.Module):
    """Embedding, L stacked blocks and the final norm; `blocks` has a leading layer axis."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c = config
        self.embed = nnx.Param(
            jax.random.normal(rngs.params(), (c.vocab_size, c.d_model), jnp.float32) * 0.02)
        self.blocks = nnx.vmap(lambda r: Block(c, r), in_axes=0)(rngs.split(c.num_layers))
        self.final_norm = nnx.Param(jnp.ones((c.d_model,), jnp.float32))
        if not c.tie_embeddings:
            self.unembed = nnx.Param(
                jax.random.normal(rngs.params(), (c.vocab_size, c.d_model), jnp.float32) * 0.02)


@functools.cache
def _block_template(config: ModelConfig) -> tuple[Any, Any]:
    """Graph and abstract state of one block, to rebuild it from a layer's slice of the parameters."""
    return nnx.split(nnx.eval_shape(lambda: Block(config, nnx.Rngs(0))))


def init_params(config: ModelConfig, seed: int) -> Params:
    """Random parameters as a nested dict of f32 arrays. Pure: call it under `jax.jit`."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, nnx.Rngs(seed)), nnx.Param))


def abstract_params(config: ModelConfig) -> Params:
    """Shapes and dtypes of the parameters, as `jax.ShapeDtypeStruct`s."""
    return jax.eval_shape(lambda: init_params(config, 0))


def unembedding(config: ModelConfig, params: Params) -> jax.Array:
    """The output matrix f32[V, D]."""
    return params["embed"] if config.tie_embeddings else params["unembed"]


def forward(config: ModelConfig, params: Params, tokens: jax.Array, pos: jax.Array, attend: Attend,
            xs: Any = None, remat: str | None = None) -> tuple[jax.Array, Any]:
    """Runs the decoder over N tokens in any arrangement that `attend` understands.

    Args:
      config: the model's shape.
      params: nested dict as from `init_params`.
      tokens: i32[N].
      pos: i32[N], rotary positions.
      attend: (q [N, H, h], k [N, K, h], v [N, K, h], x_layer) -> (out [N, H, h], y_layer).
      xs: per-layer inputs with a leading axis L, or None.
      remat: None keeps all activations; "full" recomputes each layer in the backward pass; any other
        string names a `jax.checkpoint_policies` member.

    Returns:
      hidden f32[N, D] after the final norm, and the stacked y_layers.
    """
    graph, template = _block_template(config)
    rope = rope_tables(pos, config.head_dim, config.rope_theta)

    def body(x, layer):
        weights, x_layer = layer
        state = jax.tree.map(lambda a: a, template)
        nnx.replace_by_pure_dict(state, weights)
        return nnx.merge(graph, state)(x, rope, attend, x_layer)

    if remat == "full":
        body = jax.checkpoint(body)
    elif remat is not None:
        body = jax.checkpoint(body, policy=getattr(jax.checkpoint_policies, remat))
    x = params["embed"][tokens]
    x, ys = jax.lax.scan(body, x, (params["blocks"], xs))
    return rms_norm(x, params["final_norm"], config.rms_norm_eps), ys
