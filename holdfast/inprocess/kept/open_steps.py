"""Lets entries of a kept state complete the step that was under way when the function was left.

Kept state is that of the last commit. An entry that can do better, such as `holdfast.ElasticTrainer`,
is asked for its unfinished step when the function is left. In the next entry its successor is given
that step back, on all ranks together, once their state is that of the commit again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from holdfast.inprocess.kept.exchange import RankExchange


class KeptSteps(Protocol):
    """The attribute `kept_steps` of an entry that can complete a step."""

    def protect(self) -> None:
        """Take care, from now on, that gradients stay whole wherever a step is left."""

    def leave(self) -> Any:
        """Take the unfinished step, with its gradients, away; None if there is nothing to keep."""

    def resume(self, left: Any, exchange: RankExchange) -> int:
        """Agree with all ranks on who completes the step, given what this rank has `left` of it.

        Return the number of its records that are done already; 0 if it begins anew."""


def leave_steps(state: dict[str, Any]) -> dict[str, Any]:
    """Take all unfinished steps of a state away, by the names of their entries."""
    return {name: steps.leave() for name, steps in _entries(state)}


def resume_steps(state: dict[str, Any], left: dict[str, Any], exchange: RankExchange) -> int:
    """Have all ranks complete the step; return the number of its records that are done."""
    return sum(steps.resume(left.get(name), exchange) for name, steps in _entries(state))


def protect_steps(state: dict[str, Any]) -> None:
    for _, steps in _entries(state):
        steps.protect()


def _entries(state: dict[str, Any]) -> Iterator[tuple[str, KeptSteps]]:
    """Iterate over entries in an order that is the same on all ranks."""
    for name, entry in sorted(state.items(), key=lambda one: one[0]):
        steps: KeptSteps | None = getattr(entry, "kept_steps", None)
        if steps is not None:
            yield name, steps
