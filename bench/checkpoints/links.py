"""Stand-ins for a rank's agent, so that the engine restores as it does under `holdfast run`.

Only what an agent would say is made up. Which bytes are read, verified and put where is the engine's
own doing, from `Checkpointer.restore` down.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from holdfast.checkpoint.memory.image import Image
from holdfast.checkpoint.memory.images import Images
from holdfast.checkpoint.memory.slots import Copy
from holdfast.checkpoint.replicas.copies import Peer
from holdfast.checkpoint.restore.sources import open_image, open_peers
from holdfast.checkpoint.restore.stored import StoredState
from holdfast.checkpoint.tickets import SaveId
from holdfast.messages.checkpoints import Holder, ImageId, Missed, Tier, Tried, Wish
from holdfast.messages.requests import SaveSettled, StateFound
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber

TOKEN = "bench"


class OwnMemory:
    """Keeps what is saved, with its digests, and finds it again in this node's memory."""

    rank, world_size, round = 0, 1, 1

    def __init__(self, images: Path) -> None:
        self.images = images

    def open(self, checkpointer: str, directory: str, keep: bytes, copies: list[Copy]) -> None:
        pass

    def replaced(self, checkpointer: str, copies: list[Copy]) -> bool:
        return False

    def saved(self, save: SaveId, path: Path, state: int, wish: Wish) -> None:
        image = Image.open(path)
        if image.seal(state) is None:
            raise RuntimeError(f"{path} cannot be sealed")
        image.close()

    def missed(self, save: SaveId, outcome: Missed, reason: str) -> None:
        raise RuntimeError(reason)

    def wait(self, save: SaveId, to: Tier, timeout_s: float | None) -> SaveSettled:
        return SaveSettled(outcome="saved")

    def find(
        self, checkpointer: str, step: int | None, tried: Tried | None, all_ranks: bool
    ) -> StateFound:
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
        return max(Images(self.images).ids(), key=lambda id: id.snapshot.step)

    def open_image(
        self, image: ImageId, holders: Sequence[Holder], until: ExitStack
    ) -> StoredState:
        found = Images(self.images).sealed(image)
        assert found is not None
        return open_image(found[0].path, image, until)

    def booked(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def resumed(self, step: int) -> None:
        pass


class PeersMemory(OwnMemory):
    """Finds everything at a peer, and reads it there."""

    def __init__(self, images: Path, port: int, newest: int) -> None:
        super().__init__(images)
        self._holder = Holder(Rank(self.rank), NodeId("peer"), "127.0.0.1", port)
        self._step = StepNumber(newest)

    def find(
        self, checkpointer: str, step: int | None, tried: Tried | None, all_ranks: bool
    ) -> StateFound:
        if tried is not None:
            return super().find(checkpointer, step, tried)
        return StateFound(
            where="memory",
            step=self._step,
            round=RoundNumber(self.round),
            world_size=self.world_size,
            holders=(self._holder,),
        )

    def open_image(
        self, image: ImageId, holders: Sequence[Holder], until: ExitStack
    ) -> StoredState:
        return open_peers(Peer(holders[0].address, holders[0].port), TOKEN, None, image, until)
