"""One rank's process: what is known of it, how it is brought to its end, and what that end means.

Stopping: a worker that dies of SIGTERM or ignores it is gone at once. One that handles it has the
grace that it is given, then SIGKILL.

How a process ended and how its rank ended are two things. A script that ran to its end has ended
well and one that raised has failed, whatever its interpreter dies of after that; the interpreter only
has so long to follow. And a worker that was stopped did not end by itself, unless it raised.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import cgroups
from holdfast.agent import error_file as errorfile
from holdfast.agent.evidence import Examined
from holdfast.agent.fault_injector import FaultTarget
from holdfast.agent.output import Output
from holdfast.agent.processes import Exit, Process
from holdfast.agent.standbys import Standby
from holdfast.clock import JobClock
from holdfast.messages.records import Raised, RankProgress
from holdfast.messages.units import Rank, RoundNumber, Seconds, StepNumber

log = logging.getLogger("holdfast.agent")

ENDING_LIMIT_S = 30.0
"""A script that has ended is over; its interpreter may take so long to end as well."""
DYING_LIMIT_S = 10.0
"""The same for one that raised: others wait for it."""
ENDING_LIMIT = "HOLDFAST_ENDING_LIMIT"
"""In the environment: another limit in seconds for both, for tests."""


@dataclass(frozen=True)
class Ending:
    """How a rank ended."""

    exit: Exit
    by_itself: bool
    """Of its own accord, not because we stopped it."""
    stop_took_s: Seconds | None = None
    """How long it took to end when it was asked to, if it handled that."""


@dataclass
class Worker:
    round: RoundNumber
    rank: Rank
    process: Process
    standby: Standby | None
    """None for a command that is no Python of ours (`--no-python`)."""
    output: Output
    error_file: Path
    flight: Path
    """Where it writes its flight recorder."""
    stacks_fd: int | None = None
    """The memory file that it writes its stacks to, where nobody else may look at them."""
    stepped: bool = False
    """It has finished its first step."""
    _oom_kills: int = field(default_factory=cgroups.kill_count)
    """How often the kernel had run out of memory before it began."""
    _raised: Raised | None = None
    _failed: bool = False
    """Its script raised, and not because we stopped it."""
    _done: bool = False
    """Its script ran to the end."""
    _stop_sent: float | None = None
    _timer: asyncio.TimerHandle | None = None
    """Runs until its time is up and it is killed."""

    # ---- what is known of it ----

    @property
    def warm(self) -> bool:
        return self.standby is not None and self.standby.warm

    def progress(self, clock: JobClock) -> RankProgress:
        """How far it has come; of a command nothing is known."""
        if self.standby is None:
            return RankProgress(rank=self.rank)
        page = self.standby.page.read()
        if page.steps == 0:
            return RankProgress(rank=self.rank, restore_s=page.restore_s)
        return RankProgress(
            rank=self.rank,
            step=StepNumber(page.step),
            steps=page.steps,
            first_at=clock.at(page.first_at),
            last_at=clock.at(page.last_at),
            checkpoint_s=page.checkpoint_s,
            restore_s=page.restore_s,
            saves=page.saves,
        )

    def target(self) -> FaultTarget:
        """Itself, for whoever injects faults."""
        page = self.standby.page if self.standby is not None else None
        return FaultTarget(self.rank, self.process, page)

    def examined(self) -> Examined | None:
        """Itself, for whoever looks at it closely; None for a command, which has no vitals."""
        if self.standby is None:
            return None
        page = self.standby.page.read()
        return Examined(
            rank=self.rank,
            pid=self.process.pid,
            vitals=self.standby.page.vitals,
            step=StepNumber(page.step),
            stepped_at=page.last_at,
            flight=self.flight,
            stacks_fd=self.stacks_fd,
            log_tail=self.output.tail(),
        )

    # ---- its end ----

    def script_ended(self) -> None:
        self._done = True
        self._await_end(ENDING_LIMIT_S)

    def script_raised(self, raised: Raised) -> None:
        self._raised, self._failed = raised, self._stop_sent is None
        self._await_end(DYING_LIMIT_S)

    def _await_end(self, limit_s: float) -> None:
        """Its script is over; a thread of it, or its interpreter, may not be."""
        if self._timer is None and self.process.exit is None:
            limit_s = float(os.environ.get(ENDING_LIMIT, limit_s))
            self._timer = asyncio.get_running_loop().call_later(limit_s, self._end)

    def _end(self) -> None:
        if self.process.exit is None:
            log.warning("rank %d hangs after its script has ended; it is ended", self.rank)
            self.kill()

    def ask_to_stop(self, grace_s: Seconds) -> None:
        if self._stop_sent is not None:
            return
        self._stop_sent = time.monotonic()
        if self.process.minds_sigterm() == "ignores" or grace_s <= 0:
            self.kill()
            return
        self.process.send(signal.SIGTERM)
        self.process.send(signal.SIGCONT)
        self._timer = asyncio.get_running_loop().call_later(grace_s, self.kill)

    def kill(self) -> None:
        self.process.send(signal.SIGKILL)

    def hear_last_words(self) -> None:
        """Its process is gone: take what it had still said and printed."""
        if self._timer is not None:
            self._timer.cancel()
        if self.standby is not None:
            self.standby.read_all()
        self.output.drain()

    def ending(self, end: Exit) -> Ending:
        """What the end of its process means, once all that it had to say was heard."""
        if self._done and end.signal is not None:
            name = signal.Signals(end.signal).name
            log.warning("rank %d died of %s after its script had ended", self.rank, name)
            end = Exit(code=0)
        elif self._failed and end.signal is not None:
            end = Exit(code=1)
        if self._stop_sent is None or self._failed:
            return Ending(end, by_itself=True)
        if end.signal in (signal.SIGTERM, signal.SIGKILL):
            return Ending(end, by_itself=False)
        took_s = time.monotonic() - self._stop_sent
        return Ending(end, by_itself=self._raised is not None, stop_took_s=took_s)

    def raised(self) -> Raised | None:
        """What its script failed with, as far as it said so."""
        return self._raised or errorfile.recorded(self.error_file)

    def memory_ran_out(self) -> bool:
        """Whether the kernel has killed somebody for memory since it began."""
        return cgroups.kill_count() > self._oom_kills

    def close(self) -> None:
        self.output.close()
        if self.stacks_fd is not None:
            os.close(self.stacks_fd)
            self.stacks_fd = None
        if self.standby is not None:
            self.standby.close()
