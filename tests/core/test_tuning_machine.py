"""Whatever comes when: all ranks of a round have the same settings at the same step."""

from __future__ import annotations

from driver import encoded, replayed
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tuned_job import TunedJob

from holdfast.core import job as jobs
from holdfast.messages.events import CoordinatorRestarted

RANKS = 3
ranks = st.integers(0, RANKS - 1)
GROUPS = [{0, 1, 2}, {0, 1, 2}, {0, 1}, {1, 2}, {0}, {1}, {2}]
SIZES = st.sampled_from([1, 4, 8, 16, 32])
seldom = st.sampled_from([False, False, False, False, True])
"""For what would otherwise undo each change before it is made."""


class TuningStateMachine(RuleBasedStateMachine):
    """Ranks hear of changes and step in any order; rounds break, the coordinator dies."""

    def __init__(self) -> None:
        super().__init__()
        self.job = TunedJob(nodes=RANKS, slots=1)
        self.opened: set[int] = set()
        self.left_memories = 2
        """At the third out-of-memory failure of the same kind the job ends."""

    @initialize(last=st.booleans())
    def begin(self, last: bool) -> None:
        """Most of the time a round is well under way, with a change on its way."""
        for rank in range(RANKS - last):
            self.open(rank)
        self.job.tune(micro_batch=2)

    @rule(rank=ranks)
    def open(self, rank: int) -> None:
        if rank not in self.opened and not self.job.deaf and self.job.job.world is not None:
            self.job.open(rank)
            self.opened.add(rank)

    @precondition(lambda self: self.opened)
    @rule(
        size=st.one_of(st.none(), SIZES),
        workers=st.one_of(st.none(), st.integers(0, 3)),
        hasty=seldom,
    )
    def tune(self, size: int | None, workers: int | None, hasty: bool) -> None:
        given = {"micro_batch": size, "workers": workers}
        wanted = {name: value for name, value in given.items() if value is not None}
        if wanted and (hasty or self.job.tuned.wanted is None):
            self.job.tune(**wanted)

    @rule(who=st.sampled_from(GROUPS), times=st.integers(1, 3))
    def hear(self, who: set[int], times: int) -> None:
        for _ in range(times):
            for rank in sorted(who & self.opened):
                self.job.hear(rank)

    @rule(who=st.sampled_from(GROUPS), steps=st.integers(1, 60))
    def advance(self, who: set[int], steps: int) -> None:
        for rank in sorted(who & self.opened):
            for _ in range(steps):
                self.job.advance(rank)

    @rule(who=st.sampled_from(GROUPS), steps=st.integers(15, 60))
    def rush(self, who: set[int], steps: int) -> None:
        """All have said where they are; some hear of the step, and all come to it."""
        if self.job.deaf:
            return
        self.hear(set(range(RANKS)), 1)
        self.hear(who, 1)
        self.advance(set(range(RANKS)), steps)

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0]))
    def wait(self, seconds: float) -> None:
        self.job.after(seconds)
        deadline = jobs.deadline(self.job.job)
        if deadline is not None and deadline <= self.job.now:
            self.job.tick()

    @rule(yes=seldom)
    def lose_answers(self, yes: bool) -> None:
        self.job.deaf = self.job.deaf or yes

    @rule(restart=st.booleans())
    def reconnect(self, restart: bool) -> None:
        """Answers arrive again, perhaps those of a coordinator that has replayed its journal."""
        if restart:
            before = encoded(self.job.job)
            self.job.job = replayed(self.job.history, revive_at=len(self.job.history) - 1)
            assert encoded(self.job.job) == before
            self.job.take(CoordinatorRestarted(at=self.job.at))
            for node in self.job.job.membership.nodes():
                self.job.resume(node, self.job.round, busy=True)
        self.job.deaf = False
        self.job.ask_again()

    @rule(rank=ranks, memory=st.booleans(), yes=seldom)
    def break_round(self, rank: int, memory: bool, yes: bool) -> None:
        if yes:
            self.job.step_all(max(one.step for one in self.job.all.values()) + 1)
            self.job.deaf = False
            memory = memory and self.left_memories > 0
            self.left_memories -= memory
            self.job.next_round(rank, signal=9, oom=memory)
            self.opened.clear()
            for back in range(RANKS - 1):
                self.open(back)

    @invariant()
    def all_ranks_have_the_same_settings_at_the_same_step(self) -> None:
        changes = {change for one in self.job.all.values() for change in one.switched}
        assert len({step for step, _ in changes}) == len(changes), "two changes at one step"
        for one in self.job.all.values():
            passed = one.step - (1 in one.open)  # It waits at this boundary.
            due = sorted(change for change in changes if change[0] <= passed)
            assert [c for c in one.switched if c[0] <= passed] == due

    @invariant()
    def settings_of_the_same_version_are_the_same(self) -> None:
        known = {one.version: one.config for one in self.job.all.values()}
        assert all(known[one.version] == one.config for one in self.job.all.values())

    def teardown(self) -> None:
        """In the end, what is wanted is in force or given up, with all ranks alike."""
        self.job.deaf = False
        if self.job.job.world is None:
            return
        self.job.ask_again()
        for rank in set(range(RANKS)) - self.opened:
            self.job.open(rank)
        steps = [one.step for one in self.job.all.values()]
        for _ in range(max(steps) - min(steps) + 1000):  # The last rank comes up to the first.
            self.job.hear_all()
            behind = min(one.step for one in self.job.all.values())
            for rank, one in self.job.all.items():
                if one.step == behind:
                    self.job.advance(rank)
            self.all_ranks_have_the_same_settings_at_the_same_step()
            if self.job.tuned.wanted is None and self.job.tuned.proposal is None:
                break
        assert self.job.tuned.wanted is None
        top = max(one.step for one in self.job.all.values())
        for rank, one in self.job.all.items():
            while one.step < top:
                self.job.advance(rank)
        assert len({(one.version, one.config) for one in self.job.all.values()}) == 1


TuningStateMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None
)
TestTuningMachine = TuningStateMachine.TestCase
