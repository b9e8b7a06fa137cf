"""Ends a node when the coordinator does not order it.

Usually it does: a user who ends a node signals the launcher, which signals the agent, which reports
it, and the coordinator orders `Finish`, with all that follows from it; the workers of the node get
the signal that the user sent. The exceptions:

    no stream when the signal comes     the coordinator gets a moment, then the node ends alone;
                                        without grace once the lease on its round is over
    a second signal                     the node ends at once, without grace
    the launcher is gone                the same
    idle, and no coordinator for long   the node ends, and says that it may be tried again
    ranks ended, the journal is lost    the node ends with their result: nobody will order it
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from dataclasses import dataclass
from typing import Protocol

from holdfast import kernel
from holdfast.agent.orders import AgentOrders
from holdfast.agent.stream import CoordinatorStream
from holdfast.agent.supervisor import Supervisor
from holdfast.clock import JobClock
from holdfast.core.patience import JOIN_LIMIT_S
from holdfast.errors import PlatformError, UsageError
from holdfast.messages.actions import Finish
from holdfast.messages.events import NodeLeaving
from holdfast.messages.exits import EXIT_FAILED, EXIT_TRY_AGAIN
from holdfast.messages.units import Seconds
from holdfast.platforms.slurm_environment import queue_headless_again

log = logging.getLogger("holdfast.agent")

OWN_GRACE_S = 30.0
LEAVE_LIMIT_S = 2.0
"""How long to wait for a coordinator that would order Finish."""
LOOK_EVERY_S = 1.0
WARN_AFTER_S = 5.0
HEADLESS_S = 20.0
"""How long the coordinator may be away before Slurm is asked about its node, and how often."""


class Hurried(Protocol):
    def hurry(self) -> None: ...


@dataclass
class Shutdown:
    orders: AgentOrders
    clock: JobClock
    stream: CoordinatorStream
    supervisor: Supervisor
    snapshots: Hurried
    _joined: bool = False
    _wanted: Finish | None = None
    """The order to carry out alone, once a signal came."""

    def joined(self) -> None:
        """Report a pending end now that the coordinator knows the node."""
        self._joined = True
        if self._wanted is not None:
            self._tell(self._wanted)

    # ---- signals ----

    def handle_signals(self) -> None:
        """Install the signal handlers."""
        loop = asyncio.get_running_loop()
        for name in self.orders.settings.signals_to_handle:
            number = signal.Signals[name]
            loop.add_signal_handler(number, self._on_signal, number)
        kernel.unblock_signals()
        if self._orphaned():
            self._on_signal(signal.SIGTERM)

    def _orphaned(self) -> bool:
        return os.getppid() != self.orders.launcher_pid

    def _on_signal(self, number: signal.Signals) -> None:
        if self._orphaned() or self._wanted is not None:
            # The launcher is gone, or the user insists: end without grace.
            self.snapshots.hurry()
            self.supervisor.act(self._finish(number, grace_s=0.0))
            self.supervisor.kill_all()
            return
        grace_s = self.orders.terms.grace_s
        self._wanted = self._finish(number, OWN_GRACE_S if grace_s is None else grace_s)
        self.supervisor.stop_signal = number
        if self._joined:
            self._tell(self._wanted)
        if not self.stream.connected:
            # The coordinator may be starting or about to return; if not, the node ends alone.
            asyncio.get_running_loop().call_later(LEAVE_LIMIT_S, self._end_alone, number)

    def _end_alone(self, number: signal.Signals) -> None:
        # Paused ranks must not run again, not even for what they would do at their end.
        self.supervisor.act(self._finish(number, 0.0 if self.stream.lease.over else OWN_GRACE_S))

    def _tell(self, finish: Finish) -> None:
        now, reason, code = self.clock.now(), finish.reason, finish.code
        self.stream.send(NodeLeaving(at=now, node=self.orders.node, reason=reason, code=code))

    def _finish(self, number: signal.Signals, grace_s: Seconds) -> Finish:
        code = EXIT_FAILED if number == signal.SIGINT else EXIT_TRY_AGAIN
        reason = f"stopped by {number.name}"
        return Finish(node=self.orders.node, code=code, reason=reason, grace_s=grace_s)

    # ---- no coordinator ----

    async def watch_coordinator(self) -> None:
        """Give up when the node is idle and the coordinator is unreachable for too long."""
        limit_s = self.orders.terms.join_limit_s or JOIN_LIMIT_S
        where = f"the coordinator at {self.stream.host}:{self.stream.port}"
        warned, headless_s = False, HEADLESS_S
        while not self.supervisor.finished.done():
            await asyncio.sleep(LOOK_EVERY_S)
            alone_s = self.stream.lost_for_s()
            if alone_s > WARN_AFTER_S and not warned and not self.stream.orphaned:
                log.warning("cannot reach %s; still trying", where)
            warned = alone_s > WARN_AFTER_S
            headless_s = headless_s if alone_s else HEADLESS_S
            if self.stream.orphaned and self.supervisor.round and not self.supervisor.busy:
                code = 0 if self.supervisor.all_ended_well else EXIT_FAILED
                why = "its ranks have ended, and the coordinator does not know the job"
                self.supervisor.act(
                    Finish(node=self.orders.node, code=code, reason=why, grace_s=0.0)
                )
            if alone_s > headless_s:
                headless_s = alone_s + HEADLESS_S
                await asyncio.to_thread(_mind_slurm)
            if alone_s > limit_s and not self.supervisor.busy:
                reason = f"{where} cannot be reached"
                print(f"holdfast: {reason}; try again", file=sys.stderr)
                self.supervisor.act(
                    Finish(node=self.orders.node, code=EXIT_TRY_AGAIN, reason=reason, grace_s=0.0)
                )


def _mind_slurm() -> None:
    """Have a job go on whose head was lost with its node: only Slurm can give it another."""
    try:
        if told := queue_headless_again(os.environ):
            log.warning("%s", told)
    except (PlatformError, UsageError) as error:
        log.warning("the job is without a coordinator, and Slurm does not help: %s", error)
