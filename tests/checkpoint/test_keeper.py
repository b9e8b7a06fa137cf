"""A keeper carries out orders, one by one, whatever becomes of each of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from states import CHECKPOINTER, Rank, check_same, image_of, load

from holdfast.checkpoint.memory.image import Image
from holdfast.checkpoint.memory.images import Images
from holdfast.checkpoint.storage.commit import verify
from holdfast.checkpoint.storage.manifest import refuse
from holdfast.checkpoint.storage.posix import PosixStorage
from holdfast.messages.actions import CommitCheckpoint, WriteRankFiles
from holdfast.messages.checkpoints import Holder, ImageId, SnapshotId, StoredFile, StoredStep
from holdfast.messages.events import ImagesHeld, SnapshotMissed, SnapshotsSealed
from holdfast.messages.keeper import (
    BeginRound,
    FetchImage,
    FindStored,
    FromKeeper,
    KeeperAction,
    KeeperOrder,
    KeeperReply,
    KeeperTerms,
    SealImage,
)
from holdfast.messages.local import PACKET_BYTES, OpenCheckpointer, Piece
from holdfast.messages.requests import MAX_MESSAGE_BYTES, ImageAt, LocateImage
from holdfast.messages.units import NodeId
from holdfast.wire.packets import Joiner, packets_of

PATIENCE_S = 30.0
"""For what comes in milliseconds, where the machine is not busy."""

PATCHED = """
import os, sys, time
from holdfast.checkpoint.keeper import __main__, files, orders, progress
from holdfast.checkpoint.storage import posix as disk
progress.STALLED_S, orders.CHECK_EVERY_S = {stalled_s}, 0.05
gate = {gate!r}
def held(what):
    try:
        while open(gate).read() in what:
            time.sleep(0.005)
    except FileNotFoundError:
        pass
def hold(kind, name):
    real = getattr(kind, name)
    def call(*args):
        held(name)
        return real(*args)
    setattr(kind, name, call)
hold(disk.Disk, "write")
hold(files, "open_storage")
hold(files, "steps")
__main__.main()
"""
"""A keeper whose storage hangs in the call whose name a file has in it."""


class KeeperProcess:
    def __init__(self, images: Path, stalled_s: float = 120.0) -> None:
        self.gate = images / "gate"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener = socket.create_server(("127.0.0.1", 0))
        self.as_holder = Holder(0, "node", *listener.getsockname())  # type: ignore[arg-type]
        script = PATCHED.format(stalled_s=stalled_s, gate=str(self.gate))
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, str(theirs.fileno())],
            pass_fds=(theirs.fileno(), listener.fileno()),
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        theirs.close()
        ours.settimeout(PATIENCE_S)
        self.control = ours
        self._next = 1
        self._joiner = Joiner()
        self._answers: dict[int, KeeperReply] = {}
        self._received: list[ImageId] = []
        fd = listener.fileno()
        terms = KeeperTerms(node=NODE, images=str(images), token="token", job="job", listener_fd=fd)
        ours.send(msgspec.msgpack.encode(terms))
        listener.close()

    def hang(self, what: str) -> None:
        self.gate.write_text(what)

    def go_on(self) -> None:
        self.gate.unlink()

    def give(self, action: KeeperAction) -> int:
        number, self._next = self._next, self._next + 1
        for packet in packets_of(KeeperOrder(number, action)):
            self.control.send(packet)
        return number

    def answer(self, number: int) -> KeeperReply:
        while number not in self._answers:
            self._hear()
        return self._answers[number]

    def event(self, number: int) -> Any:
        """The event of an order that was carried out."""
        reply = self.answer(number)
        assert (reply.error, reply.event is not None) == ("", True)
        return reply.event

    def received(self) -> ImageId:
        """The copy that it tells of next."""
        while not self._received:
            self._hear()
        return self._received.pop(0)

    def _hear(self) -> None:
        message: Any = msgspec.msgpack.decode(self.control.recv(PACKET_BYTES), type=FromKeeper)
        if isinstance(message, Piece):
            whole = self._joiner.add(message)
            if whole is None:
                return
            message = msgspec.msgpack.decode(whole, type=FromKeeper)
        if isinstance(message.event, ImagesHeld):
            self._received += message.event.images
        elif message.number:
            assert message.number not in self._answers, "answered twice"
            self._answers[message.number] = message

    def ask(self, action: KeeperAction) -> KeeperReply:
        return self.answer(self.give(action))

    def do(self, action: KeeperAction) -> Any:
        return self.event(self.give(action))

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


@contextmanager
def keeping(images: Path, stalled_s: float = 120.0) -> Iterator[KeeperProcess]:
    keeper = KeeperProcess(images, stalled_s)
    try:
        yield keeper
    finally:
        keeper.close()


@pytest.fixture
def keeper(shm: Path) -> Iterator[KeeperProcess]:
    with keeping(shm) as keeper:
        yield keeper


# ---- orders ----


NODE = NodeId("node")


def opening(directory: Path | str) -> OpenCheckpointer:
    return OpenCheckpointer(checkpointer=CHECKPOINTER, directory=str(directory), keep=b"")


def snapshot(step: int) -> SnapshotId:
    return SnapshotId(CHECKPOINTER, step, 1)  # type: ignore[arg-type]


def writing(step: int) -> WriteRankFiles:
    ranks = (0,)
    return WriteRankFiles(node=NODE, snapshot=snapshot(step), ranks=ranks, world_size=1, alike=True)  # type: ignore[arg-type]


def committing(step: int, shards: tuple[StoredFile, ...]) -> CommitCheckpoint:
    return CommitCheckpoint(node=NODE, snapshot=snapshot(step), world_size=1, shards=shards)


def sealing(path: Path, state: int, step: int) -> SealImage:
    return SealImage(node=NODE, image=image_of(step), path=str(path), state=state, wish="now")


LOOK = FindStored(node=NODE, round=1, checkpointer=CHECKPOINTER)  # type: ignore[arg-type]
WHERE = LocateImage(image=image_of(0))
"""Answered at once, and changes nothing."""


def state_of(step: int) -> dict[str, Any]:
    return {"a": torch.full((3000,), float(step)), "step": step}


def saved(rank: Rank, step: int) -> tuple[Path, int]:
    """An image that is whole and not yet sealed: its path and state."""
    copy = rank.copy(rank.capture(state_of(step), step), step)
    return copy.path, copy.done.result()


def seal(keeper: KeeperProcess, rank: Rank, step: int) -> None:
    path, state = saved(rank, step)
    assert isinstance(keeper.do(sealing(path, state, step)), SnapshotsSealed)


def store(keeper: KeeperProcess, step: int) -> None:
    done = keeper.do(writing(step))
    assert done.error == ""
    assert keeper.do(committing(step, done.shards)).error == ""


def until_pinned(keeper: KeeperProcess, images: Path) -> Image:
    """The image that the keeper has begun to read."""
    candidates = [Image.open(path) for path in images.glob("*.image")]
    while True:
        assert keeper.process.poll() is None
        for image in candidates:
            if image.pinned:
                return image


# ---- what it does ----


def test_an_image_that_is_sealed_verifies(shm: Path, keeper: KeeperProcess) -> None:
    path, state = saved(Rank(shm), 5)
    event = keeper.do(sealing(path, state, 5))
    assert (event.node, event.snapshot, event.world_size) == (NODE, snapshot(5), 1)
    assert [one.rank for one in event.ranks] == [0]
    assert Image.open(path).digests() is not None
    assert Images(shm).ids() == [image_of(5)]


def test_a_seal_that_comes_too_late_is_no_error_and_one_of_nothing_is(
    shm: Path, keeper: KeeperProcess
) -> None:
    path, state = saved(Rank(shm), 5)
    assert Image.open(path).begin()
    missed = keeper.do(sealing(path, state, 5))
    assert isinstance(missed, SnapshotMissed)
    assert (missed.snapshot, missed.rank, missed.outcome) == (snapshot(5), 0, "skipped")
    assert "No such file" in keeper.ask(sealing(shm / "no", 2, 5)).error


def test_a_snapshot_becomes_a_checkpoint_that_verifies(
    shm: Path, tmp_path: Path, keeper: KeeperProcess
) -> None:
    assert keeper.ask(opening(tmp_path)).error == ""
    assert keeper.do(LOOK).steps == ()
    rank = Rank(shm)
    for step in (5, 6):
        seal(keeper, rank, step)
        store(keeper, step)
        assert verify(PosixStorage(tmp_path), step) == []
    assert keeper.do(LOOK).steps == tuple(StoredStep(step, 1, 1) for step in (6, 5))  # type: ignore[arg-type]


def test_what_is_written_stays_in_memory_while_it_is(
    shm: Path, tmp_path: Path, keeper: KeeperProcess
) -> None:
    rank = Rank(shm)
    keeper.ask(opening(tmp_path))
    for step in (5, 6):
        seal(keeper, rank, step)
    keeper.hang("write")
    number = keeper.give(writing(6))
    until_pinned(keeper, shm)
    for step in range(7, 12):
        saved(rank, step)  # Not one of them waits, or is skipped.
    keeper.go_on()
    done = keeper.event(number)
    assert keeper.do(committing(6, done.shards)).error == ""
    assert verify(PosixStorage(tmp_path), 6) == []


def test_what_made_place_for_a_newer_one_is_gone(
    shm: Path, tmp_path: Path, keeper: KeeperProcess
) -> None:
    keeper.ask(opening(tmp_path))
    rank = Rank(shm)
    for step in (5, 6, 7):
        seal(keeper, rank, step)
    done = keeper.do(writing(5))
    assert done.gone
    assert "made place for a newer one" in done.error


def test_an_order_may_be_given_again_to_another_keeper(shm: Path, tmp_path: Path) -> None:
    rank = Rank(shm)
    with keeping(shm) as keeper:
        keeper.ask(opening(tmp_path))
        seal(keeper, rank, 5)
        keeper.hang("write")
        keeper.give(writing(5))
        keeper.process.kill()
        keeper.go_on()
    with keeping(shm) as another:
        another.ask(opening(tmp_path))
        store(another, 5)
        seal(another, rank, 6)
    assert verify(PosixStorage(tmp_path), 5) == []


def test_what_a_dead_keeper_held_is_let_go_by_the_next(shm: Path, tmp_path: Path) -> None:
    rank = Rank(shm)
    with keeping(shm) as keeper:
        keeper.ask(opening(tmp_path))
        seal(keeper, rank, 5)
        keeper.hang("write")
        keeper.give(writing(5))
        image = until_pinned(keeper, shm)
        keeper.process.kill()
        keeper.process.wait()
        keeper.go_on()
    assert image.pinned
    with keeping(shm) as another:
        another.ask(WHERE)
        assert not image.pinned


# ---- what it does not know ----


def test_what_is_no_order_is_survived(shm: Path, keeper: KeeperProcess) -> None:
    for packet in (b"\xc1", b"garbage", msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode({})):
        keeper.control.send(packet)
    pieces = [Piece(index=0, of=2, data=b"gar"), Piece(index=1, of=2, data=b"bage")]
    for piece in pieces:
        keeper.control.send(msgspec.msgpack.encode(piece))
    assert keeper.ask(WHERE).error == ""


def test_an_order_of_a_newer_agent_is_answered(keeper: KeeperProcess) -> None:
    def send(number: int, **action: Any) -> None:
        order = {"type": "KeeperOrder", "number": number, "action": action}
        keeper.control.send(msgspec.msgpack.encode(order))

    send(77, type="Polish", how="well")
    assert "does not know such an order" in keeper.answer(77).error
    send(78, type="SealImage", path=3)
    assert keeper.answer(78).error


def test_an_order_may_list_every_rank_of_a_large_world(
    tmp_path: Path, keeper: KeeperProcess
) -> None:
    keeper.ask(opening(tmp_path))
    many = tuple(StoredFile(n, "x" * 30, 1, "y" * 32, "z" * 32) for n in range(20_000))  # type: ignore[arg-type]
    order = committing(5, many)
    assert len(msgspec.msgpack.encode(order)) > 2 * MAX_MESSAGE_BYTES
    assert keeper.ask(order).error


def test_a_checkpointer_that_was_never_opened_is_an_error(keeper: KeeperProcess) -> None:
    for order in (LOOK, writing(5), committing(5, ())):
        assert "never opened" in keeper.ask(order).error


def test_a_checkpointer_without_storage_has_nothing_there(keeper: KeeperProcess) -> None:
    keeper.ask(opening(""))
    assert keeper.do(LOOK).steps == ()
    assert "has no storage" in keeper.ask(writing(5)).error


def test_an_image_that_cannot_be_had_is_an_error(keeper: KeeperProcess) -> None:
    nobody = Holder(3, "node", "127.0.0.1", 1)  # type: ignore[arg-type]
    assert "cannot be reached" in keeper.ask(FetchImage(image=image_of(5), holder=nobody)).error


def test_it_says_where_an_image_is_and_nothing_of_one_that_it_does_not_have(
    shm: Path, keeper: KeeperProcess
) -> None:
    path, state = saved(Rank(shm), 5)
    nowhere = ImageAt(path="", token="token")
    assert keeper.do(LocateImage(image=image_of(5))) == nowhere, "it is not sealed"
    keeper.do(sealing(path, state, 5))
    assert keeper.do(LocateImage(image=image_of(5))) == ImageAt(path=str(path), token="token")
    for other in (image_of(6), image_of(5, rank=1, world_size=2)):
        assert keeper.do(LocateImage(image=other)) == nowhere


def test_a_sealed_image_is_copied_to_another_node_and_fetched_from_there(shm: Path) -> None:
    folders = [shm / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    with keeping(folders[0]) as own, keeping(folders[1]) as peers, keeping(folders[2]) as new:
        own.ask(BeginRound(ranks=(0,), copies=(peers.as_holder,)))  # type: ignore[arg-type]
        seal(own, Rank(folders[0]), 5)
        assert peers.received() == image_of(5)
        fetch = FetchImage(image=image_of(5), holder=peers.as_holder)
        assert new.ask(fetch) == KeeperReply(new._next - 1)
        assert new.received() == image_of(5)
        path = Path(new.do(LocateImage(image=image_of(5))).path)
    assert path.parent == folders[2]
    check_same(load(dict.fromkeys(state_of(5)), path, step=5), state_of(5))


# ---- what was refused before ----


def test_what_was_refused_is_told_if_it_is_newer_than_all_that_is_complete(
    shm: Path, tmp_path: Path, keeper: KeeperProcess
) -> None:
    """To go back behind it is nothing to be silent about."""
    keeper.ask(opening(tmp_path))
    rank = Rank(shm)
    for step in (5, 6, 7, 8):
        seal(keeper, rank, step)
        store(keeper, step)

    def looked() -> tuple[list[int], list[str]]:
        answer = keeper.do(LOOK)
        return [one.step for one in answer.steps], [why.split(":")[0] for why in answer.refused]

    assert looked() == ([8, 7, 6, 5], [])
    refuse(PosixStorage(tmp_path), 6)
    assert looked() == ([8, 7, 5], []), "what is older than the newest is history"
    for step in (7, 8):
        refuse(PosixStorage(tmp_path), step)
    assert looked() == ([5], ["step 8 from storage", "step 7 from storage", "step 6 from storage"])
    refuse(PosixStorage(tmp_path), 5)
    assert looked()[0] == []
    assert len(looked()[1]) == 4


# ---- storage that hangs ----


def test_what_is_ordered_after_an_opening_waits_for_it(
    shm: Path, tmp_path: Path, keeper: KeeperProcess
) -> None:
    """A restore right after the start must not find nothing, and training start over."""
    keeper.ask(opening(tmp_path))
    seal(keeper, Rank(shm), 5)
    store(keeper, 5)
    keeper.hang("open_storage")
    numbers = [keeper.give(opening(tmp_path)), keeper.give(LOOK)]
    keeper.ask(WHERE)
    keeper.go_on()
    assert [one.step for one in keeper.event(numbers[1]).steps] == [5]


def test_storage_that_cannot_be_opened_is_not_taken_for_empty(
    tmp_path: Path, keeper: KeeperProcess
) -> None:
    assert keeper.ask(opening("no-such-thing://bucket")).error
    assert keeper.ask(LOOK).error


def test_storage_that_hangs_is_told_and_everything_else_goes_on(shm: Path, tmp_path: Path) -> None:
    rank = Rank(shm)
    with keeping(shm, stalled_s=0.3) as keeper:
        keeper.ask(opening(tmp_path))
        seal(keeper, rank, 5)
        keeper.hang("write")
        number = keeper.give(writing(5))
        seal(keeper, rank, 6)
        assert len(Images(shm).ids()) == 2
        assert "storage hangs" in keeper.answer(number).error
        keeper.go_on()
        # What hung comes back too late, and is not answered twice; the next one is written.
        seal(keeper, rank, 7)
        store(keeper, 7)


@pytest.mark.parametrize(
    ("call", "action"), [("steps", LOOK), ("open_storage", opening("x")), ("write", None)]
)
def test_every_order_that_storage_can_hold_up_is_given_up(
    shm: Path, tmp_path: Path, call: str, action: KeeperAction | None
) -> None:
    with keeping(shm, stalled_s=0.3) as keeper:
        keeper.ask(opening(tmp_path))
        if action is None:
            seal(keeper, Rank(shm), 5)
            action = committing(5, keeper.do(writing(5)).shards)
        keeper.hang(call)
        assert "storage hangs: nothing moved for" in keeper.ask(action).error


def test_any_number_of_orders_may_hang(shm: Path, tmp_path: Path) -> None:
    with keeping(shm) as keeper:
        keeper.ask(opening(tmp_path))
        keeper.hang("steps")
        numbers = [keeper.give(LOOK) for _ in range(40)]
        seal(keeper, Rank(shm), 5)
        keeper.go_on()
        assert all(keeper.answer(number).error == "" for number in numbers)


# ---- the process ----


def test_it_never_has_torch_in_it(shm: Path, tmp_path: Path, keeper: KeeperProcess) -> None:
    keeper.ask(opening(tmp_path))
    seal(keeper, Rank(shm), 5)
    store(keeper, 5)
    assert "torch" not in Path(f"/proc/{keeper.process.pid}/maps").read_text()


def test_it_yields_to_training(keeper: KeeperProcess) -> None:
    keeper.ask(WHERE)
    stat = Path(f"/proc/{keeper.process.pid}/stat").read_text()
    assert int(stat.rpartition(")")[2].split()[16]) >= 10
    assert Path(f"/proc/{keeper.process.pid}/comm").read_text() == "holdfast-keeper\n"


def test_it_ends_when_nobody_listens_any_more(shm: Path, tmp_path: Path) -> None:
    """Even with a thread that hangs, and in the middle of answering."""
    with keeping(shm) as keeper:
        keeper.ask(opening(tmp_path))
        keeper.hang("steps")
        keeper.give(LOOK)
        keeper.give(WHERE)
        keeper.control.close()
        assert keeper.process.wait(PATIENCE_S) == 0
        keeper.control = socket.socket()


def test_signals_for_the_job_do_not_end_it(keeper: KeeperProcess) -> None:
    keeper.ask(WHERE)
    for number in (signal.SIGINT, signal.SIGTERM):
        keeper.process.send_signal(number)
    assert keeper.ask(WHERE).error == ""


def test_answers_of_many_orders_at_once_are_all_told(
    shm: Path, tmp_path: Path, keeper: KeeperProcess
) -> None:
    keeper.ask(opening(tmp_path))
    sent: list[int] = []
    sender = threading.Thread(target=lambda: sent.extend(keeper.give(WHERE) for _ in range(200)))
    sender.start()
    sender.join()
    assert all(keeper.answer(number).error == "" for number in sent)
