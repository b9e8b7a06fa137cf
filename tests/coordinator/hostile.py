"""Agents with the job's token that send anything, beside a healthy one whose job must not suffer.

Frames are made from the types of the messages themselves, so a new field is fuzzed from its first day:

    values     an event that decodes, of values that may or may not fit its sender
    shapes     such an event with a field removed, added, or replaced by something else
    bytes      a frame with flipped, lost or added bytes
    others     greetings, evidence, the coordinator's own events, words in another node's name

They go over real sockets to a real coordinator, in sessions that begin with a hello, repeat and skip
numbers, and may end in the middle. After an episode the coordinator serves, no handler has raised,
every invariant of the job holds, and its journal replays to the same state.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, get_args

import msgspec
import msgspec.inspect as shapes
from serving import Served, hello, served

from holdfast.clock import JobClock
from holdfast.coordinator.admission import AGENT_EVENTS
from holdfast.coordinator.journal import replay
from holdfast.core import job as jobs
from holdfast.messages.actions import Finish, StartWorkers, StopWorkers
from holdfast.messages.events import (
    AnyEvent,
    NodeJoined,
    NodeLeft,
    NodeReady,
    NodeWarm,
    Progress,
    StopAsked,
    WorkerExited,
    WorkerStarted,
)
from holdfast.messages.records import NodeSpec, RankProgress, Terms
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time
from holdfast.messages.wire import (
    Ack,
    Beat,
    EvidenceTaken,
    FromCoordinator,
    Hello,
    Sent,
    Visit,
    Welcome,
)
from holdfast.wire import framing

GOOD = NodeId("good")
LIMIT_S = 60.0
TORN_S = 0.02
BEAT_S = 0.5
EVIL_NAMES = [f"evil:{number}" for number in range(8)]

ODD: list[Any] = [
    *(None, True, False, "", "x" * 5000, "\0", "é😀", b"\xff" * 20, [], {}, [[]], {"a": {}}),
    *(0, -1, 1, 255, 65536, 1 << 31, 1 << 53, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1),
    *(float("nan"), float("inf"), -float("inf"), -0.0, 1e-320, 1e300, 1.7e308),
]


class FrameMaker:
    """Makes frames, most of which are wrong in one way."""

    def __init__(self, rng: random.Random, terms: Terms) -> None:
        self.rng = rng
        self.terms = terms
        self.round = 1
        """The round that most frames speak of."""
        self.ranks = [0]
        """Ranks that most frames speak of."""
        self.world_size = 1
        self.torn = False
        """Whether a length was wrong: the coordinator may wait for more bytes for ever."""
        self.calm = False
        """Whether only values vary that an agent may send."""

    def frame(self, node: str, number: int) -> bytes:
        """One frame of that node, whole or not."""
        choice = self.rng.random()
        message = self._sent(node, number)
        if self.calm or choice < 0.5:
            return _framed(_encoded(message))
        if choice < 0.8:
            return _framed(_encoded(self._reshaped(message)))
        if choice < 0.92:
            return self._bent(_framed(_encoded(message)))
        return _framed(_encoded(self._other(node, number)))

    def greeting(self, node: str) -> bytes:
        """A hello of that node; now and then a strange one."""
        said = msgspec.to_builtins(hello(node, terms=self.terms, round=self.round, busy=True))
        if self.rng.random() < 0.1:
            # A round a little above the journal's is believed, and makes all nodes meet anew.
            lost = [self.round + 5] if self.terms.max_nodes > 1 else []
            said["round"] = self.rng.choice([0, self.round, 10**6, 1 << 53, *lost])
        if self.rng.random() < 0.1:
            said = self._reshaped(said)
        return _framed(_encoded(said))

    def _sent(self, node: str, number: int) -> dict[str, Any]:
        kind = self.rng.choice(AGENT_EVENTS)
        if kind is StopAsked and self.terms.max_nodes > 1:
            kind = WorkerExited  # A rank may well stop the job, but then there is nothing to fuzz.
        event = self.value(_shape(kind), kind.__name__)
        late_s = 0.0 if self.calm else self.rng.choice([-5.0, 0.0, 0.0, 1e6])
        event |= {"node": node, "at": _now() + late_s}
        if kind is WorkerExited:
            event |= {"code": None, "signal": 9} if self.rng.random() < 0.5 else {"signal": None}
            event["progress"]["rank"] = event["rank"]
        return {"type": "Sent", "number": number, "event": event}

    def _other(self, node: str, number: int) -> Any:
        choice = self.rng.randrange(4)
        if choice == 0:
            return self.value(_shape(self.rng.choice((Hello, Visit, EvidenceTaken))), "")
        kind = self.rng.choice(get_args(AnyEvent))
        event = self.value(_shape(kind), kind.__name__)
        if choice == 1:
            event["node"] = GOOD
        elif choice == 2:
            event["type"] = self.rng.choice(["Newer", "", "Tick", "JobOpened", 5])
        return {"type": "Sent", "number": number, "event": event}

    # ---- values ----

    def value(self, shape: shapes.Type, name: str) -> Any:
        """A value of that type, as plain data."""
        rng = self.rng
        if isinstance(shape, shapes.Metadata):
            return self.value(shape.type, name)
        if isinstance(shape, shapes.UnionType):
            return self.value(rng.choice(shape.types), name)
        if isinstance(shape, shapes.StructType):
            return self._struct(shape)
        if isinstance(shape, shapes.IntType):
            return self._int(shape, name)
        if isinstance(shape, shapes.FloatType):
            return rng.choice([0.0, 0.5, 3.0, _now(), _now() - 1.0, 1e6])
        if isinstance(shape, shapes.StrType) and (shape.pattern or shape.min_length):
            return rng.choice(["main", "other"])
        if isinstance(shape, shapes.StrType):
            return rng.choice(["", "a", "main", "evil-host", "step 3", "train.py:7", "é" * 40])
        if isinstance(shape, shapes.BytesType):
            return rng.randbytes(rng.choice([0, 4, 16]))
        if isinstance(shape, shapes.VarTupleType | shapes.ListType):
            return [self.value(shape.item_type, name) for _ in range(rng.choice([0, 1, 1, 2, 4]))]
        if isinstance(shape, shapes.TupleType):
            return [self.value(one, name) for one in shape.item_types]
        if isinstance(shape, shapes.DictType):
            pairs = range(rng.choice([0, 1, 3]))
            return {
                self.value(shape.key_type, name): self.value(shape.value_type, name) for _ in pairs
            }
        if isinstance(shape, shapes.LiteralType):
            return rng.choice(shape.values)
        if isinstance(shape, shapes.BoolType):
            return rng.random() < 0.5
        assert isinstance(shape, shapes.NoneType), shape
        return None

    def _struct(self, shape: shapes.StructType) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if shape.tag is not None:
            made[shape.tag_field or "type"] = shape.tag
        for field in shape.fields:
            if field.required or self.rng.random() < 0.6:
                made[field.encode_name] = self.value(field.type, field.name)
        return made

    def _int(self, shape: shapes.IntType, name: str) -> int:
        if name == "round":
            return self.round if self.calm else self.round + self.rng.choice([0, 0, 1, 9])
        if name == "rank":
            return self.rng.choice(self.ranks if self.calm else [*self.ranks, 0, 1, 9, 1 << 30])
        if name == "world_size":
            return self.world_size if self.calm else self.rng.choice([0, 1, 2, 3])
        if name == "slots":
            return self.rng.choice([1, 2, 3])  # A world of 65,536 ranks only takes its time.
        bounds = [bound for bound in (shape.ge, shape.le) if bound is not None]
        return self.rng.choice([*(int(bound) for bound in bounds), 1, 1, 2, 3, 10])

    # ---- what does not decode ----

    def _reshaped(self, message: Any) -> Any:
        """The same with one field removed, added, or replaced."""
        message = copy.deepcopy(message)
        places = list(_places(message))
        holder, key = self.rng.choice(places)
        choice = self.rng.random()
        if choice < 0.15 and isinstance(holder, dict):
            del holder[key]
        elif choice < 0.25 and isinstance(holder, dict):
            holder[self.rng.choice(["extra", "type", "node", ""])] = self.rng.choice(ODD)
        else:
            holder[key] = self.rng.choice(ODD)
        return message

    def _bent(self, frame: bytes) -> bytes:
        """The same with bytes flipped, lost or added; half of them keep a length that is right."""
        keep = 4 if self.rng.random() < 0.7 else 0
        self.torn = self.torn or not keep
        body = bytearray(frame[keep:])
        for _ in range(self.rng.choice([1, 1, 2, 8])):
            at = self.rng.randrange(len(body))
            choice = self.rng.randrange(3)
            if choice == 0:
                body[at] ^= 1 << self.rng.randrange(8)
            elif choice == 1 and len(body) > 8:
                del body[at : at + self.rng.choice([1, 4])]
            else:
                body[at:at] = self.rng.randbytes(self.rng.choice([1, 4]))
        return _framed(bytes(body)) if keep else bytes(body)


@cache
def _shape(kind: type) -> shapes.Type:
    return shapes.type_info(kind)


def _places(message: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a message where a value stands."""
    inside = message.items() if isinstance(message, dict) else enumerate(message)
    for key, value in list(inside):
        yield message, key
        if isinstance(value, dict | list) and value:
            yield from _places(value)


def _encoded(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


class Connection:
    """One stream to the coordinator."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._decoder = framing.FrameDecoder[Any](FromCoordinator)  # type: ignore[arg-type]

    @classmethod
    async def open(cls, here: Served) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", here.port))

    async def messages(self) -> list[Any]:
        """The next messages; none when the stream has ended."""
        while True:
            try:
                data = await self._reader.read(1 << 16)
            except ConnectionError:
                return []
            if not data:
                return []
            if messages := self._decoder.feed(data):
                return messages

    async def acked(self, number: int) -> bool:
        """Wait until that event is acknowledged; False when the stream ends before."""
        while messages := await self.messages():
            for message in messages:
                known = message.acked if isinstance(message, Welcome) else 0
                known = message.number if isinstance(message, Ack) else known
                if known >= number:
                    return True
        return False

    def close(self) -> None:
        self.writer.transport.abort()


class HealthyAgent:
    """An agent that does as it is told, and whose only rank trains."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._number = self.round = self.step = 0
        self._rank = Rank(0)
        self._acked = 0
        self._changed = asyncio.Event()
        self.stopped: list[str] = []
        """Orders to stop, with their reasons."""

    async def run(self, terms: Terms) -> None:
        """Join, and obey until the stream ends."""
        self._connection.writer.write(framing.encode(hello(GOOD, terms=terms)))
        self._beat()
        while messages := await self._connection.messages():
            for message in messages:
                self._obey(message)
            self._changed.set()

    def _beat(self) -> None:
        if not self._connection.writer.is_closing():
            self._connection.writer.write(framing.encode(Beat()))
            asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _obey(self, message: Any) -> None:
        if isinstance(message, Welcome):
            spec = NodeSpec(host="good-host", address="127.0.0.1", slots=1, pid=1)
            self._send(NodeJoined(at=_now(), node=GOOD, spec=spec, store_port=1))
        elif isinstance(message, Ack):
            self._acked = message.number
        elif isinstance(message, StartWorkers):
            self.round, self._rank = message.part.round, message.part.first_rank
            self._send(
                WorkerStarted(
                    at=_now(),
                    node=GOOD,
                    round=RoundNumber(self.round),
                    rank=self._rank,
                    pid=7,
                    warm=True,
                )
            )
        elif isinstance(message, StopWorkers):
            self.stopped.append(message.why)
            self._send(
                NodeReady(
                    at=_now(), node=GOOD, round=message.round, store_port=1, slowest_stop_s=None
                )
            )
        elif isinstance(message, Finish):
            self.stopped.append(message.reason)
            self._send(NodeLeft(at=_now(), node=GOOD, round=RoundNumber(self.round)))

    def _send(self, event: AnyEvent) -> None:
        self._number += 1
        self._connection.writer.write(framing.encode(Sent(number=self._number, event=event)))

    async def train(self) -> None:
        """Take one step, and wait until the coordinator has acknowledged it."""
        self.step += 1
        at = _now()
        told = RankProgress(
            rank=self._rank, step=StepNumber(self.step), steps=1, first_at=at, last_at=at
        )
        self._send(Progress(at=at, node=GOOD, round=RoundNumber(self.round), ranks=(told,)))
        number = self._number
        while self._acked < number:
            await self._change()

    async def lose_rank(self) -> None:
        """Have the rank die, and wait for the next round."""
        before, at = self.round, _now()
        self._send(
            WorkerExited(
                at=at,
                node=GOOD,
                round=RoundNumber(before),
                rank=self._rank,
                signal=9,
                progress=RankProgress(rank=self._rank),
            )
        )
        while self.round == before:
            await self._change()
        self.stopped.clear()
        await self.train()

    async def _change(self) -> None:
        self._changed.clear()
        await asyncio.wait_for(self._changed.wait(), LIMIT_S)


def _now() -> Time:
    return JobClock().now()


class Episode:
    """One coordinator under attack."""

    def __init__(self, path: Path, seed: int, as_member: bool) -> None:
        self.path = path
        self.rng = random.Random(f"{seed} {as_member}")
        self.as_member = as_member
        """Whether attackers get places in the world, or only wait for one."""
        self.terms = Terms(min_nodes=1, max_nodes=2 if as_member else 1)
        self.maker = FrameMaker(self.rng, self.terms)
        self.numbers = dict.fromkeys(EVIL_NAMES, 0)
        self.sent = 0

    async def run(self, frames: int) -> int:
        """Send that many frames, and see that no harm was done; return how many were sent."""
        with self._counting():
            async with served(self.path) as here:
                await self._run(here, frames)
        return self.sent

    async def _run(self, here: Served, frames: int) -> None:
        connection = await Connection.open(here)
        agent = HealthyAgent(connection)
        running = asyncio.ensure_future(agent.run(self.terms))
        try:
            while agent.round == 0:
                await asyncio.sleep(0)
            await agent.train()
            while self.sent < frames and here.job.result is None:
                await self._attack(here)
                if here.job.result is None:
                    await agent.train()
            self._check(here, agent)
            if here.job.result is None and not self.as_member:
                await agent.lose_rank()
                self._check(here, agent)
        finally:
            running.cancel()
            connection.close()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count the frames that the coordinator decodes, or tries to."""
        decode = framing.FrameDecoder._decode

        def counted(decoder: framing.FrameDecoder[Any], body: bytes) -> Any:
            self.sent += decoder._unreadable is not None  # Only the coordinator's decoders have it.
            return decode(decoder, body)

        framing.FrameDecoder._decode = counted  # type: ignore[method-assign]
        try:
            yield
        finally:
            framing.FrameDecoder._decode = decode  # type: ignore[method-assign]

    async def _attack(self, here: Served) -> None:
        """One session of an attacker."""
        rng, node = self.rng, NodeId(self.rng.choice(EVIL_NAMES))
        connection = await Connection.open(here)
        self._speak_of(here, node)
        self.maker.torn = False
        frames = [self.maker.greeting(node)]
        host = f"evil-host-{rng.randrange(10**6)}"  # Those that say that they are ill are excluded.
        spec = NodeSpec(host=host, address="127.0.0.1", slots=2, pid=1)
        if node not in here.job.membership.placed or rng.random() < 0.1:
            joined = NodeJoined(at=_now(), node=node, spec=spec, store_port=1)
            frames += [self._own(node, joined), self._own(node, NodeWarm(at=_now(), node=node))]
        wild = rng.random() < 0.3
        for left in reversed(range(rng.choice([1, 10, 50, 200]))):
            self.maker.calm = left > 3 and not wild  # What costs it its stream comes last.
            self.numbers[node] += rng.choice([1, 1, 1, 1, 0, 2])
            number = max(1, self.numbers[node] - (rng.randrange(9) if rng.random() < 0.05 else 0))
            frames.append(self.maker.frame(node, number))
        data = b"".join(frames)
        if rng.random() < 0.1:  # It dies in the middle.
            connection.writer.write(data[: rng.randrange(len(data))])
            await asyncio.sleep(0)
        else:
            data += self._own(node, NodeWarm(at=_now(), node=node))
            connection.writer.write(data)
            with suppress(asyncio.TimeoutError):
                limit_s = TORN_S if self.maker.torn else LIMIT_S
                await asyncio.wait_for(connection.acked(self.numbers[node]), limit_s)
        connection.close()

    def _speak_of(self, here: Served, node: NodeId) -> None:
        """Choose the round and ranks of most frames: its own, or of a time before the job."""
        ranks = [rank for rank, state in here.job.ranks.items() if state.node == node]
        placed = bool(ranks) and here.job.world is not None
        self.maker.round = here.job.membership.round if placed else 0
        self.maker.ranks = ranks or [0, 1]
        self.maker.world_size = len(here.job.ranks) if placed else 2

    def _own(self, node: str, event: AnyEvent) -> bytes:
        self.numbers[node] += 1
        return framing.encode(Sent(number=self.numbers[node], event=event))

    def _check(self, here: Served, agent: HealthyAgent) -> None:
        job = here.job
        assert job.recovery.failures == 0, [one.detail for one in job.incidents]
        own = [one for one in job.incidents if one.kind == "internal" and not one.node]
        assert own == [], "a task of the coordinator raised"
        jobs.validate(job)
        again = replay(self.path)
        assert again is not None
        assert msgspec.json.encode(again.job) == msgspec.json.encode(job)
        if self.as_member:
            return  # Its ranks may break rounds and even stop the job, as those of any member may.
        assert not here.serving.done()
        assert agent.stopped == []
        assert (job.state.name, job.membership.round) == ("running", agent.round)
        assert job.highest == agent.step
