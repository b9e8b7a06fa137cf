"""Weights micro-batches, so that a step does not depend on how its samples were split.

A step over N samples should follow the mean of their gradients, (1/N) Σ g. A loss that is a mean over
the n samples of a micro-batch gives (1/n) Σ g of these, so it counts n/N; a loss that is a sum counts
1/N. Data parallel wrappers (DDP, FSDP) average gradients over the W ranks, which divides by W once
more, so each weight is multiplied by W. That is exact for any split, also where ranks have different
numbers of samples, and where some have none.

If N is not known before the step's end, micro-batches count n (or 1), and the gradients are multiplied
by W/N once N is known.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol, get_args

from msgspec import Struct

from holdfast.errors import UsageError

LossKind = Literal["mean", "sum"]
"""How a script's loss combines the samples of a micro-batch."""
RateScale = Literal["none", "linear", "sqrt"]
"""How the learning rate follows the size of the global batch."""


class CurrentBatch(Protocol):
    """What a loader in lockstep tells of the micro-batch that it handed out last."""

    @property
    def records(self) -> int:
        """Records of this rank's micro-batch."""

    @property
    def global_records(self) -> int | None:
        """Records of the whole step over all ranks; None if the loader does not know."""

    @property
    def index(self) -> int:
        """Number of the micro-batch in its step, from 0."""

    @property
    def of(self) -> int:
        """Number of micro-batches in the step, the same on all ranks."""


class Portion(Struct, frozen=True):
    """What one micro-batch contributes to a step."""

    samples: int
    total: int | None
    """Samples of the step, on all ranks; None if not known before the step's end."""
    last: bool
    index: int | None = None
    """Number of the micro-batch in its step; None if nobody counts."""


def loss_weight(portion: Portion, world: int, kind: LossKind) -> float:
    """Return by what to multiply the loss of a micro-batch."""
    samples = portion.samples if kind == "mean" else 1
    if portion.samples == 0:
        return 0.0
    return float(samples) if portion.total is None else samples * world / portion.total


def gradient_factor(total: int, world: int) -> float:
    """Return by what to multiply gradients whose losses were weighted without knowing the total."""
    return world / total


def rate_factor(batch: int, reference: int, scale: RateScale) -> float:
    """Return by what to multiply a learning rate that was chosen for another global batch."""
    if scale == "none":
        return 1.0
    ratio = batch / reference
    return ratio if scale == "linear" else math.sqrt(ratio)


def check_choice(name: str, value: str, choices: object) -> None:
    """Raise UsageError unless the value is one of a literal's choices."""
    allowed = get_args(choices)
    if value not in allowed:
        words = ", ".join(map(repr, allowed))
        raise UsageError(f"ElasticTrainer: {name} is one of {words}, not {value!r}")
