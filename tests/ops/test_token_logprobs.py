import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from gyre.ops.token_logprobs import token_logprobs

R, D, V = 13, 6, 50


def inputs():
    rng = np.random.default_rng(0)
    return (rng.normal(size=(R, D)).astype(np.float32), rng.normal(size=(V, D)).astype(np.float32),
            rng.integers(V, size=R).astype(np.int32))


def reference(hidden, unembed, targets, temperature):
    logps = jax.nn.log_softmax(hidden @ unembed.T / temperature)
    return logps[jnp.arange(R), targets], -(jnp.exp(logps) * logps).sum(-1)


@pytest.mark.parametrize("chunk_rows", [4, 13, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_log_softmax_with_gradients(chunk_rows, temperature):
    hidden, unembed, targets = inputs()
    weight = np.linspace(-1, 1, R).astype(np.float32)
    logp, entropy = token_logprobs(hidden, unembed, targets, temperature, chunk_rows)
    want_logp, want_entropy = reference(hidden, unembed, targets, temperature)
    np.testing.assert_allclose(logp, want_logp, atol=2e-5)
    np.testing.assert_allclose(entropy, want_entropy, atol=2e-5)

    def loss(f):
        return jax.grad(lambda h, u: (f(h, u)[0] * weight).sum(), (0, 1))(hidden, unembed)

    got = loss(lambda h, u: token_logprobs(h, u, targets, temperature, chunk_rows))
    want = loss(lambda h, u: reference(h, u, targets, temperature))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=2e-5)


def test_known_distribution():
    # logits (ln 4, ln 2, 0, 0) are p = (1/2, 1/4, 1/8, 1/8): entropy 1.75 bits.
    unembed = np.log(np.array([[4.0], [2.0], [1.0], [1.0]], np.float32))
    logp, entropy = token_logprobs(np.ones((4, 1), np.float32), unembed,
                                   np.arange(4, dtype=np.int32), 1.0)
    np.testing.assert_allclose(logp, np.log([0.5, 0.25, 0.125, 0.125]), atol=1e-6)
    np.testing.assert_allclose(entropy, 1.75 * np.log(2), atol=1e-6)


def test_entropy_has_no_gradient():
    hidden, unembed, targets = inputs()
    grad = jax.grad(lambda h: token_logprobs(h, unembed, targets, 1.0, 4)[1].sum())(hidden)
    assert not np.any(grad)


def test_large_logits_stay_finite():
    hidden, unembed, targets = inputs()
    logp, entropy = token_logprobs(hidden * 1e4, unembed, targets, 1.0)
    assert np.isfinite(logp).all() and np.isfinite(entropy).all()


def test_all_logits_never_exist_at_once():
    hidden, unembed, targets = inputs()
    f = jax.grad(lambda h, u: token_logprobs(h, u, targets, 1.0, 4)[0].sum(), (0, 1))
    sizes = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            sizes.extend(v.aval.shape for v in eqn.outvars if V in v.aval.shape)
            for sub in jaxprs_in_params(eqn.params):
                walk(sub)

    walk(jax.make_jaxpr(f)(hidden, unembed).jaxpr)
    logits = [s for s in sizes if s != (V, D) and np.prod(s) > V]
    assert logits, "the walk must find the chunks"
    assert max(np.prod(s) for s in logits) == 4 * V, sorted(set(logits))


@pytest.mark.parametrize("bad, message", [
    (dict(temperature=0.0), "temperature must be positive"),
    (dict(chunk_rows=0), "chunk_rows"),
])
def test_bad_settings_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        token_logprobs(*inputs(), **bad)


def test_bad_shapes_are_refused():
    hidden, unembed, targets = inputs()
    with pytest.raises(ValueError, match="expected targets"):
        token_logprobs(hidden, unembed, targets[1:])
    with pytest.raises(ValueError, match="expected hidden"):
        token_logprobs(hidden, unembed.T, targets)
