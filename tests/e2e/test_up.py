"""`holdfast up`: a job of several nodes on this machine, whose nodes are provided by supply."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from holdfast import proc
from holdfast.core.job import Job
from holdfast.platforms.local_node import NodeRecord, read_record

from .harness import TRAINER, Run, wait_for

UP = (sys.executable, "-m", "holdfast", "up")


def up(run: Run, *flags: str, script: str = TRAINER, args: tuple[str, ...] = ()) -> Run:
    return run.train(*flags, script=script, args=args, nproc=1, command=UP)


def supplier(run: Run) -> int:
    return wait_for(lambda: run._child("holdfast-supply"), "the supplier")


def record(run: Run, request: str) -> NodeRecord:
    found = read_record(run.job_home / "nodes" / f"{request}.json")
    assert found is not None, f"no request {request} was ever started"
    return found


def requests(run: Run) -> set[str]:
    return {path.stem for path in Path(run.job_home, "nodes").glob("*.json")}


def kill_node(run: Run, request: str) -> None:
    """As if its machine lost power: all processes of a node at the same moment."""
    guard = record(run, request).pid
    for pid in [guard, *proc.descendants(guard)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stepping(run: Run, nodes: int, round: int = 1) -> Job:
    return run.until_stepping(round, nodes)


def test_a_job_runs_to_its_end_on_nodes_that_were_asked_for(run: Run) -> None:
    script = TRAINER + '\n    print("rank", rank, sorted(os.environ))\n'
    up(run, "--nodes", "2", script=script, args=("20",))
    assert run.code() == 0, run.err
    assert "finished" in run.err, "the summary"
    assert [record(run, request).code for request in ("0-1", "1-1")] == [0, 0]
    for rank in range(2):
        assert f"rank {rank} " in run.out
    assert "HOLDFAST_REQUEST" not in run.out
    assert "HOLDFAST_NODE_NAME" not in run.out
    assert "HOLDFAST_TOKEN" not in run.out


def test_a_node_that_is_killed_is_asked_for_again_and_all_ranks_step(run: Run) -> None:
    up(run, "--nodes", "2")
    stepping(run, 2)
    kill_node(run, "1-1")
    stepping(run, 2, round=2)
    supply = run.ask("status")["supply"]
    assert (supply["platform"], supply["connected"], supply["wanted"]) == ("local", True, 2)
    found = {one["position"]: one for one in supply["positions"]}
    assert (found[1]["request"], found[1]["reason"], found[1]["host"]) == (
        "1-2",
        "killed",
        "node-1",
    )
    assert found[0]["request"] == "0-1"
    (incident,) = run.ask("incidents")
    assert "asked the platform" in incident["action"]
    run.end()
    assert run.code() == 0


def test_a_spare_takes_the_place_of_a_node_that_is_killed_and_another_spare_is_asked_for(
    run: Run,
) -> None:
    up(run, "--nodes", "2", "--spares", "1")
    stepping(run, 2)
    run.until(lambda job: len(job.membership.waiting) == 1, "a spare")
    job = run.peek()
    assert job is not None
    placed = {job.membership.placed[node].spec.request for node in job.membership.placed}
    lost = max(placed)
    kill_node(run, lost)
    stepping(run, 2, round=2)
    run.until(lambda job: len(job.membership.waiting) == 1, "another spare")
    assert requests(run) == {"0-1", "1-1", "2-1", f"{lost[0]}-2"} - {lost}
    assert "a spare took the lost node's place" in run.ask("incidents")[-1]["action"]
    run.end()
    assert run.code() == 0


def test_a_supplier_that_is_killed_costs_no_round_and_the_next_one_has_all_nodes(run: Run) -> None:
    up(run, "--nodes", "2")
    before = stepping(run, 2)
    first = supplier(run)
    run.kill(first)
    wait_for(lambda: run._child("holdfast-supply") not in (None, first), "another supplier")
    highest = before.highest
    job = run.until(
        lambda job: job.supply.connected and job.highest > highest + 20, "steps with the next one"
    )
    assert (job.membership.round, requests(run)) == (before.membership.round, {"0-1", "1-1"})
    kill_node(run, "0-1")
    job = stepping(run, 2, round=2)
    assert job.supply.positions[0].reason == "killed"
    assert requests(run) == {"0-2", "1-1"}
    run.end()
    assert run.code() == 0


def test_a_coordinator_that_is_killed_costs_no_round_and_supply_goes_on(run: Run) -> None:
    up(run, "--nodes", "2")
    before = stepping(run, 2)
    first, highest = run.coordinator(), before.highest
    run.kill(first)
    wait_for(lambda: run._child("holdfast-coord") not in (None, first), "another coordinator")
    job = run.until(
        lambda job: not job.membership.absent and job.highest > highest + 20, "steps with the next"
    )
    assert job.membership.round == before.membership.round
    kill_node(run, "1-1")
    stepping(run, 2, round=2)
    assert requests(run) == {"0-1", "1-2"}
    run.end()
    assert run.code() == 0


def test_a_launcher_that_is_killed_takes_every_process_of_the_job_with_it(run: Run) -> None:
    up(run, "--nodes", "2")
    stepping(run, 2)
    run.kill(run.pid)
    run.code()
    run.assert_nobody_left(patience_s=30.0)


def test_a_job_is_scaled_up_and_down_while_it_runs(run: Run) -> None:
    up(run, "--nodes", "1:2")
    stepping(run, 2)
    assert "local is asked for what is missing" in run.ask("scale", "1:3")["line"]
    stepping(run, 3)
    run.ask("scale", "1:1")
    job = stepping(run, 1)
    assert job.recovery.history.restarts == 0
    wait_for(lambda: [record(run, name).code for name in requests(run)].count(75) == 2, "two to go")
    run.end()
    assert run.code() == 0


def test_a_script_asks_for_more_nodes_and_for_what_cannot_be(run: Run) -> None:
    asks = """
        if step == 20 and os.environ["WORLD_SIZE"] == "1":
            try:
                holdfast.scale((3, 2))
            except holdfast.errors.RequestDenied as error:
                print(f"denied: {error}")
            holdfast.scale((1, 2))
    """
    up(run, "--nodes", "1", script=TRAINER + asks)
    stepping(run, 2)
    run.end()
    assert run.code() == 0
    assert "denied" in run.out
    assert "3:2: at least 1 node is needed" in run.out


def test_a_script_that_fails_at_its_first_step_ends_the_job_with_1(run: Run) -> None:
    up(run, "--nodes", "2", "--max-restarts", "0", script="raise ValueError('no data')")
    assert run.code() == 1
    assert "no data" in run.err


def test_nodes_that_cannot_start_end_the_job_with_the_reason(run: Run) -> None:
    broken = """
        import os, sys
        if "HOLDFAST_REQUEST" in os.environ and "run" in sys.orig_argv:
            os._exit(127)
    """
    run.without_torch()
    run.write(broken, "blocked/sitecustomize.py")
    up(run, "--nodes", "2")
    assert run.code() == 93
    assert "its launcher ended with exit code 127 on node-" in run.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 1)])
def test_a_signal_ends_the_whole_job_politely(run: Run, number: signal.Signals, code: int) -> None:
    handled = """
    import signal
    signal.signal(signal.SIGTERM, lambda *_: (print("bye"), sys.exit(1)))
    """
    up(
        run,
        "--nodes",
        "2",
        script=TRAINER.replace("    import holdfast\n", handled + "import holdfast\n"),
    )
    stepping(run, 2)
    run.kill(run.pid, number)
    assert run.code() == code
    assert run.out.count("bye") == 2
    assert f"stopped by {number.name}" in run.err


def test_a_second_signal_ends_it_at_once(run: Run) -> None:
    deaf = "    import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    up(run, "--nodes", "2", script=deaf + TRAINER)
    stepping(run, 2)
    run.kill(run.pid, signal.SIGTERM)
    wait_for(lambda: "is being ended: stopped by SIGTERM" in run.err, "the first to be taken")
    run.kill(run.pid, signal.SIGTERM)
    assert run.code() == 75
