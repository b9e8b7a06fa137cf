"""docs/torchrun.md names every flag and variable of the torchrun that is installed."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import torch.distributed
from torch.distributed.elastic.events import handlers
from torch.distributed.run import get_args_parser
from torchrun_page import table

from holdfast.cli.flags import flagged
from holdfast.config import values
from holdfast.config.schema import WithoutEffect, settings_of

VARIABLE = re.compile(
    r"""["'](TORCH[A-Z_]+|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|PYTHON_EXEC|LOGLEVEL)["']"""
)


@pytest.fixture(scope="module")
def theirs() -> dict[str, argparse.Action]:
    """torchrun's flags, by their spelling with dashes."""
    actions = get_args_parser()._actions
    flags = {
        next(name for name in action.option_strings if name.startswith("--")): action
        for action in actions
        if action.option_strings
    }
    return {name: action for name, action in flags.items() if name != "--help"}


def test_every_flag_is_in_the_table_and_no_other(theirs: dict[str, argparse.Action]) -> None:
    assert sorted(table("Flags")) == sorted(theirs)


def test_every_flag_is_taken_with_its_spellings_and_its_variable(
    theirs: dict[str, argparse.Action],
) -> None:
    ours = {setting.flag: setting for setting in flagged()}
    for name, action in theirs.items():
        setting = ours[name]
        spellings = {setting.flag, f"--{setting.name}", setting.short}
        assert set(action.option_strings) <= spellings, name
        assert bool(setting.takes) == (action.nargs != 0), name
        reads_variable = type(action).__module__ == "torch.distributed.argparse_util"
        assert setting.torchrun == reads_variable, name


def test_what_has_no_effect_is_said_so() -> None:
    without = [name for name, verdict in table("Flags").items() if verdict == "no effect"]
    assert without == [setting.flag for setting in settings_of(WithoutEffect)]


def test_the_same_values_are_known(theirs: dict[str, argparse.Action]) -> None:
    assert tuple(theirs["--start-method"].choices or ()) == values.START_METHODS
    assert tuple(theirs["--numa-binding"].choices or ()) == values.NUMA_BINDINGS
    assert set(handlers._log_handlers) == set(values.EVENT_HANDLERS)


def test_every_variable_in_torchruns_code_is_in_a_table() -> None:
    named = {*table("Variables that ranks get"), *table("Variables that the launcher reads")}
    folder = Path(torch.distributed.__file__).parent
    files = [folder / "run.py", *folder.glob("launcher/*.py"), *folder.glob("elastic/**/*.py")]
    found = {name for file in files for name in VARIABLE.findall(file.read_text())}
    assert len(found) > 15
    assert found <= named, found - named
