"""A keeper's open door: strangers, peers that break the rules, and the codecs that face them."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keepers import (
    LARGE,
    TOKEN,
    NewNode,
    Node,
    an_image,
    body,
    connected,
    flip,
    until,
)

from holdfast.checkpoint.memory.images import Outline
from holdfast.checkpoint.replicas import server as replicaserver
from holdfast.checkpoint.replicas.copies import Peer, TransferLimits, push, shares
from holdfast.checkpoint.replicas.protocol import (
    PROTOCOL,
    Arrived,
    Connection,
    Go,
    Kept,
    PeerHello,
    Pull,
    Push,
    PushedBlocks,
    Sending,
    blocks_in,
    sealed,
    stretches,
    unsealed,
)
from holdfast.checkpoint.state.layout import BLOCK_BYTES, ByteSpan
from holdfast.errors import BadFrame, WireError
from holdfast.messages.checkpoints import ImageId, SnapshotId
from holdfast.wire import framing

# ---- strangers ----


def answer_to(peer: Peer, data: bytes) -> bytes:
    """All that a server says to these bytes before it closes."""
    with socket.create_connection((peer.host, peer.port), 2.0) as stranger:
        said = b""
        try:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while data := stranger.recv(1 << 16):
                said += data
        except TimeoutError:
            raise
        except OSError:
            pass
        return said


def test_with_a_wrong_token_there_is_no_answer(here: Node, there: Node) -> None:
    held = here.store.put(an_image())
    for token in ("", "wrong", TOKEN + "x", "ü" * 40):
        with pytest.raises(WireError, match=r"closed|reset|broke"):
            push(there.peer, token, None, held)
        hello = framing.encode(PeerHello(protocol=PROTOCOL, token=token))
        assert answer_to(there.peer, hello) == b""
    assert there.store.placed == 0


def test_another_version_is_not_spoken_with(there: Node) -> None:
    assert answer_to(there.peer, framing.encode(PeerHello(protocol=99, token=TOKEN))) == b""


@settings(max_examples=60)
@given(data=st.binary(max_size=200), greeted=st.booleans())
def test_garbage_has_no_answer_and_no_effect(stable: Node, data: bytes, greeted: bool) -> None:
    hello = framing.encode(PeerHello(protocol=PROTOCOL, token=TOKEN))
    said = answer_to(stable.peer, hello * greeted + data)
    assert said == b"" or greeted
    assert stable.store.placed == 0


@pytest.fixture(scope="module")
def stable() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        node = Node(Path(folder), None, 5.0)
        yield node
        node.store.put(an_image(), 1000)
        with connected(node.peer) as connection:
            connection.send(PeerHello(protocol=PROTOCOL, token=TOKEN))
            connection.send(Pull(image=an_image(), blocks=()))
            connection.expect(Sending)
        node.close()


def test_a_frame_that_is_too_large_is_refused_by_its_length(
    new_node: NewNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not because the rest of it does not come."""
    monkeypatch.setattr(replicaserver, "HELLO_LIMIT_S", 600.0)
    there = new_node(stall_s=600.0)
    hello = framing.encode(PeerHello(protocol=PROTOCOL, token=TOKEN))
    for before, length in ((b"", 1 << 31), (b"", replicaserver.HELLO_BYTES + 1), (hello, 1 << 21)):
        stranger = socket.create_connection((there.peer.host, there.peer.port), 60.0)
        with stranger, suppress(ConnectionError):
            stranger.sendall(before + length.to_bytes(4, "big"))
            assert stranger.recv(1) == b""


def test_a_stranger_that_sends_a_byte_now_and_then_is_closed_in_time(
    there: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicaserver, "HELLO_LIMIT_S", 0.4)
    began = time.monotonic()
    hello = framing.encode(PeerHello(protocol=PROTOCOL, token=TOKEN))
    with socket.create_connection((there.peer.host, there.peer.port), 0.05) as stranger:
        assert any(is_closed_after(stranger, bytes([byte])) for byte in hello[:-1])
    assert time.monotonic() - began > 0.3


def is_closed_after(stranger: socket.socket, data: bytes) -> bool:
    try:
        stranger.send(data)
        return stranger.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_silent_strangers_do_not_keep_peers_out(
    here: Node, there: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicaserver, "HELLO_LIMIT_S", 600.0)
    address = (there.peer.host, there.peer.port)
    before = threading.active_count()  # Other tests may have left threads that are about to end.
    strangers = [socket.create_connection(address) for _ in range(80)]
    try:
        push(there.peer, TOKEN, None, here.store.put(an_image(), 1000), TransferLimits(stall_s=60))
        until(lambda: threading.active_count() < before + 50, "most of the strangers are gone")
    finally:
        for stranger in strangers:
            stranger.close()


@contextmanager
def asking(peer: Peer, image: ImageId) -> Iterator[Connection]:
    """Somebody who wants an image."""
    with connected(peer) as connection:
        connection.send(PeerHello(protocol=PROTOCOL, token=TOKEN))
        connection.send(Pull(image=image, blocks=()))
        yield connection


@pytest.fixture
def busy(new_node: NewNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node that serves one at a time, and has one to serve."""
    monkeypatch.setattr(replicaserver, "SERVED_AT_ONCE", 1)
    node = new_node(stall_s=8.0)
    node.store.put(an_image(), 1000)
    with asking(node.peer, an_image()) as first:
        first.expect(Sending)
        yield node


def test_others_wait_for_their_turn_however_long_it_takes(busy: Node) -> None:
    with asking(busy.peer, an_image()) as second:
        second.stall_s = 7.5
        began = time.monotonic()
        second.expect(Sending)  # Once the first, which asks for nothing more, is given up.
        assert time.monotonic() - began > 7.5


def test_a_push_waits_for_its_turn_and_its_parts_need_none(here: Node, busy: Node) -> None:
    push(busy.peer, TOKEN, None, here.store.put(an_image(8), LARGE), TransferLimits(stall_s=7.5))
    assert an_image(8) in busy.store.images


def test_whoever_leaves_while_it_waits_takes_no_turn(busy: Node) -> None:
    with asking(busy.peer, an_image()):
        until(lambda: busy.server._waiting == 1, "one waits")
    until(lambda: busy.server._waiting == 0, "it is noticed that it left")
    with asking(busy.peer, an_image()) as third:
        third.stall_s = 60.0
        third.expect(Sending)


def test_only_so_many_wait(busy: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicaserver, "MOST_WAITING", 0)
    with (
        asking(busy.peer, an_image()) as second,
        pytest.raises(WireError, match="others wait already"),
    ):
        second.expect(Sending)


def test_a_server_that_closes_keeps_nobody_waiting(new_node: NewNode, busy: Node) -> None:
    busy.server._stall_s = 100.0
    with asking(busy.peer, an_image()) as second:
        until(lambda: busy.server._waiting == 1, "one waits")
        busy.server.close()
        with pytest.raises(WireError):
            second.expect(Sending)


# ---- peers that break the rules ----


def test_a_push_that_brings_no_parts_is_given_up(new_node: NewNode) -> None:
    there = new_node(stall_s=0.3)
    with connected(there.peer) as connection:
        connection.send(PeerHello(protocol=PROTOCOL, token=TOKEN))
        connection.send(Push(outline=sealed(Outline(an_image(), 1000, bytes(16), ByteSpan(0, 10)))))
        connection.expect(Go)
        with pytest.raises(WireError, match="no blocks came"):
            connection.expect(Kept)
    assert there.store.dropped == 1


def test_no_block_is_written_twice(here: Node, there: Node) -> None:
    held = here.store.put(an_image(), 3 * BLOCK_BYTES)
    with connected(there.peer) as control, connected(there.peer) as first:
        control.send(PeerHello(protocol=PROTOCOL, token=TOKEN))
        control.send(Push(outline=sealed(held.outline)))
        name = control.expect(Go).transfer
        first.send(PeerHello(protocol=PROTOCOL, token=TOKEN))
        first.send(PushedBlocks(transfer=name, blocks=((0, 2),)))
        first.send_part(held, 0, 2 * BLOCK_BYTES)
        first.expect(Arrived)
        for blocks in (((0, 1),), ((1, 3),), ((0, 4),), ((2, 1),)):
            with connected(there.peer) as again:
                again.send(PeerHello(protocol=PROTOCOL, token=TOKEN))
                again.send(PushedBlocks(transfer=name, blocks=blocks))
                with pytest.raises(WireError, match=r"closed|reset|broke"):
                    again.expect(Arrived)
        with connected(there.peer) as last:
            last.send(PeerHello(protocol=PROTOCOL, token=TOKEN))
            last.send(PushedBlocks(transfer=name, blocks=((2, 3),)))
            last.send_part(held, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES)
            last.expect(Arrived)
        control.expect(Kept)
    assert body(there.store.images[an_image()]) == body(held)


def test_a_part_of_nothing_is_refused(there: Node) -> None:
    with connected(there.peer) as connection:
        connection.send(PeerHello(protocol=PROTOCOL, token=TOKEN))
        connection.send(PushedBlocks(transfer="none", blocks=((0, 1),)))
        with pytest.raises(WireError):
            connection.expect(Arrived)


@pytest.mark.parametrize(
    "outline",
    [
        Outline(an_image(), 0, b"", ByteSpan(0, 0)),
        Outline(an_image(), 1000, b"", ByteSpan(0, 10)),
        Outline(an_image(), 1000, bytes(32), ByteSpan(0, 10)),
        Outline(an_image(), 1000, bytes(16), ByteSpan(991, 10)),
        Outline(an_image(), 1000, bytes(16), ByteSpan(-1, 10)),
        Outline(an_image(), 1 << 50, bytes(16), ByteSpan(0, 10)),
        Outline(an_image(checkpointer="../up"), 1000, bytes(16), ByteSpan(0, 10)),
        Outline(an_image(checkpointer=""), 1000, bytes(16), ByteSpan(0, 10)),
    ],
)
def test_an_outline_that_makes_no_sense_allocates_nothing(there: Node, outline: Outline) -> None:
    with connected(there.peer) as connection:
        connection.send(PeerHello(protocol=PROTOCOL, token=TOKEN))
        connection.send(Push(outline=sealed(outline)))
        with pytest.raises(WireError):
            connection.expect(Go)
    assert there.store.placed == 0


# ---- codecs ----


numbers = st.integers(0, 1 << 53)
outlines = st.builds(
    Outline,
    id=st.builds(
        ImageId,
        snapshot=st.builds(
            SnapshotId,
            checkpointer=st.from_regex(r"[0-9A-Za-z_]{1,64}", fullmatch=True),
            step=numbers,
            round=numbers,
        ),
        rank=st.integers(0, 2**36 - 1),
        world_size=st.integers(0, 2**36),
    ),
    size=st.just(3 * BLOCK_BYTES - 5),
    digests=st.binary(min_size=48, max_size=48),
    contents=st.builds(ByteSpan, st.integers(0, BLOCK_BYTES), st.integers(0, BLOCK_BYTES)),
)


@given(outlines)
def test_an_outline_survives_the_way(outline: Outline) -> None:
    assert unsealed(sealed(outline)) == outline


@given(outlines, st.data())
def test_a_damaged_outline_is_never_believed(outline: Outline, data: st.DataObject) -> None:
    whole = sealed(outline)
    at = data.draw(st.integers(0, len(whole) - 1))
    for damaged in (flip(whole, at), whole[:at], whole + b"\0"):
        with pytest.raises(BadFrame):
            unsealed(damaged)


@given(st.binary(max_size=300))
def test_what_is_no_outline_is_a_bad_frame_and_nothing_else(data: bytes) -> None:
    for attempt in (data, msgspec.msgpack.encode(data)):
        with pytest.raises(BadFrame):
            unsealed(attempt)


@given(st.sets(st.integers(0, 50)))
def test_stretches_name_the_same_blocks(blocks: set[int]) -> None:
    assert blocks_in(stretches(sorted(blocks)), 51 * BLOCK_BYTES) == sorted(blocks)


@given(st.lists(st.tuples(numbers, numbers), max_size=5))
def test_bad_stretches_are_refused_before_they_are_spread_out(found: list[tuple[int, int]]) -> None:
    try:
        blocks = blocks_in(found, 51 * BLOCK_BYTES)
    except BadFrame:
        return
    assert blocks == sorted(set(blocks))
    assert set(blocks) <= set(range(51))


@given(st.integers(0, 200), st.integers(1, 16))
def test_shares_are_all_of_it_and_about_equal(count: int, streams: int) -> None:
    runs = shares(range(count), streams)
    assert [block for run in runs for block in run] == list(range(count))
    assert 1 <= len(runs) <= streams
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
