"""Runs one command and owns every process that comes of it.

An engine's daemon starts processes that leave its session and its parent (slurmstepd, Ray's workers,
whatever a job starts), so ending the daemon does not end them. A keeper is a subreaper: all orphans
below it become its children, and it can find and kill each of them without knowing how they were
started. It does so when it is told to (SIGTERM), and when its owner has gone: the owner holds the
other end of the keeper's stdin. It is run as a script, without site packages, so that it starts fast.

The keeper stays while anything below it lives, also when the command itself has ended. It prints the
command's process id on its stdout.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def start_kept(
    command: list[str], env: dict[str, str], log: Path, folder: Path
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a keeper with its command; return the keeper and the command's process id.

    The keeper removes the folder if its owner goes without ending it.
    """
    with log.open("ab") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(folder), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=env,
            start_new_session=True,
        )
    assert keeper.stdout is not None
    first = keeper.stdout.readline()
    if not first:
        keeper.wait()
        raise RuntimeError(f"{command[0]} did not start; see {log}:\n{log.read_text()[-2000:]}")
    return keeper, int(first)


def end_kept(keeper: subprocess.Popen[bytes]) -> None:
    """End a keeper and every process below it; return when none of them is left."""
    if keeper.poll() is None:
        keeper.send_signal(signal.SIGTERM)
    keeper.wait()
    for pipe in (keeper.stdin, keeper.stdout):
        if pipe is not None:
            pipe.close()


def descendants(root: int) -> list[int]:
    """The living processes below one, by parent, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
        except OSError:
            continue  # it ended while we looked
        state, parent = stat.rpartition(")")[2].split()[:2]
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(f"prctl({option}) failed")


def _reap() -> bool:
    """Collect children that have ended; say whether any are left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _kill_all() -> None:
    """Kill what is below until nothing is: a process may fork between the look and the kill."""
    while found := descendants(os.getpid()):
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        _reap()
        time.sleep(0.005)
    _reap()


def _start(command: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _keep(folder: str, command: list[str]) -> None:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    owner = os.getppid()
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_end)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print(_start(command), flush=True)
    while _reap() and not told and os.getppid() == owner:
        ready, _, _ = select.select([0, read_end], [], [], 1.0)
        if read_end in ready:
            os.read(read_end, 4096)
        if 0 in ready:
            break  # the owner has closed its end, or is gone
    told_or_done = bool(told) or not _reap()
    _kill_all()
    if not told_or_done:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _keep(sys.argv[1], sys.argv[2:])
