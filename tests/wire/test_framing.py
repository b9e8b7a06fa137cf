"""Frames: what a stranger's bytes can and cannot do."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadFrame, FrameTooLarge, WireError
from holdfast.messages.actions import Finish, StartWorkers, StopWorkers
from holdfast.messages.checkpoints import Holder, ImageId, SnapshotId
from holdfast.messages.events import Progress, StreamEnded, WorkerExited
from holdfast.messages.records import Part, Raised, RankProgress, Terms
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time
from holdfast.messages.wire import Ack, FromAgent, FromCoordinator, Hello, Rejected, Sent, Welcome
from holdfast.wire import framing

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.integers(0, 2**53)
ranks = st.integers(0, 2**36)
ports = st.integers(0, 65535)
times = st.floats(0, 1e12).map(Time)
nodes = texts.map(NodeId)
terms = st.builds(
    Terms, min_nodes=ports, max_restarts=st.none() | numbers, grace_s=st.none() | st.floats(0, 9)
)
hellos = st.builds(
    Hello,
    protocol=numbers,
    token=texts,
    node=nodes,
    round=numbers,
    busy=st.booleans(),
    terms=terms,
)
progresses = st.builds(
    RankProgress, rank=ranks, step=numbers, steps=numbers, first_at=times, last_at=times
)
events = st.one_of(
    st.builds(StreamEnded, at=times, node=nodes),
    st.builds(Progress, at=times, node=nodes, round=numbers, ranks=st.lists(progresses).map(tuple)),
    st.builds(
        WorkerExited,
        at=times,
        node=nodes,
        round=numbers,
        rank=ranks,
        progress=progresses,
        raised=st.none()
        | st.builds(Raised, type=texts, message=texts, where=texts, traceback=texts),
        log_tail=texts,
    ),
)
from_agent = hellos | st.builds(Sent, number=st.integers(1, 2**53), event=events)
holders = st.builds(Holder, rank=ranks, node=nodes, address=texts, port=ports)
snapshots = st.builds(
    SnapshotId,
    checkpointer=st.text("abc", min_size=1, max_size=5),
    step=numbers,
    round=numbers,
)
images = st.builds(ImageId, snapshot=snapshots, rank=ranks, world_size=ranks)
parts = st.builds(
    Part,
    **dict.fromkeys(["round", "first_rank", "slots", "first_role_rank", "role_size"], ranks),
    **dict.fromkeys(["group_rank", "group_world_size", "world_size"], ranks),
    **dict.fromkeys(["store_port", "restarts", "max_restarts"], numbers),
    store_address=texts,
    copies=st.lists(holders, max_size=3).map(tuple),
    fetch=st.lists(st.tuples(images, holders), max_size=3).map(tuple),
)
from_coordinator = st.one_of(
    st.builds(Welcome, job=texts, job_id=texts, now=times, acked=numbers, beat_s=st.floats(0, 1e9)),
    st.builds(Rejected, reason=texts),
    st.builds(Ack, number=numbers),
    st.builds(StartWorkers, node=nodes, part=parts),
    st.builds(StopWorkers, node=nodes, round=numbers, grace_s=st.floats(0, 1e9), why=texts),
    st.builds(Finish, node=nodes, code=numbers, reason=texts, grace_s=st.floats(0, 1e9)),
)


def agent_side() -> framing.FrameDecoder[Any]:
    return framing.FrameDecoder(FromAgent)  # type: ignore[arg-type]


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(from_agent, max_size=5), st.lists(st.integers(0, 10**6), max_size=10))
def test_what_an_agent_says_arrives_however_it_is_cut_and_joined(
    messages: list[Any], cuts: list[int]
) -> None:
    decoder = agent_side()
    data = b"".join(map(framing.encode, messages))
    got = [message for piece in in_pieces(data, cuts) for message in decoder.feed(piece)]
    assert got == messages


@given(from_coordinator)
def test_what_the_coordinator_says_arrives(message: Any) -> None:
    decoder: framing.FrameDecoder[Any] = framing.FrameDecoder(FromCoordinator)  # type: ignore[arg-type]
    assert decoder.feed(framing.encode(message)) == [message]


@given(st.lists(st.binary(max_size=200), max_size=10))
def test_random_bytes_are_a_wire_error_or_wait_for_more(pieces: list[bytes]) -> None:
    decoder = agent_side()
    try:
        for piece in pieces:
            decoder.feed(piece)
    except WireError:
        pass


@given(st.binary(max_size=300))
def test_a_frame_of_random_bytes_is_a_bad_frame(body: bytes) -> None:
    try:
        (message,) = agent_side().feed(len(body).to_bytes(4, "big") + body)
    except BadFrame:
        return
    assert isinstance(message, Hello | Sent)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | texts
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=20,
)


@given(anything)
def test_valid_msgpack_of_another_shape_is_a_bad_frame(content: Any) -> None:
    body = msgspec.msgpack.encode(content)
    with pytest.raises(BadFrame):
        agent_side().feed(len(body).to_bytes(4, "big") + body)


@given(from_agent, st.data())
def test_a_message_with_one_byte_changed_never_raises_anything_but_a_wire_error(
    message: Any, data: st.DataObject
) -> None:
    frame = bytearray(framing.encode(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        agent_side().feed(bytes(frame))
    except WireError:
        pass


def test_deep_nesting_is_a_bad_frame_and_no_stack_overflow() -> None:
    for opener in (b"\x91", b"\x81\xa1a"):
        body = opener * 100_000
        with pytest.raises(BadFrame):
            agent_side().feed(len(body).to_bytes(4, "big") + body)


def test_an_announced_length_above_the_limit_is_refused_before_anything_is_allocated() -> None:
    decoder = agent_side()
    tracemalloc.start()
    try:
        with pytest.raises(FrameTooLarge):
            decoder.feed(b"\xff\xff\xff\xff")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_a_length_at_the_limit_is_taken_and_one_more_is_not() -> None:
    refused = Rejected(reason="no")
    frame = framing.encode(refused)
    size = len(frame) - 4
    assert framing.FrameDecoder(Rejected, max_bytes=size).feed(frame) == [refused]
    with pytest.raises(FrameTooLarge):
        framing.FrameDecoder(Rejected, max_bytes=size - 1).feed(frame)


def test_a_message_too_large_to_be_taken_is_not_sent() -> None:
    with pytest.raises(FrameTooLarge, match="Rejected"):
        framing.encode(Rejected(reason="x" * framing.MAX_FRAME_BYTES))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf"), -1.0])
def test_a_time_that_is_no_time_is_refused(odd: float) -> None:
    event = StreamEnded(at=Time(odd), node=NodeId("n"))
    with pytest.raises(BadFrame):
        agent_side().feed(framing.encode(Sent(number=1, event=event)))


@pytest.mark.parametrize("number", [0, -1, 2**63, 2**64 - 1])
def test_an_event_number_that_the_journal_could_not_hold_is_refused(number: int) -> None:
    event = StreamEnded(at=Time(1.0), node=NodeId("n"))
    with pytest.raises(BadFrame):
        agent_side().feed(framing.encode(Sent(number=number, event=event)))


@given(events)
def test_what_the_wire_lets_through_the_journal_can_hold(event: Any) -> None:
    (sent,) = agent_side().feed(framing.encode(Sent(number=1, event=event)))
    text = msgspec.json.encode(sent.event)
    assert msgspec.json.decode(text, type=type(event)) == event


def test_steps_are_as_they_were_sent() -> None:
    progress = RankProgress(rank=Rank(3), step=StepNumber(2**40), steps=1)
    event = Progress(at=Time(1), node=NodeId("n"), round=RoundNumber(1), ranks=(progress,))
    (sent,) = agent_side().feed(framing.encode(Sent(number=1, event=event)))
    assert sent.event.ranks == (progress,)
