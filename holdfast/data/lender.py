"""Where a client's shards come from: the node's agent, or, outside `holdfast run`, this process.

Both hand out shards that were not used before, and say when there are none left. The agent's come from
the coordinator, which shares them among all ranks; the process's own are for one process alone.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import count, cycle
from typing import Final, Protocol

from holdfast.data.link import JobLink
from holdfast.errors import DataError, HoldfastError
from holdfast.messages.data import DataSpec, Span, Used
from holdfast.messages.local import DataUsed, ShardError
from holdfast.messages.spans import SpanSet

_AHEAD_S: Final = 0.5
"""How long the shards that a process has taken shall last."""
_MOST: Final = 1024


class Lender(Protocol):
    def take(self, wait: bool | float) -> Span | None:
        """Return the next shard; None if there is none within that time, or none any more."""

    @property
    def finished(self) -> bool:
        """Whether there will be no more shards."""

    def used(self, used: Used) -> None: ...
    def failed(self, span: Span, error: str) -> None: ...
    def returned(self, span: Span) -> None: ...


# ---- from the agent ------------------------------------------------------------------------------


class AgentShards:
    """Shards of the node. A thread takes them ahead of use, as many as half a second needs."""

    def __init__(self, link: JobLink, name: str) -> None:
        self._link, self._name = link, name
        self._ready: queue.SimpleQueue[Span | HoldfastError | None] = queue.SimpleQueue()
        self._wishes: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Asks the thread for more shards; at most one wish is open."""
        self._wished = True
        self._low = 0
        """Number of shards at which more are asked for."""
        self._end: HoldfastError | None = None
        self._finished = False
        self._thread = threading.Thread(target=self._fetch, name=f"shards of {name}", daemon=True)
        self._thread.start()
        self._wishes.put(None)

    def take(self, wait: bool | float) -> Span | None:
        if self._end is not None:
            raise self._end
        if self._finished:
            return None
        try:
            found = self._ready.get(bool(wait), None if wait is True else wait)
        except queue.Empty:
            return None
        if not self._wished and self._ready.qsize() <= self._low:
            self._wished = True
            self._wishes.put(None)
        if isinstance(found, HoldfastError):
            self._end = found
            raise found
        self._finished = found is None
        return found

    @property
    def finished(self) -> bool:
        return self._finished

    def used(self, used: Used) -> None:
        self._link.tell(DataUsed(dataset=self._name, used=(used,)))

    def failed(self, span: Span, error: str) -> None:
        failed = ShardError(span, error[:2000])
        self._link.tell(DataUsed(dataset=self._name, failed=(failed,)))

    def returned(self, span: Span) -> None:
        self._link.tell(DataUsed(dataset=self._name, returned=(span,)))

    def _fetch(self) -> None:
        put, at = 0, time.monotonic()
        while True:
            self._wishes.get()
            # Between two wishes, all was taken that was put and is not there any more.
            before, at = at, time.monotonic()
            left = self._ready.qsize()
            per_s = (put - left) / max(at - before, 1e-6)
            ahead = max(1, min(_MOST, math.ceil(per_s * _AHEAD_S)))
            self._low, put = ahead // 2, left
            try:
                spans = self._link.take(self._name, max(1, ahead - left))
            except HoldfastError as error:
                self._ready.put(error)
                return
            self._wished = False
            for span in spans:
                self._ready.put(span)
            put += len(spans)
            if not spans:
                self._ready.put(None)
                return


# ---- from this process ---------------------------------------------------------------------------


class OwnShards:
    """All shards of a data set, for one process; what was used before is left out."""

    def __init__(self, spec: DataSpec, used: SpanSet) -> None:
        self._spec = spec
        self._rest = _shards(spec, used)
        self._again: deque[Span] = deque()
        self._failures: dict[Span, int] = {}
        self._finished = False
        self.skipped: list[Span] = []

    def take(self, wait: bool | float) -> Span | None:
        found = self._again.popleft() if self._again else next(self._rest, None)
        self._finished = found is None
        return found

    @property
    def finished(self) -> bool:
        return self._finished

    def used(self, used: Used) -> None:
        self._failures.pop(used.span, None)

    def returned(self, span: Span) -> None:
        self._again.append(span)

    def failed(self, span: Span, error: str) -> None:
        failures = self._failures[span] = self._failures.get(span, 0) + 1
        if failures < self._spec.failures:
            self._again.append(span)
        elif self._spec.skip:
            self.skipped.append(span)
        else:
            raise DataError(
                f"data set {self._spec.name!r}: the shard of positions {span.start} to"
                f" {span.stop - 1} of epoch {span.line} failed {failures} times: {error}"
            )


def _shards(spec: DataSpec, used: SpanSet) -> Iterator[Span]:
    """Yield all shards that were not used, in order."""
    if spec.size is None:
        yield from _stream_shards(spec, used)
        return
    for epoch in count() if spec.epochs == 0 else range(spec.epochs):
        for part in range(spec.sub_epochs):
            first = spec.size * part // spec.sub_epochs
            last = spec.size * (part + 1) // spec.sub_epochs
            for start in range(first, last, spec.shard):
                yield from used.without(Span(epoch, start, min(start + spec.shard, last)))


def _stream_shards(spec: DataSpec, used: SpanSet) -> Iterator[Span]:
    """Yield shards of all partitions by turns, without end."""
    at = dict.fromkeys(range(len(spec.partitions)), 0)
    at |= {span.line: span.stop for span in used}
    for line in cycle(at):
        yield Span(line, at[line], at[line] + spec.shard)
        at[line] += spec.shard
