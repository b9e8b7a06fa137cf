"""What a save returns: a way to wait for it, and to see how it went."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Literal, Protocol

from msgspec import Struct

from holdfast.errors import HoldfastError, RequestTimeout
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
    """One save, as all ranks call it."""

    checkpointer: str
    step: int
    attempt: int
    """Of two saves of that step in one round, the later has the higher number."""


class Waiting(Protocol):
    def wait(self, save: SaveId, to: Tier, timeout_s: float | None) -> SaveSettled: ...


class Ticket:
    """One save: a way to wait for it. A script may drop it.

    `step` is the step that was saved; `to` the tier it was meant for, None if it was skipped.
    """

    def __init__(
        self, save: SaveId, to: Tier | None, copied: Future[int], link: Waiting, reason: str = ""
    ) -> None:
        self.step = save.step
        self.to = to
        """Where it was meant to go; None: nowhere, and `reason` says why."""
        self._save = save
        self._copied = copied
        self._link = link
        self._reason = reason
        self._known: dict[Tier, Result] = {}
        """What was heard once stays so; nobody else remembers it for ever."""

    @classmethod
    def skipped(cls, save: SaveId, link: Waiting, reason: str) -> Ticket:
        return cls(save, None, Future(), link, reason)

    @classmethod
    def failed(cls, save: SaveId, to: Tier, link: Waiting, error: Exception) -> Ticket:
        copied: Future[int] = Future()
        copied.set_exception(error)
        return cls(save, to, copied, link)

    def memory(self, timeout_s: float | None = None) -> Result:
        """Wait until all ranks have this snapshot in memory, at most `timeout_s` seconds."""
        return self._wait("memory", timeout_s)

    def storage(self, timeout_s: float | None = None) -> Result:
        """Wait until the checkpoint is durable on storage, at most `timeout_s` seconds."""
        if self.to == "memory":
            return Result("skipped", None, "it was meant for memory")
        return self._wait("storage", timeout_s)

    @property
    def result(self) -> Result:
        """How it stands now, without waiting."""
        wanted: Tier = self.to or "memory"
        for tier in ("storage", "memory") if wanted == "storage" else ("memory",):
            result = self._wait(tier, 0.0)
            if result.outcome != "pending":
                stored = tier == wanted or result.outcome != "saved"
                return result if stored else Result("pending", "memory", "on its way to storage")
        return Result("pending")

    def await_copy(self) -> None:
        """Return when the copy in memory is made, or has failed."""
        self._copied.exception()

    def _wait(self, to: Tier, timeout_s: float | None) -> Result:
        if self.to is None:
            return Result("skipped", None, self._reason)
        if to not in self._known:
            result = self._asked(to, timeout_s)
            if result.outcome == "pending":
                return result
            self._known[to] = result
        return self._known[to]

    def _asked(self, to: Tier, timeout_s: float | None) -> Result:
        try:
            self._copied.result(timeout_s)
            settled = self._link.wait(self._save, to, timeout_s)
        except (RequestTimeout, NotYet):
            return Result("pending")
        except (HoldfastError, OSError) as error:
            return Result("failed", None, str(error))
        return Result(settled.outcome, to if settled.outcome == "saved" else None, settled.reason)
