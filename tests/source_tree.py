"""What the repository's Python files import, from their syntax trees; nothing is executed."""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
OWN = ("gyre", "experiments", "configs", "tests")


@dataclasses.dataclass(frozen=True)
class Source:
    """One Python file.

    Attributes:
      path: relative to the repository, with slashes.
      module: dotted name; a package's name for its __init__.py.
      own: modules of this repository that it imports.
      external: top-level names of packages outside the repository and the standard library.
      standard: top-level names of the standard library.
      mentioned: files of this repository that its strings name, as a module or as a path; how a
        file that starts another in a process of its own refers to it.
    """

    path: str
    module: str
    own: frozenset[str]
    external: frozenset[str]
    standard: frozenset[str]
    mentioned: frozenset[str]

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]


def module_name(path: str) -> str:
    """Dotted name of the file at `path`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def sources() -> dict[str, Source]:
    """All Python files of the repository by module name."""
    files = [p for top in OWN for p in (ROOT / top).rglob("*.py")]
    paths = sorted(p.relative_to(ROOT).as_posix() for p in files)
    names = {module_name(p): p for p in paths}
    return {module: _scan(path, module, names) for module, path in names.items()}


def _scan(path: str, module: str, names: dict[str, str]) -> Source:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"), path)
    own, other, mentioned = set(), set(), set()
    paths = set(names.values())
    for node in ast.walk(tree):
        for name in _imported(node, names):
            (own if name.split(".")[0] in OWN else other).add(name)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in paths:
                mentioned.add(node.value)
            elif "." in node.value and node.value in names:
                mentioned.add(names[node.value])
    tops = {name.split(".")[0] for name in other}
    standard = tops & (sys.stdlib_module_names | {"__future__"})
    return Source(path, module, frozenset(own - {module}), frozenset(tops - standard),
                  frozenset(standard), frozenset(mentioned - {path}))


def _imported(node: ast.AST, names: dict[str, str]) -> list[str]:
    """Modules that one statement imports; `from a import b` is a.b where that is a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        if node.level:
            raise ValueError("relative imports are not used here; write the full name")
        return [full if (full := f"{node.module}.{alias.name}") in names else node.module
                for alias in node.names]
    return []
