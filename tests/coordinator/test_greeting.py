"""Which nodes may join a job, and what is said to those that may not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from serving import LIMIT_S, hello, run, served

from holdfast.coordinator import greeting
from holdfast.core import job as jobs
from holdfast.core.job import Job
from holdfast.messages.events import JobOpened
from holdfast.messages.records import Script, Terms
from holdfast.messages.units import NodeId, RoundNumber, Time
from holdfast.messages.wire import Rejected, Welcome

TERMS = Terms(
    min_nodes=2,
    max_nodes=4,
    max_restarts=3,
    script=Script(name="train.py", content="c0", arguments="a0"),
)


def job() -> Job:
    return jobs.opened(JobOpened(at=Time(0.0), job="j", terms=TERMS))


def refusal(known: bool = False, round: int = 0, version: str | None = None, **other: Any) -> Any:
    said = hello(terms=replace(TERMS, **other), round=RoundNumber(round))
    if version is not None:
        said = replace(said, version=version)
    return greeting.refusal(said, job(), known)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"min_nodes": 1}, "it was started with --nnodes 1:4, the job with --nnodes 2:4"),
    ({"max_nodes": 5}, "--nnodes 2:5"),
    ({"min_nodes": 5}, "impossible"),
    ({"node_unit": 2}, "--node-unit 2"),
    ({"segment": 2}, "--segment 2"),
    ({"node_check": True}, "--node-check yes, the job with --node-check no"),
    ({"script": Script(name="eval.py")}, "it was started with eval.py, the job with train.py"),
    ({"version": "0.0.1"}, "not 0.0.1; run the same version on all nodes"),
]


@pytest.mark.parametrize(("other", "words"), WRONG, ids=lambda each: str(each)[:40])
def test_a_node_that_would_make_the_world_inconsistent_is_refused(
    other: dict[str, Any], words: str
) -> None:
    assert words in refusal(**other)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"script": Script(name="train.py", content="c1", arguments="a0")}, "another content"),
        ({"script": Script(name="train.py", content="c0", arguments="a1")}, "other arguments"),
        ({"max_restarts": 5, "copies": 2}, "(copies, max_restarts); those of the job hold"),
    ],
    ids=["content", "arguments", "terms"],
)
def test_what_may_differ_is_accepted_with_a_remark(other: dict[str, Any], words: str) -> None:
    assert refusal(**other) is None
    (remark,) = greeting.remarks(replace(TERMS, **other), TERMS)
    assert words in remark


def test_a_node_of_the_job_is_never_refused_for_what_it_was_started_with() -> None:
    wrong = {"min_nodes": 1, "version": "0.0.1", "script": Script(name="eval.py")}
    assert refusal(known=True, **wrong) is None
    assert refusal(round=1, **wrong) is None


def test_equal_terms_get_no_remark() -> None:
    assert refusal() is None
    assert greeting.remarks(TERMS, TERMS) == []


def test_a_node_without_a_printable_name_is_refused() -> None:
    for name in ("", "a\nb", "\x00"):
        said = replace(hello(terms=TERMS), node=NodeId(name))
        assert "name" in str(greeting.refusal(said, job(), known=False))


def test_a_node_that_joins_wrongly_is_told_once_and_the_log_has_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            good = await here.join()
            peer = await here.connect()
            peer.send(hello("wrong", terms=Terms(max_nodes=3)))
            refused = await peer.hear_a(Rejected)
            assert "--nnodes 1:3, the job with --nnodes 1:1" in refused.reason
            assert await peer.is_cut_off()
            good.close()

    run(scenario())
    told = [record.getMessage() for record in caplog.records if "--nnodes" in record.getMessage()]
    assert len(told) == 1
    assert "wrong" in told[0]


def test_a_greeting_of_another_version_names_both_versions(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            peer = await here.connect()
            said = {"type": "Hello", "protocol": 99, "token": here.coordinator.token, "moon": 1}
            body = msgspec.msgpack.encode(said)
            peer.writer.write(len(body).to_bytes(4, "big") + body)
            refused = await peer.hear_a(Rejected)
            assert "not 99" in refused.reason
            assert "same version" in refused.reason

    run(scenario())


def test_remarks_are_logged_and_the_node_joins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            await here.join()
            peer = await here.connect()
            peer.send(hello("other", terms=Terms(max_nodes=1, copies=2)))
            assert isinstance(await asyncio.wait_for(peer.hear(), LIMIT_S), Welcome)

    run(scenario())
    assert "other: it was started with other terms (copies)" in caplog.text
