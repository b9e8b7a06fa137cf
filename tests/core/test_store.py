"""The store of a round: what its keys do, who waits for them, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from driver import Driver, encoded, replayed, revived
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.core import job as jobs
from holdfast.core.requests import store as keys
from holdfast.core.requests.store import MAX_STORE_BYTES, Store, StoreResponse
from holdfast.messages.actions import Answered
from holdfast.messages.events import Asked, CoordinatorRestarted
from holdfast.messages.requests import (
    MAX_VALUE_BYTES,
    Add,
    AnyAnswer,
    AnyRequest,
    Append,
    CheckKeys,
    CompareSet,
    CountKeys,
    Delete,
    Denied,
    Get,
    Granted,
    Set,
    StoreRequest,
    Total,
    Truth,
    Values,
    WaitForKeys,
)
from holdfast.messages.units import NodeId, Rank, RoundNumber


def put(**items: bytes) -> Set:
    return Set(items=tuple(items.items()))


def get(*names: str) -> Get:
    return Get(keys=names)


def wait(*names: str, timeout_s: float = 10.0) -> WaitForKeys:
    return WaitForKeys(keys=names, timeout_s=timeout_s)


class TestAlone:
    """The machine by itself."""

    def ask(self, request: StoreRequest, asker: str = "0/0") -> StoreResponse:
        taken = keys.take(self.store, asker, request)
        keys.validate(self.store)
        return taken

    @pytest.fixture(autouse=True)
    def _fresh(self) -> None:
        self.store = Store()

    def test_a_missing_key_is_missing_and_never_empty(self) -> None:
        self.ask(put(empty=b""))
        assert self.ask(get("empty", "gone")).answer == Values(values=(b"", None))

    def test_add_counts_from_nothing_and_leaves_a_decimal_number(self) -> None:
        assert self.ask(Add(key="n", amount=5)).answer == Total(number=5)
        assert self.ask(Add(key="n", amount=-7)).answer == Total(number=-2)
        assert self.ask(get("n")).answer == Values(values=(b"-2",))

    @pytest.mark.parametrize("value", [b"", b"x", b"1.5", b"1" * 5000, b"\xff"])
    def test_what_is_no_number_cannot_be_added_to(self, value: bytes) -> None:
        self.ask(put(n=value))
        answer = self.ask(Add(key="n", amount=1)).answer
        assert isinstance(answer, Denied)
        assert answer.reason == "not a number"
        assert self.store.items == {"n": value}

    def test_a_number_never_outgrows_64_bits(self) -> None:
        self.ask(Add(key="n", amount=(1 << 63) - 1))
        assert isinstance(self.ask(Add(key="n", amount=1)).answer, Denied)
        assert self.store.items["n"] == b"%d" % ((1 << 63) - 1)

    @pytest.mark.parametrize(
        ("before", "expected", "after"),
        [
            (None, b"", b"new"),
            (None, b"old", None),
            (b"", b"", b"new"),
            (b"old", b"old", b"new"),
            (b"old", b"", b"old"),
            (b"old", b"other", b"old"),
        ],
    )
    def test_compare_set(self, before: bytes | None, expected: bytes, after: bytes | None) -> None:
        if before is not None:
            self.ask(put(k=before))
        answer = self.ask(CompareSet(key="k", expected=expected, desired=b"new")).answer
        assert answer == Values(values=(after,))
        assert self.store.items.get("k") == after

    def test_append_delete_check_and_count(self) -> None:
        assert self.ask(Append(key="k", value=b"ab")).answer == Total(number=2)
        assert self.ask(Append(key="k", value=b"c")).answer == Total(number=3)
        assert self.ask(CountKeys()).answer == Total(number=1)
        assert self.ask(CheckKeys(keys=("k", "l"))).answer == Truth(so=False)
        assert self.ask(Delete(key="k")).answer == Truth(so=True)
        assert self.ask(Delete(key="k")).answer == Truth(so=False)
        assert self.store == Store()

    def test_an_answer_has_as_many_values_as_fit_but_at_least_one(self) -> None:
        half = b"x" * (MAX_VALUE_BYTES // 2)
        self.ask(put(a=half, b=half + b"x", c=b"x" * MAX_VALUE_BYTES))
        assert self.ask(get("a", "b", "c")).answer == Values(values=(half,))
        assert self.ask(get("c", "a")).answer == Values(values=(b"x" * MAX_VALUE_BYTES,))

    def test_a_value_that_is_too_large_is_refused_and_changes_nothing(self) -> None:
        self.ask(put(k=b"x" * MAX_VALUE_BYTES))
        answer = self.ask(Append(key="k", value=b"x")).answer
        assert isinstance(answer, Denied)
        assert answer.reason == "too large"
        assert len(self.store.items["k"]) == MAX_VALUE_BYTES

    def test_a_full_store_refuses_more_but_lets_go(self) -> None:
        value = b"x" * MAX_VALUE_BYTES
        for i in range(MAX_STORE_BYTES // MAX_VALUE_BYTES - 1):
            assert self.ask(put(**{f"k{i}": value})).answer == Granted()
        assert isinstance(self.ask(put(last=value)).answer, Denied)
        assert "last" not in self.store.items
        assert self.ask(put(k0=b"")).answer == Granted()
        assert self.ask(put(last=value)).answer == Granted()

    def test_a_wait_ends_with_the_last_of_its_keys(self) -> None:
        assert self.ask(wait("a", "b"), "w").answer is None
        assert self.ask(put(b=b"")).woken == ()
        assert self.ask(put(a=b"")).woken == ("w",)
        assert self.ask(wait("a", "b"), "w").answer == Granted()

    def test_a_key_that_went_again_is_waited_for_again(self) -> None:
        self.ask(wait("a", "b"), "w")
        self.ask(put(a=b""))
        self.ask(Delete(key="a"))
        assert self.ask(put(b=b"")).woken == ()
        assert self.ask(put(a=b"")).woken == ("w",)

    def test_many_wait_for_one_key_and_are_woken_in_their_order(self) -> None:
        for i in range(5):
            self.ask(wait("k"), f"w{i}")
        keys.forget(self.store, "w2")
        keys.forget(self.store, "w2")
        assert self.ask(Add(key="k", amount=1)).woken == ("w0", "w1", "w3", "w4")
        assert not self.store.waits
        assert not self.store.watched


class Askers(Driver):
    """A job whose scripts ask."""

    def ask(
        self, rank: int, request: AnyRequest, number: int = 1, channel: int = 0, **more: Any
    ) -> list[Any]:
        more = {"round": self.round, "node": self.node_of(rank), **more}
        event = Asked(
            at=self.at, rank=Rank(rank), channel=channel, number=number, request=request, **more
        )
        return self.take(event)


def answers(actions: list[Any]) -> dict[int, AnyAnswer]:
    return {a.rank: a.answer for a in actions if isinstance(a, Answered)}


@pytest.fixture
def job() -> Askers:
    driver = Askers(min_nodes=1, max_nodes=2)
    driver.running("a", "b")
    return driver


def test_ranks_of_different_nodes_share_their_keys(job: Askers) -> None:
    assert answers(job.ask(0, put(k=b"v"))) == {0: Granted()}
    (answer,) = job.ask(3, get("k"))
    assert (answer.node, answer.rank, answer.number) == ("b", 3, 1)
    assert answer.answer == Values(values=(b"v",))


def test_a_request_that_is_repeated_is_answered_again_and_not_done_again(job: Askers) -> None:
    for _ in range(3):
        assert answers(job.ask(0, Add(key="n", amount=1), 1)) == {0: Total(number=1)}
    assert answers(job.ask(0, Add(key="n", amount=1), 2)) == {0: Total(number=2)}
    assert job.ask(0, Add(key="n", amount=1), 1) == [], "it had its answer long ago"
    assert answers(job.ask(0, Add(key="n", amount=1), 1, channel=1)) == {0: Total(number=3)}


def test_a_repeated_compare_set_that_won_has_won(job: Askers) -> None:
    swap = CompareSet(key="k", expected=b"", desired=b"mine")
    job.ask(0, swap)
    job.ask(1, put(k=b"other"))
    assert answers(job.ask(0, swap)) == {0: Values(values=(b"mine",))}
    assert job.job.requests.store.items["k"] == b"other"


def test_a_read_that_is_repeated_is_read_again(job: Askers) -> None:
    job.ask(0, get("k"))
    job.ask(1, put(k=b"v"))
    assert answers(job.ask(0, get("k"))) == {0: Values(values=(b"v",))}


def test_a_wait_is_answered_by_another_ranks_set(job: Askers) -> None:
    assert job.ask(0, wait("k")) == []
    assert job.ask(0, wait("k")) == [], "asked again while it waits"
    assert answers(job.ask(2, put(k=b""))) == {2: Granted(), 0: Granted()}
    assert answers(job.ask(0, wait("k"))) == {0: Granted()}


def test_a_wait_is_over_when_its_time_is_up(job: Askers) -> None:
    job.ask(0, wait("k", timeout_s=5))
    job.ask(1, wait("k", "l", timeout_s=2))
    started = job.now
    assert jobs.deadline(job.job) == started + 2
    job.now = started + 2
    late = answers(job.tick())
    assert list(late) == [1]
    assert isinstance(late[1], Denied)
    assert late[1].reason == "timeout"
    assert "'k', 'l'" in late[1].detail
    assert jobs.deadline(job.job) == started + 5
    job.now = started + 5
    assert list(answers(job.tick())) == [0]
    assert jobs.deadline(job.job) is None
    assert list(answers(job.ask(2, put(k=b"")))) == [2]


def test_a_wait_without_patience_is_denied_at_once(job: Askers) -> None:
    assert isinstance(answers(job.ask(0, wait("k", timeout_s=0)))[0], Denied)


def test_keys_and_waits_end_with_their_round(job: Askers) -> None:
    job.ask(0, put(k=b"v"))
    job.ask(0, wait("never"), 2)
    job.step_all(3)
    fenced = answers(job.exit(1, 3, signal=9))
    assert isinstance(fenced[0], Denied)
    assert fenced[0].reason == "fenced"
    refused = answers(job.ask(0, get("k"), 3))[0]
    assert isinstance(refused, Denied), "the round is over though no other has begun"
    job.all_ready()
    assert job.round == 2
    assert answers(job.ask(0, get("k"))) == {0: Values(values=(None,))}


def test_a_request_of_an_older_round_is_refused_by_name(job: Askers) -> None:
    job.step_all(3)
    job.exit(1, 3, signal=9)
    job.all_ready()
    before = encoded(job.job)
    (answer,) = job.ask(0, put(k=b"late"), round=RoundNumber(1))
    assert answer.round == 1
    assert answer.answer.reason == "fenced"
    assert "round 1" in answer.answer.detail
    assert "round 2" in answer.answer.detail
    (answer,) = job.ask(0, put(k=b"x"), node=NodeId("stranger"))
    assert answer.answer.reason == "fenced"
    assert encoded(job.job) == before


def test_a_restarted_coordinator_has_every_key_and_every_wait(job: Askers) -> None:
    job.ask(0, put(k=b"\x00\xff"))
    job.ask(1, wait("l"))
    job.job = revived(job.job)
    job.take(CoordinatorRestarted(at=job.at))
    assert answers(job.ask(2, get("k"))) == {2: Values(values=(b"\x00\xff",))}
    assert answers(job.ask(3, put(l=b""))) == {3: Granted(), 1: Granted()}
    assert encoded(replayed(job.history, revive_at=8)) == encoded(job.job)


def test_the_end_of_the_job_ends_every_wait(job: Askers) -> None:
    job.ask(0, wait("k"))
    job.leaving("a")
    assert not job.job.requests.open
    assert job.job.requests.until is None


NAMES = st.sampled_from(["a", "b", "c", "d"])
VALUES = st.sampled_from([b"", b"1", b"22", b"x"])


class StoreMachine(RuleBasedStateMachine):
    """Any sequence of requests against a plain dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store()
        self.model: dict[str, bytes] = {}
        self.waiting: dict[str, tuple[str, ...]] = {}
        self.asked = 0

    def ask(self, request: StoreRequest, asker: str = "x") -> AnyAnswer | None:
        taken = keys.take(self.store, asker, request)
        self.woken = set(taken.woken)
        return taken.answer

    def settle(self) -> None:
        there = {w for w, names in self.waiting.items() if all(n in self.model for n in names)}
        assert self.woken == there, "woken are exactly those whose keys are all there"
        for asker in there:
            del self.waiting[asker]

    @rule(items=st.dictionaries(NAMES, VALUES, min_size=1))
    def put(self, items: dict[str, bytes]) -> None:
        assert self.ask(Set(items=tuple(items.items()))) == Granted()
        self.model.update(items)
        self.settle()

    @rule(names=st.lists(NAMES, min_size=1))
    def get(self, names: list[str]) -> None:
        answer = self.ask(Get(keys=tuple(names)))
        assert answer == Values(values=tuple(map(self.model.get, names)))

    @rule(name=NAMES, amount=st.integers(-3, 3))
    def add(self, name: str, amount: int) -> None:
        answer = self.ask(Add(key=name, amount=amount))
        before = self.model.get(name, b"0")
        if before.lstrip(b"-").isdigit():
            self.model[name] = b"%d" % (int(before) + amount)
            assert answer == Total(number=int(self.model[name]))
        else:
            assert isinstance(answer, Denied)
        self.settle()

    @rule(name=NAMES, expected=VALUES, desired=VALUES)
    def compare_set(self, name: str, expected: bytes, desired: bytes) -> None:
        answer = self.ask(CompareSet(key=name, expected=expected, desired=desired))
        if self.model.get(name, b"") == expected:
            self.model[name] = desired
        assert answer == Values(values=(self.model.get(name),))
        self.settle()

    @rule(name=NAMES, value=VALUES)
    def append(self, name: str, value: bytes) -> None:
        self.model[name] = self.model.get(name, b"") + value
        assert self.ask(Append(key=name, value=value)) == Total(number=len(self.model[name]))
        self.settle()

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        there = self.model.pop(name, None) is not None
        assert self.ask(Delete(key=name)) == Truth(so=there)

    @rule(names=st.lists(NAMES, min_size=1))
    def wait(self, names: list[str]) -> None:
        self.asked += 1
        asker = f"w{self.asked}"
        answer = self.ask(WaitForKeys(keys=tuple(names), timeout_s=1), asker)
        if all(name in self.model for name in names):
            assert answer == Granted()
        else:
            assert answer is None
            self.waiting[asker] = tuple(names)

    @rule(pick=st.integers(0, 9))
    def give_up(self, pick: int) -> None:
        if self.waiting:
            asker = list(self.waiting)[pick % len(self.waiting)]
            del self.waiting[asker]
            keys.forget(self.store, asker)

    @invariant()
    def it_is_the_model(self) -> None:
        keys.validate(self.store)
        assert self.store.items == self.model
        assert set(self.store.waits) == set(self.waiting)


TestStoreMachine = StoreMachine.TestCase
