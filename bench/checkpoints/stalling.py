"""For how long a save holds training up, beside `torch.distributed.checkpoint.async_save`.

The state is a model with its AdamW after a step. What is counted is the time until the call returns;
what the rest of the copy costs the next step is another measure (`overlapping`).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from checkpoints import fresh, states
from checkpoints.contestants import Holdfast, Torch, Writer
from checkpoints.lines import Line, Seconds, medians, milliseconds
from checkpoints.saving import BOTH_IMAGES, TENSORS
from checkpoints.setting import Setting
from checkpoints.timing import alternate

GOAL = 0.2


def measure(told: dict[str, Any]) -> list[dict[str, Any]]:
    """In two processes: with all contestants in one there would be too many copies of the state."""
    guarded = fresh.call("checkpoints.stalling:guarded", told)
    plain = fresh.call("checkpoints.stalling:plain", told)
    names = {
        "Checkpointer.save": (guarded, "save"),
        "AsyncWriter.save with optimizers": (guarded, "writer"),
        "AsyncWriter.save": (plain, "writer"),
    }
    return [asdict(_line(name, *where)) for name, where in names.items()]


def _line(name: str, samples: dict[str, list[Seconds]], ours: str) -> Line:
    found = medians(samples)
    judged = name != "AsyncWriter.save"  # It copies all before it returns, as async_save does.
    return Line(
        f"stall of {name}, of async_save's",
        found[ours] / found["async_save"],
        "x",
        at_most=GOAL if judged else None,
        torchs=1.0,
        seen=f"{milliseconds(found[ours])}, async_save {milliseconds(found['async_save'])}",
        samples=samples,
    )


def guarded(told: dict[str, Any]) -> dict[str, list[Seconds]]:
    """Contestants that know the optimizer, and so what it alone changes."""
    setting = Setting(**told)
    model, optimizer = states.trained(setting.size, TENSORS)
    state = {"model": model, "optim": optimizer}
    saving = Holdfast(state)
    states.step(optimizer)
    writer = Writer(state, setting.on_disk, [optimizer])
    contestants = {
        "save": saving.overlap,
        "writer": writer.save,
        "async_save": Torch(state, setting.in_memory).async_save,
    }
    samples = alternate(setting.tries, contestants, warm=BOTH_IMAGES)
    writer.close()
    return samples


def plain(told: dict[str, Any]) -> dict[str, list[Seconds]]:
    """The writer in the place of `async_save`, with nothing else said."""
    setting = Setting(**told)
    model, optimizer = states.trained(setting.size, TENSORS)
    state = {"model": model, "optim": optimizer}
    states.step(optimizer)
    writer = Writer(state, setting.on_disk, [])
    contestants = {
        "writer": writer.save,
        "async_save": Torch(state, setting.in_memory).async_save,
    }
    samples = alternate(setting.tries, contestants, warm=BOTH_IMAGES)
    writer.close()
    return samples
