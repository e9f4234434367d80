"""third_party/README.md, requirements.txt and the imports tell one story."""

import re

from tests import build_file
from tests.source_tree import ROOT, sources

README = (ROOT / "third_party" / "README.md").read_text(encoding="utf-8")
COLUMNS = 6


def packages():
    """Name -> (range, licence, what for, imported by, what to watch) of the first table."""
    section = README.split("## Python packages", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in section.splitlines() if line.startswith("|")][2:]
    assert all(len(row) == COLUMNS for row in rows)
    return {row[0]: row[1:] for row in rows}


def requirements():
    """Name -> range."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    matches = [re.fullmatch(r"([\w-]+)(.*)", line) for line in lines if line and line[0] != "#"]
    return {m[1]: m[2] for m in matches}


def importers():
    """Distribution -> folders whose files import it; the folders of tests/ count as one."""
    found = {}
    for source in sources().values():
        for name in source.external:
            folder = "tests" if source.folder.startswith("tests") else source.folder
            found.setdefault(build_file.distribution(name), set()).add(folder)
    return found


def test_the_table_has_the_requirements():
    assert {name: row[0] for name, row in packages().items()} == requirements()


def test_requirements_are_bounded_and_have_a_reason():
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    for name, span in requirements().items():
        assert "==" in span or ("<" in span and ">=" in span), f"{name}{span} has an open end"
        block = lines[:lines.index(name + span)]
        assert block[-1], f"{name} stands alone, without a reason"
        start = max((i for i, line in enumerate(block) if not line), default=-1)
        assert any(line.startswith("#") for line in block[start + 1:]), name


def test_the_table_names_the_importing_folders():
    for name, row in packages().items():
        listed = {part.strip(" `") for part in row[3].split(",")}
        wanted = importers().get(name)
        if wanted is None:
            assert listed <= {"plugin", "command"}, f"nothing imports {name}; is it still needed?"
        else:
            assert listed == wanted, f"third_party/README.md, {name}: imported by {sorted(wanted)}"


def test_everything_imported_is_required():
    assert set(importers()) - set(requirements()) == set()


def test_every_row_says_licence_and_purpose():
    for name, row in packages().items():
        assert row[1] and row[2] and row[4], name


def test_fetched_components_name_the_module_that_has_their_version():
    section = README.split("## Fetched when first used", 1)[1]
    rows = [[c.strip() for c in line.strip("|").split("|")]
            for line in section.splitlines() if line.startswith("|")][2:]
    assert rows
    for _, version, licence, _, module in rows:
        assert licence
        assert version in (ROOT / module).read_text(encoding="utf-8"), module
