"""Has faults happen that somebody asked for: signals at once, the rest by traps that workers spring.

Each fault is told to the coordinator before it happens, so that nobody takes its consequences for a
real one; what ends this agent, or its voice, waits a moment until that is written down. An order that
comes twice is carried out once.
"""

from __future__ import annotations

import asyncio
import glob
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from holdfast import cgroups as memorybox
from holdfast.agent.network_cut import Cut
from holdfast.agent.processes import Process, spawn
from holdfast.agent.snapshots import Keeping
from holdfast.checkpoint.memory.images import Images
from holdfast.clock import JobClock
from holdfast.messages.actions import Inject
from holdfast.messages.chaos import BY_AGENT, FAULT_NAMES, IN_MAIN_THREAD, FaultName, Outcome, Trap
from holdfast.messages.events import AnyEvent, FaultTold
from holdfast.messages.records import Part
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time
from holdfast.shm.rank_page import RankPage

log = logging.getLogger("holdfast.agent")

WRITTEN_LIMIT_S: Final = 1.0
"""So long a fault waits until it is written down that it was asked for."""

NO_STEPS: Final = "a command (--no-python) has no steps that we see; only signals reach it, now"

_SIGNALS: Final[dict[FaultName, signal.Signals]] = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "stop": signal.SIGSTOP,
    "cont": signal.SIGCONT,
}

Key = tuple[int, int]


class Target(NamedTuple):
    """One rank's process."""

    rank: Rank
    process: Process
    page: RankPage | None
    """None for a command that is no Python of ours."""


@dataclass
class Injector:
    node: NodeId
    clock: JobClock
    report: Callable[[AnyEvent], None]
    keeping: Keeping
    targets: Callable[[], Mapping[Rank, Target]]
    written: Callable[[], Coroutine[Any, Any, object]]
    """Returns when all that was reported is in the journal."""
    fall_silent: Callable[[float], None]
    """Neither hears nor says anything to the coordinator for so long."""
    _round: RoundNumber = RoundNumber(0)
    _traps: dict[Key, Trap] = field(default_factory=dict)
    """All that were asked of this node in this round."""
    _boxed: set[int] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def begin_round(self, part: Part) -> None:
        self._round = part.round
        self._traps = {}
        for trap in part.traps:
            why = self._refusal(trap, None)
            if why:
                self._tell(trap, "refused", why=why)
            else:
                self._traps[_key(trap)] = trap

    def begin_rank(self, target: Target) -> None:
        """A process is about to get that rank: lay what waits for it."""
        for trap in self._traps.values():
            if trap.rank == target.rank and trap.step:
                self._lay(trap, target)

    def take(self, order: Inject) -> None:
        trap = order.trap
        if order.round != self._round or _key(trap) in self._traps:
            return
        self._traps[_key(trap)] = trap
        target = self.targets().get(trap.rank)
        why = self._refusal(trap, target)
        if not why and target is None and not trap.step:
            why = f"rank {trap.rank} has no process now"
        if why:
            self._tell(trap, "refused", why=why)
        elif target is None:
            self._tell(trap, "armed")  # It will be laid when the rank begins.
        elif trap.step or trap.kind in IN_MAIN_THREAD:
            if self._lay(trap, target):
                self._tell(trap, "armed")
        else:
            page = target.page
            step = StepNumber(page.read().step if page is not None else 0)
            self._do(trap, target, step, self.clock.now())

    def look(self, target: Target) -> None:
        """See which of a rank's traps were sprung."""
        if target.page is None:
            return
        for sprung in target.page.traps.take_sprung():
            trap = self._traps.get((sprung.injection, sprung.occurrence))
            if trap is None:
                continue
            step, at = StepNumber(sprung.step), self.clock.at(sprung.at)
            if FAULT_NAMES[sprung.kind] in BY_AGENT:
                self._do(trap, target, step, at)
            else:
                self._tell(trap, "done", step, at)
            if trap.kind == "oom":
                self._boxed.add(target.process.pid)

    def gone(self, pid: int) -> None:
        """A rank's process is gone; so is what was made for it."""
        if pid in self._boxed:
            self._boxed.discard(pid)
            memorybox.remove(pid)

    # ---- laying traps ----

    def _lay(self, trap: Trap, target: Target) -> bool:
        page = target.page
        if page is None:
            self._tell(trap, "refused", why=NO_STEPS)
            return False
        laid = page.traps.lay(
            trap.injection,
            trap.occurrence,
            FAULT_NAMES.index(trap.kind),
            trap.step,
            trap.value,
            trap.spot,
            page.read().step,
        )
        if not laid:
            self._tell(trap, "refused", why=f"rank {trap.rank} has no place for another fault")
        return laid

    def _refusal(self, trap: Trap, target: Target | None) -> str:
        in_thread = bool(trap.step) or trap.kind in IN_MAIN_THREAD
        if target is not None and target.page is None and in_thread:
            return NO_STEPS
        if trap.kind == "gpu-error" and not glob.glob("/dev/nvidia[0-9]*"):
            return f"there is no CUDA device on node {self.node}"
        if trap.kind == "oom" and not trap.force and not memorybox.possible():
            return (
                "no memory cgroup can be made here for the rank alone, so the whole machine would"
                " run out of memory; with --force it does"
            )
        if (
            trap.kind in ("kill-keeper", "diskfull")
            and not trap.step
            and not self.keeping.keeper.pid
        ):
            return f"node {self.node} has no keeper: its ranks have no checkpointer"
        return ""

    # ---- what this agent does itself ----

    def _do(self, trap: Trap, target: Target, step: StepNumber, at: Time) -> None:
        if trap.kind in _SIGNALS:
            self._tell(trap, "done", step, at)
            target.process.send(_SIGNALS[trap.kind])
        elif trap.kind in ("kill-agent", "stop-agent", "netcut"):
            self._tell(trap, "done", step, at)
            self._spawn(self._harm_self(trap))
        elif trap.kind == "kill-coordinator":
            self._tell(trap, "done", step, at)
        else:
            why = self._harm_snapshots(trap)
            self._tell(trap, "missed" if why else "done", step, at, why)

    async def _harm_self(self, trap: Trap) -> None:
        try:
            await asyncio.wait_for(self.written(), WRITTEN_LIMIT_S)
        except asyncio.TimeoutError:
            log.warning("%s: nobody wrote down that it was asked for", trap.kind)
        if trap.kind == "kill-agent":
            os.kill(os.getpid(), signal.SIGKILL)
        elif trap.kind == "stop-agent":
            self._stop_self(trap.value)
        else:
            await self._cut_off(trap.value)

    def _stop_self(self, seconds: float) -> None:
        if seconds:
            wake = f"sleep {seconds:g}; kill -CONT {os.getpid()}"
            spawn(["sh", "-c", wake], os.environ)
        os.kill(os.getpid(), signal.SIGSTOP)

    async def _cut_off(self, seconds: float) -> None:
        pids = [target.process.pid for target in self.targets().values()]
        cut = Cut([*pids, *([self.keeping.keeper.pid] if self.keeping.keeper.pid else [])])
        log.warning("cut off for %g s, with %d connections of ranks and keeper", seconds, len(cut))
        self.fall_silent(seconds)
        try:
            await asyncio.sleep(seconds)
        finally:
            cut.heal()

    def _harm_snapshots(self, trap: Trap) -> str:
        """Why nothing could be done; empty when it was."""
        if trap.kind == "kill-keeper":
            return "" if self.keeping.keeper.kill() else "there is no keeper"
        if trap.kind == "diskfull":
            return "" if self.keeping.fail_writes(int(trap.value)) else "there is no keeper"
        return "" if _flip(Images(self.keeping.images), trap) else "the rank has no sealed image"

    # ---- telling ----

    def _tell(
        self,
        trap: Trap,
        outcome: Outcome,
        step: StepNumber = StepNumber(0),
        at: Time | None = None,
        why: str = "",
    ) -> None:
        if outcome == "done":
            log.warning("asked for: %s on rank %d", trap.kind, trap.rank)
        self.report(
            FaultTold(
                at=self.clock.now() if at is None else at,
                node=self.node,
                round=self._round,
                injection=trap.injection,
                occurrence=trap.occurrence,
                outcome=outcome,
                rank=trap.rank,
                step=step,
                detail=why,
            )
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _key(trap: Trap) -> Key:
    return trap.injection, trap.occurrence


def _flip(images: Images, trap: Trap) -> bool:
    """Flip a bit of the rank's newest image that is sealed; False when it has none. In one that is
    not, nobody could ever find out."""
    found = [
        (record.round, record.step, image, record.size)
        for _, image, record in images.all()
        if record.rank == trap.rank and record.size and image.digests() is not None
    ]
    if not found:
        return False
    *_, image, size = max(found, key=lambda one: one[:2])
    image.body[trap.spot % size] ^= 1
    return True
