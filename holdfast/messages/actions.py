"""Actions: what is to be done. The core returns them; the coordinator carries each to its node."""

from __future__ import annotations

from msgspec import Struct

from holdfast.messages.records import Part
from holdfast.messages.requests import AnyAnswer
from holdfast.messages.units import NodeId, Rank, RoundNumber, Seconds


class Action(Struct, frozen=True, kw_only=True, tag=True):
    pass


class StartWorkers(Action, frozen=True, kw_only=True):
    """Give the ranks of this part to processes of the node."""

    node: NodeId
    part: Part


class Prepare(Action, frozen=True, kw_only=True):
    """There is no place for the node now: have standbys ready for when there is."""

    node: NodeId


class StopWorkers(Action, frozen=True, kw_only=True):
    """End the node's workers of that round, then say NodeReady."""

    node: NodeId
    round: RoundNumber
    grace_s: Seconds
    why: str


class Finish(Action, frozen=True, kw_only=True):
    """End whatever runs on the node, say NodeLeft, and exit with that code."""

    node: NodeId
    code: int
    reason: str
    grace_s: Seconds
    rejoin: bool = False
    """Whether the launcher shall start a new agent that joins as another node."""


class Answered(Action, frozen=True, kw_only=True):
    """Tell that rank's script what the coordinator says to its request."""

    node: NodeId
    round: RoundNumber
    rank: Rank
    lane: int
    number: int
    answer: AnyAnswer


class CloseJob(Action, frozen=True, kw_only=True):
    """All nodes are gone and the job is over: the coordinator may end."""

    code: int
    reason: str


AnyAction = Prepare | StartWorkers | StopWorkers | Finish | Answered | CloseJob
NodeAction = Prepare | StartWorkers | StopWorkers | Finish | Answered
