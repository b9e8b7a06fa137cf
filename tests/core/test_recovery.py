"""The rules about faults, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from driver import WAKE, raised
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.core import faults
from holdfast.core.faults import Fault
from holdfast.core.ladder import Again, Resources, Rung, Stop
from holdfast.core.recovery import rules
from holdfast.core.recovery.rules import FaultHistory
from holdfast.messages.events import WorkerExited
from holdfast.messages.records import Raised, RankProgress
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

NODE = NodeId("n")


def died(step: int = 5, at: float = 1.0, rank: int = 0, **how: Any) -> Fault:
    event = WorkerExited(
        at=Time(at),
        node=NODE,
        round=RoundNumber(1),
        rank=Rank(rank),
        progress=RankProgress(rank=Rank(rank)),
        **how,
    )
    return faults.death(event, StepNumber(step))


def lost() -> Fault:
    return faults.lost_node(NODE, RoundNumber(1), StepNumber(5), "its stream ended", Time(9))


ALL_THERE = Resources(seats=2, survivors=2, formable=2, needed=2)


def judge(
    history: FaultHistory,
    fault: Fault,
    highest: int = 5,
    limit: int | None = None,
    comparable: bool = True,
) -> Rung:
    rung = rules.judge(history, fault, ALL_THERE, StepNumber(highest), limit, comparable)
    rules.validate(history, limit)
    return rung


def again(rung: Rung) -> bool:
    return isinstance(rung, Again)


KINDS = [
    ({"signal": 9}, "signal", "killed by SIGKILL"),
    ({"signal": 9, "oom": True}, "oom", "killed by the out-of-memory killer"),
    ({"signal": 11}, "signal", "killed by SIGSEGV"),
    ({"signal": 64}, "signal", "killed by SIGRTMAX"),
    ({"signal": 63}, "signal", "killed by signal 63"),
    ({"code": 3}, "exit", "exit code 3"),
    ({"code": 1, "raised": raised()}, "exception", "ValueError at train.py:3"),
]


@pytest.mark.parametrize(("how", "kind", "signature"), KINDS)
def test_a_death_is_named_after_how_it_came(how: dict[str, Any], kind: str, signature: str) -> None:
    fault = died(**how)
    assert (fault.kind, fault.signature) == (kind, signature)


def test_the_detail_is_the_traceback_and_without_one_the_end_of_the_log() -> None:
    assert died(code=1, raised=raised(), log_tail="tail").detail == "ValueError: no"
    assert died(code=1, log_tail="tail").detail == "tail"


@pytest.mark.parametrize(
    "message",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer",
        "NCCL error: unhandled system error",
        "Connection reset by peer",
        "Broken pipe",
        "socket timeout",
    ],
)
def test_a_broken_collective_is_taken_for_the_wake_of_another_death(message: str) -> None:
    assert died(code=1, raised=raised("RuntimeError", message)).wake
    assert not died(code=1, raised=raised("ValueError", "x is 3")).wake


def test_a_distributed_error_is_taken_for_the_wake_of_another_death() -> None:
    assert died(code=1, raised=raised("DistBackendError", "x")).wake


def test_a_refused_connection_of_the_scripts_own_is_no_broken_collective() -> None:
    refused = raised("ConnectionRefusedError", "[Errno 111] Connection refused")
    assert not died(code=1, raised=refused).wake
    passed = Raised(
        type="ConnectionResetError",
        message="Connection reset by peer",
        where="train.py:3",
        traceback='File "/lib/torch/distributed/rendezvous.py", line 8',
    )
    assert died(code=1, raised=passed).wake


def test_the_culprit_is_who_died_by_himself_even_if_heard_of_later() -> None:
    wake, kill = died(at=1.0, code=1, raised=WAKE), died(at=1.2, signal=9)
    assert faults.culprit(wake, kill) is kill
    assert faults.culprit(kill, wake) is kill


def test_of_two_equal_deaths_the_earlier_one_is_the_culprit() -> None:
    first, second = died(at=1.0, signal=9), died(at=1.1, signal=11)
    assert faults.culprit(second, first) is first


@pytest.mark.parametrize("how", [{"code": 1}, {"code": 1, "raised": raised()}])
def test_a_failure_before_the_first_step_is_the_users_bug(how: dict[str, Any]) -> None:
    verdict = judge(FaultHistory(), died(step=0, **how), highest=0)
    assert verdict == Stop(1, verdict.reason)  # type: ignore[union-attr]
    assert "before the first step" in verdict.reason  # type: ignore[union-attr]


BROKEN_STARTS = [
    raised(
        "DistStoreError", "Timed out after 1801 seconds waiting for clients. 1/2 clients joined."
    ),
    raised("DistNetworkError", "The client socket has failed to connect to [host]:29500"),
    raised("RuntimeError", "The client socket has timed out after 60s while trying to connect"),
    raised("DistBackendError", "store->get('0') got error: Connection reset by peer"),
    WAKE,
]


@pytest.mark.parametrize("error", BROKEN_STARTS, ids=lambda error: error.type)
def test_a_broken_collective_before_the_first_step_is_not_the_users_bug(error: Raised) -> None:
    """The rank that raises it waited for another, and is not the one to blame."""
    history = FaultHistory()
    verdicts = [judge(history, died(step=0, code=1, raised=error), highest=0) for _ in range(29)]
    assert all(map(again, verdicts))
    last = judge(history, died(step=0, code=1, raised=error), highest=0)
    assert isinstance(last, Stop), "but it does not go on for ever"
    assert last.code == 93


@pytest.mark.parametrize("how", [{"signal": 9}, {"signal": 11}, {"signal": 9, "oom": True}])
def test_a_worker_killed_while_starting_is_tried_again(how: dict[str, Any]) -> None:
    assert again(judge(FaultHistory(), died(step=0, **how), highest=0))


def test_with_a_number_of_restarts_a_failing_start_uses_them_up_and_no_more() -> None:
    history = FaultHistory()
    verdicts = [judge(history, died(step=0, code=1), highest=0, limit=4) for _ in range(5)]
    assert all(map(again, verdicts[:4]))
    assert isinstance(verdicts[4], Stop)
    assert verdicts[4].code == 1


def test_no_restarts_allowed_means_none() -> None:
    assert isinstance(judge(FaultHistory(), died(signal=9), limit=0), Stop)


def test_the_same_failure_at_the_same_step_three_times_ends_the_job_with_93() -> None:
    history = FaultHistory()
    verdicts = [judge(history, died(code=1, raised=raised())) for _ in range(3)]
    assert all(map(again, verdicts[:2]))
    assert isinstance(verdicts[2], Stop)
    assert verdicts[2].code == 93
    assert "3 times in a row" in verdicts[2].reason


def storm(fault: Callable[[int], Fault], count: int) -> list[str]:
    """Have the same failure again and again where processes can stay; say what is done each time."""
    history, done, fresh = FaultHistory(), [], True
    for number in range(count):
        one = fault(number)
        kept = rules.keeping(history, one)
        parked = 0 if not kept.any else 4 - len(kept.without)
        there = replace(ALL_THERE, ranks=4, parked=parked)
        verdict = rules.judge(history, one, there, StepNumber(5 + number), None, fresh=fresh)
        rules.validate(history, None)
        fresh = not parked
        done.append(f"stop with {verdict.code}" if isinstance(verdict, Stop) else f"keep {parked}")
    return done


CLIMB = ["keep 4"] * 3 + ["keep 3"] * 3 + ["keep 0"] * 2 + ["stop with 93"]


def test_the_same_failure_is_met_by_entering_again_then_by_another_process_then_by_all() -> None:
    assert storm(lambda _: died(code=1, raised=raised()), 9) == CLIMB


def test_a_failure_that_any_rank_may_be_the_first_to_have_climbs_as_well() -> None:
    assert storm(lambda number: died(rank=number % 4, code=1, raised=raised()), 9) == CLIMB


def test_the_same_failure_at_ever_later_steps_climbs_but_does_not_end_the_job() -> None:
    done = storm(lambda number: died(step=5 + number, code=1, raised=raised()), 12)
    assert done == [*CLIMB[:8], *["keep 0"] * 4]


def test_different_failures_do_not_climb() -> None:
    assert storm(lambda number: died(code=number + 1), 9) == ["keep 4"] * 9


def hung(doubtful: bool) -> Fault:
    return Fault(
        kind="hang",
        node=NODE,
        round=RoundNumber(1),
        step=StepNumber(5),
        signature="hang",
        at=Time(1.0),
        doubtful=doubtful,
    )


def test_a_hang_that_is_only_doubted_never_ends_the_job() -> None:
    history = FaultHistory()
    for _ in range(2 * rules.STUCK_LIMIT_OUTSIDE):
        assert again(judge(history, hung(doubtful=True)))


def test_the_same_proven_hang_three_times_ends_the_job_whatever_was_doubted_between() -> None:
    history = FaultHistory()
    for _ in range(2):
        assert again(judge(history, hung(doubtful=False)))
        assert again(judge(history, hung(doubtful=True)))
    assert isinstance(judge(history, hung(doubtful=False)), Stop)


def test_steps_that_cannot_be_compared_are_never_the_same_step() -> None:
    """Each process counts from where it resumed: at 50, 100 and 150 it reads 50 each time."""
    history = FaultHistory()
    for _ in range(rules.STUCK_LIMIT_OUTSIDE - 1):
        fault = died(step=50, code=1, raised=raised())
        assert again(judge(history, fault, highest=50, comparable=False))
    last = judge(history, fault, highest=50, comparable=False)
    assert isinstance(last, Stop), "but it does not go on for ever"


def test_the_same_failure_at_another_step_is_another_failure() -> None:
    history = FaultHistory()
    for step in range(1, 50):
        assert again(judge(history, died(step=step, code=1, raised=raised()), highest=step))


def test_two_failures_by_turns_do_not_go_on_for_ever() -> None:
    history = FaultHistory()
    verdicts = []
    for i in range(rules.STUCK_LIMIT + 1):
        verdicts.append(judge(history, died(code=1 + i % 2)))
        if isinstance(verdicts[-1], Stop):
            break
    assert isinstance(verdicts[-1], Stop)
    assert verdicts[-1].code == 93


def test_kills_from_outside_are_never_the_same_failure() -> None:
    history = FaultHistory()
    for _ in range(100):
        assert again(judge(history, died(signal=9)))


def test_even_kills_from_outside_without_progress_end_at_last() -> None:
    history = FaultHistory()
    verdicts = [judge(history, died(signal=9)) for _ in range(rules.STUCK_LIMIT_OUTSIDE)]
    assert isinstance(verdicts[-1], Stop)


def test_kills_with_progress_between_them_go_on_for_ever() -> None:
    history = FaultHistory()
    for step in range(1, 1000):
        assert again(judge(history, died(step=step, signal=9), highest=step))


def test_the_out_of_memory_killer_at_the_same_step_counts_as_the_same_failure() -> None:
    history = FaultHistory()
    verdicts = [judge(history, died(signal=9, oom=True)) for _ in range(3)]
    assert isinstance(verdicts[2], Stop)


def test_a_lost_node_is_never_the_scripts_fault() -> None:
    history = FaultHistory()
    for _ in range(10):
        assert again(judge(history, lost(), highest=0))


@pytest.mark.parametrize("kind", sorted(faults.WANTED))
def test_a_change_that_we_wanted_costs_no_restart(kind: Any) -> None:
    history = FaultHistory()
    fault = faults.wanted(kind, NODE, RoundNumber(1), StepNumber(5), "why", Time(9))
    assert again(judge(history, fault, limit=0))
    assert history.restarts == 0


hows = st.sampled_from([how for how, _, _ in KINDS])


@given(st.none() | st.integers(0, 5), st.lists(st.tuples(hows, st.integers(0, 3))))
def test_no_sequence_of_faults_breaks_the_rules(
    limit: int | None, sequence: list[tuple[dict[str, Any], int]]
) -> None:
    history = FaultHistory()
    highest = 0
    for how, gained in sequence:
        highest += gained
        verdict = judge(history, died(step=highest, **how), highest, limit)
        if isinstance(verdict, Stop):
            assert verdict.code in (rules.EXIT_FAILED, rules.EXIT_DO_NOT_REQUEUE)
            return
        assert limit is None or history.restarts <= limit
