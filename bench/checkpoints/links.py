"""Stand-ins for a rank's agent, so that the engine restores as it does under `holdfast run`.

Only what an agent would say is made up. Which bytes are read, verified and put where is the engine's
own doing, from `Checkpointer.restore` down.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from holdfast.checkpoint import replicas
from holdfast.checkpoint.image import Image
from holdfast.checkpoint.images import Images, key_of
from holdfast.messages.checkpoints import Holder, ImageId, Tier, Tried, Wish
from holdfast.messages.requests import SaveSettled, StateFound
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber

TOKEN = "bench"


class OwnMemory:
    """Keeps what is saved, with its digests, and finds it again in this node's memory."""

    rank, world_size, round = 0, 1, 1

    def __init__(self, images: Path) -> None:
        self.images = images

    def open(self, checkpointer: str, directory: str, keep: bytes) -> None:
        pass

    def saved(self, checkpointer: str, path: Path, state: int, step: int, wish: Wish) -> None:
        image = Image.open(path)
        if image.seal(state) is None:
            raise RuntimeError(f"{path} cannot be sealed")
        image.close()

    def missed(self, checkpointer: str, step: int, reason: str) -> None:
        raise RuntimeError(reason)

    def wait(self, checkpointer: str, step: int, to: Tier, timeout_s: float | None) -> SaveSettled:
        return SaveSettled(outcome="saved")

    def find(self, checkpointer: str, step: int | None, tried: Tried | None) -> StateFound:
        if tried is not None:
            if tried.error:
                raise RuntimeError(tried.error)
            return StateFound(where="loaded")
        return StateFound(
            where="memory",
            step=self._newest().snapshot.step,
            round=RoundNumber(self.round),
            world_size=self.world_size,
            holders=(Holder(Rank(self.rank), NodeId("here"), "127.0.0.1", 0),),
        )

    def _newest(self) -> ImageId:
        return max(Images(self.images, print).ids(), key=lambda id: id.snapshot.step)

    def fetch(self, image: ImageId, holder: Holder) -> Path:
        found = Images(self.images, print).sealed(key_of(image))
        assert found is not None
        return found[0].path

    def booked(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def resumed(self, step: int) -> None:
        pass


class PeersMemory(OwnMemory):
    """Finds everything at a peer, and fetches it from there into memory of its own."""

    def __init__(self, images: Path, port: int, newest: int) -> None:
        super().__init__(images)
        self._peer = replicas.Peer("127.0.0.1", port)
        self._step = StepNumber(newest)
        self._shelf = Images(images, lambda image: None)

    def find(self, checkpointer: str, step: int | None, tried: Tried | None) -> StateFound:
        if tried is not None:
            return super().find(checkpointer, step, tried)
        return StateFound(
            where="memory",
            step=self._step,
            round=RoundNumber(self.round),
            world_size=self.world_size,
            holders=(Holder(Rank(self.rank), NodeId("peer"), self._peer.host, self._peer.port),),
        )

    def fetch(self, image: ImageId, holder: Holder) -> Path:
        held = replicas.pull(self._peer, TOKEN, None, key_of(image), self._shelf)
        try:
            return Path(os.readlink(f"/proc/self/fd/{held.fd}"))
        finally:
            self._shelf.release(held)
