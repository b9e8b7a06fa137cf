"""Scripts and machines at their worst, and what the user sees of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import TRAINER, Run, cmdline, gone, wait_for


def with_lines(lines: str) -> str:
    """The trainer, with lines of its own before it trains."""
    return TRAINER.replace("    kept =", lines + "    kept =")


# ---- what scripts do ---------------------------------------------------------------------------


def test_a_rank_that_closes_all_its_files_trains_on_and_is_still_watched(run: Run) -> None:
    run.train(script=with_lines("    os.closerange(0, 1 << 17)\n"))
    run.until(lambda job: job.ranks and min(r.step for r in job.ranks.values()) > 20, "20 steps")
    run.kill_rank(1)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    (incident,) = run.ask("incidents")
    assert incident["signature"] == "killed by SIGKILL"
    assert incident["step"] > 20


def test_a_rank_that_closed_all_its_files_may_end_with_0(run: Run) -> None:
    run.train(script=with_lines("    os.closerange(0, 1 << 17)\n"), args=["20"])
    assert run.code() == 0
    assert run.ask("status")["step"] == 20


def test_100_megabytes_without_a_newline_are_logged_whole(run: Run) -> None:
    lots = """
    import sys
    for _ in range(100):
        sys.stdout.write("x" * (1 << 20))
    print("the end")
    """
    run.train("--standby", "0", script=lots, nproc=1, stdout=subprocess.DEVNULL)
    agent = run.agent()
    peak_kb = 0
    while not gone(agent):
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{agent}/status").read_text().splitlines()
            peaks = [
                int(w.split()[1]) for w in lines if w.startswith("VmHWM")
            ]  # A zombie has none.
            peak_kb = max(peak_kb, *peaks, 0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert run.process is not None
            run.process.wait(0.05)
    assert run.code() == 0
    log = run.job_home / "logs/round_1/rank_0.log"
    assert log.stat().st_size == (100 << 20) + len("the end\n")
    assert peak_kb < 150 << 10, "the agent keeps output in memory"


def test_a_terminal_that_is_not_read_stops_no_rank(run: Run) -> None:
    reader, writer = os.pipe()
    try:
        talk = with_lines("    for _ in range(20000): print('x' * 1000)\n")
        run.train(script=talk, args=["20"], stdout=writer, stderr=writer)
        os.close(writer)
        run.until_stepping()
        run.until(lambda job: job.result, "the end of the job")
    finally:
        os.close(reader)
    assert run.code() == 0
    assert run.log(0).count(b"\n") == 20000


def test_binary_output_arrives_byte_by_byte(run: Run) -> None:
    script = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 10)"
    run.train("--standby", "0", script=script, nproc=1)
    assert run.code() == 0
    assert run.log(0) == bytes(range(256)) * 10
    shown = run.out_file.read_bytes().replace(b"[default0]:", b"")
    assert shown == bytes(range(256)) * 10 + b"\n"


def test_a_traceback_in_other_words_than_ascii_is_told(run: Run) -> None:
    run.train("--standby", "0", script="raise ValueError('größer \\udcff')", nproc=1)
    assert run.code() == 1
    (incident,) = run.ask("incidents")
    assert incident["signature"] == "ValueError at train.py:1"
    assert "größer" in incident["detail"]


def test_an_exception_with_a_huge_message_is_told(run: Run) -> None:
    run.train("--standby", "0", script="raise ValueError('ö' * 1_000_000)", nproc=1)
    assert run.code() == 1
    (incident,) = run.ask("incidents")
    assert incident["signature"] == "ValueError at train.py:1"


def test_huge_arguments_reach_the_script(run: Run) -> None:
    run.train("--standby", "0", script="import sys; print(len(sys.argv[1]))", args=["x" * 100_000])
    assert run.code() == 0
    assert "100000" in run.out


def test_a_script_that_forks_has_one_rank_only(run: Run) -> None:
    """A child that runs on with the script's code must not speak for its parent."""
    forks = """
    if os.fork() == 0:
        holdfast.progress(1000000)
        os._exit(3)
    os.wait()
"""
    run.train(script=with_lines(forks), args=["20"])
    assert run.code() == 0
    assert run.ask("status")["step"] == 20
    assert run.ask("incidents") == []


def test_a_stopped_rank_does_not_hold_up_the_repair(run: Run) -> None:
    run.train(nproc=3)
    run.until_stepping()
    run.kill_rank(0, signal.SIGSTOP)
    run.kill_rank(1)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0


def test_a_script_that_changes_its_directory_is_started_again_where_it_was(run: Run) -> None:
    run.write(TRAINER, "sub/train.py")
    run.without_torch()
    moves = "import os\nwhere = os.getcwd()\nos.makedirs('x', exist_ok=True)\nos.chdir('x')\n"
    script = run.write(moves + "exec(open(where + '/sub/train.py').read())\n")
    run.start(script)
    run.until_stepping()
    run.kill_rank(0)
    run.until_stepping(round=2)
    (run.folder / "x" / "end").touch()
    assert run.code() == 0


# ---- what machines do --------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(run: Run) -> Iterator[Path]:
    """A file system with room for next to nothing."""
    where = run.folder / "tiny"
    where.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", where], capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("mounting a file system needs root")
    try:
        yield where
    finally:
        run.close()
        subprocess.run(["umount", "-l", where], check=True)


def test_a_disk_that_is_full_costs_log_lines_and_not_the_training(
    run: Run, tiny_disk: Path
) -> None:
    talk = with_lines("    print('x' * (2 << 20))\n")
    run.train("--log-dir", str(tiny_disk), script=talk, stdout=subprocess.DEVNULL)
    run.until_stepping()
    run.kill_rank(1)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    assert "cannot be written (No space left on device); training goes on" in run.err
    assert "Traceback" not in run.err


def test_a_disk_that_is_full_under_the_whole_home_does_not_stop_the_training(
    run: Run, tiny_disk: Path
) -> None:
    run.train(env={"HOLDFAST_HOME": str(tiny_disk)}, args=["150"], stdout=subprocess.DEVNULL)
    home = tiny_disk / "jobs" / run.job
    kept = [run.folder / "step_0", run.folder / "step_1"]
    wait_for(lambda: all(path.exists() for path in kept), "the first steps")
    with contextlib.suppress(OSError), open(tiny_disk / "filler", "wb") as filler:
        while True:
            filler.write(bytes(4096))
            filler.flush()
    pids = [pid for pid in run.alive() if b"holdfast.worker" in cmdline(pid)]
    assert pids
    assert run.code() == 0
    assert [path.read_text() for path in kept] == ["150", "150"]
    assert home.exists()
    assert "Traceback" not in run.err


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A memory cgroup of its own, with a limit."""
    base = Path("/sys/fs/cgroup/memory")
    if not base.exists() or os.geteuid() != 0:
        pytest.skip("no memory controller (cgroup v1) that this user may use")
    group = base / f"holdfast-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(400 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield group
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def test_a_rank_killed_for_its_memory_is_told_as_such(run: Run, small_memory: Path) -> None:
    eats = """
    if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        for step in range(1, 11):
            holdfast.progress(step)
        eaten = [bytearray(b"x") * (16 << 20) for _ in range(100)]
"""
    enter = f'echo $$ > {small_memory}/cgroup.procs && exec "$@"'
    command = ("sh", "-c", enter, "sh", sys.executable, "-m", "holdfast", "run")
    run.train(script=with_lines(eats), command=command)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    (incident,) = run.ask("incidents")
    assert (incident["kind"], incident["rank"]) == ("oom", 1)
    assert incident["signature"] == "killed by the out-of-memory killer"


JUMPING_CLOCK = """
import os, time
_now = time.time
time.time = lambda: _now() - (3600 if os.path.exists("jump") else 0)
"""


def test_a_wall_clock_that_is_set_back_hurts_nothing(run: Run) -> None:
    """Not even when the coordinator, which reads it at its start, is started again after that."""
    run.without_torch()
    run.write(JUMPING_CLOCK, "blocked/sitecustomize.py")
    run.start(run.write(TRAINER))
    run.until_stepping()
    (run.folder / "jump").touch()
    coordinator = run.coordinator()
    run.kill(coordinator)
    wait_for(lambda: run.coordinator() != coordinator, "another coordinator")
    run.kill_rank(1)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    (incident,) = run.ask("incidents")
    assert 0 <= incident["lost_s"] < 1800
    books = run.ask("goodput")
    assert books["wall_s"] < 1800
    assert sum(books["seconds"].values()) == pytest.approx(2 * books["wall_s"], rel=0.01)
