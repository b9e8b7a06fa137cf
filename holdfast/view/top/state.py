"""What `holdfast top` shows, apart from how.

`JobNow` is one look at a job: its reports, and its ranks by node as letters. `Looks` is where the
reader is: which page, which rank, how far down. A frame is a function of both and of a size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from holdfast.config.values import Price
from holdfast.core.job import Job
from holdfast.messages.reports import GoodputReport, IncidentReport, RankReport, StatusReport
from holdfast.messages.units import Time
from holdfast.messages.usage import NodeUsage
from holdfast.view import rankmap
from holdfast.view.follower import Follower

LETTERS = {
    "r": "running",
    "w": "waiting for others",
    "c": "saving",
    "s": "slow",
    "h": "holds the others up",
    "i": "starting",
    "f": "finished",
    "-": "not there",
}
"""What a letter of the map says of a rank; the words of `rankmap`."""
WORST_FIRST = "h-siwcrf"
"""Which of its ranks' letters a node has where it is one letter itself."""
SPEEDS_SHOWN = 60

Page = Literal["overview", "incidents", "why", "help"]


class NodeNow(NamedTuple):
    """A node, and a letter for each of its ranks."""

    node: str
    host: str
    state: str
    first_rank: int
    """-1 for a node without ranks."""
    letters: str
    note: str = ""
    """What is wrong with it: its overload, or why it is suspected."""
    usage: str = ""
    """How much of its machine is in use."""

    @property
    def worst(self) -> str:
        """The letter for the whole node."""
        return min(self.letters, key=WORST_FIRST.index, default="-")


@dataclass(frozen=True)
class JobNow:
    """One look at a job."""

    status: StatusReport
    goodput: GoodputReport
    incidents: list[IncidentReport]
    nodes: list[NodeNow]
    now: Time
    speeds: tuple[float, ...] = ()
    """Steps a second over the latest minutes, oldest first."""
    price: Price | None = None
    """What a rank costs in an hour, if the reader gave it."""
    loading: float | None = None
    """Share of the journal that was read; None once all of it was."""

    @property
    def ranks(self) -> int:
        return sum(len(node.letters) for node in self.nodes)

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self.status.state in ("ended", "lost") and self.loading is None

    def rank(self, number: int) -> tuple[RankReport, str] | None:
        """A rank and the host that it is on."""
        for node in self.status.nodes:
            for one in node.ranks:
                if one.rank == number:
                    return one, node.host
        return None


@dataclass
class Looks:
    """Where the reader of the screen is."""

    page: Page = "overview"
    selected: int = 0
    """The rank that is asked about."""
    scroll: int = 0
    """Rows that are above the part that is seen."""
    why: list[str] = field(default_factory=list)
    """What `holdfast why` found, or that it is being asked."""


def look_at(follower: Follower, price: Price | None = None) -> JobNow:
    """Take one look at a job that has begun."""
    status, letters = follower.status(), rankmap.ranks(follower.job)
    notes: dict[str, str] = {node.node: "overloaded" for node in status.nodes if node.overload}
    notes |= {node: f"suspect: {why}" for node, why in status.suspects.items()}
    used = {node.node: usage_words(node.usage) for node in status.nodes if node.usage is not None}
    nodes = []
    for node, host, state, first, count, *_ in rankmap.nodes(follower.job):
        theirs = letters[first : first + count] if count else ""
        nodes.append(
            NodeNow(node, host, state, first, theirs, notes.get(node, ""), used.get(node, ""))
        )
    nodes += _left(follower.job, letters, {one.node for one in nodes})
    return JobNow(
        status=status,
        goodput=follower.goodput(),
        incidents=follower.incidents(),
        nodes=sorted(nodes, key=lambda one: (one.first_rank < 0, one.first_rank, one.host)),
        now=follower.now,
        speeds=_speeds(follower),
        price=price,
        loading=follower.progress if follower.behind else None,
    )


def usage_words(usage: NodeUsage) -> str:
    """Say in a few words how much of a machine is in use."""
    shares = [("cpu", usage.cpu), ("mem", usage.memory), ("gpu", usage.gpu)]
    return " ".join(f"{name} {share:4.0%}" for name, share in shares if share is not None)


def _left(job: Job, letters: str, present: set[str]) -> list[NodeNow]:
    """The nodes of the last round that have left, with what became of their ranks."""
    found: dict[str, list[int]] = {}
    for rank, state in job.ranks.items():
        if state.node not in present:
            found.setdefault(state.node, []).append(rank)
    return [
        NodeNow(node, node, "left", min(ranks), "".join(letters[rank] for rank in ranks))
        for node, ranks in found.items()
    ]


def _speeds(follower: Follower) -> tuple[float, ...]:
    points = follower.history.speed.points()[-SPEEDS_SHOWN:]
    return tuple(point.steps_per_s or 0.0 for _, point in points)
