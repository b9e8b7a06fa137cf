"""Keeps the gradients of a step through an in-process restart: on leaving and on entering again.

It has the step's accumulation, and knows which positions of the data that stands for. See "A step that
was interrupted" in `docs/elastic-trainer.md`.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from holdfast.data.lockstep import Replicas
from holdfast.inprocess.kept.exchange import RankExchange
from holdfast.worker.elastic.accumulation import Accumulation
from holdfast.worker.elastic.gradients import GradientSync
from holdfast.worker.elastic.unfinished import (
    StepStanding,
    UnfinishedStep,
    agree,
    fit,
    nothing_done,
    put_gradients,
    share_of,
    take_gradients,
)
from holdfast.worker.elastic.whole_reduction import WholeReduction, can_reduce_whole

Place = tuple[int, int]
"""Epoch and position at which a step begins."""


class InterruptibleSteps:
    """The steps of one trainer, in one entry of a restartable function.

    `able` says whether they can be completed by other ranks than those that began them."""

    def __init__(
        self, model: Any, sync: GradientSync, data: Any, replicas: Replicas, able: bool
    ) -> None:
        self.accumulation = Accumulation()
        """Of the present step."""
        self.model = model
        self._sync, self._data, self._replicas = sync, data, replicas
        self._able = able and data.open_steps.able
        self._resumed: UnfinishedStep | None = None
        """What this rank had done of the present step before it was interrupted."""
        self._finished: Place | None = None
        """The last step that was finished."""
        self._reduction: WholeReduction | None = None

    @property
    def weighted_for(self) -> int:
        """Number of ranks by which losses of this step are weighted."""
        return self._resumed.base if self._resumed is not None else self._replicas.size

    def is_elsewhere(self) -> bool:
        """Return whether the script goes on with another step than the one that was resumed."""
        if self._resumed is None:
            return False
        step = self._resumed.step
        return self._place() != (step.epoch, step.start)

    def begin_micro_batch(self) -> None:
        if self._reduction is not None:
            self._reduction.failed = False

    def fail(self) -> None:
        """Leave a micro-batch that raised."""
        self.accumulation.fail(self._reduction is not None and self._reduction.failed)

    def finish(self) -> None:
        """Note that the step was taken; its gradients are discarded next."""
        self._finished = self._place()

    def discard(self) -> None:
        """Begin a step anew."""
        self.accumulation = Accumulation()
        if self._resumed is not None:
            self._resumed = None
            self._data.open_steps.complete(None)

    def give_up(self) -> None:
        """Complete no steps: the script takes other batches than the loader's."""
        self._able = False

    def forget(self) -> None:
        """Note that the next step begins somewhere else, once gradients are discarded."""
        self._finished = None

    # ---- what kept state asks for ----

    def protect(self) -> None:
        """Take care, from now on, that gradients stay whole wherever a step is left."""
        if self._able and self._reduction is None and can_reduce_whole(self.model):
            self._reduction = WholeReduction(self.model)

    def leave(self) -> UnfinishedStep | None:
        """Take the unfinished step away, with its gradients; None if no step was begun.

        The model is let go: DDP holds buckets, and a process group that is gone."""
        left = self._left() if self._able else None
        self.model = self._reduction = None
        self._sync.release()
        return left

    def resume(self, left: UnfinishedStep | None, exchange: RankExchange) -> int:
        """Agree with all ranks on who completes the step, given what this rank has left of it.

        Return the number of its records that are done already; 0 if it begins anew."""
        if left is not None and not self._can_resume(left):
            left = None
        own = StepStanding.of(left, self._able, self._data.batch_size if self._able else 0)
        rows = exchange.gather(own.row())
        agreed = agree([StepStanding.of_row(row) for row in rows])
        share = share_of(agreed, left, exchange) if agreed is not None else None
        if agreed is None or share is None:
            return 0
        if left is None or left.step != agreed.step:
            left = nothing_done(agreed, self._replicas)
        put_gradients(left.gradients, _unwrapped(self.model))
        self.accumulation, self._resumed = Accumulation(left.samples), left
        self._data.open_steps.complete(share)
        return agreed.done

    def _left(self) -> UnfinishedStep | None:
        begun, before = self.accumulation, self._resumed
        fresh = begun.stage == "between" and not begun.count and before is None
        steps = self._data.open_steps
        share = steps.following() if fresh and self._finished == self._place() else steps.current()
        if share is None or (before is not None and before.step != share.step):
            return None
        gradients = take_gradients(_unwrapped(self.model))
        kept = begun.whole and begun.stage != "complete"
        count = begun.count if kept else 0
        earlier = before.done if before is not None and kept else ()
        return UnfinishedStep(
            step=share.step,
            gradients=gradients if kept else {},
            done=(*earlier, *(p for part in share.parts[:count] for p in part)),
            left=share.parts[count:],
            samples=begun.samples if kept else 0,
            base=self.weighted_for,
            replicas=self._replicas,
        )

    def _can_resume(self, left: UnfinishedStep) -> bool:
        comes: bool = self._able and self._data.open_steps.comes_to(left.step)
        return comes and fit(left.gradients, _unwrapped(self.model))

    def _place(self) -> Place | None:
        """Return where the step of the loader's batch begins."""
        current = getattr(self._data, "current", None)
        epoch, position = getattr(current, "epoch", None), getattr(current, "position", None)
        return None if epoch is None or position is None else (epoch, position)


def can_be_completed(model: Any, optimizers: list[Any], world: int, wrapped: bool) -> bool:
    """Return whether all gradients of a step are in `p.grad` of a model, on each rank its own sums."""
    own = set(model.parameters())
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return (
        (isinstance(model, DistributedDataParallel) or (world == 1 and not wrapped))
        and not any(hasattr(p, "device_mesh") for p in own)
        and all(p in own for group in groups for p in group["params"])
    )


def _unwrapped(model: Any) -> Any:
    """Return the model without DDP, under which names of parameters stay the same."""
    return model.module if isinstance(model, DistributedDataParallel) else model
