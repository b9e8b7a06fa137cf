"""What all machines of the core have in common.

A machine is one room of the core: its state, which nobody else writes; the moments it hears of, all by
the same names and each with a default that does nothing; the events it handles; its next deadline and
its invariants. `core.job` holds the tuple of machines and fans each moment out over it.

A method of a moment, and a handler, changes the machine's own state and returns effects: actions for
nodes, and decisions for the job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from holdfast.core.decisions import Asker, Effect, Refused, Tell
from holdfast.core.faults import Fault
from holdfast.core.view import Candidate, View
from holdfast.messages.events import Asked, NodeJoined, NodeResumed, WorkerExited, WorkerStarted
from holdfast.messages.records import JobResult, Place, RankProgress, Terms, World
from holdfast.messages.units import NodeId, Time

Effects = Sequence[Effect]
Handler = Callable[..., "Effects | Refused"]
H = TypeVar("H", bound=Handler)
M = TypeVar("M", bound="Machine")

NONE: Effects = ()


class Rule(Struct, frozen=True):
    """In which states a handler takes which event, and the reason given in all others."""

    event: type
    states: tuple[type, ...]
    refusal: str


def on(event: type, *states: type, refusal: str = "") -> Callable[[H], H]:
    """Mark a method as the handler of an event, in these states."""

    def mark(handler: H) -> H:
        handler.rule = Rule(event, states, refusal)  # type: ignore[attr-defined]
        return handler

    return mark


def tell(moment: Callable[..., Effects], *arguments: Any) -> Tell:
    """Let every machine hear of a moment, named by its method: `tell(Machine.node_joined, node)`."""
    return Tell(moment.__name__, arguments)


class Machine(Struct):
    """One room's machine. Subclasses add its state, and replace the defaults they need."""

    @classmethod
    def opened(cls: type[M], terms: Terms, at: Time) -> M:
        """Make the machine as it is when a job opens."""
        return cls()

    # ---- moments ----

    def round_began(self, job: View, world: World, now: Time) -> Effects:
        """A world is frozen, and its ranks are about to be started."""
        return NONE

    def round_ended(self, job: View, fault: Fault, now: Time) -> Effects:
        """The round in force is broken, and its workers are about to be stopped."""
        return NONE

    def round_stopped(self, job: View, fault: Fault, now: Time) -> Effects:
        """All workers of the broken round are gone, and the fault is judged."""
        return NONE

    def round_awaited(self, job: View, now: Time) -> Effects:
        """No world can be frozen yet."""
        return NONE

    def node_joined(self, job: View, event: NodeJoined, now: Time) -> Effects:
        return NONE

    def node_warmed(self, job: View, node: NodeId, now: Time) -> Effects:
        """A node's standbys are ready."""
        return NONE

    def node_lost(self, job: View, node: NodeId, placed: bool, now: Time) -> Effects:
        """A node is gone; `placed` if the world in force has lost a member by that."""
        return NONE

    def node_sent_away(self, job: View, node: NodeId, now: Time) -> Effects:
        """A living node was told to finish, and is no member any more."""
        return NONE

    def node_resumed(self, job: View, event: NodeResumed, now: Time) -> Effects:
        """A member is back on a new stream: what it may have missed is said again."""
        return NONE

    def rank_started(self, job: View, event: WorkerStarted, now: Time) -> Effects:
        return NONE

    def rank_stepped(self, job: View, progress: RankProgress, first: bool, now: Time) -> Effects:
        """A rank has finished steps; `first` if they are the first of its process."""
        return NONE

    def rank_exited(self, job: View, event: WorkerExited, now: Time) -> Effects:
        return NONE

    def request_held(self, job: View, asker: Asker, event: Asked, now: Time) -> Effects:
        """A script asks for what is answered once something happens: see `HeldRequest`."""
        return NONE

    def job_ended(self, job: View, result: JobResult, secure: bool, now: Time) -> Effects:
        """The job is ending: every node is about to be told to finish."""
        return NONE

    def job_closed(self, job: View, result: JobResult, now: Time) -> Effects:
        """The last node is gone."""
        return NONE

    def job_requeued(self, job: View, since: Time, now: Time) -> Effects:
        """The job goes on after it had ended, or was cut short, at that time. It has no nodes yet."""
        return NONE

    def coordinator_restarted(self, job: View, now: Time) -> Effects:
        return NONE

    def tick(self, job: View, now: Time) -> Effects:
        return NONE

    # ---- the next round ----

    def before_round(self, job: View, now: Time) -> Effects:
        """Say what has to happen before a round may be frozen; asked whenever one might be."""
        return NONE

    def holds_round(self) -> bool:
        """Whether the next round has to wait for this machine."""
        return False

    def withheld(self, job: View, waiting: Mapping[NodeId, Candidate]) -> Collection[NodeId]:
        """Name those of these waiting nodes that must not get a place yet."""
        return ()

    def part_of(self, job: View, world: World, place: Place) -> Mapping[str, Any]:
        """Contribute fields to what a node is told of its part in a round."""
        return {}

    # ---- always ----

    def deadline(self, job: View) -> Time | None:
        """When the machine next wants a tick."""
        return None

    def validate(self, job: View) -> None:
        """Assert every invariant."""
