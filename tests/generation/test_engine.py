"""The engine agrees with full recomputation, whatever the prefix, bucket or chunk."""

import jax
import numpy as np
import pytest

from gyre.base.errors import ConfigError
from gyre.generation.engine import EngineConfig
from gyre.generation.jetstream import Engine
from gyre.ops.token_logprobs import token_logprobs
from tests.generation import helpers as h


def test_is_a_jetstream_engine_without_abstract_methods():
    engine = h.make_engine()
    assert isinstance(engine, Engine)
    assert engine.max_concurrent_decodes == 4 and engine.samples_per_slot == 1


@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 33, 40])
def test_greedy_tokens_equal_full_recomputation(length):
    prompt = np.random.default_rng(length).integers(0, 300, length)
    loop = h.make_loop()
    c = h.call(prompt, max_tokens=10)
    h.run(loop, c)
    assert c.ids == h.greedy(h.params(), prompt, 10)


def test_existing_prefix_gives_the_same_as_one_prefill():
    engine, tokens = h.make_engine(), np.arange(3, 30)
    p = engine.load_params(h.params())
    whole = engine.prefill(params=p, padded_tokens=tokens, true_length=tokens.size)
    part = engine.prefill(params=p, padded_tokens=np.pad(tokens[:11], (0, 5)), true_length=11)
    both = engine.prefill(params=p, existing_prefix=part, padded_tokens=tokens[11:],
                          true_length=tokens.size - 11)
    n = tokens.size - 1
    assert both.kv_tokens == whole.kv_tokens == n and both.last_token == whole.last_token
    np.testing.assert_allclose(both.k[:, :, :n], whole.k[:, :, :n], atol=1e-4)
    np.testing.assert_allclose(both.v[:, :, :n], whole.v[:, :, :n], atol=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.3])
def test_logprobs_equal_the_trainers(temperature):
    """Engine and trainer give one number for one token: maximal difference below 1e-4."""
    prompt = np.arange(40, 61)
    c = h.call(prompt, max_tokens=24, temperature=temperature, seed=7)
    h.run(h.make_loop(), c)
    tokens = np.concatenate([prompt, c.ids])
    from gyre.ops.tree_attention import tree_attention
    sub_end = np.full(tokens.size, tokens.size, np.int32)
    hidden, _ = jax.jit(lambda p: h.dense.forward(
        h.MODEL, p, tokens, np.arange(tokens.size),
        lambda q, k, v, _: (tree_attention(q, k, v, sub_end), None)))(h.params())
    logp, _ = token_logprobs(hidden[prompt.size - 1:-1], h.params()["embed"],
                             np.asarray(c.ids, np.int32), temperature)
    assert np.abs(np.asarray(logp) - np.array(c.logprobs)).max() < 1e-4
    assert len(set(c.ids)) > 3  # it did sample


def test_sampled_frequencies_follow_the_distribution():
    prompt = np.array([5, 9])
    calls = [h.call(prompt, max_tokens=1, temperature=1.0, seed=s, call_id=str(s)) for s in range(400)]
    h.run(h.make_loop(slots=8), *calls)
    logits = h.full_logits(h.params(), prompt)[-1]
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    counts = np.bincount([c.ids[0] for c in calls], minlength=300)
    top = np.argsort(-probs)[:5]
    expected, spread = 400 * probs[top], np.sqrt(400 * probs[top])
    assert np.all(np.abs(counts[top] - expected) < 4 * spread + 1)
    assert np.abs(np.array([c.logprobs[0] for c in calls])
                  - np.log(probs[[c.ids[0] for c in calls]])).max() < 1e-4


def test_a_call_does_not_depend_on_its_neighbours_or_slot():
    prompt = np.arange(10, 25)
    alone = h.call(prompt, max_tokens=16, temperature=0.9, seed=3)
    h.run(h.make_loop(), alone)
    loop = h.make_loop(slots=3)
    others = [h.call(np.arange(i, i + 5 + i), max_tokens=20, temperature=0.8, seed=i) for i in range(5)]
    same = h.call(prompt, max_tokens=16, temperature=0.9, seed=3)
    h.run(loop, *others[:3], same, *others[3:])
    assert same.ids == alone.ids
    np.testing.assert_allclose(same.logprobs, alone.logprobs, atol=1e-4)


def test_bad_sizes_are_refused():
    with pytest.raises(ConfigError, match="last of generation.kv_buckets_tokens"):
        EngineConfig(4, 64, (32,), (4,))
    with pytest.raises(ConfigError, match="ascending"):
        EngineConfig(4, 64, (64, 32), (4,))
    with pytest.raises(ConfigError, match="exceeds the model's"):
        h.GyreEngine(h.MODEL, EngineConfig(4, 128, (128,), (4,)), h.one_device_mesh())
