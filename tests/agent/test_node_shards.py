"""The node's shards: taken by ranks, asked for in time, reported once, and never used twice."""

from __future__ import annotations

from typing import Any

from holdfast.agent.shards import NodeShards
from holdfast.clock import JobClock
from holdfast.messages.actions import LendShards
from holdfast.messages.data import DataSpec, Span, Used
from holdfast.messages.events import AnyEvent, ShardsReported
from holdfast.messages.local import Ask, DataUsed, ScriptReply, ShardError
from holdfast.messages.records import Part
from holdfast.messages.requests import ShardsTaken, TakeShards
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber

ROUND = 3
SPEC = DataSpec(name="d", sharing="leases", size=1_000_000, shard=10)


def part(round: int, nodes: int = 1) -> Part:
    return Part(
        round=RoundNumber(round),
        first_rank=Rank(0),
        slots=2,
        group_rank=0,
        group_world_size=nodes,
        world_size=2 * nodes,
        first_role_rank=0,
        role_size=2 * nodes,
        store_address="",
        store_port=0,
        restarts=0,
        max_restarts=0,
    )


class Scene:
    """A node's shards of the data set "d", ten records each."""

    def __init__(self, nodes: int = 1) -> None:
        self.events: list[ShardsReported] = []
        self.answers: list[tuple[int, tuple[Span, ...]]] = []
        self.time = 100.0
        self.shards = NodeShards(
            NodeId("n"), JobClock(), self._report, self._reply, now=lambda: self.time
        )
        self.begin_round(ROUND, nodes)

    def begin_round(self, round: int, nodes: int = 1) -> None:
        self.shards.begin_round(part(round=round, nodes=nodes))
        self.shards.opened(SPEC)

    def _report(self, event: AnyEvent) -> None:
        assert isinstance(event, ShardsReported)
        self.events.append(event)

    def _reply(self, rank: Rank, reply: ScriptReply) -> None:
        assert isinstance(reply.answer, ShardsTaken)
        self.answers.append((rank, reply.answer.spans))

    def take(self, rank: int = 0, count: int = 1) -> None:
        request = TakeShards(dataset="d", count=count)
        self.shards.ask(Rank(rank), Ask(channel=0, number=1, request=request))

    def lend(self, *spans: tuple[int, int], round: int = ROUND, **more: Any) -> None:
        order = LendShards(
            node=NodeId("n"),
            round=RoundNumber(round),
            dataset="d",
            spans=tuple(Span(0, *span) for span in spans),
            **more,
        )
        self.shards.lent(order)

    def use(self, start: int, stop: int, step: int = 0, rank: int = 0) -> None:
        used = Used(Span(0, start, stop), StepNumber(step), StepNumber(step), stop - start)
        self.shards.heard(Rank(rank), DataUsed(dataset="d", used=(used,)))

    def taken(self, rank: int = 0) -> list[tuple[int, int]]:
        """All that a rank was given."""
        return [
            (span.start, span.stop) for who, spans in self.answers if who == rank for span in spans
        ]

    @property
    def last(self) -> ShardsReported:
        return self.events[-1]


def test_a_rank_waits_until_shards_are_lent_and_gets_as_many_as_it_asked_for() -> None:
    scene = Scene()
    scene.take(count=2)
    assert scene.answers == []
    assert scene.last.want >= 2
    scene.lend((0, 50))
    assert scene.taken() == [(0, 10), (10, 20)]
    scene.take(rank=1)
    assert scene.taken(1) == [(20, 30)]


def test_shards_are_cut_where_the_records_of_a_shard_end() -> None:
    scene = Scene()
    scene.lend((17, 45), (93, 95))
    scene.take(count=10)
    assert scene.taken() == [(17, 20), (20, 30), (30, 40), (40, 45), (93, 95)]


def test_the_end_of_the_data_is_told_to_all_that_wait_and_to_all_that_ask_later() -> None:
    scene = Scene()
    scene.take()
    scene.take(rank=1)
    scene.lend((0, 10), finished=True)
    scene.take()
    assert scene.answers == [(0, (Span(0, 0, 10),)), (1, ()), (0, ())]
    asked = len(scene.events)
    scene.take()
    assert len(scene.events) == asked, "nothing more is asked for"


def test_more_is_asked_for_before_a_rank_has_to_wait() -> None:
    scene = Scene()
    scene.take()
    scene.lend((0, 1000))
    for _ in range(60):  # 60 shards within a second.
        scene.time += 0.01
        scene.take()
    assert len(scene.taken()) == 61
    assert scene.last.want > 0
    assert scene.shards._sets["d"].count > 0


def test_a_slow_node_keeps_few_shards_and_a_fast_one_many() -> None:
    wants = []
    for pause_s in (10.0, 0.001):
        scene = Scene()
        scene.take()
        start = 0
        for _ in range(500):
            scene.time += pause_s
            scene.shards.look()
            if scene.last.want:
                scene.lend((start, start + 10 * scene.last.want))
                start += 10 * scene.last.want
                scene.events.append(scene.last.__class__(**{**asdict(scene.last), "want": 0}))
            scene.take()
        wants.append(scene.shards._sets["d"].count)
    assert wants[0] <= 2
    assert wants[1] > 50


def asdict(event: ShardsReported) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


def test_what_was_used_is_reported_once_and_joined_where_the_pace_is_even() -> None:
    scene = Scene()
    for step in range(5):
        scene.use(step * 8, step * 8 + 8, step=step)
    scene.use(40, 43, step=5)
    scene.shards.look()
    reported = [(one.used.span.start, one.used.span.stop) for one in scene.last.used]
    assert reported == [(0, 40), (40, 43)]
    assert (scene.last.used[0].used.first_step, scene.last.used[0].used.last_step) == (0, 4)
    assert scene.last.used[0].used.records == 40
    events = len(scene.events)
    scene.time += 1
    scene.shards.look()
    assert len(scene.events) == events


def test_in_a_large_job_each_node_reports_less_often() -> None:
    scene = Scene(nodes=500)
    scene.use(0, 8, step=0)
    scene.shards.look()
    for second in range(1, 10):
        scene.time += 1.0
        scene.use(8 * second, 8 * second + 8, step=second)
        scene.shards.look()
    assert len(scene.events) == 1
    scene.time += 1.0
    scene.shards.look()
    assert len(scene.events) == 2


def test_a_rank_that_is_gone_gives_back_what_it_had_not_finished() -> None:
    scene = Scene()
    scene.lend((0, 40))
    scene.take(count=3)
    scene.use(0, 10)
    scene.shards.forget(Rank(0))
    assert [(s.start, s.stop) for s in scene.last.returned] == [(10, 30)]
    assert [(o.used.span.start, o.used.span.stop) for o in scene.last.used] == [(0, 10)]


def test_a_failure_is_reported_at_once() -> None:
    scene = Scene()
    scene.lend((0, 10))
    scene.take()
    failed = (ShardError(Span(0, 0, 10), "bad file"),)
    scene.shards.heard(Rank(0), DataUsed(dataset="d", failed=failed))
    assert scene.last.failed[0].error == "bad file"


def test_what_is_lent_for_another_round_is_ignored() -> None:
    scene = Scene()
    scene.take()
    scene.lend((0, 10), round=ROUND - 1)
    assert scene.answers == []
    scene.begin_round(ROUND + 1)
    scene.lend((0, 10), round=ROUND)
    scene.take()
    assert scene.answers == []


def test_shards_that_are_lent_again_after_a_broken_stream_are_used_once() -> None:
    scene = Scene()
    scene.lend((0, 60))
    scene.take(count=2)
    scene.use(0, 10)
    # The coordinator has not heard of the use; (60, 70) was lent, and lost with the stream.
    scene.lend((0, 70), heard=0)
    scene.take(count=20)
    assert scene.taken() == [(0, 10), (10, 20), (20, 30), (30, 40), (40, 50), (50, 60), (60, 70)]


def test_a_shard_that_was_given_back_can_be_lent_again_once_that_was_heard() -> None:
    scene = Scene()
    scene.lend((0, 10))
    scene.take()
    scene.shards.heard(Rank(0), DataUsed(dataset="d", returned=(Span(0, 0, 10),)))
    number = scene.last.number
    scene.lend((0, 10), heard=number - 1)
    scene.take()
    assert scene.taken() == [(0, 10)], "the coordinator did not know yet"
    scene.lend((0, 10), heard=number)
    assert scene.taken() == [(0, 10), (0, 10)]


def test_a_loan_that_is_smaller_than_the_wish_is_followed_by_another_wish() -> None:
    scene = Scene()
    scene.take(count=5)
    scene.lend((0, 10))
    scene.take(count=5)
    assert scene.last.want >= 5


def test_wishes_are_repeated_on_a_new_stream() -> None:
    scene = Scene()
    scene.take()
    events = len(scene.events)
    scene.shards.ask_again()
    assert len(scene.events) == events + 1
    assert scene.last.want >= 1
