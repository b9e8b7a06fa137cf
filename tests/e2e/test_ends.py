"""What a process still has to do after its script's end, and ranks that end before the others."""

from __future__ import annotations

import time

import pytest

from holdfast.agent.teardown import LOOK_EVERY_S, STILL_LOOKS

from .harness import Run, wait_for

AFTER = """
    import atexit, os, sys, threading, time
    import holdfast

    rank = int(os.environ["RANK"])
    for step in range(1, 6):
        holdfast.progress(step)

    def upload():
        with open(f"uploaded_{rank}", "w") as file:
            while not os.path.exists("end"):
                time.sleep(0.01)
            file.write("whole")

    if rank == 1:
        ENDS
        open("over", "w").close()
"""

WAYS = {
    "a thread": "threading.Thread(target=upload).start()",
    "an exit handler": "atexit.register(upload)",
}


@pytest.mark.parametrize("way", WAYS)
def test_work_after_the_scripts_end_is_never_cut_short(run: Run, way: str) -> None:
    run.train(script=AFTER.replace("ENDS", WAYS[way]))
    run.until(lambda job: job.ranks and job.ranks[0].finished, "the end of rank 0")
    wait_for((run.folder / "over").exists, "the end of rank 1's script")
    job = run.peek()
    assert job is not None
    assert not job.ranks[1].finished  # type: ignore[index]
    run.end()
    assert run.code() == 0
    assert (run.folder / "uploaded_1").read_text() == "whole"
    assert run.ask("incidents") == []


def test_work_after_an_exception_is_not_cut_short_while_something_moves(run: Run) -> None:
    """It takes longer than a process has in which nothing moves."""
    raises = """if not os.path.exists("once"):
            open("once", "w").close()
            threading.Thread(target=upload).start()
            raise ValueError(step)
    """
    run.train(script=AFTER.replace("ENDS", raises))
    wait_for((run.folder / "uploaded_1").exists, "the exception of rank 1")
    began = time.monotonic()
    wait_for(lambda: time.monotonic() > began + STILL_LOOKS * LOOK_EVERY_S + 2, "a while")
    run.end()
    assert run.code() == 0
    assert (run.folder / "uploaded_1").read_text() == "whole"
    (incident,) = run.ask("incidents")
    assert incident["signature"].startswith("ValueError at train.py")


def test_a_process_that_waits_for_its_own_lock_at_its_exit_is_ended_and_has_finished(
    run: Run,
) -> None:
    lock = "lock = threading.Lock(); lock.acquire(); atexit.register(lock.acquire)"
    run.train(script=AFTER.replace("ENDS", lock))
    assert run.code() == 0
    (incident,) = run.ask("incidents")
    assert (incident["kind"], incident["rank"]) == ("ending", 1)
    assert incident["signature"].startswith("hangs after its script has ended")
    job = run.peek()
    assert job is not None
    assert job.membership.round == 1
    assert job.unfinished == 0


EARLY = """
    import os, sys
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 60):
        if rank == 1 and step == 6:
            os._exit(0)
        model(torch.ones(2)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
"""


def test_a_rank_that_exits_early_is_named_and_not_those_that_fail_of_it(run: Run) -> None:
    run.start("--standby", "2", run.write(EARLY))
    assert run.code(patience_s=120) == 93
    incidents = run.ask("incidents")
    assert [(one["kind"], one["rank"], one["step"]) for one in incidents] == [("exit", 1, 5)] * 3
    assert incidents[0]["detail"].startswith(
        "rank 1 ended with exit code 0 at step 5 while others still trained;"
        " rank 0 failed in a collective that needed it"
    )
    assert "rank 1: exit code 0 while others still trained at step 5, 3 times in a row" in run.err


ADVANCING = """
    import os, sys
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = 0
    if os.path.exists("state.pt") and (rank == 0 or sys.argv[1] == "all"):
        state = torch.load("state.pt")
        model.load_state_dict(state["model"])
        done = state["done"]
    done = torch.tensor(done)
    dist.broadcast(done, 0)
    for step in range(int(done) + 1, 31):
        model(torch.ones(2)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if step % 6 == 0:
            if rank == 0:
                torch.save({"model": model.state_dict(), "done": step}, "state.new")
                os.replace("state.new", "state.pt")
            dist.barrier()
            if rank == 1 and step < 30:
                raise ValueError("again")
"""


@pytest.mark.parametrize("who", ["all", "rank 0"])
def test_a_job_that_advances_is_not_given_up_although_its_optimizer_keeps_no_count(
    run: Run, who: str
) -> None:
    """It fails in the same way after the same number of steps of each process, four times."""
    run.start("--standby", "2", run.write(ADVANCING), who)
    assert run.code(patience_s=120) == 0
    incidents = run.ask("incidents")
    assert [one["signature"] for one in incidents] == ["ValueError at train.py:28"] * 4
    assert [one["step"] for one in incidents] == [6, 12, 18, 24]
    assert [one["lost_steps"] for one in incidents] == [0, 0, 0, 0]
    job = run.peek()
    assert job is not None
    assert [rank.step for rank in job.ranks.values()] == [30, 30]


def test_a_job_that_begins_at_0_each_time_is_given_up(run: Run) -> None:
    never = ADVANCING.replace('if os.path.exists("state.pt")', 'if False and os.path.exists("")')
    run.start("--standby", "2", run.write(never), "all")
    assert run.code(patience_s=120) == 93
    assert "ValueError at train.py:28 at step 6, 3 times in a row" in run.err
