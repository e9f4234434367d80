"""A tiny model, its engine, and the plain way to compute what the engine should say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from gyre.base.protocols import CallRequest, EngineCall, SamplingParams
from gyre.generation.decode_loop import DecodeLoop
from gyre.generation.engine import EngineConfig, GyreEngine
from gyre.models import dense

MODEL = dense.ModelConfig(vocab_size=300, num_layers=3, d_model=32, num_heads=4, num_kv_heads=2,
                          head_dim=8, d_ff=64, max_context_tokens=64)
ENGINE = EngineConfig(slots=4, max_context_tokens=64, kv_buckets_tokens=(32, 64),
                      prefill_chunks_tokens=(4, 16))


def one_device_mesh():
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"),
                axis_types=(AxisType.Auto,) * 2)


@functools.cache
def params(seed=0):
    # A larger scale than the initialisation's, so that distributions are far from uniform.
    return jax.tree.map(lambda a: a * 2.0, jax.jit(functools.partial(dense.init_params, MODEL, seed))())


@functools.cache  # an engine has no state of its own, and its programs compile once
def make_engine(slots=4):
    config = EngineConfig(slots, ENGINE.max_context_tokens, ENGINE.kv_buckets_tokens,
                          ENGINE.prefill_chunks_tokens)
    return GyreEngine(MODEL, config, one_device_mesh())


def make_loop(slots=4, seed=0, version=0, cache_bytes=1 << 20):
    engine = make_engine(slots)
    loop = DecodeLoop(engine, cache_bytes)
    loop.load(engine.load_params(params(seed)), version)
    return loop


def call(prompt, max_tokens=8, temperature=0.0, seed=0, stop_ids=(), call_id=None, chunks=None):
    prompt = np.asarray(prompt, np.int32)
    sink = chunks if chunks is not None else []
    request = CallRequest(call_id or f"c{prompt.sum()}-{seed}-{temperature}", "e", prompt,
                          SamplingParams(max_tokens, temperature, seed, tuple(stop_ids)))
    return EngineCall(request, sink.append)


def run(loop, *calls):
    for c in calls:
        loop.submit(c)
    for _ in range(500):
        if not loop.has_work:
            return
        loop.step()
    raise AssertionError("the loop does not come to an end")


@functools.cache
def _full(n):
    def attend(q, k, v, _):
        heads, kv = q.shape[1], k.shape[1]
        k, v = (jnp.repeat(x, heads // kv, axis=1) for x in (k, v))
        scores = jnp.einsum("nhd,mhd->hnm", q, k) / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((n, n), bool)), scores, -1e30)
        return jnp.einsum("hnm,mhd->nhd", jax.nn.softmax(scores), v), None

    def logits(p, tokens):
        hidden, _ = dense.forward(MODEL, p, tokens, jnp.arange(n), attend)
        return hidden @ dense.unembedding(MODEL, p).T
    return jax.jit(logits)


def full_logits(p, tokens):
    """Logits after each token, by one plain causal forward without a cache: f32[n, V]."""
    tokens = np.asarray(tokens, np.int32)
    return np.asarray(_full(tokens.size)(p, tokens))


def greedy(p, prompt, n):
    """n greedy tokens by full recomputation."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(full_logits(p, tokens)[-1].argmax()))
    return tokens[len(prompt):]
