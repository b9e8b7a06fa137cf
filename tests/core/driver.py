"""A job driven by hand: events in at given times, actions out, every invariant checked after each.

It remembers all it fed in, so that any test can replay the same history and compare.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from holdfast.core import job as jobs
from holdfast.core.job import Job
from holdfast.core.ledger import books
from holdfast.core.ledger.books import Ledger
from holdfast.messages.actions import AnyAction
from holdfast.messages.events import (
    AnyEvent,
    JobOpened,
    LeaseEnded,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeReady,
    NodeResumed,
    Progress,
    RankRaised,
    RanksReturned,
    StreamEnded,
    Tick,
    WorkerExited,
    WorkersKilled,
    WorkerStarted,
)
from holdfast.messages.records import NodeSpec, Raised, RankProgress, Terms, World
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

OPENED_AT = 1000.0


def encoded(job: Job) -> bytes:
    """All that the job knows, but for how many events it has heard and refused."""
    return msgspec.json.encode(msgspec.structs.replace(job, events=0, refused={}))


def revived(job: Job) -> Job:
    """The job after a trip through the journal's snapshot."""
    return msgspec.json.decode(msgspec.json.encode(job), type=Job)


def replayed(history: Iterable[tuple[AnyEvent, Time]], revive_at: int | None = None) -> Job:
    """The job that the same events lead to, with a trip through a snapshot in the middle."""
    job: Job | None = None
    for i, (event, now) in enumerate(history):
        if job is None:
            assert isinstance(event, JobOpened)
            job = jobs.opened(event)
        else:
            jobs.decide(job, event, now)
        if i == revive_at:
            job = revived(job)
    assert job is not None
    return job


def check_books(job: Job, now: float) -> None:
    """The causes add up to the rank-seconds, whenever one asks."""
    at = Time(now)
    total = books.rank_seconds(job.of(Ledger), at)
    assert abs(sum(books.seconds_until(job.of(Ledger), at).values()) - total) <= 1e-6 * max(
        1.0, total
    )


def spec(slots: int = 2, host: str = "host", **more: Any) -> NodeSpec:
    return NodeSpec(host=host, address="10.0.0.1", slots=slots, pid=1, **more)


def raised(type: str = "ValueError", message: str = "no", where: str = "train.py:3") -> Raised:
    return Raised(type=type, message=message, where=where, traceback=f"{type}: {message}")


WAKE = raised("RuntimeError", "[gloo] Connection closed by peer [10.0.0.2]:1234")


class Driver:
    def __init__(self, **terms: Any) -> None:
        event = JobOpened(at=Time(OPENED_AT), job="j", terms=Terms(**terms))
        self.job = jobs.opened(event)
        self.now = OPENED_AT
        self.history: list[tuple[AnyEvent, Time]] = [(event, Time(OPENED_AT))]
        self.stepping_since: dict[tuple[RoundNumber, int], float] = {}
        """When each rank of each round had its first step behind it."""

    def take(self, event: AnyEvent) -> list[AnyAction]:
        self.history.append((event, Time(self.now)))
        actions = jobs.decide(self.job, event, Time(self.now))
        jobs.validate(self.job)
        check_books(self.job, self.now)
        return actions

    def after(self, seconds: float) -> Driver:
        self.now += seconds
        return self

    @property
    def at(self) -> Time:
        return Time(self.now)

    @property
    def world(self) -> World:
        assert self.job.world is not None
        return self.job.world

    @property
    def round(self) -> RoundNumber:
        return self.job.membership.round

    # ---- what nodes say ----

    def join(self, node: str, slots: int = 2, replaces: str = "", **more: Any) -> list[AnyAction]:
        event = NodeJoined(
            at=self.at,
            node=NodeId(node),
            spec=spec(slots, **more),
            store_port=20000 + len(self.history),
            replaces=NodeId(replaces),
        )
        return self.take(event)

    def ready(self, node: str, ranks: Iterable[RankProgress] = (), **more: Any) -> list[AnyAction]:
        more = {"round": self.round, "slowest_stop_s": None, **more}
        port = 20000 + len(self.history)
        return self.take(
            NodeReady(at=self.at, node=NodeId(node), store_port=port, ranks=tuple(ranks), **more)
        )

    def leaving(self, node: str, code: int = 75) -> list[AnyAction]:
        event = NodeLeaving(at=self.at, node=NodeId(node), reason="stopped by SIGTERM", code=code)
        return self.take(event)

    def left(self, node: str, ranks: Iterable[RankProgress] = (), **more: Any) -> list[AnyAction]:
        more = {"round": self.round, **more}
        return self.take(NodeLeft(at=self.at, node=NodeId(node), ranks=tuple(ranks), **more))

    def lose(self, node: str) -> list[AnyAction]:
        """Its stream ends, and it is not heard of until its lease is over."""
        return self.cut_off(node) + self.end_lease(node)

    def cut_off(self, node: str) -> list[AnyAction]:
        return self.take(StreamEnded(at=self.at, node=NodeId(node)))

    def end_lease(self, node: str, why: str = "it was not heard of for 4.0 s") -> list[AnyAction]:
        return self.take(LeaseEnded(at=self.at, node=NodeId(node), why=why))

    def killed(self, node: str, round: int | None = None) -> list[AnyAction]:
        number = self.round if round is None else RoundNumber(round)
        return self.take(WorkersKilled(at=self.at, node=NodeId(node), round=number))

    def resume(self, node: str, round: int, busy: bool = False, **more: Any) -> list[AnyAction]:
        about = {"node": NodeId(node), "round": RoundNumber(round), "busy": busy, **more}
        return self.take(NodeResumed(at=self.at, **about))

    def tick(self) -> list[AnyAction]:
        return self.take(Tick(at=self.at))

    # ---- what workers do ----

    def node_of(self, rank: int) -> NodeId:
        return self.job.ranks[Rank(rank)].node

    def start(self, rank: int, **more: Any) -> list[AnyAction]:
        more = {"round": self.round, "node": self.node_of(rank), **more}
        return self.take(WorkerStarted(at=self.at, rank=Rank(rank), pid=7, warm=True, **more))

    def start_all(self) -> None:
        for rank in self.job.ranks:
            self.start(rank)

    def progress(
        self, rank: int, step: int, steps: int | None = None, first_at: float | None = None
    ) -> RankProgress:
        """What a rank's page says now; all time since its first one went into steps."""
        since = self.stepping_since.setdefault((self.round, rank), self.now)
        return RankProgress(
            rank=Rank(rank),
            step=StepNumber(step),
            steps=step if steps is None else steps,
            first_at=Time(self.now if first_at is None else first_at),
            last_at=self.at,
            trained_s=self.now - since,
        )

    def step(self, rank: int, step: int, steps: int | None = None, **more: Any) -> list[AnyAction]:
        progress = self.progress(rank, step, steps, more.pop("first_at", None))
        more = {"round": self.round, "node": self.node_of(rank), **more}
        return self.take(Progress(at=self.at, ranks=(progress,), **more))

    def step_all(self, step: int, steps: int | None = None) -> None:
        for rank in self.job.ranks:
            self.step(rank, step, steps)

    def exit(
        self, rank: int, step: int = 0, steps: int | None = None, **how: Any
    ) -> list[AnyAction]:
        progress = self.progress(rank, step, steps) if step else RankProgress(rank=Rank(rank))
        how = {"round": self.round, "node": self.node_of(rank), "at": self.at, **how}
        return self.take(WorkerExited(rank=Rank(rank), progress=progress, **how))

    def function_raised(
        self, rank: int, error: Raised, step: int = 0, **more: Any
    ) -> list[AnyAction]:
        """Its restartable function raises; its process lives."""
        progress = self.progress(rank, step) if step else RankProgress(rank=Rank(rank))
        more = {"round": self.round, "node": self.node_of(rank), "at": self.at, **more}
        return self.take(RankRaised(rank=Rank(rank), progress=progress, raised=error, **more))

    def functions_returned(self, node: str, round: int | None = None) -> list[AnyAction]:
        number = self.round if round is None else RoundNumber(round)
        return self.take(RanksReturned(at=self.at, node=NodeId(node), round=number))

    # ---- whole stretches ----

    def running(self, *nodes: str, slots: int = 2, step: int = 0) -> Driver:
        """A first round of these nodes, started, and at that step."""
        for node in nodes:
            self.join(node, slots)
        if self.job.world is None:
            self.after(60).tick()
        self.after(1).start_all()
        if step:
            self.after(1).step_all(step)
        return self

    def all_ready(self) -> list[AnyAction]:
        """All that were to stop have stopped: members are ready, and who was sent away has gone."""
        actions: list[AnyAction] = []
        for node, held in list(self.job.membership.leaving.items()):
            actions += self.left(node, round=held.round)
        for node in list(self.job.membership.busy):
            actions += self.ready(node)
        return actions

    def all_parked(self, **less: int) -> list[AnyAction]:
        """All nodes are ready, and their workers parked but for as many as are named here."""
        slots = {node: held.spec.slots for node, held in self.job.membership.busy.items()}
        actions: list[AnyAction] = []
        for node, count in slots.items():
            actions += self.ready(node, parked=count - less.get(node, 0))
        return actions


def kinds(actions: Iterable[AnyAction]) -> list[str]:
    return [type(action).__name__ for action in actions]
