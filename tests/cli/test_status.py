"""What `holdfast status` shows people."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.cli import status
from holdfast.core import job as jobs
from holdfast.core import report
from holdfast.messages.events import JobOpened, NodeJoined
from holdfast.messages.records import NodeSpec, Terms
from holdfast.messages.units import NodeId, Time

Shown = Callable[[dict[str, Any]], list[str]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """The lines for a job of two ranks on one node, of which some things are changed."""
    now = Time(1000.0)
    job = jobs.opened(JobOpened(at=now, job="j", terms=Terms()))
    spec = NodeSpec(host="h", address="10.0.0.1", slots=2, pid=1)
    jobs.handle(job, NodeJoined(at=now, node=NodeId("h:1"), spec=spec, store_port=1), now)

    def show(changes: dict[str, Any]) -> list[str]:
        told = report.status(job, now, alive=True)
        for key, value in changes.items():
            if key == "ranks":
                for rank, more in zip(told["nodes"][0]["ranks"], value, strict=True):
                    rank |= more
            else:
                told[key] = value
        viewed = SimpleNamespace(job=job, now=now, alive=True)
        monkeypatch.setattr(status, "look", lambda *words: (viewed, False))
        monkeypatch.setattr(report, "status", lambda *about: told)
        assert status.main([]) == 0
        return capsys.readouterr().out.splitlines()

    return show


def test_nothing_is_said_about_what_is_not_known(shown: Shown) -> None:
    title, columns, *rows = shown({})
    assert title.startswith("job j: running, round 1, 2 ranks, step 0")
    assert columns.split("\t")[-1] == "speed"
    assert [row.split("\t")[-1] for row in rows] == ["-", "-"]


def test_slow_ranks_are_marked(shown: Shown) -> None:
    ranks = [{"score": 0.994}, {"score": 0.512, "own_score": 0.6, "straggler": "relative"}]
    _, _, *rows = shown({"ranks": ranks})
    assert [row.split("\t")[-1] for row in rows] == ["0.99", "0.51, slow"]


def test_a_rank_that_nobody_can_be_compared_with_is_shown_beside_its_own_best(
    shown: Shown,
) -> None:
    _, _, row, _ = shown({"ranks": [{"own_score": 0.7}, {}]})
    assert row.split("\t")[-1] == "0.70 of its best"


def test_a_rank_that_is_slower_than_it_was_is_shown_so(shown: Shown) -> None:
    slower = {"score": 1.0, "own_score": 0.6, "straggler": "individual"}
    _, _, row, _ = shown({"ranks": [slower, {}]})
    assert row.split("\t")[-1] == "0.60 of its best, slow"


def test_checkpoints_are_told_in_a_line(shown: Shown) -> None:
    none = {"in_memory": None, "on_storage": None, "writing": None, "failures": 0}
    some = {"in_memory": 40, "on_storage": 30, "writing": 40, "failures": 2}
    *_, first, second = shown(
        {"checkpoints": [{"checkpointer": "a", **none}, {"checkpointer": "b", **some}]}
    )
    assert first == "checkpoints of a: none yet"
    assert second == (
        "checkpoints of b: step 40 in memory, step 30 on storage, step 40 being written,"
        " 2 failed in a row"
    )


def test_excluded_hosts_are_told_with_the_reason(shown: Shown) -> None:
    *_, last = shown({"excluded": {"bad": "gpu-ecc: GPU 3 has uncorrectable errors"}})
    assert last == "excluded: host bad: gpu-ecc: GPU 3 has uncorrectable errors"
