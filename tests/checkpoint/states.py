"""States: made, compared to the last bit, put into images and read back."""

from __future__ import annotations

import math
import os
import signal
import struct
import time
import traceback
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from holdfast.checkpoint.memory.image import Image
from holdfast.checkpoint.memory.slots import Copy, Slots
from holdfast.checkpoint.restore import load as restore
from holdfast.checkpoint.restore import verified_read as reading
from holdfast.checkpoint.restore.sources import open_image
from holdfast.checkpoint.restore.stored import StoredState
from holdfast.checkpoint.state import layout
from holdfast.checkpoint.state import layout as digests
from holdfast.checkpoint.state.capture import Captured, Layout, Position, capture
from holdfast.checkpoint.tickets import SaveId
from holdfast.messages.checkpoints import Holder, ImageId, Missed, SnapshotId, Tier, Tried, Wish
from holdfast.messages.requests import SaveSettled, StateFound
from holdfast.messages.units import NodeId, RoundNumber, StepNumber
from holdfast.messages.units import Rank as RankNumber

CHECKPOINTER = "ckpt"


# ---- the same ----


def bits(tensor: torch.Tensor) -> bytes:
    """What a tensor means, as bytes: lazy conjugation and negation done, in the order of its shape."""
    whole = tensor.detach().resolve_conj().resolve_neg().cpu()
    whole = whole.clone(memory_format=torch.contiguous_format).reshape(-1)
    data: bytes = whole.view(torch.uint8).numpy().tobytes()
    return data


def check_same(got: Any, want: Any, where: str = "state") -> None:
    """Equal, of the same types, to the last bit."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), where
        assert (got.dtype, got.shape) == (want.dtype, want.shape), where
        assert bits(got) == bits(want), where
        return
    assert type(got) is type(want), (where, type(got), type(want))
    if isinstance(want, dict):
        assert list(got) == list(want), where
        assert [type(key) for key in got] == [type(key) for key in want], where
        for key in want:
            check_same(got[key], want[key], f"{where}.{key}")
        if isinstance(want, OrderedDict):
            metadata = getattr(got, "_metadata", None), getattr(want, "_metadata", None)
            assert metadata[0] == metadata[1], where
    elif isinstance(want, list | tuple | deque):
        assert len(got) == len(want), where
        assert getattr(got, "maxlen", None) == getattr(want, "maxlen", None), where
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            check_same(one, other, f"{where}[{index}]")
    elif isinstance(want, float):
        assert struct.pack("d", got) == struct.pack("d", want), where
    elif isinstance(want, complex):
        check_same([got.real, got.imag], [want.real, want.imag], where)
    elif isinstance(want, numpy.ndarray | numpy.generic):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), where
        assert got.tobytes() == want.tobytes(), where
    else:
        assert got == want, where


# ---- through an image ----


class Rank:
    """A rank's slots, without anybody who looks after them."""

    def __init__(self, directory: Path, rank: int = 0, world_size: int = 1) -> None:
        self.directory = directory
        self.warnings: list[str] = []
        self.slots = Slots(directory, CHECKPOINTER, rank, self.warnings.append)
        self.layout: Layout | None = None
        self.rank, self.world_size = rank, world_size

    def capture(
        self, state: Any, step: int = 1, pickling: bool = False, parameters: Any = None
    ) -> Captured:
        position = Position(step, 1, self.rank, self.world_size)
        captured = capture(state, self.layout, position, pickling, parameters or {})
        self.layout = captured.layout
        return captured

    def save(
        self, state: Any, step: int = 1, pickling: bool = False, parameters: Any = None
    ) -> Path:
        """A sealed image of the state."""
        copy = self.copy(self.capture(state, step, pickling, parameters), step)
        seal(copy.path, copy.done.result())
        return copy.path

    def copy(self, captured: Captured, step: int) -> Copy:
        position = Position(step, 1, self.rank, self.world_size)
        return self.slots.start(captured, position, set(), False, lambda path, state: None)


def seal(path: Path, state: int) -> None:
    image = Image.open(path)
    assert image.seal(state) is not None
    image.close()


def image_of(step: int, rank: int = 0, world_size: int = 1) -> ImageId:
    snapshot = SnapshotId(CHECKPOINTER, StepNumber(step), RoundNumber(1))
    return ImageId(snapshot, RankNumber(rank), world_size)


def load(
    state: dict[str, Any], *paths: Path, step: int = 1, rank: int = 0, pickling: bool = False
) -> dict[str, Any]:
    """Make a state what these images hold."""
    with ExitStack() as until:
        stored = [
            open_image(path, image_of(step, other, len(paths)), until)
            for other, path in enumerate(paths)
        ]
        restore.load(state, stored, rank, pickling=pickling)
    return state


def round_trip(directory: Path, state: dict[str, Any], pickling: bool = False) -> dict[str, Any]:
    """What comes out of an image of the state, where nothing was there before."""
    path = Rank(directory).save(state, pickling=pickling)
    return load(dict.fromkeys(state), path, pickling=pickling)


def flip(path: Path, at: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def small_blocks(patch: pytest.MonkeyPatch, size: int = 1 << 10) -> None:
    """Bodies of many blocks without many megabytes."""
    for module in (layout, digests, reading):
        patch.setattr(module, "BLOCK_BYTES", size)


# ---- somebody who looks after images ----


def offer(step: int, *refused: str) -> StateFound:
    """Of what is in memory."""
    holder = Holder(RankNumber(0), NodeId("node"), "", 0)
    return StateFound(
        where="memory",
        step=StepNumber(step),
        round=RoundNumber(1),
        world_size=1,
        holders=(holder,),
        refused=refused,
    )


class FakeLink:
    """A link to somebody who seals each image at once, and remembers the newest one."""

    def __init__(self, directory: Path) -> None:
        self.rank, self.world_size, self.round = 0, 1, 1
        self.images = directory
        self.opened: list[tuple[str, str, bytes]] = []
        self.saves: list[tuple[int, Wish, Path]] = []
        self.missing: list[tuple[int, Missed, str]] = []
        self.settled: dict[tuple[int, Tier], SaveSettled] = {}
        self.offered: list[StateFound] = []
        self.tried: list[Tried] = []
        self.aside: list[str] = []
        self.resumed_at: int | None = None
        self.ended = False

    def open(self, checkpointer: str, directory: str, keep: bytes, copies: list[Copy]) -> None:
        self.opened.append((checkpointer, directory, keep))

    def replaced(self, checkpointer: str, copies: list[Copy]) -> bool:
        return False

    def saved(self, save: SaveId, path: Path, state: int, wish: Wish) -> None:
        seal(path, state)
        self.saves.append((save.step, wish, path))
        self.settled[save.step, "memory"] = SaveSettled(outcome="saved")

    def end(self) -> None:
        self.ended = True

    def missed(self, save: SaveId, outcome: Missed, reason: str) -> None:
        self.missing.append((save.step, outcome, reason))

    def wait(self, save: SaveId, to: Tier, timeout_s: float | None) -> SaveSettled:
        from holdfast.errors import RequestTimeout

        until = time.monotonic() + (20.0 if timeout_s is None else timeout_s)
        while (save.step, to) not in self.settled:
            if time.monotonic() >= until:
                raise RequestTimeout("not yet")
            time.sleep(0.001)
        return self.settled[save.step, to]

    def find(
        self, checkpointer: str, step: int | None, tried: Tried | None, all_ranks: bool
    ) -> StateFound:
        if tried is not None:
            self.tried.append(tried)
            if not tried.error:
                return StateFound(where="loaded")
        refused = tuple(one.error for one in self.tried)
        if self.offered:
            return self.offered.pop(0)
        if tried is None and self.saves:
            return offer(self.saves[-1][0])
        return StateFound(where="nowhere", refused=refused)

    def open_image(
        self, image: ImageId, holders: Sequence[Holder], until: ExitStack
    ) -> StoredState:
        path = next(path for step, _, path in reversed(self.saves) if step == image.snapshot.step)
        return open_image(path, image, until)

    def booked(self, what: str) -> nullcontext[None]:
        self.aside.append(what)
        return nullcontext()

    def resumed(self, step: int) -> None:
        self.resumed_at = step


# ---- processes ----


def forked(act: Callable[[], None]) -> int:
    """The id of a child that does that and ends; what it raises goes to stderr."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            act()
            code = 0
        except BaseException:  # the edge of a process
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


@contextmanager
def child(act: Callable[[], None]) -> Iterator[int]:
    """A child that is gone afterwards, whatever happens."""
    pid = forked(act)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


SPECIAL_FLOATS = [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308]


def counter_of(**counts: int) -> Counter[str]:
    return Counter(counts)
