"""Why does the job stand still? Gathers what all agents saw, and compares it.

An inquest is opened for an incident, or because somebody asks. It is closed when every node that
was asked has answered, or when its time is up; then there is a verdict, from as much as there is.
Repair never waits for it. What was seen is kept, as it came, with the incident.

A node that comes back on a new stream is told again to stop, and to look before. Nobody looks
twice: if the inquest is over, that changes nothing, and if no node saw anything, there is nothing
to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.diagnosis.verdict import judge
from holdfast.messages.evidence import RankEvidence, Verdict
from holdfast.messages.units import NodeId
from holdfast.messages.wire import Testimony, Why
from holdfast.wire.framing import MAX_FRAME_BYTES

log = logging.getLogger("holdfast.coordinator")

LIMIT_S = 1.5


@dataclass
class _Inquest:
    waiting: set[NodeId]
    world_size: int
    closed: Callable[[Verdict, list[RankEvidence]], None]
    timer: asyncio.TimerHandle
    evidence: list[RankEvidence] = field(default_factory=list)
    heard: set[NodeId] = field(default_factory=set)


class Inquests:
    """All that are open."""

    def __init__(self, incidents: Path) -> None:
        self._incidents = incidents
        self._open: dict[int, _Inquest] = {}
        self._newest = 0
        """The newest incident that there was an inquest of."""

    def open(
        self,
        number: int,
        nodes: Iterable[NodeId],
        world_size: int,
        closed: Callable[[Verdict, list[RankEvidence]], None],
    ) -> None:
        """`closed` is called once, with the verdict; for an incident of which nobody saw anything,
        and one that had its inquest, it is not."""
        if number in self._open:
            inquest = self._open[number]
            inquest.waiting |= set(nodes) - inquest.heard
            return
        if 0 < number <= self._newest:
            return
        self._newest = max(self._newest, number)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(LIMIT_S, self._close, number)
        self._open[number] = _Inquest(set(nodes), world_size, closed, timer)

    def testify(self, node: NodeId, testimony: Testimony) -> None:
        inquest = self._open.get(testimony.inquest)
        if inquest is None or node not in inquest.waiting:
            return
        inquest.evidence += [one for one in testimony.evidence if one.node == node]
        if not testimony.more:
            inquest.waiting.discard(node)
            inquest.heard.add(node)
        if not inquest.waiting:
            self._close(testimony.inquest)

    def _close(self, number: int) -> None:
        inquest = self._open.pop(number)
        inquest.timer.cancel()
        if number > 0 and not inquest.evidence:
            return
        evidence = sorted(inquest.evidence, key=lambda one: one.rank)
        verdict = judge(evidence, inquest.world_size)
        if number > 0:
            self._keep(number, verdict, evidence)
        inquest.closed(verdict, evidence)

    def _keep(self, number: int, verdict: Verdict, evidence: list[RankEvidence]) -> None:
        folder = self._incidents / str(number)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "verdict.json").write_bytes(_pretty(verdict))
            for one in evidence:
                (folder / f"rank_{one.rank}.json").write_bytes(_pretty(one))
        except OSError as error:
            log.error("%s: what was seen is not kept (%s)", folder, error.strerror)


def fitting(why: Why) -> Why:
    """An answer that fits into a frame: raw evidence goes first, from the end."""
    evidence = list(why.evidence)
    while evidence and len(msgspec.msgpack.encode(why)) > MAX_FRAME_BYTES:
        del evidence[len(evidence) // 2 :]
        why = msgspec.structs.replace(why, evidence=tuple(evidence))
    return why


def _pretty(content: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=1)
