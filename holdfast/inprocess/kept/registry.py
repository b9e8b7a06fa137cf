"""Remembers, between two entries of a function, the state that was kept.

The process has one kept state at a time. When its function is left, `function_left` turns it into a
survivor: the objects, and how far they are to be trusted. The next `keep` takes the survivor over,
and `restore` releases it once the new entry has its state. If that entry is left before, the
survivor stays, unless it was being overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.inprocess.kept.boundary import Boundary, BufferCopies


@dataclass(frozen=True)
class Survivor:
    """The state of the entry before."""

    state: dict[str, Any]
    step: int
    """Last committed step."""
    boundary: Boundary | None
    """What was recorded at that step; None: the state was left between two steps."""
    buffers: BufferCopies | None
    unfinished: dict[str, Any] = field(default_factory=dict)
    """What entries have of the step after that, by their names."""
    changes: tuple[int, ...] = ()
    """Torch's counts of the changes to the parameters when the function was left."""


class Leavable(Protocol):
    def survivor(self) -> Survivor | None:
        """End this kept state; return what is left of it."""


class _Registry:
    current: ClassVar[Leavable | None] = None
    survivor: ClassVar[Survivor | None] = None


def register(kept: Leavable) -> Survivor | None:
    """Make that the kept state of this process; return the one of the entry before."""
    if _Registry.current is not None:
        raise UsageError(
            "keep: this process already keeps a state; put all of it into one dict, and call keep once"
            " in each entry of the restartable function"
        )
    found, _Registry.survivor = _Registry.survivor, None
    _Registry.current = kept
    return found


def function_left() -> None:
    """Note that the function was left: its kept state is over, and the next `keep` goes on from it."""
    kept, _Registry.current = _Registry.current, None
    if kept is not None:
        _Registry.survivor = kept.survivor()


def forget() -> None:
    """Release all kept state: the function will not be entered again."""
    function_left()
    _Registry.survivor = None
