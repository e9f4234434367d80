"""Makes the repository's BUILD file from what its sources import.

`python -m tests.build_file --write` after adding a file or an import; without the flag it prints.

One py_library per folder, one py_binary per experiment, one py_test per test file. Folders that
import each other would be a cycle, which Bazel refuses; they share the library of the outer one.
Parent packages' __init__.py files are not counted as imports: Bazel makes them importable anyway.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import pathlib

from tests.source_tree import ROOT, Source, sources

BUILD = ROOT / "BUILD"
RUNNER = "tests/run_pytest.py"  # the main of every py_test, the one file that many targets have
_HEAD = '''# Made by `python -m tests.build_file --write`, compared by tests/test_build.py.
load("@pip//:requirements.bzl", "requirement")
load("@rules_python//python:defs.bzl", "py_binary", "py_library", "py_test")

package(default_visibility = ["//visibility:private"])

licenses(["notice"])  # Apache-2.0

exports_files(["LICENSE"])
'''


@dataclasses.dataclass
class Target:
    """One rule. `deps` are names of targets, `requirements` names of distributions."""

    rule: str
    name: str
    srcs: list[str]
    deps: set[str] = dataclasses.field(default_factory=set)
    requirements: set[str] = dataclasses.field(default_factory=set)

    def render(self) -> str:
        """The rule as text."""
        lines = [f"{self.rule}(", f'    name = "{self.name}",']
        lines += _list("srcs", [f'"{s}"' for s in sorted(self.srcs)])
        if self.rule != "py_library":
            main = RUNNER if self.rule == "py_test" else self.srcs[0]
            lines.append(f'    main = "{main}",')
        if self.rule == "py_test":
            lines += _list("args", [f'"{s}"' for s in self.srcs if s != RUNNER])
        if self.rule == "py_library" and self.srcs[0].startswith("tests/"):
            lines.append("    testonly = True,")
        elif self.rule == "py_library":
            lines.append('    visibility = ["//visibility:public"],')
        deps = [f'":{d}"' for d in sorted(self.deps)]
        deps += [f'requirement("{r}")' for r in sorted(self.requirements)]
        lines += _list("deps", deps)
        return "\n".join([*lines, ")"]) + "\n"


def _list(name: str, items: list[str]) -> list[str]:
    if len(items) < 2:
        return [f"    {name} = [{items[0]}],"] if items else []
    return [f"    {name} = [", *(f"        {item}," for item in items), "    ],"]


def is_test(source: Source) -> bool:
    """Whether pytest collects the file."""
    return source.path.startswith("tests/") and pathlib.Path(source.path).name.startswith("test_")


@functools.cache
def distribution(import_name: str) -> str:
    """Name in requirements.txt of the package that gives `import_name`; the name itself if none."""
    required = {r.lower().replace("-", "_"): r for r in requirement_names()}
    for name in importlib.metadata.packages_distributions().get(import_name, [import_name]):
        if name.lower().replace("-", "_") in required:
            return required[name.lower().replace("-", "_")]
    return import_name


def requirement_names() -> list[str]:
    """Names in requirements.txt, in its order."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line.split("=")[0].rstrip("<>!~") for line in lines if line and line[0] != "#"]


def targets() -> list[Target]:
    """All targets, dependencies filled in, in the order of the file."""
    found, home = {}, {}
    for source in sources().values():
        if source.path == RUNNER:
            rule, name = "py_library", "tests_run_pytest"
        elif is_test(source):
            rule, name = "py_test", source.module.replace(".", "_")
        elif source.folder == "experiments" and not source.path.endswith("__init__.py"):
            rule, name = "py_binary", source.module.replace(".", "_")
        else:
            rule, name = "py_library", _library_of(source.folder)
        home[source.module] = name
        found.setdefault(name, Target(rule, name, [])).srcs.append(source.path)
    by_path = {s.path: home[m] for m, s in sources().items()}
    for module, source in sources().items():
        target = found[home[module]]
        target.deps |= {home[m] for m in source.own if m in home} - {target.name}
        target.deps |= {by_path[p] for p in source.mentioned} - {target.name}
        target.requirements |= {distribution(e) for e in source.external}
        if target.rule == "py_test":
            target.deps |= {by_path[p] for p in _conftests(source) if p in by_path}
    del found["tests_run_pytest"]
    for target in found.values():
        target.deps.discard("tests_run_pytest")
        if target.rule == "py_test":
            target.srcs.append(RUNNER)
            target.requirements.add("pytest")
    order = ("py_library", "py_binary", "py_test")
    return sorted(found.values(), key=lambda t: (order.index(t.rule), t.name))


def _conftests(source: Source) -> list[str]:
    folders = source.folder.split("/")
    return ["/".join([*folders[:i], "conftest.py"]) for i in range(1, len(folders) + 1)]


@functools.cache
def _library_of(folder: str) -> str:
    """Name of the library with a folder's files: of the outermost folder in its import cycle."""
    reach = _reachable_folders()
    cycle = {other for other in reach[folder] if folder in reach[other]} | {folder}
    return min(cycle, key=lambda f: (f.count("/"), f)).replace("/", "_")


@functools.cache
def _reachable_folders() -> dict[str, set[str]]:
    """Folder -> folders that its library files import, directly or not."""
    libraries = [s for s in sources().values()
                 if not is_test(s) and s.path != RUNNER and s.folder != "experiments"]
    folder_of = {s.module: s.folder for s in libraries}
    reach: dict[str, set[str]] = {s.folder: set() for s in sources().values()}
    for source in libraries:
        imported = set(source.own) | {s.module for s in libraries if s.path in source.mentioned}
        reach[source.folder] |= {folder_of[m] for m in imported if m in folder_of}
    for middle in reach:
        for start in reach:
            if middle in reach[start]:
                reach[start] |= reach[middle]
    return reach


def render() -> str:
    """The whole file."""
    return _HEAD + "".join("\n" + target.render() for target in targets())


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes BUILD from the sources' imports.")
    parser.add_argument("--write", action="store_true", help="write it instead of printing")
    if parser.parse_args().write:
        BUILD.write_text(render(), encoding="utf-8")
    else:
        print(render(), end="")


if __name__ == "__main__":
    main()
