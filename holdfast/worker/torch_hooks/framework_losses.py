"""Hears the losses that training frameworks log.

transformers' Trainer, Lightning's Trainer and accelerate's trackers are told the loss by its name, as
often as the user wants it logged. By then it is a number, or about to be made one. It is taken as if
the script had called `holdfast.progress(loss=...)`: steps are counted as before, and what the script
itself tells goes before what it logs. Losses of evaluations have other names, or are logged outside the
training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from holdfast.worker.runtime import Runtime
from holdfast.worker.told_losses import checked
from holdfast.worker.torch_hooks.imports import when_imported

NAMES: Final = (
    *("loss", "train_loss", "training_loss", "train/loss", "training/loss", "loss/train"),
    *("loss_step", "train_loss_step", "training_loss_step", "train/loss_step"),
)
"""Names under which scripts log the loss of a training step, the likeliest first."""
ITS_OWN: Final = ("loss",)
"""The name that transformers gives it; "train_loss" is the mean of a whole training there."""
_CONNECTOR: Final = "trainer.connectors.logger_connector.logger_connector"


def hear_losses(runtime: Runtime) -> None:
    """Hear what each framework logs, once the script imports it."""

    def on_transformers(module: ModuleType) -> None:
        _hear(runtime, module.CallbackHandler, "on_log", 3, "logs", ITS_OWN)

    def on_lightning(module: ModuleType) -> None:
        def trains(connector: Any) -> bool:
            return bool(connector.trainer.training)

        _hear(runtime, module._LoggerConnector, "log_metrics", 0, "metrics", NAMES, trains)

    def on_accelerate(module: ModuleType) -> None:
        _hear(runtime, module.Accelerator, "log", 0, "values", NAMES)

    when_imported("transformers.trainer_callback", on_transformers)
    when_imported(f"lightning.pytorch.{_CONNECTOR}", on_lightning)
    when_imported(f"pytorch_lightning.{_CONNECTOR}", on_lightning)
    when_imported("accelerate.accelerator", on_accelerate)


def _hear(
    runtime: Runtime,
    owner: Any,
    method: str,
    place: int,
    keyword: str,
    names: Sequence[str],
    trains: Callable[[Any], bool] = lambda owner: True,
) -> None:
    """Wrap a method that is given what is logged, at that place of its arguments or by that keyword."""
    real = getattr(owner, method)

    @functools.wraps(real)
    def log(self: Any, *args: Any, **kwargs: Any) -> Any:
        logged = args[place] if len(args) > place else kwargs.get(keyword)
        loss = loss_in(logged, names) if isinstance(logged, dict) and trains(self) else None
        result = real(self, *args, **kwargs)
        if loss is not None:
            runtime.hear_loss(loss)
        return result

    setattr(owner, method, log)


def loss_in(logged: dict[Any, Any], names: Sequence[str] = NAMES) -> Any:
    """Find the training's loss among what is logged; None if there is none."""
    for name in names:
        if logged.get(name) is not None:
            try:
                return checked(logged[name])
            except (
                Exception
            ):  # Words, one of each sample, or anything: what is logged is the user's.
                return None
    return None
