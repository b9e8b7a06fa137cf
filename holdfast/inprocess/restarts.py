"""The decorator that makes a function restartable, and the loop that enters and leaves it.

    entry ─▶ initialize, health_check ─▶ the function ─┬─ returned on all ranks ─▶ completion
                                                       │
    next() ◀─ left() ◀─ health_check ◀─ finalize ◀─ abort (raised, or told to leave)

Two threads take part: the one that called the function, and the link's, which calls `_told_to_leave`
when the round breaks. Either may be the first to abort the process groups; the other waits for it.
See `docs/inprocess.md`.
"""

from __future__ import annotations

import functools
import gc
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast.diagnosis.exceptions import describe
from holdfast.errors import FencedError, StateLost, StopRestarting, UnfitProcess, UsageError
from holdfast.inprocess import groups, link
from holdfast.inprocess.assignment.members import Assignment, Member, assign_ranks, with_gone
from holdfast.inprocess.context import Context, wants_context
from holdfast.inprocess.hooks import Hook, Hooks, HookState, check_device
from holdfast.inprocess.kept import registry
from holdfast.inprocess.leaving import Departure, InterruptibleCall
from holdfast.inprocess.link import RoundEntry, RoundLink
from holdfast.inprocess.torchrun import TorchrunLink
from holdfast.inprocess.zones import install_zones
from holdfast.messages.broken_collectives import is_broken_collective
from holdfast.messages.exits import EXIT_TRY_AGAIN
from holdfast.messages.records import Raised

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

SETTLE_S: Final = 24 * 3600.0
"""How long process groups are left alone for an atomic section; the agent's limit is shorter."""
ABORT_AGAIN_S: Final = 0.05
LONGEST_PAUSE_S: Final = 0.5


def restartable(
    *,
    initialize: Hook | None = None,
    abort: Hook | None = None,
    finalize: Hook | None = None,
    health_check: Hook | None = None,
    completion: Hook | None = None,
    terminate: Hook | None = None,
    assign: Assignment | None = None,
    enabled: bool = True,
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Make a function restartable: when a rank fails, all ranks leave it and enter it again.

    The function makes its process groups itself, each time it is entered, and gets the same arguments
    each time. A parameter annotated with `Context` gets one. It returns what the function returned on
    the last entry, and None on a rank that was kept in reserve.

    - `initialize`, `health_check`: called before each entry, in this order.
    - `abort`: called by another thread when the function is to be left, after the process groups
      were aborted; what else may block the function's thread can be ended here.
    - `finalize`: called when the function has been left; then `health_check` is called again.
    - `completion`: called once the function has returned on all ranks.
    - `terminate`: called if this process will not enter the function again.
    - `assign`: which ranks of a round are active, and under which numbers: see
      `holdfast.inprocess.assignment`.
    - `enabled`: False calls the function as it is.

    A process has one restartable function at a time, and calls it once.
    """
    hooks = Hooks(
        initialize=initialize,
        abort=abort,
        finalize=finalize,
        health_check=health_check,
        completion=completion,
        terminate=terminate,
    )

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        if not enabled:
            return function

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
            found: R | None = Restarts(function, hooks, assign).run(args, kwargs)
            return found

        return call

    return decorate


class _Process:
    """Whether this process has called a restartable function."""

    called = False


def _has_groups() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


class Restarts:
    """One call of a restartable function: all its entries in this process."""

    def __init__(
        self, function: Callable[..., Any], hooks: Hooks, assign: Assignment | None
    ) -> None:
        self._function = function
        self._hooks = hooks
        self._assign = assign
        self._context_name = wants_context(function)
        self._call = InterruptibleCall()
        self._link: RoundLink = link.current() or TorchrunLink()
        self._aborting = threading.Lock()
        self._aborted = False
        self._departed = threading.Event()
        """Set when the present entry is over, however it ended."""
        self._unfit: StopRestarting | UnfitProcess | None = None
        """What the hook `abort` raised."""
        self._iteration = 0
        self._left_by: BaseException | None = None
        """What ended the function; its frames hold what the function made."""
        self._error: Raised | None = None
        """What the function raised here in the entry before."""
        self._unprinted: Raised | None = None
        """The same, if another rank's fault may have caused it."""
        self._members: tuple[Member, ...] = ()
        """All of the round before."""
        self._active: int | None = None
        """The number that this rank had in the entry before, if it was active."""
        self._state: HookState
        self._first: RoundEntry

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._refuse_misuse()
        try:
            groups.watch()
        except ImportError:
            pass  # Without torch there are no process groups.
        install_zones(self._call)
        try:
            return self._enter_until_returned(args, kwargs)
        except StopRestarting as stop:
            self._terminate()
            self._link.stop(stop.reason, stop.code)
            raise SystemExit(stop.code) from None
        except UnfitProcess:
            self._terminate()
            raise

    def _enter_until_returned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._first = self._link.open(self._told_to_leave)
        entry: RoundEntry | None = self._first
        while entry is not None:
            self._begin(entry)
            returned, result = self._enter(entry, args, kwargs)
            if returned:
                self._end()
                self._hooks.completed(self._state)
                return result
            self._depart()
            self._link.left()
            self._call.renew()
            self._aborted = False
            self._departed = threading.Event()
            gc.collect()  # While the next round is agreed on: models and groups are in cycles.
            entry = self._link.next()
            if entry is None or entry.why.startswith(f"rank {self._state.rank} "):
                self._print_unprinted()
            self._unprinted = None
            self._iteration += 1
        self._terminate()
        raise SystemExit(EXIT_TRY_AGAIN)

    def _refuse_misuse(self) -> None:
        if _Process.called:
            raise UsageError(
                "a process calls one restartable function, once: put what comes after it into the"
                " function too, or after its end"
            )
        if _has_groups():
            raise UsageError(
                f"{self._function.__qualname__} is restartable, so it makes its process groups itself,"
                " each time it is entered: move init_process_group into it"
            )
        _Process.called = True

    # ---- an entry ----

    def _begin(self, entry: RoundEntry) -> None:
        self._state = HookState(
            iteration=self._iteration,
            rank=entry.rank,
            world_size=entry.world_size,
            active_rank=entry.rank,
            active_world_size=entry.world_size,
            initial_rank=self._first.rank,
            initial_world_size=self._first.world_size,
            local_rank=entry.local_rank,
            why=entry.why,
            error=self._error,
        )
        self._error = None

    def _place(self, entry: RoundEntry) -> int | None:
        """Return this rank's number among the active ones; None if it is in reserve."""
        if self._assign is None:
            return entry.rank
        own = Member(
            rank=entry.rank,
            host=socket.gethostname(),
            node_rank=entry.node_rank,
            local_rank=entry.local_rank,
            previous=self._active,
        )
        told = self._gather("members", (own, bool(self._members)), tuple[Member, bool])
        known_by = next((member.rank for member, knows in told if knows), None)
        before: tuple[Member, ...] = ()
        if known_by is not None:  # Of those that were there, one tells the newcomers who else was.
            mine = self._members if known_by == entry.rank else ()
            before = self._gather("before", mine, tuple[Member, ...])[known_by]
        self._members = assign_ranks(with_gone([m for m, _ in told], before), self._assign)
        active = self._members[entry.rank].active
        size = sum(one.active is not None for one in self._members)
        self._state = replace(self._state, active_rank=active, active_world_size=size)
        self._active = active
        if any(one.active != one.rank for one in self._members):
            os.environ["WORLD_SIZE"] = str(size)
            os.environ["RANK"] = str(entry.rank if active is None else active)
            self._link.serve_store()
        return active

    def _gather(self, name: str, value: T, kind: Any) -> list[T]:
        """Exchange values between all ranks of the round."""
        found = self._link.gather(name, msgspec.msgpack.encode(value))
        return [msgspec.msgpack.decode(one, type=kind) for one in found]

    def _enter(
        self, entry: RoundEntry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """Run the function; return whether it has returned on all ranks, and what it returned."""
        try:
            active = self._place(entry)
        except FencedError:  # The round broke before all had come.
            return False, None
        self._hooks.enter(self._state)
        if self._context_name is not None:
            context = Context(self._iteration, entry, self._call, self._link)
            kwargs = {self._context_name: context, **kwargs}
        result = None
        try:
            if active is not None:
                result = self._call.run(self._function, *args, **kwargs)
        except Departure as departure:
            self._left_by = departure
            return False, None
        except (StopRestarting, UnfitProcess):
            raise
        except StateLost as error:
            raise StopRestarting(str(error)) from error
        except Exception as error:
            self._left_by = error
            self._raised(error)
            return False, None
        return self._link.returned(), result

    def _raised(self, error: Exception) -> None:
        """Report what the function raised, unless that is the consequence of being told to leave.

        A rank's end breaks the collectives of all others, each of which would print a traceback that
        says nothing. One that broke a collective is printed only if nothing else is to blame.
        """
        if self._call.leaving is None:
            raised = describe(error)
            self._unprinted = self._error = raised
            if not is_broken_collective(raised):
                self._print_unprinted()
            self._link.raised(raised)

    def _print_unprinted(self) -> None:
        if self._unprinted is not None:
            print(self._unprinted.traceback, end="", file=sys.stderr, flush=True)
        self._unprinted = None

    # ---- leaving ----

    def _told_to_leave(self, why: str) -> None:
        """Make the function's thread leave; called by the link's thread."""
        self._call.leave(why)
        if self._call.in_atomic:
            self._link.postponed()
        self._call.settle(SETTLE_S)
        self._abort()
        again = threading.Thread(
            target=self._abort_again, args=[self._departed], name="holdfast-abort", daemon=True
        )
        again.start()

    def _abort_again(self, departed: threading.Event) -> None:
        """End the waits that the function's thread began since: in the middle of torch's code it goes
        on to the next connection, and no exception reaches it there."""
        pause_s = ABORT_AGAIN_S
        while not departed.wait(pause_s):
            with self._aborting:
                if not departed.is_set():
                    groups.abort_groups()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _abort(self) -> None:
        with self._aborting:
            if not self._aborted:
                self._aborted = True
                groups.abort_groups()
                try:
                    self._hooks.aborted(self._state)
                except (StopRestarting, UnfitProcess) as error:
                    self._unfit = error  # For the function's thread, which acts on it.

    def _depart(self) -> None:
        self._abort()
        with self._aborting:
            self._departed.set()
        if self._unfit is not None:
            raise self._unfit
        registry.function_left()
        groups.forget_groups(self._left_by)
        self._left_by = None
        self._hooks.left(self._state)
        check_device()(self._state)

    def _end(self) -> None:
        """Let go of the function: it is not entered again."""
        registry.forget()
        install_zones(None)
        groups.unwatch()
        self._link.close()

    def _terminate(self) -> None:
        self._print_unprinted()
        self._end()
        self._hooks.ended(self._state)
