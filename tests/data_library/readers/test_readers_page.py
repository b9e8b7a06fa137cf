"""The page about readers: its examples run, and its names exist."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.data import readers

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "readers.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def test_the_page_has_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/readers.md", "exec"), {})


@pytest.mark.parametrize("name", [name for name in readers.__all__ if name.endswith("Reader")])
def test_the_table_names_the_parameters_of_each_reader(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}\((.*?)\)`", TEXT, re.MULTILINE)
    named = [part.partition("=")[0].strip() for part in re.split(r",(?! *\")(?!\")", row)]
    parameters = list(inspect.signature(getattr(readers, name)).parameters)
    assert [*named, "index"] == parameters or named == parameters


def test_names_are_imported_when_they_are_used() -> None:
    code = "import sys, holdfast.data.readers as r; dir(r); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"pyarrow", "numpy", "confluent_kafka", "datasets", "torch"}


def test_every_public_name_is_there() -> None:
    for name in readers.__all__:
        assert getattr(readers, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'XmlReader'"):
        _ = readers.XmlReader
