"""Requests of scripts: who asks for whom, what is asked again, and how much is on its way."""

from __future__ import annotations

import pytest

from holdfast.agent.requests import ScriptRequests
from holdfast.clock import JobClock
from holdfast.messages.actions import Answered
from holdfast.messages.events import AnyEvent, Asked, ExcludeAsked, StopAsked
from holdfast.messages.local import Ask, ScriptReply
from holdfast.messages.requests import (
    LARGE_AT_ONCE,
    Add,
    AnyAnswer,
    ExcludeNode,
    Get,
    Granted,
    ScriptRequest,
    Set,
    StopJob,
    Total,
    Values,
)
from holdfast.messages.units import NodeId, Rank, RoundNumber

ROUND = RoundNumber(3)


class Scene:
    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.replies: list[tuple[int, ScriptReply]] = []
        self.requests = ScriptRequests(
            NodeId("n"),
            JobClock(),
            self.events.append,
            lambda rank, reply: self.replies.append((rank, reply)),
        )

    def ask(self, request: ScriptRequest, rank: int = 0, channel: int = 0, number: int = 1) -> None:
        self.requests.ask(ROUND, Rank(rank), Ask(channel=channel, number=number, request=request))

    def answer(
        self,
        answer: AnyAnswer,
        rank: int = 0,
        channel: int = 0,
        number: int = 1,
        round: int = ROUND,
    ) -> None:
        self.requests.answered(
            Answered(
                node=NodeId("n"),
                round=RoundNumber(round),
                rank=Rank(rank),
                channel=channel,
                number=number,
                answer=answer,
            )
        )


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_request_is_asked_in_the_name_of_its_rank(scene: Scene) -> None:
    scene.ask(Add(key="k", amount=1), rank=2, channel=1, number=5)
    (event,) = scene.events
    assert isinstance(event, Asked)
    assert (event.node, event.round, event.rank, event.channel, event.number) == ("n", 3, 2, 1, 5)
    scene.answer(Total(number=1), rank=2, channel=1, number=5)
    assert scene.replies == [(2, ScriptReply(channel=1, number=5, answer=Total(number=1)))]


def test_an_answer_that_comes_twice_or_to_another_round_is_dropped(scene: Scene) -> None:
    scene.ask(Add(key="k", amount=1))
    scene.answer(Total(number=9), round=2)
    scene.answer(Total(number=9), number=2)
    scene.answer(Total(number=9), rank=1)
    assert scene.replies == []
    scene.answer(Total(number=1))
    scene.answer(Total(number=1))
    assert len(scene.replies) == 1


def test_on_a_new_stream_what_was_heard_but_not_answered_is_asked_again(scene: Scene) -> None:
    for channel in range(3):
        scene.ask(Add(key="k", amount=1), channel=channel)
    scene.answer(Total(number=1), channel=0)
    heard, unheard = scene.events[1], scene.events[2]
    scene.requests.ask_again([unheard])
    assert scene.events[3:] == [heard]


def test_only_a_few_large_requests_are_on_their_way_at_a_time(scene: Scene) -> None:
    for channel in range(LARGE_AT_ONCE + 2):
        scene.ask(Get(keys=("k",)), channel=channel)
    scene.ask(Set(items=(("k", b"x" * 100_000),)), rank=1)
    scene.ask(Set(items=(("k", b"x"),)), rank=1, channel=1)
    assert len(scene.events) == LARGE_AT_ONCE + 1, "small ones do not wait"
    scene.requests.ask_again([])
    assert len(scene.events) == 2 * (LARGE_AT_ONCE + 1), "what waits here is not asked again"
    scene.answer(Values(values=(None,)), channel=1)
    assert scene.events[-1].channel == LARGE_AT_ONCE  # type: ignore[union-attr]


def test_a_worker_that_is_gone_leaves_its_place_to_others(scene: Scene) -> None:
    for channel in range(LARGE_AT_ONCE + 1):
        scene.ask(Get(keys=("k",)), channel=channel)
    scene.ask(Get(keys=("k",)), rank=1)
    scene.requests.forget(Rank(0))
    assert scene.events[-1].rank == 1  # type: ignore[union-attr]
    scene.answer(Values(values=(None,)), channel=0)
    assert scene.replies == []


def test_control_requests_become_their_events_and_are_granted(scene: Scene) -> None:
    scene.ask(ExcludeNode(reason="hot"), rank=1)
    scene.ask(StopJob(reason="done", code=0), rank=2)
    exclude, stop = scene.events
    assert isinstance(exclude, ExcludeAsked)
    assert isinstance(stop, StopAsked)
    assert (exclude.round, exclude.rank, exclude.reason) == (3, 1, "hot")
    assert (stop.rank, stop.reason, stop.code) == (2, "done", 0)
    assert [(rank, reply.answer) for rank, reply in scene.replies] == [
        (1, Granted()),
        (2, Granted()),
    ]
    scene.requests.ask_again([])
    assert len(scene.events) == 2
