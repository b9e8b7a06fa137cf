"""What a script will import from Holdfast, judged by its text."""

from __future__ import annotations

import importlib
from pathlib import Path

from holdfast.worker.own_imports import own_modules


def test_the_modules_of_the_names_that_a_script_mentions_are_imported(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import holdfast as hf\nfrom holdfast.data import ElasticDataLoader\nhf.Checkpointer\n"
    )
    assert own_modules(str(script)) == ["holdfast.data.loader", "holdfast.worker.checkpointer"]


def test_a_script_without_holdfast_costs_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from fairscale import Checkpointer, Order\n")
    assert own_modules(str(script)) == []


def test_of_a_script_that_cannot_be_read_all_is_imported() -> None:
    found = own_modules("package.train")
    assert {"holdfast.worker.checkpointer", "holdfast.data.loader"} <= set(found)
    for name in found:
        importlib.import_module(name)
