"""How long this node's ranks may run without word from the coordinator.

The coordinator lends a node its places in a round and answers each beat with how long, counted from
when that beat was sent (`core.leases` tells the whole of it). When the lease is over, another node may
be about to take these places, so the ranks are paused: not killed, because most often the network comes
back and the round is still in force. Then they go on, with nothing lost. If the round was given to
others, the coordinator orders the end of them.

The lease is also renewed by proof that the coordinator's host can be reached and only its process
cannot, because a process that is dead or stands gives nobody up: its kernel refused a connection, or
acknowledged a beat, which a process that runs would have heard. (That it accepts a connection is not
enough: nobody has heard who is there.) Behind a proxy these prove nothing. No such proof brings back
a lease that is over.

The ranks do not depend on the agent for this: the end of the lease stands in each rank's page, and a
worker that finds itself past it stops itself (`worker.heartbeat`), even if the agent is stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.messages.units import RoundNumber, Seconds
from holdfast.messages.wire import Lease

log = logging.getLogger("holdfast.agent")

FOREVER = float("inf")


class Lessee(Protocol):
    """The ranks that run under the lease."""

    round: RoundNumber

    @property
    def busy(self) -> bool: ...
    def lent_until(self, until: float) -> None: ...
    def pause(self) -> None: ...
    def go_on(self) -> None: ...


@dataclass
class RoundLease:
    """The lease of this node; times are on the machine's monotonic clock."""

    ranks: Callable[[], Lessee]
    until: float = FOREVER
    over: bool = False
    _for_s: Seconds = 0.0
    """How long the last lease was for; 0 if nobody could take this node's places."""
    _beats: deque[tuple[int, float]] = field(default_factory=deque)
    """Beats that are not answered yet, and when each was sent."""
    _timer: asyncio.TimerHandle | None = None

    def beat_sent(self, number: int) -> None:
        self._beats.append((number, asyncio.get_running_loop().time()))

    def stream_lost(self) -> None:
        """Forget the beats of a stream: they will not be answered."""
        self._beats.clear()

    def answered(self, lease: Lease) -> None:
        """Renew the lease, and let paused ranks go on if the round is still theirs."""
        while self._beats and self._beats[0][0] < lease.beat:
            self._beats.popleft()
        if not self._beats or self._beats[0][0] != lease.beat:
            return
        _, sent_at = self._beats.popleft()
        self._for_s = lease.for_s
        self._note_end()
        ranks = self.ranks()
        if self.over and ranks.busy and lease.round != ranks.round:
            return  # The places are given to others; the order to end is on its way.
        self._renew(sent_at)

    def host_reached(self, at: float) -> None:
        """Renew the lease: at that time the coordinator's host answered, though not its process."""
        self._note_end()
        if not self.over:
            self._renew(at)

    def _renew(self, since: float) -> None:
        now = asyncio.get_running_loop().time()
        until = since + self._for_s if self._for_s else FOREVER
        if until <= now or (until <= self.until and self.until != FOREVER):
            return
        ranks, self.until = self.ranks(), until
        ranks.lent_until(until)
        self._stop_timer()
        if until != FOREVER:
            self._timer = asyncio.get_running_loop().call_at(until, self._end)
        if self.over:
            self.over = False
            if ranks.busy:
                log.warning("the coordinator is back and the round still in force: ranks go on")
            ranks.go_on()

    def _note_end(self) -> None:
        """End a lease whose timer is late: the workers may have stopped themselves already."""
        if not self.over and self.until <= asyncio.get_running_loop().time():
            self._end()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        """Pause the ranks; an answer may be among what this process has not read yet."""
        self._stop_timer()
        self.over = True
        ranks = self.ranks()
        if ranks.busy:
            log.warning(
                "no word from the coordinator for %.1f s: ranks are paused, because another node"
                " may take their places",
                self._for_s,
            )
        ranks.pause()
