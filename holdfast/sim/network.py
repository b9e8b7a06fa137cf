"""Simulates streams: messages come in order, with delay, and a stream can break.

The two ends learn of the end of a stream separately, so what was on its way may still arrive at one
side after the other has given up. While a host is cut off, messages wait (TCP sends them again); when
the cut lasts longer than `SILENCE_S`, the keep-alive of both kernels ends the stream.

Beats that change nothing are not simulated. An agent that can be reached has a lease; one that cannot
be reached has had its last beat answered up to `BEAT_S` before, and both sides count from that: see
`SimAgent.unreachable`.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING

from holdfast.messages.actions import NodeAction
from holdfast.messages.events import NodeResumed
from holdfast.messages.units import Seconds
from holdfast.messages.wire import Ack, Beat, EvidenceTaken, Hello, Lease, Sent, Welcome
from holdfast.sim.clock import SimClock

if TYPE_CHECKING:
    from holdfast.sim.agent import SimAgent
    from holdfast.sim.coordinator import SimCoordinator

SILENCE_S: Seconds = 5.0
"""Time without a sign of life of the other machine after which a stream counts as dead."""

LEAST_DELAY_S: Seconds = 0.0002
BEAT_S: Seconds = 1.0

Upward = Hello | Sent | EvidenceTaken | Beat
Downward = Welcome | Ack | Lease | NodeAction


class SimStream:
    """One connection of an agent to the coordinator."""

    __slots__ = (
        *("agent", "down", "down_at", "number", "open_above", "open_below", "resumes", "up"),
        "up_at",
    )

    def __init__(self, agent: SimAgent, number: int) -> None:
        self.agent = agent
        self.number = number
        """Which of the agent's streams it is."""
        self.resumes: NodeResumed | None = None
        """The event that tells of its hello, while that is not decided on."""
        self.open_above = True
        """The coordinator still reads from it."""
        self.open_below = True
        """The agent still reads from it."""
        self.up: deque[Upward] = deque()
        self.down: deque[Downward] = deque()
        self.up_at = self.down_at = 0.0


class Network:
    """All streams, and how long messages take."""

    def __init__(
        self, clock: SimClock, rng: Random, typical_s: Seconds, hiccup_share: float
    ) -> None:
        self.clock = clock
        self._rng = rng
        self._typical_s = typical_s
        self._hiccup_share = hiccup_share
        self.coordinator: SimCoordinator
        self.messages = 0

    def delay_s(self) -> Seconds:
        draw = self._rng.random()
        if draw < self._hiccup_share:
            return self._rng.uniform(0.05, 1.0)
        return LEAST_DELAY_S + 2.0 * self._typical_s * self._rng.random()

    def send_up(self, stream: SimStream, messages: list[Upward]) -> None:
        """Send from the agent to the coordinator; what is sent together arrives together."""
        stream.up.extend(messages)
        self.messages += len(messages)
        stream.up_at = max(stream.up_at, self.clock.now + self.delay_s())
        self.clock.at(stream.up_at, self._arrive_above, stream, len(messages))

    def send_down(self, stream: SimStream, message: Downward) -> None:
        stream.down.append(message)
        self.messages += 1
        stream.down_at = max(stream.down_at, self.clock.now + self.delay_s())
        self.clock.at(stream.down_at, self._arrive_below, stream)

    def _arrive_above(self, stream: SimStream, count: int) -> None:
        if not stream.open_above:
            return
        back_at = stream.agent.host.cut_until
        if back_at > self.clock.now:
            self.clock.at(back_at + self.delay_s(), self._arrive_above, stream, count)
            return
        for _ in range(count):
            if stream.open_above:
                self.coordinator.hear(stream, stream.up.popleft())

    def _arrive_below(self, stream: SimStream) -> None:
        if not stream.open_below:
            return
        back_at = max(stream.agent.host.cut_until, stream.agent.paused_until)
        if back_at > self.clock.now:
            self.clock.at(back_at + self.delay_s(), self._arrive_below, stream)
            return
        stream.agent.hear(stream, stream.down.popleft())

    # ---- the end of a stream ----

    def reset(self, stream: SimStream) -> None:
        """Break it so that both sides notice soon, each in its own time."""
        self.clock.after(self.delay_s(), self._lost_below, stream)
        self.clock.after(self.delay_s(), self.coordinator.stream_lost, stream)

    def close_below(self, stream: SimStream) -> None:
        """End the agent's side; the kernel tells the coordinator after what was sent."""
        stream.open_below = False
        arrives = max(stream.up_at, self.clock.now + self.delay_s())
        self.clock.at(arrives, self._closed_below, stream)

    def _closed_below(self, stream: SimStream) -> None:
        back_at = stream.agent.host.cut_until
        if back_at > self.clock.now:
            self.clock.at(back_at + self.delay_s(), self._closed_below, stream)
        else:
            self.coordinator.stream_lost(stream, closed=True)

    def close_above(self, stream: SimStream) -> None:
        """End the coordinator's side; the agent hears of it after what was sent to it."""
        stream.open_above = False
        self.clock.at(
            max(stream.down_at, self.clock.now + self.delay_s()), self._lost_below, stream
        )

    def fell_silent(self, stream: SimStream) -> None:
        """Have both sides give up a stream on which nothing was heard for too long."""
        self.coordinator.stream_lost(stream)
        self._lost_below(stream)

    def _lost_below(self, stream: SimStream) -> None:
        agent = stream.agent
        if agent.paused_until > self.clock.now:
            self.clock.at(agent.paused_until + self.delay_s(), self._lost_below, stream)
        elif stream.open_below:
            stream.open_below = False
            agent.stream_lost(stream)
