"""What of a rank moves, and what cannot: read from real processes, and compared with time given."""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from yardstick import cost_relative_to

from holdfast import proc
from holdfast.agent import life
from holdfast.agent.life import (
    DEAF_S,
    DISTURBED_BYTES,
    DISTURBED_NS,
    IDLE_NS,
    LOCKED_LOOKS,
    RECENT_S,
    Counters,
    Descendant,
    Life,
    Look,
    Observer,
)
from holdfast.shm.vital_signs import (
    BETWEEN,
    IN_LOADER,
    NO,
    VITALS_BYTES,
    Signs,
    Vitals,
)

PATIENCE_S = 60.0
EVERY_S = 0.25


# ---- comparing ---------------------------------------------------------------------------------


class Scene:
    """A rank that a test moves by hand, looked at four times a second."""

    def __init__(self) -> None:
        self.now = 100.0
        self.vitals = Vitals(memoryview(bytearray(VITALS_BYTES)))
        self.vitals.mark(BETWEEN, self.now)
        self.line, self.waits = 1, NO
        self.life = Life()
        self.look()

    def signs(self) -> Signs:
        self.vitals.beat(self.now, self.waits, 1, self.line)
        return self.vitals.read()

    def look(self, strictly: bool = False, disturbed: bool = False, **sample: Any) -> Look:
        self.now += EVERY_S
        return self.life.look(self.signs(), Counters(**sample), self.now, strictly, disturbed)


def test_of_a_rank_that_does_nothing_nothing_moves() -> None:
    scene = Scene()
    for count in range(1, 20):
        assert scene.look() == Look((), (), count * EVERY_S, 0.0, locked=False)


@pytest.mark.parametrize(
    ("sample", "sign"),
    [
        ({"ran_ns": 1}, "cpu"),
        ({"queued_ns": 1}, "cpu"),
        ({"others_ns": {7: 3_000_000}}, "cpu"),
        ({"moved_bytes": 1}, "io"),
        ({"state": "D"}, "io"),
        ({"state": "t"}, "position"),
        ({"children": {9: Descendant(1, 0, 0, 0)}}, "children"),
        ({"children": {9: Descendant(0, 1, 0, 0)}}, "children"),
        ({"children": {9: Descendant(0, 0, 1, 0)}}, "children"),
        ({"children": {9: Descendant(0, 0, 0, 1)}}, "children"),
        ({"children": {}}, "children"),
        ({"children": {9: Descendant(0, 0, 0, 0), 10: Descendant(0, 0, 0, 0)}}, "children"),
        ({"connections": {4: 1}}, "network"),
        ({"connections": {4: 0, 5: 0}}, "network"),
    ],
)
def test_each_sign_is_told_and_ends_the_stillness(sample: dict[str, Any], sign: str) -> None:
    scene = Scene()
    first: dict[str, Any] = {
        "others_ns": {7: 0},
        "moved_bytes": 0,
        "children": {9: Descendant(0, 0, 0, 0)},
        "connections": {4: 0},
    }
    scene.look(**first)
    assert scene.look(**first).still_s > 0.0
    found = scene.look(**{**first, **sample})
    assert (found.moved, found.recent, found.still_s) == ((sign,), (sign,), 0.0)


def test_a_new_line_and_a_mark_end_the_stillness() -> None:
    scene = Scene()
    scene.look()
    scene.line = 2
    assert scene.look().moved == ("position",)
    assert scene.look().still_s == pytest.approx(EVERY_S)
    scene.vitals.mark(BETWEEN, scene.now)
    assert scene.look().still_s == pytest.approx(EVERY_S), "since the mark"


def test_what_moved_is_recent_for_a_few_seconds() -> None:
    scene = Scene()
    assert scene.look(ran_ns=1).recent == ("cpu",)
    for _ in range(int(RECENT_S / EVERY_S) - 1):
        assert scene.look(ran_ns=1).recent == ("cpu",)
    assert scene.look(ran_ns=1).recent == ()


def test_threads_that_wake_up_now_and_then_are_no_sign() -> None:
    scene = Scene()
    scene.look(others_ns={7: 0, 8: 0})
    for count in range(1, 20):
        found = scene.look(others_ns={7: count * 1_000_000, 8: count * 1_000_000})
        assert found.moved == ()


def test_storage_that_never_answers_is_no_sign_in_the_end() -> None:
    scene = Scene()
    for _ in range(int(DEAF_S / EVERY_S)):
        assert scene.look(state="D").moved == ("io",)
    assert scene.look(state="D").moved == ()
    assert scene.look(state="D").still_s > 0.0


def test_what_an_examination_costs_a_rank_is_no_sign_of_life() -> None:
    scene = Scene()
    children = {9: Descendant(0, 0, 0, 0)}
    scene.look(others_ns={7: 0}, children=children, moved_bytes=0)
    small: dict[str, Any] = {
        "ran_ns": DISTURBED_NS,
        "queued_ns": 100 * DISTURBED_NS,
        "others_ns": {7: DISTURBED_NS - 1},
        "moved_bytes": DISTURBED_BYTES,
        "state": "t",
    }
    assert scene.look(disturbed=True, **small).moved == ()
    grown = {9: Descendant(DISTURBED_NS, 1, 0, 0)}
    assert scene.look(**{**small, "state": "S", "children": grown}).moved == (), (
        "children were last looked at before the examination"
    )
    assert scene.look(**{**small, "state": "S", "ran_ns": 2 * DISTURBED_NS + 1}).moved == ("cpu",)
    much = {**small, "ran_ns": 4 * DISTURBED_NS, "moved_bytes": 3 * DISTURBED_BYTES}
    assert scene.look(disturbed=True, **much).moved == ("cpu", "io")


def test_bytes_that_cannot_be_told_from_ours_say_nothing() -> None:
    scene = Scene()
    scene.look(moved_bytes=5)
    assert scene.look(moved_bytes=None).moved == ()
    assert scene.look(moved_bytes=5).moved == ()
    assert scene.look(moved_bytes=None).moved == ()
    assert scene.look(moved_bytes=6).moved == ("io",)


def test_while_the_loader_is_waited_for_only_its_workers_count() -> None:
    """The training thread wakes up every 5 s to see whether they live."""
    scene = Scene()
    scene.waits = IN_LOADER
    idle, stuck = Descendant(0, 0, 0, 0, True, True), Descendant(0, 0, 0, 0, True)
    scene.look(children={8: idle, 9: stuck})
    scene.line = 2
    assert scene.look(ran_ns=1000).moved == ()
    woken = idle._replace(ran_ns=IDLE_NS, ticks=1)
    assert scene.look(ran_ns=1000, children={8: woken, 9: stuck}).moved == ()
    works = stuck._replace(ran_ns=1)
    assert scene.look(ran_ns=1000, children={8: woken, 9: works}).moved == ("loader workers",)
    scene.waits = NO
    works = stuck._replace(ran_ns=2)
    assert scene.look(ran_ns=1000, children={8: woken, 9: works}).moved == ("children",)


def test_a_strict_look_counts_every_thread_but_those_that_wait_for_the_gil() -> None:
    scene = Scene()
    waiting = frozenset({0, 7})
    first: dict[str, Any] = {"others_ns": {7: 0, 8: 0}, "for_a_while": waiting}
    scene.look(strictly=True, **first)
    some: dict[str, Any] = {
        "ran_ns": 1000,
        "queued_ns": 1000,
        "others_ns": {7: 1000, 8: 0},
        "for_a_while": waiting,
    }
    assert scene.look(strictly=True, **some).moved == ()
    assert scene.look(strictly=True, **{**some, "others_ns": {7: 1000, 8: 1}}).moved == ("cpu",)
    assert scene.look(strictly=True, **{**some, "ran_ns": 10**7}).moved == ("cpu",)


def test_locks_are_proven_by_several_looks_in_which_nothing_moved() -> None:
    scene = Scene()
    looks = [scene.look(locked=True).locked for _ in range(8)]
    assert looks == [False] * 4 + [True] * 4
    assert looks.index(True) >= LOCKED_LOOKS
    assert not scene.look(locked=True, ran_ns=1).locked
    assert [scene.look(locked=True, ran_ns=1).locked for _ in range(4)] == [False] * 3 + [True]
    assert not scene.look(ran_ns=1).locked


def test_what_an_examination_hides_does_not_end_the_proof_for_a_while() -> None:
    scene = Scene()
    for _ in range(8):
        scene.look(locked=True)
    hidden = [scene.look(disturbed=True).locked for _ in range(10)]
    assert hidden == [True] * 6 + [False] * 4
    assert scene.look(locked=True).locked
    assert not scene.look().locked


# ---- real processes ----------------------------------------------------------------------------


@contextmanager
def script(text: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that runs this text, and says with a line that it is ready."""
    with subprocess.Popen(
        [sys.executable, "-c", "import os, sys, threading, time\n" + text],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


READY = "print('ready', flush=True)\n"


def until(found: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


def is_locked(pid: int) -> bool:
    return Observer(pid).sample(0, time.monotonic(), strictly=False, locks=True).locked


LOCKED = {
    "a lock taken twice": "lock = threading.Lock(); lock.acquire();" + READY + "lock.acquire()",
    "two locks in a circle": """
a, b, met = threading.Lock(), threading.Lock(), threading.Barrier(2)
def cross(first, second):
    with first:
        met.wait()
        with second: pass
threading.Thread(target=cross, args=(b, a)).start()
"""
    + READY
    + "cross(a, b)",
    "a queue without a producer": "import queue\n" + READY + "queue.Queue().get()",
    "a condition": "c = threading.Condition()\n" + READY + "with c: c.wait()",
    "the end of a thread that is locked": """
lock = threading.Lock(); lock.acquire()
threading.Thread(target=lock.acquire).start()
"""
    + READY,
    "a pool that idles": """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(3); [pool.submit(int).result() for _ in range(3)]
lock = threading.Lock(); lock.acquire()
"""
    + READY
    + "lock.acquire()",
}
NOT_LOCKED = {
    "a lock of another process": """
import multiprocessing
lock = multiprocessing.Lock(); lock.acquire()
"""
    + READY
    + "lock.acquire()",
    "a thread that sleeps and will release": """
lock = threading.Lock(); lock.acquire()
threading.Thread(target=lambda: (time.sleep(100), lock.release())).start()
"""
    + READY
    + "lock.acquire()",
    "a thread that receives": """
import socket
a, b = socket.socketpair()
threading.Thread(target=lambda: b.recv(1), daemon=True).start()
lock = threading.Lock(); lock.acquire()
"""
    + READY
    + "lock.acquire()",
    "a subprocess": """
import subprocess
child = subprocess.Popen(["sleep", "100"])
lock = threading.Lock(); lock.acquire()
threading.Thread(target=child.wait, daemon=True).start()
"""
    + READY
    + "lock.acquire()",
    "a timed wait": "lock = threading.Lock(); lock.acquire()\n"
    + READY
    + "lock.acquire(timeout=100)",
    "a thread with a timed wait": """
event = threading.Event()
threading.Thread(target=event.wait, args=(100,), daemon=True).start()
lock = threading.Lock(); lock.acquire()
"""
    + READY
    + "lock.acquire()",
    "an alarm": """
import signal
signal.signal(signal.SIGALRM, lambda *_: lock.release()); signal.alarm(100)
lock = threading.Lock(); lock.acquire()
"""
    + READY
    + "lock.acquire()",
    "a signal that it waits for": """
import signal
event = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: event.set())
"""
    + READY
    + "event.wait()",
    "the end of a child": """
import signal, subprocess
event = threading.Event()
signal.signal(signal.SIGCHLD, lambda *_: event.set())
child = subprocess.Popen(["sleep", "100"])
"""
    + READY
    + "event.wait()",
    "a read of its input": READY + "sys.stdin.read()",
    "a loop": READY + "while True: pass",
}


@pytest.mark.parametrize("text", LOCKED.values(), ids=LOCKED.keys())
def test_a_process_that_only_waits_for_its_own_locks_is_locked(text: str) -> None:
    with script(text) as process:
        pid = process.pid
        until(lambda: is_locked(pid), "all threads to be at their locks")
        assert Observer(pid).is_at_lock(0)


@pytest.mark.parametrize("text", NOT_LOCKED.values(), ids=NOT_LOCKED.keys())
def test_a_process_that_something_may_wake_is_not_locked(text: str) -> None:
    with script(text) as process:
        pid = process.pid
        seen: list[object] = []
        until(lambda: _asleep_twice(pid, seen), "it to stand")
        assert not is_locked(pid)


def _asleep_twice(pid: int, seen: list[object]) -> bool:
    """Whether its threads were in the same calls at two looks in a row, as they will stay."""
    calls = sorted(proc.system_calls(pid).items())
    same = bool(seen) and seen[-1] == calls
    seen.append(calls)
    return same and (proc.call(pid, pid).name != "" and len(seen) > 10)


def moved_of(pid: int, thread: int = 0) -> Callable[[], set[str]]:
    """Return a function that looks, and returns what has moved since the time before."""
    observer, clock = Observer(pid), [1000.0]
    vitals = Vitals(memoryview(bytearray(VITALS_BYTES)))
    alive = Life()

    def look() -> set[str]:
        clock[0] += life.WIDELY_EVERY_S
        sample = observer.sample(thread, clock[0], strictly=False, locks=False)
        return set(alive.look(vitals.read(), sample, clock[0], False, False).moved)

    look()
    return look


def at_rest(look: Callable[[], set[str]]) -> None:
    """Wait until nothing moves for some looks; a thread that waits for the GIL moves seldom."""
    quiet = [0]

    def is_quiet() -> bool:
        quiet[0] = 0 if look() else quiet[0] + 1
        return quiet[0] >= 10

    until(is_quiet, "rest")


def test_of_a_process_that_sleeps_nothing_moves_though_our_threads_do() -> None:
    text = f"""
from holdfast import kernel
def beat():
    kernel.name_process("holdfast-beat")
    while True:
        open("/dev/null", "wb").write(b"x" * 100); sum(range(1000)); time.sleep(0.001)
threading.Thread(target=beat, daemon=True).start()
{READY}
threading.Event().wait()
"""
    with script(text) as process:
        pid = process.pid
        look = moved_of(pid)
        at_rest(look)
        for _ in range(10):
            time.sleep(0.02)
            assert look() == set()


def test_each_thing_that_a_real_process_does_is_a_sign(tmp_path: Path) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    text = f"""
import socket, subprocess
to = socket.create_connection(("127.0.0.1", {server.getsockname()[1]}))
file = open({str(tmp_path / "out")!r}, "wb", buffering=0)
children = []
def work():
    until = time.thread_time() + 0.05
    while time.thread_time() < until: pass
acts = {{
    "x": lambda: file.write(b"x"),
    "s": lambda: to.send(b"s"),
    "c": lambda: children.append(subprocess.Popen(["sleep", "100"])),
    "t": lambda: [t.start() or t.join() for t in [threading.Thread(target=work)]],
}}
{READY}
while True: acts[sys.stdin.buffer.raw.read(1).decode()]()
"""
    with script(text) as process:
        peer, _ = server.accept()
        look = moved_of(process.pid)
        for act, sign in [("x", "io"), ("s", "network"), ("c", "children"), ("t", "cpu")]:
            at_rest(look)
            assert process.stdin is not None
            os.write(process.stdin.fileno(), act.encode())
            until(lambda sign=sign: sign in look(), sign)  # type: ignore[misc]
        peer.close()
    server.close()


@pytest.mark.parametrize(
    ("call", "moves"),
    [
        ("ctypes.PyDLL(None).pause()", False),
        ("[ctypes.PyDLL(None).usleep(1000) for _ in iter(int, 1)]", True),
        ("ctypes.PyDLL(None).strlen(b'x' * (1 << 30))", True),
    ],
    ids=["a native call that does nothing", "one that polls", "one that computes"],
)
def test_of_a_native_call_that_keeps_the_gil_it_is_seen_whether_it_runs(
    call: str, moves: bool
) -> None:
    """Other threads wait for the GIL meanwhile, and wake up all the time."""
    text = f"""
import ctypes
def beat():
    while True: time.sleep(0.01)
for _ in range(3): threading.Thread(target=beat, daemon=True).start()
def keep():
    {READY.strip()}
    while True: {call}
threading.Thread(target=keep, daemon=True).start()
time.sleep(1000)
"""
    with script(text) as process:
        observer, alive, now = Observer(process.pid), Life(), 1000.0
        vitals = Vitals(memoryview(bytearray(VITALS_BYTES)))

        def look() -> bool:
            nonlocal now
            now += EVERY_S
            sample = observer.sample(0, now, strictly=True, locks=False)
            return bool(alive.look(vitals.read(), sample, now, True, False).moved)

        look()
        if moves:
            until(look, "it to be seen to run")
            until(look, "it to be seen to run again")
        else:
            at_rest(lambda: {"cpu"} if look() else set())


def test_traffic_with_the_store_is_no_sign() -> None:
    """NCCL's watchdogs talk to it all the time."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    peer, _ = server.accept()
    try:
        for store_port, expected in [(0, True), (port, False)]:
            observer = Observer(os.getpid(), store_port)
            before = observer.sample(0, 1.0, False, False).connections
            client.send(b"x" * 100)
            select.select([peer], [], [], PATIENCE_S)
            peer.recv(100)
            after = observer.sample(0, 9.0, False, False).connections
            assert (before != after) == expected
    finally:
        for one in (client, peer, server):
            one.close()


def test_a_look_at_a_hundred_threads_costs_a_few_reads_of_each() -> None:
    leave = threading.Event()
    threads = [threading.Thread(target=leave.wait) for _ in range(100)]
    for thread in threads:
        thread.start()
    try:
        observer, moments = Observer(os.getpid()), itertools.count(1.0)
        assert len(observer.sample(0, 0.0, True, True).others_ns) >= 100

        def read_each() -> None:
            for task in os.listdir("/proc/self/task"):
                Path(f"/proc/self/task/{task}/stat").read_bytes()

        look = lambda: observer.sample(0, next(moments), True, True)  # noqa: E731
        assert cost_relative_to(read_each, look) < 40
    finally:
        leave.set()
        for thread in threads:
            thread.join()
