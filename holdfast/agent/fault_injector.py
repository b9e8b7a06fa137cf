"""Injects faults on a node: sends signals, and sets traps that workers spring.

The injector reports each fault to the coordinator before it strikes, so that its consequences are never
taken for a real fault; a fault that ends this agent, or cuts it off, waits until the report is
journaled. A repeated order is carried out once.
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

import msgspec

from holdfast import cgroups
from holdfast.agent.network_cut import Cut
from holdfast.agent.processes import Process, spawn
from holdfast.agent.snapshots import Snapshots
from holdfast.checkpoint.memory.images import Images
from holdfast.clock import JobClock
from holdfast.messages.actions import Inject
from holdfast.messages.chaos import FAULTS, Outcome, Sprung, Trap
from holdfast.messages.events import AnyEvent, FaultTold
from holdfast.messages.records import Part
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time
from holdfast.shm.rank_page import RankPage

_decoder = msgspec.msgpack.Decoder(Sprung)
log = logging.getLogger("holdfast.agent")

JOURNALED_LIMIT_S: Final = 1.0
"""Longest time that a fault waits until its report is journaled."""

WAKE: Final = (
    'while read -r _ _ state _ 2>/dev/null </proc/{pid}/stat && [ "$state" != T ]; do sleep 0.01; done;'
    " sleep {seconds:g}; kill -CONT {pid}"
)
"""Continues a process so long after it has stopped: a signal that came before would be lost."""

NO_STEPS: Final = "the steps of a command (--no-python) are not seen; only signals reach it, now"


class FaultTarget(NamedTuple):
    """One rank's process."""

    rank: Rank
    process: Process
    page: RankPage | None
    """None for a command that is not Python."""

    @property
    def step(self) -> StepNumber:
        return StepNumber(self.page.read().step if self.page is not None else 0)


@dataclass
class Injector:
    node: NodeId
    clock: JobClock
    report: Callable[[AnyEvent], None]
    snapshots: Snapshots
    targets: Callable[[], Mapping[Rank, FaultTarget]]
    written: Callable[[], Coroutine[Any, Any, object]]
    """Returns when all that was reported is journaled."""
    fall_silent: Callable[[float], None]
    """Stops the exchange with the coordinator for that many seconds."""
    _round: RoundNumber = RoundNumber(0)
    _traps: dict[tuple[int, int], Trap] = field(default_factory=dict)
    """All that were ordered of this node in this round, by their keys."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def begin_round(self, part: Part) -> None:
        self._round = part.round
        self._traps = {trap.key: trap for trap in part.traps}
        for trap in part.traps:
            self._refuse(trap, self._refusal(trap))

    def begin_rank(self, target: FaultTarget) -> None:
        """Hand a process the traps of the rank that it is about to get."""
        for trap in self._traps.values():
            if trap.rank == target.rank and trap.step and not self._refusal(trap):
                self._hand_over(trap, target)

    def take(self, order: Inject) -> None:
        """Carry out an order: set a trap, or strike now."""
        trap, target = order.trap, self.targets().get(order.trap.rank)
        if order.round != self._round or trap.key in self._traps:
            return
        self._traps[trap.key] = trap
        if self._refuse(trap, self._refusal(trap) or _too_late(trap, target)):
            return
        if target is not None and not trap.step and not FAULTS[trap.kind].needs_main_thread:
            self._strike(trap, target, target.step, self.clock.now())
        elif target is None or self._hand_over(trap, target):
            self._tell(trap, "armed")

    def look(self, target: FaultTarget) -> None:
        """Report which traps of a rank have sprung, and strike where that is the agent's part."""
        for entry in target.page.sprung.read() if target.page is not None else ():
            sprung = _decoder.decode(entry)
            trap = self._traps.get((sprung.injection, sprung.occurrence))
            if trap is None:
                continue
            if FAULTS[trap.kind].actor == "agent":
                self._strike(trap, target, sprung.step, self.clock.at(sprung.at))
            else:
                self._tell(trap, "done", "", sprung.step, self.clock.at(sprung.at))

    def gone(self, pid: int) -> None:
        """Remove what was created for a rank's process."""
        cgroups.remove(pid)

    def _hand_over(self, trap: Trap, target: FaultTarget) -> bool:
        page = target.page
        if page is not None and page.traps.append(msgspec.msgpack.encode(trap)):
            return True
        return not self._refuse(trap, NO_STEPS if page is None else "the rank had too many faults")

    def _refuse(self, trap: Trap, why: str) -> bool:
        if why:
            self._tell(trap, "refused", why)
        return bool(why)

    def _refusal(self, trap: Trap) -> str:
        """Return why this node cannot do that; empty if it can."""
        if trap.kind == "gpu-error" and not glob.glob("/dev/nvidia[0-9]*"):
            return f"there is no CUDA device on node {self.node}"
        if trap.kind == "oom" and not trap.force and not cgroups.possible():
            return (
                "no memory cgroup can be created for the rank alone, so the whole machine would run"
                " out of memory; --force accepts that"
            )
        needs_keeper = trap.kind in ("kill-keeper", "diskfull") and not trap.step
        if needs_keeper and not self.snapshots.keeper.pid:
            return f"node {self.node} has no keeper: its ranks have no checkpointer"
        return ""

    # ---- the agent's part ----

    def _strike(self, trap: Trap, target: FaultTarget, step: StepNumber, at: Time) -> None:
        why = ""
        if trap.kind == "kill-keeper":
            why = "" if self.snapshots.keeper.kill() else "there is no keeper"
        elif trap.kind == "diskfull":
            why = "" if self.snapshots.fail_writes(int(trap.value)) else "there is no keeper"
        elif trap.kind == "corrupt-image":
            why = (
                "" if _flip(Images(self.snapshots.images), trap) else "the rank has no sealed image"
            )
        self._tell(trap, "missed" if why else "done", why, step, at)
        if FAULTS[trap.kind].signal:
            target.process.send(signal.Signals(FAULTS[trap.kind].signal))
        elif trap.kind in ("kill-agent", "stop-agent", "netcut"):
            task = asyncio.ensure_future(self._strike_self(trap))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _strike_self(self, trap: Trap) -> None:
        try:
            await asyncio.wait_for(self.written(), JOURNALED_LIMIT_S)
        except asyncio.TimeoutError:
            log.warning("%s: the coordinator has not confirmed the report", trap.kind)
        if trap.kind == "netcut":
            await self._cut_off(trap.value)
        elif trap.kind == "kill-agent":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            if trap.value:
                spawn(["sh", "-c", WAKE.format(pid=os.getpid(), seconds=trap.value)], os.environ)
            os.kill(os.getpid(), signal.SIGSTOP)

    async def _cut_off(self, seconds: float) -> None:
        pids = [target.process.pid for target in self.targets().values()]
        cut = Cut([*pids, *([self.snapshots.keeper.pid] if self.snapshots.keeper.pid else [])])
        log.warning("cut off for %g s, with %d connections of ranks and keeper", seconds, len(cut))
        self.fall_silent(seconds)
        try:
            await asyncio.sleep(seconds)
        finally:
            cut.heal()

    def _tell(
        self,
        trap: Trap,
        outcome: Outcome,
        why: str = "",
        step: StepNumber = StepNumber(0),
        at: Time | None = None,
    ) -> None:
        if outcome == "done":
            log.warning("injected: %s on %s", trap.kind, trap.target)
        self.report(
            FaultTold(
                at=self.clock.now() if at is None else at,
                node=self.node,
                round=self._round,
                trap=trap,
                outcome=outcome,
                step=step,
                detail=why,
            )
        )


def _too_late(trap: Trap, target: FaultTarget | None) -> str:
    """Return why a trap comes too late for its rank; empty if it does not."""
    if target is None:
        return "" if trap.step else f"rank {trap.rank} has no process now"
    passed = 0 < trap.step <= target.step
    return f"rank {trap.rank} had finished step {target.step} already" if passed else ""


def _flip(images: Images, trap: Trap) -> bool:
    """Flip a bit of the rank's newest sealed image; False if it has none. In an image that is not
    sealed, the change could never be detected."""
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
