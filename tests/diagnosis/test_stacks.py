"""Stacks of processes that stand still in every way, within the time that was given."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest
from puppets import Puppet, puppet_of

from holdfast import proc
from holdfast.diagnosis import faulthandling, stacks
from holdfast.diagnosis.frames import in_collective, main_thread, user_frame, verb
from holdfast.diagnosis.stacks import Stacks, Subject, collect

SLEEPS = "import time\ndef load_batch():\n    here()\n    time.sleep(60)\nload_batch()"
READS = "import os\ndef load_batch():\n    here()\n    os.read(0, 1)\nload_batch()"
COMPUTES = "def crunch():\n    here()\n    while True: pass\ncrunch()"
HOLDS_GIL = """
    import ctypes, threading, time
    threading.Thread(target=lambda: time.sleep(60), daemon=True).start()
    def hold():
        here()
        ctypes.PyDLL(None).usleep(60_000_000)
    hold()
"""
# A vfork's parent waits in the kernel, uninterruptibly, until its child is gone.
STUCK = """
    import ctypes, os, time
    vfork = ctypes.PyDLL(None).vfork
    def stuck():
        here()
        if vfork() == 0:
            time.sleep(60)
            os._exit(0)
    stuck()
"""


def look(
    *puppets: Puppet, limit_s: float = 5.0, told: dict[int, int] | None = None
) -> list[Stacks]:
    """The stacks, and that it took no longer than it may and left everybody as they were."""
    before = [proc.process_state(each.pid) for each in puppets]
    began = time.monotonic()
    subjects = [Subject(each.pid, stacks_fd=(told or {}).get(each.pid)) for each in puppets]
    found = asyncio.run(collect(subjects, limit_s))
    assert time.monotonic() - began < limit_s + 20.0
    for each, state in zip(puppets, before, strict=True):
        now = proc.process_state(each.pid)
        assert each.is_alive()
        assert (state == "T") == (now == "T")
    return list(found.values())


def place(found: Stacks) -> str:
    main = main_thread(found.threads)
    frame = user_frame(main.frames) if main is not None else None
    assert main is not None
    assert frame is not None, found
    return f"{verb(main)} in {frame.function}"


def test_it_says_who_sleeps_who_reads_and_who_computes(puppet: Callable[..., Puppet]) -> None:
    found = look(puppet(SLEEPS), puppet(READS), puppet(COMPUTES))
    assert [place(each) for each in found] == [
        "sleeps in load_batch",
        "reads in load_batch",
        "computes in crunch",
    ]
    assert [each.state for each in found] == ["S", "S", "R"]
    assert [in_collective(each.threads) for each in found] == ["no"] * 3


def test_only_what_is_unclear_gets_a_native_stack(puppet: Callable[..., Puppet]) -> None:
    sleeping, computing = look(puppet(SLEEPS), puppet(COMPUTES))
    assert (sleeping.source, computing.source) == ("py-spy python only", "py-spy")


def test_a_stopped_process_is_seen_and_stays_stopped(puppet: Callable[..., Puppet]) -> None:
    stopped = puppet(SLEEPS)
    stopped.send(signal.SIGSTOP)
    (found,) = look(stopped)
    assert found.state == "T"
    assert "load_batch" in place(found)


def test_one_that_holds_the_gil_is_seen_to_hold_it(puppet: Callable[..., Puppet]) -> None:
    (found,) = look(puppet(HOLDS_GIL))
    holders = [thread.frames for thread in found.threads if thread.holds_gil]
    assert [user_frame(frames).function for frames in holders] == ["hold"]  # type: ignore[union-attr]


def test_one_that_is_stuck_in_the_kernel_is_seen_and_does_not_stick_to_us(
    puppet: Callable[..., Puppet],
) -> None:
    (found,) = look(puppet(STUCK), limit_s=3.0)
    assert found.state == "D"
    assert "stuck" in place(found)


def test_a_dead_process_is_said_to_be_dead() -> None:
    gone = puppet_of("here()")
    gone.arrive()
    gone.end()
    found = asyncio.run(collect([Subject(gone.pid)], 1.0))
    assert found[gone.pid].state == "X"
    assert found[gone.pid].missing == ("stack: the process is dead",)


def test_a_deep_recursion_is_cut(puppet: Callable[..., Puppet]) -> None:
    deep = """
        import sys, time
        sys.setrecursionlimit(10_000)
        def dig(n):
            if n: return dig(n - 1)
            here()
            time.sleep(60)
        dig(3000)
    """
    (found,) = look(puppet(deep))
    frames = found.threads[0].frames
    assert len(frames) <= 128
    assert any("left out" in frame.function for frame in frames)
    assert frames[-1].function == "<module>"


def test_without_time_nothing_is_left_running(puppet: Callable[..., Puppet]) -> None:
    tired = puppet(COMPUTES)
    for limit_s in (0.0, 0.005, 0.02, 0.05, 0.1):
        look(tired, limit_s=limit_s)
    assert proc.process_state(tired.pid) == "R"
    assert os.listdir(f"/proc/{tired.pid}/task")
    with open(f"/proc/{tired.pid}/status") as status:
        assert "TracerPid:\t0\n" in status.read()


SLOW_SPY = "#!/bin/sh\ntrap '' TERM INT\nwhile :; do sleep 1; done\n"
FORBIDDEN_SPY = """#!/bin/sh
cat >&2 <<END
Error: Failed to open
Caused by:
    0: Permission Denied
Stack backtrace:
  10: main
END
exit 1
"""
TALKING_SPY = "#!/bin/sh\necho '[{\"frames\": 5}]'\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [(SLOW_SPY, "took longer"), (FORBIDDEN_SPY, "Permission Denied"), (TALKING_SPY, "nothing")],
    ids=["hangs", "is forbidden", "talks nonsense"],
)
def test_what_ails_py_spy_is_said(
    puppet: Callable[..., Puppet],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    reason: str,
) -> None:
    path = tmp_path_factory.mktemp("bin") / "py-spy"
    path.write_text(script)
    path.chmod(0o755)
    monkeypatch.setattr(stacks, "spy_executable", lambda: str(path))
    (found,) = look(puppet(SLEEPS), limit_s=0.5)
    assert found.source == "none"
    assert reason in found.missing[0]


def test_where_py_spy_may_not_look_the_process_tells_itself(
    puppet: Callable[..., Puppet], monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = os.memfd_create("told")
    arm = f"from holdfast.diagnosis import faulthandling\nfaulthandling.arm({fd})"
    armed = puppet(arm, SLEEPS, fds=[fd])
    monkeypatch.setattr(stacks, "spy_executable", lambda: None)
    (found,) = look(armed, told={armed.pid: fd})
    assert found.source == "faulthandler"
    assert "load_batch" in place(found)
    assert found.missing == ("native stack: py-spy is not installed",)


def test_a_thread_without_a_number_is_known_by_its_name() -> None:
    frames = '[{"name": "f", "filename": "a.py", "line": 1, "module": null}]'
    said = f'[{{"thread_name": "MainThread", "active": true, "frames": {frames}}}]'
    (main,) = stacks.parse_spy(said.encode(), Subject(7), {7: "pselect6", 8: "futex"})
    assert (main.name, verb(main)) == ("MainThread", "sleeps")


def test_a_worker_may_allow_its_agent_to_look() -> None:
    faulthandling.allow_tracing(os.getpid())


def test_the_thread_that_trains_is_the_one_that_is_told_of(puppet: Callable[..., Puppet]) -> None:
    in_thread = """
        import threading, time
        def train():
            here()
            time.sleep(60)
        threading.Thread(target=train).start()
    """
    training = puppet(in_thread)
    other = next(int(n) for n in os.listdir(f"/proc/{training.pid}/task") if int(n) != training.pid)
    found = asyncio.run(collect([Subject(training.pid, trainer=other)], 5.0))[training.pid]
    assert place(found) == "sleeps in train"
    (unknown,) = look(training)
    assert "train" not in place(unknown)


LOADER = """
    import multiprocessing, os, runpy, sys, types
    def module(path, text):
        code = compile(text, path, "exec")
        space = {"multiprocessing": multiprocessing, "os": os, "here": here}
        exec(code, space)
        return space
    worker = module("/env/torch/utils/data/_utils/worker.py", (
        "def _worker_loop(queue, fetch):\\n    while True: fetch(queue.get())\\n"))
    dataset = module("/home/me/dataset.py", (
        "class Words:\\n    def __getitem__(self, index):\\n        here()\\n        os.read(0, 1)\\n"))
    loader = module("/env/torch/utils/data/dataloader.py", (
        "class Iterator:\\n    def _try_get_data(self, queue):\\n        return queue.get()\\n"))
    queues = [multiprocessing.Queue() for _ in range(3)]
    context = multiprocessing.get_context("fork")
    for queue in queues[:2]:
        args = (queue, dataset["Words"]().__getitem__)
        context.Process(target=worker["_worker_loop"], args=args, daemon=True).start()
    queues[1].put(7)
    loader["Iterator"]()._try_get_data(queues[2])
"""
"""A data loader with two workers, one of which waits for work while the other is stuck."""


def test_of_a_rank_that_waits_for_its_data_loader_the_stuck_worker_is_seen(
    puppet: Callable[..., Puppet],
) -> None:
    (found,) = look(puppet(LOADER))
    (worker,) = found.loaders
    assert worker.number == 1
    assert "__getitem__" in [frame.function for frame in worker.stack.frames]


def test_without_native_stacks_none_is_taken(puppet: Callable[..., Puppet]) -> None:
    computing = puppet(COMPUTES)
    found = asyncio.run(collect([Subject(computing.pid)], 5.0, native=False))
    assert found[computing.pid].source == "py-spy python only"
    assert "crunch" in place(found[computing.pid])
