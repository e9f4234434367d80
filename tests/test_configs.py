"""Every config file loads, is locked, and refuses a typo."""

import importlib

import pytest
from ml_collections import ConfigDict

from gyre.base.errors import ConfigError
from gyre.gateway.limits import GatewayLimits
from gyre.system import build
from tests.source_tree import ROOT

NAMES = sorted(
    p.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for p in (ROOT / "configs").rglob("*.py") if p.name != "__init__.py")


def load(name):
    return importlib.import_module(name).get_config()


def groups(config):
    """The config and every ConfigDict in it."""
    yield config
    for value in config.values():
        if isinstance(value, ConfigDict):
            yield from groups(value)


def test_there_are_configs():
    assert {"configs.base", "configs.quickstart", "configs.tiny"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_loads_the_same_twice(name):
    assert load(name) == load(name)
    assert load(name) is not load(name)


@pytest.mark.parametrize("name", NAMES)
def test_is_locked_so_that_a_typo_fails(name):
    for group in groups(load(name)):
        assert group.is_locked
        with pytest.raises((AttributeError, KeyError)):
            group.a_field_that_nobody_has = 1


@pytest.mark.parametrize("name", NAMES)
def test_refuses_a_value_of_another_type(name):
    with pytest.raises(TypeError):
        load(name).steps = "many"


@pytest.mark.parametrize("name", NAMES)
def test_header_says_how_to_launch(name):
    assert "Launch:" in importlib.import_module(name).__doc__


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scheduler", ["elastic", "colocate", "async"])
def test_can_work_under_every_scheduler(name, scheduler):
    config = load(name)
    config.scheduler = scheduler
    build.check(config)


@pytest.mark.parametrize("field, value, message", [
    ("steps", 0, "steps must be at least 1"),
    ("group_size", 1, "at least 2"),
    ("scheduler", "elastik", "unknown scheduler 'elastik'"),
    ("schedulers.elastic.phi", -1.0, "must not be negative"),
    ("cells.standalone", 3, "leaves no core cell"),
    ("generation.kv_buckets_tokens", (64,), "must equal generation.max_context_tokens"),
    ("generation.max_completion_tokens", 5000, "leaves no room for a prompt"),
    ("generation.temperature", 0.0, "cannot be trained on"),
    ("trajectory.n_buckets", (64,), "must hold a whole path"),
    ("trajectory.j_max", -1, "at least 1, or 0 for all paths"),
    ("trajectory.role_order", ("main",), "must name each of main, main_summary"),
    ("algorithm.name", "grop", "unknown algorithm 'grop'"),
    ("algorithm.options", "clip_low", "name=value"),
    ("optimizer.learning_rate", 0.0, "must be positive"),
    ("optimizer.remat", "ful", "unknown"),
    ("tasks.name", "chess", "unknown task source"),
    ("harness.name", "codes", "unknown harness"),
    ("rollout.infra_failure", "ignore", "must be 'placeholder' or 'exclude'"),
    ("rollout.concurrency", 0, "rollout.concurrency"),
    ("checkpoint.every_steps", 0, "checkpoint.every_steps"),
    ("trajectory.claim_block", 3, "power of two"),
    ("gateway.history", "short", "must be one of exact, template"),
    ("gateway.limits.calls", 0, "gateway.limits: calls must be positive, got 0"),
])
def test_what_cannot_work_is_refused_with_what_to_change(field, value, message):
    config = load("configs.base")
    with config.unlocked():
        group, _, leaf = field.rpartition(".")
        target = config
        for part in filter(None, group.split(".")):
            target = target[part]
        target[leaf] = value
    with pytest.raises(ConfigError, match=message):
        build.check(config)


def test_the_gateway_grants_its_defaults_unless_told_otherwise():
    assert build.gateway_limits(load("configs.base")) == GatewayLimits()
