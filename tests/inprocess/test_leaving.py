"""A thread leaves the function that it runs, and only that."""

from __future__ import annotations

import importlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from yardstick import cost_in_calls

from holdfast import proc
from holdfast.inprocess.leaving import Departure, InterruptibleCall

LONG_S = 30.0
"""How long the waits in here take when nobody is freed from them."""
SOON_S = LONG_S / 2
"""Far more than leaving takes on the busiest machine."""

Body = Callable[[], object]


@contextmanager
def leaving(
    call: InterruptibleCall, after: threading.Event, why: str = "a rank died"
) -> Iterator[None]:
    """Have another thread call `leave` once the event is set."""

    def watch() -> None:
        after.wait(LONG_S)
        call.leave(why)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        after.set()
        watcher.join()


def in_main(body: Body) -> object:
    return body()


def in_other(body: Body) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(body).result()


@pytest.fixture(params=[in_main, in_other])
def runner(request: pytest.FixtureRequest) -> Callable[[Body], object]:
    """Runs something in the main thread, or in another one."""
    run: Callable[[Body], object] = request.param
    return run


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Lets threads take turns a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 100)
    yield
    sys.setswitchinterval(before)


def spin(entered: threading.Event | None = None) -> None:
    """Run bytecode for a long time."""
    if entered is not None:
        entered.set()
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        pass
    raise AssertionError("it was not left")


def departed(call: InterruptibleCall, function: Body) -> Departure:
    with pytest.raises(Departure) as raised:
        call.run(function)
    return raised.value


def test_what_the_function_returns_and_raises_is_passed_on(
    runner: Callable[[Body], object],
) -> None:
    call = InterruptibleCall()
    assert runner(lambda: call.run(lambda one, two: one - two, 5, two=3)) == 2
    with pytest.raises(ZeroDivisionError):
        runner(lambda: call.run(lambda: 1 / 0))
    assert call.leaving is None
    assert not call.torn


def test_a_busy_function_is_left_with_the_reason(runner: Callable[[Body], object]) -> None:
    call, entered = InterruptibleCall(), threading.Event()
    with leaving(call, entered):
        departure = runner(lambda: departed(call, lambda: spin(entered)))
    assert isinstance(departure, Departure)
    assert departure.why == "a rank died"
    assert call.leaving == "a rank died"


def sleeping() -> None:
    time.sleep(LONG_S)


def locking() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def queueing() -> None:
    queue.Queue[int]().get()


def awaiting_an_event() -> None:
    threading.Event().wait()


def receiving() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.recv(1)


def selecting() -> None:
    one, other = socket.socketpair()
    with one, other:
        select.select([one], [], [])


def awaiting_a_process() -> None:
    with subprocess.Popen(["sleep", str(LONG_S)]) as child:
        try:
            child.wait()
        finally:
            child.kill()


@pytest.mark.parametrize(
    "wait",
    [sleeping, locking, queueing, awaiting_an_event, receiving, selecting, awaiting_a_process],
)
def test_the_main_thread_is_freed_from_what_it_waits_for(wait: Body) -> None:
    call, entered = InterruptibleCall(), threading.Event()

    def function() -> None:
        entered.set()
        wait()

    began = time.monotonic()
    with leaving(call, entered):
        departed(call, function)
    assert time.monotonic() - began < SOON_S


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_code_that_swallows_it_is_left_by_the_next_one(runner: Callable[[Body], object]) -> None:
    call, entered = InterruptibleCall(), threading.Event()
    swallowed = []

    class Deaf:
        def __del__(self) -> None:
            spin()

    def function() -> None:
        for _ in range(3):
            try:
                spin(entered)
            except BaseException as error:
                swallowed.append(error)
        silent()
        deaf = Deaf()
        del deaf
        spin()

    def silent() -> None:
        try:
            spin()
        finally:
            return  # noqa: B012

    with leaving(call, entered):
        runner(lambda: departed(call, function))
    assert [type(error).__name__ for error in swallowed] == ["Departure"] * 3


def test_a_loop_that_catches_everything_is_struck_often() -> None:
    """It is left by one that strikes outside of its try: a few a second would hardly ever."""
    call, entered = InterruptibleCall(), threading.Event()
    caught: list[float] = []

    def batches() -> None:
        end = time.monotonic() + LONG_S
        while time.monotonic() < end:
            try:
                entered.set()
                while time.monotonic() < end:
                    pass
            except BaseException:
                caught.append(time.thread_time())  # A machine that does not run it costs nothing.
                if caught[-1] - caught[0] > 1.0:
                    raise

    with leaving(call, entered):
        departed(call, batches)
    assert len(caught) > 20


def test_cleaning_up_after_it_is_left_in_peace(
    runner: Callable[[Body], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.inprocess.leaving._CLEANUP_S", SOON_S)
    call, entered = InterruptibleCall(), threading.Event()
    cleaned = []

    def function() -> None:
        try:
            spin(entered)
        finally:
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                pass
            cleaned.append(True)

    with leaving(call, entered):
        runner(lambda: departed(call, function))
    assert cleaned


def test_a_cleanup_that_never_ends_is_left_too(runner: Callable[[Body], object]) -> None:
    call, entered = InterruptibleCall(), threading.Event()

    def function() -> None:
        try:
            spin(entered)
        finally:
            spin()

    with leaving(call, entered):
        runner(lambda: departed(call, function))


def test_a_function_that_is_to_be_left_is_not_entered(runner: Callable[[Body], object]) -> None:
    call, entered = InterruptibleCall(), threading.Event()
    call.leave("too late")
    departure = runner(lambda: departed(call, entered.set))
    assert isinstance(departure, Departure)
    assert departure.why == "too late"
    assert not entered.is_set()


def test_the_first_reason_counts_until_it_is_renewed() -> None:
    call = InterruptibleCall()
    call.leave("first")
    call.leave("second")
    assert departed(call, int).why == "first"
    call.leave("late")
    assert departed(call, int).why == "first"
    call.renew()
    assert call.run(lambda: 7) == 7


def test_no_departure_strikes_after_the_call(
    runner: Callable[[Body], object], eager_switching: None
) -> None:
    """The function returns while it is told to leave, at every moment of its return."""
    rounds = 600

    def trial() -> int:
        call = InterruptibleCall()
        go: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def watch() -> None:
            while go.get():
                call.leave("race")

        watcher = threading.Thread(target=watch)
        watcher.start()
        hits = 0
        try:
            for turn in range(rounds):
                call.renew()
                end = time.perf_counter() + turn * 2e-6
                try:
                    call.run(lambda end=end: (go.put(True), until(end)))  # type: ignore[misc]
                except Departure:
                    hits += 1
                # What follows must not be struck.
                until(time.perf_counter() + 2e-4)
                for _ in range(10):
                    sum(range(10))
        finally:
            go.put(False)
            watcher.join()
        return hits

    hits = runner(trial)
    assert isinstance(hits, int)
    assert 0 < hits <= rounds


def until(end: float) -> None:
    while time.perf_counter() < end:
        pass


def test_an_atomic_section_is_finished_first(runner: Callable[[Body], object]) -> None:
    call, entered = InterruptibleCall(), threading.Event()
    done = []

    def function() -> None:
        with call.atomic():
            with call.atomic():
                entered.set()
                while call.leaving is None:
                    pass
                assert call.in_atomic
                until(time.perf_counter() + 0.05)
                done.append("inner")
            until(time.perf_counter() + 0.02)
            done.append("outer")
        done.append("after")

    with leaving(call, entered):
        runner(lambda: departed(call, function))
    assert done == ["inner", "outer"]
    assert not call.in_atomic


def test_an_atomic_section_is_not_begun_by_a_function_that_must_leave(
    runner: Callable[[Body], object],
) -> None:
    call, entered = InterruptibleCall(), threading.Event()
    begun = []

    def function() -> None:
        try:
            spin(entered)
        finally:
            with call.atomic():
                begun.append(True)

    with leaving(call, entered):
        runner(lambda: departed(call, function))
    assert not begun


def test_an_atomic_section_of_another_thread_postpones_nothing() -> None:
    call, entered = InterruptibleCall(), threading.Event()
    end = threading.Event()

    def other() -> None:
        with call.atomic():
            entered.set()
            end.wait(LONG_S)

    thread = threading.Thread(target=other)
    try:
        with leaving(call, entered):
            departed(call, lambda: (thread.start(), spin()))
        assert not call.in_atomic
    finally:
        end.set()
        thread.join()


def test_a_section_that_a_generator_left_open_does_not_count_in_the_next_call() -> None:
    call, entered = InterruptibleCall(), threading.Event()
    kept = []

    def generator() -> Iterator[None]:
        with call.atomic():
            yield

    def function() -> None:
        kept.append(generator())
        next(kept[0])

    call.run(function)
    with leaving(call, entered):
        departed(call, lambda: (kept[0].close(), spin(entered)))


def test_the_watcher_hears_at_once_when_the_section_ends() -> None:
    """At once: the machine may let it wait sometimes, but not each time."""
    assert 0 <= min(_heard_after_s() for _ in range(10)) < 0.05


def _heard_after_s() -> float:
    call, entered, postponed = InterruptibleCall(), threading.Event(), threading.Event()
    times = {}

    def watch() -> None:
        entered.wait(LONG_S)
        call.leave("settle")
        if not call.settle(0.02):
            postponed.set()
        if call.settle(LONG_S):
            times["settled"] = time.perf_counter()

    def function() -> None:
        with call.atomic():
            entered.set()
            assert postponed.wait(LONG_S)
            until(time.perf_counter() + 0.02)
            times["ended"] = time.perf_counter()

    watcher = threading.Thread(target=watch)
    watcher.start()
    departed(call, function)
    watcher.join()
    return times["settled"] - times["ended"]


def test_a_zone_that_ends_in_time_is_whole(runner: Callable[[Body], object]) -> None:
    call, entered = InterruptibleCall(zone_limit_s=LONG_S), threading.Event()
    done = []

    def function() -> None:
        call.begin_zone()
        entered.set()
        while call.leaving is None:
            pass
        until(time.perf_counter() + 0.03)
        done.append("step")
        call.end_zone()
        done.append("after")

    with leaving(call, entered):
        runner(lambda: departed(call, function))
    assert done == ["step"]
    assert not call.torn


def test_a_zone_that_takes_as_long_as_those_before_is_whole(
    runner: Callable[[Body], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take a hundred times as long, in case that the machine does not run it for a while."""
    monkeypatch.setattr("holdfast.inprocess.leaving._ZONE_FACTOR", 100.0)
    monkeypatch.setattr("holdfast.inprocess.leaving._LONGEST_ZONE_LIMIT_S", LONG_S)
    call, entered = InterruptibleCall(zone_limit_s=0.01), threading.Event()
    done = []

    def step() -> None:
        call.begin_zone()
        until(time.perf_counter() + 0.1)
        done.append("step")
        call.end_zone()

    def function() -> None:
        step()
        call.begin_zone()
        entered.set()
        until(time.perf_counter() + 0.1)
        done.append("step")
        call.end_zone()

    with leaving(call, entered):
        runner(lambda: departed(call, function))
    assert done == ["step", "step"]
    assert not call.torn


def test_a_zone_that_takes_too_long_is_torn(runner: Callable[[Body], object]) -> None:
    call, entered = InterruptibleCall(zone_limit_s=0.05), threading.Event()
    times = {}

    def function() -> None:
        call.begin_zone()
        try:
            spin(entered)
        except Departure:
            times["left"] = time.monotonic()
            raise

    def watch() -> None:
        entered.wait(LONG_S)
        times["told"] = time.monotonic()
        call.leave("zone")
        assert call.settle(LONG_S)

    watcher = threading.Thread(target=watch)
    watcher.start()
    runner(lambda: departed(call, function))
    watcher.join()
    assert call.torn
    assert 0.05 <= times["left"] - times["told"] < 0.05 + SOON_S


def test_a_zone_that_swallowed_its_departure_is_torn() -> None:
    call, entered = InterruptibleCall(zone_limit_s=0.01), threading.Event()

    def function() -> None:
        call.begin_zone()
        try:
            spin(entered)
        except BaseException:
            pass
        call.end_zone()

    with leaving(call, entered):
        departed(call, function)
    assert call.torn


def test_a_zone_in_which_the_function_raises_is_torn_and_the_next_call_begins_without() -> None:
    call = InterruptibleCall()

    def function() -> None:
        call.begin_zone()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call.run(function)
    assert call.torn
    call.run(int)
    assert not call.torn


def test_a_zone_is_not_begun_by_a_function_that_must_leave() -> None:
    call, entered = InterruptibleCall(), threading.Event()

    def function() -> None:
        try:
            spin(entered)
        finally:
            call.begin_zone()

    with leaving(call, entered):
        departed(call, function)
    assert not call.torn


def test_an_import_is_not_torn(
    runner: Callable[[Body], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, entered = InterruptibleCall(), threading.Event()
    name = f"slow_module_{runner.__name__}"
    tmp_path.joinpath(f"{name}.py").write_text(
        "import sys, time\n"
        "sys.entered.set()\n"
        "end = time.monotonic() + 0.1\n"
        "while time.monotonic() < end: pass\n"
        "finished = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "entered", entered, raising=False)

    def function() -> None:
        importlib.import_module(name)
        spin()

    with leaving(call, entered):
        runner(lambda: departed(call, function))
    assert sys.modules[name].finished


def test_a_function_that_blocks_all_signals_is_left_at_its_next_bytecode() -> None:
    call, entered = InterruptibleCall(), threading.Event()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def function() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        spin(entered)

    try:
        with leaving(call, entered):
            departed(call, function)
        assert not signal.sigpending()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_signal_that_is_blocked_after_it_was_sent_does_not_end_the_process_later() -> None:
    call = InterruptibleCall()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def function() -> None:
        # What a watcher does that had looked before the signal was blocked.
        assert call._signal is not None
        signal.pthread_sigmask(signal.SIG_BLOCK, [call._signal._number])
        call._signal.send(threading.get_ident())

    try:
        call.run(function)
        assert not signal.sigpending()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_number_that_the_script_takes_for_itself_stays_its_own() -> None:
    call, entered = InterruptibleCall(), threading.Event()
    caught: list[int] = []
    numbers = []

    def function() -> None:
        assert call._signal is not None
        numbers.append(call._signal._number)
        signal.signal(numbers[0], lambda number, _: caught.append(number))
        spin(entered)

    try:
        with leaving(call, entered):
            departed(call, function)
        signal.raise_signal(numbers[0])
        assert caught == numbers
        # The next call takes another one.
        call.renew()
        call.run(lambda: numbers.append(call._signal._number))  # type: ignore[union-attr]
        assert numbers[1] != numbers[0]
    finally:
        signal.signal(numbers[0], signal.SIG_DFL)


def test_signals_are_as_before_when_the_function_is_gone() -> None:
    call, entered = InterruptibleCall(), threading.Event()
    before = proc.signal_masks(os.getpid())
    with leaving(call, entered):
        departed(call, lambda: spin(entered))
    assert proc.signal_masks(os.getpid()) == before


def test_no_thread_is_left_over() -> None:
    call, entered = InterruptibleCall(), threading.Event()
    before = threading.active_count()
    with leaving(call, entered):
        departed(call, lambda: spin(entered))
    assert threading.active_count() == before


def test_a_signal_handler_of_the_script_may_ask_to_leave() -> None:
    call = InterruptibleCall()
    before = signal.signal(signal.SIGUSR1, lambda *_: call.leave("preempted"))
    try:
        departed(call, lambda: (signal.raise_signal(signal.SIGUSR1), spin()))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_restartable_function_within_another_is_refused() -> None:
    call = InterruptibleCall()
    with pytest.raises(RuntimeError, match="outermost"):
        call.run(lambda: call.run(int))
    assert call.run(lambda: 1) == 1


def test_an_atomic_section_costs_as_little_as_some_function_calls() -> None:
    call = InterruptibleCall()

    def section() -> None:
        with call.atomic():
            pass

    assert call.run(cost_in_calls, section) < 200


# ---- shields -------------------------------------------------------------------------------------


def test_a_shield_postpones_leaving_but_not_the_abort_of_groups(
    runner: Callable[[Body], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.inprocess.leaving.SHIELD_LIMIT_S", LONG_S)
    call, entered, settled = InterruptibleCall(), threading.Event(), threading.Event()
    finished = []

    def function() -> None:
        call.begin_shield()
        entered.set()
        assert settled.wait(SOON_S), "whoever aborts the groups waits for the shield"
        finished.append("backward")
        call.end_shield()
        finished.append("too much")

    def abort() -> None:
        entered.wait(LONG_S)
        call.leave("a rank died")
        if call.settle(LONG_S):
            settled.set()

    watcher = threading.Thread(target=abort)
    watcher.start()
    with pytest.raises(Departure):
        runner(lambda: call.run(function))
    watcher.join()
    assert finished == ["backward"]
    assert not call.torn


def test_a_shield_is_not_begun_by_a_function_that_must_leave() -> None:
    call = InterruptibleCall()

    def function() -> None:
        with call.atomic():
            call.leave("now")
            call.begin_shield()  # Within an atomic section it may.
            call.end_shield()

    with pytest.raises(Departure):
        call.run(function)

    def late() -> None:
        try:
            call.leave("now")
        except Departure:
            call.begin_shield()

    call.renew()
    with pytest.raises(Departure):
        call.run(late)


def test_a_shield_that_takes_too_long_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.inprocess.leaving.SHIELD_LIMIT_S", 0.05)
    call, entered = InterruptibleCall(), threading.Event()

    def function() -> None:
        call.begin_shield()
        entered.set()
        time.sleep(LONG_S)

    began = time.monotonic()
    with leaving(call, entered), pytest.raises(Departure):
        call.run(function)
    assert time.monotonic() - began < LONG_S / 2
