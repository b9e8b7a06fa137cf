"""An image is read in a peer's memory, where it is, whatever becomes of the peer meanwhile."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from keepers import (
    BODY_AT,
    LARGE,
    SMALL,
    TOKEN,
    NewNode,
    Node,
    an_image,
    between,
    body,
    connected,
    flip,
    small_blocks,
    until,
)
from states import Rank, check_same, image_of

from holdfast.checkpoint.memory.images import Images
from holdfast.checkpoint.replicas.copies import Peer
from holdfast.checkpoint.replicas.protocol import (
    PROTOCOL,
    Connection,
    More,
    PeerHello,
    Pull,
    Sending,
    sealed,
)
from holdfast.checkpoint.restore import load as restore
from holdfast.checkpoint.restore import sources as peersource
from holdfast.checkpoint.restore.sources import PeerSource, open_peers
from holdfast.checkpoint.restore.verified_read import Want, read
from holdfast.checkpoint.state.layout import BLOCK_BYTES, ByteSpan
from holdfast.errors import NotThere, Unusable, WireError
from holdfast.wire import framing
from holdfast.wire.tls import TlsFiles, client_context, server_context

BLOCK = 1 << 12
MANY = 37 * BLOCK + 1234
"""Bytes, in 38 small blocks."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, BLOCK)


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """Every connection that is made to a peer."""
    made: list[Connection] = []
    dial = Connection.dial

    def noted(host: str, port: int, stall_s: float) -> Connection:
        made.append(dial(host, port, stall_s))
        return made[-1]

    monkeypatch.setattr(Connection, "dial", noted)
    return made


def is_open(connection: Connection) -> bool:
    return connection._socket.fileno() != -1


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(peersource, "monotonic", lambda: self.now)


def source_at(peer: Peer, until: ExitStack, **more: Any) -> PeerSource:
    source = PeerSource(peer, TOKEN, None, an_image(), **more)
    until.callback(source.close)
    return source


def read_span(source: PeerSource, at: int, size: int, threads: Executor | None = None) -> bytes:
    got = bytearray(size)
    read(source, [Want(ByteSpan(at, size), lambda: memoryview(got))], threads)
    return bytes(got)


def threads_of(count: int) -> ThreadPoolExecutor | nullcontext[None]:
    return ThreadPoolExecutor(count) if count else nullcontext()


# ---- what is read ----


@pytest.mark.parametrize("size", [1000, BLOCK_BYTES, SMALL, LARGE])
def test_what_is_read_is_what_the_peer_has_byte_for_byte(there: Node, size: int) -> None:
    held = there.store.put(an_image(), size)
    with ExitStack() as until, ThreadPoolExecutor(2) as threads:
        source = source_at(there.peer, until)
        assert (source.size, source.digests) == (held.size, held.digests)
        assert source.outline == held.outline
        assert read_span(source, 0, size, threads) == body(held)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
def test_any_number_of_threads_reads_the_same_each_by_a_connection_of_its_own(
    there: Node, dialled: list[Connection], count: int
) -> None:
    held = there.store.put(an_image(), MANY)
    with ExitStack() as until, threads_of(count) as threads:
        source = source_at(there.peer, until)
        for _ in range(3):
            assert read_span(source, 0, MANY, threads) == body(held)
    assert len(dialled) <= 1 + count


spans = st.tuples(st.integers(0, MANY - 1), st.integers(1, 4 * BLOCK)).map(
    lambda found: ByteSpan(found[0], min(found[1], MANY - found[0]))
)


@pytest.mark.usefixtures("small")
def test_any_part_is_exact_and_nothing_but_its_blocks_travels(there: Node) -> None:
    held = there.store.put(an_image(), MANY)
    whole = body(held)
    first_words = len(framing.encode(Sending(outline=sealed(held.outline))))
    sent: list[int] = []

    def meddle(index: int, up: bool, before: int, data: bytes) -> bytes:
        sent.append(0 if up else len(data))
        return data

    @settings(max_examples=50, deadline=None)
    @given(wanted=st.lists(spans, min_size=1, max_size=5), count=st.sampled_from([0, 1, 3]))
    def check(wanted: list[ByteSpan], count: int) -> None:
        sent.clear()
        targets = [bytearray(span.size) for span in wanted]
        wants = [
            Want(span, lambda target=target: memoryview(target))  # type: ignore[misc]
            for span, target in zip(wanted, targets, strict=True)
        ]
        with ExitStack() as until, threads_of(count) as threads:
            source = source_at(peer, until)
            read(source, wants, threads)
            connections = len(source._connections)
        assert targets == [whole[span.at : span.end] for span in wanted]
        travelled = sum(sent) - connections * first_words
        least = sum(min(BLOCK, MANY - block * BLOCK) for block in touched(wanted))
        assert least <= travelled
        assert travelled == least or overlapping(wanted)

    with between(there.peer, meddle) as peer:
        check()


def touched(wanted: list[ByteSpan]) -> set[int]:
    return {
        block for span in wanted for block in range(span.at // BLOCK, (span.end - 1) // BLOCK + 1)
    }


def overlapping(wanted: list[ByteSpan]) -> bool:
    """Then some blocks are read again, as from a file."""
    ordered = sorted(wanted, key=lambda span: span.at)
    return any(one.end > other.at for one, other in pairwise(ordered))


# ---- a state ----


class Keeper:
    """A peer with the images of real ranks."""

    def __init__(self, directory: Path, new_node: NewNode) -> None:
        self._node = new_node()
        self._node.server._store = Images(directory)
        self.peer = self._node.peer


@pytest.mark.parametrize("count", [0, 3])
def test_a_state_is_restored_from_a_peers_image(
    shm: Path, new_node: NewNode, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    small_blocks(monkeypatch, 64 << 10)
    keeper = Keeper(shm, new_node)
    want = {
        "large": torch.randn(70_001),
        "small": {f"t{n}": torch.randn(n) for n in range(50)},
        "plain": [1, "two", 3.5],
    }
    Rank(shm).save(want)
    got: dict[str, Any] = dict.fromkeys(want)
    with ExitStack() as until, threads_of(count) as threads:
        stored = open_peers(keeper.peer, TOKEN, None, image_of(1), until)
        restore.load(got, [stored], 0, threads)
    check_same(got, want)


# ---- bytes that are not what they should be ----


@pytest.mark.usefixtures("small")
def test_a_block_that_changed_on_the_peer_is_refused_and_no_other(there: Node) -> None:
    held = there.store.put(an_image(), MANY)
    with ExitStack() as until:
        source = source_at(there.peer, until)
        os.pwrite(held.fd, b"the next step", BODY_AT + 2 * BLOCK + 77)
        for _ in range(2):
            with pytest.raises(Unusable, match=r"block 2 of 38 is not what its digest says"):
                read_span(source, 0, 4 * BLOCK)
            assert read_span(source, 3 * BLOCK, 5 * BLOCK) == body(held)[3 * BLOCK : 8 * BLOCK]


@pytest.mark.usefixtures("small")
def test_a_byte_that_flips_on_its_way_is_found(there: Node) -> None:
    there.store.put(an_image(), MANY)

    def meddle(index: int, up: bool, before: int, data: bytes) -> bytes:
        return flip(data, 20 * BLOCK - before) if not up else data

    with between(there.peer, meddle) as peer, ExitStack() as until:
        source = source_at(peer, until)
        with pytest.raises(Unusable, match="digest"):
            read_span(source, 0, MANY)


@pytest.mark.usefixtures("small")
def test_an_image_that_became_shorter_is_an_error_and_no_hang(there: Node) -> None:
    held = there.store.put(an_image(), MANY)
    with ExitStack() as until:
        source = source_at(there.peer, until)
        os.ftruncate(held.fd, BODY_AT + 3 * BLOCK)
        with pytest.raises(WireError, match="the peer closed it"):
            read_span(source, 0, MANY)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("gone", [True, False])
def test_an_image_that_is_another_by_the_time_a_thread_connects_is_not_read(
    there: Node, gone: bool
) -> None:
    there.store.put(an_image(), MANY)
    with ExitStack() as until, ThreadPoolExecutor(1) as thread:
        source = source_at(there.peer, until)
        held = there.store.images.pop(an_image())
        os.close(held.fd)
        if not gone:
            there.store.put(an_image(), MANY + BLOCK)
        with pytest.raises(NotThere if gone else Unusable, match=r"not have|changed while"):
            thread.submit(read_span, source, 0, MANY).result()


@pytest.mark.usefixtures("small")
def test_an_image_that_made_place_for_a_newer_one_is_refused_however_late(
    shm: Path, new_node: NewNode
) -> None:
    """Ranks go on with their saves; nobody keeps them from that while another reads."""
    keeper, rank = Keeper(shm, new_node), Rank(shm)
    rank.save({"a": torch.randn(9000)}, step=1)
    with ExitStack() as until:
        stored = open_peers(keeper.peer, TOKEN, None, image_of(1), until)
        for step in (2, 3):
            rank.save({"a": torch.randn(9000)}, step=step)
        with pytest.raises(Unusable):
            restore.load({"a": None}, [stored], 0)
    with ExitStack() as until, pytest.raises(NotThere):
        open_peers(keeper.peer, TOKEN, None, image_of(1), until)


# ---- peers that stop ----


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("count", [0, 3])
def test_a_peer_that_dies_in_the_middle_is_an_error(there: Node, count: int) -> None:
    there.store.put(an_image(), MANY)

    def meddle(index: int, up: bool, before: int, data: bytes) -> bytes:
        if not up and before > 3 * BLOCK:
            raise ConnectionAbortedError
        return data

    with between(there.peer, meddle) as peer, ExitStack() as until, threads_of(count) as threads:
        source = source_at(peer, until)
        with pytest.raises(WireError, match=r"closed|broke"):
            read_span(source, 0, MANY, threads)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("count", [0, 3])
def test_a_peer_that_stalls_in_the_middle_is_given_up(there: Node, count: int) -> None:
    there.store.put(an_image(), MANY)
    moving_again = threading.Event()

    def meddle(index: int, up: bool, before: int, data: bytes) -> bytes:
        if not up and before > 3 * BLOCK:
            moving_again.wait(10)
        return data

    with between(there.peer, meddle) as peer, ExitStack() as until:
        until.callback(moving_again.set)
        with threads_of(count) as threads:
            source = source_at(peer, until, stall_s=0.2)
            with pytest.raises(WireError, match="no progress"):
                read_span(source, 0, MANY, threads)


@pytest.mark.usefixtures("small")
def test_a_peer_that_is_gone_before_the_next_block_is_an_error(there: Node) -> None:
    held = there.store.put(an_image(), MANY)
    with ExitStack() as until:
        source = source_at(there.peer, until)
        assert read_span(source, 0, BLOCK) == body(held)[:BLOCK]
        there.server.close()
        for _ in range(2):
            with pytest.raises(WireError):
                read_span(source, BLOCK, BLOCK)
        with ThreadPoolExecutor(1) as thread, pytest.raises(WireError, match="cannot be reached"):
            thread.submit(read_span, source, 0, BLOCK).result()


# ---- who may read ----


@pytest.mark.parametrize(
    ("token", "step", "error"), [("wrong", 7, WireError), ("", 7, WireError), (TOKEN, 8, NotThere)]
)
def test_who_gets_no_image_leaves_no_connection(
    there: Node, dialled: list[Connection], token: str, step: int, error: type[Exception]
) -> None:
    there.store.put(an_image(), 1000)
    with pytest.raises(error):
        PeerSource(there.peer, token, None, an_image(step))
    assert [is_open(connection) for connection in dialled] == [False]


@pytest.mark.usefixtures("small")
def test_in_tls_it_is_the_same(new_node: NewNode, certificates: TlsFiles) -> None:
    there = new_node(server_context(certificates))
    held = there.store.put(an_image(), MANY)
    client = client_context(certificates)
    with ThreadPoolExecutor(3) as threads:
        source = PeerSource(there.peer, TOKEN, client, an_image())
        assert read_span(source, 0, MANY, threads) == body(held)
        source.close()
    with pytest.raises(WireError):
        PeerSource(there.peer, TOKEN, None, an_image(), 0.5)


@pytest.mark.parametrize("blocks", [((0, 2), (1, 3)), ((37, 39),), ((3, 3),)])
@pytest.mark.usefixtures("small")
def test_more_blocks_than_there_are_end_the_connection(
    there: Node, blocks: tuple[tuple[int, int], ...]
) -> None:
    there.store.put(an_image(), MANY)
    with connected(there.peer) as connection:
        connection.send(PeerHello(protocol=PROTOCOL, token=TOKEN))
        connection.send(Pull(image=an_image(), blocks=()))
        connection.expect(Sending)
        connection.send(More(blocks=blocks))
        with pytest.raises(WireError, match="the peer closed it"):
            connection.fill(memoryview(bytearray(1)))


# ---- connections ----


@pytest.mark.usefixtures("small")
def test_a_connection_that_was_silent_for_long_is_replaced(
    new_node: NewNode, dialled: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer closes those who say nothing; whoever loads slowly is not cut off by that."""
    clock, there = Clock(monkeypatch), new_node(stall_s=0.1)
    held = there.store.put(an_image(), MANY)
    with ExitStack() as stack:
        source = source_at(there.peer, stack, stall_s=10.0)
        for at in (0, BLOCK):
            clock.now += 4.9
            assert read_span(source, at, BLOCK) == body(held)[at : at + BLOCK]
        assert len(dialled) == 1
        until(lambda: not there.server._peers, "the peer closes it")
        clock.now += 5.1
        assert read_span(source, 0, MANY) == body(held)
        assert len(dialled) == 2


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("gone", [True, False])
def test_an_image_that_is_another_after_a_silence_is_not_read(
    there: Node, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    clock = Clock(monkeypatch)
    there.store.put(an_image(), MANY)
    with ExitStack() as stack:
        source = source_at(there.peer, stack)
        clock.now += 60.0
        held = there.store.images.pop(an_image())
        os.close(held.fd)
        if not gone:
            there.store.put(an_image(), MANY + BLOCK)
        with pytest.raises(NotThere if gone else Unusable):
            read_span(source, 0, MANY)


@pytest.mark.usefixtures("small")
def test_nothing_is_left_of_a_source_that_is_closed(there: Node, dialled: list[Connection]) -> None:
    there.store.put(an_image(), MANY)
    before = set(threading.enumerate())
    with ThreadPoolExecutor(4) as threads:
        source = PeerSource(there.peer, TOKEN, None, an_image())
        read_span(source, 0, MANY, threads)
    assert any(map(is_open, dialled))
    source.close()
    assert not any(map(is_open, dialled))
    until(lambda: set(threading.enumerate()) <= before, "the peer lets them go", 3)
    assert there.store.quiet
