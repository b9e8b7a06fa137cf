"""What torch's `record` decorator left, and what it may leave when it was interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.agent.worker import recorded_failure


def test_an_exception_is_found_with_its_stack(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    stack = "Traceback ...\nValueError: no"
    message = {"message": "ValueError: no", "extraInfo": {"py_callstack": stack}}
    path.write_text(json.dumps({"message": message}))
    raised = recorded_failure(path)
    assert raised is not None
    assert (raised.type, raised.message, raised.traceback) == (
        "ValueError",
        "ValueError: no",
        stack,
    )


def test_a_plain_message_is_found(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": "it broke"}))
    raised = recorded_failure(path)
    assert raised is not None
    assert (raised.type, raised.message) == ("Error", "it broke")


@pytest.mark.parametrize("content", [None, "", '{"message": ', "[]", "{}", '{"message": 3}'])
def test_no_file_and_half_a_file_say_nothing(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "error.json"
    if content is not None:
        path.write_text(content)
    assert recorded_failure(path) is None
