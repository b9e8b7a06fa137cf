"""The whole machine under any sequence of events, with processes that stay between rounds.

The agents of `test_job_machine` have restartable functions here: they raise, are left, and return. An
agent does as it is told: it parks what leaves, ends what is to be replaced, and releases what it may.
"""

from __future__ import annotations

from driver import WAKE, encoded, raised
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from test_job_machine import Agent, JobMachine, picks, skews

from holdfast.core import job as jobs
from holdfast.core.recovery.rules import REENTER_LIMIT
from holdfast.messages.actions import AnyAction, ReleaseRanks, StartWorkers, StopWorkers
from holdfast.messages.events import (
    AnyEvent,
    JobOpened,
    RankRaised,
    RanksReturned,
    WorkerStarted,
)
from holdfast.messages.units import NodeId, RoundNumber

ERRORS = [raised(), raised("OSError", "no data", "data.py:3"), WAKE]


class InprocessMachine(JobMachine):
    def take(self, event: AnyEvent) -> None:
        stale = isinstance(event, RankRaised) and event.round != self.job.membership.round
        before = encoded(self.job) if stale else b""
        super().take(event)
        if stale:
            assert encoded(self.job) == before, "an exception of another round changed something"

    def deliver(self, action: AnyAction) -> None:
        if isinstance(action, StopWorkers):
            self.check_stop(action)
        elif isinstance(action, ReleaseRanks):
            self.check_release(action)
        elif isinstance(action, StartWorkers):
            self.returned.setdefault(action.part.round, set())
        super().deliver(action)

    @property
    def returned(self) -> dict[int, set[str]]:
        """Nodes whose functions have returned, by round."""
        found: dict[int, set[str]] = self.__dict__.setdefault("_returned", {})
        return found

    def check_stop(self, order: StopWorkers) -> None:
        assert order.leave_s >= 0
        assert len(order.replace) <= 1
        assert not order.replace or order.leave_s > 0, "all are ended, and one of them is named"
        storm = self.job.recovery.history.storm
        if order.leave_s > 0 and storm < REENTER_LIMIT:
            fault = getattr(self.job.state, "fault", None)
            assert not order.replace or (fault is not None and fault.stuck)

    def check_release(self, order: ReleaseRanks) -> None:
        world = self.job.world
        assert world is not None, "released without a world"
        assert world.round == order.round, "released from an older round"
        missing = {place.node for place in world.places} - self.returned[order.round]
        assert not missing, "released before all have returned"

    # ---- functions ----

    @rule(number=picks, error=st.sampled_from(ERRORS), skew=skews)
    def raise_in_function(self, number: int, error: object, skew: float) -> None:
        picked = self.pick(number)
        if picked is not None:
            node, agent, rank = picked
            self.take(
                RankRaised(
                    at=self.at(skew),
                    node=node,
                    round=agent.round,
                    rank=rank,
                    progress=self.progress(agent, rank, skew),
                    raised=error,  # type: ignore[arg-type]
                )
            )

    @rule(number=picks, gone=st.integers(0, 3), slow=st.none() | st.floats(0, 5), skew=skews)
    def park(self, number: int, gone: int, slow: float | None, skew: float) -> None:
        """A node's workers have left, or could not and were ended."""
        stopping = [(n, a) for n, a in self.agents.items() if a.stopping is not None]
        if stopping:
            self.say_parked(*stopping[number % len(stopping)], gone, slow, skew)

    @rule()
    def everybody_parks(self) -> None:
        for name, agent in list(self.agents.items()):
            if agent.stopping is not None:
                self.say_parked(name, agent, 0, 0.01, 0.0)

    def say_parked(
        self, name: str, agent: Agent, gone: int, slow: float | None, skew: float
    ) -> None:
        order = agent.stopping
        assert order is not None
        stay = [rank for rank in agent.steps if rank not in order.replace]
        parked = max(0, len(stay) - gone) if order.leave_s > 0 else 0
        self.say_ready(name, agent, skew, None, parked=parked, slowest_leave_s=slow)

    @rule(number=picks, skew=skews)
    def enter_again(self, number: int, skew: float) -> None:
        picked = self.pick(number)
        if picked is not None:
            node, agent, rank = picked
            about = {"node": node, "round": agent.round, "rank": rank, "pid": 1}
            self.take(WorkerStarted(at=self.at(skew), warm=True, again=True, **about))  # type: ignore[arg-type]

    @rule(number=picks)
    def functions_return(self, number: int) -> None:
        names = [name for name, agent in self.agents.items() if agent.steps]
        if names:
            name = names[number % len(names)]
            round = self.agents[name].round
            self.note_returned(name, round)
            self.take(RanksReturned(at=self.at(0), node=NodeId(name), round=round))

    @rule()
    def all_functions_return(self) -> None:
        for number in range(len(self.agents)):
            self.functions_return(number)

    def note_returned(self, name: str, round: RoundNumber) -> None:
        self.returned.setdefault(round, set()).add(name)

    # ---- what must hold ----

    @precondition(lambda self: hasattr(self, "driver"))
    @invariant()
    def counts_of_processes_are_sound(self) -> None:
        m = self.job.membership
        for candidate in [*m.waiting.values(), *m.busy.values(), *m.placed.values()]:
            assert 0 <= candidate.parked <= candidate.spec.slots
        assert all(candidate.parked == 0 for candidate in m.placed.values())
        for incident in self.job.incidents:
            if incident.rung == "re-enter the function":
                assert "standbys" not in incident.action

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.replays_to_the_same_actions()
        super().teardown()

    def replays_to_the_same_actions(self) -> None:
        """Decide the whole history twice: each event has the same actions."""
        (opened, _), *rest = self.driver.history
        assert isinstance(opened, JobOpened)
        one, other = jobs.opened(opened), jobs.opened(opened)
        for event, now in rest:
            assert jobs.handle(one, event, now) == jobs.handle(other, event, now)


TestInprocessMachine = InprocessMachine.TestCase
TestInprocessMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
