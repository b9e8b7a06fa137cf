"""Makes checkpointers for scripts: under `holdfast run` the agent's keeper has their images.

Outside of `holdfast run` a script has a keeper of its own (see `holdfast.checkpoint.standalone`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.checkpoint.checkpointer import LinkedCheckpointer, checkpointer_name
from holdfast.checkpoint.memory.slots import Copy
from holdfast.checkpoint.replicas.copies import Peer
from holdfast.checkpoint.restore.sources import open_any, open_image, open_peers
from holdfast.checkpoint.restore.stored import StoredState
from holdfast.checkpoint.standalone.link import ScriptLink
from holdfast.checkpoint.storage import retention
from holdfast.checkpoint.tickets import SaveId
from holdfast.errors import CheckpointError, UsageError
from holdfast.inprocess.zones import current_zones
from holdfast.messages.checkpoints import Holder, ImageId, Missed, Tier, Tried, Wish
from holdfast.messages.local import REASON_MOST, ImageMissed, ImageWhole, OpenCheckpointer
from holdfast.messages.requests import (
    AwaitSave,
    FindState,
    ImageAt,
    LocateImage,
    SaveSettled,
    StateFound,
)
from holdfast.wire.tls import TlsFiles, client_context
from holdfast.worker import runtime
from holdfast.worker.requests import SLACK_S
from holdfast.worker.runtime import Runtime


class AgentLink:
    """Connects a checkpointer with the agent."""

    def __init__(self, worker: Runtime) -> None:
        if worker.renumbered:
            raise UsageError(
                "Checkpointer: snapshots belong to the ranks of a round, and assign= gave them other"
                " numbers or left some in reserve; save with torch, or let `holdfast run --spares` keep"
                " nodes in reserve"
            )
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.round = worker.round
        self.images = Path(worker.images)
        self._worker = worker

    def open(self, checkpointer: str, directory: str, keep: bytes, copies: list[Copy]) -> None:
        for copy in self._worker.copies.get(checkpointer, []):
            copy.end()
        self._worker.copies[checkpointer] = copies
        self._say(OpenCheckpointer(checkpointer=checkpointer, directory=directory, keep=keep))

    def replaced(self, checkpointer: str, copies: list[Copy]) -> bool:
        return self._worker.copies[checkpointer] is not copies

    def saved(self, save: SaveId, path: Path, state: int, wish: Wish) -> None:
        message = ImageWhole(
            checkpointer=save.checkpointer,
            path=str(path),
            state=state,
            step=save.step,
            wish=wish,
            attempt=save.attempt,
        )
        self._say(message)

    def missed(self, save: SaveId, outcome: Missed, reason: str) -> None:
        message = ImageMissed(
            checkpointer=save.checkpointer,
            step=save.step,
            outcome=outcome,
            reason=reason[:REASON_MOST],
            attempt=save.attempt,
        )
        self._say(message)

    def _say(self, message: OpenCheckpointer | ImageWhole | ImageMissed) -> None:
        if not self._worker.channel.send(message):
            raise CheckpointError(
                "this process cannot reach the agent: it is not the worker itself, or has closed"
                " all its files"
            )

    def wait(self, save: SaveId, to: Tier, timeout_s: float | None) -> SaveSettled:
        request = AwaitSave(
            checkpointer=save.checkpointer,
            step=save.step,
            to=to,
            timeout_s=timeout_s,
            attempt=save.attempt,
        )
        patience_s = None if timeout_s is None else timeout_s + SLACK_S
        answer = self._worker.requests.ask(request, patience_s)
        assert isinstance(answer, SaveSettled)
        return answer

    def find(
        self, checkpointer: str, step: int | None, tried: Tried | None, all_ranks: bool
    ) -> StateFound:
        request = FindState(checkpointer=checkpointer, step=step, tried=tried, all_ranks=all_ranks)
        answer = self._worker.requests.ask(request, None)
        assert isinstance(answer, StateFound)
        return answer

    def open_image(
        self, image: ImageId, holders: Sequence[Holder], until: ExitStack
    ) -> StoredState:
        answer = self._worker.requests.ask(LocateImage(image=image), None)
        assert isinstance(answer, ImageAt)
        tls = client_context(TlsFiles.of(answer.tls))
        openers: list[Callable[[], StoredState]] = [
            partial(
                open_peers, Peer(one.address, one.port), answer.token, tls, image=image, until=until
            )
            for one in holders
        ]
        if answer.path:
            openers.insert(0, partial(open_image, Path(answer.path), image, until))
        return open_any(openers)

    @contextmanager
    def booked(self, what: str) -> Iterator[None]:
        """Enclose a save or a restore. A restartable function is not left in the middle of a save."""
        whole = current_zones().atomic() if what == "checkpoint" else nullcontext()
        with whole, self._worker.section(what):
            yield

    def resumed(self, step: int) -> None:
        self._worker.resumed(step)

    def end(self) -> None:
        """Do nothing: the agent's keeper serves all checkpointers."""


class Checkpointer(LinkedCheckpointer):
    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        state: dict[str, Any],
        *,
        memory_every: int | None = None,
        storage_every: int | None = None,
        keep: retention.Keep | None = None,
        overlap: bool = False,
        pickling: bool = False,
    ) -> None:
        worker, name = runtime.current(), checkpointer_name(directory, state)
        super().__init__(
            directory,
            state,
            link=AgentLink(worker) if worker is not None else ScriptLink.of_script(name),
            memory_every=memory_every,
            storage_every=storage_every,
            keep=keep,
            overlap=overlap,
            pickling=pickling,
        )
