"""What DLRover leaves when it is killed, or forgets: shared memory, and sockets in a fixed place.

Both are named after the run. So a run of the bench has a name of its own, and whatever has that name
can go when it is over.
"""

from __future__ import annotations

import shutil
from pathlib import Path

SOCKETS = Path("/tmp/ckpt_sock")


def run_name(home: Path) -> str:
    """The name for DLRover's runs, from that of the bench's folder in shared memory."""
    return f"{home.name}-dlrover"


def remove_leftovers(home: Path) -> None:
    for left in home.parent.glob(f"{run_name(home)}*"):
        left.unlink()
    for left in SOCKETS.glob(f"{run_name(home)}*"):
        shutil.rmtree(left, ignore_errors=True)
