"""Rehearses a training step, so that a rank's first one is not slow.

What torch needs for a step it imports and loads only when it is asked to: the first optimizer step
imports more, the first backward pass starts threads. The nursery takes optimizer steps with handmade
gradients, which imports every module and starts no thread, and leaves the accelerators alone: torch is
shown none. A standby then takes a whole step with a backward pass, or without one where there are GPUs,
as that would allocate memory on them. A standby that may hold a GPU takes another one there
(`holdfast.worker.device_rehearsal`).

The script must not notice: random generators, environment and warning filters are restored.
"""

from __future__ import annotations

import glob
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.worker import deferred_compiler

log = logging.getLogger("holdfast.worker")


def import_and_rehearse(script: str, compiles: bool) -> None:
    """Import torch and all that a first step imports: without its compiler, if the script seems to do
    without and is not known to need it."""
    import torch
    import torch.distributed
    import torch.nn.parallel
    import torch.utils.data

    if not compiles and not _seems_to_compile(script) and not deferred_compiler.defer():
        log.info("torch %s: its compiler is imported, though nothing uses it", torch.__version__)
    _train(torch, backward=False)


def _seems_to_compile(script: str) -> bool:
    try:
        return deferred_compiler.seems_to_compile(Path(script).read_bytes())
    except OSError:  # A module: what it imports is not known.
        return True


def rehearse() -> None:
    """Take tiny training steps in this process, a standby."""
    if "torch" in sys.modules:
        _train(sys.modules["torch"], backward=not glob.glob("/dev/nvidia[0-9]*"))


def _train(torch: Any, backward: bool) -> None:
    with unnoticed(torch), _without_devices(torch):
        model = torch.nn.Linear(4, 4)
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            optimizer = kind(model.parameters(), lr=0.0)
            loss = model(torch.zeros(2, 4)).sum()
            if backward:
                loss.backward()
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()


def reseed() -> None:
    """Give a forked process the fresh random state that a new process would have had.

    Python's own generator reseeds itself, and an accelerator's gets its seed in the process that first
    uses it.
    """
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


@contextmanager
def unnoticed(torch: Any) -> Iterator[None]:
    """Restore everything that a script could notice of a step, whatever device it was taken on."""
    state, environ = torch.get_rng_state(), dict(os.environ)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)
        torch.set_rng_state(state)


@contextmanager
def _without_devices(torch: Any) -> Iterator[None]:
    """Hide accelerators from torch."""
    cuda = torch.cuda
    asked = cuda.is_available, cuda.device_count
    cuda.is_available, cuda.device_count = (lambda: False), (lambda: 0)
    try:
        yield
    finally:
        cuda.is_available, cuda.device_count = asked
