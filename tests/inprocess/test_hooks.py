"""Hooks: their order, their limits, and what becomes of an exception in one."""

from __future__ import annotations

import contextvars
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from holdfast.errors import StopRestarting, UnfitProcess, UsageError
from holdfast.inprocess.composition import compose
from holdfast.inprocess.hooks import (
    FaultCounter,
    Hook,
    Hooks,
    HookState,
    RetryLimits,
    check_device,
    on_thread,
)
from holdfast.messages.records import Raised

STATE = HookState(
    iteration=0,
    rank=1,
    world_size=4,
    active_rank=1,
    active_world_size=4,
    initial_rank=1,
    initial_world_size=4,
    local_rank=1,
)


def state(**changes: object) -> HookState:
    return msgspec.structs.replace(STATE, **changes)


def boom() -> Raised:
    return Raised(type="ValueError", message="boom", where="train.py:3", traceback="")


def noting(log: list[str], name: str) -> Hook:
    return lambda state: log.append(name)


def all_noting(log: list[str]) -> Hooks:
    return Hooks(**{name: noting(log, name) for name in Hooks.__struct_fields__})


# ---- order ----


def test_hooks_run_in_the_documented_order() -> None:
    log: list[str] = []
    hooks = all_noting(log)
    for moment in (hooks.enter, hooks.aborted, hooks.left, hooks.completed, hooks.ended):
        log.append(f"{moment.__name__}:")
        moment(STATE)
    assert log == [
        *("enter:", "initialize", "health_check"),
        *("aborted:", "abort"),
        *("left:", "finalize", "health_check"),
        *("completed:", "completion"),
        *("ended:", "terminate"),
    ]


def test_composed_hooks_run_from_left_to_right_with_the_same_state() -> None:
    seen: list[tuple[str, HookState]] = []
    joined = compose(*(lambda s, name=name: seen.append((name, s)) for name in "abc"))
    Hooks(finalize=joined).left(STATE)
    assert seen == [("a", STATE), ("b", STATE), ("c", STATE)]


def test_what_comes_after_a_hook_that_raises_does_not_run() -> None:
    log: list[str] = []
    hooks = Hooks(initialize=failing(ValueError("no")), health_check=noting(log, "health_check"))
    with pytest.raises(UnfitProcess):
        hooks.enter(STATE)
    assert log == []


def test_no_hooks_do_nothing() -> None:
    Hooks().enter(STATE)
    Hooks().ended(STATE)


# ---- exceptions ----


def failing(error: BaseException) -> Hook:
    def fail(state: HookState) -> None:
        raise error

    return fail


def test_a_hook_that_raises_makes_the_process_unfit_and_is_named() -> None:
    cause = ValueError("disk is full")
    with pytest.raises(UnfitProcess, match="finalize of rank 1 raised ValueError: disk") as caught:
        Hooks(finalize=failing(cause)).left(STATE)
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize(
    "error", [StopRestarting("enough"), UnfitProcess("bad"), KeyboardInterrupt(), SystemExit(3)]
)
def test_an_exception_that_says_what_to_do_passes_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        Hooks(initialize=failing(error)).enter(STATE)
    assert caught.value is error


@pytest.mark.parametrize("name", Hooks.__struct_fields__)
def test_what_is_not_a_function_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}="):
        Hooks(**{name: "print"})  # type: ignore[arg-type]


# ---- retry limits ----


def test_the_limit_of_iterations_counts_entries() -> None:
    limits = RetryLimits(iterations=3)
    for iteration in range(3):
        limits(state(iteration=iteration))
    with pytest.raises(StopRestarting, match=r"3 times.*because rank 2 raised") as caught:
        limits(state(iteration=3, why="rank 2 raised ValueError"))
    assert caught.value.code == 93


@pytest.mark.parametrize(
    "limits", [RetryLimits(min_world=4), RetryLimits(min_active=3), RetryLimits(None, 4, 3)]
)
def test_too_few_ranks_end_the_job_with_try_again(limits: RetryLimits) -> None:
    limits(state(world_size=4, active_world_size=3))
    with pytest.raises(StopRestarting) as caught:
        limits(state(world_size=3, active_world_size=2))
    assert caught.value.code == 75


def test_too_few_ranks_are_worth_trying_again_even_after_too_many_iterations() -> None:
    with pytest.raises(StopRestarting) as caught:
        RetryLimits(iterations=1, min_world=8)(state(iteration=5))
    assert caught.value.code == 75


def test_without_limits_nothing_is_limited() -> None:
    RetryLimits()(state(iteration=10_000, world_size=1, active_world_size=1))


# ---- faults of this process ----


def test_a_process_is_given_up_after_more_faults_than_allowed() -> None:
    counter = FaultCounter(limit=1)
    hooks = Hooks(health_check=counter)
    first = boom()
    hooks.left(state(error=first))
    hooks.enter(state(iteration=1, error=first))
    with pytest.raises(UnfitProcess, match="2 times in the process of rank 1, last ValueError"):
        hooks.left(state(iteration=1, error=boom()))


def test_a_fault_of_another_rank_does_not_count() -> None:
    counter = FaultCounter(limit=0)
    for iteration in range(5):
        counter(state(iteration=iteration, why="rank 2 raised ValueError"))
    assert counter.faults == 0


# ---- limits in time ----


def test_a_hook_on_a_thread_gets_the_state_and_the_callers_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("mine")
    seen: list[object] = []
    on_thread(lambda s: seen.extend([s, variable.get(), threading.current_thread()]), 30)(STATE)
    assert seen[:2] == [STATE, "mine"]
    assert seen[2] is not threading.current_thread()


def test_an_exception_of_a_hook_on_a_thread_is_raised() -> None:
    with pytest.raises(StopRestarting, match="enough"):
        on_thread(failing(StopRestarting("enough")), 30)(STATE)


def test_a_hook_that_takes_too_long_makes_the_process_unfit_at_its_limit() -> None:
    blocked = threading.Event()

    def flush(state: HookState) -> None:
        blocked.wait(60)

    began = time.monotonic()
    with pytest.raises(UnfitProcess, match=r"flush of rank 1 did not end within 0\.05 s"):
        on_thread(flush, 0.05)(STATE)
    assert time.monotonic() - began < 30
    blocked.set()


@pytest.mark.parametrize("seconds", [0, -1, True, "5", float("nan")])
def test_limits_that_are_no_time_are_refused(seconds: float) -> None:
    with pytest.raises(UsageError):
        on_thread(print, seconds)
    with pytest.raises(UsageError):
        check_device(seconds)


@pytest.mark.parametrize(
    "nonsense",
    [
        lambda: RetryLimits(iterations=0),
        lambda: RetryLimits(min_world=-1),
        lambda: FaultCounter(-1),
    ],
)
def test_limits_that_are_no_number_are_refused(nonsense: object) -> None:
    with pytest.raises(UsageError):
        nonsense()  # type: ignore[operator]


# ---- the device ----


def test_the_device_check_neither_imports_torch_nor_creates_a_context() -> None:
    code = """
import sys
from holdfast.inprocess.hooks import HookState, check_device
state = HookState(iteration=0, rank=0, world_size=1, active_rank=0, active_world_size=1,
                  initial_rank=0, initial_world_size=1, local_rank=0)
check_device()(state)
assert "torch" not in sys.modules
import torch
check_device()(state)
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def with_cuda(code: str) -> str:
    """Run code in a process that has used CUDA, with a check of 2 s; return what the check raises."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    script = f"""
import torch
from holdfast.errors import UnfitProcess
from holdfast.inprocess.hooks import HookState, check_device
state = HookState(iteration=0, rank=0, world_size=1, active_rank=0, active_world_size=1,
                  initial_rank=0, initial_world_size=1, local_rank=0)
x = torch.ones(4, device="cuda")
torch.cuda.synchronize()
{code}
try:
    check_device(2)(state)
except UnfitProcess as unfit:
    print(unfit, flush=True)
else:
    print("fit", flush=True)
import os
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=200, capture_output=True, text=True
    )
    return done.stdout


def test_a_device_that_works_passes() -> None:
    assert with_cuda("x.add_(1)") == "fit\n"


def test_an_error_that_sticks_makes_the_process_unfit() -> None:
    said = with_cuda("x[torch.tensor([99], device='cuda')]")
    assert "CUDA device of rank 0 has failed in this process" in said


def test_a_device_that_does_not_answer_makes_the_process_unfit() -> None:
    said = with_cuda("torch.cuda._sleep(2**62)")
    assert "did not finish its work within 2 s" in said
