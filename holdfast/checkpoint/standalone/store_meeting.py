"""Carries events from all ranks to the driver, and actions from the driver to each rank, by a store.

Events form one log: a rank draws the next number and sets that key, and the driver reads the keys in
order. Actions form a queue for each rank, in which the driver sets the next key. So a rank makes the
same few calls to the store for each save, however many tensors or ranks there are, and the driver makes
a few for all ranks together. Every key is deleted when it was read, and the last ones when all ranks
have left. Nothing is pickled.

A client of torch's store makes one call at a time: while a thread waits in it, another that only sets
a key waits as well. Therefore the store is cloned, for speaking, for listening and for the driver, and
the script's own client is never blocked.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import msgspec
from msgspec import Struct

from holdfast.errors import CheckpointError, HoldfastError
from holdfast.messages.actions import Answered, CloseJob, CommitCheckpoint, WriteRankFiles
from holdfast.messages.checkpoints import SnapshotId, Tier
from holdfast.messages.events import (
    Asked,
    CheckpointWritten,
    NodeLeaving,
    NodeLeft,
    RankFilesWritten,
    SnapshotMissed,
    SnapshotsSealed,
    StoredFound,
)
from holdfast.messages.keeper import DiscardRankFiles
from holdfast.messages.requests import SaveSettled

UNLIMITED: Final = timedelta(days=365)
"""A store wants a limit. A rank that dies ends the others' training in any case."""

RankEvent = (
    SnapshotsSealed
    | SnapshotMissed
    | RankFilesWritten
    | CheckpointWritten
    | StoredFound
    | Asked
    | NodeLeaving
    | NodeLeft
)


class SaveEnded(Struct, frozen=True, tag=True):
    """The result of a save, for a rank that has reported it."""

    snapshot: SnapshotId
    attempt: int
    to: Tier
    settled: SaveSettled


RankAction = WriteRankFiles | CommitCheckpoint | DiscardRankFiles | SaveEnded | Answered | CloseJob


class Post(Struct, frozen=True):
    """Events of one rank. A post without any asks the driver to end."""

    events: tuple[RankEvent, ...] = ()
    directory: str = ""
    """The directory of the checkpoint that these events are about, where it was given by path."""


class Delivery(Struct, frozen=True):
    """Actions for one rank."""

    read: int
    """Posts up to this number were read by the driver."""
    actions: tuple[RankAction, ...]


_encoder = msgspec.msgpack.Encoder()
_post_decoder = msgspec.msgpack.Decoder(Post)
_delivery_decoder = msgspec.msgpack.Decoder(Delivery)


class StoreMeeting:
    """A rank's place among the ranks that save together. All of them have to take theirs."""

    def __init__(self, store: Any, group: str, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._owner = store  # Some stores live only as long as the one they were cloned from.
        with _wrapped("reached"):
            place = store.add(f"holdfast/{group}/places/{rank}", 1)
            self._places = [f"holdfast/{group}/places/{other}" for other in range(world_size)]
            self._prefix = f"holdfast/{group}/{place}"
            now = str(time.time_ns() // 1000)
            self.began_us: int = int(store.compare_set(self._key("began"), "", now))
            """The first rank's clock when the meeting began; no other meeting has the same."""
            self._speaking, self._listening = store.clone(), store.clone()
        self._lock = threading.Lock()
        self._posted: deque[int] = deque()
        """Numbers of this rank's posts that the driver may not have read."""
        self._delivered = 0
        self._drawn = 0

    def _key(self, *path: object) -> str:
        return "/".join(map(str, (self._prefix, *path)))

    def absent(self) -> list[int]:
        """Return the ranks that have never taken a place in a meeting of this group."""
        with _wrapped("read"):
            there = [bool(self._speaking.check([place])) for place in self._places]
        return [rank for rank, came in enumerate(there) if not came]

    # ---- every rank ----

    def number(self, name: str) -> int:
        """Return a number that all ranks get for that name, and that grows from name to name."""
        if self.world_size == 1:
            self._drawn += 1
            return self._drawn
        with _wrapped("reached"):
            drawn = self._speaking.add(self._key("numbers"), 1)
            return int(self._speaking.compare_set(self._key("number", name), "", str(drawn)))

    def forget_number(self, name: str) -> None:
        """Delete a number that no rank will ask for any more."""
        if self.world_size > 1:
            with _wrapped("written to"):
                self._speaking.delete_key(self._key("number", name))

    def post(self, post: Post) -> None:
        """Send events to the driver. Any thread may."""
        with _wrapped("written to"):
            number = self._speaking.add(self._key("posts"), 1)
            with self._lock:
                self._posted.append(number)
            self._speaking.set(self._key("post", number), _encoder.encode(post))

    def listen(self) -> tuple[RankAction, ...]:
        """Wait for the next actions for this rank. One thread may."""
        key = self._key("to", self.rank, self._delivered + 1)
        with _wrapped("listened to"):
            self._listening.wait([key], UNLIMITED)
            delivery = _delivery_decoder.decode(self._listening.get(key))
            self._delivered += 1
            self._listening.delete_key(key)
            for number in self._take_read(delivery.read):
                self._listening.delete_key(self._key("post", number))
        return delivery.actions

    def _take_read(self, up_to: int) -> list[int]:
        with self._lock:
            read = [number for number in self._posted if number <= up_to]
            self._posted = deque(number for number in self._posted if number > up_to)
        return read


class DriverSeat:
    """The driver's end of a meeting. One thread may use it."""

    def __init__(self, meeting: StoreMeeting) -> None:
        self._meeting = meeting
        self._key = meeting._key
        self._store = meeting._owner.clone()
        self._read = 0
        self._sent = [0] * meeting.world_size

    def collect(self) -> list[Post]:
        """Wait for at least one post; return all that there are, in the order of their numbers."""
        with _wrapped("listened to"):
            self._store.wait([self._key("post", self._read + 1)], UNLIMITED)
            last = self._store.add(self._key("posts"), 0)
            keys = [self._key("post", number) for number in range(self._read + 1, last + 1)]
            self._store.wait(keys, UNLIMITED)
            posts = [_post_decoder.decode(post) for post in self._store.multi_get(keys)]
        self._read = last
        return posts

    def deliver(self, actions: Mapping[int, Sequence[RankAction]]) -> None:
        """Send actions to these ranks."""
        keys, deliveries = [], []
        for rank, some in actions.items():
            self._sent[rank] += 1
            keys.append(self._key("to", rank, self._sent[rank]))
            deliveries.append(_encoder.encode(Delivery(self._read, tuple(some))))
        if keys:
            with _wrapped("written to"):
                self._store.multi_set(keys, deliveries)

    def clear(self) -> None:
        """Delete what is left of the meeting, when all ranks have left it."""
        with _wrapped("written to"):
            for name in ("began", "posts", "numbers"):
                self._store.delete_key(self._key(name))


@contextmanager
def _wrapped(doing: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, HoldfastError) as error:  # Torch's own are RuntimeErrors.
        why = str(error).partition("\n")[0]
        raise CheckpointError(
            f"the store by which the ranks agree cannot be {doing}: {why}; is another rank gone?"
        ) from error
