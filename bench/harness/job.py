"""One run of the training script under one launcher, from its spawn to the end of its last process.

A `Job` is a context: whatever happens inside, leaving it ends every process below the bench. Jobs
run one after the other, never side by side, so those processes are the job's.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from harness import processes
from harness.launchers import Command, Launcher
from harness.marks import Marks, Seconds

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "ddp.py"
LOOK_EVERY_S = 0.01
GLANCE_EVERY_S = 0.1
"""Where nothing is at stake, so as not to take time from the ranks."""
STOP_AHEAD_STEPS = 50
"""Far enough ahead of the ranks that all of them read it before one of them is there."""


class JobError(RuntimeError):
    """What was waited for did not happen. The message says what did instead."""


class Job:
    """Start it with `with`; then wait for steps, kill ranks, let it finish."""

    def __init__(
        self,
        name: str,
        launcher: Launcher,
        ranks: int,
        folder: Path,
        script: Sequence[str],
        program: Path = SCRIPT,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.folder = folder
        self.checkpoint = folder / "checkpoint.pt"
        self._stop_at = folder / "stop-at"
        self._launcher = launcher
        self._script = [str(program), *script, f"--stop-at={self._stop_at}"]
        self._running: list[subprocess.Popen[bytes]] = []
        self._service: subprocess.Popen[bytes] | None = None
        for part in ("marks", "tmp", "home"):
            (folder / part).mkdir(parents=True)
        self.marks = Marks(folder / "marks")
        self.spawned_at: Seconds = 0.0

    def __enter__(self) -> Job:
        launch = self._launcher.launch(self.name, self.ranks, self._script)
        try:
            if launch.service and launch.service_port:
                self._service = self._spawn(launch.service, "service")
                _wait_for_port(launch.service_port, self._service)
            self.spawned_at = time.monotonic()
            self._running = [
                self._spawn(command, f"launcher-{number}")
                for number, command in enumerate(launch.commands)
            ]
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @property
    def pids(self) -> list[int]:
        """The processes the bench itself started for this job."""
        service = [self._service] if self._service else []
        return [process.pid for process in [*self._running, *service]]

    def _spawn(self, command: Command, log: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{log}.log").open("wb") as output:
            return subprocess.Popen(
                command.argv,
                cwd=self.folder,
                env=self._environment() | command.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
            )

    def _environment(self) -> dict[str, str]:
        return dict(os.environ) | {
            "BENCH_MARKS": str(self.folder / "marks"),
            "HOLDFAST_HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }

    def _end(self) -> None:
        processes.end_descendants(self.pids)
        for process in [*self._running, *([self._service] if self._service else [])]:
            process.wait()

    def exit_code(self) -> int | None:
        """0 or the first other code once the launcher has ended, None while it runs."""
        codes = [process.poll() for process in self._running]
        return None if None in codes else next((code for code in codes if code), 0)

    def wait_for(
        self,
        what: str,
        condition: Callable[[], bool],
        within_s: Seconds,
        look_every_s: Seconds = LOOK_EVERY_S,
    ) -> None:
        """Until the condition holds; JobError if the launcher ends first or the time is up."""
        deadline = time.monotonic() + within_s
        while True:
            ended = self.exit_code()
            self.marks.refresh()
            if condition():
                return
            if ended is not None:
                raise JobError(f"launcher ended with {ended} before {what}")
            if time.monotonic() > deadline:
                raise JobError(f"no {what} within {within_s:g} s")
            time.sleep(look_every_s)

    def wait_for_steps(self, within_s: Seconds, after: Seconds = 0.0) -> Seconds:
        """When every rank had finished a step, in lives begun after a moment."""
        what = "step on all ranks after the kill" if after else "first step on all ranks"
        self.wait_for(what, lambda: self.marks.all_stepped(self.ranks, after) is not None, within_s)
        moment = self.marks.all_stepped(self.ranks, after)
        assert moment is not None
        return moment

    def train_until(self, moment: Seconds) -> None:
        """Let it train; JobError if it ends by itself."""
        self.wait_for(
            "the bench was done", lambda: time.monotonic() >= moment, math.inf, GLANCE_EVERY_S
        )

    def kill(self, rank: int) -> Seconds | None:
        """SIGKILL the process that is this rank; the moment, or None if it is not alive."""
        life = self.marks.newest(rank)
        if life is None or life.pid not in {process.pid for process in processes.descendants()}:
            return None
        moment = time.monotonic()
        os.kill(life.pid, signal.SIGKILL)
        return moment

    def finish(self, within_s: Seconds) -> Seconds:
        """Have the script end a little later than now; how long the job took from its spawn."""
        self.marks.refresh()
        # Not highest_step(): without a checkpoint a new life counts from the start again.
        newest = [life for rank in range(self.ranks) if (life := self.marks.newest(rank))]
        step = max((life.steps[-1] for life in newest if life.steps), default=0) + STOP_AHEAD_STEPS
        partial = self._stop_at.with_suffix(".partial")
        partial.write_text(str(step))
        os.replace(partial, self._stop_at)
        return self.wait_for_exit(within_s)

    def wait_for_exit(self, within_s: Seconds) -> Seconds:
        self.wait_for("end of the job", lambda: self.exit_code() is not None, within_s)
        if self.exit_code() != 0:
            raise JobError(f"launcher ended with {self.exit_code()}")
        return time.monotonic() - self.spawned_at

    def discard(self) -> None:
        """Remove its folder, logs and all."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _wait_for_port(port: int, service: subprocess.Popen[bytes], within_s: Seconds = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError as error:
            if service.poll() is not None or time.monotonic() > deadline:
                raise JobError(f"the launcher's service does not answer on port {port}") from error
            time.sleep(LOOK_EVERY_S)
