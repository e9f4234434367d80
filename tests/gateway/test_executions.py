"""Keys: of one execution each, and nowhere but with their owner."""

import types

import pytest

from gyre.gateway.executions import Executions, key_and_path


def session(name):
    return types.SimpleNamespace(execution_id=name)


def test_a_key_finds_its_execution_until_it_ends():
    executions, a, b = Executions(), session("a"), session("b")
    key_a, key_b = executions.open(a), executions.open(b)
    assert executions.find(key_a) == (a, False) and executions.find(key_b) == (b, False)
    assert executions.find("") == executions.find(key_a + "x") == executions.find("\ud800") == (None, False)
    assert executions.close("a") is a
    assert executions.find(key_a) == (None, True) and executions.find(key_b) == (b, False)
    assert executions.open(a) != key_a  # another attempt, another key
    assert len(executions) == 2


def test_keys_have_128_bits_and_are_not_kept():
    executions = Executions()
    keys = {executions.open(session(str(i))) for i in range(100)}
    assert len(keys) == 100
    for key in keys:
        digits = key.rsplit("-", 1)[-1]
        assert int(digits, 16) < 2**128 and len(digits) == 32
        assert key not in repr(vars(executions)) and digits not in repr(vars(executions))


def test_opening_twice_and_closing_what_is_not_open():
    executions = Executions()
    executions.open(session("a"))
    with pytest.raises(ValueError, match="'a' is open; close it first"):
        executions.open(session("a"))
    with pytest.raises(KeyError, match="'b' is not open"):
        executions.close("b")


@pytest.mark.parametrize(("path", "headers", "query", "found"), [
    ("/v1/models", {"Authorization": "Bearer k"}, {}, ("k", "/v1/models")),
    ("/v1/models", {"Authorization": "bearer  k "}, {}, ("k", "/v1/models")),
    ("/v1/models", {"Authorization": "Basic k"}, {}, ("", "/v1/models")),
    ("/v1/models", {"Authorization": "Basic k", "x-api-key": "j"}, {}, ("j", "/v1/models")),
    ("/v1/models", {"Authorization": "Bearer k", "x-api-key": "j"}, {}, ("k", "/v1/models")),
    ("/v1beta/models", {"x-goog-api-key": "k"}, {}, ("k", "/v1beta/models")),
    ("/v1beta/models", {}, {"key": "k"}, ("k", "/v1beta/models")),
    ("/s/k/v1/models", {"Authorization": "Bearer j"}, {}, ("k", "/v1/models")),
    ("/s/k", {}, {}, ("k", "/")),
    ("/s/", {}, {}, ("", "/")),
    ("/v1/models", {}, {}, ("", "/v1/models")),
])
def test_where_a_key_may_stand(path, headers, query, found):
    assert key_and_path(path, headers, lambda: query) == found
