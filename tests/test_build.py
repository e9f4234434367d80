"""BUILD describes the sources as they are: every file once, true dependencies, no cycle."""

import ast
import collections
import functools

from tests import build_file
from tests.source_tree import sources


@functools.cache
def rules():
    """Name -> (rule, {attribute: value}) of the file on disk; requirement(x) -> 'pip:x'."""
    found = {}
    for node in ast.parse(build_file.BUILD.read_text(encoding="utf-8")).body:
        call = node.value
        if not call.func.id.startswith("py_"):
            continue
        attributes = {k.arg: _value(k.value) for k in call.keywords}
        assert attributes["name"] not in found, f"target {attributes['name']} appears twice"
        found[attributes["name"]] = (call.func.id, attributes)
    return found


def _value(node):
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Call):
        assert node.func.id == "requirement"
        return "pip:" + node.args[0].value
    return node.value


def test_the_file_is_what_the_generator_makes():
    assert build_file.BUILD.read_text(encoding="utf-8") == build_file.render(), (
        "BUILD is out of date; run: python -m tests.build_file --write")


def test_every_source_is_in_exactly_one_target():
    counts = collections.Counter(s for _, a in rules().values() for s in a["srcs"])
    del counts[build_file.RUNNER]
    assert set(counts) == {s.path for s in sources().values()} - {build_file.RUNNER}
    assert [s for s, n in counts.items() if n > 1] == []


def test_dependencies_are_the_imports():
    home = {path: name for name, (_, a) in rules().items() for path in a["srcs"]}
    for name, (_, attributes) in rules().items():
        wanted = set()
        for source in sources().values():
            if source.path not in attributes["srcs"] or source.path == build_file.RUNNER:
                continue
            used = {sources()[m].path for m in source.own} | source.mentioned
            wanted |= {f":{home[p]}" for p in used if p != build_file.RUNNER} - {f":{name}"}
            wanted |= {f"pip:{build_file.distribution(e)}" for e in source.external}
        extra = set(attributes.get("deps", [])) - wanted
        assert wanted <= set(attributes.get("deps", [])), name
        # A test needs pytest and the conftest files, which it does not import.
        assert extra <= ({"pip:pytest", ":tests"} if name.startswith("tests_") else set()), name


def test_every_external_dependency_is_a_requirement():
    used = {d.removeprefix("pip:") for _, a in rules().values() for d in a.get("deps", [])
            if d.startswith("pip:")}
    assert used - set(build_file.requirement_names()) == set()


def test_there_is_no_cycle():
    state = {}

    def visit(name, trail):
        assert state.get(name) != "open", f"cycle: {' -> '.join([*trail, name])}"
        if name in state:
            return
        state[name] = "open"
        for dep in rules()[name][1].get("deps", []):
            if dep.startswith(":"):
                visit(dep[1:], [*trail, name])
        state[name] = "closed"

    for name in rules():
        visit(name, [])


def test_rules_fit_their_files():
    for name, (rule, attributes) in rules().items():
        first = attributes["srcs"][0]
        if rule == "py_test":
            assert attributes["main"] == build_file.RUNNER
            assert attributes["args"] == [s for s in attributes["srcs"] if s != build_file.RUNNER]
        elif rule == "py_binary":
            assert first.startswith("experiments/") and attributes["main"] == first
        elif not first.startswith("tests/"):
            assert attributes["visibility"] == ["//visibility:public"], name
        for dep in attributes.get("deps", []):
            if first.startswith(("gyre/", "configs/")):
                assert not dep.startswith((":tests", ":experiments")), name
