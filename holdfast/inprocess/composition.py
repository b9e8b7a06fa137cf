"""Joins hooks with hooks, and rank assignments with rank assignments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.inprocess.assignment.members import Assignment
    from holdfast.inprocess.hooks import Hook


@overload
def compose(*steps: Assignment) -> Assignment: ...
@overload
def compose(*steps: Hook) -> Hook: ...
def compose(*steps: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Call the `steps`, all of them hooks or all assignments, from left to right.

    Each hook gets the same state, each assignment the members as the one before it returned them.
    """
    for step in steps:
        if not callable(step):
            raise UsageError(f"compose joins functions; {step!r} is not one")

    def composed(given: Any) -> Any:
        if not isinstance(given, tuple):
            for step in steps:
                step(given)
            return None
        for step in steps:
            given = step(given)
            if not isinstance(given, tuple):
                raise UsageError(
                    f"the rank assignment {_name(step)} returned {type(given).__name__}, "
                    "not a tuple of Member"
                )
        return given

    return composed


def _name(step: Callable[[Any], Any]) -> str:
    return getattr(step, "__qualname__", type(step).__name__)
