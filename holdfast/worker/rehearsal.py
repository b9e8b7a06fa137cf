"""What a standby does before it is needed, so that a rank's first step costs milliseconds.

Importing torch is not enough: the first optimizer step imports as much again. The nursery therefore
takes a forward pass and optimizer steps with gradients made by hand, which brings in every module but
starts no thread and touches no accelerator, so that it can fork safely afterwards: a process forked
from one that has so much as counted its GPUs cannot use them. While it rehearses there seem to be
none, and afterwards `can_fork` makes sure. A standby then takes a whole step, with a backward pass, in
its own process; where there are GPUs without the backward pass, which would take memory on them.

Nothing of it may be seen by the script: what it changes in the process (random generators, the
environment, filters of warnings) is put back as it was.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("holdfast.worker")


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def preload(modules: Sequence[str]) -> None:
    """Import torch with all that training needs, and the modules the user named."""
    if has_torch():
        try:
            _rehearse_without_backward()
        except Exception:  # Whatever torch is like here, a standby is only a head start.
            log.exception("torch cannot be rehearsed; standbys start cold")
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # The user's own module: the rank will show the error where it belongs.
            log.exception("--preload %s cannot be imported; standbys go without it", name)


def _rehearse_without_backward() -> None:
    import torch
    import torch.distributed
    import torch.nn.parallel
    import torch.utils.data

    with _nothing_changed(torch), _no_accelerator(torch):
        model = torch.nn.Linear(4, 4)
        model(torch.zeros(2, 4))
        parameters = list(model.parameters())
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(parameters, lr=0.0, momentum=0.9),
            torch.optim.AdamW(parameters, lr=0.0),
        ]
        for optimizer in optimizers:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()


def rehearse() -> None:
    """One whole tiny training step in this process."""
    if "torch" not in sys.modules:
        return
    import torch

    with _nothing_changed(torch), _no_accelerator(torch):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loss = model(torch.zeros(2, 4)).sum()
        if not glob.glob("/dev/nvidia[0-9]*"):
            loss.backward()
        optimizer.step()


def can_fork() -> bool:
    """Whether processes forked from this one can use accelerators. Only one of them can tell."""
    torch = sys.modules.get("torch")
    if torch is None:
        return True
    pid = os.fork()
    if pid == 0:
        os._exit(1 if torch.cuda._is_in_bad_fork() else 0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


@contextmanager
def _nothing_changed(torch: Any) -> Iterator[None]:
    with _random_state_kept(torch), _environment_kept(), warnings.catch_warnings():
        yield


@contextmanager
def _no_accelerator(torch: Any) -> Iterator[None]:
    """Let torch believe that there is none: even asking how many there are would spoil forking."""
    kept = torch.cuda.is_available, torch.cuda.device_count
    torch.cuda.is_available, torch.cuda.device_count = (lambda: False), (lambda: 0)
    try:
        yield
    finally:
        torch.cuda.is_available, torch.cuda.device_count = kept


@contextmanager
def _random_state_kept(torch: Any) -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextmanager
def _environment_kept() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def reseed() -> None:
    """Give a forked process the fresh random state that a new process would have had.

    Python's own generator does that by itself. Of torch's only the one of the CPU starts out with a
    seed by chance; those of accelerators have the same in every process.
    """
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
