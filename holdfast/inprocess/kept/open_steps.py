"""Lets entries of a kept state complete the step that was under way when the function was left.

Kept state is that of the last commit. An entry that can do better, such as `holdfast.ElasticTrainer`,
is asked for its unfinished step when the function is left. In the next entry its successor is given
that step back, on all ranks together, once their state is that of the commit again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from holdfast.inprocess.kept.exchange import RankExchange


class CompletesSteps(Protocol):
    """An entry that can complete a step."""

    def protect_steps(self) -> None:
        """Take care, from now on, that gradients stay whole wherever a step is left."""

    def leave_step(self) -> Any:
        """Take the unfinished step, with its gradients, away; None if there is nothing to keep."""

    def resume_step(self, left: Any, exchange: RankExchange) -> int:
        """Agree with all ranks on who completes the step, given what this rank has `left` of it.

        Return the number of its records that are done already; 0 if it begins anew."""


def leave_steps(state: dict[str, Any]) -> dict[str, Any]:
    """Take all unfinished steps of a state away, by the names of their entries."""
    return {name: entry.leave_step() for name, entry in _entries(state)}


def resume_steps(state: dict[str, Any], left: dict[str, Any], exchange: RankExchange) -> int:
    """Have all ranks complete the step; return the number of its records that are done."""
    return sum(entry.resume_step(left.get(name), exchange) for name, entry in _entries(state))


def protect_steps(state: dict[str, Any]) -> None:
    for _, entry in _entries(state):
        entry.protect_steps()


def _entries(state: dict[str, Any]) -> Iterator[tuple[str, CompletesSteps]]:
    """Iterate over entries in an order that is the same on all ranks."""
    for name, entry in sorted(state.items(), key=lambda one: one[0]):
        if hasattr(entry, "resume_step"):
            yield name, entry
