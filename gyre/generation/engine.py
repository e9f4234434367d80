"""gyre's model behind JetStream's Engine contract, with log-probs, prefixes and portable slots.

A call's state is its KV for all tokens but the last, and that last token: the next `generate` feeds
it. Hence a prefix that is wholly cached needs no compute, and a slot that is extracted, moved to
another engine and inserted goes on exactly. Sampling is keyed by (seed, position).

What the contract cannot carry travels inside it: seed and temperature in the `Prefix`, the behaviour
log-prob bit-cast into a fourth column of `ResultTokens.data`.

Shapes are few: KV lengths come in `kv_buckets_tokens`, prefill runs in `prefill_chunks_tokens`, and
`generate` attends to the smallest bucket that covers its longest slot.

Axes: L layers, S slots, K key/value heads, T KV length, h head width.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gyre.base.errors import ConfigError
from gyre.generation.jetstream import Engine, ResultTokens
from gyre.generation.sampling import sample, uniform_at
from gyre.models import dense, sharding

_NEG = -1e30


@struct.dataclass
class Prefix:
    """A sequence ready to be decoded (also the unit that moves between cells).

    Attributes:
      k, v: f32[L, K, T, h]; entries at and beyond `kv_tokens` are undefined.
      kv_tokens: KV entries that count = number of tokens - 1.
      last_token: the token that the next `generate` feeds.
      seed, temperature: how to sample what follows.
    """

    k: jax.Array
    v: jax.Array
    kv_tokens: int = struct.field(pytree_node=False)
    last_token: int = struct.field(pytree_node=False)
    seed: int = struct.field(pytree_node=False, default=0)
    temperature: float = struct.field(pytree_node=False, default=0.0)

    @property
    def size_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


@struct.dataclass
class DecodeState:
    """All slots of one engine.

    Attributes:
      k, v: f32[L, S, K, T, h].
      token: i32[S], fed next, at position `length`.
      length: i32[S], KV entries of each slot.
      generated: i32[S], tokens sampled since the insertion (the lengths of the contract).
      seed u32[S], temperature f32[S]: per-slot sampling.
    """

    k: jax.Array
    v: jax.Array
    token: jax.Array
    length: jax.Array
    generated: jax.Array
    seed: jax.Array
    temperature: jax.Array


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine; every combination is one compiled program."""

    slots: int
    max_context_tokens: int
    kv_buckets_tokens: tuple[int, ...]
    prefill_chunks_tokens: tuple[int, ...]

    def __post_init__(self):
        if self.slots < 1:
            raise ConfigError(f"generation.slots must be at least 1, got {self.slots}")
        for name in ("kv_buckets_tokens", "prefill_chunks_tokens"):
            sizes = getattr(self, name)
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ConfigError(f"generation.{name} must be ascending sizes, got {sizes}")
        if self.kv_buckets_tokens[-1] != self.max_context_tokens:
            raise ConfigError(
                f"the last of generation.kv_buckets_tokens {self.kv_buckets_tokens} must equal "
                f"generation.max_context_tokens {self.max_context_tokens}")

    def bucket(self, tokens: int) -> int:
        """The smallest KV bucket that holds `tokens`."""
        for size in self.kv_buckets_tokens:
            if tokens <= size:
                return size
        raise ValueError(f"{tokens} tokens exceed the context of {self.max_context_tokens}")


class GyreEngine(Engine):
    """Engine of one cell. Not thread-safe: the cell's owner thread calls it."""

    def __init__(self, model: dense.ModelConfig, config: EngineConfig, mesh: Mesh):
        if config.max_context_tokens > model.max_context_tokens:
            raise ConfigError(f"generation.max_context_tokens={config.max_context_tokens} exceeds the "
                              f"model's {model.max_context_tokens}")
        self.model, self.config, self._mesh = model, config, mesh
        self.param_shardings = sharding.param_shardings(model, mesh)
        heads = sharding.axis_if_divisible(mesh, "tensor", model.num_kv_heads)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._kv_slots = NamedSharding(mesh, PartitionSpec(None, None, heads, None, None))
        self._kv_prefix = NamedSharding(mesh, PartitionSpec(None, heads, None, None))
        self._jit_programs()

    def _jit_programs(self) -> None:
        rep, slots, pre = self._replicated, self._kv_slots, self._kv_prefix
        state = DecodeState(slots, slots, rep, rep, rep, rep, rep)
        self._state_shardings = state
        self._generate = jax.jit(
            functools.partial(_generate, self.model), static_argnums=(2,), donate_argnums=(1,),
            in_shardings=(self.param_shardings, state), out_shardings=(state, rep))
        self._extend = jax.jit(
            functools.partial(_extend, self.model), donate_argnums=(1, 2),
            in_shardings=(self.param_shardings, pre, pre, rep, rep), out_shardings=(pre, pre))
        self._insert = jax.jit(_insert, donate_argnums=(0,),
                               in_shardings=(state, pre, pre, rep, rep), out_shardings=state)
        self._extract = jax.jit(_extract, static_argnums=(2,), in_shardings=(state, rep),
                                out_shardings=(pre, pre))
        self._grow = jax.jit(_grow, static_argnums=(2,), in_shardings=(pre, pre),
                             out_shardings=(pre, pre))

    def _kv_shape(self, tokens: int) -> tuple[int, ...]:
        m = self.model
        return (m.num_layers, m.num_kv_heads, tokens, m.head_dim)

    # ------------------------------------------------------------------ the Engine contract

    def prefill(self, *, params: Any, existing_prefix: Prefix | None = None, padded_tokens: Any,
                true_length: int, seed: int = 0, temperature: float = 0.0) -> Prefix:
        """Continues `existing_prefix` (or nothing) with the first `true_length` of `padded_tokens`.

        Args:
          params: the model's parameters on this engine's mesh.
          existing_prefix: left intact; it may be used again.
          padded_tokens: i32[P].
          true_length: tokens of P that count, at least 1.
          seed, temperature: sampling of the sequence; the defaults are greedy.

        Raises:
          ValueError: no token, or more than the context holds.
        """
        tokens = np.asarray(padded_tokens, np.int32)[:int(true_length)]
        if tokens.size == 0:
            raise ValueError("prefill needs at least 1 token")
        if existing_prefix is not None:
            tokens = np.concatenate([[np.int32(existing_prefix.last_token)], tokens])
        done = existing_prefix.kv_tokens if existing_prefix is not None else 0
        todo, total = tokens[:-1], done + tokens.size - 1
        k, v = self._working_kv(existing_prefix, total)
        while todo.size:
            chunk = next((c for c in self.config.prefill_chunks_tokens if c >= todo.size),
                         self.config.prefill_chunks_tokens[-1])
            part, todo = todo[:chunk], todo[chunk:]
            padded = np.zeros(chunk, np.int32)
            padded[:part.size] = part
            k, v = self._extend(params, k, v, padded, np.array([done, part.size], np.int32))
            done += part.size
        return Prefix(k, v, done, int(tokens[-1]), seed, temperature)

    def _working_kv(self, prefix: Prefix | None, total: int) -> tuple[jax.Array, jax.Array]:
        """A private copy of the prefix's KV with room for `total` entries."""
        size = self.config.bucket(max(total, 1))
        if prefix is None:
            # Two buffers: both are donated to the program that fills them.
            zeros = [np.zeros(self._kv_shape(size), np.float32) for _ in range(2)]
            k, v = jax.device_put(zeros, [self._kv_prefix] * 2)
            return k, v
        return self._grow(prefix.k, prefix.v, max(size, prefix.k.shape[2]))

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int, **_: Any) -> DecodeState:
        """Puts a sequence into `slot`. The state is donated, the prefix is not."""
        ints = np.array([slot, prefix.kv_tokens, prefix.last_token, prefix.seed & 0x7FFFFFFF], np.int32)
        return self._insert(decode_state, prefix.k, prefix.v, ints, np.float32(prefix.temperature))

    def generate(self, params: Any, decode_state: DecodeState,
                 kv_tokens: int | None = None) -> tuple[DecodeState, ResultTokens]:
        """Samples the next token of every slot. The state is donated.

        Args:
          kv_tokens: a KV bucket that covers every live slot's length; None for the largest.
        """
        state, data = self._generate(params, decode_state, kv_tokens or self.config.max_context_tokens)
        return state, ResultTokens(data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3),
                                   samples_per_slot=1)

    def extract(self, decode_state: DecodeState, slot: int, *, kv_tokens: int, last_token: int,
                seed: int, temperature: float) -> Prefix:
        """Copies a slot out, as the prefix that `insert` of any engine continues exactly."""
        k, v = self._extract(decode_state, np.int32(slot), self.config.bucket(max(kv_tokens, 1)))
        return Prefix(k, v, kv_tokens, last_token, seed, temperature)

    def init_decode_state(self, *_: Any, **__: Any) -> DecodeState:
        """Empty slots."""
        m, c = self.model, self.config
        shape = (m.num_layers, c.slots, m.num_kv_heads, c.max_context_tokens, m.head_dim)

        def make():
            zeros = functools.partial(jnp.zeros, (c.slots,))
            return DecodeState(jnp.zeros(shape), jnp.zeros(shape), zeros(jnp.int32), zeros(jnp.int32),
                               zeros(jnp.int32), zeros(jnp.uint32), zeros(jnp.float32))
        return jax.jit(make, out_shardings=self._state_shardings)()

    def load_params(self, params: Any) -> Any:
        """Places parameters on this engine's mesh; the source stays valid."""
        return jax.device_put(params, self.param_shardings)

    def place(self, prefix: Prefix) -> Prefix:
        """Moves a prefix from another cell onto this engine's mesh."""
        k, v = jax.device_put((prefix.k, prefix.v), self._kv_prefix)
        return prefix.replace(k=k, v=v)

    def warm(self, params: Any) -> None:
        """Compiles and runs every program once, so that no live call waits for a compiler."""
        state, sizes = self.init_decode_state(), self.config.kv_buckets_tokens
        for size in sizes:
            for chunk in self.config.prefill_chunks_tokens:
                k, v = self._working_kv(None, size)
                k, v = self._extend(params, k, v, np.zeros(chunk, np.int32), np.array([0, 1], np.int32))
            prefix = Prefix(k, v, 1, 0)
            for larger in sizes:
                if larger >= size:
                    self._grow(k, v, larger)
            state = self.insert(prefix, state, 0)
            state, result = self.generate(params, state, size)
            self.extract(state, 0, kv_tokens=size, last_token=0, seed=0, temperature=0.0)
            jax.block_until_ready(result.data)

    def get_prefix_destination_sharding(self) -> Any:
        return self._kv_prefix

    def get_tokenizer(self) -> Any:
        raise NotImplementedError("gyre's engine works on token ids; give the orchestrator a tokenizer")

    @property
    def max_concurrent_decodes(self) -> int:
        return self.config.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self.config.max_context_tokens

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None


# --------------------------------------------------------------------------- device programs


def _attend_cached(q, k_new, v_new, k_old, v_old, old_len, causal):
    """Queries against cached KV and the new tokens' own.

    q [B, n, H, h]; k_new, v_new [B, n, K, h]; k_old, v_old [B, K, T, h]; old_len i32[B];
    causal bool[n, n] among the new tokens -> [B, n, H, h]. B sequences of n new tokens each.
    """
    b, n, num_heads, h = q.shape
    kv = k_new.shape[2]
    q = q.reshape(b, n, kv, num_heads // kv, h).transpose(0, 2, 3, 1, 4) * h**-0.5  # [B,K,G,n,h]
    q = q.reshape(b, kv, -1, h)
    k_new, v_new = k_new.transpose(0, 2, 1, 3), v_new.transpose(0, 2, 1, 3)
    old = jnp.einsum("bkqh,bkth->bkqt", q, k_old)
    old = jnp.where(jnp.arange(k_old.shape[2]) < old_len[:, None, None, None], old, _NEG)
    new = jnp.einsum("bkqh,bkmh->bkqm", q, k_new)
    new = jnp.where(jnp.tile(causal, (num_heads // kv, 1)), new, _NEG)
    top = jnp.maximum(old.max(-1), new.max(-1))[..., None]
    p_old, p_new = jnp.exp(old - top), jnp.exp(new - top)
    out = jnp.einsum("bkqt,bkth->bkqh", p_old, v_old) + jnp.einsum("bkqm,bkmh->bkqh", p_new, v_new)
    out = out / (p_old.sum(-1) + p_new.sum(-1))[..., None]
    return out.reshape(b, kv, -1, n, h).transpose(0, 3, 1, 2, 4).reshape(b, n, num_heads, h)


def _generate(model: dense.ModelConfig, params: Any, state: DecodeState, kv_tokens: int):
    """One token for every slot -> (state, i32[S, 4]: token, valid, length, log-prob bits)."""
    slots = state.token.shape[0]
    causal = jnp.ones((1, 1), bool)

    def attend(q, k, v, cache):
        k_old, v_old = cache
        out = _attend_cached(q[:, None], k[:, None], v[:, None], k_old[:, :, :kv_tokens],
                             v_old[:, :, :kv_tokens], state.length, causal)
        return out[:, 0], (k, v)

    hidden, (k_new, v_new) = dense.forward(model, params, state.token, state.length, attend,
                                           (state.k, state.v))
    logits = dense.linear(hidden, dense.unembedding(model, params))
    position = state.length + 1  # of the token to sample
    token, logp = sample(logits, uniform_at(state.seed, position), state.temperature)

    def put(cache, new):  # [L, S, K, T, h] <- [L, S, K, h] at each slot's length
        return cache.at[:, jnp.arange(slots), :, state.length].set(
            new.swapaxes(0, 1), mode="drop", unique_indices=True)

    generated = state.generated + 1
    data = jnp.stack([token, jnp.ones_like(token), generated,
                      jax.lax.bitcast_convert_type(logp, jnp.int32)], axis=1)
    return state.replace(k=put(state.k, k_new), v=put(state.v, v_new), token=token,
                         length=position, generated=generated), data


def _extend(model: dense.ModelConfig, params: Any, k_cache: jax.Array, v_cache: jax.Array,
            tokens: jax.Array, span: jax.Array):
    """Appends KV of `tokens` i32[n] (span = [entries there are, real tokens]) to [L, K, T, h]."""
    start, real = span[0], span[1]
    n = tokens.shape[0]
    causal = jnp.tril(jnp.ones((n, n), bool))

    def attend(q, k, v, cache):
        out = _attend_cached(q[None], k[None], v[None], cache[0][None], cache[1][None], start[None],
                             causal)
        return out[0], (k, v)

    pos = start + jnp.arange(n)
    _, (k_new, v_new) = dense.forward(model, params, tokens, pos, attend, (k_cache, v_cache))
    where = jnp.where(jnp.arange(n) < real, pos, k_cache.shape[2])  # padding is dropped

    def put(cache, new):  # [L, n, K, h] -> [L, K, T, h]
        return cache.at[:, :, where].set(new.swapaxes(1, 2), mode="drop", unique_indices=True)

    return put(k_cache, k_new), put(v_cache, v_new)


def _insert(state: DecodeState, k: jax.Array, v: jax.Array, ints: jax.Array, temperature: jax.Array):
    slot, length, token, seed = ints[0], ints[1], ints[2], ints[3]
    zero = jnp.int32(0)

    def put(cache, new):
        return jax.lax.dynamic_update_slice(cache, new[:, None], (zero, slot, zero, zero, zero))

    return DecodeState(put(state.k, k), put(state.v, v), state.token.at[slot].set(token),
                       state.length.at[slot].set(length), state.generated.at[slot].set(0),
                       state.seed.at[slot].set(seed.astype(jnp.uint32)),
                       state.temperature.at[slot].set(temperature))


def _extract(state: DecodeState, slot: jax.Array, kv_tokens: int):
    def take(cache):
        return jax.lax.dynamic_index_in_dim(cache, slot, axis=1, keepdims=False)[:, :, :kv_tokens]
    return take(state.k), take(state.v)


def _grow(k: jax.Array, v: jax.Array, kv_tokens: int):
    pad = ((0, 0), (0, 0), (0, kv_tokens - k.shape[2]), (0, 0))
    return jnp.pad(k, pad), jnp.pad(v, pad)

