"""Copies of images on other nodes: bytes that change, peers that stop, memory that runs out."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from keepers import (
    BODY_AT,
    LARGE,
    QUICK,
    SMALL,
    TOKEN,
    NewNode,
    Node,
    an_image,
    between,
    body,
    flip,
    until,
)

from holdfast.checkpoint.replicas.copies import Peer, TransferLimits, pull, push
from holdfast.checkpoint.replicas.protocol import PROTOCOL, PeerHello, Push, sealed
from holdfast.checkpoint.state.layout import BLOCK_BYTES, ByteSpan
from holdfast.errors import StorageError, Unusable, WireError
from holdfast.wire import framing

# ---- bytes that are not what they should be ----


def test_zeros_under_the_right_step_are_never_taken_for_an_image(
    here: Node, there: Node, new_node: NewNode
) -> None:
    held = here.store.put(an_image(), LARGE)
    os.ftruncate(held.fd, BODY_AT)
    os.ftruncate(held.fd, BODY_AT + LARGE)
    with pytest.raises(Unusable, match="changed while it was sent"):
        push(there.peer, TOKEN, None, held)
    with pytest.raises(Unusable, match="changed while it was sent"):
        pull(here.peer, TOKEN, None, an_image(), there.store)
    assert there.store.images == {}
    assert there.store.dropped == 2


@pytest.mark.parametrize("at", [100, BLOCK_BYTES, BLOCK_BYTES + 99])
def test_a_byte_that_flips_on_the_way_there_is_found(here: Node, there: Node, at: int) -> None:
    held = here.store.put(an_image(), LARGE)

    def meddle(index: int, up: bool, before: int, data: bytes) -> bytes:
        return flip(data, 200 + at - before) if up and index == 1 else data

    with between(there.peer, meddle) as peer, pytest.raises(Unusable, match="changed"):
        push(peer, TOKEN, None, held)
    assert there.store.images == {}


def test_a_byte_that_flips_on_the_way_back_is_found(here: Node, there: Node) -> None:
    there.store.put(an_image(), LARGE)

    def meddle(index: int, up: bool, before: int, data: bytes) -> bytes:
        return flip(data, BLOCK_BYTES - before) if not up and index == 2 else data

    with between(there.peer, meddle) as peer, pytest.raises(Unusable, match="changed"):
        pull(peer, TOKEN, None, an_image(), here.store)
    assert here.store.images == {}


def test_a_byte_that_flips_in_what_is_said_of_an_image_is_found(here: Node, there: Node) -> None:
    held = here.store.put(an_image(), 1000)
    hello = len(framing.encode(PeerHello(protocol=PROTOCOL, token=TOKEN)))
    for at in range(hello, hello + len(framing.encode(Push(outline=sealed(held.outline)))), 3):

        def meddle(index: int, up: bool, before: int, data: bytes, at: int = at) -> bytes:
            return flip(data, at - before) if up and index == 0 else data

        with between(there.peer, meddle) as peer, pytest.raises(WireError):
            push(peer, TOKEN, None, held, QUICK)
    assert there.store.images == {}


def test_an_image_that_is_overwritten_meanwhile_is_refused(here: Node, there: Node) -> None:
    held = here.store.put(an_image(), LARGE)

    def meddle(index: int, up: bool, before: int, data: bytes) -> bytes:
        if up and index == 1 and before == 0:
            os.pwrite(held.fd, b"the next step", BODY_AT + 3 * BLOCK_BYTES)
        return data

    with between(there.peer, meddle) as peer, pytest.raises(Unusable, match="changed while"):
        push(peer, TOKEN, None, held, TransferLimits(streams=1))
    assert there.store.images == {}


def test_an_image_that_becomes_shorter_meanwhile_is_refused(here: Node, there: Node) -> None:
    held = here.store.put(an_image(), LARGE)
    os.ftruncate(held.fd, BODY_AT + 3 * BLOCK_BYTES)
    with pytest.raises(Unusable, match="shorter"):
        push(there.peer, TOKEN, None, held)
    with pytest.raises(WireError, match="the peer closed it"):
        pull(here.peer, TOKEN, None, an_image(), there.store)
    assert there.store.images == {}


def test_an_image_that_is_replaced_between_two_questions_is_refused(
    here: Node, there: Node
) -> None:
    there.store.put(an_image(), LARGE)

    def meddle(index: int, up: bool, before: int, data: bytes) -> bytes:
        if up and index == 1 and before == 0:
            there.store.images[an_image()].contents = ByteSpan(0, 100)
        return data

    with between(there.peer, meddle) as peer, pytest.raises(Unusable, match="changed"):
        pull(peer, TOKEN, None, an_image(), here.store)
    assert here.store.images == {}


# ---- peers that stop ----


@pytest.mark.parametrize("streams", [1, 2])
def test_a_stream_that_is_cut_short_leaves_nothing(here: Node, there: Node, streams: int) -> None:
    held = here.store.put(an_image(), LARGE)

    def meddle(index: int, up: bool, before: int, data: bytes) -> bytes:
        if index == 1 and before > BLOCK_BYTES:
            raise ConnectionAbortedError
        return data

    with between(there.peer, meddle) as peer, pytest.raises(WireError):
        push(peer, TOKEN, None, held, TransferLimits(streams=streams))
    until(lambda: there.store.dropped == 1, "the place is dropped")
    there.store.put(an_image(step=8), LARGE)
    with between(there.peer, meddle) as peer, pytest.raises(WireError):
        pull(
            peer, TOKEN, None, an_image(step=8), here.store, limits=TransferLimits(streams=streams)
        )
    assert an_image(step=8) not in here.store.images


def test_a_peer_with_which_nothing_moves_is_given_up_on_both_sides(
    here: Node, new_node: NewNode
) -> None:
    there = new_node(stall_s=0.5)
    held = here.store.put(an_image(), LARGE)
    moving_again, one_stream = threading.Event(), TransferLimits(stall_s=0.5, streams=1)

    def meddle(index: int, up: bool, before: int, data: bytes) -> bytes:
        if before > 2 * BLOCK_BYTES:
            moving_again.wait(60)
        return data

    with between(there.peer, meddle) as peer:
        began = time.monotonic()
        with pytest.raises(WireError, match=r"no progress|closed|broke"):
            push(peer, TOKEN, None, held, one_stream)
        until(lambda: there.store.dropped == 1, "the place is dropped")
        there.store.put(an_image(step=8), LARGE)
        with pytest.raises(WireError, match="no progress"):
            pull(peer, TOKEN, None, an_image(step=8), here.store, limits=one_stream)
        assert time.monotonic() - began < 30
        moving_again.set()


def test_a_peer_that_listens_and_says_nothing_is_given_up(here: Node) -> None:
    held = here.store.put(an_image(), 1000)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(WireError, match="no progress"):
            push(Peer(*silent.getsockname()), TOKEN, None, held, QUICK)
        closed = Peer(*silent.getsockname())
    with pytest.raises(WireError, match="cannot be reached"):
        push(closed, TOKEN, None, held, QUICK)


PUSHING = """
import os, sys
from holdfast.checkpoint.state.layout import ByteSpan
from holdfast.checkpoint.replicas.copies import Connection, Peer, push
from holdfast.checkpoint.memory.images import Held
from holdfast.messages.checkpoints import ImageId, SnapshotId
whole = Connection.send_part
def half(self, held, at, end):
    whole(self, held, at, (at + end) // 2)
    print("half of it is there", flush=True)
    sys.stdin.read()
Connection.send_part = half
path, port, token, size, digests = sys.argv[1:]
held = Held(ImageId(SnapshotId("main", 7, 2), 3, 8), os.open(path, os.O_RDONLY), 8192, int(size),
            bytes.fromhex(digests), ByteSpan(int(size) - 100, 100))
push(Peer("127.0.0.1", int(port)), token, None, held)
"""


@pytest.mark.parametrize(("blow", "stall_s"), [(signal.SIGKILL, 60.0), (signal.SIGSTOP, 0.5)])
def test_a_sender_that_dies_or_stops_in_the_middle_leaves_nothing(
    here: Node, new_node: NewNode, blow: signal.Signals, stall_s: float
) -> None:
    there = new_node(stall_s=stall_s)
    held = here.store.put(an_image(), LARGE)
    path = os.readlink(f"/proc/self/fd/{held.fd}")
    words = [path, str(there.peer.port), TOKEN, str(LARGE), held.digests.hex()]
    pipe = subprocess.PIPE
    sender = subprocess.Popen([sys.executable, "-c", PUSHING, *words], stdin=pipe, stdout=pipe)
    try:
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"half of it is there\n"
        sender.send_signal(blow)
        until(lambda: there.store.dropped == 1, "the place is dropped", 10)
    finally:
        sender.kill()
        sender.communicate()
    push(there.peer, TOKEN, None, held)
    assert body(there.store.images[an_image()]) == body(held)


# ---- no room ----


def test_a_peer_without_room_says_so(here: Node, there: Node) -> None:
    held = here.store.put(an_image())
    there.store.trouble = StorageError("no 5 GB of shared memory")
    with pytest.raises(StorageError, match="no 5 GB"):
        push(there.peer, TOKEN, None, held)
    there.store.trouble = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StorageError, match="No space left"):
        push(there.peer, TOKEN, None, held)
    with pytest.raises(StorageError, match="No space left"):
        pull(here.peer, TOKEN, None, an_image(), there.store)


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={2 * BLOCK_BYTES}", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_memory_that_runs_out_is_survived(here: Node, there: Node, small_memory: Path) -> None:
    there.store.folder = small_memory
    large, small = here.store.put(an_image(step=7), LARGE), here.store.put(an_image(step=8), SMALL)
    with pytest.raises(StorageError, match="No space left"):
        push(there.peer, TOKEN, None, large)
    for name in os.listdir(small_memory):
        os.unlink(small_memory / name)
    push(there.peer, TOKEN, None, small)
    assert body(there.store.images[small.id]) == body(small)
