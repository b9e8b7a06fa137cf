"""`python -m holdfast.worker SCRIPT ...`: how an agent starts a nursery or a single worker.

The script and its arguments stand on the command line, so that `ps` and `pgrep -f` show what these
processes are for, and because nothing else holds as many arguments as the kernel allows; when to run
it, and as which rank, comes over the control socket.
"""

from __future__ import annotations

import os
import sys

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
    born = serve(Channel(int(numbers[0])), preload, eager=numbers[1] == "eager")
    if born is None:
        return 0
    return become_worker(born.control_fd, born.page_fd, born.rehearse)


if __name__ == "__main__":
    sys.exit(main())
