"""Follows the micro-batches of one step, and refuses what would make its gradients wrong.

Gradients add up in place, so a micro-batch that was left out, counted twice or not weighted is not seen
afterwards: the model only trains worse, and on several ranks the collectives no longer match. So each
call is checked against the ones before it.
"""

from __future__ import annotations

from typing import Literal

from holdfast.errors import UsageError
from holdfast.worker.elastic.weights import Portion

Stage = Literal["between", "inside", "complete", "failed"]
"""Between micro-batches, inside of one, after the step's last one, after one that raised."""


class Accumulation:
    """The micro-batches of this rank since the last step."""

    def __init__(self, samples: int = 0) -> None:
        self.stage: Stage = "between"
        self.count = 0
        self.samples = samples
        """Samples of these micro-batches, and those that were done before an interruption."""
        self.total: int | None = None
        """Samples of the step on all ranks; None if not known yet."""
        self.whole = True
        """Whether gradients are those of `count` micro-batches and of nothing else."""
        self._portion: Portion | None = None
        self._backwards = 0

    def begin(self, portion: Portion) -> None:
        """Enter a micro-batch."""
        self._refuse_if_failed()
        if self.stage == "inside":
            raise UsageError("ElasticTrainer.accumulate: it is not finished; it cannot be nested")
        if self.stage == "complete":
            raise UsageError(
                "ElasticTrainer.accumulate: the step has all its micro-batches; call step() after"
                " each accumulate()"
            )
        if portion.index is not None and portion.index != self.count:
            raise UsageError(
                f"ElasticTrainer.accumulate: the loader is at micro-batch {portion.index} of its"
                f" step, but {self.count} went through accumulate(): none may be left out. After"
                " leaving a step in the middle, call discard() and begin with a new iterator"
            )
        if self.count and portion.total != self.total:
            raise UsageError(
                "ElasticTrainer.accumulate: this micro-batch belongs to a step of"
                f" {_samples(portion.total)}, those before it to one of {_samples(self.total)}"
            )
        self.stage, self._portion, self._backwards = "inside", portion, 0
        self.total = portion.total

    def backward(self) -> Portion:
        """Note a backward pass, and return the micro-batch that it belongs to."""
        if self.stage != "inside" or self._portion is None:
            raise UsageError(
                "ElasticTrainer.backward: it is called within `with trainer.accumulate():`, as the"
                " forward pass is"
            )
        self._backwards += 1
        self.whole = False
        return self._portion

    def end(self) -> None:
        """Leave a micro-batch."""
        assert self._portion is not None
        if not self._backwards:
            self.stage = "failed"
            raise UsageError(
                "ElasticTrainer.accumulate: it ended without trainer.backward(loss), so other ranks"
                " wait for this one's gradients. A rank without data takes part with idle()"
            )
        self._count()
        self.stage = "complete" if self._portion.last else "between"

    def fail(self, unreduced: bool = False) -> None:
        """Leave a micro-batch that raised: its gradients may be incomplete, unless it is only that
        they were not reduced."""
        if unreduced and self._backwards == 1:
            self._count()
        self.stage = "failed"

    def _count(self) -> None:
        assert self._portion is not None
        self.count += 1
        self.samples += self._portion.samples
        self.whole = True

    def is_complete(self) -> bool:
        """Return whether the step has all its micro-batches; refuse where nobody should ask."""
        self._refuse_if_failed()
        if self.stage == "inside":
            raise UsageError(
                "ElasticTrainer.step: it is called after the block of accumulate(), not within it"
            )
        if not self.count:
            raise UsageError(
                "ElasticTrainer.step: there was no accumulate() since the last step, so there are no"
                " gradients"
            )
        return self.stage == "complete"

    def _refuse_if_failed(self) -> None:
        if self.stage == "failed":
            raise UsageError(
                "ElasticTrainer: a micro-batch of this step raised, so its gradients are incomplete;"
                " discard() drops them"
            )


def _samples(total: int | None) -> str:
    return "an unknown number of samples" if total is None else f"{total} samples"
