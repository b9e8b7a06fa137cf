"""Jobs whose function is left and entered again: how they are started, and told to break."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from harness import processes
from harness.job import Job, JobError
from harness.launchers import Launcher, holdfast
from harness.marks import Life, Seconds

COSTLY = {"kill", "stop", "gil"}
"""Faults after which the process cannot stay."""
ORDER_S: Seconds = 10.0
SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "restarting.py"


@dataclass(frozen=True)
class Setting:
    """What all measures share."""

    tries: int
    limit: Seconds
    """How long anything may take before it counts as hung."""
    folder: Path
    keep_logs: bool = False
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    @contextmanager
    def job(
        self,
        ranks: int,
        script: Sequence[str] = (),
        launcher: Launcher | None = None,
        program: Path = SCRIPT,
    ) -> Iterator[RestartingJob]:
        """A started job, ended and cleaned up on the way out."""
        launcher = launcher or holdfast()
        name = f"{launcher.name}-{next(self._numbers)}"
        job = RestartingJob(name, launcher, ranks, self.folder / name, script, program)
        job.orders.mkdir()
        try:
            with job:
                yield job
        finally:
            if not self.keep_logs:
                job.discard()


class RestartingJob(Job):
    """A job of `scripts/restarting.py`, or of one that takes orders as it does."""

    killed = 0
    """How many processes the last fault was meant to cost."""

    @property
    def orders(self) -> Path:
        return self.folder / "orders"

    def life(self, rank: int) -> Life:
        """The entry of a rank that trains now."""
        found = self.marks.newest(rank)
        if found is None:
            raise JobError(f"rank {rank} has not entered its function")
        return found

    def order(self, rank: int, fault: str) -> Seconds:
        """Have a rank break in this way; return the moment at which it was told."""
        pid = self.life(rank).pid
        partial = self.orders / f"{pid}.partial"
        partial.write_text(fault)
        partial.rename(self.orders / str(pid))
        moment = time.monotonic()
        os.kill(pid, signal.SIGUSR1)
        return moment

    def break_(self, rank: int, fault: str) -> Seconds:
        """Have a rank break in this way; return the moment at which it did."""
        pid, kind = self.life(rank).pid, fault.partition("@")[0]
        self.killed = int(kind in COSTLY)
        self.order(rank, fault)
        struck = self.orders / f"{pid}.struck"
        self.wait_for("the fault", struck.exists, ORDER_S)
        moment = float(struck.read_text())
        struck.unlink()
        return moment

    def named(self, name: str) -> list[int]:
        """The processes of the job with this name, by pid."""
        return sorted(one.pid for one in processes.descendants() if one.name == name)

    def agent_of(self, pid: int) -> int | None:
        """The agent whose worker that is; None if it is gone."""
        return next((one.parent for one in processes.descendants() if one.pid == pid), None)
