"""Shards under any sequence of events, against sets of numbers.

The model keeps each position by itself: who has it, and at which step it was used. Nodes come and go,
rounds break, scripts save and go back to any of their checkpoints, agents repeat what they said rounds
ago, and the coordinator lives on from an encoded snapshot.
"""

from __future__ import annotations

from collections import Counter

from driver import revived
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lending import Lender, finished, lent, used_by

from holdfast.core import job as jobs
from holdfast.messages.data import DataSpec, ShardFailure, Span
from holdfast.messages.events import ShardsReported
from holdfast.messages.requests import DataOpened
from holdfast.messages.spans import SpanSet
from holdfast.messages.units import NodeId, Rank

Place = tuple[int, int]
"""A line and a position on it."""
LINES = 50


def places(*spans: tuple[int, int, int]) -> set[Place]:
    return {(line, at) for line, start, stop in spans for at in range(start, stop)}


def as_spans(found: set[Place]) -> SpanSet:
    return SpanSet.of(Span(line, at, at + 1) for line, at in found)


class SharingMachine(RuleBasedStateMachine):
    spec: DataSpec

    def begin(self, spec: DataSpec) -> None:
        self.spec = spec
        self.lender = Lender("n0", "n1", max_nodes=3)
        self.names = 2
        self.step = 0
        self.used: dict[Place, int] = {}
        """The step at which each position of the committed history was used."""
        self.out: dict[str, set[Place]] = {}
        self.saved: list[tuple[int, dict[Place, int]]] = []
        self.said: list[ShardsReported] = []
        self.failures: Counter[Place] = Counter()
        self.is_open = False

    # ---- carrying in and out ----

    @property
    def nodes(self) -> list[str]:
        return sorted(self.lender.job.membership.placed)

    def node(self, number: int) -> str:
        return self.nodes[number % len(self.nodes)]

    def say(self, event: ShardsReported) -> None:
        self.hear(self.lender.take(event))
        self.said.append(event)

    def report(self, node: str, want: int = 0, **more: object) -> None:
        event = ShardsReported(
            at=self.lender.at,
            node=NodeId(node),
            round=self.lender.round,
            dataset="d",
            want=want,
            **more,  # type: ignore[arg-type]
        )
        self.say(event)

    def hear(self, actions: list[object]) -> None:
        for node, spans in lent(actions).items():  # type: ignore[arg-type]
            new = places(*spans)
            assert sum(stop - start for _, start, stop in spans) == len(new), "lent twice at once"
            taken = set().union(*self.out.values()) | self.used.keys()
            assert not new & taken, "lent what is used, or lent already"
            self.lendable(node, new)
            self.out.setdefault(node, set()).update(new)
        if finished(actions):  # type: ignore[arg-type]
            assert self.is_finished(), "told too early that all is finished"

    def lendable(self, node: str, new: set[Place]) -> None:
        raise NotImplementedError

    def is_finished(self) -> bool:
        return False

    # ---- what happens ----

    @precondition(lambda self: not self.is_open)
    @rule(which=st.integers(0, 5), part=st.booleans())
    def open(self, which: int, part: bool) -> None:
        """The ranks restore one of their checkpoints, or begin afresh."""
        step, used = [(0, {}), *self.saved][which % (len(self.saved) + 1)]
        self.step, self.used = step, dict(used)
        resumed = "whole" if step else "fresh"
        state = as_spans(set(used)).pack() if step else b""
        self.saved = [one for one in self.saved if one[0] <= step]
        self.is_open = True
        ranks = list(self.lender.job.ranks)
        if part and step:
            for rank in ranks[1:]:
                assert self.lender.open(rank, self.spec, "part", step=step) is None
            self.hear(self.lender.ask(0, self.spec, resumed, used=state, step=step))
        else:
            for rank in ranks:
                told = self.lender.ask(rank, self.spec, resumed, used=state, step=step)
                self.hear(told)

    @rule(number=st.integers(0, 2), want=st.integers(1, 9))
    def want(self, number: int, want: int) -> None:
        self.report(self.node(number), want)

    @rule(number=st.integers(0, 2), share=st.integers(1, 4), want=st.integers(0, 3))
    def use(self, number: int, share: int, want: int) -> None:
        node = self.node(number)
        held = sorted(self.out.get(node, ()))
        mine = set(held[: -(-len(held) * share // 4)])
        if not mine:
            return
        for place in mine:
            self.used[place] = self.step
            self.failures.pop(place, None)
        self.out[node] -= mine
        rank = next(r for r, s in self.lender.job.ranks.items() if s.node == node)
        told = [used_by(rank, (s.line, s.start, s.stop), self.step) for s in as_spans(mine)]
        self.report(node, want, used=tuple(told))

    @rule(number=st.integers(0, 2), share=st.integers(1, 4), fails=st.booleans())
    def give_back(self, number: int, share: int, fails: bool) -> None:
        node = self.node(number)
        held = sorted(self.out.get(node, ()))
        mine = set(held[len(held) - len(held) * share // 4 :])
        if not mine:
            return
        self.out[node] -= mine
        spans = tuple(as_spans(mine))
        if fails:
            self.failures.update(mine)
            failed = tuple(ShardFailure(Rank(0), span, "x") for span in spans)
            self.report(node, failed=failed)
        else:
            self.report(node, returned=spans)

    @precondition(lambda self: self.is_open)
    @rule()
    def save(self) -> None:
        """A step ends with a checkpoint."""
        self.step += 1
        self.saved.append((self.step, dict(self.used)))

    @rule(number=st.integers(0, 8))
    def say_again(self, number: int) -> None:
        """An agent repeats a report: what it speaks of is not lent to it any more, or used."""
        if not self.said:
            return
        event = self.said[-1 - number % len(self.said)]
        still = self.out.get(event.node, set()) if event.round == self.lender.round else set()
        spoken = [*(u.used.span for u in event.used), *(f.span for f in event.failed)]
        spans = [(s.line, s.start, s.stop) for s in (*spoken, *event.returned)]
        if not places(*spans) & still and not event.want:
            self.hear(self.lender.take(event))

    @rule()
    def break_round(self) -> None:
        self.end_round()
        self.lender.break_round()

    def end_round(self) -> None:
        self.lender.advance()
        self.out, self.is_open = {}, False

    @rule(number=st.integers(0, 2))
    def lose(self, number: int) -> None:
        if len(self.nodes) > 1:
            self.end_round()
            self.lender.after(1).lose(self.node(number))
            self.next_round()

    @rule()
    def join(self) -> None:
        if len(self.nodes) < 3:
            self.names += 1
            self.end_round()
            self.lender.join(f"n{self.names}")
            self.lender.after(1).exit(0, signal=9)
            self.next_round()

    def next_round(self) -> None:
        self.lender.after(1).all_ready()
        if self.lender.job.world is None:
            self.lender.after(60).tick()
        if self.lender.job.world is not None:
            self.lender.after(1).start_all()

    @rule()
    def restart(self) -> None:
        """The coordinator lives on from a snapshot."""
        self.lender.job = revived(self.lender.job)

    # ---- what always holds ----

    @precondition(lambda self: hasattr(self, "lender"))
    @invariant()
    def both_know_the_same(self) -> None:
        jobs.validate(self.lender.job)
        assert self.lender.job.result is None
        if not self.is_open:
            return
        data = self.lender.data
        line = range(data.used.below)
        whole = places(*((one, 0, self.spec.size or 0) for one in line))
        known = whole | {(s.line, at) for s in data.used for at in range(s.start, s.stop)}
        assert known == set(self.used)
        held = {
            node: {(s.line, at) for s in lease for at in range(s.start, s.stop)}
            for node, lease in data.leases.items()
        }
        assert held == {node: out for node, out in self.out.items() if out}

    @precondition(lambda self: hasattr(self, "lender") and self.is_open)
    @invariant()
    def the_account_has_each_position_once(self) -> None:
        account = self.lender.account()
        counted = Counter[Place]()
        for line in account.lines:
            for span in line.spans:
                for at in range(span.start, span.stop) if span.times else ():
                    counted[line.line, at] += span.times
        old = account.whole_lines
        assert account.sound, account
        assert counted == Counter(place for place in self.used if place[0] >= old)


class TableMachine(SharingMachine):
    """A data set with a size."""

    @initialize(
        size=st.integers(1, 30),
        shard=st.integers(1, 7),
        parts=st.integers(1, 3),
        epochs=st.integers(0, 3),
    )
    def open_job(self, size: int, shard: int, parts: int, epochs: int) -> None:
        self.begin(
            DataSpec(
                name="d",
                sharing="leases",
                size=size,
                shard=shard,
                sub_epochs=min(parts, size),
                epochs=epochs,
                failures=1000,
            )
        )

    def everything(self) -> list[Place]:
        assert self.spec.size is not None
        return [(e, at) for e in range(self.spec.epochs or LINES) for at in range(self.spec.size)]

    def lendable(self, node: str, new: set[Place]) -> None:
        """Only the lowest are lent, in whole shards or rests of shards."""
        taken = set().union(*self.out.values()) | self.used.keys()
        free = [place for place in self.everything() if place not in taken]
        assert new == set(free[: len(new)])

    def is_finished(self) -> bool:
        return self.spec.epochs > 0 and len(self.used) == len(self.everything())

    @precondition(lambda self: hasattr(self, "lender") and self.is_open)
    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        if self.lender.data.wants:
            taken = set().union(*self.out.values()) | self.used.keys()
            assert all(place in taken for place in self.everything()[: 30 * LINES])
            assert not self.is_finished(), "nodes wait, and everything is used"


class StreamMachine(SharingMachine):
    """Partitions without an end."""

    @initialize(partitions=st.integers(1, 5), shard=st.integers(1, 4))
    def open_job(self, partitions: int, shard: int) -> None:
        names = tuple(f"p{i}" for i in range(partitions))
        self.begin(
            DataSpec(name="d", sharing="leases", partitions=names, shard=shard, failures=1000)
        )

    def lendable(self, node: str, new: set[Place]) -> None:
        """Each partition is lent to one node at a time, and in order."""
        for line in {line for line, _ in new}:
            others = [
                n for n, out in self.out.items() if n != node and any(p[0] == line for p in out)
            ]
            assert not others, f"partition {line} is with {others} already"
            taken = {at for out in self.out.values() for one, at in out if one == line}
            taken |= {at for one, at in self.used if one == line}
            mine = sorted(at for one, at in new if one == line)
            free = [at for at in range(mine[-1] + 1) if at not in taken]
            assert mine == free, "a gap was left"


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestStream = StreamMachine.TestCase
TestStream.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_rank_that_asks_is_answered() -> None:
    """The model's ranks open a data set, so that what it checks is not checked in vain."""
    machine = TableMachine()
    machine.open_job(20, 3, 2, 1)
    machine.open(0, False)
    machine.want(0, 4)
    assert machine.out
    assert isinstance(machine.lender.open(0, machine.spec), DataOpened)
