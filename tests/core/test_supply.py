"""Supply: positions get requests, lose them and get others, whatever was missed, doubled or late."""

from __future__ import annotations

import pytest
from driver import Driver

from holdfast.core.supply import rules
from holdfast.core.supply.state import WantedNode
from holdfast.core.transitions import JOIN_LIMIT_S
from holdfast.messages.actions import Answered, AnyAction, CarryOutPlan, Finish
from holdfast.messages.events import (
    Asked,
    CoordinatorRestarted,
    JobRequeued,
    JobStopAsked,
    NodesSighted,
    ScaleAsked,
    SupplierJoined,
)
from holdfast.messages.records import Terms
from holdfast.messages.requests import ChangeNodes, Denied, Granted
from holdfast.messages.supply import ExitReason, SeenStatus, Sighting, SupplyPlan, SupplyTerms
from holdfast.messages.units import Rank


class Supplied(Driver):
    """A job whose nodes come from a platform."""

    def __init__(self, **terms: object) -> None:
        super().__init__(**terms)
        self.plans: list[SupplyPlan] = []
        self.take_in(SupplierJoined(at=self.at, platform="test"))
        self.tick_all()

    def take_in(self, event: object) -> list[AnyAction]:
        actions = self.take(event)  # type: ignore[arg-type]
        self.plans += [one.plan for one in actions if isinstance(one, CarryOutPlan)]
        return actions

    def tick_all(self) -> list[AnyAction]:
        """Let the plan that is due be made."""
        actions = self.tick()
        self.plans += [one.plan for one in actions if isinstance(one, CarryOutPlan)]
        return actions

    def see(
        self,
        request: str,
        status: SeenStatus,
        reason: ExitReason | None = None,
        code: int | None = None,
    ) -> list[AnyAction]:
        sighting = Sighting(request=request, status=status, reason=reason, code=code)
        actions = self.take_in(NodesSighted(at=self.at, sightings=(sighting,)))
        return [*actions, *self.tick_all()]

    def asked(self) -> list[str]:
        """All requests of all plans, in their order."""
        return [wish.id for plan in self.plans for wish in plan.ask if not plan.whole]

    def released(self) -> list[str]:
        return [request for plan in self.plans for request in plan.release]

    def ask(self, rank: int, request: ChangeNodes) -> list[AnyAction]:
        """A script asks for something."""
        asked = Asked(
            at=self.at,
            node=self.node_of(rank),
            round=self.round,
            rank=Rank(rank),
            channel=0,
            number=1,
            request=request,
        )
        return self.take_in(asked)

    def position(self, number: int) -> WantedNode:
        return self.job.supply.positions[number]

    def arrive(self, request: str) -> list[AnyAction]:
        """A request's node joins."""
        actions = self.join(f"node-{request}", host=f"h-{request}", request=request)
        return [*actions, *self.tick_all()]


def test_the_job_asks_for_as_many_nodes_as_its_largest_world_and_its_spares_need() -> None:
    job = Supplied(min_nodes=2, max_nodes=3, spares=1)
    assert job.asked() == ["0-1", "1-1", "2-1", "3-1"]
    assert len([plan for plan in job.plans if plan.ask]) == 1


def test_a_node_that_somebody_started_by_hand_is_not_asked_for() -> None:
    job = Supplied(min_nodes=1, max_nodes=2)
    job.join("by-hand", host="h")
    job.tick_all()
    assert job.asked() == ["0-1", "1-1"]
    assert job.released() == ["1-1"]


@pytest.mark.parametrize("reason", ["killed", "preempted", "evicted", "deleted", "lost"])
def test_what_says_nothing_about_the_node_is_asked_for_again_however_often(
    reason: ExitReason,
) -> None:
    job = Supplied(min_nodes=1, max_nodes=1)
    for attempt in range(1, 10):
        job.see(f"0-{attempt}", "running")
        job.see(f"0-{attempt}", "failed", reason)
        job.after(120).tick_all()
        assert job.position(0).attempt == attempt + 1
        assert job.position(0).spent == 0


def test_a_budget_is_spent_by_failures_and_then_the_position_is_given_up() -> None:
    job = Supplied(min_nodes=1, max_nodes=2, supply=SupplyTerms(relaunches=2))
    job.arrive("1-1")
    for attempt in (1, 2, 3):
        job.see(f"0-{attempt}", "failed", code=9)
        job.after(120).tick_all()
    assert job.asked() == ["0-1", "1-1", "0-2", "0-3"]
    assert "2 relaunches allowed and used" in job.job.supply.given_up[0]
    assert job.job.result is None, "it trains on with the other"


def test_memory_is_doubled_up_to_its_limit_and_then_the_position_is_given_up() -> None:
    terms = SupplyTerms(memory_mib=4096, memory_limit_mib=16_384, relaunches=9)
    job = Supplied(min_nodes=1, max_nodes=2, supply=terms)
    job.arrive("1-1")
    for attempt in (1, 2, 3):
        job.see(f"0-{attempt}", "failed", "oom")
        job.after(120).tick_all()
    wishes = [wish for plan in job.plans for wish in plan.ask if wish.position == 0]
    assert [wish.memory_mib for wish in wishes] == [4096, 8192, 16_384]
    assert "ran out at 16384 MiB" in job.job.supply.given_up[0]


def test_a_node_that_cannot_even_start_ends_the_job_with_the_platforms_words() -> None:
    job = Supplied(min_nodes=1, max_nodes=1)
    sighting = Sighting(request="0-1", status="failed", code=127, detail="holdfast: not found")
    job.take_in(NodesSighted(at=job.at, sightings=(sighting,)))
    assert job.job.result is not None
    assert job.job.result.code == 93
    assert "holdfast: not found" in job.job.result.reason


def test_the_loss_of_a_critical_position_for_good_ends_the_job() -> None:
    job = Supplied(min_nodes=1, max_nodes=2, supply=SupplyTerms(critical=(1,)))
    job.arrive("0-1")
    job.see("1-1", "failed", "fatal")
    assert job.job.result is not None
    assert "position 1 is critical" in job.job.result.reason


def test_all_that_is_lost_together_is_asked_for_in_one_plan() -> None:
    job = Supplied(min_nodes=1, max_nodes=1000)
    before = len(job.plans)
    gone = tuple(Sighting(request=f"{n}-1", status="deleted") for n in range(1000))
    job.take_in(NodesSighted(at=job.at, sightings=gone))
    job.tick_all()
    (plan,) = job.plans[before:]
    assert len(plan.ask) == 1000


def test_a_sighting_that_comes_again_or_late_changes_nothing() -> None:
    job = Supplied(min_nodes=1, max_nodes=1)
    job.see("0-1", "running")
    job.see("0-1", "failed", "killed")
    for status in ("pending", "running", "failed"):
        job.see("0-1", status)  # type: ignore[arg-type]
    assert job.asked() == ["0-1", "0-2"]


def test_a_whole_list_shows_what_was_missed() -> None:
    job = Supplied(min_nodes=1, max_nodes=2)
    job.see("0-1", "running")
    listed = (Sighting(request="1-1", status="running"),)
    job.take_in(NodesSighted(at=job.at, sightings=listed, whole=True))
    job.tick_all()
    assert job.asked() == ["0-1", "1-1", "0-2"]


def test_a_request_that_was_never_seen_is_not_gone_because_a_list_lacks_it() -> None:
    job = Supplied(min_nodes=1, max_nodes=1)
    job.take_in(NodesSighted(at=job.at, sightings=(), whole=True))
    job.tick_all()
    assert job.asked() == ["0-1"]


def test_what_nobody_wants_is_released() -> None:
    job = Supplied(min_nodes=1, max_nodes=1)
    job.see("7-1", "running")
    assert job.released() == ["7-1"]


def test_a_node_whose_request_was_given_up_is_told_to_leave() -> None:
    job = Supplied(min_nodes=1, max_nodes=1)
    job.see("0-1", "running")
    job.see("0-1", "deleted")
    actions = job.arrive("0-1")
    (finish,) = [one for one in actions if isinstance(one, Finish)]
    assert "another has its position" in finish.reason


def test_a_supplier_that_comes_back_is_told_all_that_is_wanted() -> None:
    job = Supplied(min_nodes=1, max_nodes=3)
    job.see("0-1", "running")
    job.take_in(SupplierJoined(at=job.at, platform="test"))
    whole = job.plans[-1]
    assert whole.whole
    assert {wish.id: wish.seen for wish in whole.ask} == {"0-1": True, "1-1": False, "2-1": False}


def test_a_group_is_started_anew_when_one_of_it_is_lost() -> None:
    job = Supplied(min_nodes=2, max_nodes=4, supply=SupplyTerms(group=2))
    for number in range(4):
        job.arrive(f"{number}-1")
    job.see("1-1", "failed", "hardware")
    assert job.asked()[4:] == ["1-2", "0-2"]
    assert job.position(2).attempt == 1


def test_scaling_down_releases_what_does_not_run_first() -> None:
    job = Supplied(min_nodes=1, max_nodes=4)
    job.arrive("0-1")
    job.arrive("2-1")
    job.take_in(ScaleAsked(at=job.at, min_nodes=1, max_nodes=2))
    job.tick_all()
    assert job.released() == ["3-1", "1-1"]


def test_scaling_up_asks_for_the_difference() -> None:
    job = Supplied(min_nodes=1, max_nodes=1)
    job.take_in(ScaleAsked(at=job.at, min_nodes=2, max_nodes=3))
    job.tick_all()
    assert job.asked() == ["0-1", "1-1", "2-1"]


def test_too_few_nodes_for_too_long_end_the_job_with_what_is_missing() -> None:
    job = Supplied(min_nodes=2, max_nodes=3)
    job.arrive("0-1")
    sighting = Sighting(request="1-1", status="pending", detail="0/3 nodes have a GPU left")
    job.take_in(NodesSighted(at=job.at, sightings=(sighting,)))
    job.after(901).tick_all()
    assert job.released() == ["2-1"], "first it asks for its minimum only"
    assert job.job.result is None
    job.after(901).tick_all()
    assert job.job.result is not None
    assert job.job.result.code == 75
    assert "0/3 nodes have a GPU left" in job.job.result.reason


def test_a_request_that_does_not_come_is_reported_while_training_goes_on() -> None:
    job = Supplied(min_nodes=1, max_nodes=2)
    job.arrive("0-1")
    job.after(901).tick_all()
    job.tick_all()
    notes = [one for one in job.job.incidents if one.kind == "supply"]
    assert len(notes) == 1
    assert "1-1" in notes[0].signature
    assert job.job.result is None


def test_a_node_that_is_away_for_too_long_is_lost_and_replaced() -> None:
    job = Supplied(min_nodes=1, max_nodes=2)
    job.arrive("0-1")
    job.arrive("1-1")
    job.end_lease("node-1-1")
    job.tick_all()
    assert job.asked() == ["0-1", "1-1"]
    job.after(31).tick_all()
    assert job.asked() == ["0-1", "1-1", "1-2"]
    assert job.released() == ["1-1"]


def test_a_position_that_is_wanted_again_never_has_a_name_twice() -> None:
    """Its first node may still be there, or be remembered by the platform as one that is over."""
    job = Supplied(min_nodes=1, max_nodes=2)
    for most in (1, 2):
        job.take_in(ScaleAsked(at=job.at, min_nodes=1, max_nodes=most))
        job.tick_all()
    assert job.asked() == ["0-1", "1-1", "1-2"]


def test_what_was_given_up_is_asked_for_under_another_name_when_the_job_is_scaled() -> None:
    job = Supplied(min_nodes=1, max_nodes=2)
    job.see("1-1", "failed", reason="fatal")
    job.take_in(ScaleAsked(at=job.at, min_nodes=1, max_nodes=2))
    job.tick_all()
    assert job.asked() == ["0-1", "1-1", "1-2"]


def test_a_node_that_was_told_to_leave_and_is_never_heard_of_again_is_released() -> None:
    """A spare that died: once it was sent away it is no member, and no lease of it ends."""
    job = Supplied(min_nodes=1, max_nodes=1, spares=1)
    job.arrive("0-1")
    job.arrive("1-1")
    job.take_in(ScaleAsked(at=job.at, min_nodes=1, max_nodes=1, spares=0))
    job.tick_all()
    job.after(1).end_lease("node-1-1")
    job.tick_all()
    assert job.released() == []
    job.after(60).tick_all()
    job.tick_all()
    assert job.released() == ["1-1"]


def test_two_agents_that_come_for_one_given_up_request_are_both_told_to_leave() -> None:
    job = Supplied(min_nodes=1, max_nodes=1)
    job.see("0-1", "deleted")
    for agent in ("a", "b"):
        told = job.join(agent, host="h", request="0-1")
        assert [type(one) for one in told if isinstance(one, Finish)] == [Finish]
        job.tick_all()
    for agent in ("a", "b"):
        job.left(agent)
        job.tick_all()
    assert job.released() == ["0-1"]


def test_nodes_of_a_platform_that_form_no_segment_are_not_waited_for_without_end() -> None:
    job = Supplied(min_nodes=2, max_nodes=2, segment=2)
    for number, domain in enumerate("ab"):
        job.join(f"n{number}", host=f"h{number}", domain=domain, request=f"{number}-1")
    job.tick_all()
    job.after(JOIN_LIMIT_S + 1.0).tick_all()
    assert job.job.result is not None
    assert "segments" in job.job.result.reason


def test_an_agent_that_is_started_anew_for_a_request_takes_the_place_of_the_one_before() -> None:
    job = Supplied(min_nodes=1, max_nodes=2)
    job.arrive("0-1")
    job.join("another", host="h-0-1", request="0-1")
    assert job.position(0).node == "another"
    job.end_lease("node-0-1")
    job.tick_all()
    assert job.asked() == ["0-1", "1-1"]
    assert job.position(0).away_since is None


def test_a_job_that_is_queued_anew_asks_for_all_nodes_again_under_other_names() -> None:
    job = Supplied(min_nodes=1, max_nodes=2)
    job.arrive("0-1")
    job.see("1-1", "failed", reason="fatal")
    job.take_in(JobRequeued(at=job.at, since=job.at))
    job.take_in(SupplierJoined(at=job.at, platform="test"))
    job.tick_all()
    assert job.asked() == ["0-1", "1-1", "0-2", "1-2"]
    assert not job.job.supply.given_up


def test_a_host_that_broke_is_avoided_from_then_on() -> None:
    job = Supplied(min_nodes=1, max_nodes=2)
    sighting = Sighting(
        request="0-1", status="failed", reason="hardware", host="bad", detail="Xid 79"
    )
    job.take_in(NodesSighted(at=job.at, sightings=(sighting,)))
    job.tick_all()
    (cordon,) = job.plans[-1].avoid
    assert (cordon.host, "Xid 79" in cordon.why) == ("bad", True)


def test_when_the_job_ends_nothing_of_it_stays_with_the_platform() -> None:
    job = Supplied(min_nodes=1, max_nodes=2)
    job.arrive("0-1")
    actions = job.take_in(JobStopAsked(at=job.at, reason="enough", code=75))
    plans = [one.plan for one in actions if isinstance(one, CarryOutPlan)]
    assert [plan.release for plan in plans] == [("1-1",)]
    closed = job.left("node-0-1")
    final = [one.plan for one in closed if isinstance(one, CarryOutPlan)][-1]
    assert final.final


def test_the_supplier_of_a_coordinator_that_died_is_away_until_it_is_back() -> None:
    job = Supplied(min_nodes=1, max_nodes=1)
    assert job.job.supply.connected
    job.take_in(CoordinatorRestarted(at=job.at))
    assert not job.job.supply.connected
    job.take_in(SupplierJoined(at=job.at, platform="test"))
    assert job.job.supply.connected


# ---- another number of nodes ---------------------------------------------------------------------


@pytest.mark.parametrize(("fewest", "most"), [(0, 4), (5, 4), (0, 0)])
def test_impossible_numbers_are_refused(fewest: int, most: int) -> None:
    assert f"{fewest}:{most}" in rules.refusal(Terms(max_nodes=2), fewest, most)


def test_numbers_without_a_whole_unit_between_them_are_refused() -> None:
    terms = Terms(min_nodes=2, max_nodes=4, node_unit=2)
    assert "multiple of 2" in rules.refusal(terms, 3, 3)
    assert rules.refusal(terms, 3, 5) == ""


def test_a_script_may_ask_for_more_nodes_and_is_answered() -> None:
    job = Supplied(min_nodes=1, max_nodes=1)
    job.arrive("0-1")
    actions = job.ask(0, ChangeNodes(min_nodes=1, max_nodes=2, spares=1))
    assert [one.answer for one in actions if isinstance(one, Answered)] == [Granted()]
    job.tick_all()
    assert job.asked() == ["0-1", "1-1", "2-1"]


def test_a_script_that_asks_for_what_cannot_be_is_told_why_and_nothing_changes() -> None:
    job = Supplied(min_nodes=1, max_nodes=1)
    job.arrive("0-1")
    (told,) = job.ask(0, ChangeNodes(min_nodes=3, max_nodes=2))
    assert isinstance(told, Answered)
    assert isinstance(told.answer, Denied)
    assert "3:2" in told.answer.detail
    job.tick_all()
    assert job.asked() == ["0-1"]


# ---- nodes that are told to leave ----------------------------------------------------------------


def test_a_node_that_leaves_is_replaced_although_the_others_are_too_few() -> None:
    job = Supplied(min_nodes=2, max_nodes=2)
    job.arrive("0-1")
    job.arrive("1-1")
    job.leaving("node-1-1")
    job.all_ready()
    job.left("node-1-1")
    job.tick_all()
    assert job.job.result is None
    assert job.asked() == ["0-1", "1-1", "1-2"]


def test_a_node_of_an_allocation_that_leaves_speaks_for_all_of_it() -> None:
    job = Supplied(min_nodes=2, max_nodes=2)
    job.take_in(SupplierJoined(at=job.at, platform="slurm", together=True))
    job.arrive("0-1")
    job.arrive("1-1")
    job.leaving("node-1-1")
    assert job.job.result is not None
    assert job.job.result.code == 75


def test_a_position_that_was_given_up_is_not_missing_from_the_minimum() -> None:
    job = Supplied(
        min_nodes=2, max_nodes=4, supply=SupplyTerms(relaunches=0, memory_mib=1, pending_s=20.0)
    )
    job.see("0-1", "failed", "hardware")
    assert list(job.job.supply.given_up) == [0]
    for _ in range(3):
        job.after(25).tick_all()
    assert job.job.supply.at_least
    assert job.job.supply.wanted(job.job) == 2
