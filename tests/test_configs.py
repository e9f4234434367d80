"""Every config file loads, is locked, and refuses a typo."""

import importlib

import pytest
from ml_collections import ConfigDict

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
