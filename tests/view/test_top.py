"""What `holdfast top` draws, at several sizes, and what it makes of keys."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from reported import an_incident, of_two_ranks

from holdfast.config.values import Price
from holdfast.messages.evidence import Frame, StackGroup, Verdict
from holdfast.messages.reports import CheckpointerReport, GoodputReport, NodeReport, RankReport
from holdfast.messages.units import NodeId, Rank, StepNumber, Time
from holdfast.messages.usage import NodeUsage
from holdfast.messages.wire import Why
from holdfast.view.top.frame import frame, sparkline
from holdfast.view.top.keys import keys
from holdfast.view.top.lines import as_json, words
from holdfast.view.top.map import step_of
from holdfast.view.top.paragraph import wrapped
from holdfast.view.top.program import why_lines
from holdfast.view.top.screen import ansi
from holdfast.view.top.state import JobNow, Looks, NodeNow, usage_words

GOLDEN = Path(__file__).parent / "screens"


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def a_rank(number: int, **more: Any) -> RankReport:
    told: dict[str, Any] = {
        "rank": Rank(number),
        "pid": 4000 + number,
        "step": StepNumber(12_407),
        "finished": False,
        "score": 0.98,
        "own_score": 0.99,
        "straggler": None,
        "steps_per_s": 3.42,
    }
    return RankReport(**{**told, **more})


def a_job(nodes: int = 4, slots: int = 8, **changes: Any) -> JobNow:
    """A job in which a rank is slow, one starts, and something has happened."""
    letters = ["r" * slots for _ in range(nodes)]
    letters[1] = "rrs" + "r" * (slots - 3)
    letters[-1] = "i" + "r" * (slots - 1)
    hosts = [f"node-{number}" for number in range(nodes)]
    shown = [
        NodeNow(
            f"{host}:1",
            host,
            "placed",
            slots * at,
            letters[at],
            "suspect: failed twice" if at == 2 else "",
            "cpu  34% mem  51% gpu  97%",
        )
        for at, host in enumerate(hosts)
    ]
    reports = [
        NodeReport(
            node=NodeId(f"{host}:1"),
            host=host,
            state="placed",
            ranks=[a_rank(slots * at + local) for local in range(slots)],
        )
        for at, host in enumerate(hosts)
    ]
    status = replace(
        of_two_ranks(),
        job="llm",
        state="running",
        round=3,
        world_size=nodes * slots,
        step=StepNumber(12_408),
        steps_per_s=3.42,
        samples_per_s=875.0,
        wall_s=7980.0,
        restarts=2,
        nodes=reports,
        checkpoints=[
            CheckpointerReport(
                checkpointer="ckpt",
                in_memory=StepNumber(12_400),
                on_storage=StepNumber(12_000),
                writing=StepNumber(12_400),
                failures=0,
            )
        ],
        suspects={"node-2": "its ranks failed twice within an hour"},
    )
    goodput = GoodputReport(
        job="llm",
        wall_s=7980.0,
        ranks=nodes * slots,
        seconds={
            "productive": 250_000.0,
            "start": 3000.0,
            "redo": 1500.0,
            "checkpoint": 700.0,
            "wait": 160.0,
        },
        goodput=0.979,
    )
    incidents = [
        an_incident(
            id=number,
            at=Time(1000.0 * number),
            lost_s=0.41,
            phases={"detect": 0.01, "stop": 0.1, "start": 0.1, "first_step": 0.2},
            line=f"rank {number} was killed by signal 9 (SIGKILL) at step {number}00: back in 0.41 s"
            " (detect 0.01, stop 0.10, start 0.10, first step 0.20), 3 steps redone",
        )
        for number in range(1, 6)
    ]
    view = JobNow(
        status=replace(status, **changes),
        goodput=goodput,
        incidents=incidents,
        nodes=[*shown, NodeNow("spare:1", "spare", "waiting", -1, "")],
        now=Time(1e9),
        speeds=tuple(float(3 + number % 3) for number in range(50)),
    )
    return view


def drawn(view: JobNow, width: int, height: int = 30, **looks: Any) -> list[str]:
    lines = [line.plain.rstrip() for line in frame(view, Looks(**looks), width, height)]
    assert len(lines) == height
    return lines


@pytest.mark.parametrize("width", [60, 100, 160])
@pytest.mark.parametrize("page", ["overview", "incidents", "help"])
def test_screens_are_as_they_were(page: Any, width: int) -> None:
    """With HOLDFAST_NEW_SCREENS set, the screens are written anew: look at them before you commit."""
    text = "\n".join(drawn(a_job(), width, page=page, selected=10)) + "\n"
    path = GOLDEN / f"{page}_{width}.txt"
    if os.environ.get("HOLDFAST_NEW_SCREENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("size", [(20, 4), (40, 10), (60, 24), (250, 80)])
@pytest.mark.parametrize("nodes", [1, 4, 1250])
@pytest.mark.parametrize("page", ["overview", "incidents", "why", "help"])
def test_a_frame_fits_any_terminal(page: Any, nodes: int, size: tuple[int, int]) -> None:
    view = a_job() if nodes == 4 else a_job(max(2, nodes))
    for selected in (0, view.ranks - 1):
        lines = frame(view, Looks(page=page, selected=selected), *size)
        assert len(lines) == size[1]
        assert all(line.cell_len <= size[0] for line in lines)


def test_ten_thousand_ranks_are_folded_and_what_is_wrong_is_seen() -> None:
    view = a_job(1250)
    assert view.ranks == 10_000
    text = "\n".join(drawn(view, 100, 40))
    assert "1,250 nodes, each the letter of its worst rank" in text
    assert "node-1 " in text  # The slow one has a line of its own.
    assert "s slow 1" in text
    began = time.process_time()
    for _ in range(5):
        ansi(frame(view, Looks(), 160, 50), 160)
    assert (time.process_time() - began) / 5 < 0.5


def test_a_price_tells_what_lost_time_cost() -> None:
    lost = sum(s for cause, s in a_job().goodput.seconds.items() if cause != "productive")
    shown = "\n".join(drawn(dataclasses.replace(a_job(), price=Price(3600.0, "EUR")), 120))
    assert f"({lost:,.2f} EUR) of" in shown
    assert "EUR" not in "\n".join(drawn(a_job(), 120))


def test_a_hang_and_an_end_are_what_one_sees_first() -> None:
    ended = a_job(state="ended", exit_code=93, reason="the same failure again")
    text = "\n".join(drawn(ended, 80))
    assert "ended with exit code 93: the same failure again" in text
    assert "any key ends this" in text
    assert "finished" in "\n".join(drawn(a_job(state="ended", exit_code=0, reason=""), 80))


def test_nothing_that_a_script_says_reaches_the_terminal_as_an_escape() -> None:
    view = a_job()
    view.incidents[-1] = replace(view.incidents[-1], line="raised \x1b[2J\x1b]0;x\x07 boom\nmore")
    for line in frame(view, Looks(page="incidents"), 100, 30):
        assert line.plain.isprintable() or not line.plain


@pytest.mark.parametrize(
    ("key", "moves"), [("left", -1), ("right", 1), ("up", -8), ("down", 8), ("x", 0)]
)
def test_arrows_choose_ranks_and_nodes(key: str, moves: int) -> None:
    assert step_of(a_job(), Looks(selected=9), 100, 30, key) == moves


def test_arrows_go_from_node_to_node_where_nodes_are_letters() -> None:
    assert step_of(a_job(1250), Looks(), 100, 30, "right") == 8


def test_keys_are_known_by_their_names() -> None:
    assert keys(b"jk\x1b[A\x1bOB\x1b[5~q") == ["down", "up", "up", "down", "page up", "q"]
    assert keys(b"\x1b") == ["back"]
    assert keys("é\xff".encode()) == ["é", "ÿ"]


def test_lines_for_pipes_say_the_same() -> None:
    assert words(a_job()).startswith(
        "01:46:40 running round 3, 32 ranks, step 12408, 3.4 steps/s, goodput 97.9%, incident 5: "
    )
    told = json.loads(as_json(a_job()))
    assert told["status"]["step"] == 12_408
    assert told["goodput"]["lost_s"]["redo"] == 1500.0
    assert len(told["map"]["ranks"]) == 32
    assert "\n" not in as_json(a_job())


def test_why_shows_the_stack_of_the_rank_that_was_chosen() -> None:
    frames = (Frame(function="train", file="train.py", line=7),)
    groups = tuple(
        StackGroup(ranks=(Rank(n),), headline=f"rank {n}", frames=frames) for n in (0, 1)
    )
    verdict = Verdict(guilty=(), sentence="rank 1 waits", groups=groups)
    why = Why(verdict=verdict, evidence=(), suspicion=None, detects=True)
    assert why_lines(why, 1) == ["rank 1 waits", "", "rank 1", "    train  train.py:7"]


def test_words_are_wrapped_by_columns_and_the_rest_is_cut() -> None:
    assert [one.plain for one in wrapped("aa bb cc dd", 7, 9)] == ["aa bb", "    cc", "    dd"]
    assert [one.plain for one in wrapped("aaaaaa", 7, 9)] == ["aaa", "    aaa"]
    assert [one.plain for one in wrapped("你好 世界", 8, 2)] == ["你好", "    世界"]
    assert wrapped("", 10, 3) == []
    assert wrapped("a b c d e f g h", 7, 1)[0].plain == "a b c …"


def test_speeds_are_drawn_against_the_highest() -> None:
    assert sparkline([0.0, 1.0, 2.0], 10) == "▁▅█"
    assert sparkline([0.0, 0.0], 10) == ""
    assert sparkline([1.0] * 10, 3) == "███"


def test_usage_is_told_as_far_as_it_is_known() -> None:
    assert usage_words(NodeUsage(cpu=0.5)) == "cpu  50%"
    assert usage_words(NodeUsage()) == ""
