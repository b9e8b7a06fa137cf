"""What a process finds out about the node it runs on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.messages import local
from holdfast.worker import node_test as selftest


def order(size: int = 1) -> local.Test:
    return local.Test(rank=0, size=size, address="127.0.0.1", port=1, name="x", limit_s=5.0)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The test is made for a process of its own, and leaves it with one thread."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def feign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the node suffer from something."""

    def suffer(**what: object) -> None:
        (tmp_path / "selftest.json").write_text(json.dumps(what))
        monkeypatch.setenv("HOLDFAST_FAKE_NODE", str(tmp_path))

    return suffer


def test_without_torch_nothing_is_known_and_nobody_is_to_blame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    told = selftest.run(order(), [], pytest.fail)
    assert (told.solo_passed, told.passed) == (None, None)
    assert "torch cannot be imported" in told.detail


def test_a_healthy_node_passes_alone() -> None:
    told = selftest.run(order(), [], pytest.fail)
    assert (told.solo_passed, told.passed) == (True, None)
    assert told.solo_s is not None


def test_what_fails_is_told_and_not_raised(feign: Any) -> None:
    feign(solo="no GPU")
    told = selftest.run(order(), [], pytest.fail)
    assert (told.solo_passed, told.detail) == (False, "RuntimeError: no GPU")


def test_a_wrong_result_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "equal", lambda one, other: False)
    told = selftest.run(order(), [], pytest.fail)
    assert (told.solo_passed, told.detail) == (False, "it computed a wrong result")


def test_how_it_went_alone_is_told_before_the_other_is_waited_for(feign: Any) -> None:
    feign(pair="broken link")
    before: list[local.Tested] = []
    told = selftest.run(order(size=2), [], before.append)
    assert [(one.over, one.solo_passed) for one in before] == [(False, True)]
    assert (told.over, told.passed, told.detail) == (True, False, "RuntimeError: broken link")
