"""Each row of the policy in docs/faults.md: what is done about which evidence, and when."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver import Driver, encoded, kinds, revived
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core import job as jobs
from holdfast.core import report
from holdfast.core.hangs import limits
from holdfast.core.hangs.state import PLACES_AT_MOST, Hangs
from holdfast.messages.actions import (
    Announce,
    AnyAction,
    Diagnose,
    EndProcess,
    KeepEvidence,
    StopWorkers,
)
from holdfast.messages.events import (
    HangDecided,
    HangsRemembered,
    Progress,
    RanksStalled,
    VerdictReached,
)
from holdfast.messages.hangs import HangTerms, Memory, Paces, Pause, PlaceMemory, Stall, StallKind
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

DOCS = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
PLACE = "eval.py:33 (upload)"


class Suspect(Driver):
    """Two nodes with two ranks each; agents tell of late ranks, examinations answer at once."""

    def __init__(self, **terms: Any) -> None:
        self.seen: dict[int, dict[str, Any]] = {}
        """What an examination finds of each late rank, as its agent tells it."""
        self.finding: dict[str, Any] = {}
        self.answers = True
        self.told: list[str] = []
        self.orders: list[AnyAction] = []
        super().__init__(min_nodes=2, max_nodes=2, **terms)
        self.running("a", "b", step=10)

    def late(self, rank: int, kind: StallKind = "elsewhere", **more: Any) -> Suspect:
        """From now on an agent sees the rank so, since its last mark or as said."""
        since = more.pop("since", self.now)
        moved = more.pop("moved", since)
        self.seen[rank] = {"kind": kind, "since": since, "moved": moved, **more}
        return self

    def moves(self, *ranks: int) -> Suspect:
        for rank in ranks:
            self.seen.pop(rank, None)
        return self

    def finds(self, *guilty: int, **more: Any) -> Suspect:
        self.finding = {"guilty": tuple(map(Rank, guilty)), "sentence": "as seen", **more}
        return self

    def report(self, *pauses: Pause) -> list[AnyAction]:
        """Both agents tell what they see."""
        actions: list[AnyAction] = []
        for node in ("a", "b"):
            stalls = tuple(self._stall(r) for r in sorted(self.seen) if self.node_of(r) == node)
            event = RanksStalled(
                at=self.at,
                node=NodeId(node),
                round=self.round,
                stalls=stalls,
                pauses=pauses if node == "a" else (),
            )
            actions += self.take(event)
        return actions

    def _stall(self, rank: int) -> Stall:
        seen = dict(self.seen[rank])
        kind, since, moved = seen.pop("kind"), seen.pop("since"), seen.pop("moved")
        still_s = 0.0 if moved == "now" else self.now - moved
        said = {"where": "between", "place": PLACE, **seen}
        return Stall(Rank(rank), kind, for_s=self.now - since, still_s=still_s, **said)

    def take(self, event: Any) -> list[AnyAction]:
        actions = super().take(event)
        self.orders += actions
        self.told += [action.text for action in actions if isinstance(action, Announce)]
        for action in actions:
            if isinstance(action, Diagnose) and self.answers:
                actions = [*actions, *self._verdict(action)]
        return actions

    def _verdict(self, asked: Diagnose) -> list[AnyAction]:
        found = {"guilty": (), "sentence": "unknown", **self.finding}
        left_s = found.pop("left_at", None)
        left = None if left_s is None else max(0.0, left_s - self.now)
        event = VerdictReached(
            at=self.at, examination=asked.examination, round=asked.round, left_s=left, **found
        )
        return self.take(event)

    def until(self, seconds: float, every_s: float = 0.25) -> float | None:
        """Let time pass; how long it took until the round was broken, None if it was not."""
        begun = self.now
        while self.now < begun + seconds:
            deadline = jobs.deadline(self.job)
            step = self.now + every_s
            self.now = max(self.now, min(step, deadline if deadline is not None else step))
            if deadline is not None and self.now >= deadline:
                self.tick()
            self.report()
            if self.job.state.name != "running":
                return self.now - begun
        return None


def three_wait(job: Suspect, *ranks: int) -> Suspect:
    for rank in ranks or (0, 2, 3):
        job.late(rank, "waits", place="train.py:9 (main)")
    return job


# ---- the table ---------------------------------------------------------------------------------

FOREVER = 3000.0
Row = Callable[[], tuple[Suspect, float | None]]


def proven(proof: str, **more: Any) -> Row:
    def row() -> tuple[Suspect, float | None]:
        job = three_wait(Suspect()).late(1, **more)
        return job.finds(1, proof=proof, waiting=(0, 2, 3)), 1.0

    return row


def stopped() -> tuple[Suspect, float | None]:
    return three_wait(Suspect()).late(1, "stopped").finds(1, proof="stopped"), 1.3


def silent() -> tuple[Suspect, float | None]:
    return three_wait(Suspect()).late(1).finds(1, waiting=(0, 2, 3)), 61.0


def silent_in_a_section() -> tuple[Suspect, float | None]:
    job = three_wait(Suspect()).late(1)
    return job.finds(1, waiting=(0, 2, 3), pause="upload"), 601.0


def all_silent() -> tuple[Suspect, float | None]:
    return three_wait(Suspect(), 0, 1, 2, 3).finds(waiting=(0, 1, 2, 3)), 61.0


def alive() -> tuple[Suspect, float | None]:
    job = three_wait(Suspect()).late(1, moved="now", signs=("cpu",))
    return job.finds(1, waiting=(0, 2, 3), left_at=job.now + 1800), 1798.0


def alone() -> tuple[Suspect, float | None]:
    job = Suspect()
    for rank in range(4):
        job.late(rank)
    return job.finds(), None


def limit() -> tuple[Suspect, float | None]:
    job = Suspect(hangs=HangTerms(rank_heartbeat_timeout=20.0))
    return job.late(1, moved="now", signs=("cpu",)).finds(), 21.0


def finished() -> tuple[Suspect, float | None]:
    job = three_wait(Suspect(), 0, 2)
    job.exit(3, step=10, code=0)
    return job.late(1).finds(1, waiting=(0, 2), left_at=job.now + 600), None


def exit_locked() -> tuple[Suspect, float | None]:
    return Suspect().late(1, "locked", where="exit"), None


def exit_working() -> tuple[Suspect, float | None]:
    return Suspect().late(1, "ended", where="exit", moved="now", signs=("network",)), None


def spared() -> tuple[Suspect, float | None]:
    job, _ = silent()
    job.report()
    job.take(HangDecided(at=job.at, rank=Rank(1), act=False))
    return job, None


ROWS: dict[str, tuple[str, Row]] = {
    "stopped": ("proven", stopped),
    "mismatch": ("proven", proven("mismatch")),
    "left": ("proven", proven("left", kind="ended", where="exit")),
    "circle": ("proven", proven("circle", kind="waits")),
    "locked": ("proven", proven("locked", kind="locked")),
    "gil": ("proven", proven("gil", kind="gil")),
    "silent": ("no sign of life", silent),
    "silent in a section": ("no sign of life", silent_in_a_section),
    "all silent": ("no sign of life", all_silent),
    "alive": ("signs of life", alive),
    "alone": ("none", alone),
    "limit": ("as set", limit),
    "finished": ("none", finished),
    "exit locked": ("proven", exit_locked),
    "exit": ("none", exit_working),
    "spared": ("none", spared),
}


def test_the_table_in_the_docs_has_these_rows_and_classes() -> None:
    rows = re.findall(r"^\| `([a-z ]+)`: [^|]+ \| ([a-z ]+) \|", DOCS.read_text(), re.MULTILINE)
    assert dict(rows) == {name: kind for name, (kind, _) in ROWS.items()}


@pytest.mark.parametrize("name", ROWS)
def test_what_is_done_about_each_kind_of_evidence(name: str) -> None:
    kind, row = ROWS[name]
    job, at_most = row()
    took = job.until(10.0) if at_most is None or at_most < 10 else None
    if took is None:
        took = job.until(FOREVER, every_s=5.0 if at_most is None or at_most > 100 else 0.5)
    if at_most is None:
        assert took is None, f"{name}: the round was broken after {took} s"
        return
    assert took is not None, f"{name}: nothing was done"
    assert at_most - 6.0 <= took <= at_most + 0.5
    (incident,) = job.job.incidents
    assert incident.kind == "hang"
    assert incident.rank == (None if name == "all silent" else 1)
    assert job.job.recovery.history.same == 0
    if kind == "proven":
        assert took <= 2.0


# ---- proof -------------------------------------------------------------------------------------


def test_a_proof_is_given_twice_before_it_is_acted_on() -> None:
    job, _ = proven("mismatch")()
    job.report()
    assert job.job.state.name == "running", "one look is none"
    assert job.until(1.0) is not None


def test_a_proof_against_another_rank_begins_again() -> None:
    job, _ = proven("mismatch")()
    job.report()
    job.finds(2, proof="mismatch")
    job.after(0.3).tick()
    assert job.job.state.name == "running"
    job.finds(2)
    assert job.until(20) is None, "the last look proves nothing"


def test_a_stopped_rank_that_is_continued_in_time_is_left_alone() -> None:
    job, _ = stopped()
    job.until(1.0)
    job.moves(1).report()
    assert job.until(30) is None


def test_a_stopped_rank_is_ended_even_if_no_agent_answers() -> None:
    job, _ = stopped()
    job.answers = False
    assert (job.until(5) or 9.0) <= 2.0


def test_the_evidence_is_kept_with_the_incident() -> None:
    job, _ = proven("circle")()
    job.until(2)
    kept = [action for action in job.orders if isinstance(action, KeepEvidence)]
    asked = [action for action in job.orders if isinstance(action, Diagnose)]
    assert kept == [KeepEvidence(examination=asked[-1].examination, incident=1)]
    stops = [action for action in job.orders if isinstance(action, StopWorkers)]
    assert {stop.grace_s for stop in stops} == {0.0}


# ---- doubt -------------------------------------------------------------------------------------


def test_a_rank_that_shows_a_sign_of_life_begins_its_silence_again() -> None:
    job, _ = silent()
    assert job.until(55) is None
    job.late(1, moved=job.now, since=job.now - 55)
    assert 59 <= (job.until(100) or 0) <= 61


def test_a_rank_that_makes_marks_is_alive_however_long_the_others_wait() -> None:
    """Rank 1 evaluates with a data loader: it is never late itself."""
    job = three_wait(Suspect()).finds(1, waiting=(0, 2, 3))
    assert job.until(1000, every_s=5.0) is None


def test_doubt_is_acted_on_with_a_fresh_verdict_only() -> None:
    job, _ = silent()
    job.until(40)
    job.answers = False
    assert job.until(100) is None
    job.answers = True
    assert job.until(20) is not None


def test_doubtful_hangs_never_end_the_job() -> None:
    job, _ = silent()
    for _ in range(40):
        assert job.until(4000, every_s=5.0) is not None
        job.all_ready()
        assert job.job.result is None
        job.after(1).start_all()
        job.after(1).step_all(10, steps=10)
        job.seen.clear()
        three_wait(job).late(1)


@pytest.mark.parametrize("floor_s", [2.0, 8.0])
def test_hang_after_is_the_floor_that_the_user_sets(floor_s: float) -> None:
    job = three_wait(Suspect(hangs=HangTerms(hang_after=floor_s))).late(1).finds(1, waiting=(0,))
    assert floor_s - 0.1 <= (job.until(30) or 0) <= floor_s + 0.6


def test_no_hang_detection_means_none() -> None:
    job = three_wait(Suspect(hangs=HangTerms(detect=False))).late(1, "stopped").finds(1)
    assert job.until(100) is None
    assert not any(isinstance(action, Diagnose) for action in job.orders)


def test_an_examination_that_got_lost_is_asked_for_again() -> None:
    job, _ = silent()
    job.answers = False
    job.report()
    job.until(6)
    assert sum(isinstance(action, Diagnose) for action in job.orders) == 2


def test_looks_become_rare() -> None:
    job, _ = alive()
    job.until(600)
    assert sum(isinstance(action, Diagnose) for action in job.orders) < 20


def test_a_script_that_pauses_all_the_time_is_not_examined_all_the_time() -> None:
    job = Suspect().finds(1)
    for _ in range(100):
        three_wait(job).late(1)
        job.until(1.0)
        job.seen.clear()
        job.after(0.1).report()
    assert job.job.state.name == "running"
    assert sum(isinstance(action, Diagnose) for action in job.orders) < 40


# ---- what is learnt ----------------------------------------------------------------------------


def limit_of(job: Suspect, place: str = PLACE, pause: str = "", highest: int = 10) -> float | None:
    return limits.silence_s(job.job.of(Hangs), place, pause, StepNumber(highest))


def test_a_place_that_paused_for_long_gets_several_times_that() -> None:
    job = Suspect()
    assert limit_of(job) == 60.0
    job.report(Pause(PLACE, 40.0))
    assert limit_of(job) == 200.0


def test_only_a_place_that_was_seen_often_gets_less_than_the_floor() -> None:
    job = Suspect()
    for _ in range(9):
        job.report(Pause(PLACE, 2.0))
    assert limit_of(job) == 60.0
    job.report(Pause(PLACE, 2.0))
    assert limit_of(job) == 30.0, "never below half the floor"
    job.report(Pause(PLACE, 9.0))
    assert limit_of(job) == 45.0


def test_a_true_hang_does_not_lengthen_the_deadline() -> None:
    """Five hangs in a row at other steps, each found as fast as the first."""
    job, _ = silent()
    for step in (20, 30, 40, 50, 60):
        assert 58 <= (job.until(400) or 0) <= 61
        job.all_ready()
        job.after(1).start_all()
        job.after(1).step_all(step, steps=step)
        job.seen.clear()
        three_wait(job).late(1)


def test_no_healthy_pause_costs_a_restart_twice() -> None:
    """Rank 1 pauses for 100 s at step 10, every time it comes there."""
    job, _ = silent()
    assert job.until(100) is not None
    job.all_ready()
    job.after(1).start_all()
    job.after(1).step_all(10, steps=10)
    job.seen.clear()
    three_wait(job).late(1)
    assert job.until(100) is None, "the same step came to the same place"
    job.seen.clear()
    job.report(Pause(PLACE, 100.0))
    job.step_all(500, steps=500)
    three_wait(job).late(1)
    assert job.until(400, every_s=1.0) is None, "it is known to take that long"


def test_a_section_has_as_long_as_it_was_seen_to_take() -> None:
    job = Suspect()
    assert limit_of(job, pause="upload") == 600.0
    paces = Paces(None, {"upload": 200.0})
    progress = (job.progress(0, 11),)
    job.take(Progress(at=job.at, node=NodeId("a"), round=job.round, ranks=progress, paces=paces))
    assert limit_of(job, pause="upload") == 1000.0


def test_what_is_remembered_outlives_rounds_and_reaches_the_next_job_of_that_name() -> None:
    job, _ = silent()
    job.report(Pause(PLACE, 3.0))
    job.until(100)
    memory = job.job.of(Hangs).memory
    assert memory.places[PLACE].seen == 1
    assert memory.places[PLACE].grant_s == 240.0
    other = Suspect()
    other.take(HangsRemembered(at=other.at, memory=memory))
    assert limit_of(other) == 240.0
    assert limit_of(other, highest=11) == 60.0, "the step is past"


def test_memory_is_bounded() -> None:
    job = Suspect()
    for number in range(2 * PLACES_AT_MOST):
        job.report(Pause(f"train.py:{number} (main)", 1.0 + number))
    places = job.job.of(Hangs).memory.places
    assert len(places) == PLACES_AT_MOST
    assert "train.py:511 (main)" in places, "the longest are kept"


# ---- a person decides --------------------------------------------------------------------------


def test_now_ends_the_rank_at_once() -> None:
    job, _ = alive()
    job.report()
    actions = job.take(HangDecided(at=job.at, rank=Rank(1), act=True))
    assert "StopWorkers" in kinds(actions)
    assert job.job.incidents[0].rank == 1
    assert "holdfast hang" in job.job.incidents[0].detail


def test_never_is_remembered_with_the_place() -> None:
    job, _ = spared()
    assert limit_of(job) is None
    assert job.job.of(Hangs).memory.places[PLACE].trusted


def test_a_decision_about_a_rank_that_is_not_there_is_refused() -> None:
    job = Suspect()
    before = encoded(job.job)
    assert job.take(HangDecided(at=job.at, rank=Rank(99), act=True)) == []
    assert encoded(job.job) == before


# ---- what people see ---------------------------------------------------------------------------


def test_the_suspicion_is_in_the_status_at_once_and_in_the_terminal_after_ten_seconds() -> None:
    job, _ = alive()
    job.report()
    seen = report.suspicion(job.job, job.at)
    assert seen is not None
    assert (seen.rank, seen.place, seen.waiting, seen.proof) == (1, PLACE, [0, 2, 3], None)
    assert seen.acts_in_s == pytest.approx(1797.0)
    job.until(9)
    assert job.told == []
    job.until(2)
    (line,) = job.told
    assert line.startswith("rank 1 has been in eval.py:33 (upload) for 10 s, 3 ranks wait; ")
    assert "signs of life: cpu" in line
    assert line.endswith("proven: no")
    job.seen.clear()
    job.report()
    assert job.told[1] == "rank 1 has moved on by itself after 11 s"
    assert report.suspicion(job.job, job.at) is None


def test_a_pause_that_people_know_is_not_told_again() -> None:
    job, _ = alive()
    job.finds(1, waiting=(0, 2, 3), place=PLACE)
    job.until(30)
    job.seen.clear()
    job.report()
    assert len(job.told) == 2
    three_wait(job).late(1, moved="now", signs=("cpu",))
    job.until(30)
    assert len(job.told) == 2
    job.until(30)
    assert len(job.told) == 3, "it takes longer than ever"


def test_a_job_that_moves_shows_no_suspicion() -> None:
    assert report.suspicion(Suspect().job, Time(0.0)) is None


# ---- the end of a process ----------------------------------------------------------------------


def test_a_process_that_hangs_on_its_way_out_is_ended_and_its_rank_has_finished() -> None:
    job, _ = exit_locked()
    actions = job.report()
    assert EndProcess(node=NodeId("a"), round=job.round, rank=Rank(1)) in actions
    (incident,) = job.job.incidents
    assert (incident.kind, incident.rank) == ("ending", 1)
    assert "after its script has ended" in incident.signature
    job.seen.clear()
    for rank in range(4):
        job.exit(rank, step=10, code=0)
    assert job.job.result is not None
    assert job.job.result.code == 0


# ---- what is ignored ---------------------------------------------------------------------------


def test_word_of_another_round_another_node_or_a_stranger_is_ignored() -> None:
    job = Suspect()
    before = encoded(job.job)
    one = (Stall(Rank(1), "stopped", "between", 5.0),)
    for node, round in (("a", 0), ("a", 2), ("c", 1)):
        number = RoundNumber(round)
        told = RanksStalled(at=job.at, node=NodeId(node), round=number, stalls=one)
        assert job.take(told) == []
    assert encoded(job.job) == before
    foreign = (Stall(Rank(2), "stopped", "", 5.0), Stall(Rank(77), "stopped", "", 5.0))
    told = RanksStalled(at=job.at, node=NodeId("a"), round=job.round, stalls=foreign)
    assert job.take(told) == [], "ranks of another node"


def test_word_that_waited_for_a_coordinator_that_was_gone_is_ignored() -> None:
    job, _ = stopped()
    one = (Stall(Rank(1), "stopped", "between", 5.0),)
    old = RanksStalled(at=job.at, node=NodeId("a"), round=job.round, stalls=one)
    job.after(60)
    assert job.take(old) == []


def test_a_verdict_that_comes_late_changes_nothing() -> None:
    job, _ = silent()
    job.answers = False
    (asked,) = [action for action in job.report() if isinstance(action, Diagnose)]
    job.seen.clear()
    job.report()
    job.answers = True
    before = encoded(job.job)
    job.finds(1, proof="circle")
    assert job._verdict(asked) == []
    assert encoded(job.job) == before


def test_a_suspicion_survives_the_journal() -> None:
    job, _ = silent()
    job.until(30)
    job.job = revived(job.job)
    jobs.validate(job.job)
    assert 29 <= (job.until(60) or 0) <= 31


KINDS: tuple[StallKind, ...] = ("stopped", "gil", "locked", "waits", "ended", "elsewhere")


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(KINDS),
            st.floats(0, 100),
            st.booleans(),
            st.sampled_from((None, "circle", "gil")),
        ),
        max_size=12,
    )
)
def test_a_rank_that_shows_life_is_never_ended_without_a_proof(
    history: list[tuple[int, StallKind, float, bool, Any]],
) -> None:
    job = Suspect()
    proofs = False
    for rank, kind, still_s, clears, proof in history:
        if clears:
            job.seen.clear()
        moved = "now" if kind in ("elsewhere", "ended") else job.now - min(still_s, 50.0)
        job.late(rank, kind, moved=moved, since=job.now - still_s)
        silent_all = all(seen["moved"] != "now" for seen in job.seen.values())
        proofs = proofs or proof is not None or kind == "stopped" or silent_all
        job.finds(rank, proof=proof, waiting=())
        job.until(3.0)
        if job.job.state.name != "running":
            assert proofs
            return


def test_places_without_a_name_are_not_remembered() -> None:
    job = Suspect()
    job.report(Pause("", 5.0))
    assert job.job.of(Hangs).memory == Memory()
    assert PlaceMemory() == PlaceMemory(seen=0)
