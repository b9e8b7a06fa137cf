"""The documentation names only what is there.

Modules move; a page that still names the old place is worse than none. So every path and link on
the pages at the root and in docs must exist, every room of the package must be in the glossary, and the
reading paths of `docs/how-it-works.md` must lead from function to function without a gap, through few
enough files.
"""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

import holdfast
from holdfast.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = {"train.py", "holdfast.toml"}
"""Files of a user, in examples."""


def prose(page: Path) -> str:
    """A page without its fenced examples."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    for span in spans(prose(page)):
        path = span.split()[0].partition("<")[0]
        first, slash, _ = path.partition("/")
        bases = [base for base in (ROOT, ROOT / "holdfast") if slash and (base / first).is_dir()]
        if bases:
            assert any((base / path).exists() for base in bases), f"{path} is not there"
        elif path.endswith(".py"):
            assert path in EXAMPLES, f"{path}: say in which folder it is"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose(page)):
        assert "://" in target or (page.parent / target).exists(), f"{target} is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    for command in re.findall(r"(?:`|^|\$ )holdfast ([a-z]+)\b", page.read_text(), re.MULTILINE):
        assert command in COMMANDS, f"there is no command {command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_of_the_public_api_that_a_page_uses_exists(page: Path) -> None:
    others = {"toml", "json", "checks", "dev"}  # Files, a group of entry points, one of an API.
    for name in set(re.findall(r"\bholdfast\.([A-Za-z]\w*)", page.read_text())) - others:
        module = ROOT / "holdfast" / name
        is_module = module.is_dir() or module.with_suffix(".py").exists()
        assert is_module or name in holdfast.__all__, f"there is no holdfast.{name}"


def test_the_glossary_names_every_room_and_every_top_level_module() -> None:
    package = ROOT / "holdfast"
    named = spans((ROOT / "docs" / "glossary.md").read_text())
    rooms = {path.parent for path in package.rglob("__init__.py")} - {package, package / "core"}
    modules = set(package.glob("*.py")) - {package / "__init__.py", package / "__main__.py"}
    for path in sorted(rooms | modules):
        relative = str(path.relative_to(ROOT))
        assert any(name.startswith(relative) for name in named), f"{relative} has no entry"


# ---- reading paths -------------------------------------------------------------------------------

MOST_FILES = {
    "A dead rank, to its next first step": 35,
    "A save, until it is committed": 35,
    "A hang, to the sentence that explains it": 25,
}

THE_SCRIPT = "the user's script"
"""What stands between two files that do not know each other."""


class Stop(NamedTuple):
    """One step of a reading path: a file, what to read in it, and what leads to the next file."""

    path: Path
    names: list[str]
    leads_by: str


def reading_path(title: str) -> list[Stop]:
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    (section,) = re.findall(rf"^### {title}$(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    stops = []
    for item in re.findall(r"^\d+\. (.*(?:\n   .*)*)", section, re.MULTILINE):
        reads, _, leads = item.partition("→")
        path, *names = spans(reads.partition(":")[0])
        assert names, f"{path}: nothing to read there"
        stops.append(Stop(ROOT / path, names, leads.strip(" `\n")))
    return stops


def defined_in(path: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, kinds)}


@pytest.mark.parametrize("title", MOST_FILES)
def test_a_reading_path_names_functions_that_exist(title: str) -> None:
    for stop in reading_path(title):
        missing = set(stop.names) - defined_in(stop.path)
        assert not missing, f"{stop.path.name} has no {missing}"


@pytest.mark.parametrize("title", MOST_FILES)
def test_each_stop_of_a_reading_path_leads_to_the_next(title: str) -> None:
    stops = reading_path(title)
    for stop, following in pairwise(stops):
        assert stop.leads_by, f"{stop.path.name}: nothing leads on from here"
        if stop.leads_by == THE_SCRIPT:
            continue
        for path in (stop.path, following.path):
            named = re.search(rf"\b{stop.leads_by}\b", path.read_text())
            assert named, f"{path.name} does not name {stop.leads_by}"
    assert not stops[-1].leads_by


@pytest.mark.parametrize(("title", "most"), MOST_FILES.items())
def test_few_files_lie_on_a_reading_path(title: str, most: int) -> None:
    files = {stop.path for stop in reading_path(title)}
    assert 10 < len(files) <= most, f"{len(files)} files"
