"""Runs the user's code around the entries of a restartable function.

The order of one entry, from its beginning to the next:

    enter     initialize, health_check     the world is known, the function not yet entered
    aborted   abort                        in the watcher thread: groups are aborted
    left      finalize, health_check       the function was left, or has raised by itself
    completed completion                   instead of the two above: all ranks have returned
    ended     terminate                    once: this process does not enter again

A hook that raises ends the process, and another takes its place. So every exception becomes
`UnfitProcess`, except `StopRestarting`, which ends the job. `terminate` also runs then.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from holdfast.errors import StopRestarting, UnfitProcess, UsageError
from holdfast.inprocess.arguments import require_count, require_seconds
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE, EXIT_TRY_AGAIN
from holdfast.messages.records import Raised


class HookState(Struct, frozen=True, kw_only=True):
    """Where a process stands when a hook is called."""

    iteration: int
    """Entries of this process before this one."""
    rank: int
    """Rank in the round."""
    world_size: int
    """Ranks of the round."""
    active_rank: int | None
    """Number under which this process enters; None in reserve."""
    active_world_size: int
    """Ranks that enter the function."""
    initial_rank: int
    """Rank in the first entry of this process."""
    initial_world_size: int
    """Ranks of the round then."""
    local_rank: int
    """Rank within the node."""
    why: str = ""
    """What ended the last entry; empty before the first one has ended."""
    error: Raised | None = None
    """The exception with which this process itself ended its last entry."""


Hook = Callable[[HookState], None]


class Hooks(Struct, frozen=True, kw_only=True):
    """The six hooks of a restartable function."""

    initialize: Hook | None = None
    health_check: Hook | None = None
    abort: Hook | None = None
    finalize: Hook | None = None
    completion: Hook | None = None
    terminate: Hook | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            hook = getattr(self, name)
            if hook is not None and not callable(hook):
                raise UsageError(
                    f"the hook {name}= must be a function of a HookState, not {hook!r}"
                )

    def enter(self, state: HookState) -> None:
        """Run what comes before an entry."""
        self._run("initialize", state)
        self._run("health_check", state)

    def aborted(self, state: HookState) -> None:
        """Run what comes after the process groups were aborted. For the watcher thread."""
        self._run("abort", state)

    def left(self, state: HookState) -> None:
        """Run what comes after the function was left."""
        self._run("finalize", state)
        self._run("health_check", state)

    def completed(self, state: HookState) -> None:
        """Run what comes after all ranks have returned."""
        self._run("completion", state)

    def ended(self, state: HookState) -> None:
        """Run what comes when this process will not enter again."""
        self._run("terminate", state)

    def _run(self, name: str, state: HookState) -> None:
        hook: Hook | None = getattr(self, name)
        if hook is None:
            return
        try:
            hook(state)
        except (StopRestarting, UnfitProcess):
            raise
        except Exception as error:  # A callback of the user's may raise anything.
            raise UnfitProcess(
                f"the hook {name} of rank {state.rank} raised {type(error).__name__}: {error}; "
                "this process does not enter the function again"
            ) from error


class RetryLimits(Struct, frozen=True):
    """Limits beyond which the job ends instead of entering again; a hook for `initialize`.

    - `iterations`: most entries of one process, the first included.
    - `min_world`: fewest ranks of a round.
    - `min_active`: fewest ranks that are not in reserve.
    """

    iterations: int | None = None
    min_world: int | None = None
    min_active: int | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            limit = getattr(self, name)
            if limit is not None:
                require_count("RetryLimits", name, limit)

    def __call__(self, state: HookState) -> None:
        _require_ranks("ranks in the round", state.world_size, self.min_world)
        _require_ranks("active ranks", state.active_world_size, self.min_active)
        if self.iterations is not None and state.iteration >= self.iterations:
            after = f"; the last entry ended because {state.why}" if state.why else ""
            raise StopRestarting(
                f"rank {state.rank} has entered the function {state.iteration} times, "
                f"and RetryLimits allows {self.iterations}{after}",
                code=EXIT_DO_NOT_REQUEUE,
            )


def _require_ranks(what: str, there: int, least: int | None) -> None:
    if least is not None and there < least:
        raise StopRestarting(
            f"there are {there} {what}, and RetryLimits needs {least}", code=EXIT_TRY_AGAIN
        )


class FaultCounter:
    """A health check that gives a process up after more than `limit` exceptions of its own.

    A fault of another rank, which made this one leave, does not count.
    """

    def __init__(self, limit: int) -> None:
        require_count("FaultCounter", "limit", limit, least=0)
        self.limit = limit
        self.faults = 0
        self._last: Raised | None = None

    def __call__(self, state: HookState) -> None:
        # A health check runs twice between two entries, and sees the same exception both times.
        if state.error is not None and state.error is not self._last:
            self.faults += 1
        self._last = state.error
        if self.faults > self.limit:
            last = f", last {state.error.type}" if state.error is not None else ""
            raise UnfitProcess(
                f"the function raised {self.faults} times in the process of rank {state.rank}{last}; "
                f"FaultCounter allows {self.limit}"
            )


def on_thread(hook: Hook, limit_s: float) -> Hook:
    """Run a `hook` in a thread of its own, and raise if it takes longer than `limit_s` seconds.

    A thread cannot be ended, so the process is given up, and the thread with it.
    """
    require_seconds("on_thread", limit_s)

    def run(state: HookState) -> None:
        name = getattr(hook, "__qualname__", type(hook).__name__)
        if not call_within(limit_s, f"holdfast hook {name}", lambda: hook(state)):
            raise UnfitProcess(
                f"the hook {name} of rank {state.rank} did not end within {limit_s:g} s; "
                "this process does not enter the function again"
            )

    return run


def check_device(limit_s: float = 30.0) -> Hook:
    """Return a health check that waits for the CUDA device of this process, at most `limit_s` seconds.

    A CUDA error that sticks, and a device that does not answer, belong to the process. Without torch,
    and in a process that has not used CUDA, it does nothing: it never creates a context.
    """
    require_seconds("check_device", limit_s)

    def check(state: HookState) -> None:
        cuda = _cuda_in_use()
        if cuda is None:
            return
        try:
            device = cuda.current_device()  # The current device is each thread's own.
            ended = call_within(limit_s, "holdfast device check", lambda: cuda.synchronize(device))
        except RuntimeError as error:  # Torch's for every error of CUDA.
            first = str(error).partition("\n")[0]
            raise UnfitProcess(
                f"the CUDA device of rank {state.rank} has failed in this process: {first}"
            ) from error
        if not ended:
            raise UnfitProcess(
                f"CUDA device {device} of rank {state.rank} did not finish its work "
                f"within {limit_s:g} s"
            )

    return check


def _cuda_in_use() -> Any:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def call_within(limit_s: float, name: str, call: Callable[[], object]) -> bool:
    """Call in a daemon thread; raise what it raises, and return whether it ended in time."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            context.run(call)
        except BaseException as error:  # It is raised in the calling thread, whatever it is.
            raised.append(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        return False
    if raised:
        raise raised[0]
    return True
