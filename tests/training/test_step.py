"""The compiled micro-step: sums, every recompute mode, every shape by one program."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from gyre.base.errors import ConfigError
from gyre.models.sharding import MESH_AXES, param_shardings
from gyre.training.step import TrainPrograms, abstract_batch, batch_arrays, make_micro_step
from tests.ops.trees import (
    TINY,
    batch_of,
    clipped_loss,
    per_path_loss,
    random_forest,
    relative_error,
    tiny_params,
)

TEMPERATURE = 0.9
N, R = 192, 128


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    forest = random_forest(rng, trees=2, levels=2)
    batch = batch_of(rng, forest, N, R)
    want = jax.jit(jax.grad(lambda p: per_path_loss(p, forest, batch, TEMPERATURE)))(tiny_params())
    return batch, want


def mesh():
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), MESH_AXES,
                axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("remat", ["none", "attention", "full",
                                   "dots_with_no_batch_dims_saveable"])
def test_every_recompute_mode_gives_the_per_path_gradient(case, remat):
    batch, want = case
    step = jax.jit(make_micro_step(TINY, clipped_loss, TEMPERATURE, remat, chunk_rows=32,
                                   block_size=64))
    grads, metrics = step(tiny_params(), batch)
    assert relative_error(grads, want) < 1e-5
    assert metrics["rows"] == (batch["w"] > 0).sum()
    np.testing.assert_allclose(metrics["w_sum"], batch["w"].sum(), rtol=1e-6)
    assert set(metrics) == {"loss_sum", "w_sum", "rows", "entropy_sum", "ratio_sum"}


def test_placed_programs_take_a_packed_micro_step(case):
    batch, want = case
    programs = TrainPrograms(TINY, clipped_loss, TEMPERATURE).on(mesh())
    params = jax.device_put(tiny_params(), programs.param_shardings)
    programs.warm(params, (N, R))
    micro = types.SimpleNamespace(**batch, executions=("a",), n_tokens=3)
    grads, metrics = programs.micro_step(params, micro)
    assert relative_error(grads, want) < 1e-5
    assert all(m.shape == () for m in metrics.values())
    shardings = param_shardings(TINY, mesh())
    for g, s in zip(jax.tree.leaves(grads), jax.tree.leaves(shardings), strict=True):
        assert g.sharding.is_equivalent_to(s, g.ndim)
    again, _ = programs.micro_step(params, micro)
    twice = programs.add(grads, again)
    assert relative_error(twice, jax.tree.map(lambda g: 2 * g, want)) < 1e-5


def test_abstract_batch_matches_the_arrays(case):
    batch, _ = case
    arrays, abstract = batch_arrays(types.SimpleNamespace(**batch)), abstract_batch(N, R)
    assert {k: (a.shape, a.dtype) for k, a in arrays.items()} == {
        k: (a.shape, a.dtype) for k, a in abstract.items()}


def test_another_dtype_is_refused(case):
    batch, _ = case
    batch = batch | {"w": batch["w"].astype(np.float64)}
    with pytest.raises(ValueError, match="'w': 'float64'"):
        batch_arrays(types.SimpleNamespace(**batch))


@pytest.mark.parametrize("bad, message", [
    (dict(remat="som"), "remat='som' is unknown"), (dict(temperature=0.0), "temperature=0.0")])
def test_settings_that_cannot_work_are_refused(bad, message):
    settings = dict(model=TINY, policy_loss=clipped_loss, temperature=1.0) | bad
    with pytest.raises(ConfigError, match=message):
        TrainPrograms(**settings)
