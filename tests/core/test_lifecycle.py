"""One lifecycle: every machine hears of the same moments, and the job's states are types."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import states_table
from driver import OPENED_AT, Driver, kinds
from msgspec import field

from holdfast.core import job as jobs
from holdfast.core.decisions import Note, Refused
from holdfast.core.job import MACHINES, Job
from holdfast.core.machine import Effects, Machine, on
from holdfast.core.states import ALWAYS, FOLLOWS, Gathering, Running
from holdfast.core.transitions import enter
from holdfast.core.view import View
from holdfast.messages.events import (
    AnyEvent,
    CoordinatorRestarted,
    JobOpened,
    JobRequeued,
    NodeJoined,
    NodeLeaving,
    NodeResumed,
    NodeWarm,
    StreamEnded,
)
from holdfast.messages.records import Terms
from holdfast.messages.units import NodeId, Time

ROOMS = Path(jobs.__file__).parent


def _heard(name: str) -> Any:
    def hear(self: Stranger, job: View, *arguments: Any) -> Effects:
        self.heard.append(name)
        return ()

    hear.__name__ = name
    return hear


class Stranger(Machine):
    """A machine from outside the package, which does nothing but listen."""

    heard: list[str] = field(default_factory=list)


MOMENTS = [
    name
    for name, one in vars(Machine).items()
    if not name.startswith("_")
    and name not in ("opened", "deadline", "validate", "part_of", "withheld", "holds_round")
]
for moment in MOMENTS:
    setattr(Stranger, moment, _heard(moment))


class Told(Driver):
    """A job with a machine of the test's own in it."""

    def __init__(self, *machines: type[Machine], **terms: Any) -> None:
        super().__init__(**terms)
        opening = self.history[0][0]
        assert isinstance(opening, JobOpened)
        self.job = jobs.opened(opening, (*MACHINES, *machines))

    @property
    def heard(self) -> list[str]:
        stranger = self.job.of(Stranger)
        heard, stranger.heard = stranger.heard, []
        return [name for name in heard if name not in ("before_round", "round_awaited")]


def test_a_machine_from_outside_hears_of_every_moment_in_order() -> None:
    driver = Told(Stranger, min_nodes=2, max_nodes=2)
    driver.join("a", host="ha")
    driver.join("b", host="hb")
    assert driver.heard == ["node_joined", "node_joined", "round_began"]
    driver.take(NodeWarm(at=driver.at, node=NodeId("a")))
    assert driver.heard == ["node_warmed"]
    driver.after(1).start(0)
    driver.step(0, 1)
    assert driver.heard == ["rank_started", "rank_stepped"]
    driver.take(StreamEnded(at=driver.at, node=NodeId("a")))
    driver.take(NodeResumed(at=driver.at, node=NodeId("a"), round=driver.round, busy=True))
    driver.take(CoordinatorRestarted(at=driver.at))
    for node in "ab":
        driver.resume(node, driver.round, busy=True)
    driver.tick()
    resumed = ["node_resumed", "node_resumed"]
    assert driver.heard == ["node_resumed", "coordinator_restarted", *resumed, "tick"]
    driver.exit(1, signal=9)
    assert driver.heard == ["rank_exited", "round_ended"]
    driver.all_ready()
    assert driver.heard == ["round_stopped", "round_began"]
    driver.leaving("b")
    assert driver.heard == ["job_ended"], "below the minimum, it ends"
    driver.left("a")
    driver.left("b")
    assert driver.heard == ["node_lost", "node_lost", "job_closed"]
    driver.after(60).take(JobRequeued(at=driver.at, since=driver.at))
    assert driver.heard == ["job_requeued", "round_ended", "round_stopped"]


def test_no_moment_is_left_out_of_that_story() -> None:
    told = {"request_held", "node_sent_away", "before_round", "round_awaited"}
    source = Path(__file__).read_text()
    assert all(
        name in told or f'"{name}"' in source.split("def test_no_moment")[0] for name in MOMENTS
    )


def test_an_awaited_round_and_a_node_that_is_sent_away_are_moments_too() -> None:
    driver = Told(Stranger, min_nodes=1, max_nodes=2)
    driver.join("a", host="ha")
    assert "round_awaited" in driver.job.of(Stranger).heard
    driver.join("b", host="hb")
    assert driver.heard[-1:] == ["round_began"]
    driver.leaving("a")
    assert driver.heard == ["round_ended", "node_sent_away"]


class Alarm(Machine):
    """A machine that decides: after each join, it wants an incident."""

    def node_joined(self, job: View, event: NodeJoined, now: Time) -> Effects:
        round = job.membership.round
        return [Note(kind="unfit", signature="seen", action="", round=round, step=job.highest)]

    def deadline(self, job: View) -> Time | None:
        return Time(OPENED_AT + 7)

    def validate(self, job: View) -> None:
        assert job.membership.count() < 3, "the alarm's own invariant"


def test_what_a_new_machine_decides_is_carried_out() -> None:
    driver = Told(Alarm, max_nodes=3, min_nodes=3)
    driver.join("a")
    assert [incident.signature for incident in driver.job.incidents] == ["seen"]
    assert jobs.deadline(driver.job) == OPENED_AT + 7
    driver.join("b")
    with pytest.raises(AssertionError, match="the alarm's own invariant"):
        driver.join("c")


class Doorman(Machine):
    @on(NodeWarm, Gathering, refusal="it is too late")
    def on_warm(self, job: View, event: NodeWarm, now: Time) -> Effects | Refused:
        return Refused(reason="never")


def test_a_new_machine_may_handle_an_event_that_others_handle() -> None:
    driver = Told(Doorman)
    driver.join("a")
    driver.take(NodeWarm(at=driver.at, node=NodeId("a")))
    assert driver.job.refused == {}, "membership took it"


# ---- what does not fit -------------------------------------------------------------------------


def test_an_event_that_does_not_fit_is_refused_by_name_and_counted() -> None:
    driver = Driver().running("a", step=3)
    for _ in range(2):
        assert driver.take(StreamEnded(at=driver.at, node=NodeId("stranger"))) == []
    driver.leaving("stranger")
    assert driver.job.refused == {
        "StreamEnded: the node is not a member": 2,
        "NodeLeaving: the node is not a member": 1,
    }


def test_reasons_name_no_round_rank_or_node_so_that_they_can_be_counted() -> None:
    for path in ROOMS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Refused":
                (reason,) = [word.value for word in node.keywords]
                assert isinstance(reason, ast.Constant), f"{path}: a reason that varies"


def test_a_job_that_is_open_refuses_to_be_opened() -> None:
    driver = Driver()
    assert driver.take(JobOpened(at=driver.at, job="other", terms=Terms())) == []
    assert sum(driver.job.refused.values()) == 1


# ---- states ------------------------------------------------------------------------------------


def test_the_table_of_states_and_events_is_the_codes() -> None:
    assert states_table.PAGE.read_text() == states_table.page(), "run tests/core/states_table.py"


def test_every_event_has_a_row_and_every_handler_an_event_of_the_vocabulary() -> None:
    events = {event.__name__ for event in get_args(AnyEvent)}
    assert {event for event, _ in states_table.table()} == events
    assert {kind.__name__ for kind in Driver().job.listeners} <= events


def test_a_job_has_few_fields_and_none_that_another_state_makes_meaningless() -> None:
    assert len(Job.__struct_fields__) <= 15
    assert "None" not in str([f.type for f in msgspec.structs.fields(Job)])


def test_only_the_transitions_that_are_drawn_are_taken() -> None:
    driver = Driver().running("a", step=3)
    assert isinstance(driver.job.state, Running)
    with pytest.raises(AssertionError, match="Running to Gathering"):
        enter(driver.job, Gathering())
    assert set(FOLLOWS) == set(ALWAYS)


# ---- who knows whom ----------------------------------------------------------------------------

SHARED = {path.stem for path in ROOMS.glob("*.py")} - {
    "job",
    "state",
    "transitions",
    "report",
    "replay",
}


@pytest.mark.parametrize(
    "room", sorted(p.name for p in ROOMS.iterdir() if (p / "events.py").exists())
)
def test_a_machine_imports_no_other_machine(room: str) -> None:
    for path in (ROOMS / room).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                if name.startswith("holdfast.core."):
                    part = name.split(".")[2]
                    assert part in {room, *SHARED}, f"{path}: imports {name}"


def test_one_more_machine_is_one_more_entry() -> None:
    """The tuple is the only place outside their rooms where all machines are named."""
    named = {}
    for path in ROOMS.glob("*.py"):
        text = path.read_text()
        named[path.stem] = [machine for machine in MACHINES if machine.__name__ in text]
    everywhere = [stem for stem, machines in named.items() if len(machines) == len(MACHINES)]
    assert everywhere == ["job"]


def test_actions_name_themselves_and_the_event_that_they_follow_from() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=3)
    before = driver.job.events
    event = NodeLeaving(at=driver.at, node=NodeId("a"), reason="preempted", code=75)
    finish, other = jobs.handle(driver.job, event, driver.at)
    assert (finish.id, finish.cause) == (f"{before + 1}.0", str(before + 1))
    assert other.id == f"{before + 1}.1"
    assert kinds([finish]) == ["Finish"]
