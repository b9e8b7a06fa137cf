"""Starts a nursery or a single worker: `python -m holdfast.worker SCRIPT ...`, run by an agent.

The script and its arguments are on the command line, so that `ps` and `pgrep -f` show what these
processes are for, and because nothing else holds as many arguments as the kernel allows. When to run
the script, and as which rank, is received over the control socket.
"""

from __future__ import annotations

import os
import sys

import msgspec

from holdfast.messages.local import ImportPlan
from holdfast.worker.bootstrap import become_worker
from holdfast.worker.channel import Channel
from holdfast.worker.nursery import serve
from holdfast.worker.script import set_first_path


def main() -> int:
    role, *numbers = os.environ.pop("HOLDFAST_WORKER").split(",")
    if role == "fresh":
        control_fd, page_fd = map(int, numbers)
        return become_worker(control_fd, page_fd, rehearse=False)
    preload = os.environ.pop("HOLDFAST_NURSERY_PRELOAD", "").split()
    set_first_path(os.environ.pop("HOLDFAST_FIRST_PATH"))
    control_fd, plan_fd = map(int, numbers[:2])
    child = serve(Channel(control_fd), preload, _plan(plan_fd), eager=numbers[2] == "eager")
    return 0 if child is None else become_worker(*child)


def _plan(fd: int) -> ImportPlan:
    """Read the plan that the agent has written into a memory file."""
    with open(fd, "rb") as file:
        return msgspec.msgpack.decode(file.read(), type=ImportPlan)


if __name__ == "__main__":
    sys.exit(main())
