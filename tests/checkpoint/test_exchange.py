"""Copies that a keeper fetches, and what it says to a rank that cannot wait for them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from keepers import TOKEN, Node, an_image, between, body, small_blocks, until

from holdfast.checkpoint.keeper.exchange import Exchange
from holdfast.checkpoint.memory.images import Images
from holdfast.checkpoint.replicas.copies import Peer
from holdfast.errors import Cancelled, NotThere, WireError
from holdfast.messages.checkpoints import Holder
from holdfast.messages.units import NodeId, Rank

BLOCK = 4 << 20
"""Large enough that a network can be stopped in the middle of one."""
SIZE = 8 * BLOCK
STREAMS = 4
"""Connections for an image of that size, two blocks each, after one that asks what it is."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, BLOCK)


@pytest.fixture
def exchange(shm: Path, monkeypatch: pytest.MonkeyPatch) -> Exchange:
    """One that only fetches; what it shares would be shared as long as its process lives."""
    monkeypatch.setattr(Exchange, "_share", lambda self: None)
    return Exchange(Images(shm), TOKEN, None)


def at(peer: Peer) -> Holder:
    return Holder(Rank(3), NodeId("there"), peer.host, peer.port)


def is_whole(path: Path | None, there: Node) -> bool:
    if path is None:
        return False
    found = Images(path.parent).sealed(an_image())
    assert found is not None
    image, record, _, digests = found
    held = there.store.images[an_image()]
    return bytes(image.body[: record.size]) == body(held) and digests == held.digests


class Gate:
    """A network that stops after so many bytes of each connection, and then goes on or breaks."""

    def __init__(self, after: float) -> None:
        self.connections: set[int] = set()
        self.stopped: set[int] = set()
        self.broken = False
        self._after = after
        self._opened = threading.Event()

    def meddle(self, index: int, up: bool, before: int, data: bytes) -> bytes:
        self.connections.add(index)
        if not up and before > self._after:
            self.stopped.add(index)
            assert self._opened.wait(10)
            if self.broken:
                raise ConnectionAbortedError
        return data

    def stops_all(self) -> bool:
        return len(self.stopped) == STREAMS

    def open(self) -> None:
        self._opened.set()


def test_a_fetched_image_is_here_and_nothing_is_fetched_again(
    exchange: Exchange, there: Node
) -> None:
    there.store.put(an_image(), SIZE)
    assert exchange.path(an_image()) is None
    exchange.fetch(an_image(), at(there.peer))
    assert is_whole(exchange.path(an_image()), there)
    there.server.close()
    exchange.fetch(an_image(), at(there.peer))


def test_a_copy_that_is_not_half_done_is_given_up_when_a_rank_asks(
    exchange: Exchange, there: Node
) -> None:
    there.store.put(an_image(), SIZE)
    gate = Gate(0.5 * BLOCK)
    with between(there.peer, gate.meddle) as peer, ThreadPoolExecutor(1) as thread:
        fetching = thread.submit(exchange.fetch, an_image(), at(peer))
        until(gate.stops_all, "it is on its way")
        assert exchange.path(an_image()) is None
        with pytest.raises(Cancelled):
            fetching.result(10)
        gate.open()
    assert list(exchange._images.directory.iterdir()) == [], "memory for it is given back"
    exchange.fetch(an_image(), at(there.peer))
    assert is_whole(exchange.path(an_image()), there)


def test_a_copy_that_is_half_done_is_waited_for(exchange: Exchange, there: Node) -> None:
    there.store.put(an_image(), SIZE)
    gate = Gate(1.5 * BLOCK)
    with between(there.peer, gate.meddle) as peer, ThreadPoolExecutor(3) as threads:
        fetching = threads.submit(exchange.fetch, an_image(), at(peer))
        until(lambda: half_done(exchange), "half of it is here")
        asking = [threads.submit(exchange.path, an_image()) for _ in range(2)]
        assert not any(one.done() for one in asking)
        gate.open()
        for one in asking:
            assert is_whole(one.result(10), there)
        fetching.result(10)


def half_done(exchange: Exchange) -> bool:
    transfer, _ = exchange._coming.get(an_image(), (None, None))
    return transfer is not None and transfer.done == 0.5


def test_a_copy_that_was_waited_for_and_never_came_is_not_here(
    exchange: Exchange, there: Node
) -> None:
    there.store.put(an_image(), SIZE)
    gate = Gate(1.5 * BLOCK)
    with between(there.peer, gate.meddle) as peer, ThreadPoolExecutor(2) as threads:
        fetching = threads.submit(exchange.fetch, an_image(), at(peer))
        until(lambda: half_done(exchange), "half of it is here")
        asking = threads.submit(exchange.path, an_image())
        gate.broken = True
        gate.open()
        assert asking.result(10) is None
        with pytest.raises(WireError):
            fetching.result(10)


def test_an_image_that_is_asked_for_twice_at_once_is_pulled_once(
    exchange: Exchange, there: Node
) -> None:
    there.store.put(an_image(), SIZE)
    gate = Gate(0.5 * BLOCK)
    with between(there.peer, gate.meddle) as peer, ThreadPoolExecutor(1) as thread:
        fetching = thread.submit(exchange.fetch, an_image(), at(peer))
        until(gate.stops_all, "it is on its way")
        exchange.fetch(an_image(), at(peer))
        assert not fetching.done()
        gate.open()
        fetching.result(10)
        exchange.fetch(an_image(), at(peer))
    assert gate.connections == set(range(1 + STREAMS))
    assert is_whole(exchange.path(an_image()), there)


def test_a_fetch_that_failed_may_be_tried_again_elsewhere(
    exchange: Exchange, here: Node, there: Node
) -> None:
    there.store.put(an_image(), SIZE)
    here.server.close()
    with pytest.raises(WireError):
        exchange.fetch(an_image(), at(here.peer))
    with pytest.raises(NotThere):
        exchange.fetch(an_image(step=8), at(there.peer))
    assert exchange.path(an_image()) is None
    exchange.fetch(an_image(), at(there.peer))
    assert is_whole(exchange.path(an_image()), there)
