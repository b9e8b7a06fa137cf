"""Agrees on how a step that was interrupted is completed: see "A step that was interrupted" in
`docs/elastic-trainer.md`.

Each rank says what it has of the step. All ranks see the same rows, so all come to the same agreement:
each goes on with its own micro-batches, or what is missing is shared out, or the step begins anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from msgspec import Struct

from holdfast.data.lockstep import Replicas
from holdfast.data.open_step import OpenStep, Part, StepShare, go_on, share_out
from holdfast.inprocess.kept.exchange import RankExchange

OnInterruption = Literal["share", "redo"]
"""What becomes of a step that was interrupted."""


@dataclass(frozen=True)
class UnfinishedStep:
    """What one rank has of a step."""

    step: OpenStep
    gradients: dict[str, torch.Tensor]
    """Sums over what is done, by the names of parameters."""
    done: tuple[int, ...]
    """Positions whose gradients these are."""
    left: tuple[Part, ...]
    """Micro-batches that this rank would have done next."""
    samples: int
    """Samples that were told for what is done."""
    base: int
    """Number of ranks by which losses are weighted in this step."""
    replicas: Replicas
    """The rank's place in the world in which the step was interrupted."""


class StepStanding(Struct, frozen=True):
    """What one rank says of the step that it was in."""

    able: bool
    """Whether its trainer can complete steps."""
    batch: int
    """Largest micro-batch that it would take."""
    known: bool = False
    """Whether it was in a step; the rest means nothing if not."""
    step: OpenStep = OpenStep(0, 0, 0, 0)
    base: int = 0
    done: int = 0
    """Number of positions that it has done."""
    left: int = 0
    """Number of positions that it would have done next."""
    parts: int = 0
    """Number of micro-batches that it would have done next."""
    world: int = 0
    rank: int = 0

    @classmethod
    def of(cls, left: UnfinishedStep | None, able: bool, batch: int) -> StepStanding:
        if left is None:
            return cls(able, batch)
        return cls(
            able,
            batch,
            known=True,
            step=left.step,
            base=left.base,
            done=len(left.done),
            left=sum(map(len, left.left)),
            parts=len(left.left),
            world=left.replicas.size,
            rank=left.replicas.rank,
        )

    def row(self) -> list[int]:
        one = self.step
        step = (one.epoch, one.start, one.size, one.stop)
        counts = (self.base, self.done, self.left, self.parts, self.world, self.rank)
        return [self.able, self.batch, self.known, *step, *counts]

    @classmethod
    def of_row(cls, row: Sequence[int]) -> StepStanding:
        able, batch, known, epoch, start, size, stop, *counts = row
        return cls(bool(able), batch, bool(known), OpenStep(epoch, start, size, stop), *counts)


class Completion(Struct, frozen=True):
    """How ranks complete a step."""

    step: OpenStep
    base: int
    batch: int
    done: int
    """Number of positions that are done, on all ranks."""
    own: int = 0
    """Number of micro-batches if each rank goes on with its own; 0 if what is missing is shared out."""


def agree(standings: Sequence[StepStanding]) -> Completion | None:
    """Decide how the step is completed; None if it begins anew."""
    known = [one for one in standings if one.known]
    kept = {(one.step, one.base) for one in known if one.done}
    if len(kept) != 1 or not all(one.able for one in standings):
        return None
    ((step, base),) = kept
    done = sum(one.done for one in known)
    batch = min(one.batch for one in standings)
    alike = all(
        one.known and one.step == step and one.rank == rank and one.world == len(standings)
        for rank, one in enumerate(standings)
    )
    complete = done + sum(one.left for one in standings) == step.size
    own = max(1, *(one.parts for one in standings)) if alike and complete else 0
    return Completion(step, base, batch, done, own)


def share_of(
    completion: Completion, left: UnfinishedStep | None, exchange: RankExchange
) -> StepShare | None:
    """Return this rank's share of the step; None, on all ranks, if a position was done twice."""
    step, batch = completion.step, completion.batch
    own = left if left is not None and left.step == step else None
    kept = len(own.done) if own is not None else 0
    if completion.own:
        assert own is not None
        return go_on(step, own.left, completion.own, batch, kept)
    times = [0] * step.size
    for position in own.done if own is not None else ():
        times[position - step.start] += 1
    times = exchange.add(times)
    if max(times) > 1:
        return None
    done = frozenset(step.start + at for at, count in enumerate(times) if count)
    return share_out(step, done, Replicas(exchange.world_size, exchange.rank), batch, kept)


def nothing_done(completion: Completion, replicas: Replicas) -> UnfinishedStep:
    """Return what a rank has of a step that others have begun."""
    return UnfinishedStep(
        step=completion.step,
        gradients={},
        done=(),
        left=(),
        samples=0,
        base=completion.base,
        replicas=replicas,
    )


def take_gradients(module: Any) -> dict[str, torch.Tensor]:
    """Take the gradients of a module's parameters away."""
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[name], parameter.grad = parameter.grad, None
    return found


def fit(gradients: dict[str, torch.Tensor], module: Any) -> bool:
    """Return whether these can be gradients of that module's parameters."""
    parameters = dict(module.named_parameters())
    return all(
        name in parameters
        and parameters[name].shape == gradient.shape
        and parameters[name].dtype == gradient.dtype
        and parameters[name].device == gradient.device
        for name, gradient in gradients.items()
    )


def put_gradients(gradients: dict[str, torch.Tensor], module: Any) -> None:
    for name, parameter in module.named_parameters():
        parameter.grad = gradients.get(name)
