"""A script cannot tell that its process has rehearsed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.worker.device_rehearsal import PIECES

Script = Callable[..., str]

STATE = """
import os, sys, warnings
import torch
from holdfast.worker import device_rehearsal, rehearsal

def state():
    return (
        torch.get_rng_state().tolist(),
        dict(os.environ),
        list(warnings.filters),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        torch.cuda.is_initialized(),
        torch.cuda.device_count(),
    )

before = state()
"""


def test_a_rehearsal_in_a_standby_leaves_no_trace(with_torch: Script) -> None:
    with_torch(STATE, "rehearsal.rehearse()", "assert state() == before")


def test_what_a_rehearsal_sets_is_taken_back(with_torch: Script) -> None:
    script = """
    with rehearsal.unnoticed(torch):
        torch.rand(3)
        os.environ["NEW"] = "1"
        os.environ["PATH"] = ""
        warnings.simplefilter("error")
    assert state() == before
    """
    with_torch(STATE, script)


@pytest.mark.parametrize("piece", [piece.__name__ for piece in PIECES])
def test_each_piece_of_a_step_on_a_device_can_be_rehearsed_and_leaves_no_trace(
    with_torch: Script, piece: str
) -> None:
    script = f"""
    with rehearsal.unnoticed(torch):
        device_rehearsal.{piece}(torch, "cpu")
    assert state() == before
    """
    with_torch(STATE, script)


def test_a_rehearsed_process_starts_from_a_fresh_random_state(with_torch: Script) -> None:
    script = """
    rehearsal.reseed()
    assert state()[0] != before[0]
    """
    with_torch(STATE, script)
