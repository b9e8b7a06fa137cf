"""How ranks agree on what became of a save, by a store.

Each rank says what it has written. Whoever is the last to say so knows that all the others have, and
finishes the save for them; everybody waits for one word, the verdict. A rank that fails waits for
nobody: it gives the verdict itself, and the first verdict counts.

So no rank asks all others anything, and a save costs a rank the same few calls however many tensors
it has. Nothing is pickled.

A client of torch's store does one thing at a time: while one thread waits in it, another that only
wants to set a key waits along. Therefore the store is cloned, once for those who speak and once for
the one who listens, and the script's own goes on undisturbed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, NewType

import msgspec
from msgspec import Struct

from holdfast.errors import CheckpointError, HoldfastError
from holdfast.messages.checkpoints import Digest, Shard

LONG: Final = timedelta(days=365)
"""A store wants a limit; a rank that dies takes the others' world with it in any case."""
PARTING: Final = timedelta(seconds=10)
_LOOK_EVERY_S: Final = 0.05

Matter = NewType("Matter", str)
"""What a verdict is about: a save, and which attempt at it."""


class Part(Struct, frozen=True):
    """What a rank has written of a save."""

    at: str
    """Where the checkpoint is."""
    shard: Shard
    shared: Digest
    """Of what all ranks should have alike."""


class Verdict(Struct, frozen=True):
    error: str = ""
    """Why nothing was saved; empty: the checkpoint is complete."""
    again: bool = False
    """The ranks have not alike what they were believed to: each must write all it has."""
    alike: bool = True
    """What to believe of the next save."""
    vain: bool = False
    """Nobody has begun to make a checkpoint of what was written, and nobody will."""


_encoder = msgspec.msgpack.Encoder()
_part_decoder = msgspec.msgpack.Decoder(Part)
_verdict_decoder = msgspec.msgpack.Decoder(Verdict)


class Meeting:
    """A rank's seat among the ranks that save together. All of them have to take theirs."""

    def __init__(self, store: Any, group: str, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._owner = store  # Some stores live as long as the one they were cloned from.
        self._speaking, self._listening = _clone(store), _clone(store)
        self._waits = hasattr(store, "clone")
        with _told("reached"):
            seat = store.add(f"holdfast/{group}/seats/{rank}", 1)
            self._prefix = f"holdfast/{group}/{seat}"
            if rank == 0:
                store.set(self._key("began"), str(time.time_ns() // 1000))
            self.began_us: int = int(store.get(self._key("began")))
            """By the first rank's clock; no other meeting has the same."""

    def _key(self, *path: object) -> str:
        return "/".join(map(str, (self._prefix, *path)))

    def say(self, matter: Matter, part: Part) -> list[Part] | None:
        """Say what this rank has written; all parts, if it was the last to say so."""
        with _told("written to"):
            self._speaking.set(self._key(matter, "part", self.rank), _encoder.encode(part))
            if self._speaking.add(self._key(matter, "parts"), 1) < self.world_size:
                return None
            keys = [self._key(matter, "part", rank) for rank in range(self.world_size)]
            return [_part_decoder.decode(self._speaking.get(key)) for key in keys]

    def decide(self, matter: Matter, verdict: Verdict) -> None:
        """Give the verdict, unless somebody has."""
        with _told("written to"):
            if self._speaking.add(self._key(matter, "decided"), 1) == 1:
                self._speaking.set(self._key(matter, "verdict"), _encoder.encode(verdict))

    def hear(self, matter: Matter) -> Verdict:
        """Wait for the verdict; one thread may, for one matter after the other."""
        key = self._key(matter, "verdict")
        with _told("listened to"):
            self._wait(key, LONG)
            return _verdict_decoder.decode(self._listening.get(key))

    def forget(self, save: int, attempts: int) -> None:
        """This rank is done with that save. The last one that is tidies up after all."""
        with _told("tidied"):
            for one in range(1, attempts + 1):
                self._speaking.delete_key(self._key(matter(save, one), "part", self.rank))
            if self._speaking.add(self._key(save, "done"), 1) < self.world_size:
                return
            self._speaking.set(self._key("over", save), "")
            self._speaking.delete_key(self._key("over", save - 1))
            self._speaking.delete_key(self._key(save, "done"))
            for one in range(1, attempts + 1):
                for name in ("parts", "decided", "verdict"):
                    self._speaking.delete_key(self._key(matter(save, one), name))

    def leave(self, last_save: int) -> None:
        """Go. The store may go with the first rank, so that one stays until all are done."""
        if self.rank == 0 and last_save:
            with _told("left"):
                self._wait(self._key("over", last_save), PARTING)

    def _wait(self, key: str, limit: timedelta) -> None:
        if self._waits:
            self._listening.wait([key], limit)
            return
        # Torch before 2.5 cannot clone a store: to wait in it would keep all others from it.
        until = time.monotonic() + limit.total_seconds()
        while not self._listening.check([key]) and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)


def _clone(store: Any) -> Any:
    return store.clone() if hasattr(store, "clone") else store


@contextmanager
def _told(doing: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, HoldfastError) as error:  # Torch's own are RuntimeErrors.
        why = str(error).partition("\n")[0]
        raise CheckpointError(
            f"the store by which the ranks agree cannot be {doing}: {why}; is another rank gone?"
        ) from error


def matter(save: int, attempt: int) -> Matter:
    return Matter(f"{save}.{attempt}")
