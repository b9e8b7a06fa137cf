"""Agrees on rounds without a coordinator: by the store that torchrun serves to its workers.

Nobody can join, leave or be replaced, so a round is only a number that all ranks count up together.
These keys are all there is, each below the round's number:

    end        how it ended, set once by whoever is first: done, broken or closed
    returned   counts ranks whose function has returned; the last one sets `end` to done
    left       counts ranks that have left; the last one sets `go` of the next round
    go         the round may be entered, or somebody will not and so nobody can

One daemon thread waits for these keys, and one for exchanges. Each has a connection of its own, for
the store answers one call at a time on each. The function's thread never blocks in the store: it waits
for those threads, in Python, where a signal reaches it. A rank that dies ends all others, as torchrun
does, and a store that is gone raises in whatever waits for it.

A process without a launcher is a world of one, with a store in its own memory.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from holdfast.errors import FencedError, StopRestarting, UsageError, WireError
from holdfast.inprocess.group_fence import GroupFence
from holdfast.inprocess.link import Leave, RoundEntry
from holdfast.messages.exits import EXIT_FAILED
from holdfast.messages.records import Raised

UNLIMITED: Final = timedelta(days=365)
"""A store wants a limit. A rank that dies ends the others in any case."""

THREADS_END_S: Final = 5.0
"""Threads end at once when the round does; a callback that hangs cannot hold the end longer."""

EXCHANGE_ENDED: Final = b"ended"
"""The value of an exchange's key `all`, if the round ended before all had given theirs."""

_encode = msgspec.msgpack.encode


class RoundMark(Struct, frozen=True):
    """The value of a round's `end` or `go`."""

    how: Literal["go", "done", "broken", "closed"]
    why: str = ""


_decoder = msgspec.msgpack.Decoder(RoundMark)


class LaunchedAs(Struct, frozen=True):
    """What torchrun has told this process."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    attempt: str
    """torchrun's restarts so far; its store outlives them."""
    store: tuple[str, int] | None
    """Address of the store; None without a launcher."""


def launched_as(environ: Mapping[str, str]) -> LaunchedAs:
    """Read torchrun's variables; refuse a world without a store that outlives its ranks."""
    world_size = int(environ.get("WORLD_SIZE", "1"))
    served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if world_size > 1 and not served:
        raise UsageError(
            f"holdfast.inprocess.restartable needs `holdfast run` or torchrun: WORLD_SIZE is "
            f"{world_size}, but TORCHELASTIC_USE_AGENT_STORE is not True, so no launcher serves a "
            "store to these ranks; start the script with `holdfast run`, or with torchrun and "
            "without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    return LaunchedAs(
        rank=int(environ.get("RANK", "0")),
        world_size=world_size,
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        node_rank=int(environ.get("GROUP_RANK", "0")),
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        store=(environ["MASTER_ADDR"], int(environ["MASTER_PORT"])) if served else None,
    )


class TorchrunLink:
    """A `RoundLink` on torchrun's store."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._me = launched_as(environ)
        self._changed = threading.Condition()
        """Guards what the watcher thread tells the function's thread, from here on."""
        self._round = 0
        self._end: RoundMark | None = None
        """How this round ended; set when `leave` has been called for it, if it had to be."""
        self._inside = False
        """Whether the function has been entered, and has neither returned nor been left."""
        self._refused: RoundMark | None = None
        self._lost: BaseException | None = None
        self._unable: Exception | None = None
        """What `leave` raised."""

    @property
    def replaces(self) -> bool:
        return False

    def open(self, leave: Leave) -> RoundEntry:
        """Take part in the next restartable function of all ranks."""
        self._leave = leave
        with _reaching("connected to"):
            connect = _connections(self._me.store)
            self._store, gathering, watching = connect(), connect(), connect()
            place = f"holdfast/inprocess/{self._me.attempt}/{self._me.world_size}"
            opened = self._store.add(f"{place}/opened/{self._me.rank}", 1)
        self._prefix = f"{place}/{opened}"
        self._exchanges: Counter[str] = Counter()
        self._stale: list[str] = []
        """Keys of this rank's exchanges, to be deleted when nobody can need them."""
        self._awaited = ""
        """The exchange under way: its key `all`. A departure may leave it behind."""
        self._seen = ""
        """The same key, once it is set."""
        self._closing = False
        self._fence = GroupFence(own_store=self._store if self._me.store is None else None)
        self._fence.prefix = f"{self._prefix}/0/groups"
        self._fence.install()
        self._inside = True
        self._watcher = threading.Thread(
            target=self._watch, args=(watching,), name="holdfast rounds", daemon=True
        )
        self._watcher.start()
        # Not when it is needed: an asynchronous exception may strike a thread that is being started.
        self._waiter = threading.Thread(
            target=self._await_exchanges, args=(gathering,), name="holdfast exchanges", daemon=True
        )
        self._waiter.start()
        return self._entry("")

    def returned(self) -> bool:
        round_number = self._step_out()
        with _reaching("written to"):
            if self._store.add(self._key(round_number, "returned"), 1) == self._me.world_size:
                self._mark(self._key(round_number, "end"), RoundMark("done"))
        return self._wait_for_end().how == "done"

    def raised(self, error: Raised) -> None:
        """Break the round, unless it is broken already.

        `leave` is called here too, and has returned when this does: it never hits the next entry.
        """
        why = f"rank {self._me.rank} raised {error.type}: {error.message}"
        with _reaching("written to"):
            self._mark(self._key(self._round, "end"), RoundMark("broken", why))
        self._wait_for_end()

    def left(self) -> None:
        """Note that `leave` has nothing to do any more, once it has returned."""
        self._wait_for_end()
        self._step_out()

    def next(self) -> RoundEntry | None:
        """Wait until all have left; return the place in the next round, which is the same one."""
        end = self._wait_for_end()
        self._require(end, "broken")
        over = self._round
        with _reaching("written to"):
            self._end_exchange()
            if self._store.add(self._key(over, "left"), 1) == self._me.world_size:
                for name in ("end", "go", "returned", "left"):
                    self._store.delete_key(self._key(over, name))
                self._mark(self._key(over + 1, "go"), RoundMark("go"))
        self._wait_until(lambda: self._round > over or self._refused is not None)
        if self._refused is not None:
            self._require(self._refused, "go")
        self._forget_exchanges(self._stale)
        self._exchanges.clear()
        if self._me.store is not None:  # The entry before may have had other numbers (`assign=`).
            numbers = {"RANK": str(self._me.rank), "WORLD_SIZE": str(self._me.world_size)}
            self._environ.update(numbers)
        return self._entry(end.why)

    def gather(self, name: str, value: bytes) -> list[bytes]:
        round_number, ranks = self._round, range(self._me.world_size)
        self._exchanges[name] += 1
        key = self._key(round_number, f"gather/{name}/{self._exchanges[name]}")
        done, before = f"{key}/all", list(self._stale)
        with _reaching("written to"):
            self._stale += [f"{key}/{self._me.rank}", done, f"{key}/count"]
            self._store.set(f"{key}/{self._me.rank}", value)
            if self._store.add(f"{key}/count", 1) == self._me.world_size:
                self._store.set(done, b"1")
            else:
                self._wait_for_exchange(done)
            values = [bytes(v) for v in self._store.multi_get([f"{key}/{r}" for r in ranks])]
        self._forget_exchanges(before)  # All have come here, so all have read those before.
        return values

    def serve_store(self) -> None:
        """torchrun's agent serves the store, whichever ranks are active."""

    def postponed(self) -> None:
        """Nobody limits the time that leaving takes."""

    def resumed(self, step: int) -> None:
        """Nobody keeps count."""

    def ping(self) -> None:
        """Nobody watches for hangs."""

    def pause_watch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stop(self, reason: str, code: int) -> None:
        """Say why; torchrun ends the other ranks when this one exits with the code."""
        print(f"holdfast: rank {self._me.rank}: {reason}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the round for good. If it is not done, no rank can enter another one."""
        with self._changed:
            self._inside = False
            over, end = self._round, self._end
        closed = RoundMark("closed", f"rank {self._me.rank} does not enter the function again")
        keys = [] if end is not None else [self._key(over, "end")]
        keys += [self._key(over + 1, "go"), self._key(over + 1, "end")]
        if self._lost is None and (end is None or end.how == "broken"):
            with _reaching("written to"):
                self._end_exchange()
                for key in keys:
                    if self._mark(key, closed).how in ("done", "closed"):
                        break
        self._fence.remove()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in (self._watcher, self._waiter):
            thread.join(THREADS_END_S)

    # ---- the function's thread ----

    def _entry(self, why: str) -> RoundEntry:
        return RoundEntry(
            round=self._round,
            rank=self._me.rank,
            world_size=self._me.world_size,
            local_rank=self._me.local_rank,
            node_rank=self._me.node_rank,
            why=why,
        )

    def _key(self, round_number: int, name: str) -> str:
        return f"{self._prefix}/{round_number}/{name}"

    def _mark(self, key: str, mark: RoundMark) -> RoundMark:
        """Set a key that nobody has set; return what it is now."""
        return _decoder.decode(self._store.compare_set(key, "", _encode(mark)))

    def _step_out(self) -> int:
        with self._changed:
            self._inside = False
            return self._round

    def _wait_until(self, happened: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: happened() or self._lost is not None or self._unable is not None
            )
            if self._unable is not None:
                raise self._unable
            if not happened() and self._lost is not None:
                raise WireError(_unreachable("listened to", self._lost)) from self._lost

    def _wait_for_end(self) -> RoundMark:
        self._wait_until(lambda: self._end is not None)
        assert self._end is not None
        return self._end

    def _require(self, mark: RoundMark, how: str) -> None:
        if mark.how != how:
            raise StopRestarting(mark.why or f"the round is {mark.how}", code=EXIT_FAILED)

    def _wait_for_exchange(self, key: str) -> None:
        """Wait until all have given their value; raise if the round ends before."""
        with self._changed:
            self._awaited = key
            self._changed.notify_all()
        self._wait_until(lambda: self._seen == key or self._end is not None)
        if not self._end_exchange():
            end = self._wait_for_end()
            raise FencedError(f"round {self._round} ended during an exchange: {end.why}")

    def _end_exchange(self) -> bool:
        """Free all who wait for the exchange under way; return whether it was complete."""
        key = self._awaited
        if not key:
            return True
        found = bytes(self._store.compare_set(key, "", EXCHANGE_ENDED))
        with self._changed:
            self._changed.notify_all()  # A departure may have struck before this was done.
        self._wait_until(lambda: self._seen == key)
        with self._changed:
            self._awaited = self._seen = ""
        return found != EXCHANGE_ENDED

    def _forget_exchanges(self, keys: list[str]) -> None:
        with _reaching("written to"):
            for key in keys:
                self._store.delete_key(key)
        self._stale = [key for key in self._stale if key not in set(keys)]

    # ---- the thread that waits for exchanges ----

    def _await_exchanges(self, store: Any) -> None:
        try:
            while key := self._next_exchange():
                store.wait([key], UNLIMITED)
                with self._changed:
                    self._seen = key
                    self._changed.notify_all()
        except (RuntimeError, OSError) as error:  # Torch's own are RuntimeErrors.
            with self._changed:
                self._lost = error
                self._changed.notify_all()

    def _next_exchange(self) -> str:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._awaited != self._seen)
            return "" if self._closing else self._awaited

    # ---- the watcher thread ----

    def _watch(self, store: Any) -> None:
        try:
            while self._hear_end(_read(store, self._key(self._round, "end"))):
                if not self._hear_go(_read(store, self._key(self._round + 1, "go"))):
                    return
        except (RuntimeError, OSError) as error:  # Torch's own are RuntimeErrors.
            with self._changed:
                self._lost = error
                inside = self._inside
                self._changed.notify_all()
            if inside:
                self._leave(_unreachable("listened to", error))

    def _hear_end(self, end: RoundMark) -> bool:
        """Make the function's thread leave where it has to; return whether a round may follow."""
        with self._changed:
            inside = self._inside
        unable: Exception | None = None
        if inside and end.how != "done":
            try:
                self._leave(end.why)
            except Exception as error:  # A callback's; the function's thread raises it.
                unable = error
        with self._changed:
            self._end, self._unable = end, unable
            self._changed.notify_all()
        return end.how == "broken"

    def _hear_go(self, go: RoundMark) -> bool:
        with self._changed:
            if go.how == "go":
                self._round += 1
                self._end = None
                self._inside = True
                self._fence.prefix = self._key(self._round, "groups")
            else:
                self._refused = go
            self._changed.notify_all()
        return go.how == "go"


def _connections(address: tuple[str, int] | None) -> Callable[[], Any]:
    """Return a function that makes clients of the store, each with a connection of its own."""
    from torch.distributed import HashStore, TCPStore

    if address is None:
        own = HashStore()
        return lambda: own
    host, port = address
    return lambda: TCPStore(host, port, is_master=False, wait_for_workers=False)


def _read(store: Any, key: str) -> RoundMark:
    """Wait for a key; return its value."""
    store.wait([key], UNLIMITED)
    return _decoder.decode(store.get(key))


@contextmanager
def _reaching(doing: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # Torch's own are RuntimeErrors.
        raise WireError(_unreachable(doing, error)) from error


def _unreachable(doing: str, error: BaseException) -> str:
    why = str(error).partition("\n")[0]
    return f"torchrun's store cannot be {doing}: {why}; did torchrun end?"
