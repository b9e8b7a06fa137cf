"""The way from a script's data sets to the job: to the agent, and through it to the coordinator.

A worker of `holdfast run` installs its link before the script runs. Elsewhere there is none, and data
sets work within their process.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.messages.data import Span
from holdfast.messages.local import DataUsed
from holdfast.messages.requests import AnyAnswer, DataOpened, OpenData, ScriptRequest
from holdfast.messages.tuning import MemoryRoom


class JobLink(Protocol):
    rank: int
    world_size: int
    round: int

    @property
    def step(self) -> int:
        """The last step that this rank has finished, counted from the job's first."""

    def open(self, request: OpenData) -> DataOpened:
        """Wait until the coordinator knows what was used of a data set; DataError if it refuses."""

    def take(self, dataset: str, count: int) -> tuple[Span, ...]:
        """Wait for shards that were lent to this rank's node; none if the data set is finished."""

    def delivered(self, records: int) -> None:
        """Count records that the script is given, for the job's speed; called for each batch."""

    def tell(self, message: DataUsed) -> None:
        """Report what became of positions; does not wait."""

    def ask(self, request: ScriptRequest, timeout_s: float | None) -> AnyAnswer:
        """Wait for the coordinator's answer; `HoldfastError` if it is a refusal or the round ends."""

    def count_opening(self, dataset: str) -> int:
        """Count a loader that can be tuned; the number of its data set's loaders in this process."""

    def memory(self) -> MemoryRoom:
        """Measure the memory of this rank: of its GPU if it uses one, or of its host."""


class _Installed:
    """Holder of the process's link: objects of a script have no other way to find it."""

    link: JobLink | None = None


def install(link: JobLink) -> None:
    _Installed.link = link


def current() -> JobLink | None:
    """Return this process's link; None outside `holdfast run`."""
    return _Installed.link
