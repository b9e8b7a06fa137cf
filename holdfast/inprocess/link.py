"""The way from a restartable function to whoever agrees on rounds: the agent, or torchrun's store.

The runtime of a worker installs its link before the script runs. Without one, the link to torchrun
(`holdfast.inprocess.torchrun`) is used. All calls but `leave` come from the function's thread, in this
order:

    open ─▶ entry ─▶ function ─┬─ it returned: returned() ─┬─ all have: the end
                               │                           └─ the round broke: a departure
                               ├─ it raised: raised(error)
                               └─ leave(why) was called: it departs
    after a departure: left() ─▶ next() ─▶ entry, or None: this process is not needed any more
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from msgspec import Struct

from holdfast.messages.records import Raised

Leave = Callable[[str], None]
"""Makes the function's thread leave, for this reason; called from any thread, perhaps repeatedly."""


class RoundEntry(Struct, frozen=True, kw_only=True):
    """A place in a round; the environment variables say the same in torchrun's words."""

    round: int
    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    """Group rank of this rank's node."""
    why: str = ""
    """What ended the entry before; empty for the first of the job."""


class RoundLink(Protocol):
    @property
    def replaces(self) -> bool:
        """Whether a process that dies or hangs is replaced, and the others go on."""

    def open(self, leave: Leave) -> RoundEntry:
        """Register this process's restartable function; return its first entry."""

    def returned(self) -> bool:
        """Wait until the function has returned on all ranks; False if the round breaks before."""

    def raised(self, error: Raised) -> None:
        """Report that the function raised here, by itself."""

    def postponed(self) -> None:
        """Report that leaving waits for the end of an atomic section."""

    def left(self) -> None:
        """Report that the function was left, its groups are gone and all hooks have run."""

    def next(self) -> RoundEntry | None:
        """Wait for a place in another round, and set the environment for it."""

    def gather(self, name: str, value: bytes) -> list[bytes]:
        """Exchange a value between all ranks of the round, in the order of ranks."""

    def serve_store(self) -> None:
        """Have the round's first rank serve the store of the process groups, whichever ranks are
        active; called on all ranks before the function makes its groups."""

    def resumed(self, step: int) -> None:
        """Report the step that the function goes on from."""

    def ping(self) -> None:
        """Give a sign of life."""

    def pause_watch(self) -> AbstractContextManager[None]:
        """Enclose what is never taken for a hang."""

    def stop(self, reason: str, code: int) -> None:
        """End the whole job."""

    def close(self) -> None:
        """Report that this process will not enter the function again."""


class _ProcessLink:
    """The link of this process."""

    link: RoundLink | None = None


def install(link: RoundLink) -> None:
    _ProcessLink.link = link


def current() -> RoundLink | None:
    """Return the link to this process's agent; None outside `holdfast run`."""
    return _ProcessLink.link
