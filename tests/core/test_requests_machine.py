"""The whole job under any sequence of events, with scripts that ask in all of its rounds."""

from __future__ import annotations

from driver import encoded
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from test_job_machine import JobMachine, picks

from holdfast.messages.actions import Answered, AnyAction
from holdfast.messages.events import Asked
from holdfast.messages.requests import (
    Add,
    AnyRequest,
    CastVote,
    Denied,
    Get,
    JoinBarrier,
    Set,
    WaitForKeys,
)

REQUESTS: list[AnyRequest] = [
    Set(items=(("k", b"v"),)),
    Get(keys=("k", "n")),
    Add(key="n", amount=1),
    WaitForKeys(keys=("k", "n"), timeout_s=0.5),
    WaitForKeys(keys=("never",), timeout_s=30.0),
    JoinBarrier(name="x"),
    JoinBarrier(name="x", timeout_s=5.0),
    CastVote(name="x", ballot=True),
]


class AskingMachine(JobMachine):
    def deliver(self, action: AnyAction) -> None:
        if not isinstance(action, Answered):
            super().deliver(action)

    @rule(
        number=picks,
        channel=st.integers(0, 2),
        count=st.integers(1, 4),
        request=st.sampled_from(REQUESTS),
    )
    def ask_coordinator(self, number: int, channel: int, count: int, request: AnyRequest) -> None:
        picked = self.pick(number)
        if picked is None:
            return
        node, agent, rank = picked
        stale = agent.round != self.job.membership.round or self.job.world is None
        before = encoded(self.job)
        event = Asked(
            at=self.at(0),
            node=node,
            round=agent.round,
            rank=rank,
            channel=channel,
            number=count,
            request=request,
        )
        actions = self.driver.take(event)
        assert all(isinstance(action, Answered) for action in actions)
        if stale:
            (answer,) = actions
            assert isinstance(answer, Answered)
            assert isinstance(answer.answer, Denied)
            assert answer.answer.reason == "fenced"
            assert encoded(self.job) == before, "a request of another round changed something"

    @rule(channel=st.integers(0, 2), count=st.integers(1, 4), request=st.sampled_from(REQUESTS))
    def everybody_asks(self, channel: int, count: int, request: AnyRequest) -> None:
        for number in range(sum(len(agent.steps) for agent in self.agents.values())):
            self.ask_coordinator(number, channel, count, request)

    @precondition(lambda self: hasattr(self, "driver"))
    @invariant()
    def who_waits_is_in_the_world(self) -> None:
        for held in self.job.requests.open.values():
            assert held.asked.round == self.job.membership.round
            assert not self.job.ranks[held.asked.rank].finished


TestAskingMachine = AskingMachine.TestCase
TestAskingMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
