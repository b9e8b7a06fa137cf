"""What the end of a worker's process means for its rank."""

from __future__ import annotations

import asyncio
import functools
import signal
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.agent.function import FunctionSocket, RestartableFunction
from holdfast.agent.processes import Exit
from holdfast.agent.worker import Worker, Workers
from holdfast.messages.actions import StopWorkers
from holdfast.messages.records import Raised, RankProgress
from holdfast.messages.units import NodeId, Rank, RoundNumber
from holdfast.shm.vital_signs import VITALS_BYTES, Vitals

KILLED = Exit(signal=signal.SIGKILL)
RAISED = Raised(type="ValueError", message="no", where="", traceback="")


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Timers need an event loop that runs."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class FakeProcess:
    """One that lives until the test says how it ended."""

    pid = 1

    def __init__(self, reaction: str) -> None:
        self.exit: Exit | None = None
        self.sent: list[signal.Signals] = []
        self.sent_to_group: list[signal.Signals] = []
        self._reaction = reaction

    def send(self, number: signal.Signals) -> None:
        self.sent.append(number)

    def send_to_group(self, number: signal.Signals) -> None:
        self.sent_to_group.append(number)

    def reaction_to(self, number: signal.Signals) -> str:
        return self._reaction


class FakeRuntime:
    def read_all(self) -> None: ...


class FakeOutput:
    def drain(self) -> None: ...


def worker(
    tmp_path: Path, reaction: str = "handles", runtime: Any = None
) -> tuple[Worker, FakeProcess]:
    process: Any = FakeProcess(reaction)
    output: Any = FakeOutput()
    made = Worker(
        round=RoundNumber(1),
        rank=Rank(0),
        process=process,
        runtime=runtime,
        output=output,
        error_file=tmp_path / "error.json",
        flight=tmp_path / "flight",
    )
    return made, process


@pytest.mark.parametrize("end", [Exit(code=0), Exit(code=3), KILLED])
def test_one_that_nobody_stopped_ended_by_itself(tmp_path: Path, end: Exit) -> None:
    one, _ = worker(tmp_path)
    ending = one.ending(end)
    assert (ending.exit, ending.by_itself, ending.stop_took_s) == (end, True, None)


@in_loop
async def test_a_script_that_ended_has_ended_well_whatever_kills_its_process(
    tmp_path: Path,
) -> None:
    one, _ = worker(tmp_path)
    one.script_ended()
    assert one.ending(KILLED).exit == Exit(code=0)
    one.hear_last_words()


@in_loop
async def test_a_process_whose_script_has_ended_is_killed_on_order_and_has_ended_well(
    tmp_path: Path,
) -> None:
    one, process = worker(tmp_path)
    one.end_process()
    assert process.sent == [], "its script still runs"
    one.script_ended()
    assert process.sent == []
    one.end_process()
    assert process.sent == [signal.SIGKILL]
    ending = one.ending(KILLED)
    assert (ending.exit, ending.by_itself) == (Exit(code=0), True)


@in_loop
async def test_a_script_that_raised_has_failed_whatever_kills_its_process(tmp_path: Path) -> None:
    one, _ = worker(tmp_path)
    one.script_raised(RAISED)
    one.ask_to_stop(30.0)  # Stopped with the others, after it had failed.
    ending = one.ending(KILLED)
    assert (ending.exit, ending.by_itself) == (Exit(code=1), True)
    assert one.raised() == RAISED
    one.hear_last_words()


@pytest.mark.parametrize(
    ("raises", "end", "by_itself", "timed"),
    [
        (False, KILLED, False, False),
        (False, Exit(signal=signal.SIGTERM), False, False),
        (False, Exit(code=0), False, True),
        (False, Exit(code=143), False, True),
        (True, Exit(code=1), True, True),
    ],
)
@in_loop
async def test_one_that_was_stopped_did_not_end_by_itself_unless_it_raised(
    tmp_path: Path, raises: bool, end: Exit, by_itself: bool, timed: bool
) -> None:
    one, _ = worker(tmp_path)
    one.ask_to_stop(30.0)
    if raises:
        one.script_raised(RAISED)
    ending = one.ending(end)
    assert (ending.exit, ending.by_itself) == (end, by_itself)
    assert (ending.stop_took_s is not None) == timed
    one.hear_last_words()


@pytest.mark.parametrize(("minds", "grace_s"), [("ignores", 30.0), ("handles", 0.0)])
@in_loop
async def test_one_that_ignores_sigterm_or_has_no_grace_is_killed_at_once(
    tmp_path: Path, minds: str, grace_s: float
) -> None:
    one, process = worker(tmp_path, minds)
    one.ask_to_stop(grace_s)
    assert process.sent == [signal.SIGKILL]


@in_loop
async def test_one_that_handles_sigterm_is_woken_up_for_it_and_asked_once(tmp_path: Path) -> None:
    one, process = worker(tmp_path, runtime=FakeRuntime())
    one.ask_to_stop(30.0)
    one.ask_to_stop(30.0)
    assert process.sent == [signal.SIGTERM, signal.SIGCONT]
    one.hear_last_words()


@in_loop
async def test_a_command_is_asked_with_all_of_its_group(tmp_path: Path) -> None:
    one, process = worker(tmp_path)
    one.ask_to_stop(30.0)
    assert (process.sent, process.sent_to_group) == ([], [signal.SIGTERM, signal.SIGCONT])
    one.hear_last_words()


@in_loop
async def test_one_that_dies_of_the_users_own_signal_did_not_end_by_itself(tmp_path: Path) -> None:
    one, process = worker(tmp_path, runtime=FakeRuntime())
    one.ask_to_stop(30.0, signal.SIGINT)
    assert process.sent == [signal.SIGINT, signal.SIGCONT]
    assert not one.ending(Exit(signal=signal.SIGINT)).by_itself
    one.hear_last_words()


# ---- the lease on the round ----------------------------------------------------------------------


class FakeLeased(FakeRuntime):
    """A worker with a page, in which the end of its lease is noted."""

    def __init__(self) -> None:
        self.page = SimpleNamespace(vitals=Vitals(memoryview(bytearray(VITALS_BYTES))))

    def may_run(self, at: float) -> bool:
        return not self.page.vitals.lease_is_over(at)


def leased(tmp_path: Path, rank: int) -> tuple[Worker, FakeProcess, FakeLeased]:
    runtime = FakeLeased()
    made, process = worker(tmp_path, runtime=runtime)
    made.rank = Rank(rank)
    return made, process, runtime


def test_a_pause_stops_a_worker_and_its_children_and_going_on_continues_them(
    tmp_path: Path,
) -> None:
    here = Workers()
    one, process, _ = leased(tmp_path, 0)
    here.add(one)
    here.pause()
    here.go_on()
    assert process.sent == process.sent_to_group == [signal.SIGSTOP, signal.SIGCONT]


def test_a_worker_that_starts_under_a_lease_has_it_in_its_page(tmp_path: Path) -> None:
    here = Workers()
    one, _, there = leased(tmp_path, 0)
    here.add(one)
    assert there.may_run(1e9), "no lease has been told of"
    here.lent_until(50.0)
    other, process, later = leased(tmp_path, 1)
    here.add(other)
    for runtime in (there, later):
        assert runtime.may_run(50.0)
        assert not runtime.may_run(50.1)
    assert process.sent == []


def test_a_worker_that_starts_while_the_ranks_are_paused_is_paused_too(tmp_path: Path) -> None:
    here = Workers()
    here.pause()
    one, process, _ = leased(tmp_path, 0)
    here.add(one)
    assert process.sent == [signal.SIGSTOP]
    here.go_on()
    other, second, _ = leased(tmp_path, 1)
    here.add(other)
    assert second.sent == []


@in_loop
async def test_paused_workers_that_are_asked_to_stop_may_save_first(tmp_path: Path) -> None:
    here = Workers()
    one, process, runtime = leased(tmp_path, 0)
    here.add(one)
    here.lent_until(50.0)
    here.pause()
    here.ask_to_stop(5.0, signal.SIGTERM)
    assert process.sent == [signal.SIGSTOP, signal.SIGCONT, signal.SIGTERM, signal.SIGCONT]
    assert runtime.may_run(1e9), "it would stop itself while it saves"
    one.hear_last_words()


@in_loop
async def test_paused_workers_that_get_no_grace_never_run_again(tmp_path: Path) -> None:
    here = Workers()
    one, process, runtime = leased(tmp_path, 0)
    here.add(one)
    here.lent_until(50.0)
    here.pause()
    here.ask_to_stop(0.0, signal.SIGTERM)
    assert process.sent == [signal.SIGSTOP, signal.SIGKILL]
    assert not runtime.may_run(50.1)


def test_a_command_without_our_runtime_is_paused_as_well(tmp_path: Path) -> None:
    here = Workers()
    made, process = worker(tmp_path)
    here.add(made)
    here.lent_until(50.0)
    here.pause()
    assert process.sent == [signal.SIGSTOP]


# ---- those that run a restartable function ----


def restartable(tmp_path: Path, rank: int) -> tuple[Worker, FakeProcess, FakeLeased, socket.socket]:
    """A worker in its function, and the end of the socket on which it hears the agent."""
    made, process, runtime = leased(tmp_path, rank)
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.local_rank = rank
    runtime.function = RestartableFunction(FunctionSocket(theirs.detach()))  # type: ignore[attr-defined]
    return made, process, runtime, ours


def stop(**more: Any) -> StopWorkers:
    return StopWorkers(
        node=NodeId("n"), round=RoundNumber(1), grace_s=5.0, why="a fault", leave_s=1.0, **more
    )


def park(workers: Workers, one: Worker) -> None:
    assert one.function is not None
    one.function.raised()
    one.function.left()
    workers.park(one, RankProgress(rank=one.rank))


@in_loop
async def test_a_parked_worker_has_no_lease_that_could_end(tmp_path: Path) -> None:
    workers = Workers()
    one, _, runtime, _ = restartable(tmp_path, 0)
    workers.add(one)
    workers.lent_until(100.0)
    assert not runtime.may_run(101.0)
    park(workers, one)
    assert runtime.may_run(101.0)
    workers.lent_until(200.0)
    workers.add(one)
    assert not runtime.may_run(201.0)


@in_loop
async def test_a_paused_worker_goes_on_to_leave_its_function(tmp_path: Path) -> None:
    workers = Workers()
    one, process, runtime, heard = restartable(tmp_path, 0)
    workers.add(one)
    workers.lent_until(100.0)
    workers.pause()
    assert workers.leave(stop()) == []
    assert process.sent[-1] == signal.SIGCONT
    assert runtime.may_run(101.0)
    assert heard.recv(1 << 16)


@in_loop
async def test_a_worker_to_be_replaced_is_killed_though_it_has_left_its_function(
    tmp_path: Path,
) -> None:
    workers = Workers()
    unfit, killed, _, _ = restartable(tmp_path, 0)
    other, left_alone, _, _ = restartable(tmp_path, 1)
    workers.add(unfit)
    workers.add(other)
    park(workers, unfit)
    park(workers, other)
    assert workers.leave(stop(replace=(Rank(0),))) == []
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert killed.sent == [signal.SIGKILL]
    assert left_alone.sent == []
    assert list(workers.running) == [Rank(0)]
    assert [one.rank for one in workers.ended] == [Rank(1)]


@in_loop
async def test_an_atomic_section_is_finished_however_much_the_others_hurry(tmp_path: Path) -> None:
    workers = Workers()
    saving, left_alone, _, _ = restartable(tmp_path, 0)
    late, killed, _, _ = restartable(tmp_path, 1)
    workers.add(saving)
    workers.add(late)
    workers.leave(stop())
    saving.postponed()
    assert not workers.hurry(), "not all of them were killed"
    assert (left_alone.sent, killed.sent) == ([], [signal.SIGKILL])
    assert saving.function is not None
    saving.function.left()
    workers.park(saving, RankProgress(rank=saving.rank))
    assert workers.hurry()
