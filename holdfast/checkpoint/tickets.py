"""Defines the tickets that saves return: each is a future of one save."""

from __future__ import annotations

import concurrent.futures
import threading
from concurrent.futures import Future
from typing import Literal, Protocol

from msgspec import Struct

from holdfast.errors import CheckpointError, HoldfastError, RequestTimeout
from holdfast.messages.checkpoints import Tier
from holdfast.messages.requests import SaveSettled


class Result(Struct, frozen=True):
    """Outcome of a save.

    `outcome` is "saved", "skipped", "failed" or "pending"; `tier` the one it has reached, "memory" or
    "storage"; `reason` says why it was skipped or failed.
    """

    outcome: Literal["saved", "skipped", "failed", "pending"]
    tier: Tier | None = None
    reason: str = ""


class SaveId(Struct, frozen=True):
    """Identity of one save, the same on all ranks."""

    checkpointer: str
    step: int
    attempt: int
    """Grows with each save of that step in one round."""


class SaveWatch(Protocol):
    """Knows what became of a save: `checkpointer.KeeperLink`."""

    def wait(self, save: SaveId, to: Tier, timeout_s: float | None) -> SaveSettled: ...


class CopyProgress(Protocol):
    """A copy that is being made: `slots.Copy`."""

    done: Future[int]

    def settle(self, timeout_s: float | None) -> None:
        """Let the snapshot count, if this is the thread that can tell, once its bytes are copied."""

    def end(self) -> None:
        """Return when the image is not written to any more, by this copy."""


class NoCopy:
    """Stands for the copy of a save that was skipped, or failed before it began."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done: Future[int] = Future()
        if error is not None:
            self.done.set_exception(error)

    def settle(self, timeout_s: float | None) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


class Ticket:
    """A future of one save. A script may drop it.

    `step` is the step that was saved; `to` the tier it was meant for, None if it was skipped. `done`
    and `result` are about that tier, and `result` raises if the save failed. `memory` and `storage`
    wait for one tier, and report a failure as a `Result`.
    """

    def __init__(
        self, save: SaveId, to: Tier | None, copy: CopyProgress, watch: SaveWatch, reason: str = ""
    ) -> None:
        self.step = save.step
        self.to = to
        self._save = save
        self._copy = copy
        self._watch = watch
        self._reason = reason
        self._known: dict[Tier, Result] = {}
        """Results known so far; the coordinator does not remember them for ever."""
        self._lock = threading.Lock()
        self._outcome: Future[Result] | None = None

    @classmethod
    def skipped(cls, save: SaveId, watch: SaveWatch, reason: str) -> Ticket:
        return cls(save, None, NoCopy(), watch, reason)

    @classmethod
    def failed(cls, save: SaveId, to: Tier, watch: SaveWatch, error: Exception) -> Ticket:
        return cls(save, to, NoCopy(error), watch)

    def done(self) -> bool:
        """Return whether the save is settled: saved where it was meant to go, skipped or failed.

        It never waits. The first call begins to watch the save; until an answer came it says no.
        """
        return self._future().done()

    def result(self, timeout: float | None = None) -> Result:
        """Wait until the save is settled, and return `saved` or `skipped` with a reason.

        Raises `CheckpointError` if the save failed, `TimeoutError` after `timeout` seconds.
        """
        try:
            future = self._future()
            self._copy.settle(timeout)
            found = future.result(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"step {self.step} is not saved after {timeout:g} s") from None
        if found.outcome == "failed":
            raise CheckpointError(f"step {self.step} was not saved: {found.reason}")
        return found

    def memory(self, timeout: float | None = None) -> Result:
        """Wait until all ranks have this snapshot in memory, at most `timeout` seconds."""
        return self._wait("memory", timeout)

    def storage(self, timeout: float | None = None) -> Result:
        """Wait until the checkpoint is durable on storage, at most `timeout` seconds."""
        if self.to == "memory":
            return Result("skipped", None, "it was meant for memory")
        return self._wait("storage", timeout)

    def await_copy(self) -> None:
        """Return when the copy in memory is made, or has failed."""
        self._copy.end()

    def _future(self) -> Future[Result]:
        self._copy.settle(0.0)
        with self._lock:
            if self._outcome is None:
                self._outcome = Future()
                tier: Tier = self.to or "memory"
                copied = self._copy.done
                at_hand = self.to is None or tier in self._known
                if at_hand or (copied.done() and copied.exception() is not None):
                    self._outcome.set_result(self._wait(tier, 0.0))
                else:
                    act, outcome = self._wait, self._outcome
                    threading.Thread(
                        target=lambda: outcome.set_result(act(tier, None)),
                        name="ticket",
                        daemon=True,
                    ).start()
            return self._outcome

    def _wait(self, to: Tier, timeout_s: float | None) -> Result:
        if self.to is None:
            return Result("skipped", None, self._reason)
        if to not in self._known:
            result = self._ask(to, timeout_s)
            if result.outcome == "pending":
                return result
            self._known[to] = result
        return self._known[to]

    def _ask(self, to: Tier, timeout_s: float | None) -> Result:
        try:
            self._copy.settle(timeout_s)
            self._copy.done.result(timeout_s)
            settled = self._watch.wait(self._save, to, timeout_s)
        except (RequestTimeout, concurrent.futures.TimeoutError):
            return Result("pending")
        except (HoldfastError, OSError) as error:
            return Result("failed", None, str(error))
        return Result(settled.outcome, to if settled.outcome == "saved" else None, settled.reason)
