"""Imports point to a lower layer only, and heavy packages stay where they belong."""

import subprocess
import sys

import pytest

from tests.source_tree import ROOT, sources

LAYERS = (
    ("gyre.base",),
    ("gyre.telemetry", "gyre.trajectory", "gyre.ops", "gyre.elastic.policy"),
    ("gyre.algorithms", "gyre.models", "gyre.gateway", "gyre.rollout", "gyre.checkpointing",
     "gyre.simulator"),
    ("gyre.generation", "gyre.training"),
    ("gyre.elastic",),
    ("gyre.system",),
    ("experiments",),
)
NO_JAX = ("gyre.base", "gyre.telemetry", "gyre.trajectory", "gyre.elastic.policy", "gyre.gateway",
          "gyre.rollout", "gyre.simulator")
BRINGS_JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "jetstream", "clu"}
GROUPS = {group: rank for rank, layer in enumerate(LAYERS) for group in layer}


def group_of(module):
    """The longest group name that the module is in; None outside of all (gyre itself, configs)."""
    inside = [g for g in GROUPS if module == g or module.startswith(g + ".")]
    return max(inside, key=len, default=None)


def product():
    return [s for s in sources().values() if not s.path.startswith("tests/")]


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          timeout=120)


def test_every_package_has_a_layer():
    outside = {s.module for s in product() if group_of(s.module) is None}
    assert {m for m in outside if m != "gyre" and m.split(".")[0] != "configs"} == set()


def test_imports_point_downwards():
    wrong = []
    for source in product():
        own = group_of(source.module)
        if source.folder == "configs":
            continue
        for module in source.own:
            other = group_of(module)
            if own == other or (other is None and module == "gyre"):
                continue
            if own is None or other is None or GROUPS[other] >= GROUPS[own]:
                wrong.append(f"{source.path} imports {module}")
    assert wrong == []


def test_configs_import_configs_only():
    for source in product():
        if source.folder == "configs":
            assert {m.split(".")[0] for m in source.own} <= {"configs"}, source.path
            assert source.external <= {"ml_collections"}, source.path


def test_nothing_imports_the_tests():
    assert [s.path for s in product() if any(m.startswith("tests") for m in s.own)] == []


def test_trajectory_needs_numpy_only():
    for source in product():
        if group_of(source.module) == "gyre.trajectory":
            assert source.external <= {"numpy"}, source.path


def test_policies_have_no_clock_and_no_threads():
    for source in product():
        if group_of(source.module) == "gyre.elastic.policy":
            assert not source.external, source.path
            assert not source.standard & {"time", "threading", "asyncio", "random"}, source.path


def test_layers_without_jax_do_not_import_it():
    for source in product():
        if group_of(source.module) in NO_JAX:
            assert not source.external & BRINGS_JAX, source.path


def test_jetstream_is_imported_in_one_module():
    importers = [s.module for s in product() if "jetstream" in s.external]
    assert importers == ["gyre.generation.jetstream"]


@pytest.mark.parametrize("group", NO_JAX)
def test_importing_a_layer_without_jax_does_not_load_it(group):
    modules = [s.module for s in product() if group_of(s.module) == group]
    if not modules:
        pytest.skip(f"{group} does not exist yet")
    done = run_python(f"import sys\nfor m in {modules!r}: __import__(m)\n"
                      "sys.exit('jax' in sys.modules)")
    assert done.returncode == 0, done.stderr or f"importing {group} loads jax"


def test_importing_gyre_never_loads_tensorflow_nor_changes_logging():
    modules = [s.module for s in product()]
    done = run_python(
        "import logging, sys\nlevel = logging.getLogger().level\n"
        f"for m in {modules!r}: __import__(m)\n"
        "loaded = {m.split('.')[0] for m in sys.modules} & {'tensorflow', 'seqio', 'torch'}\n"
        "assert not loaded, loaded\nassert logging.getLogger().level == level\n")
    assert done.returncode == 0, done.stderr
