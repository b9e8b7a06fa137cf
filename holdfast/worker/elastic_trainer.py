"""Takes optimizer steps that do not depend on the number of ranks.

The loader says how the samples of a step are split over ranks and micro-batches; the trainer weights
each micro-batch by its samples (`elastic.weights`), lets ranks exchange gradients once a step, and only
then clips, steps the optimizers and the schedulers. A step on three ranks is, up to rounding, the step
that one process would have taken. See `docs/elastic-trainer.md`.

Every rank issues the same collectives in the same order: the same number of forward and backward
passes, reductions in the last micro-batch alone, and one all-reduce of a number where the loader does
not know the samples of the whole step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from holdfast.data.lockstep import Replicas
from holdfast.errors import UsageError
from holdfast.inprocess.zones import current_zones
from holdfast.worker.elastic.accumulation import Accumulation
from holdfast.worker.elastic.gradients import (
    GradientSync,
    clip,
    gradients,
    multiply,
    scaled_rates,
)
from holdfast.worker.elastic.interruptions import InterruptibleSteps, can_be_completed
from holdfast.worker.elastic.shared_batches import SharedBatch, shared_batches
from holdfast.worker.elastic.unfinished import OnInterruption
from holdfast.worker.elastic.weights import (
    CurrentBatch,
    LossKind,
    Portion,
    RateScale,
    check_choice,
    gradient_factor,
    loss_weight,
    rate_factor,
)

STATE = ("steps", "skipped", "samples", "reference_batch")


class ElasticTrainer:
    """Accumulates micro-batches into steps that are the same at any world size.

    - `model`: a module, on several ranks wrapped in DDP or FSDP, or sharded with `fully_shard`.
    - `optimizer`, `scheduler`: one or a list; schedulers step once after each step of the optimizers.
    - `data`: the loader, such as `holdfast.data.ElasticDataLoader`: its attribute `current` tells the
      samples of a micro-batch and of its step. None for loaders without it, see `accumulate`.
    - `max_grad_norm`: clip gradients to this norm, over all parameters of all optimizers.
    - `scaler`: a `torch.amp.GradScaler`. A step with infinite gradients is skipped by all optimizers
      and schedulers.
    - `autocast`: dtype for `torch.autocast`, in which `accumulate` runs the forward pass.
    - `loss`: whether the script's loss is a "mean" or a "sum" over the micro-batch's samples.
    - `scale`: how the learning rate follows the global batch where that grows with the world:
      "none", "linear" or "sqrt". Only the optimizers' steps see the scaled rate.
    - `reference_batch`: global batch, in samples, that the learning rate was chosen for. None takes
      that of the job's first step; the trainer's state keeps it.
    - `sync_each`: reduce gradients after each micro-batch instead of once a step. It costs
      communication, and spares FSDP from holding unsharded gradients.
    - `group`: process group of the ranks that share each step. None for all ranks.
    - `unfinished`: what becomes of a step that an in-process restart interrupts, if the trainer is part
      of the state that `holdfast.inprocess.keep` keeps: "share" completes it, with the gradients that
      survivors have accumulated; "redo" begins it again.

    `steps` counts optimizer steps, `skipped` those that the scaler skipped, `samples` what the steps
    were made from. `grad_norm` is the norm of the last step's gradients before clipping. The trainer
    belongs into the checkpoint, beside model, optimizers, schedulers, scaler and loader.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        data: Any = None,
        *,
        scheduler: Any = (),
        max_grad_norm: float | None = None,
        scaler: Any = None,
        autocast: Any = None,
        loss: LossKind = "mean",
        scale: RateScale = "none",
        reference_batch: int | None = None,
        sync_each: bool = False,
        group: Any = None,
        unfinished: OnInterruption = "share",
    ) -> None:
        check_choice("loss", loss, LossKind)
        check_choice("unfinished", unfinished, OnInterruption)
        check_choice("scale", scale, RateScale)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise UsageError(f"ElasticTrainer: max_grad_norm is above 0, not {max_grad_norm!r}")
        if reference_batch is not None and reference_batch < 1:
            raise UsageError(f"ElasticTrainer: reference_batch is above 0, not {reference_batch!r}")
        self._optimizers = _listed(optimizer)
        self._schedulers = _listed(scheduler)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._group = group
        self._world = _world_size(group)
        replicas = Replicas(self._world, dist.get_rank(group) if self._world > 1 else 0)
        self._data = data
        self._sync = GradientSync(model, self._world)
        self._sync_each = sync_each
        self._device = _device(self._optimizers)
        self._autocast = autocast
        self._loss: LossKind = loss
        self._scale: RateScale = scale
        self._reference = reference_batch
        self._max_norm = max_grad_norm
        self._shared: SharedBatch | None = None
        """The micro-batch that `batches` handed out last."""
        able = (
            unfinished == "share"
            and group is None
            and not sync_each
            and hasattr(data, "open_steps")
            and can_be_completed(model, self._optimizers, self._world, self._sync.is_wrapped)
        )
        self.kept_steps = InterruptibleSteps(model, self._sync, data, replicas, able)
        """What kept state asks for the step that is under way."""
        self.steps = 0
        self.skipped = 0
        self.samples = 0
        self.grad_norm: Any = None
        self._refuse_misfits()

    def _refuse_misfits(self) -> None:
        global_batch = getattr(self._data, "global_batch", None)
        if global_batch is not None and global_batch < self._world:
            raise UsageError(
                f"ElasticTrainer: the global batch of {global_batch} is smaller than the world of"
                f" {self._world} ranks: some would have nothing to do. Raise it, or use fewer ranks"
            )
        for scheduler in self._schedulers:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise UsageError(
                    "ElasticTrainer: ReduceLROnPlateau needs a metric; call its step() yourself"
                )
        groups = (group for each in self._optimizers for group in each.param_groups)
        if self._scale != "none" and any(group.get("lr") is None for group in groups):
            raise UsageError(
                f"ElasticTrainer: scale={self._scale!r} needs optimizers with a learning rate"
            )

    # ---- micro-batches ----

    @contextmanager
    def accumulate(self, samples: int | None = None, *, last: bool | None = None) -> Iterator[None]:
        """Enclose the forward and backward pass of one micro-batch.

        With a loader that has `current`, nothing needs to be passed. `samples` is the weight of the
        micro-batch where the loader does not tell it, or where the loss is a mean over something else
        than its records, such as tokens. `last` says whether it is the last micro-batch of its step,
        where the loader does not; by default each one is. All ranks must agree on that.
        """
        if self.kept_steps.is_elsewhere():
            self.discard()
        portion = self._portion(samples, last)
        self._step.begin(portion)
        self.kept_steps.begin_micro_batch()
        try:
            with ExitStack() as stack:
                if not (portion.last or self._sync_each):
                    stack.enter_context(self._sync.off())
                if self._autocast is not None:
                    stack.enter_context(torch.autocast(self._device.type, self._autocast))
                yield
            self._step.end()
        except BaseException:
            self.kept_steps.fail()
            raise
        finally:
            current_zones().end_shield()

    def idle(self, *, last: bool | None = None) -> Any:
        """Enclose the passes of a rank that has no data in this step, on any batch: it counts nothing.

        Other ranks need it for their collectives. `last` is that of `accumulate`. A loader that has
        `current`, and `batches`, tell by themselves that a batch has no samples.
        """
        if self._current() is not None:
            raise UsageError(
                "ElasticTrainer.idle: the loader tells how many samples this rank has; use accumulate()"
            )
        return self.accumulate(0, last=last)

    def backward(self, loss: Any, *, retain_graph: bool = False) -> None:
        """Weight the `loss` of this micro-batch, and compute its gradients.

        `retain_graph` is that of `torch.Tensor.backward`.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(
                "ElasticTrainer.backward: the loss is a tensor of one element that depends on the"
                f" model's parameters, not {_described(loss)}"
            )
        current_zones().begin_shield()  # Until the micro-batch is complete.
        weighted = loss * loss_weight(
            self._step.backward(), self.kept_steps.weighted_for, self._loss
        )
        if self._scaler is not None:
            weighted = self._scaler.scale(weighted)
        with torch.autocast(self._device.type, enabled=False):
            weighted.backward(retain_graph=retain_graph)

    def batches(
        self,
        source: Iterable[Any],
        *,
        samples: Callable[[Any], int],
        per_step: int = 1,
        idle: Any = None,
    ) -> Iterator[Any]:
        """Iterate over a `source` that may have fewer batches on some ranks than on others.

        Each step takes up to `per_step` batches of each rank; `samples` tells how many samples a batch
        has. A rank that has too few gets its last batch again, or `idle` if it never had one, and it
        counts nothing. A source that has nothing now, but may have later, yields None instead of
        waiting for other ranks. The loop ends on all ranks together. For loaders that step all ranks
        alike iterate over the loader itself.
        """
        if per_step < 1:
            raise UsageError(f"ElasticTrainer.batches: per_step is above 0, not {per_step!r}")
        self.kept_steps.give_up()
        shared = shared_batches(
            source, samples, per_step, idle=idle, world=self._world, add=self._sum_over_ranks
        )
        try:
            for self._shared in shared:
                yield self._shared.batch
        finally:
            self._shared = None

    def _portion(self, samples: int | None, last: bool | None) -> Portion:
        if samples is not None and samples < 0:
            raise UsageError(f"ElasticTrainer.accumulate: samples is 0 or more, not {samples!r}")
        current = self._current()
        if current is None:
            if samples is None:
                raise UsageError(
                    "ElasticTrainer.accumulate: nothing tells how many samples this micro-batch has:"
                    " the loader has no `current` batch, so pass accumulate(samples=...)"
                )
            return Portion(samples=samples, total=None, last=last is not False)
        if last is not None:
            raise UsageError(
                "ElasticTrainer.accumulate: the loader tells which micro-batch is the last of its"
                " step; do not pass `last`"
            )
        is_last, index = current.index == current.of - 1, current.index
        if samples is not None:
            return Portion(samples=samples, total=None, last=is_last, index=index)
        return Portion(
            samples=current.records, total=current.global_records, last=is_last, index=index
        )

    @property
    def _step(self) -> Accumulation:
        return self.kept_steps.accumulation

    def _current(self) -> CurrentBatch | None:
        current: CurrentBatch | None = self._shared or getattr(self._data, "current", None)
        return current

    # ---- steps ----

    def step(self) -> bool:
        """Take an optimizer step if the last micro-batch of a step was accumulated; return whether.

        It is called after each `accumulate`. It also returns False for a step that the scaler skipped.
        """
        if not self._step.is_complete():
            return False
        found = gradients(self._optimizers)
        if not found:
            raise UsageError(
                "ElasticTrainer.step: no parameter of the optimizers has a gradient; were they made"
                " from the parameters of this model, after it was wrapped or sharded?"
            )
        total = self._step.total
        if total is None:
            (total,) = self._sum_over_ranks([self._step.samples])
            if total == 0:
                raise UsageError("ElasticTrainer.step: no rank had any samples for this step")
            multiply(found, gradient_factor(total, self._world))
        elif self.kept_steps.weighted_for != self._world:
            multiply(found, self._world / self.kept_steps.weighted_for)
        taken = self._update(found, self._rate_factor(total))
        self.kept_steps.finish()
        self.discard()
        if taken:
            self.steps += 1
            self.samples += total
        else:
            self.skipped += 1
        return taken

    def discard(self) -> None:
        """Drop the gradients that were accumulated since the last step."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.kept_steps.discard()

    def _update(self, found: list[Any], factor: float) -> bool:
        if self._scaler is not None and _unscale(self._scaler, self._optimizers):
            self._scaler.update()
            return False
        if self._max_norm is not None:
            self.grad_norm = clip(self.kept_steps.model, found, self._max_norm)
        with scaled_rates(self._optimizers, factor):
            for optimizer in self._optimizers:
                if self._scaler is None:
                    optimizer.step()
                else:
                    self._scaler.step(optimizer)
        if self._scaler is not None:
            self._scaler.update()
        for scheduler in self._schedulers:
            scheduler.step()
        return True

    def _rate_factor(self, total: int) -> float:
        if self._scale == "none":
            return 1.0
        batch = self._nominal_batch() or total
        if self._reference is None:
            self._reference = batch
        return rate_factor(batch, self._reference, self._scale)

    def _nominal_batch(self) -> int | None:
        """Return the global batch as the loader has it: the last step of an epoch may have less."""
        if not hasattr(self._data, "current"):  # What it calls a batch may be a part of one.
            return None
        global_batch: int | None = getattr(self._data, "global_batch", None)
        if global_batch is not None:
            return global_batch
        batch_size: int | None = getattr(self._data, "batch_size", None)
        return None if batch_size is None else batch_size * self._world

    def _sum_over_ranks(self, numbers: list[int]) -> list[int]:
        if self._world == 1:
            return numbers
        device = self._device
        if dist.get_backend(self._group) == "nccl":  # Parameters may have been offloaded.
            device = torch.device("cuda", torch.cuda.current_device())
        added = torch.tensor(numbers, dtype=torch.int64, device=device)
        dist.all_reduce(added, group=self._group)
        summed: list[int] = added.tolist()
        return summed

    # ---- state ----

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint must keep of the trainer, the same on all ranks."""
        values = (self.steps, self.skipped, self.samples, self._reference or 0)
        return dict(zip(STATE, values, strict=True))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over the `state` of an earlier trainer, at any world size.

        A `reference_batch` that was passed to this trainer stays.
        """
        if set(state) != set(STATE):
            raise UsageError(
                f"ElasticTrainer.load_state_dict: expected {', '.join(STATE)}, got"
                f" {', '.join(map(str, state)) or 'nothing'}; this is not a trainer's state"
            )
        self.steps, self.skipped, self.samples = (int(state[name]) for name in STATE[:3])
        if self._reference is None:
            self._reference = int(state["reference_batch"]) or None
        self.kept_steps.forget()
        self.discard()


def _unscale(scaler: Any, optimizers: list[Any]) -> bool:
    """Undo the scaler's factor, and return whether any gradient is infinite or NaN.

    The scaler alone would let each optimizer decide for itself, and half of a step be taken.
    """
    infinite = False
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        flags = scaler._found_inf_per_device(optimizer).values()
        infinite |= any(bool(flag.item()) for flag in flags)
    return infinite


def _listed(one_or_more: Any) -> list[Any]:
    if one_or_more is None:
        return []
    return list(one_or_more) if isinstance(one_or_more, (list, tuple)) else [one_or_more]


def _world_size(group: Any) -> int:
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size(group))
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched != "1":
        raise UsageError(
            f"ElasticTrainer: this is one of WORLD_SIZE={launched} processes, but torch.distributed is"
            " not initialized; call init_process_group() before"
        )
    return 1


def _device(optimizers: list[Any]) -> Any:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                return parameter.device
    raise UsageError("ElasticTrainer: the optimizers have no parameters")


def _described(loss: Any) -> str:
    if not isinstance(loss, torch.Tensor):
        return f"a {type(loss).__name__}"
    if loss.numel() != 1:
        return f"one of shape {tuple(loss.shape)}"
    return "one without a gradient"
