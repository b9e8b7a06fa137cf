"""The verdict names whom the others wait for, in a sentence, and nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.collectives import rank_list
from holdfast.diagnosis.verdict import judge
from holdfast.messages.evidence import (
    Collective,
    Frame,
    LoaderWorker,
    RankEvidence,
    ThreadStack,
)
from holdfast.messages.units import NodeId, Rank, RoundNumber

C10D = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
AUTOGRAD = "/env/lib/python3.11/site-packages/torch/autograd/graph.py"


def frame(function: str, file: str = "/home/me/train.py", line: int = 12) -> Frame:
    return Frame(file=file, line=line, function=function)


def call(name: str) -> Frame:
    return Frame(file="kernel", line=0, function=name, native=True)


def native(name: str) -> Frame:
    return Frame(file="/env/libtorch_cpu.so", line=0, function=name, native=True)


IN_ALL_REDUCE = (call("futex"), frame("all_reduce", C10D), frame("step"), frame("<module>"))
IN_BACKWARD = (call("futex"), frame("_engine_run_backward", AUTOGRAD), frame("step"))
IN_REDUCER = (
    call("futex"),
    native("c10d::Reducer::finalize_backward"),
    frame("_engine_run_backward", AUTOGRAD),
    frame("step"),
)
IN_ITEM = (native("cudaStreamSynchronize"), frame("step"))
IN_ITEM_UNSEEN = (frame("step"),)
IN_KERNEL = (native("at::native::mm"), frame("step"))
ASLEEP = (call("clock_nanosleep"), frame("load_batch", "/home/me/loader.py", 88), frame("step"))


def noted(number: int, state: str = "scheduled", **more: Any) -> Collective:
    return Collective(
        **{"group": "0", "op": "gloo:all_reduce", "number": number, "state": state, **more}
    )


def rank(
    number: int, frames: tuple[Frame, ...] = (), *, holds_gil: bool = False, **more: Any
) -> RankEvidence:
    stack = ThreadStack(name="MainThread", frames=frames, holds_gil=holds_gil)
    return RankEvidence(
        **{
            "node": NodeId(f"node-{number // 3}"),
            "round": RoundNumber(1),
            "rank": Rank(number),
            "pid": 100 + number,
            "process_state": "S",
            "stacks": (stack,) if frames else (),
            "stack_source": "py-spy" if frames else "none",
            **more,
        }
    )


def waiting(*ranks: int, at: int = 412, **more: Any) -> list[RankEvidence]:
    log = (noted(at), noted(at - 1, "completed"))
    return [rank(r, IN_ALL_REDUCE, **{"collectives": log, **more}) for r in ranks]


BEFORE = (noted(411, "completed"), noted(410, "completed"))


def test_the_one_that_has_not_come_is_named_with_its_line() -> None:
    verdict = judge([*waiting(0, 1, 2), rank(3, ASLEEP, collectives=BEFORE)], 4)
    assert verdict.guilty == (3,)
    assert verdict.sentence == (
        "rank 3 on node-1 sleeps in loader.py:88 (load_batch); "
        "ranks 0–2 wait in all_reduce #412 of group 0"
    )
    assert [group.ranks for group in verdict.groups] == [(0, 1, 2), (3,)]
    assert verdict.groups[0].headline == "ranks 0–2 wait in all_reduce #412 of group 0"
    assert verdict.groups[1].headline == "rank 3: sleeps in loader.py:88 (load_batch)"


def test_an_open_section_is_told() -> None:
    late = rank(3, ASLEEP, collectives=BEFORE, sections=("step", "data"))
    assert "(load_batch), section data; ranks" in judge([*waiting(0, 1, 2), late], 4).sentence


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"process_state": "T"}, "is stopped (SIGSTOP) in loader.py:88 (load_batch)"),
        ({"process_state": "X"}, "is dead"),
        ({"process_state": "Z"}, "is dead"),
        ({"process_state": "D"}, "is stuck in the kernel (state D) in loader.py:88 (load_batch)"),
        (
            {"beat_age_s": 9.0, "holds_gil": True},
            "holds the GIL in loader.py:88 (load_batch)",
        ),
    ],
    ids=["stopped", "gone", "zombie", "stuck", "gil"],
)
def test_one_that_cannot_go_on_is_named_without_any_recorder(
    more: dict[str, Any], said: str
) -> None:
    verdict = judge([*waiting(0, 1, 2, collectives=None), rank(3, ASLEEP, **more)], 4)
    assert verdict.guilty == (3,)
    assert verdict.sentence.startswith(f"rank 3 on node-1 {said}; ranks 0–2 wait in")


def test_an_old_beat_alone_is_no_proof_when_nobody_holds_the_gil() -> None:
    starved = [rank(r, IN_BACKWARD, beat_age_s=9.0) for r in range(3)]
    assert judge(starved, 3).guilty == ()


def test_who_waits_for_a_gpu_with_the_gil_in_hand_is_not_blamed() -> None:
    careless = [rank(r, IN_ITEM, holds_gil=True, beat_age_s=9.0) for r in range(3)]
    late = rank(3, ASLEEP, process_state="T")
    assert judge([*careless, late], 4).guilty == (3,)
    assert judge(careless, 3).guilty == ()


def test_one_in_the_kernel_for_a_moment_while_it_waits_is_not_blamed() -> None:
    verdict = judge(
        [*waiting(0, 1), *waiting(2, process_state="D"), rank(3, ASLEEP, collectives=BEFORE)], 4
    )
    assert verdict.guilty == (3,)


def test_one_that_its_gpus_driver_keeps_in_the_kernel_is_not_blamed() -> None:
    in_driver = (call("ioctl"), frame("step"))
    assert judge([*waiting(0, 1), rank(2, in_driver, process_state="D")], 3).guilty == ()


def test_several_that_have_not_come_are_named_together() -> None:
    late = [rank(r, ASLEEP, collectives=BEFORE) for r in (3, 4, 5)]
    verdict = judge([*waiting(0, 1, 2), *late], 6)
    assert verdict.guilty == (3, 4, 5)
    assert verdict.sentence.startswith("ranks 3–5 on node-1 sleep in loader.py:88 (load_batch)")


def test_when_all_have_come_nobody_is_blamed() -> None:
    verdict = judge(waiting(0, 1, 2), 3)
    assert verdict.guilty == ()
    assert verdict.sentence == (
        "unknown: all ranks wait in all_reduce #412 of group 0; the network between them is suspect"
    )


def test_the_root_of_a_broadcast_may_run_ahead() -> None:
    log = (noted(413), noted(412, "completed", op="gloo:broadcast"))
    middle = (noted(412, op="gloo:broadcast"), noted(411, "completed"))
    verdict = judge(
        [
            rank(0, IN_ALL_REDUCE, collectives=log),
            rank(1, ASLEEP, collectives=BEFORE),
            rank(2, IN_ALL_REDUCE, collectives=middle),
        ],
        3,
    )
    assert verdict.guilty == (1,)


def test_a_rank_that_is_in_another_collective_is_said_to_mismatch() -> None:
    wrong = rank(1, IN_ALL_REDUCE, collectives=(noted(412, op="gloo:barrier"), *BEFORE))
    verdict = judge([*waiting(0, 2), wrong], 3)
    assert verdict.guilty == (1,)
    assert (
        "collective #412 of group 0 does not match: rank 1 in barrier; ranks 0, 2 in all_reduce"
        in verdict.sentence
    )


def test_two_that_do_not_match_blame_nobody() -> None:
    wrong = rank(1, IN_ALL_REDUCE, collectives=(noted(412, op="gloo:barrier"), *BEFORE))
    verdict = judge([*waiting(0), wrong], 2)
    assert verdict.guilty == ()
    assert "unknown: collective #412 of group 0 does not match" in verdict.sentence


def test_sizes_must_match_where_they_have_to() -> None:
    log = (noted(412, sizes="Float[72]"), *BEFORE)
    other = (noted(412, sizes="Float[3]"), *BEFORE)
    ranks = [rank(r, IN_ALL_REDUCE, collectives=other if r == 1 else log) for r in range(3)]
    assert judge(ranks, 3).guilty == (1,)
    gathered = [
        rank(r, IN_ALL_REDUCE, collectives=(noted(412, op="gloo:all_gather", sizes=f"F[{r}]"),))
        for r in range(3)
    ]
    assert judge(gathered, 3).guilty == ()


def test_one_that_does_not_know_its_groups_members_is_not_blamed_for_it() -> None:
    named: dict[str, Any] = {"group": "a", "ranks": (0, 1, 2)}
    ranks = [rank(r, IN_ITEM, collectives=(noted(5, **named),)) for r in (0, 1)]
    unaware = rank(2, IN_ITEM, collectives=(noted(5, group="a"),))
    assert judge([*ranks, unaware], 3).guilty == ()


def test_two_backends_of_one_group_count_for_themselves() -> None:
    gloo = (noted(2, "completed"), noted(9, op="nccl:all_reduce"))
    late = (noted(2, "completed"), noted(8, "completed", op="nccl:all_reduce"))
    ranks = [rank(r, IN_ITEM, collectives=gloo) for r in range(3)]
    verdict = judge([*ranks, rank(3, IN_ITEM_UNSEEN, collectives=late)], 4)
    assert verdict.guilty == (3,)
    assert "all_reduce #9 of group 0" in verdict.sentence


def chain() -> list[RankEvidence]:
    """Rank 0 waits for rank 1 in group a, rank 1 for rank 2 in group b; rank 2 sleeps."""
    a: dict[str, Any] = {"group": "a", "ranks": (0, 1)}
    b: dict[str, Any] = {"group": "b", "ranks": (1, 2)}
    return [
        rank(0, IN_ALL_REDUCE, collectives=(noted(5, **a),)),
        rank(1, IN_ALL_REDUCE, collectives=(noted(7, **b), noted(4, "completed", **a))),
        rank(2, ASLEEP, collectives=(noted(6, "completed", **b),)),
    ]


def test_one_that_waits_for_another_is_not_blamed() -> None:
    verdict = judge(chain(), 3)
    assert verdict.guilty == (2,)
    assert "rank 0 waits in all_reduce #5 of group a; rank 1 waits in all_reduce #7 of group b" in (
        verdict.sentence
    )


def test_one_that_left_an_operation_pending_and_sleeps_is_blamed() -> None:
    everything = chain()
    sleeping = rank(1, ASLEEP, collectives=everything[1].collectives)
    in_b = rank(2, IN_ALL_REDUCE, collectives=(noted(7, group="b", ranks=(1, 2)),))
    assert judge([everything[0], sleeping, in_b], 3).guilty == (1,)


def test_a_circle_blames_nobody() -> None:
    a: dict[str, Any] = {"group": "a", "ranks": (0, 1)}
    b: dict[str, Any] = {"group": "b", "ranks": (0, 1)}
    verdict = judge(
        [
            rank(0, IN_ALL_REDUCE, collectives=(noted(5, **a), noted(6, "completed", **b))),
            rank(1, IN_ALL_REDUCE, collectives=(noted(7, **b), noted(4, "completed", **a))),
        ],
        2,
    )
    assert verdict.guilty == ()
    assert "cycle" in verdict.sentence


def test_a_recv_waits_for_its_sender() -> None:
    pipe: dict[str, Any] = {"op": "nccl:recv 1<-0", "group": "pp", "ranks": (2, 5)}
    verdict = judge(
        [
            rank(2, ASLEEP, collectives=(noted(3, "completed", group="pp", ranks=(2, 5)),)),
            rank(5, IN_ITEM, collectives=(noted(1, **pipe),)),
        ],
        6,
    )
    assert verdict.guilty == (2,)
    assert "rank 5 waits in recv from rank 2 #1 of group pp" in verdict.sentence


def test_a_send_and_its_recv_that_met_blame_nobody() -> None:
    pair: dict[str, Any] = {"group": "pp", "ranks": (0, 1)}
    verdict = judge(
        [
            rank(0, IN_ITEM, collectives=(noted(1, op="nccl:send 0->1", **pair),)),
            rank(1, IN_ITEM, collectives=(noted(1, op="nccl:recv 1<-0", **pair),)),
        ],
        2,
    )
    assert verdict.guilty == ()


def test_one_whose_gpu_has_not_come_is_named() -> None:
    on_gpu = [
        rank(r, IN_ITEM, collectives=(noted(9, "started", op="nccl:all_reduce"),)) for r in (0, 1)
    ]
    late = rank(2, IN_ITEM, collectives=(noted(9, op="nccl:all_reduce"),))
    verdict = judge([*on_gpu, late], 3)
    assert verdict.guilty == (2,)
    assert (
        "rank 2 on node-0 has not reached all_reduce #9 of group 0 on its GPU" in verdict.sentence
    )


# ---- without recorders ----


@pytest.mark.parametrize(
    "stack", [IN_ALL_REDUCE, IN_REDUCER, IN_BACKWARD], ids=["python", "native", "blocked majority"]
)
def test_stacks_alone_tell_who_is_elsewhere(stack: tuple[Frame, ...]) -> None:
    verdict = judge([*[rank(r, stack) for r in range(3)], rank(3, ASLEEP)], 4)
    assert verdict.guilty == (3,)
    assert verdict.sentence == (
        "rank 3 on node-1 sleeps in loader.py:88 (load_batch); ranks 0–2 wait in a collective"
    )


def test_one_that_computes_natively_while_the_others_wait_is_named() -> None:
    verdict = judge([*[rank(r, IN_REDUCER) for r in range(3)], rank(3, IN_KERNEL)], 4)
    assert verdict.guilty == (3,)


@pytest.mark.parametrize("stack", [IN_ITEM, IN_ITEM_UNSEEN, IN_BACKWARD, ()])
def test_what_may_be_waiting_is_not_blamed(stack: tuple[Frame, ...]) -> None:
    verdict = judge([*[rank(r, IN_REDUCER) for r in range(3)], rank(3, stack)], 4)
    assert verdict.guilty == ()
    assert verdict.sentence.startswith("unknown: ")


def test_one_that_writes_a_checkpoint_does_not_wait_in_a_collective() -> None:
    file = C10D.replace("distributed_c10d", "checkpoint/filesystem")
    saving = (call("fsync"), frame("write_data", file), frame("save"))
    verdict = judge([*[rank(r, IN_ALL_REDUCE) for r in range(3)], rank(3, saving)], 4)
    assert verdict.guilty == (3,)
    assert "rank 3 on node-1 writes in train.py:12 (save)" in verdict.sentence


def test_one_without_a_recorder_is_judged_by_its_stack() -> None:
    assert judge([*waiting(0, 1, 2), rank(3, ASLEEP)], 4).guilty == (3,)
    assert judge([*waiting(0, 1, 2), rank(3, IN_ITEM)], 4).guilty == ()


def test_one_that_waits_in_what_no_recorder_notes_is_not_blamed() -> None:
    in_recv = (call("futex"), frame("recv", C10D), frame("step"))
    verdict = judge([*waiting(0, 1), rank(2, in_recv, collectives=BEFORE)], 3)
    assert verdict.guilty == ()


def test_one_that_waits_for_a_thread_of_its_own_that_waits_is_not_blamed() -> None:
    join = (call("futex"), frame("join", "/usr/lib/python3.11/threading.py"), frame("step"))
    saver = ThreadStack(name="saver", frames=(call("futex"), frame("gather", C10D), frame("save")))
    joined = rank(3, join)
    both = (joined.stacks[0], saver)
    waits = RankEvidence(node=joined.node, round=joined.round, rank=joined.rank, pid=1, stacks=both)
    assert judge([*[rank(r, IN_ALL_REDUCE) for r in range(3)], waits], 4).guilty == ()
    assert judge([*[rank(r, IN_ALL_REDUCE) for r in range(3)], joined], 4).guilty == (3,)


# ---- what is not known ----


def test_without_evidence_nothing_is_concluded() -> None:
    verdict = judge([], 4)
    assert (verdict.guilty, verdict.sentence) == ((), "unknown: nothing is known of any rank")


def test_a_rank_that_nothing_is_known_of_is_not_blamed() -> None:
    verdict = judge(waiting(0, 1, 2), 4)
    assert verdict.guilty == ()
    assert verdict.sentence.startswith("unknown: ")
    assert verdict.sentence.endswith("nothing is known of rank 3")


def test_evidence_of_an_older_round_does_not_count() -> None:
    old = rank(0, ASLEEP, process_state="T", round=RoundNumber(1))
    new = waiting(0, 1, 2, round=RoundNumber(2))
    assert judge([old, *new], 3).guilty == ()


def test_a_job_where_everybody_computes_has_no_culprit() -> None:
    assert judge([rank(r, IN_KERNEL) for r in range(3)], 3).guilty == ()


def test_ranks_are_told_briefly() -> None:
    assert rank_list([3]) == "rank 3"
    assert rank_list([2, 0, 1, 5, 7, 8]) == "ranks 0–2, 5, 7, 8"
    assert rank_list(range(4096)) == "ranks 0–4095"


def test_of_a_job_that_moves_nothing_is_concluded_from_looks_at_different_moments() -> None:
    """Two were still in an operation when their recorders were read, but not when they were seen."""
    behind = [rank(r, IN_REDUCER, collectives=BEFORE, since_step_s=0.1) for r in (0, 1)]
    moved_on = (noted(412), noted(411, "completed"))
    ahead = [rank(r, ASLEEP, collectives=moved_on, since_step_s=0.02) for r in (2, 3)]
    verdict = judge([*behind, *ahead], 4)
    assert verdict.guilty == ()
    assert verdict.sentence == "no rank waits for another for long"
    assert verdict.waiting == ()
    assert verdict.groups[1].headline == "ranks 2, 3: sleep in loader.py:88 (load_batch)"


def test_ranks_that_have_waited_for_a_moment_accuse_nobody() -> None:
    log = (noted(412, age_s=0.1), noted(411, "completed", age_s=3.0))
    ranks = [rank(r, IN_ALL_REDUCE, collectives=log, since_step_s=3.0) for r in range(3)]
    computing = rank(3, IN_KERNEL, collectives=BEFORE, since_step_s=3.0)
    verdict = judge([*ranks, computing], 4)
    assert (verdict.guilty, verdict.sentence) == ((), "no rank waits for another for long")


# ---- what goes with it ----


def test_a_verdict_says_who_waits_and_how_long_they_may() -> None:
    log = (noted(412, age_s=20.0, timeout_s=600.0), noted(411, "completed"))
    newer = (noted(412, age_s=4.0, timeout_s=600.0), noted(411, "completed"))
    late = rank(3, ASLEEP, collectives=BEFORE)
    verdict = judge([*waiting(0, 1, collectives=log), *waiting(2, collectives=newer), late], 4)
    assert (verdict.guilty, verdict.waiting) == ((3,), (0, 1, 2))
    assert verdict.left_s == pytest.approx(580.0)
    assert verdict.place == "loader.py:88 (load_batch)"
    assert (verdict.proof, verdict.pause) == (None, "")


def test_a_timeout_that_is_not_known_is_not_told() -> None:
    assert judge([*waiting(0, 1, 2), rank(3, ASLEEP, collectives=BEFORE)], 4).left_s is None


def test_the_section_or_the_frameworks_own_name_says_what_the_guilty_rank_does() -> None:
    in_section = rank(3, ASLEEP, collectives=BEFORE, sections=("step", "upload"))
    assert judge([*waiting(0, 1, 2), in_section], 4).pause == "upload"
    trainer = "/env/lib/python3.11/site-packages/transformers/trainer.py"
    stack = (call("read"), frame("evaluation_loop", trainer), frame("evaluate", trainer))
    evaluating = rank(3, (*stack, frame("main")), collectives=BEFORE)
    assert judge([*waiting(0, 1, 2), evaluating], 4).pause == "evaluation"


def test_a_native_place_is_told_by_the_python_line_that_is_there() -> None:
    stack = (native("at::native::mm"), frame("linear", AUTOGRAD), frame("forward"))
    verdict = judge([*waiting(0, 1, 2), rank(3, stack, collectives=BEFORE)], 4)
    assert verdict.place == "train.py:12 (forward)"
    bare = rank(3, (native("at::native::mm"),), collectives=BEFORE)
    verdict = judge([*waiting(0, 1, 2), bare], 4)
    assert verdict.place == ""
    assert "rank 3 on node-1 is in native code (at::native::mm); ranks" in verdict.sentence


def test_where_all_stand_is_told_when_none_waits() -> None:
    verdict = judge([rank(r, ASLEEP, collectives=BEFORE, since_step_s=60) for r in range(4)], 4)
    assert verdict.guilty == ()
    assert verdict.sentence == (
        "all 4 ranks stand in loader.py:88 (load_batch), none waits for another"
    )
    apart = [rank(r, ASLEEP if r else IN_KERNEL, collectives=BEFORE) for r in range(3)]
    assert judge(apart, 3).sentence == (
        "ranks 1, 2 stand in loader.py:88 (load_batch); rank 0 stands in train.py:12 (step), "
        "none waits for another"
    )


# ---- before the first collective ----

RENDEZVOUS = C10D.replace("distributed_c10d", "rendezvous")
PATCHES = "/src/holdfast/worker/torch_hooks/patches.py"
IN_RENDEZVOUS = (
    call("poll"),
    frame("host_store", PATCHES),
    frame("_create_c10d_store", RENDEZVOUS),
    frame("init_process_group", C10D),
    frame("main"),
)


def test_a_rank_that_waits_for_the_others_to_start_is_not_blamed() -> None:
    """Holdfast's own frame is the innermost there."""
    tokenising = rank(2, (frame("tokenise"), frame("main")), collectives=())
    verdict = judge([*[rank(r, IN_RENDEZVOUS, collectives=()) for r in (0, 1)], tokenising], 3)
    assert verdict.guilty == (2,)
    assert verdict.waiting == (0, 1)
    assert verdict.place == "train.py:12 (tokenise)"
    assert "ranks 0, 1 wait" in verdict.sentence


def test_one_whose_recorder_was_not_read_is_not_blamed_for_a_line_that_may_wait() -> None:
    ranks = [rank(r, IN_RENDEZVOUS, collectives=()) for r in (0, 1)]
    assert judge([*ranks, rank(2, (frame("step"),), collectives=None)], 3).guilty == ()


# ---- a rank that ended ----


def entered(at: int, **more: Any) -> tuple[Collective, ...]:
    """What ranks recorded that have waited in an operation for a while."""
    return (noted(at, age_s=2.0, **more), noted(at - 1, "completed", age_s=3.0, **more))


def departed(number: int, **more: Any) -> RankEvidence:
    return rank(number, **{"collectives": BEFORE, "ended": True, "process_state": "X", **more})


def test_a_rank_that_has_ended_is_the_one_the_others_wait_for() -> None:
    verdict = judge([*waiting(0, 2, 3, collectives=entered(412)), departed(1)], 4)
    assert (verdict.guilty, verdict.proof) == ((1,), "left")
    assert verdict.sentence == (
        "rank 1 has ended (its script finished); ranks 0, 2, 3 wait in all_reduce #412 of group 0"
    )


def test_a_rank_that_has_ended_and_finished_the_operation_is_not_blamed() -> None:
    """The root of a broadcast, say: the others wait for each other there."""
    past = (noted(412, "completed", op="gloo:broadcast", age_s=2.0),)
    ranks = waiting(0, 2, collectives=entered(412, op="gloo:broadcast"))
    late = rank(3, ASLEEP, collectives=BEFORE)
    verdict = judge([*ranks, late, departed(1, collectives=past)], 4)
    assert (verdict.guilty, verdict.proof) == ((3,), None)


def test_a_process_with_an_exit_handler_or_a_thread_at_work_has_not_left_for_good() -> None:
    others = waiting(0, 2, 3, collectives=entered(412))
    uploading = rank(1, ASLEEP, collectives=BEFORE, ended=True)
    assert judge([*others, uploading], 4).guilty == (1,)
    assert judge([*others, uploading], 4).proof is None
    exiting = rank(1, (frame("_shutdown", "/usr/lib/python3.11/threading.py"),), ended=True)
    saver = ThreadStack(name="saver", frames=ASLEEP)
    joined = rank(1, collectives=BEFORE, ended=True, stacks=(*exiting.stacks, saver))
    assert judge([*others, joined], 4).proof is None
    alone = rank(1, collectives=BEFORE, ended=True, stacks=exiting.stacks)
    assert judge([*others, alone], 4).proof == "left"


def test_a_rank_whose_restartable_function_has_returned_has_left_for_good() -> None:
    others = waiting(0, 2, 3, collectives=entered(412))
    returned = rank(1, ASLEEP, collectives=BEFORE, returned=True)
    verdict = judge([*others, returned], 4)
    assert (verdict.guilty, verdict.proof) == ((1,), "left")
    assert verdict.sentence == (
        "rank 1 has returned from its restartable function; "
        "ranks 0, 2, 3 wait in all_reduce #412 of group 0"
    )
    saver = ThreadStack(name="saver", frames=ASLEEP)
    beside = rank(1, collectives=BEFORE, returned=True, stacks=(*returned.stacks, saver))
    assert judge([*others, beside], 4).proof is None, "its thread may call collectives"


def test_a_finished_rank_of_which_nothing_is_left_is_proof_only_if_it_cannot_have_been_there() -> (
    None
):
    others = waiting(0, 2, 3, collectives=entered(412))
    verdict = judge(others, 4, finished=[Rank(1)])
    assert (verdict.guilty, verdict.proof) == ((1,), None), "it may have been through a moment ago"
    assert "nothing is known" not in verdict.sentence
    late = rank(3, ASLEEP, collectives=BEFORE)
    assert judge([*others[:2], late], 4, finished=[Rank(1)]).proof == "left", "rank 3 is not there"


def test_who_joined_no_group_of_the_ended_rank_does_not_wait_for_it() -> None:
    pair = {"group": "a", "ranks": (0, 2)}
    ranks = [rank(0, IN_ALL_REDUCE, collectives=entered(5, **pair)), departed(1)]
    asleep = rank(2, ASLEEP, collectives=entered(5, **pair)[1:])
    verdict = judge([*ranks, asleep], 3)
    assert (verdict.guilty, verdict.proof) == ((2,), None)


# ---- its data loader ----


def test_a_stuck_worker_of_a_data_loader_is_named_with_its_line() -> None:
    loader = "/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
    stack = (call("poll"), frame("_try_get_data", loader), frame("train"))
    item = (call("read"), frame("__getitem__", "/home/me/dataset.py", 40))
    worker = LoaderWorker(number=1, pid=123, stack=ThreadStack(name="MainThread", frames=item))
    waits = rank(3, stack, collectives=BEFORE, loaders=(worker,))
    verdict = judge([*waiting(0, 1, 2), waits], 4)
    assert verdict.guilty == (3,)
    assert verdict.sentence.startswith(
        "rank 3 on node-1 waits for its data loader's worker 1 (pid 123), which reads in "
        "dataset.py:40 (__getitem__); ranks 0–2 wait"
    )


# ---- what proves that one rank cannot continue ----


@pytest.mark.parametrize(
    ("stack", "more", "proof"),
    [
        (ASLEEP, {"process_state": "T"}, "stopped"),
        (ASLEEP, {"locked": True}, "locked"),
        (ASLEEP, {"holds_gil": True, "beat_age_s": 9.0, "idle_s": 9.0}, "gil"),
        (ASLEEP, {"holds_gil": True, "beat_age_s": 9.0, "idle_s": 0.2}, None),
        (ASLEEP, {"holds_gil": True, "beat_age_s": 9.0, "idle_s": 2.5}, None),
        (ASLEEP, {"holds_gil": True, "beat_age_s": 9.0}, None),
        (ASLEEP, {"beat_age_s": 9.0, "idle_s": 9.0}, None),
        (IN_KERNEL, {"holds_gil": True, "beat_age_s": 9.0, "process_state": "R"}, None),
        ((call("read"), frame("f")), {"holds_gil": True, "beat_age_s": 9.0, "idle_s": 9.0}, None),
        (ASLEEP, {"process_state": "D"}, None),
        (ASLEEP, {"process_state": "X"}, None),
        (ASLEEP, {"idle_s": 500.0}, None),
    ],
    ids=[
        "stopped",
        "locked",
        "GIL",
        "GIL, and it moved",
        "GIL, and only for a moment",
        "GIL, and nobody looked",
        "nobody holds the GIL",
        "GIL, and it computes",
        "GIL, and it reads",
        "stuck in the kernel",
        "dead",
        "late",
    ],
)
def test_only_what_no_patience_changes_is_proof(
    stack: tuple[Frame, ...], more: dict[str, Any], proof: str | None
) -> None:
    verdict = judge([*waiting(0, 1, 2), rank(3, stack, collectives=BEFORE, **more)], 4)
    assert (verdict.guilty, verdict.proof) == ((3,), proof), verdict.sentence


def test_locks_of_a_rank_that_nobody_waits_for_prove_nothing() -> None:
    alone = [rank(0, ASLEEP, locked=True), rank(1, IN_KERNEL)]
    assert judge(alone, 2).proof is None
    waits_itself = rank(2, IN_ALL_REDUCE, locked=True, collectives=entered(412))
    verdict = judge([*waiting(0, 1), waits_itself, rank(3, ASLEEP, collectives=BEFORE)], 4)
    assert (verdict.guilty, verdict.proof) == ((3,), None)
