"""What the launcher's own error file says after a failure."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent import launcher_error
from holdfast.agent.processes import Exit
from holdfast.messages.records import Raised
from holdfast.messages.units import Rank

RAISED = Raised(type="ValueError", message="no", where="train.py:3", traceback="Traceback ...")


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a failure; what the file then says."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "told.json"))

    def write(failure: launcher_error.Failure | str) -> Any:
        launcher_error.write(failure)
        return json.loads((tmp_path / "told.json").read_text())["message"]

    return write


def test_what_a_rank_recorded_is_passed_on_with_its_exit_code(told: Any, tmp_path: Path) -> None:
    recorded = tmp_path / "error.json"
    recorded.write_text(json.dumps({"message": {"message": "ValueError: no", "extraInfo": {}}}))
    failure = launcher_error.of_rank(Rank(1), Exit(signal=signal.SIGSEGV), None, recorded)
    assert told(failure) == {"message": "ValueError: no", "extraInfo": {}, "errorCode": -11}


def test_a_message_that_a_rank_recorded_is_passed_on_as_it_is(told: Any, tmp_path: Path) -> None:
    recorded = tmp_path / "error.json"
    recorded.write_text('{"message": "it broke"}')
    assert told(launcher_error.of_rank(Rank(1), Exit(code=3), None, recorded)) == "it broke"


@pytest.mark.parametrize(
    ("end", "raised", "message", "stack", "code"),
    [
        (Exit(code=1), RAISED, "ValueError: no", "Traceback ...", 1),
        (Exit(signal=signal.SIGKILL), None, "rank 1 was killed by SIGKILL", "", -9),
        (Exit(code=17), None, "rank 1 ended with exit code 17", "", 17),
    ],
)
def test_a_rank_that_recorded_nothing_is_described(
    told: Any, tmp_path: Path, end: Exit, raised: Raised | None, message: str, stack: str, code: int
) -> None:
    said = told(launcher_error.of_rank(Rank(1), end, raised, tmp_path / "none.json"))
    assert (said["message"], said["errorCode"]) == (message, code)
    assert said["extraInfo"]["py_callstack"] == stack
    assert said["extraInfo"]["timestamp"].isdecimal()


def test_a_reason_is_told(told: Any) -> None:
    assert told("stopped by SIGTERM")["message"] == "stopped by SIGTERM"


@pytest.mark.parametrize("path", ["", "/proc/nope/file"])
def test_no_file_is_no_failure_of_its_own(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    launcher_error.write("why")
