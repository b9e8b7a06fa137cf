"""The bench with other people's frameworks says what is not installed."""

from __future__ import annotations

import pytest
from harness.launchers import LauncherMissingError
from modes import frameworks


def test_frameworks_that_are_missing_are_named_with_the_way_to_install_them() -> None:
    with pytest.raises(LauncherMissingError, match="pip install no_such_framework"):
        frameworks._present(["no_such_framework"])


def test_those_that_are_there_are_measured_without_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert frameworks._present(["json", "no_such_framework"]) == ["json"]
    assert "has no no_such_framework: not measured" in capsys.readouterr().err


def test_every_framework_has_its_script() -> None:
    assert all(path.is_file() for path in frameworks.PROGRAMS.values())
