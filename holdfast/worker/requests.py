"""How a script asks the coordinator, over its agent.

Any thread may ask, and many at once. There is no thread of ours: of those that wait for an answer one
reads the socket, hands each answer to whom it belongs, and when it has its own, another goes on. Each
asks on a lane of its own and takes a lane again only when that lane's last answer has come, so an
answer that was lost can be asked for again (see `holdfast.messages.requests`). A call that is
interrupted leaves its lane behind; the answer, when it comes, frees it.

Values may be large, and whoever asks for one may be slow to read it. So only a few of those are asked
for at a time; the agent need not keep more than that for a script, however many threads it has.

The socket belongs to the worker's own process. A process that the script forks has a copy of all of
this, with locks that may be held by threads it does not have; so it is told apart before anything is
touched, and told so.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from contextlib import nullcontext

import msgspec

from holdfast.errors import (
    FencedError,
    NotUnderHoldfast,
    RequestDenied,
    RequestError,
    RequestTimeout,
)
from holdfast.messages.local import Ask, ScriptReply, ToScript
from holdfast.messages.requests import (
    LARGE_AT_ONCE,
    MAX_LANES,
    MAX_MESSAGE_BYTES,
    AnyAnswer,
    Denied,
    ScriptRequest,
    is_large,
)
from holdfast.wire.packets import Joiner, packets_of
from holdfast.worker.channel import Channel

PATIENCE_S = 300.0
"""How long to wait for an answer that needs nobody but the coordinator, which may be restarting."""
SLACK_S = 30.0
"""How long after the end of its time the coordinator's word on a request may come."""

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[ScriptRequest] = msgspec.msgpack.Decoder(ScriptRequest)
_reply_decoder: msgspec.msgpack.Decoder[ToScript] = msgspec.msgpack.Decoder(ToScript)


class Requests:
    """The script's end of its requests."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._large = threading.Semaphore(LARGE_AT_ONCE)
        self._changed = threading.Condition()
        self._reading = False
        self._lost = False
        self._joiner = Joiner()
        self._numbers: list[int] = []
        """The newest request's number of each lane."""
        self._free: list[int] = []
        self._waited_for: set[int] = set()
        """Lanes on whose answer somebody waits."""
        self._answers: dict[int, AnyAnswer] = {}

    def ask(self, request: ScriptRequest, patience_s: float | None = PATIENCE_S) -> AnyAnswer:
        """The answer, which is never a denial: that is raised, as is an answer that does not come."""
        if os.getpid() != self._pid:
            raise NotUnderHoldfast(
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
        lane, number = self._take_lane()
        try:
            self._send(Ask(lane=lane, number=number, request=request))
            return self._await(lane, deadline)
        finally:
            with self._changed:
                self._waited_for.discard(lane)
                if self._answers.pop(lane, None) is not None:
                    heapq.heappush(self._free, lane)

    def _take_lane(self) -> tuple[int, int]:
        with self._changed:
            if self._free:
                lane = heapq.heappop(self._free)
            elif len(self._numbers) < MAX_LANES:
                lane = len(self._numbers)
                self._numbers.append(0)
            else:
                raise RequestDenied(f"{MAX_LANES} requests of this process are open already")
            self._numbers[lane] += 1
            self._waited_for.add(lane)
            return lane, self._numbers[lane]

    def _send(self, message: Ask) -> None:
        with self._sending:  # Pieces of two messages must not mix.
            if not all(self._channel.send_packet(packet) for packet in packets_of(message)):
                raise RequestError("the agent of this worker cannot be reached any more")

    # ---- waiting ----

    def _await(self, lane: int, deadline: float | None) -> AnyAnswer:
        with self._changed:
            while lane not in self._answers:
                if self._lost:
                    raise RequestError("the agent of this worker does not answer any more")
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise RequestTimeout("the coordinator did not answer in time")
                if self._reading:
                    self._changed.wait(left_s)
                else:
                    self._read(left_s)
            return self._answers[lane]

    def _read(self, limit_s: float | None) -> None:
        """Take one packet off the socket, while others may ask. Called, and returns, with the lock."""
        self._reading = True
        self._changed.release()
        packet: bytes | None = None
        try:
            packet = self._channel.receive_within(limit_s)
        finally:
            self._changed.acquire()
            self._reading = False
            if packet is not None:
                self._take(packet)
            self._changed.notify_all()

    def _take(self, packet: bytes) -> None:
        if not packet:
            self._lost = True
            return
        message = self._joiner.message(packet, _reply_decoder.decode)
        if message is None:
            return
        assert isinstance(message, ScriptReply)
        if message.number != self._numbers[message.lane]:
            return
        if message.lane in self._waited_for:
            self._answers[message.lane] = message.answer
        else:
            heapq.heappush(self._free, message.lane)


def _check(request: ScriptRequest) -> None:
    """Refuse here what nobody else would take."""
    try:
        body = _encoder.encode(request)
        _request_decoder.decode(body)
    except (msgspec.ValidationError, UnicodeEncodeError, OverflowError, TypeError) as error:
        raise RequestDenied(f"not a valid {type(request).__name__} request: {error}") from None
    if len(body) > MAX_MESSAGE_BYTES:
        raise RequestDenied(
            f"a {type(request).__name__} request of {len(body)} bytes; {MAX_MESSAGE_BYTES} at most"
        )


def _error(denied: Denied) -> Exception:
    if denied.reason == "fenced":
        return FencedError(denied.detail)
    if denied.reason == "timeout":
        return RequestTimeout(f"waited {denied.detail} in vain")
    return RequestDenied(f"{denied.reason}: {denied.detail}")
