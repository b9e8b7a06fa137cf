"""When a node ends without being told to by the coordinator.

The rule is that it is told: whoever wants it to end signals the launcher, which signals us, we tell the
coordinator, and the coordinator orders `Finish`, with all that hangs on it. The exceptions:

    there is no stream when the signal comes     the coordinator has a moment, then we go by ourselves
    somebody signals again                       we go at once, and nobody is waited for
    the launcher is gone                         the same
    no coordinator for far too long, and idle    we go, and say that it may be tried again
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast import kernel
from holdfast.agent.snapshots import Keeping
from holdfast.agent.stream import CoordinatorStream
from holdfast.agent.supervisor import Supervisor
from holdfast.clock import JobClock
from holdfast.messages.actions import Finish
from holdfast.messages.events import NodeLeaving
from holdfast.messages.exits import EXIT_FAILED, EXIT_TRY_AGAIN
from holdfast.messages.units import NodeId, Seconds

log = logging.getLogger("holdfast.agent")

OWN_GRACE_S = 30.0
LEAVE_LIMIT_S = 2.0
"""So long we wait for a coordinator that would order us to finish."""
LOOK_EVERY_S = 1.0
TELL_AFTER_S = 5.0


@dataclass
class Leaving:
    node: NodeId
    signals: Sequence[signal.Signals]
    """Those that mean that the node shall end."""
    launcher_pid: int
    solitude_limit_s: Seconds
    clock: JobClock
    stream: CoordinatorStream
    supervisor: Supervisor
    keeping: Keeping
    _joined: bool = False
    _wanted: Finish | None = None
    """What we would do by ourselves, once we were told to stop."""

    def joined(self) -> None:
        """The coordinator knows the node now, and can be told."""
        self._joined = True
        if self._wanted is not None:
            self._tell(self._wanted)

    # ---- signals ----

    def mind_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in self.signals:
            loop.add_signal_handler(number, self._on_signal, number)
        kernel.unblock_signals()
        if self._orphaned():
            self._on_signal(signal.SIGTERM)

    def _orphaned(self) -> bool:
        return os.getppid() != self.launcher_pid

    def _on_signal(self, number: signal.Signals) -> None:
        if self._orphaned() or self._wanted is not None:
            # The launcher is gone, or somebody insists: no more courtesy.
            self.keeping.hurry()
            self.supervisor.act(self._finish(number, grace_s=0.0))
            self.supervisor.kill_all()
            return
        self._wanted = self._finish(number, OWN_GRACE_S)
        if self._joined:
            self._tell(self._wanted)
        if not self.stream.connected:
            # It may be about to start, or to come back; if it does not, we go without its leave.
            loop = asyncio.get_running_loop()
            loop.call_later(LEAVE_LIMIT_S, self.supervisor.act, self._wanted)

    def _tell(self, finish: Finish) -> None:
        now, reason, code = self.clock.now(), finish.reason, finish.code
        self.stream.send(NodeLeaving(at=now, node=self.node, reason=reason, code=code))

    def _finish(self, number: signal.Signals, grace_s: Seconds) -> Finish:
        code = EXIT_FAILED if number == signal.SIGINT else EXIT_TRY_AGAIN
        reason = f"stopped by {number.name}"
        return Finish(node=self.node, code=code, reason=reason, grace_s=grace_s)

    # ---- solitude ----

    async def mind_solitude(self) -> None:
        """Give up when there is nothing to do and nobody to ask for far too long."""
        where = f"the coordinator at {self.stream.host}:{self.stream.port}"
        told = False
        while not self.supervisor.finished.done():
            await asyncio.sleep(LOOK_EVERY_S)
            alone_s = 0.0 if self.stream.connected else time.monotonic() - self.stream.lost_at
            if alone_s > TELL_AFTER_S and not told:
                log.warning("no word from %s; knocking on", where)
            told = alone_s > TELL_AFTER_S
            if alone_s > self.solitude_limit_s and not self.supervisor.busy:
                reason = f"{where} cannot be reached"
                print(f"holdfast: {reason}; try again", file=sys.stderr)
                order = Finish(node=self.node, code=EXIT_TRY_AGAIN, reason=reason, grace_s=0.0)
                self.supervisor.act(order)
