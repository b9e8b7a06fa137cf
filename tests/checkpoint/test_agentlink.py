"""A checkpointer under `holdfast run`: what its rank says to the agent, and where it reads images."""

from __future__ import annotations

import threading
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from keepers import TOKEN, NewNode, Node
from states import Rank, check_same, flip, image_of

from holdfast.checkpoint.checkpointer import LinkedCheckpointer
from holdfast.checkpoint.memory.image import Image
from holdfast.checkpoint.memory.images import Images
from holdfast.checkpoint.restore import load as restore
from holdfast.checkpoint.state.capture import Position
from holdfast.checkpoint.tickets import SaveId
from holdfast.errors import CheckpointError, NotThere, Unusable, UsageError, WireError
from holdfast.messages.checkpoints import Holder
from holdfast.messages.local import REASON_MOST, FromWorker, ImageMissed, ImageWhole
from holdfast.messages.requests import ImageAt, LocateImage
from holdfast.messages.units import NodeId
from holdfast.messages.units import Rank as RankNumber
from holdfast.wire.tls import TlsFiles, server_context
from holdfast.worker.checkpointer import AgentLink

STATE = {"large": torch.arange(70_000.0), "small": torch.ones(3), "plain": [1, "two"]}


class Worker:
    """A worker's runtime, as far as a checkpointer sees it; the agent answers as it was told to."""

    def __init__(self, images: Path) -> None:
        self.round, self.images, self.renumbered = 1, str(images), False
        self.channel = self.requests = self
        self.copies: dict[str, list[Any]] = {}
        self.hears = True
        self.renumbered = False
        self.said: list[Any] = []
        self.answer = ImageAt(path="")

    def send(self, message: FromWorker) -> bool:
        self.said.append(message)
        return self.hears

    def section(self, name: str) -> nullcontext[None]:
        return nullcontext()

    def ask(self, request: LocateImage, patience_s: float | None) -> ImageAt:
        self.said.append(request)
        return self.answer


@pytest.fixture
def worker(shm: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    return Worker(shm)


def link(worker: Worker) -> AgentLink:
    return AgentLink(worker)  # type: ignore[arg-type]


def holder(node: Node) -> Holder:
    return Holder(RankNumber(0), NodeId("peer"), node.peer.host, node.peer.port)


NOBODY = Holder(RankNumber(0), NodeId("gone"), "127.0.0.1", 1)


def loaded(worker: Worker, *where: Holder) -> dict[str, Any]:
    got: dict[str, Any] = dict.fromkeys(STATE)
    with ExitStack() as until:
        restore.load(got, [link(worker).open_image(image_of(1), where, until)], 0)
    return got


def test_an_image_on_this_node_is_read_as_a_file(worker: Worker, shm: Path) -> None:
    worker.answer = ImageAt(path=str(Rank(shm).save(STATE)))
    check_same(loaded(worker, NOBODY), STATE)
    assert worker.said == [LocateImage(image=image_of(1))]


def test_an_image_that_is_only_at_a_peer_is_read_there(
    worker: Worker, shm: Path, there: Node
) -> None:
    there.server._store = Images(shm)
    Rank(shm).save(STATE)
    worker.answer = ImageAt(path="", token=TOKEN)
    check_same(loaded(worker, holder(there)), STATE)
    assert len(list(shm.glob("*.image"))) == 1, "no copy of it is made here"


def test_what_is_damaged_here_is_read_at_whichever_peer_has_it_whole(
    worker: Worker, shm: Path, there: Node
) -> None:
    for name in ("here", "there"):
        (shm / name).mkdir()
    own, _ = (Rank(shm / name).save(STATE) for name in ("here", "there"))
    there.server._store = Images(shm / "there")
    flip(own, Image.open(own).body_at + 100)
    worker.answer = ImageAt(path=str(own), token=TOKEN)
    check_same(loaded(worker, NOBODY, holder(there)), STATE)
    with pytest.raises(Unusable, match="digest"):
        loaded(worker, NOBODY)


def test_a_peer_is_read_in_tls_where_the_job_has_it(
    worker: Worker, shm: Path, new_node: NewNode, certificates: TlsFiles
) -> None:
    there = new_node(server_context(certificates))
    there.server._store = Images(shm)
    Rank(shm).save(STATE)
    files = (certificates.cert, certificates.key, certificates.ca)
    worker.answer = ImageAt(path="", token=TOKEN, tls=files)
    check_same(loaded(worker, holder(there)), STATE)


def test_an_image_that_cannot_be_had_is_an_error_that_a_restore_understands(
    worker: Worker, there: Node
) -> None:
    worker.answer = ImageAt(path="", token=TOKEN)
    with pytest.raises(NotThere):
        loaded(worker, holder(there))
    with pytest.raises(WireError, match="cannot be reached"):
        loaded(worker, NOBODY)


def test_a_step_without_an_image_is_told_with_a_reason_of_any_length(worker: Worker) -> None:
    link(worker).missed(SaveId("c", 7, 2), "failed", "no " * 1000)
    (message,) = worker.said
    assert message == ImageMissed(
        checkpointer="c",
        step=7,
        outcome="failed",
        reason=("no " * 1000)[:REASON_MOST],
        attempt=2,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FromWorker) == message


def test_an_agent_that_does_not_hear_is_an_error(worker: Worker) -> None:
    worker.hears = False
    with pytest.raises(CheckpointError, match="cannot reach the agent"):
        link(worker).missed(SaveId("c", 7, 2), "failed", "no memory")


@pytest.mark.parametrize(
    ("directory", "match"), [("d", "made for .*/d"), (None, "names .'model'.")]
)
def test_of_two_with_the_same_images_the_one_that_was_made_last_has_them(
    worker: Worker, directory: str | None, match: str
) -> None:
    """Else each would restore what the other has saved."""
    first = LinkedCheckpointer(directory, {"model": torch.zeros(1)}, link=link(worker))
    other = LinkedCheckpointer(None, {"other": torch.zeros(1)}, link=link(worker))
    first.save(1)
    second = LinkedCheckpointer(directory, {"model": torch.ones(1)}, link=link(worker))
    with pytest.raises(UsageError, match=match):
        first.save(2)
    with pytest.raises(UsageError, match=match):
        first.restore()
    second.save(2)
    other.save(2)
    assert [one.step for one in worker.said if isinstance(one, ImageWhole)] == [1, 2, 2]


def test_images_are_taken_over_once_their_last_copy_is_made(worker: Worker, shm: Path) -> None:
    rank, gate = Rank(shm), threading.Event()
    rank.slots._behind.submit(gate.wait, 20)
    captured = rank.capture({"p": torch.ones(3)})
    copy = rank.slots.start(captured, Position(1, 1, 0, 1), {0}, True, lambda path, state: None)
    link(worker).open("c", "", b"", [copy])
    taking = threading.Thread(target=link(worker).open, args=("c", "", b"", []))
    taking.start()
    taking.join(0.05)
    assert taking.is_alive()
    gate.set()
    taking.join()
    assert copy.done.done()
