"""Reads a long journal in a process of its own, while the page shows the job as it is now.

The process reads as any viewer does, keeps what it has read in the job's home, and ends. It prints the
share that it has read, a number a line. It gives way to everything else on the machine and dies with
the server; what it has kept by then is where the next one goes on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from pathlib import Path

from holdfast import kernel
from holdfast.errors import HoldfastError, JobError
from holdfast.jobhome import JobHome
from holdfast.view.follower import Follower

NICENESS = 10


async def read_past(home: JobHome, told: Callable[[float], None]) -> None:
    """Have the whole journal read and kept; a JobError if that fails."""
    # It imports from where the server does: `python -m` would look in the current directory first, and
    # anybody can leave a module in that.
    command = (
        f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main;"
        f" sys.exit(main({str(home.path)!r}, {os.getpid()}))"
    )
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    assert reader.stdout is not None
    assert reader.stderr is not None
    try:
        async for line in reader.stdout:
            told(float(line))
        why = (await reader.stderr.read()).decode(errors="replace").strip()
        if await reader.wait() != 0:
            raise JobError(why or f"its reader ended with {reader.returncode}")
    finally:
        if reader.returncode is None:
            reader.kill()
            await reader.wait()


def main(path: str, server_pid: int) -> int:
    kernel.name_process("holdfast-past")
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server_pid:
        return 1
    os.nice(NICENESS)
    home = JobHome(Path(path))
    try:
        follower = Follower.resumed(home)
        follower.read_and_keep(home.history, lambda share: print(f"{share:.4f}", flush=True))
    except (OSError, HoldfastError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
