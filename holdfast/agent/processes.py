"""Processes of the node: how they are started, watched and ended.

A process is watched by its pidfd, which the event loop wakes up for the moment the process is gone;
nothing is polled. Each worker leads a process group of its own, and the agent adopts orphans, so even
a daemon that a script forked off twice can be found and ended with the round it came from.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from holdfast import kernel


@dataclass(frozen=True)
class Exit:
    """How a process ended: exactly one of the two is set."""

    code: int | None = None
    signal: int | None = None


class Process:
    """A child of this agent, watched until it is gone."""

    def __init__(self, pid: int, on_exit: Callable[[Exit], None]) -> None:
        self.pid = pid
        self.exit: Exit | None = None
        self.on_exit = on_exit
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    def send(self, number: signal.Signals) -> None:
        """Signal it; nothing happens if it is gone."""
        if self.exit is not None:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            pass

    def _reap(self) -> None:
        info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return
        # While it is a zombie its number cannot be anybody else's: end what is left of its group.
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        by_itself = info.si_code == os.CLD_EXITED
        self.exit = Exit(code=info.si_status) if by_itself else Exit(signal=info.si_status)
        self.on_exit(self.exit)

    def minds_sigterm(self) -> str:
        """What SIGTERM does to it: "dies", "handles" or "ignores"."""
        try:
            with open(f"/proc/{self.pid}/status") as status:
                masks = dict(line.split(":", 1) for line in status if line.startswith("Sig"))
        except (FileNotFoundError, ProcessLookupError):
            return "dies"
        bit = 1 << (signal.SIGTERM - 1)
        if int(masks["SigIgn"], 16) & bit or int(masks["SigBlk"], 16) & bit:
            return "ignores"
        return "handles" if int(masks["SigCgt"], 16) & bit else "dies"


def spawn(
    command: Sequence[str],
    env: Mapping[str, str],
    fds: Collection[int] = (),
    stdio: Sequence[int | None] = (None, None, None),
) -> int:
    """Start a command that leads its own group and dies with this agent."""
    agent = os.getpid()

    def prepare() -> None:
        os.setpgid(0, 0)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != agent:
            os._exit(1)

    child = subprocess.Popen(
        list(command),
        env=dict(env),
        pass_fds=tuple(fds),
        stdin=stdio[0],
        stdout=stdio[1],
        stderr=stdio[2],
        preexec_fn=prepare,
    )
    child.returncode = 0  # It is ours to wait for, by its pidfd; Popen shall not.
    return child.pid


def end_strays(known: Collection[int]) -> int:
    """Kill every child that is none of ours: what scripts left behind. How many there were."""
    ended = 0
    while strays := [pid for pid in kernel.children(os.getpid()) if pid not in known]:
        for pid in strays:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                ended += 1
            except (ProcessLookupError, ChildProcessError):
                pass
    return ended


def reap_strays(known: Collection[int]) -> None:
    """Take note of orphans that ended by themselves, so that none stays a zombie."""
    for pid in kernel.children(os.getpid()):
        if pid not in known:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass
