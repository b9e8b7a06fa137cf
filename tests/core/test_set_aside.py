"""One bad event never ends a job: whatever handler raises, whenever it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import msgspec
import pytest
from driver import OPENED_AT, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core import job as jobs
from holdfast.core.job import Job
from holdfast.core.ranks.state import Ranks
from holdfast.core.replay import TRIES, Entry, Intake, JobSnapshot, replay
from holdfast.core.states import Running
from holdfast.messages.actions import AnyAction
from holdfast.messages.events import (
    AnyEvent,
    EventSetAside,
    JobOpened,
    NodeJoined,
    Progress,
    Tick,
    WorkerExited,
    WorkerStarted,
)
from holdfast.messages.records import RankProgress, Terms
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

NODE = NodeId("n")
EVENTS = get_args(AnyEvent)


class Records:
    """A journal in memory; what is read from it was encoded, as in a file."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []

    def append(self, entries: Sequence[Entry]) -> None:
        self.entries += map(msgspec.json.encode, entries)

    def read(self) -> tuple[JobSnapshot | None, Iterator[Entry]]:
        decode = msgspec.json.Decoder(Entry).decode
        return None, map(decode, self.entries)


class Fed:
    """A job that is fed with events, some of which cannot be handled."""

    def __init__(self, **terms: Any) -> None:
        opening = JobOpened(at=Time(OPENED_AT), job="j", terms=Terms(**terms))
        self.records = Records()
        self.records.append([Entry(opening.at, opening)])
        self.intake = Intake(jobs.opened(opening), self.records)
        self.now = OPENED_AT

    @property
    def job(self) -> Job:
        return self.intake.job

    def feed(self, *events: AnyEvent) -> list[AnyAction]:
        self.now += 0.5
        entries = [Entry(Time(self.now), event, NODE, 1) for event in events]
        return [action for _, actions in self.intake.take(entries) for action in actions]

    def replayed(self) -> bytes:
        found = replay(self.records.read)
        assert found is not None
        return msgspec.json.encode(found.job)


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda fed, wanted: break_handlers(monkeypatch, fed, wanted)


def break_handlers(
    patch: pytest.MonkeyPatch, fed: Fed, wanted: Callable[[Job, AnyEvent], bool]
) -> None:
    """Have events raise after they changed the job, and before anybody can act on that."""
    decide = jobs.decide

    def raising(job: Job, event: AnyEvent, now: Time) -> list[AnyAction]:
        actions = decide(job, event, now)
        if wanted(job, event):
            job.of(Ranks).highest = StepNumber(10**6)
            job.membership.excluded["somebody"] = "half done"
            raise ZeroDivisionError("a bug of our own")
        return actions

    patch.setattr(jobs, "decide", raising)


def joined(at: float) -> NodeJoined:
    return NodeJoined(at=Time(at), node=NODE, spec=spec(2), store_port=1)


def started(at: float, rank: int) -> WorkerStarted:
    return WorkerStarted(
        at=Time(at), node=NODE, round=RoundNumber(1), rank=Rank(rank), pid=7, warm=True
    )


def stepped(at: float, rank: int, step: int) -> Progress:
    done = RankProgress(
        rank=Rank(rank), step=StepNumber(step), steps=step, first_at=Time(at), last_at=Time(at)
    )
    return Progress(at=Time(at), node=NODE, round=RoundNumber(1), ranks=(done,))


def died(at: float) -> WorkerExited:
    return WorkerExited(
        at=Time(at),
        node=NODE,
        round=RoundNumber(1),
        rank=Rank(1),
        signal=9,
        progress=RankProgress(rank=Rank(1)),
    )


def test_a_handler_that_raises_once_costs_nothing_but_an_incident(fails: Any) -> None:
    fed, seen = Fed(), []

    def once(job: Job, event: AnyEvent) -> bool:
        seen.append(event)
        return isinstance(event, WorkerStarted) and sum(one == event for one in seen) == 1

    fails(fed, once)
    fed.feed(joined(fed.now))
    fed.feed(started(fed.now, 0), started(fed.now, 1), stepped(fed.now, 0, 1))
    assert isinstance(fed.job.state, Running)
    assert (fed.job.unstarted, fed.job.highest) == (0, 1)
    assert fed.job.membership.excluded == {}, "what the failed handler had done is undone"
    kinds = [incident.kind for incident in fed.job.incidents]
    assert kinds == ["internal", "internal"]
    incident = fed.job.incidents[0]
    assert incident.signature == "handling WorkerStarted raised ZeroDivisionError: a bug of our own"
    assert "Traceback" in incident.detail
    assert "raising" in incident.detail


def test_an_event_that_fails_time_and_again_is_dropped_and_the_next_is_taken(fails: Any) -> None:
    fed = Fed()
    fails(fed, lambda job, event: isinstance(event, WorkerStarted) and event.rank == 0)
    fed.feed(joined(fed.now), started(fed.now, 0), started(fed.now, 1))
    assert fed.job.unstarted == 1
    assert len(fed.job.incidents) == TRIES
    assert "dropped" in fed.job.incidents[-1].action


def test_the_actions_before_a_failed_event_are_carried_out_once(fails: Any) -> None:
    fed = Fed()
    fails(fed, lambda job, event: isinstance(event, WorkerStarted))
    actions = fed.feed(joined(fed.now), started(fed.now, 0))
    assert [type(action).__name__ for action in actions] == ["StartWorkers"]


def test_a_tick_that_always_fails_does_not_come_without_end(fails: Any) -> None:
    fed = Fed()
    fails(fed, lambda job, event: isinstance(event, Tick))
    fed.feed(joined(fed.now), died(fed.now))
    first = jobs.deadline(fed.job)
    assert first is not None
    fed.now = first
    fed.feed(Tick(at=Time(fed.now)))
    second = jobs.deadline(fed.job)
    assert second is not None
    assert second > fed.now, "the next one is put off"


def test_setting_aside_may_fail_too(fails: Any) -> None:
    fed = Fed()
    fails(fed, lambda job, event: isinstance(event, WorkerStarted | EventSetAside))
    fed.feed(joined(fed.now), started(fed.now, 0), stepped(fed.now, 0, 3))
    assert fed.job.highest == 3
    assert fed.replayed() == msgspec.json.encode(fed.job)


def test_an_event_that_fails_only_in_a_replay_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator died between the exception and setting the event aside."""
    fed = Fed()
    fed.feed(joined(fed.now))
    fed.feed(started(fed.now, 0), stepped(fed.now, 1, 4))
    break_handlers(monkeypatch, fed, lambda job, event: isinstance(event, WorkerStarted))
    found = replay(fed.records.read)
    assert found is not None
    assert (found.job.highest, found.job.unstarted) == (4, 2)


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_whichever_event_cannot_be_handled_the_job_goes_on(kind: type, monkeypatch: Any) -> None:
    """Each type of event in turn, in the middle of a batch, fails for ever."""
    fed = Fed()
    fed.feed(joined(fed.now))
    break_handlers(monkeypatch, fed, lambda job, event: type(event) is kind and job.events > 2)
    example = msgspec.convert(_example(kind), kind)
    fed.feed(started(fed.now, 0), example, started(fed.now, 1), stepped(fed.now, 1, 2))
    jobs.validate(fed.job)
    assert fed.replayed() == msgspec.json.encode(fed.job)
    if kind not in (WorkerStarted, Progress, EventSetAside):
        assert (fed.job.highest, fed.job.unstarted) == (2, 0)
    if kind is not EventSetAside:
        assert any(incident.kind == "internal" for incident in fed.job.incidents)


def _example(kind: type) -> dict[str, Any]:
    """The least that makes a message of a type."""
    return {
        one.encode_name: _value(one.type) for one in msgspec.structs.fields(kind) if one.required
    }


def _value(wanted: Any) -> Any:
    wanted = getattr(wanted, "__supertype__", wanted)
    args = get_args(wanted)
    if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
        fields = _example(wanted)
        tag = wanted.__struct_config__.tag
        return {**fields, wanted.__struct_config__.tag_field: tag} if tag else fields
    if args and getattr(wanted, "__metadata__", None) is not None:
        inner = get_args(args[0])
        return [_value(inner[0])] if inner else _value(args[0])
    if type(None) in args:
        return None
    if getattr(wanted, "__origin__", None) is not None and "Literal" in str(wanted):
        return args[0]
    if getattr(wanted, "__origin__", None) is tuple and Ellipsis not in args:
        return [_value(one) for one in args]
    if getattr(wanted, "__origin__", None) in (tuple, list, dict):
        return {} if wanted.__origin__ is dict else []
    if args:
        return _value(args[0])
    return {int: 1, float: 1.0, str: "n", bool: False, bytes: b""}.get(wanted)


@settings(max_examples=60)
@given(bad=st.sets(st.integers(2, 40), max_size=12), rounds=st.integers(1, 4))
def test_handlers_that_raise_at_random_moments_never_end_a_job(bad: set[int], rounds: int) -> None:
    """By number: the same event fails in the replay too, unless it was set aside."""
    fed = Fed()
    with pytest.MonkeyPatch.context() as patch:
        break_handlers(patch, fed, lambda job, event: job.events in bad)
        fed.feed(joined(fed.now))
        for round in map(RoundNumber, range(1, rounds + 1)):
            play(fed, round)
            jobs.validate(fed.job)
            assert fed.replayed() == msgspec.json.encode(fed.job)
        for _ in range(30):  # It recovers by itself from whatever was dropped.
            deadline = jobs.deadline(fed.job)
            if deadline is None:
                break
            fed.now = max(fed.now, deadline)
            fed.feed(Tick(at=Time(fed.now)))
    assert fed.job.result is None or fed.job.result.code in (1, 75, 93), "it ends in its own way"
    failures = [one for one in fed.job.incidents if one.kind == "internal"]
    assert len(failures) <= len(bad)


def play(fed: Fed, round: RoundNumber) -> None:
    """Start both ranks, take a step, and lose a rank."""
    at = Time(fed.now)
    for rank in (Rank(0), Rank(1)):
        fed.feed(
            WorkerStarted(at=at, node=NODE, round=round, rank=rank, pid=7, warm=True),
            msgspec.structs.replace(stepped(at, rank, 5 + round), round=round),
        )
    fed.feed(msgspec.structs.replace(died(at), round=round))
