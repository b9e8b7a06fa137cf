"""Finds out why the job makes no progress, from what all agents saw.

An examination is opened for an incident, or because a visitor asks. It is closed when every node that
was asked has answered, or when its time is up; then there is a verdict, from as much evidence as there
is. Repair never waits for it. The evidence is kept with the incident.

A node that comes back on a new stream gets the order to stop again, and with it the order to examine
its workers before. Each node's evidence counts once: if the examination is over, that changes nothing.
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
from holdfast.messages.wire import EvidenceTaken, Why
from holdfast.wire.framing import MAX_FRAME_BYTES

log = logging.getLogger("holdfast.coordinator")

LIMIT_S = 1.5


@dataclass
class _Examination:
    """One question to the agents that is not answered yet."""

    waiting: set[NodeId]
    world_size: int
    done: Callable[[Verdict, list[RankEvidence]], None]
    timer: asyncio.TimerHandle
    evidence: list[RankEvidence] = field(default_factory=list)
    heard: set[NodeId] = field(default_factory=set)


class Examinations:
    """The open examinations, by the number of an incident, or a negative one for a visitor's."""

    def __init__(self, incidents: Path) -> None:
        self._incidents = incidents
        self._open: dict[int, _Examination] = {}
        self._newest = 0
        """The newest incident that was examined."""

    def open(
        self,
        number: int,
        nodes: Iterable[NodeId],
        world_size: int,
        done: Callable[[Verdict, list[RankEvidence]], None],
    ) -> None:
        """Wait for the evidence of these nodes, then call `done` once with the verdict; not for an
        incident without evidence, nor for one that was examined before."""
        if number in self._open:
            self._open[number].waiting |= set(nodes) - self._open[number].heard
            return
        if 0 < number <= self._newest:
            return
        self._newest = max(self._newest, number)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(LIMIT_S, self._close, number)
        self._open[number] = _Examination(set(nodes), world_size, done, timer)

    def add(self, node: NodeId, message: EvidenceTaken) -> None:
        """Add a node's evidence."""
        one = self._open.get(message.examination)
        if one is None or node not in one.waiting:
            return
        one.evidence += [each for each in message.evidence if each.node == node]
        if not message.more:
            one.waiting.discard(node)
            one.heard.add(node)
        if not one.waiting:
            self._close(message.examination)

    def _close(self, number: int) -> None:
        one = self._open.pop(number)
        one.timer.cancel()
        if number > 0 and not one.evidence:
            return
        evidence = sorted(one.evidence, key=lambda each: each.rank)
        verdict = judge(evidence, one.world_size)
        if number > 0:
            self._keep(number, verdict, evidence)
        one.done(verdict, evidence)

    def _keep(self, number: int, verdict: Verdict, evidence: list[RankEvidence]) -> None:
        folder = self._incidents / str(number)
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
