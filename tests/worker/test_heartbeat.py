"""The thread that beats: what it sees of the thread that trains."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.diagnosis.frames import thread_in_collective
from holdfast.messages.evidence import Frame, ThreadStack
from holdfast.shm.rank_page import RankPage, create_page
from holdfast.shm.vital_signs import (
    BETWEEN,
    IN_BACKWARD,
    IN_COLLECTIVE,
    IN_LOADER,
    NO,
    VITALS_BYTES,
    Vitals,
)
from holdfast.worker import requests
from holdfast.worker.heartbeat import Heartbeat, waits
from holdfast.worker.torch_hooks import waits as hooked_waits

PATIENCE_S = 60.0
Run = Callable[..., str]


def fresh() -> Vitals:
    return Vitals(memoryview(bytearray(VITALS_BYTES)))


def wait_for(found: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)


def frame_in(*files: str) -> object:
    """The innermost frame of calls that lie in these files, the outermost first."""
    found: list[object] = []
    inner: Callable[[], None] = partial(_note, found)
    for file in reversed(files):
        scope = {"inner": inner}
        exec(compile(f"def {file[-7:-3].strip('/_')}():\n    inner()", file, "exec"), scope)
        inner = next(call for name, call in scope.items() if name not in ("inner", "__builtins__"))
    inner()
    return found[0]


def _note(found: list[object]) -> None:
    found.append(sys._getframe(1))


C10D = "/venv/site-packages/torch/distributed/distributed_c10d.py"
OPS = "/venv/site-packages/torch/_ops.py"
CASES = [
    (("train.py",), NO),
    (("train.py", C10D), IN_COLLECTIVE),
    (("train.py", C10D, OPS), IN_COLLECTIVE),
    (("train.py", "/x/torch/nn/parallel/distributed.py"), IN_COLLECTIVE),
    (
        ("train.py", "/x/holdfast/worker/requests.py", "/x/holdfast/worker/channel.py"),
        IN_COLLECTIVE,
    ),
    (("train.py", "/x/holdfast/worker/requests.py", "/lib/python3/threading.py"), IN_COLLECTIVE),
    (("train.py", requests.__file__), IN_COLLECTIVE),
    (("train.py", hooked_waits.__file__, C10D), IN_COLLECTIVE),
    (("train.py", C10D, hooked_waits.__file__), IN_COLLECTIVE),
    # A script that is started by torch's own `record`, and a model that FSDP wraps.
    (("/x/torch/distributed/elastic/multiprocessing/errors/__init__.py", "train.py"), NO),
    (("train.py", "/x/torch/distributed/fsdp/fully_sharded.py", "model.py"), NO),
    (("/x/torch/distributed/elastic/multiprocessing/errors/__init__.py",), NO),
    # Torch's distributed checkpoints write files.
    (("train.py", "/x/torch/distributed/checkpoint/filesystem.py"), NO),
    (("train.py", "/lib/python3/threading.py"), NO),
    (("train.py", OPS), NO),
    (("train.py", "/x/torch/cuda/__init__.py"), NO),
]


@pytest.mark.parametrize(("files", "expected"), CASES, ids=lambda case: str(case)[-60:])
def test_who_is_in_a_collective_waits(files: tuple[str, ...], expected: int) -> None:
    assert waits(frame_in(*files)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("files", "expected"), CASES, ids=lambda case: str(case)[-60:])
def test_a_verdict_sees_the_same_waits_in_a_stack(files: tuple[str, ...], expected: int) -> None:
    frames = tuple(Frame(file=file, line=1, function="f") for file in reversed(files))
    seen = thread_in_collective(ThreadStack(name="MainThread", frames=frames))
    assert (seen == "yes") == (expected == IN_COLLECTIVE)


def test_a_backward_pass_may_wait() -> None:
    def _engine_run_backward() -> int:
        return waits(sys._getframe())

    def user_hook() -> int:
        return waits(sys._getframe())

    assert _engine_run_backward() == IN_BACKWARD
    assert user_hook() == NO


def test_where_a_thread_was_seen_is_counted_until_the_next_mark() -> None:
    vitals = fresh()
    heart = Heartbeat(vitals, lambda: None)
    frames = [frame_in(f"part{n}.py") for n in range(4)]
    for now, frame in enumerate([*frames, *frames], 1):
        heart.look(frame, float(now))  # type: ignore[arg-type]
    assert vitals.read().codes == 4
    vitals.mark(BETWEEN, 9.0)
    heart.look(frames[0], 10.0)  # type: ignore[arg-type]
    assert vitals.read().codes == 1


LOADER = """
def _try_get_data(inner): inner()
def fetch(inner): inner()
def use(inner): inner()
"""


def calls(path: str, *names: str) -> list[Callable[[Callable[[], None]], None]]:
    scope: dict[str, Callable[[Callable[[], None]], None]] = {}
    exec(compile(LOADER, path, "exec"), scope)
    return [scope[name] for name in names]


DATALOADER = "/venv/site-packages/torch/utils/data/dataloader.py"


@pytest.mark.parametrize(
    ("function", "inside", "expected"),
    [
        ("_try_get_data", (), IN_LOADER),
        ("_try_get_data", ("/lib/python3/queue.py", "/lib/python3/threading.py"), IN_LOADER),
        (
            "_try_get_data",
            ("/lib/python3/multiprocessing/queues.py", "/lib/python3/selectors.py"),
            IN_LOADER,
        ),
        ("fetch", (), NO),
        ("fetch", ("/lib/python3/queue.py",), NO),
        ("_try_get_data", ("train.py",), NO),
    ],
)
def test_a_wait_for_the_workers_of_a_loader_is_seen(
    function: str, inside: tuple[str, ...], expected: int
) -> None:
    """A dataset that is read in the training thread itself is no such wait."""
    found: list[object] = []
    inner: Callable[[], None] = lambda: found.append(sys._getframe(1))  # noqa: E731
    for path in reversed(inside):
        (call,) = calls(path, "use")
        inner = partial(call, inner)
    (outer,) = calls(DATALOADER, function)
    outer(inner)
    assert waits(found[0]) == expected  # type: ignore[arg-type]


def test_where_a_thread_stays_is_told_as_the_line_of_the_users_code() -> None:
    vitals = fresh()
    heart = Heartbeat(vitals, lambda: None)
    frame = frame_in("/home/me/eval.py", "/venv/lib/python3.11/site-packages/boto/client.py")
    heart.look(frame, 1.0)  # type: ignore[arg-type]
    heart.look(frame, 1.1)  # type: ignore[arg-type]
    assert vitals.read().place == "eval.py:2 (eval)"
    vitals.mark(BETWEEN, 2.0)
    heart.look(frame, 2.1)  # type: ignore[arg-type]
    assert vitals.read().place == "", "it may have moved on"
    heart.look(frame, 2.2)  # type: ignore[arg-type]
    assert vitals.read().place == "eval.py:2 (eval)"
    heart.look(frame_in("/venv/lib/python3.11/site-packages/boto/client.py"), 2.3)  # type: ignore[arg-type]
    assert vitals.read().place != "eval.py:2 (eval)"


def test_since_when_a_thread_is_at_its_line_is_told() -> None:
    vitals = fresh()
    heart = Heartbeat(vitals, lambda: None)
    frames = [frame_in("train.py"), frame_in("model.py")]
    for now, which in enumerate((0, 0, 1, 1, 1, 0), 1):
        heart.look(frames[which], float(now))  # type: ignore[arg-type]
    assert vitals.read().line_at == 6.0


def test_a_thread_that_has_ended_is_nowhere() -> None:
    vitals = fresh()
    Heartbeat(vitals, lambda: None).look(None, 3.0)
    signs = vitals.read()
    assert (signs.beat_at, signs.place, signs.waits) == (3.0, "", False)


@contextmanager
def beating(vitals: Vitals, dump: Callable[[], None] = lambda: None) -> Iterator[Heartbeat]:
    heart = Heartbeat(vitals, dump)
    heart.start()
    try:
        yield heart
    finally:
        heart._pid = 0  # It ends when it finds itself in another process.
        wait_for(lambda: not _beating_threads(), "its end")


def _beating_threads() -> int:
    """How many threads of this process beat."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            names.append((task / "comm").read_text().strip())
    return names.count("holdfast-beat")


def test_it_beats_and_the_script_does_not_see_the_thread() -> None:
    vitals = fresh()
    before = threading.enumerate()
    with beating(vitals):
        wait_for(lambda: vitals.read().beat_at, "a beat")
        assert threading.enumerate() == before
        first = vitals.read().beat_at
        wait_for(lambda: vitals.read().beat_at > first, "another beat")


def test_while_somebody_holds_the_interpreters_lock_there_are_no_beats() -> None:
    class Recorded(Vitals):
        beats: list[float] = []  # noqa: RUF012

        def beat(self, now: float, waits: int, codes: int, line: int = 0) -> None:
            self.beats.append(now)

    vitals = Recorded(memoryview(bytearray(VITALS_BYTES)))
    with beating(vitals):
        wait_for(lambda: vitals.beats, "a beat")
        ctypes.PyDLL(None).usleep(400_000)
        ended = time.monotonic()
        wait_for(lambda: vitals.beats[-1] > ended, "another beat")
    # Threads may take turns right before and after the call, but not within it.
    assert max(later - earlier for earlier, later in pairwise(vitals.beats)) >= 0.4


def test_a_dump_is_made_when_it_is_wanted_and_one_that_fails_does_not_end_the_beats() -> None:
    vitals = fresh()
    dumps: list[int] = []

    def dump() -> None:
        dumps.append(1)
        raise RuntimeError("torch's own")

    with beating(vitals, dump):
        for number in (1, 2):
            vitals.want_dump()
            wait_for(lambda number=number: len(dumps) == number, "a dump")  # type: ignore[misc]
        last = vitals.read().beat_at
        wait_for(lambda: vitals.read().beat_at > last, "another beat")


def test_it_looks_at_the_thread_that_trains() -> None:
    vitals = fresh()
    leave = threading.Event()
    there = threading.Event()

    def train() -> None:
        vitals.stepped(1.0, None)
        there.set()
        leave.wait()

    thread = threading.Thread(target=train)
    thread.start()
    there.wait(PATIENCE_S)
    with beating(vitals):
        wait_for(lambda: vitals.read().place.endswith(" (train)"), "its place")
        assert vitals.read().place.startswith("test_heartbeat.py:")
        leave.set()
        thread.join()
        wait_for(lambda: vitals.read().place == "", "the end of the thread to be seen")


def test_what_real_collectives_look_like(with_torch: Run) -> None:
    """Ranks that wait for one that does not come, in every way that a script may wait."""
    with_torch(f"""
import os, sys, threading, time
import torch, torch.distributed as dist
from holdfast.shm.vital_signs import IN_BACKWARD, IN_COLLECTIVE, NO
from holdfast.worker.heartbeat import waits

here = os.getcwd()
if os.fork() == 0:
    dist.init_process_group("gloo", f"file://{{here}}/store", rank=1, world_size=2)
    dist.new_group([0, 1]), dist.new_group([0, 1])
    time.sleep({PATIENCE_S * 3})
    os._exit(0)
dist.init_process_group("gloo", f"file://{{here}}/store", rank=0, world_size=2)
main, groups = threading.get_ident(), [dist.new_group([0, 1]), dist.new_group([0, 1])]
ones = torch.ones(2)

def seen(way, expected):
    found = []
    def look():
        deadline = time.monotonic() + {PATIENCE_S}
        while time.monotonic() < deadline and (len(found) < 40 or found[-1] != expected):
            time.sleep(0.005)
            found.append(waits(sys._current_frames()[thread.ident]))
    thread = threading.Thread(target=way, daemon=True)
    thread.start()
    look()
    assert found[-1] == expected, found

from torch.nn.parallel import DistributedDataParallel
seen(lambda: dist.all_reduce(ones, group=groups[0]), IN_COLLECTIVE)
seen(lambda: dist.barrier(group=groups[1]), IN_COLLECTIVE)
seen(lambda: time.sleep(100), NO)
seen(lambda: threading.Event().wait(), NO)
os._exit(0)
""")


def test_the_timeout_of_a_real_process_group_is_found(with_torch: Run) -> None:
    """In a collective, and while the group is being created and other ranks are missing."""
    with_torch(f"""
import datetime, os, sys, threading, time
import torch.distributed as dist
from holdfast.worker.heartbeat import group_timeout_s, waits
from holdfast.shm.vital_signs import IN_COLLECTIVE

here, limit = os.getcwd(), datetime.timedelta(seconds=77)

def begin(size, name, **more):
    dist.init_process_group("gloo", f"file://{{here}}/{{name}}", rank=0, world_size=size, **more)

def seen(**more):
    thread = threading.Thread(target=begin, args=(2, f"two{{len(more)}}"), kwargs=more, daemon=True)
    thread.start()
    deadline = time.monotonic() + {PATIENCE_S}
    found = None
    while time.monotonic() < deadline:
        frame = sys._current_frames().get(thread.ident)
        if frame is not None and waits(frame) == IN_COLLECTIVE:
            now = group_timeout_s(frame)
            if now == found:
                return now
            found = now
        time.sleep(0.05)

assert seen(timeout=limit) == 77.0
assert seen() == 1800.0
begin(1, "one", timeout=datetime.timedelta(seconds=55))
assert group_timeout_s(sys._getframe()) == 55.0
os._exit(0)
""")


def test_a_forked_process_has_no_beats() -> None:
    vitals = fresh()
    with beating(vitals):
        wait_for(lambda: vitals.read().beat_at, "a beat")
        pid = os.fork()
        if pid == 0:
            os._exit(_beating_threads())
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# ---- the lease on the rank ----


def state_of(pid: int) -> str:
    """The state of a process, as one letter."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def rank() -> Iterator[tuple[int, RankPage]]:
    """A process that beats, and its page as the agent sees it."""
    fd = create_page()
    pid = os.fork()
    if pid == 0:
        try:
            Heartbeat(RankPage(fd).vitals, lambda: None).start()
            signal.pause()
        finally:
            os._exit(1)
    page = RankPage(fd)
    try:
        wait_for(lambda: page.vitals.read().beat_at, "a beat")
        yield pid, page
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        page.close()
        os.close(fd)


def test_a_rank_past_its_lease_stops_itself_and_goes_on_when_it_has_another(
    rank: tuple[int, RankPage],
) -> None:
    pid, page = rank
    page.vitals.lend(time.monotonic() - 1.0)
    wait_for(lambda: state_of(pid) == "T", "it to stop")
    stopped_at = page.vitals.read().beat_at
    page.vitals.lend(time.monotonic() + 3600.0)
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: page.vitals.read().beat_at > stopped_at, "a beat")
    beat_at = page.vitals.read().beat_at
    wait_for(lambda: page.vitals.read().beat_at > beat_at, "another beat")
    assert state_of(pid) != "T"


def test_a_rank_past_its_lease_that_somebody_continues_stops_itself_again(
    rank: tuple[int, RankPage],
) -> None:
    pid, page = rank
    page.vitals.lend(time.monotonic() - 1.0)
    for _ in range(2):
        wait_for(lambda: state_of(pid) == "T", "it to stop")
        stopped_at = page.vitals.read().beat_at
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: page.vitals.read().beat_at > stopped_at, "a beat")  # noqa: B023
