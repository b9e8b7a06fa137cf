"""Takes the losses that a script tells, without ever making it wait for its GPU.

A loss in host memory is read at once. One on a GPU is not there yet when the script tells it: the GPU
may be several steps behind, and to read it would be to wait for it. So a copy to pinned memory is
queued behind the step, with a CUDA event, and read at a later step, once the GPU has passed the event.
At most one copy is under way, and one is begun each second at most: more would not be seen.

As with times (`torch_hooks.device_times`), nothing is queued or queried while a CUDA graph is captured,
and a GPU that has failed is the script's to report. On devices of other kinds the loss is read at once,
each second at most.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Final, NamedTuple

EVERY_S: Final = 1.0
"""Time between two losses that are read from a device, at least."""


def checked(loss: Any) -> Any:
    """Return a loss as a float, or as it is if it is on a device; raise TypeError if it is none."""
    if type(loss) is float:
        return loss
    if isinstance(loss, bool | str | bytes):
        raise _not_a_loss(loss)
    if hasattr(loss, "to_local"):  # A DTensor: to read it as a whole could be a collective.
        loss = loss.to_local()
    if hasattr(loss, "numel"):
        if loss.numel() != 1 or loss.is_complex():
            raise _not_a_loss(loss)
        if loss.device.type != "cpu":
            return loss.detach()
    try:
        return float(loss.item() if hasattr(loss, "item") else loss)
    except (TypeError, ValueError, OverflowError):
        raise _not_a_loss(loss) from None


def _not_a_loss(loss: object) -> TypeError:
    shape = getattr(loss, "shape", None)
    what = f"a {type(loss).__name__}" + (f" of shape {tuple(shape)}" if shape else "")
    return TypeError(
        f"holdfast.progress: loss must be one real number or a tensor of one, not {what}"
    )


class _Copy(NamedTuple):
    """A loss on its way from a GPU."""

    value: Any
    arrived: Any
    """CUDA event that the GPU passes after the copy."""
    steps: int


class ToldLosses:
    """The newest loss that is known, and one that is on its way."""

    def __init__(self) -> None:
        self.value = 0.0
        self.steps = 0
        """Steps that this process had finished with the step of that loss; 0 if none was told."""
        self.under_way: _Copy | None = None
        self._next_at = 0.0
        """When the next loss may be read from a device."""

    def tell(self, loss: Any, steps: int) -> None:
        """Take the loss of a step, as `checked` returned it."""
        if type(loss) is float:
            self.value, self.steps = loss, steps
            self.under_way = None
            return
        self.look()
        now = time.monotonic()
        if self.under_way is not None or now < self._next_at:
            return
        self._next_at = now + EVERY_S
        try:
            self._fetch(loss, steps)
        except RuntimeError:
            pass

    def look(self) -> None:
        """Take a loss that has arrived from a GPU."""
        copy = self.under_way
        if copy is None:
            return
        try:
            if not _captures() and copy.arrived.query():
                self.value, self.steps = float(copy.value), copy.steps
                self.under_way = None
        except RuntimeError:
            self.under_way = None

    def _fetch(self, loss: Any, steps: int) -> None:
        if loss.device.type != "cuda":
            self.value, self.steps = float(loss.item()), steps
        elif not _captures():
            cuda = sys.modules["torch"].cuda
            value, arrived = loss.to("cpu", non_blocking=True), cuda.Event()
            arrived.record(cuda.current_stream(loss.device))
            self.under_way = _Copy(value, arrived, steps)


def _captures() -> bool:
    """Return whether the script captures a CUDA graph now."""
    return bool(sys.modules["torch"].cuda.is_current_stream_capturing())
