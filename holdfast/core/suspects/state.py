"""What is known of faults that point at nodes, and of the nodes that they point at."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from holdfast.messages.units import NodeId, Rank, StepNumber

MachineName = str
"""What faults are counted for: a host, whose nodes come and go; where several members share a host, as
on one machine in a test, each node by itself."""

Sign = Literal["crash", "outside", "script"]
"""What a fault says: memory or processor failed, something other than the script ended it, or, most
likely, the script did."""


class Strike(Struct, frozen=True, kw_only=True):
    """A fault that may be a node's."""

    machine: MachineName
    rank: Rank
    """The rank that it struck; of a lost node, its first."""
    sign: Sign
    signature: str
    step: StepNumber | None
    """None where steps cannot be compared with those of other rounds."""
    share: float
    """Share of the ranks that the machine had."""
    nodes: int
    """Nodes of the round."""


class Suspect(Struct, kw_only=True):
    """A machine that faults point at."""

    node: NodeId
    """The node that it was when the last of them struck."""
    why: str
    ranks: list[Rank]
    """Ranks that it had then."""
    signatures: list[str]
    state: Literal["named", "replaced", "back"] = "named"
    """In the round, or not yet replaced; out of it, with another in its place; in it again."""
    told: bool = False
    """Whether an incident says that it could not be replaced."""
    unfit: str = ""
    """What proves that the machine is at fault; empty without proof."""

    @property
    def line(self) -> str:
        """Say why it is a suspect, and what became of it."""
        done = {
            "named": "it stays until another node can take its place",
            "replaced": "it gets a place only if no other node can",
            "back": "it was replaced, and is needed again",
        }
        return f"{self.why}; {done[self.state]}"


class NodeTrial(Struct, kw_only=True):
    """A failure that would end the job if it came once more, and is tried on another node first."""

    machine: MachineName
    node: NodeId
    strike: Strike
    ranks: list[Rank]
    """Ranks that the machine had."""
    away: bool = False
    """A round without the machine has begun."""


class Followed(Struct, frozen=True):
    """A failure of these ranks that is no node's: it stayed with them when another node got them, or
    nothing can be told by it."""

    signature: str
    ranks: tuple[Rank, ...]


class Suspects(Struct):
    strikes: list[Strike] = field(default_factory=list)
    """The newest faults that may be a node's, oldest first."""
    all: dict[MachineName, Suspect] = field(default_factory=dict)
    trial: NodeTrial | None = None
    followed: list[Followed] = field(default_factory=list)
    warnings: dict[MachineName, dict[str, str]] = field(default_factory=dict)
    """What health checks of the GPUs found on each machine that is no failure, by check."""
    machines: dict[NodeId, MachineName] = field(default_factory=dict)
    """The machines of the newest round."""
    struck: dict[str, list[MachineName]] = field(default_factory=dict)
    """In this round: where each failure was seen that is no consequence of another; two at most."""
