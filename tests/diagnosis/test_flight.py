"""A flight recorder's dump is read without torch, whoever wrote it, and never trusted."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.diagnosis import flight
from holdfast.errors import BadFrame
from holdfast.messages.evidence import MAX_COLLECTIVES, Collective

DATA = Path(__file__).parent / "data"
"""Dumps of real processes: gloo's of torch 2.13, NCCL's of torch 2.11 on an H200 whose stream was
kept busy, so that three all_reduces of one group and one of another were pending."""


def entry(number: int, **more: Any) -> dict[str, Any]:
    return {
        "profiling_name": "nccl:all_reduce",
        "collective_seq_id": number,
        "record_id": number,
        "process_group": ["0", "default_pg"],
        "state": "completed",
        **more,
    }


def packed(body: bytes) -> bytes:
    return b"holdfast flight 1\n" + zlib.compress(body)


def dumped(trace: bytes, groups: dict[str, list[int]] | None = None, **more: Any) -> bytes:
    """What a worker writes of one recorder's dump."""
    living = {name: {"ranks": ranks} for name, ranks in {"0": [], **(groups or {})}.items()}
    rest = json.dumps({"groups": living, **more}).encode()
    return packed(rest[:-1] + b', "traces": [%s]}' % trace)


def written(
    *entries: dict[str, Any], groups: dict[str, list[int]] | None = None, **more: Any
) -> bytes:
    return dumped(json.dumps({"version": "2.10", "entries": entries}).encode(), groups, **more)


def read(data: bytes) -> tuple[Collective, ...]:
    return flight.read(data).collectives


def states(found: tuple[Collective, ...]) -> list[tuple[str, int, str]]:
    return [(each.group, each.number, each.state) for each in found]


def test_gloo_never_says_completed_but_retires() -> None:
    newest, before, *_ = read(dumped((DATA / "gloo_2.13.json").read_bytes()))
    assert newest == Collective(
        group="0",
        number=16,
        op="gloo:all_reduce",
        state="scheduled",
        sizes="Float[72]",
        timeout_s=newest.timeout_s,
    )
    assert (before.number, before.state) == (15, "completed")


def test_operations_of_several_groups_are_told_apart() -> None:
    found = read(dumped((DATA / "nccl_2.11.json").read_bytes(), {"1": [0]}))
    assert states(found)[:2] == [("1 (my sub)", 2, "scheduled"), ("0", 4, "scheduled")]
    assert found[0].ranks == (0,)


def test_nccls_retired_ones_timed_out_and_are_not_finished() -> None:
    found = read(written(entry(1, state="started", retired=True)))
    assert found[0].state == "started"


def test_point_to_point_operations_count_for_themselves() -> None:
    found = read(written(entry(3, profiling_name="nccl:send 0->1", is_p2p=True, p2p_seq_id=9)))
    assert (found[0].op, found[0].number) == ("nccl:send 0->1", 9)


def test_the_newest_and_the_oldest_open_one_of_each_group_survive() -> None:
    busy = [entry(n, record_id=n + 10, state="scheduled") for n in range(100, 1000)]
    quiet = entry(7, record_id=1, process_group=["5", "rare"], state="completed")
    found = read(written(quiet, *busy))
    assert len(found) == MAX_COLLECTIVES
    numbers = [each.number for each in found if each.group == "0"]
    assert numbers == sorted(numbers, reverse=True)
    assert {100, 999} <= set(numbers)
    assert ("5 (rare)", 7, "completed") in states(found)


def test_a_group_that_was_made_again_is_not_mistaken_for_the_old_one() -> None:
    old = [entry(n, record_id=n) for n in range(1, 9)]
    new = [entry(n, record_id=10 + n) for n in range(1, 4)]
    assert [each.number for each in read(written(*old, *new))] == [3, 2, 1]


def test_members_are_told_once_for_each_group() -> None:
    group = {"process_group": ["3", "undefined"]}
    found = read(written(entry(1, **group), entry(2, **group), groups={"3": [2, 4, 6]}))
    assert [each.ranks for each in found] == [(2, 4, 6), ()]


def test_settings_turn_the_recorder_on_and_leave_the_users_alone() -> None:
    assert flight.settings("2.10.0+cpu", {}) == {"TORCH_FR_BUFFER_SIZE": "2000"}
    assert flight.settings("2.5.1", {}) == {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
    assert flight.settings("2.10.0", {"TORCH_FR_BUFFER_SIZE": "0"}) == {}
    assert flight.settings("2.11.0", {}) == flight.settings("3.0", {}) == {}, "on by default"
    assert flight.settings("nightly", {}) == {}


def test_without_torch_no_collective_was_ever_called() -> None:
    code = (
        "import sys\nfrom holdfast.diagnosis import flight\n"
        "sys.stdout.buffer.write(flight.dump())\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, timeout=200, capture_output=True)
    assert read(done.stdout) == ()


# ---- what is not trusted ----


BAD = {
    "empty": b"",
    "text": b"hello",
    "list": b"[]",
    "no dump of ours": b'{"entries": []}',
    "wrong types": dumped(b'{"entries": [{"profiling_name": 5}]}'),
    "no name": dumped(b'{"entries": [{}]}'),
    "negative": written(entry(-2)),
    "huge number": written(entry(1 << 70)),
    "huge digits": dumped(
        b'{"entries": [{"profiling_name": "", "op_id": ' + b"9" * 100_000 + b"}]}"
    ),
    "deep": dumped(b'{"entries": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "deep unknown": dumped(b'{"x": ' + b"[" * 200_000),
    "a pickle": pickle.dumps({"entries": []}),
    "a trace that is none": packed(b'{"groups": {}, "traces": [5]}'),
    "not packed": b"holdfast flight 1\nnonsense",
    "cut off": packed(b'{"groups": {}}')[:-3],
    "bomb": packed(b'{"groups": {}, "x": "' + b" " * (flight.MAX_DUMP_BYTES + 1) + b'"}'),
    "too long": b" " * (flight.MAX_DUMP_BYTES + 1),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_dump_is_refused_by_name(kind: str) -> None:
    began = time.thread_time()
    with pytest.raises(BadFrame):
        flight.read(BAD[kind])
    assert time.thread_time() - began < 10


@given(
    data=st.binary(max_size=200),
    head=st.sampled_from([b"", b"{", b'{"groups": {}, "traces": [{"entries":']),
    ours=st.booleans(),
)
def test_any_bytes_are_read_or_refused(data: bytes, head: bytes, ours: bool) -> None:
    try:
        flight.read(packed(head + data) if ours else head + data)
    except BadFrame:
        pass


@given(
    name=st.sampled_from(["gloo_2.13.json", "nccl_2.11.json"]),
    at=st.integers(0, 10_000),
    what=st.binary(min_size=1, max_size=4),
)
def test_a_damaged_dump_is_read_or_refused(name: str, at: int, what: bytes) -> None:
    data = bytearray((DATA / name).read_bytes())
    at %= len(data)
    data[at : at + len(what)] = what
    try:
        flight.read(dumped(bytes(data)))
    except BadFrame:
        pass
