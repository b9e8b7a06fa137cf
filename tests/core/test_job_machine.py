"""The whole machine under any sequence of events.

Agents are modelled just well enough to be plausible most of the time (they start what they are told
to start, test what they are told to test, and get ready when told to stop), and so is the shell around
the core: a node without a stream hears nothing, and either comes back or is given up. The rest is
chance: what dies and how, whose stream breaks, what is said twice, late or out of turn, and how far
the clocks are apart.
"""

from __future__ import annotations

from typing import Any

import msgspec
from driver import WAKE, Driver, check_books, encoded, raised, replayed, revived, spec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.core import job as jobs
from holdfast.core import report
from holdfast.core.ledger import books
from holdfast.core.ledger.books import Ledger
from holdfast.core.membership import seating
from holdfast.core.nodecheck.schedule import Checking
from holdfast.core.states import Ended
from holdfast.core.stragglers.events import StragglersMachine
from holdfast.messages import actions as orders
from holdfast.messages.actions import AnyAction, CloseJob, Finish, StartWorkers, StopWorkers
from holdfast.messages.events import (
    AnyEvent,
    Asked,
    CoordinatorRestarted,
    ExcludeAsked,
    HealthFound,
    LeaseEnded,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeReady,
    NodeResumed,
    NodeTested,
    NodeWarm,
    Progress,
    StopAsked,
    StreamEnded,
    WorkerExited,
    WorkersKilled,
    WorkerStarted,
)
from holdfast.messages.health import HealthResult
from holdfast.messages.nodecheck import TestResult as Shown
from holdfast.messages.records import Part, RankProgress, World
from holdfast.messages.requests import AwaitStragglers
from holdfast.messages.timings import RankTimings, Timing
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time
from holdfast.view.summary import summary

EXITS: list[dict[str, Any]] = [
    {"code": 0},
    {"code": 1},
    {"code": 3},
    {"code": 1, "raised": raised()},
    {"code": 1, "raised": WAKE},
    {"signal": 6},
    {"signal": 9},
    {"signal": 9, "oom": True},
    {"signal": 11},
    {"signal": 15},
    {"signal": 60},
]
TESTS: list[dict[str, Any]] = [
    {"solo_passed": True, "solo_s": 0.01, "passed": True, "seconds": 0.01},
    {"solo_passed": True, "solo_s": 0.01, "passed": True, "seconds": 3.0},
    {"solo_passed": True, "solo_s": 0.01, "passed": False, "detail": "no link"},
    {"solo_passed": True, "solo_s": 0.01},
    {"solo_passed": False, "detail": "no GPU"},
    {"detail": "killed"},
]
NAMES = [f"n{i}" for i in range(6)]
OF_A_ROUND = (WorkerStarted, WorkerExited, Progress, ExcludeAsked, StopAsked)

names = st.sampled_from(NAMES)
skews = st.sampled_from([0.0, 0.0, -0.05, 0.05])
picks = st.integers(0, 30)


class Agent:
    """What a node would know of itself."""

    def __init__(self) -> None:
        self.part: Part | None = None
        self.round = RoundNumber(0)
        self.steps: dict[Rank, int] = {}
        self.base = 0
        self.stopping: StopWorkers | None = None
        self.finish: Finish | None = None
        self.test: orders.TestNode | None = None
        self.tested = (0, 0)
        """The newest test that it was told to make."""


class JobMachine(RuleBasedStateMachine):
    @initialize(
        lowest=st.integers(1, 3),
        more=st.integers(0, 2),
        unit=st.integers(1, 2),
        restarts=st.none() | st.integers(0, 4),
        slots=st.integers(1, 3),
        there=st.integers(0, 6),
        steps=st.integers(0, 3),
        checked=st.booleans(),
        exclude=st.booleans(),
    )
    def open(
        self,
        lowest: int,
        more: int,
        unit: int,
        restarts: int | None,
        slots: int,
        there: int,
        steps: int,
        checked: bool,
        exclude: bool,
    ) -> None:
        self.driver = Driver(
            min_nodes=lowest,
            max_nodes=lowest + more,
            node_unit=unit,
            max_restarts=restarts,
            node_check=checked,
            exclude_stragglers=exclude,
        )
        self.slots = slots
        self.agents: dict[str, Agent] = {}
        self.cut_off: set[str] = set()
        """Nodes without a stream."""
        self.running: dict[str, RoundNumber] = {}
        """Nodes that began a round of which nothing has yet proved that its workers are gone."""
        self.worlds: dict[int, World] = {}
        self.round = 0
        self.total = 0.0
        self.generation = 0
        self.closes = 0
        for name in NAMES[:there]:
            self.join(name, False, False, 0.0)
        self.wait(1.0)
        if steps:
            self.everybody_passes()
            self.everybody_steps(steps, 0.0)

    # ---- carrying events in and actions out ----

    @property
    def job(self) -> jobs.Job:
        return self.driver.job

    def at(self, skew: float) -> Time:
        return Time(self.driver.now + skew)

    def take(self, event: AnyEvent) -> None:
        stale = isinstance(event, OF_A_ROUND) and event.round != self.job.membership.round
        if isinstance(event, NodeTested):
            stale = (
                event.check != self.job.of(Checking).number or self.job.of(Checking).check is None
            )
        before = encoded(self.job) if stale else b""
        self.learn(event)
        actions = self.driver.take(event)
        if stale:
            assert actions == [], "acted upon word of another round"
            assert encoded(self.job) == before, "word of another round changed something"
        for action in actions:
            self.deliver(action)

    def learn(self, event: AnyEvent) -> None:
        """Note what an event proves about workers that ran."""
        if isinstance(event, NodeReady | WorkersKilled):
            if self.running.get(event.node) == event.round:
                del self.running[event.node]
        elif isinstance(event, NodeResumed) and not event.busy:
            self.running.pop(event.node, None)
        elif isinstance(event, NodeLeft | LeaseEnded | NodeJoined):
            self.running.pop(event.node, None)
            if isinstance(event, NodeJoined):
                self.running.pop(event.replaces, None)

    def deliver(self, action: AnyAction) -> None:
        if isinstance(action, CloseJob):
            self.closes += 1
            return
        if isinstance(action, StartWorkers):
            absent = action.node in self.job.membership.absent
            assert not absent, "a node without a stream got a place"
        if action.node in self.cut_off:
            return
        agent = self.agents.setdefault(action.node, Agent())
        if isinstance(action, StartWorkers):
            assert action.part.round == self.job.membership.round
            assert action.part.world_size == self.driver.world.size
            older = [n for n, round in self.running.items() if round < action.part.round]
            assert not older, "two worlds run at once"
            if action.part.round > agent.round:
                self.running[action.node] = action.part.round
                agent.part, agent.round = action.part, action.part.round
                first = action.part.first_rank
                agent.steps = {Rank(first + i): 0 for i in range(action.part.slots)}
                agent.base = self.job.highest
                agent.stopping = agent.test = None
        elif isinstance(action, StopWorkers):
            if action.round >= agent.round:
                agent.stopping, agent.round = action, action.round
        elif isinstance(action, orders.TestNode):
            self.told_to_test(agent, action)
        elif isinstance(action, Finish):
            agent.finish = action
            agent.test = None

    def told_to_test(self, agent: Agent, order: orders.TestNode) -> None:
        assert self.job.world is None, "a test in the middle of training"
        newest = (order.check, order.round)
        running = agent.test is not None and order.size == 1
        if newest > agent.tested or (newest == agent.tested and running):
            agent.test, agent.tested = order, newest

    def pick(self, number: int) -> tuple[NodeId, Agent, Rank] | None:
        ranks = [(NodeId(n), a, r) for n, a in self.agents.items() for r in a.steps]
        return ranks[number % len(ranks)] if ranks else None

    def progress(self, agent: Agent, rank: Rank, skew: float) -> RankProgress:
        steps = agent.steps.get(rank, 0)
        if steps == 0:
            return RankProgress(rank=rank)
        return RankProgress(
            rank=rank,
            step=StepNumber(agent.base + steps),
            steps=steps,
            first_at=self.at(skew - 0.5),
            last_at=self.at(skew),
            checkpoint_s=steps * 0.01,
            restore_s=0.1,
            saves=steps // 2,
        )

    # ---- nodes ----

    @rule(name=names, again=st.booleans(), replaces=st.booleans(), skew=skews)
    def join(self, name: str, again: bool, replaces: bool, skew: float) -> None:
        older = ""
        if name in self.agents and not again:
            if replaces:
                older = name
                del self.agents[older]
            name = f"{name}-{self.generation}"
            self.generation += 1
        self.agents[name] = Agent()
        self.cut_off.discard(name)
        self.take(self.joined(name, skew, older))

    def joined(self, name: str, skew: float, replaces: str = "") -> NodeJoined:
        return NodeJoined(
            at=self.at(skew),
            node=NodeId(name),
            spec=spec(self.slots, host=name),
            store_port=4000,
            replaces=NodeId(replaces),
        )

    @rule(name=names)
    def warm(self, name: str) -> None:
        self.take(NodeWarm(at=self.at(0), node=NodeId(name)))

    @rule(number=picks, skew=skews, slow=st.none() | st.floats(0, 40))
    def get_ready(self, number: int, skew: float, slow: float | None) -> None:
        stopping = [(n, a) for n, a in self.agents.items() if a.stopping is not None]
        if not stopping:
            return
        self.say_ready(*stopping[number % len(stopping)], skew, slow)

    def say_ready(
        self, name: str, agent: Agent, skew: float, slow: float | None, **parked: Any
    ) -> None:
        ranks = tuple(self.progress(agent, rank, skew) for rank in agent.steps)
        round, agent.stopping, agent.steps = agent.round, None, {}
        self.take(
            NodeReady(
                at=self.at(skew),
                node=NodeId(name),
                round=round,
                store_port=4001,
                slowest_stop_s=slow,
                ranks=ranks,
                **parked,
            )
        )

    @rule()
    def everybody_gets_ready(self) -> None:
        for i in range(len(self.agents)):
            self.get_ready(i, 0.0, None)

    @rule(number=picks)
    def kill_workers(self, number: int) -> None:
        stopping = [n for n, a in self.agents.items() if a.stopping or a.finish]
        if stopping:
            name = stopping[number % len(stopping)]
            round = self.agents[name].round
            self.take(WorkersKilled(at=self.at(0), node=NodeId(name), round=round))

    @rule(name=names, code=st.sampled_from([1, 75]))
    def leave(self, name: str, code: int) -> None:
        event = NodeLeaving(at=self.at(0), node=NodeId(name), reason="stopped", code=code)
        self.take(event)

    @rule(number=picks, skew=skews, anyway=st.booleans())
    def end(self, number: int, skew: float, anyway: bool) -> None:
        going = [n for n, a in self.agents.items() if a.finish is not None or anyway]
        if going:
            name = going[number % len(going)]
            agent = self.agents.pop(name)
            ranks = tuple(self.progress(agent, rank, skew) for rank in agent.steps)
            self.take(NodeLeft(at=self.at(skew), node=NodeId(name), round=agent.round, ranks=ranks))

    @rule(name=names, dies=st.booleans())
    def break_stream(self, name: str, dies: bool) -> None:
        """Its agent dies, or is cut off."""
        if name in self.agents:
            self.cut_off.add(name)
        if dies:
            self.agents.pop(name, None)
        self.take(StreamEnded(at=self.at(0), node=NodeId(name)))

    @rule(name=names, dies=st.booleans())
    def give_up(self, name: str, dies: bool) -> None:
        self.break_stream(name, dies)
        self.end_lease(name)

    def end_lease(self, name: str) -> None:
        self.take(LeaseEnded(at=self.at(0), node=NodeId(name), why="it was not heard of"))

    @rule(name=names, busy=st.booleans(), missing=st.sampled_from([0, 0, 0, 2]))
    def resume(self, name: str, busy: bool, missing: int) -> None:
        agent = self.agents.get(name)
        round = agent.round if agent is not None else RoundNumber(0)
        self.cut_off.discard(name)
        self.take(
            NodeResumed(at=self.at(0), node=NodeId(name), round=round, busy=busy, missing=missing)
        )

    @rule(lost=st.sampled_from([0, 0, 0, 3]))
    def restart_coordinator(self, lost: int) -> None:
        self.driver.job = revived(self.job)
        self.cut_off = set(self.agents)
        self.take(CoordinatorRestarted(at=self.at(0), lost=lost))

    # ---- workers ----

    @rule(number=picks, skew=skews)
    def begin(self, number: int, skew: float) -> None:
        picked = self.pick(number)
        if picked is not None:
            node, agent, rank = picked
            self.take(
                WorkerStarted(
                    at=self.at(skew), node=node, round=agent.round, rank=rank, pid=1, warm=True
                )
            )

    @rule(steps=st.integers(1, 5), skew=skews)
    def everybody_steps(self, steps: int, skew: float) -> None:
        for name, agent in list(self.agents.items()):
            for rank in agent.steps:
                agent.steps[rank] += steps
            ranks = tuple(self.progress(agent, rank, skew) for rank in agent.steps)
            event = Progress(at=self.at(skew), node=NodeId(name), round=agent.round, ranks=ranks)
            self.take(event)

    @rule(number=picks, steps=st.integers(1, 3), skew=skews)
    def step(self, number: int, steps: int, skew: float) -> None:
        picked = self.pick(number)
        if picked is not None:
            node, agent, rank = picked
            agent.steps[rank] += steps
            ranks = (self.progress(agent, rank, skew),)
            self.take(Progress(at=self.at(skew), node=node, round=agent.round, ranks=ranks))

    @rule(number=picks, how=st.sampled_from(EXITS), skew=skews)
    def die(self, number: int, how: dict[str, Any], skew: float) -> None:
        picked = self.pick(number)
        if picked is not None:
            node, agent, rank = picked
            self.exit(node, agent, rank, how, skew)
            agent.steps.pop(rank, None)

    @rule()
    def everybody_finishes(self) -> None:
        for name, agent in list(self.agents.items()):
            for rank in list(agent.steps):
                self.exit(NodeId(name), agent, rank, {"code": 0}, 0.0)

    def exit(
        self, node: NodeId, agent: Agent, rank: Rank, how: dict[str, Any], skew: float
    ) -> None:
        self.take(
            WorkerExited(
                at=self.at(skew),
                node=node,
                round=agent.round,
                rank=rank,
                progress=self.progress(agent, rank, skew),
                **how,
            )
        )

    # ---- tests and health ----

    @rule(number=picks, how=st.sampled_from(TESTS))
    def answer_test(self, number: int, how: dict[str, Any]) -> None:
        testing = [(n, a) for n, a in self.agents.items() if a.test is not None]
        if testing:
            self.tell_test(*testing[number % len(testing)], how)

    @rule()
    def everybody_passes(self) -> None:
        for _ in range(10):
            testing = [(n, a) for n, a in self.agents.items() if a.test is not None]
            for name, agent in testing:
                if agent.test is not None:
                    self.tell_test(name, agent, TESTS[0])

    def tell_test(self, name: str, agent: Agent, how: dict[str, Any]) -> None:
        order, agent.test = agent.test, None
        assert order is not None
        if order.size == 1:
            how = {**how, "passed": None, "seconds": None}
        node = NodeId(name)
        result = Shown(node=node, round=order.round, group=order.group, **how)
        self.take(NodeTested(at=self.at(0), node=node, check=order.check, result=result))

    @rule(name=names)
    def fall_ill(self, name: str) -> None:
        results = (HealthResult("gpu-ecc", "fail", "errors", 0.1),)
        self.take(HealthFound(at=self.at(0), node=NodeId(name), results=results))

    @rule(slow=picks, windows=st.integers(1, 3))
    def tell_timings(self, slow: int, windows: int) -> None:
        for _ in range(windows):
            for name, agent in list(self.agents.items()):
                told = tuple(self.timings(rank, slow) for rank in agent.steps)
                about = {"node": NodeId(name), "round": agent.round, "ranks": ()}
                self.take(Progress(at=self.at(0), timings=told, **about))

    def timings(self, rank: Rank, slow: int) -> RankTimings:
        median_s = 0.05 if rank == slow else 0.01
        forward = Timing(section="forward", count=10, median_s=median_s, total_s=10 * median_s)
        return RankTimings(rank=rank, timings=(forward,))

    @rule(number=picks, again=st.booleans())
    def await_stragglers(self, number: int, again: bool) -> None:
        picked = self.pick(number)
        if picked is None:
            return
        node, agent, rank = picked
        last = self.job.requests.last.get(rank, {}).get(0)
        self.take(
            Asked(
                at=self.at(0),
                node=node,
                round=agent.round,
                rank=rank,
                channel=0,
                number=1 if last is None else last.number + (not again),
                request=AwaitStragglers(
                    after=self.job.of(StragglersMachine).findings.total if again else 0
                ),
            )
        )

    @rule(number=picks, stop=st.sampled_from([False, False, False, True]))
    def ask(self, number: int, stop: bool) -> None:
        picked = self.pick(number)
        if picked is None:
            return
        node, agent, rank = picked
        about = {"at": self.at(0), "node": node, "round": agent.round, "rank": rank, "reason": "x"}
        self.take(StopAsked(**about, code=93) if stop else ExcludeAsked(**about))

    # ---- time, and what is said again ----

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.1, 0.4, 1.0, 20.0, 700.0]))
    def wait(self, seconds: float) -> None:
        """Time passes; a deadline on the way is kept, as the coordinator's timer would."""
        until = self.driver.now + seconds
        for _ in range(20):
            deadline = jobs.deadline(self.job)
            if deadline is None or deadline > until:
                break
            self.driver.now = max(self.driver.now, deadline)
            for action in self.driver.tick():
                self.deliver(action)
        else:
            raise AssertionError("a deadline that passed comes again and again")
        self.driver.now = until

    @rule()
    def tick_early(self) -> None:
        for action in self.driver.tick():
            self.deliver(action)

    @rule(back=st.integers(1, 15))
    def say_again(self, back: int) -> None:
        event, _ = self.driver.history[-min(back, len(self.driver.history))]
        self.take(event)

    # ---- what must hold ----

    @precondition(lambda self: hasattr(self, "driver"))
    @invariant()
    def nothing_is_out_of_order(self) -> None:
        job, m = self.job, self.job.membership
        assert m.round >= self.round, "a round went back"
        self.round = m.round
        if self.job.world is not None:
            assert self.worlds.setdefault(m.round, self.job.world) == self.job.world, (
                "a frozen world changed"
            )
            ranks = [
                r
                for p in self.job.world.places
                for r in range(p.first_rank, p.first_rank + p.slots)
            ]
            assert ranks == list(range(self.job.world.size)), "ranks are not unique and contiguous"
            assert list(job.ranks) == ranks
        total = books.rank_seconds(job.of(Ledger), self.driver.at)
        assert total >= self.total - 1e-6, "the books lost time"
        self.total = total
        assert self.closes <= 1 or any(
            isinstance(event, CoordinatorRestarted) for event, _ in self.driver.history
        )

    @precondition(lambda self: hasattr(self, "driver"))
    @invariant()
    def it_can_be_reported(self) -> None:
        job, now = self.job, self.driver.at
        status = report.status(job, now, alive=True)
        incidents, goodput = report.incidents(job), report.goodput(job, now)
        assert summary(status, goodput, incidents)
        for told in (status, goodput, *incidents):
            assert msgspec.convert(msgspec.to_builtins(told), type(told)) == told

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        state, history = encoded(self.job), self.driver.history
        assert encoded(replayed(history)) == state, "a replay led elsewhere"
        assert encoded(replayed(history, revive_at=len(history) // 2)) == state
        assert encoded(revived(self.job)) == state
        self.comes_to_rest()
        self.ends_when_told()

    def comes_to_rest(self) -> None:
        """With nodes that do as they are told, a world forms, if there may be one."""
        m = self.job.membership
        for _ in range(100):
            self.everybody_is_heard_of()
            self.everybody_gets_ready()
            self.everybody_passes()
            if self.job.result is not None or self.job.world is not None:
                return
            deadline = jobs.deadline(self.job)
            if deadline is None:
                break
            self.driver.now = max(self.driver.now, deadline)
            for action in self.driver.tick():
                self.deliver(action)
        able = len(seating.choose(m.waiting, m.terms))
        assert able < max(1, m.terms.min_nodes), "enough nodes wait, and nothing happens"

    def everybody_is_heard_of(self) -> None:
        """Nodes come back, are given up, or go, as each of them has to."""
        m = self.job.membership
        for node in {*self.cut_off, *m.absent}:
            if node in self.agents:
                self.resume(node, busy=False, missing=0)
            else:
                self.end_lease(node)
        for node in list(m.leaving):
            agent = self.agents.pop(node, None)
            round = agent.round if agent is not None else RoundNumber(0)
            self.take(NodeLeft(at=self.at(0), node=node, round=round))

    def ends_when_told(self) -> None:
        """Whatever happened, a job whose nodes are all gone or told to go can be closed."""
        for node in list(self.job.membership.nodes()):
            self.driver.leaving(node)
        for node in list(self.job.membership.nodes()):
            self.driver.left(node)
        if self.job.result is not None:
            assert isinstance(self.job.state, Ended)
            check_books(self.job, self.driver.now)


TestJobMachine = JobMachine.TestCase
TestJobMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
