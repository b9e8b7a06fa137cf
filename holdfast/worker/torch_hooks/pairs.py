"""Counts a rank's sends and receives, which gloo does not record.

The n-th receive from a peer takes what the peer's n-th send gives: gloo keeps the order of those with
one tag. So a rank that waits in its n-th receive, from a peer that has called n - 1 sends, waits for a
call that has not been made; and likewise a send, which gloo does not begin before the receive is there.
All of torch's functions end in three methods of its process groups, and these are wrapped, so that a
send which nobody waits for is counted as well.

A count that does not say which calls meet is none: calls with different tags, of several threads, of
two groups of one name, and receives from any rank. Only tensors in host memory count: NCCL's operations
are recorded.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from holdfast.diagnosis import flight
from holdfast.diagnosis.flight import CountedPair, RecordedOperation
from holdfast.messages.evidence import ANY_PEER, MAX_PAIRS, UNCOUNTED
from holdfast.worker.torch_hooks.imports import when_imported

_ARROWS = {"send": "->", "recv": "<-"}


@dataclass(slots=True)
class _Series:
    """The calls of one kind to one peer in one group."""

    op: str
    peer: int
    """In the group."""
    rank: int
    """The peer in the job."""
    group: weakref.ref[Any]
    description: str
    tag: int
    thread: int
    calls: int = 0
    in_order: bool = True
    """Whether they have one order."""


class PairCalls:
    """The counts of a process; a dump reads them from another thread."""

    def __init__(self) -> None:
        self._c10d: Any = None
        self._world = 0
        self._series: dict[tuple[str, int, str], _Series] = {}
        """Of the newest world, by group, peer and kind. Those of destroyed groups stay."""
        self._works: dict[weakref.ref[Any], tuple[_Series, int]] = {}
        """The call of each operation that the script can still wait for, and its number."""
        self._left_out = False

    def install(self) -> None:
        when_imported("torch.distributed.distributed_c10d", self._on_c10d)

    def _on_c10d(self, module: ModuleType) -> None:
        kind = module.ProcessGroup
        wrapped = {
            "send": self._wrapped(kind.send, "send", _peer),
            "recv": self._wrapped(kind.recv, "recv", _peer),
            "recv_anysource": self._wrapped(kind.recv_anysource, "recv", _any_peer),
        }
        self._c10d = module
        for name, method in wrapped.items():
            setattr(kind, name, method)

    def _wrapped(
        self,
        real: Callable[..., Any],
        op: str,
        arguments: Callable[[Sequence[Any], Mapping[str, Any]], tuple[int, int]],
    ) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            work = real(*args, **kwargs)  # One that fails does not count.
            tensors = args[1] if len(args) > 1 else kwargs["tensors"]
            if tensors[0].is_cpu:
                self._count(args[0], op, *arguments(args, kwargs), work)
            return work

        call._torchdynamo_disable = True  # type: ignore[attr-defined]
        return call

    def _count(self, group: Any, op: str, peer: int, tag: int, work: Any) -> None:
        world = flight.world()
        if world != self._world:
            self._series, self._left_out, self._world = {}, False, world
        key, thread = (group.group_name, peer, op), threading.get_ident()
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= MAX_PAIRS:
                self._left_out = True
                return
            series = self._series.setdefault(key, self._begin(group, op, peer, tag))
        if series.thread != thread or series.tag != tag or series.group() is not group:
            series.in_order = False
        series.calls += 1
        self._works[weakref.ref(work, self._works.pop)] = series, series.calls

    def _begin(self, group: Any, op: str, peer: int, tag: int) -> _Series:
        known = peer != ANY_PEER and group in self._c10d._world.pg_group_ranks
        return _Series(
            op=op,
            peer=peer,
            rank=self._c10d.get_global_rank(group, peer) if known else ANY_PEER,
            group=weakref.ref(group),
            description=group.group_desc,
            tag=tag,
            thread=threading.get_ident(),
        )

    # ---- what a dump tells ----

    def counted(self) -> list[CountedPair] | None:
        """Return the counts of this world; None if some are missing."""
        if self._left_out or self._c10d is None:
            return None
        if flight.world() != self._world:
            return []
        found: dict[tuple[str, int], CountedPair] = {}
        for (name, peer, op), series in list(self._series.items()):
            made = CountedPair((name, series.description), series.rank)
            pair = found.setdefault((name, peer), made)
            count = series.calls if series.in_order else UNCOUNTED
            setattr(pair, "sends" if op == "send" else "receives", count)
        return list(found.values())

    def awaited(self, work: object) -> RecordedOperation | None:
        """Return what a recorder would have noted of an operation; None if it is not known as a send
        to or a receive from one rank by gloo."""
        if self._c10d is None or not isinstance(work, self._c10d.Work):
            return None
        series, number = self._works.get(weakref.ref(work), (None, 0))
        group = series.group() if series is not None else None
        if series is None or group is None or series.rank == ANY_PEER or not _by_gloo(group):
            return None
        name = group.group_name
        takes_any = series.op == "recv" and (name, ANY_PEER, "recv") in self._series
        return RecordedOperation(
            profiling_name=f"gloo:{series.op} {group.rank()}{_ARROWS[series.op]}{series.peer}",
            process_group=(name, group.group_desc),
            is_p2p=True,
            p2p_seq_id=number if series.in_order and not takes_any else 0,
        )


def _peer(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Return the peer and the tag of a call."""
    peer = args[2] if len(args) > 2 else kwargs.get("dstRank", kwargs.get("srcRank"))
    return int(peer), int(args[3] if len(args) > 3 else kwargs["tag"])


def _any_peer(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    return ANY_PEER, 0


def _by_gloo(group: Any) -> bool:
    """Return whether a group's operations in host memory are gloo's."""
    cpu = next((device for device in group._device_types if device.type == "cpu"), None)
    return cpu is not None and group._get_backend(cpu).name() == "gloo"
