"""Finds out why the job makes no progress, from what all agents see.

An examination is opened because the core suspects a hang, or because a visitor asks. It is closed when
every node that was asked has answered, or when its time is up; then there is a verdict, from as much
evidence as there is. What the newest examination saw is kept with the incident if the core acts on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.diagnosis.verdict import judge
from holdfast.messages.evidence import RankEvidence, Verdict
from holdfast.messages.units import NodeId, Rank
from holdfast.messages.wire import EvidenceTaken, Why
from holdfast.wire.framing import MAX_FRAME_BYTES

log = logging.getLogger("holdfast.coordinator")

LIMIT_S = 1.5


@dataclass
class _Examination:
    """One question to the agents that is not answered yet."""

    waiting: set[NodeId]
    world_size: int
    finished: Collection[Rank]
    done: Callable[[Verdict, list[RankEvidence]], None]
    timer: asyncio.TimerHandle
    evidence: list[RankEvidence] = field(default_factory=list)
    incident: int = 0
    """The incident that it is to be kept with; 0 for none."""


class Examinations:
    """The open examinations, by their numbers; those of visitors are negative."""

    def __init__(self, incidents: Path) -> None:
        self._incidents = incidents
        self._open: dict[int, _Examination] = {}
        self._newest: tuple[int, Verdict, list[RankEvidence]] | None = None
        """The core's newest examination that is closed."""

    def open(
        self,
        number: int,
        nodes: Iterable[NodeId],
        world_size: int,
        finished: Collection[Rank],
        done: Callable[[Verdict, list[RankEvidence]], None],
    ) -> None:
        """Wait for the evidence of these nodes, then call `done` once with the verdict."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(LIMIT_S, self._close, number)
        self._open[number] = _Examination(set(nodes), world_size, finished, done, timer)
        if not self._open[number].waiting:
            loop.call_soon(self._close, number)

    def add(self, node: NodeId, message: EvidenceTaken) -> None:
        """Add a node's evidence."""
        one = self._open.get(message.examination)
        if one is None or node not in one.waiting:
            return
        one.evidence += [each for each in message.evidence if each.node == node]
        if not message.more:
            one.waiting.discard(node)
        if not one.waiting:
            self._close(message.examination)

    def keep(self, number: int, incident: int) -> None:
        """Keep what an examination saw, or will have seen, with an incident."""
        if number in self._open:
            self._open[number].incident = incident
        elif self._newest is not None and self._newest[0] == number:
            self._write(incident, *self._newest[1:])

    def _close(self, number: int) -> None:
        one = self._open.pop(number, None)
        if one is None:
            return
        one.timer.cancel()
        evidence = sorted(one.evidence, key=lambda each: each.rank)
        verdict = judge(evidence, one.world_size, one.finished)
        if number > 0:
            self._newest = (number, verdict, evidence)
        if one.incident:
            self._write(one.incident, verdict, evidence)
        one.done(verdict, evidence)

    def _write(self, incident: int, verdict: Verdict, evidence: list[RankEvidence]) -> None:
        folder = self._incidents / str(incident)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "verdict.json").write_bytes(_pretty(verdict))
            for one in evidence:
                (folder / f"rank_{one.rank}.json").write_bytes(_pretty(one))
        except OSError as error:
            log.error("%s: the evidence cannot be written (%s)", folder, error.strerror)


def fitting(why: Why) -> Why:
    """Shorten an answer to fit into a frame, by dropping raw evidence from the end."""
    evidence = list(why.evidence)
    while evidence and len(msgspec.msgpack.encode(why)) > MAX_FRAME_BYTES:
        del evidence[len(evidence) // 2 :]
        why = msgspec.structs.replace(why, evidence=tuple(evidence))
    return why


def _pretty(content: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=1)
