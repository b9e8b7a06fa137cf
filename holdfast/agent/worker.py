"""One rank's worker: its progress, how it is stopped, and what its end means for the rank.

Stopping: a worker gets SIGTERM, or the signal by which the user stops the node. One that dies of it or
ignores it is gone at once. One that handles it gets the grace period, then SIGKILL. The signal is for
the worker alone, whose loaders it needs until it has saved; but a command may be a shell that runs the
training, so there it is for all of its process group.

How a process ended and how its rank ended are two things. A script that ran to its end has
succeeded and one that raised has failed, whatever its interpreter dies of afterwards. And a worker
that was stopped did not end by itself, unless its script raised.

After a script's end its process may still have work to do: threads that upload, exit handlers. A
process whose script has succeeded is left alone for as long as it lives; only the coordinator ends it,
once it is proven that it hangs. One whose script has failed is left alone while something of it moves,
for a limited time, because the other ranks wait for the repair: see `Teardown`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import cgroups
from holdfast.agent import launcher_error
from holdfast.agent.evidence import Departed, Examined
from holdfast.agent.fault_injector import FaultTarget
from holdfast.agent.function import RestartableFunction
from holdfast.agent.output import Output
from holdfast.agent.processes import Exit, Process, WorkerProcess
from holdfast.agent.teardown import Teardown
from holdfast.clock import JobClock
from holdfast.diagnosis import faulthandling
from holdfast.diagnosis.frames import user_frame
from holdfast.messages import losses
from holdfast.messages.actions import StopWorkers
from holdfast.messages.local import ScriptReply
from holdfast.messages.records import RESUMED, Raised, RankProgress
from holdfast.messages.units import Rank, RoundNumber, Seconds, StepNumber

log = logging.getLogger("holdfast.agent")

MESSAGE_CHARS = 2000
TRACEBACK_CHARS = 16000


@dataclass(frozen=True)
class RankEnding:
    """How a rank ended."""

    exit: Exit
    by_itself: bool
    """Whether it ended of its own accord, not because it was stopped."""
    stop_took_s: Seconds | None = None
    """Time from the request to stop to its exit, if it handled that."""


@dataclass
class Worker:
    round: RoundNumber
    rank: Rank
    process: Process
    runtime: WorkerProcess | None
    """None for a command without our runtime (`--no-python`)."""
    output: Output
    error_file: Path
    flight: Path
    """Where it writes its flight recorder."""
    stacks_fd: int | None = None
    """Memory file that it writes its stacks to where py-spy may not read them."""
    stepped: bool = False
    """Whether it has finished its first step."""
    local_rank: int = 0
    again: bool = False
    """Whether its process was parked before, and had another place."""
    before: Output | None = None
    """What it writes to until it has entered its function again."""
    _oom_kills: int = field(default_factory=cgroups.kill_count)
    """The kernel's count of OOM kills when it began."""
    raised_at: float | None = None
    """When its script raised, on the machine's monotonic clock."""
    _raised: Raised | None = None
    _failed: bool = False
    """Whether its script raised before it was stopped."""
    _done: bool = False
    """Whether its script ran to the end."""
    _stop_sent: float | None = None
    _stop_signal: signal.Signals = signal.SIGTERM
    _timer: asyncio.TimerHandle | None = None
    """Kills it when its grace period is over."""
    _teardown: Teardown | None = None
    """Kills it when it does not end after its script raised."""

    # ---- what is known of it ----

    @property
    def function(self) -> RestartableFunction | None:
        """Its restartable function, if its script has entered one."""
        return self.runtime.function if self.runtime is not None else None

    @property
    def parked(self) -> bool:
        return self.function is not None and self.function.stage == "left"

    @property
    def stopping(self) -> bool:
        """Whether its process is being ended."""
        return self._stop_sent is not None

    @property
    def warm(self) -> bool:
        return self.runtime is not None and self.runtime.warm

    def progress(self, clock: JobClock) -> RankProgress:
        """Return how far it has come; of a command nothing is known."""
        if self.runtime is None:
            return RankProgress(rank=self.rank)
        page = self.runtime.page.read()
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
            pause_s=page.pause_s,
            step_s=page.step_s or None,
            saves=page.saves,
            resumed=RESUMED[page.resumed],
            samples=page.samples or None,
            trained_s=max(0.0, page.trained_s),
            evaluation_s=page.evaluation_s,
            loss=losses.written(page.loss) if page.loss_steps else None,
            loss_age=page.steps - page.loss_steps if page.loss_steps else 0,
        )

    def target(self) -> FaultTarget:
        """Return what the fault injector needs of it."""
        page = self.runtime.page if self.runtime is not None else None
        return FaultTarget(self.rank, self.process, page)

    def examined(self) -> Examined | None:
        """Return what an examination needs of it; None for a command, which has no vital signs."""
        if self.runtime is None:
            return None
        page = self.runtime.page.read()
        return Examined(
            rank=self.rank,
            pid=self.process.pid,
            vitals=self.runtime.page.vitals,
            step=StepNumber(page.step),
            stepped_at=page.last_at,
            flight=self.flight,
            stacks_fd=self.stacks_fd,
            log_tail=self.output.tail(),
            ended=self._done,
            returned=self.function is not None and self.function.stage == "returned",
        )

    def departed(self, step: StepNumber) -> Departed:
        """Return what an examination can still know of it once its process is gone."""
        return Departed(self.rank, self.process.pid, step, self.flight)

    # ---- its end ----

    def script_ended(self) -> None:
        """Note that its script ran to the end."""
        self._done = True

    def script_raised(self, raised: Raised) -> None:
        """Note that its script ended with an exception."""
        self._raised, self._failed = raised, self._stop_sent is None
        if self._teardown is None and self.process.exit is None:
            self._teardown = Teardown(self.process.pid, self._end)

    def _end(self, why: str) -> None:
        log.warning(
            "rank %d has not exited since its script raised: %s; killing it", self.rank, why
        )
        self.kill()

    def end_process(self) -> None:
        """Kill a process that hangs after its script has ended well."""
        if self._done:
            log.warning("rank %d hangs after its script has ended; killing it", self.rank)
            self.kill()

    def leave(self, why: str, limit_s: Seconds) -> bool:
        """Have it leave its restartable function; False if it is in none."""
        function = self.function
        if function is None or not function.stays or self.process.exit is not None:
            return False
        function.leave(self.round, why, limit_s, self._cannot_leave)
        return True

    def postponed(self) -> None:
        """Note that an atomic section comes before it leaves its function."""
        if self.function is not None:
            self.function.postponed()

    def _cannot_leave(self) -> None:
        if self.stopping:
            return  # It has a grace period now.
        log.warning("rank %d does not leave its function; its process is replaced", self.rank)
        self.end_now()

    def ask_to_stop(self, grace_s: Seconds, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop it by this signal, with SIGKILL after the grace period."""
        if self._stop_sent is not None:
            return
        loop = asyncio.get_running_loop()
        self._stop_sent, self._stop_signal = loop.time(), number
        if grace_s <= 0 or self.process.reaction_to(number) == "ignores":
            self.kill()
            return
        send = self.process.send if self.runtime is not None else self.process.send_to_group
        send(number)
        send(signal.SIGCONT)
        self._timer = loop.call_later(grace_s, self.kill)

    def end_within(self, grace_s: Seconds) -> None:
        """Kill it if it does not end by itself."""
        self._stop_sent = asyncio.get_running_loop().time()
        self._timer = asyncio.get_running_loop().call_later(grace_s, self.kill)

    def end_now(self) -> None:
        """Kill it: that is no death of its own."""
        if self._stop_sent is None:
            self._stop_sent = asyncio.get_running_loop().time()
        self.kill()

    def kill(self) -> None:
        self.process.send(signal.SIGKILL)

    def pause(self) -> None:
        """Stop it and its children where they are (SIGSTOP)."""
        self.process.send(signal.SIGSTOP)
        self.process.send_to_group(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on where it was paused."""
        self.process.send_to_group(signal.SIGCONT)
        self.process.send(signal.SIGCONT)

    def lent_until(self, until: float) -> None:
        """Note in its page when the lease on its rank is over."""
        if self.runtime is not None:
            self.runtime.page.vitals.lend(until)

    def hear_last_words(self) -> None:
        """Take what it still said and printed before its process ended."""
        if self._timer is not None:
            self._timer.cancel()
        if self._teardown is not None:
            self._teardown.close()
        if self.runtime is not None:
            self.runtime.read_all()
        self.output.drain()

    def ending(self, end: Exit) -> RankEnding:
        """Return what the end of its process means, once its last words were heard."""
        if self._done and end.signal is not None:
            name = signal.Signals(end.signal).name
            log.warning("rank %d died of %s after its script had ended", self.rank, name)
            end = Exit(code=0)
        elif self._failed and end.signal is not None:
            end = Exit(code=1)
        if self._stop_sent is None or self._failed:
            return RankEnding(end, by_itself=True)
        if end.signal in (self._stop_signal, signal.SIGKILL):
            return RankEnding(end, by_itself=False)
        took_s = asyncio.get_running_loop().time() - self._stop_sent
        return RankEnding(end, by_itself=self._raised is not None, stop_took_s=took_s)

    def raised(self) -> Raised | None:
        """Return what its script failed with, as far as it said so."""
        return self._raised or recorded_failure(self.error_file) or self._crash()

    def _crash(self) -> Raised | None:
        """Return where its script was when its process crashed."""
        text = faulthandling.crash(self.stacks_fd) if self.stacks_fd is not None else ""
        if not text:
            return None
        frames = [frame for thread in faulthandling.parse(text) for frame in thread.frames]
        frame = user_frame(frames)
        where = f"{Path(frame.file).name}:{frame.line}" if frame is not None else ""
        kind = text.partition("\n")[0].rpartition(": ")[2]
        return Raised(type=kind, message="", where=where, traceback=text[:TRACEBACK_CHARS])

    def failure(self, end: Exit) -> launcher_error.Failure:
        """Return how its rank failed."""
        return launcher_error.of_rank(self.rank, end, self.raised(), self.error_file)

    def memory_ran_out(self) -> bool:
        """Return whether the kernel has killed a process for memory since this one began."""
        return cgroups.kill_count() > self._oom_kills

    def park(self) -> None:
        """Let go of what belonged to its round; its process keeps its streams until it has others."""
        self.output.drain()
        self.close_before()
        if self.stacks_fd is not None:
            os.close(self.stacks_fd)
            self.stacks_fd = None

    def succeed(self, parked: Worker) -> None:
        """Go on in the process of a parked worker, with its streams until it has entered again, and
        with an empty page: what it did in its last place is told."""
        self.again, self.before = True, parked.output
        if parked.runtime is not None:
            parked.runtime.page.reset()

    def close_before(self) -> None:
        """Close the output of its last place."""
        if self.before is not None:
            self.before.close()
            self.before = None

    def close(self) -> None:
        self.output.close()
        self.close_before()
        with suppress(OSError):  # Only a script that failed has one; torch follows its umask.
            self.error_file.chmod(0o600)
        if self.stacks_fd is not None:
            os.close(self.stacks_fd)
            self.stacks_fd = None
        if self.runtime is not None:
            self.runtime.close()


def recorded_failure(path: Path) -> Raised | None:
    """Return the failure in the file that torch's `record` decorator writes.

    The file holds a message, or an object that has one with the stack beside it. Without the
    decorator there is no file, and a process that dies while writing leaves half of one: both read
    as None.
    """
    try:
        message = json.loads(path.read_text())["message"]
        if isinstance(message, str):
            kind, text, stack = "Error", message, message
        else:
            text = str(message.get("message", ""))
            kind = text.partition(":")[0]
            stack = message.get("extraInfo", {}).get("py_callstack", "")
        traceback = stack[-TRACEBACK_CHARS:]
        return Raised(type=kind, message=text[:MESSAGE_CHARS], where="", traceback=traceback)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@dataclass
class Workers:
    """The running workers of the round, and the final progress of those that ended."""

    running: dict[Rank, Worker] = field(default_factory=dict)
    ended: list[RankProgress] = field(default_factory=list)
    departed: list[Departed] = field(default_factory=list)
    """Those that are gone and whose scripts had ended."""
    parked: dict[int, Worker] = field(default_factory=dict)
    """Those that wait to enter their function again, by local rank."""
    failure: launcher_error.Failure | None = None
    """How the first rank of the round that failed by itself did so."""
    slowest_stop_s: Seconds | None = None
    """Longest time that a worker of the round took to exit after it was asked to stop."""
    slowest_leave_s: Seconds | None = None
    """Longest time that a worker took to leave its function when it was told to."""
    _paused: bool = False
    _lent_until: float = math.inf

    def add(self, worker: Worker) -> None:
        """Take in a worker that is about to get its rank; its process may be a parked one."""
        parked = self.parked.get(worker.local_rank)
        if parked is not None and parked.process.pid == worker.process.pid:
            del self.parked[worker.local_rank]
        self.running[worker.rank] = worker
        worker.lent_until(self._lent_until)
        if self._paused:
            worker.pause()

    def begin_round(self) -> None:
        self.ended = []
        self.departed = []
        self.failure = None
        self.slowest_stop_s = None
        self.slowest_leave_s = None

    def park(self, worker: Worker, progress: RankProgress) -> None:
        """Set a worker aside that has left its function."""
        del self.running[worker.rank]
        self.parked[worker.local_rank] = worker
        worker.lent_until(math.inf)  # It has no rank that another node could have too.
        self.ended.append(progress)
        took_s = worker.function.took_s if worker.function is not None else None
        if took_s is not None:
            self.slowest_leave_s = max(took_s, self.slowest_leave_s or 0.0)
        worker.park()

    def dismiss(self, why: str, grace_s: Seconds, among: Iterable[Worker] | None = None) -> None:
        """End all that wait to enter their function again, or those given; they are running once
        more, until they are gone."""
        for worker in list(self.parked.values() if among is None else among):
            del self.parked[worker.local_rank]
            self.running[worker.rank] = worker
            if worker.function is not None:
                worker.function.dismiss(why)
            worker.end_within(grace_s)

    def release(self) -> None:
        """Let all scripts go on that wait for the function to return on all ranks."""
        for worker in self.running.values():
            if worker.function is not None:
                worker.function.release()

    def all_returned(self) -> bool:
        """Return whether the function has returned on all of them."""
        functions = [worker.function for worker in self.running.values()]
        return bool(functions) and all(f is not None and f.stage == "returned" for f in functions)

    def leave(self, order: StopWorkers) -> list[Worker]:
        """Have all leave their functions; return those that have to be ended instead.

        Paused ones go on, because a stopped process cannot leave. One that is to be replaced is ended,
        though it may have left by itself.
        """
        if self._paused:
            self.lent_until(math.inf)
            self.go_on()
        ranks, round = order.replace, order.round
        for worker in self.running.values():
            if worker.rank in ranks:
                worker.end_within(0.0)
        left = [one for one in self.parked.values() if one.round == round]
        parked = [one for one in left if one.rank in ranks]
        self.ended = [one for one in self.ended if one.rank not in {p.rank for p in parked}]
        staying = [one for one in self.running.values() if one.rank not in ranks]
        for worker in left:
            worker.leave(order.why, order.leave_s)  # It has left by itself, and learns why.
        self.dismiss(order.why, 0.0, parked)
        return [worker for worker in staying if not worker.leave(order.why, order.leave_s)]

    def note_end(self, progress: RankProgress, stop_took_s: Seconds | None) -> None:
        self.ended.append(progress)
        if stop_took_s is not None:
            self.slowest_stop_s = max(stop_took_s, self.slowest_stop_s or 0.0)

    def all_stepped(self) -> bool:
        return all(worker.stepped for worker in self.running.values())

    def targets(self) -> dict[Rank, FaultTarget]:
        return {rank: worker.target() for rank, worker in self.running.items()}

    def examined(self) -> list[Examined]:
        found = (worker.examined() for worker in self.running.values())
        return [one for one in found if one is not None]

    def reply(self, rank: Rank, message: ScriptReply) -> None:
        """Answer a rank's script, if its worker is still there."""
        worker = self.running.get(rank)
        if worker is not None and worker.runtime is not None:
            worker.runtime.reply(message)

    def ask_to_stop(
        self, grace_s: Seconds, number: signal.Signals, among: list[Worker] | None = None
    ) -> None:
        """Stop all of them, or those given. Paused ones go on first: the order says that nobody has
        their places."""
        if self._paused and grace_s > 0:
            self.lent_until(math.inf)
            self.go_on()
        for worker in self.running.values() if among is None else among:
            worker.ask_to_stop(grace_s, number)

    def end_process(self, rank: Rank) -> None:
        """Kill the process of a rank whose script has ended, if it is still there."""
        worker = self.running.get(rank)
        if worker is not None:
            worker.end_process()

    def kill(self) -> None:
        for worker in self.running.values():
            worker.end_now()

    def hurry(self) -> bool:
        """Kill all but those that finish an atomic section first; return whether that was all."""
        late = [w for w in self.running.values() if w.function is None or not w.function.is_atomic]
        for worker in late:
            worker.end_now()
        return len(late) == len(self.running)

    # ---- the lease on the round ----

    def lent_until(self, until: float) -> None:
        self._lent_until = until
        for worker in self.running.values():
            worker.lent_until(until)

    def pause(self) -> None:
        self._paused = True
        for worker in self.running.values():
            worker.pause()

    def go_on(self) -> None:
        self._paused = False
        for worker in self.running.values():
            worker.go_on()
