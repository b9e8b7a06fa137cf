"""Sends a script's requests to the coordinator, by way of its agent.

Any thread may ask, and many at once. There is no thread of our own: one of those that wait for an
answer reads the socket and hands each answer to its owner; when it has its own, another one reads. Each
request occupies one channel, which is used again only after its answer has arrived, so that a lost
answer can be requested again (see `holdfast.messages.requests`). An interrupted call leaves its channel
occupied until the answer comes.

When the process gets a place in another round (`fence`), nobody answers what was asked in the one
before. Whoever still waits is told so, and all channels are free again; their numbers go on, so that a
late answer is not taken for another.

Values may be large and their reader slow, so only a few large requests are in flight at a time. That
bounds what the agent must buffer for a script, however many threads it has.

The socket belongs to the worker's own process. A forked process has a copy of all this state, with
locks that may be held by threads it does not have; so the pid is checked before anything is touched.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field

import msgspec

from holdfast import errors
from holdfast.messages.local import Ask, ScriptReply, ToScript
from holdfast.messages.requests import (
    LARGE_AT_ONCE,
    MAX_CHANNELS,
    MAX_MESSAGE_BYTES,
    AnyAnswer,
    Denied,
    ScriptRequest,
    is_large,
)
from holdfast.wire.packets import Joiner, packets_of
from holdfast.worker.channel import Channel

PATIENCE_S = 300.0
"""Limit for answers that depend on nothing but the coordinator, which may be restarting."""
SLACK_S = 30.0
"""Time that the coordinator's answer to a request may take beyond the request's own timeout."""

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[ScriptRequest] = msgspec.msgpack.Decoder(ScriptRequest)
_reply_decoder: msgspec.msgpack.Decoder[ToScript] = msgspec.msgpack.Decoder(ToScript)


@dataclass
class _Waits:
    """The requests of one round."""

    free: list[int]
    changed: threading.Condition = field(default_factory=threading.Condition)
    reading: bool = False
    lost: bool = False
    fenced: bool = False
    waited_for: set[int] = field(default_factory=set)
    """Channels with a thread that waits for the answer."""
    answers: dict[int, AnyAnswer] = field(default_factory=dict)


class RequestClient:
    """The worker's end of its script's requests."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._numbers: list[int] = []
        """Number of the newest request on each channel."""
        self._begin()

    def fence(self) -> None:
        """End all waits: what was asked in the round before is never answered."""
        before = self._round
        self._begin()
        with before.changed:
            before.fenced = True
            before.changed.notify_all()

    def _begin(self) -> None:
        self._round = _Waits(free=list(range(len(self._numbers))))
        self._sending = threading.Lock()
        self._large = threading.Semaphore(LARGE_AT_ONCE)
        self._joiner = Joiner()

    def ask(self, request: ScriptRequest, patience_s: float | None = PATIENCE_S) -> AnyAnswer:
        """Return the answer; raise if it is a denial or does not come in time."""
        if os.getpid() != self._pid:
            raise errors.NotUnderHoldfast(
                f"process {os.getpid()} was forked from worker {self._pid}; only the worker itself"
                " can ask the coordinator"
            )
        _check(request)
        deadline = None if patience_s is None else time.monotonic() + patience_s
        with self._large if is_large(request) else nullcontext():
            answer = self._exchange(request, deadline)
        if isinstance(answer, Denied):
            raise _error(answer)
        return answer

    def _exchange(self, request: ScriptRequest, deadline: float | None) -> AnyAnswer:
        waits = self._round
        channel, number = self._take_channel(waits)
        try:
            self._send(Ask(channel=channel, number=number, request=request))
            return self._await(waits, channel, deadline)
        finally:
            with waits.changed:
                waits.waited_for.discard(channel)
                if waits.answers.pop(channel, None) is not None:
                    heapq.heappush(waits.free, channel)

    def _take_channel(self, waits: _Waits) -> tuple[int, int]:
        with waits.changed:
            if waits.free:
                channel = heapq.heappop(waits.free)
            elif len(self._numbers) < MAX_CHANNELS:
                channel = len(self._numbers)
                self._numbers.append(0)
            else:
                raise errors.RequestDenied(f"this process already has {MAX_CHANNELS} open requests")
            self._numbers[channel] += 1
            waits.waited_for.add(channel)
            return channel, self._numbers[channel]

    def _send(self, message: Ask) -> None:
        with self._sending:  # Pieces of two messages must not mix.
            if not all(self._channel.send_packet(packet) for packet in packets_of(message)):
                raise errors.RequestError("the agent of this worker cannot be reached any more")

    # ---- waiting ----

    def _await(self, waits: _Waits, channel: int, deadline: float | None) -> AnyAnswer:
        with waits.changed:
            while channel not in waits.answers:
                if waits.fenced:
                    raise errors.FencedError("the round in which this was asked is over")
                if waits.lost:
                    raise errors.RequestError("the agent of this worker does not answer any more")
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise errors.RequestTimeout("the coordinator did not answer in time")
                if waits.reading:
                    waits.changed.wait(left_s)
                else:
                    self._read(waits, left_s)
            return waits.answers[channel]

    def _read(self, waits: _Waits, limit_s: float | None) -> None:
        """Read one packet without holding the lock, which is held on entry and on return."""
        waits.reading = True
        waits.changed.release()
        packet: bytes | None = None
        try:
            packet = self._channel.receive_within(limit_s)
        finally:
            if packet is not None and waits is not self._round:
                with self._round.changed:  # This thread has outlived its round.
                    self._take(self._round, packet)
                    self._round.changed.notify_all()
            waits.changed.acquire()
            waits.reading = False
            if packet is not None and waits is self._round:
                self._take(waits, packet)
            waits.changed.notify_all()

    def _take(self, waits: _Waits, packet: bytes) -> None:
        if not packet:
            waits.lost = True
            return
        message = self._joiner.message(packet, _reply_decoder.decode)
        if message is None:
            return
        assert isinstance(message, ScriptReply)
        known = message.channel < len(self._numbers)
        if not known or message.number != self._numbers[message.channel]:
            return
        if message.channel in waits.waited_for:
            waits.answers[message.channel] = message.answer
        elif message.channel not in waits.free:
            heapq.heappush(waits.free, message.channel)


def _check(request: ScriptRequest) -> None:
    """Refuse a request that is invalid or too large."""
    name = type(request).__name__
    try:
        body = _encoder.encode(request)
        _request_decoder.decode(body)
    except (msgspec.ValidationError, UnicodeEncodeError, OverflowError, TypeError) as error:
        raise errors.RequestDenied(f"not a valid {name} request: {error}") from None
    if len(body) > MAX_MESSAGE_BYTES:
        limit = f"the limit is {MAX_MESSAGE_BYTES}"
        raise errors.RequestDenied(f"a {name} request has {len(body)} bytes; {limit}")


def _error(denied: Denied) -> Exception:
    if denied.reason == "fenced":
        return errors.FencedError(denied.detail)
    if denied.reason == "timeout":
        return errors.RequestTimeout(f"timed out: waited {denied.detail}")
    return errors.RequestDenied(f"{denied.reason}: {denied.detail}")
