"""What loaders tell the job, over a link that keeps what it is told."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds_of_loaders import Numbers

from holdfast.core.shards.opening import flaw
from holdfast.data import ElasticDataLoader, ElasticIterableDataset, link, use
from holdfast.data.use import Segments
from holdfast.errors import DataError, UsageError, WireError
from holdfast.messages.data import Span, Task, Used
from holdfast.messages.local import DataUsed
from holdfast.messages.requests import (
    AnyAnswer,
    AwaitTuning,
    DataOpened,
    OpenData,
    ScriptRequest,
    TuningNotice,
)
from holdfast.messages.spans import SpanSet
from holdfast.messages.tuning import MemoryRoom
from holdfast.messages.units import StepNumber


class KeptLink:
    """A link that keeps what it is told, and answers when it may."""

    rank, world_size, round = 0, 2, 1
    news = 1
    """Number of the only notice of settings."""

    def __init__(self) -> None:
        self.step = 0
        self.records = 0
        self.openings = 0
        self.opened: list[OpenData] = []
        self.told: list[DataUsed] = []
        self.refusal: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.answered = threading.Event()

    def open(self, request: OpenData) -> DataOpened:
        """Check the request as the wire would."""
        self.opened.append(msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=OpenData))
        assert self.may_answer.wait(10)
        try:
            if self.refusal is not None:
                raise self.refusal
            return DataOpened(used=b"")
        finally:
            self.answered.set()

    def take(self, dataset: str, count: int) -> tuple[Span, ...]:
        raise AssertionError("a loader in lockstep takes no shards")

    def delivered(self, records: int) -> None:
        self.records += records

    def ask(self, request: ScriptRequest, timeout_s: float | None) -> AnyAnswer:
        """Say that the script's own settings hold, and never anything else."""
        assert isinstance(request, AwaitTuning)
        if request.after == self.news:
            raise WireError("the round is over")
        return TuningNotice(number=self.news, at_step=StepNumber(0))

    def count_opening(self, dataset: str) -> int:
        self.openings += 1
        return self.openings

    def memory(self) -> MemoryRoom:
        raise AssertionError("nothing is measured unless settings are searched for")

    def tell(self, message: DataUsed) -> None:
        self.told.append(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=DataUsed))

    @property
    def used(self) -> list[Used]:
        return [used for message in self.told for used in message.used]

    def wait_for_report(self, loader: ElasticDataLoader) -> None:
        """Wait until the loader's thread has the answer."""
        assert self.answered.wait(10)
        for thread in threading.enumerate():
            if thread.name.startswith("holdfast-data-"):
                thread.join(10)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptLink]:
    kept = KeptLink()
    monkeypatch.setattr(link._Installed, "link", kept)
    monkeypatch.setattr(use._ProcessLoaders, "claims", WeakKeyDictionary())
    monkeypatch.setattr(use._ProcessLoaders, "reports", {})
    monkeypatch.setattr(use, "TELL_EVERY_S", 1e9)
    yield kept
    kept.may_answer.set()
    gc.collect()


def train(loader: ElasticDataLoader, job: KeptLink, batches: int | None = None) -> None:
    """Iterate as a script does that finishes a step after each batch."""
    iterator = iter(loader)
    job.wait_for_report(loader)
    for number, _ in enumerate(iterator, 1):
        job.step += 1
        if number == batches:
            return


# ---- segments ------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 2), st.booleans(), st.booleans()), max_size=40
    )
)
def test_segments_say_which_positions_each_step_used(
    uses: list[tuple[int, int, bool, bool]],
) -> None:
    """Each use takes some positions, after some more steps, maybe in another line; some are told."""
    segments, told = Segments(), []
    truth: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    at, step = {0: 0, 1: 0}, 0
    for size, steps, other_line, tell in uses:
        step += steps
        line = int(other_line)
        segments.add(line, at[line], at[line] + size, size, step)
        truth[line, step] |= set(range(at[line], at[line] + size))
        at[line] += size
        if tell:
            told += segments.drain()
    told += segments.drain()
    found: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for used in told:
        steps = used.last_step - used.first_step + 1
        each, rest = divmod(used.span.stop - used.span.start, steps)
        assert rest == 0
        for number in range(steps):
            start = used.span.start + number * each
            found[used.span.line, used.first_step + number] |= set(range(start, start + each))
    assert found == truth
    assert sum(used.records for used in told) == sum(at.values())


def test_steps_alike_are_one_segment() -> None:
    segments = Segments()
    for step in range(1000):
        segments.add(0, 8 * step, 8 * step + 8, 2, step)
    (used,) = segments.drain()
    assert used == Used(span=Span(0, 0, 8000), first_step=0, last_step=999, records=2000)
    assert segments.drain() == ()


# ---- loaders -------------------------------------------------------------------------------------


def test_a_fresh_loader_opens_its_data_set_once(job: KeptLink) -> None:
    loader = ElasticDataLoader(Numbers(20), 4, shuffle=True, seed=7, name="train", sub_epochs=2)
    for _ in loader.epochs(2):
        train(loader, job)
    (opened,) = job.opened
    spec = opened.spec
    assert (spec.name, spec.sharing, spec.size, spec.order) == ("train", "lockstep", 20, "records")
    assert (spec.seed, spec.sub_epochs, spec.epochs) == (7, 2, 0)
    assert (opened.resumed, opened.step) == ("fresh", 0)
    assert not SpanSet.unpack(opened.used)


def test_a_restored_loader_tells_what_was_used_before(job: KeptLink) -> None:
    job.step = 12
    loader = ElasticDataLoader(Numbers(20), 4)
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "position": 8})
    train(loader, job)
    (opened,) = job.opened
    assert (opened.resumed, opened.step) == ("whole", 12)
    whole = [Span(0, 0, 20), Span(1, 0, 20), Span(2, 0, 8)]
    assert list(SpanSet.unpack(opened.used)) == whole


def test_a_data_set_of_many_epochs_still_opens(job: KeptLink) -> None:
    loader = ElasticDataLoader(Numbers(20), 4)
    loader.load_state_dict({**loader.state_dict(), "epoch": 1 << 40, "position": 8})
    train(loader, job)
    assert SpanSet.unpack(job.opened[0].used).has(Span((1 << 40) - 1, 0, 20))


def test_an_epoch_is_told_when_it_ends(job: KeptLink) -> None:
    loader = ElasticDataLoader(Numbers(22), 4, num_replicas=2, rank=1)
    train(loader, job)
    assert job.used == [
        Used(span=Span(0, 0, 16), first_step=0, last_step=1, records=8),
        Used(span=Span(0, 16, 22), first_step=2, last_step=2, records=3),
    ]
    train(loader, job)
    assert job.used[2].span == Span(1, 0, 16)
    assert (job.used[2].first_step, job.used[2].last_step) == (3, 4)


def test_micro_batches_of_a_step_are_told_as_one(job: KeptLink) -> None:
    train_steps = ElasticDataLoader(Numbers(12), 2, global_batch=6)
    iterator = iter(train_steps)
    job.wait_for_report(train_steps)
    for _ in iterator:
        assert train_steps.current is not None
        job.step += train_steps.current.index + 1 == train_steps.current.of
    assert job.used == [Used(span=Span(0, 0, 12), first_step=0, last_step=1, records=12)]


def test_a_rank_without_records_tells_nothing(job: KeptLink) -> None:
    train(ElasticDataLoader(Numbers(2), 4, num_replicas=3, rank=2), job)
    assert job.used == []


def test_what_drop_last_leaves_out_is_told_as_passed(job: KeptLink) -> None:
    train(ElasticDataLoader(Numbers(11), 4, drop_last=True), job)
    assert [used.span for used in job.used] == [Span(0, 0, 4), Span(0, 4, 11)]


def test_use_is_told_at_most_once_a_second(job: KeptLink, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(use.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(use, "TELL_EVERY_S", 1.0)
    loader = ElasticDataLoader(Numbers(100), 1)
    iterator = iter(loader)
    job.wait_for_report(loader)
    for _ in range(50):
        next(iterator)
        job.step += 1
        now[0] += 0.25
    assert [message.used[0].span.stop for message in job.told] == [
        5,
        9,
        13,
        17,
        21,
        25,
        29,
        33,
        37,
        41,
        45,
        49,
    ]


@pytest.mark.parametrize(("passed", "messages"), [(0.01, 0), (0.03, 1)])
def test_use_is_told_when_the_state_is_saved(
    job: KeptLink, monkeypatch: pytest.MonkeyPatch, passed: float, messages: int
) -> None:
    now = [100.0]
    monkeypatch.setattr(use.time, "monotonic", lambda: now[0])
    loader = ElasticDataLoader(Numbers(100), 1)
    iterator = iter(loader)
    job.wait_for_report(loader)
    next(iterator)
    now[0] += passed
    loader.state_dict()
    assert len(job.told) == messages


def test_training_does_not_wait_for_the_coordinator(job: KeptLink) -> None:
    job.may_answer.clear()
    loader = ElasticDataLoader(Numbers(8), 2)
    assert len(list(loader)) == 4
    assert job.told == []
    job.may_answer.set()
    job.wait_for_report(loader)
    iterator = iter(loader)
    next(iterator)
    assert [used.span for used in job.used] == [Span(0, 0, 8)]


def test_a_refusal_is_raised_at_the_next_batch(job: KeptLink) -> None:
    job.refusal = DataError("data set 'data' has 8 records here and 9 elsewhere")
    loader = ElasticDataLoader(Numbers(8), 2)
    batches = iter(loader)
    job.wait_for_report(loader)
    with pytest.raises(DataError, match="9 elsewhere"):
        next(batches)


def test_a_link_that_breaks_does_not_stop_the_training(job: KeptLink) -> None:
    job.refusal = WireError("the agent is gone")
    loader = ElasticDataLoader(Numbers(8), 2)
    train(loader, job)
    assert (loader.position, job.told) == (8, [])


def test_a_data_set_is_opened_again_in_another_round(
    job: KeptLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = ElasticDataLoader(Numbers(8), 2)
    train(loader, job, 2)
    monkeypatch.setattr(job, "round", 2, raising=False)
    loader.load_state_dict(loader.state_dict())
    job.answered.clear()
    train(loader, job)
    assert [list(SpanSet.unpack(o.used)) for o in job.opened] == [[], [Span(0, 0, 4)]]


def test_loaders_of_one_name_and_other_data_are_refused_when_they_are_made(job: KeptLink) -> None:
    """Not at the first evaluation, after hours of training."""
    first = ElasticDataLoader(Numbers(8))
    with pytest.raises(UsageError, match="two data loaders of this script have the name 'data'"):
        ElasticDataLoader(Numbers(9))
    with pytest.raises(UsageError, match=r"name=.validation."):
        ElasticDataLoader(Numbers(8), shuffle=True)
    train(first, job)
    iter(ElasticDataLoader(Numbers(9), name="validation"))


def test_a_loader_that_is_made_again_for_each_epoch_goes_on_with_the_report(job: KeptLink) -> None:
    """Progress bars keep old loaders alive, and a state that one goes on with is not the round's."""
    kept = []
    for epoch in range(3):
        loader = ElasticDataLoader(Numbers(8), 4)
        loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "position": 0})
        train(loader, job)
        kept.append(loader)
    assert len(job.opened) == 1
    assert [used.span for used in job.used] == [Span(epoch, 0, 8) for epoch in range(3)]


def test_a_loader_that_is_gone_leaves_its_name(job: KeptLink) -> None:
    loader = ElasticDataLoader(Numbers(8))
    train(loader, job)
    del loader
    gc.collect()
    train(ElasticDataLoader(Numbers(9)), job)
    assert [opened.spec.size for opened in job.opened] == [8, 9]


def test_what_was_used_is_told_when_the_script_leaves_the_loop(job: KeptLink) -> None:
    loader = ElasticDataLoader(Numbers(8), 2)
    train(loader, job, 2)
    assert [used.span for used in job.used] == [Span(0, 0, 4)]


def test_a_state_that_says_all_is_done_is_told(job: KeptLink) -> None:
    loader = ElasticDataLoader(Numbers(8), 2)
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "position": 8})
    assert list(loader.epochs(2)) == []
    job.wait_for_report(loader)
    (opened,) = job.opened
    assert list(SpanSet.unpack(opened.used)) == [Span(0, 0, 8), Span(1, 0, 8)]


@pytest.mark.parametrize(("task", "exact"), [("training", True), ("evaluation", False)])
def test_only_what_training_uses_is_to_be_exact(job: KeptLink, task: Task, exact: bool) -> None:
    train(ElasticDataLoader(Numbers(8), task=task), job)
    assert (job.opened[0].spec.task, job.opened[0].spec.exact) == (task, exact)


def test_outside_a_job_names_may_repeat() -> None:
    loaders = [ElasticDataLoader(Numbers(3)) for _ in range(2)]
    assert [len(list(loader)) for loader in loaders] == [3, 3]


class Feed2(ElasticIterableDataset):
    def partitions(self) -> Sequence[str]:
        return ["a", "b"]

    def read(self, partition: str, offset: int) -> Iterator[Any]:
        yield from range(offset, 6)


def test_a_stream_tells_the_offsets_of_its_partitions(job: KeptLink) -> None:
    loader = ElasticDataLoader(Feed2(), 4, collate_fn=list)
    loader.load_state_dict({"version": 1, "name": "data", "offsets": {"b": 2}})
    train(loader, job)
    (opened,) = job.opened
    assert flaw(opened.spec) == ""
    assert (opened.spec.partitions, opened.spec.size) == (("a", "b"), None)
    assert list(SpanSet.unpack(opened.used)) == [Span(1, 0, 2)]
    assert SpanSet.of(used.span for used in job.used) == SpanSet.of([Span(0, 0, 6), Span(1, 2, 6)])
    assert sum(used.records for used in job.used) == 10
