"""What `status`, `incidents`, `goodput`, the summary and the trace say, while it runs and after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest

from holdfast.messages.reports import StatusReport
from holdfast.worker.step_times import PAUSE_LEAST_S

from .harness import MARKER, TRAINER, Run, wait_for

CAUSES = [
    "productive",
    "redo",
    "start",
    "init",
    "checkpoint",
    "evaluation",
    "detect",
    "stop",
    "rendezvous",
    "restore",
    "wait",
    "idle",
    "other",
    "finish",
    "unknown",
]

TIMED = TRAINER.replace("rank =", "began = time.monotonic(); rank =")
"""The trainer, which knows when it began."""


def assert_adds_up(books: dict[str, Any], ranks: int) -> None:
    assert {"job", "wall_s", "ranks", "seconds", "goodput", "unknown_since"} <= set(books)
    assert list(books["seconds"]) == CAUSES
    assert books["ranks"] == ranks
    assert all(seconds >= 0 for seconds in books["seconds"].values())
    total = books["wall_s"] * ranks
    assert sum(books["seconds"].values()) == pytest.approx(total, rel=0.01)
    assert books["goodput"] == pytest.approx(books["seconds"]["productive"] / total, rel=0.01)


def test_the_causes_add_up_to_wall_clock_times_ranks_while_it_runs_and_after(run: Run) -> None:
    run.train(nproc=3)
    run.until_stepping()
    assert_adds_up(run.ask("goodput"), 3)
    run.kill_rank(2)
    run.until_stepping(round=2)
    during = run.ask("goodput")
    assert_adds_up(during, 3)
    run.end()
    assert run.code() == 0
    after = run.ask("goodput")
    assert_adds_up(after, 3)
    assert after["wall_s"] >= during["wall_s"]
    assert run.ask("goodput") == after


def test_the_ledgers_wall_clock_is_the_launchers_own(run: Run) -> None:
    script = TRAINER + "    open('trained', 'w').write(str(time.monotonic() - began))\n"
    began = time.monotonic()
    run.train(
        args=["100"], nproc=1, script=script.replace("rank =", "began = time.monotonic(); rank =")
    )
    assert run.code() == 0
    took = time.monotonic() - began
    assert float((run.folder / "trained").read_text()) <= run.ask("goodput")["wall_s"] <= took


def test_status_tells_where_a_running_job_stands(run: Run) -> None:
    run.train()
    run.until_stepping()
    run.until(lambda job: job.steps_per_s, "the speed")
    status = run.ask("status")
    assert {"job", "state", "round", "world_size", "step", "steps_per_s", "nodes"} <= set(status)
    assert msgspec.to_builtins(msgspec.convert(status, StatusReport)) == status
    assert (status["job"], status["state"]) == (run.job, "running")
    assert (status["round"], status["world_size"]) == (1, 2)
    assert status["step"] > 0
    assert 0 < status["steps_per_s"] <= 100
    (node,) = status["nodes"]
    assert [rank["rank"] for rank in node["ranks"]] == [0, 1]
    assert [rank["pid"] for rank in node["ranks"]] == [run.rank_pid(0), run.rank_pid(1)]
    run.end()
    assert run.code() == 0


def test_status_tells_how_a_job_ended(run: Run) -> None:
    run.train(args=["20"])
    assert run.code() == 0
    status = run.ask("status")
    assert (status["state"], status["step"], status["exit_code"]) == ("ended", 20, 0)


def test_status_tells_of_a_job_whose_launcher_was_killed(run: Run) -> None:
    run.train()
    run.until_stepping()
    run.kill(run.pid)
    run.code()
    run.assert_nobody_left()
    assert run.ask("status")["state"] == "lost"


def test_the_story_of_an_incident_is_one_chain_of_causes(run: Run) -> None:
    run.train()
    run.until_stepping()
    run.kill_rank(0)
    run.until_stepping(round=2)
    (incident,) = run.ask("incidents")
    first, *others = run.ask("incidents", str(incident["id"]), "--story")
    assert first["what"] == "WorkerExited"
    known = {first["id"]}
    for step in others:
        assert step["cause"] in known, step
        known.add(step["id"])
    kinds = [step["what"] for step in others]
    assert kinds[0] == "StopWorkers"
    assert kinds.index("NodeReady") < kinds.index("StartWorkers") < kinds.index("WorkerStarted")
    assert kinds[-1] == "Progress", "the first step after it"
    assert incident["cause"] == first["id"]
    run.end()
    assert run.code() == 0


def test_incidents_have_the_keys_that_tools_rely_on(run: Run) -> None:
    run.train()
    run.until_stepping()
    assert run.ask("incidents") == []
    run.kill_rank(0)
    run.until_stepping(round=2)
    (incident,) = run.ask("incidents")
    assert {
        *["id", "kind", "node", "rank", "round", "signature"],
        *["action", "phases", "lost_s", "lost_steps"],
    } <= set(incident)
    assert incident["id"] >= 1
    assert incident["action"]
    run.end()
    assert run.code() == 0
    assert run.ask("incidents") == [incident]


def test_the_trace_shows_every_rank_and_every_incident(run: Run) -> None:
    run.train()
    run.until_stepping()
    run.kill_rank(1)
    run.until_stepping(round=2)
    run.until(lambda job: min(rank.step for rank in job.ranks.values()) > 20, "more steps")
    run.end()
    assert run.code() == 0
    trace = json.loads((run.job_home / "trace.json").read_text())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] > 0 for event in slices)
    assert {event.get("args", {}).get("round") for event in slices} >= {1, 2}
    told = [event["name"] for event in slices if event["cat"] == "incident"]
    (incident,) = [name for name in told if "is overloaded" not in name]  # That is the machine's.
    assert "killed by SIGKILL" in incident
    named = [event for event in trace["traceEvents"] if event["name"] == "thread_name"]
    names = {event["tid"]: event["args"]["name"] for event in named}
    productive = {names[event["tid"]] for event in slices if event["cat"] == "productive"}
    assert productive == {"rank 0", "rank 1"}


def test_the_summary_gives_steps_and_goodput(run: Run) -> None:
    run.train(args=["20"])
    assert run.code() == 0
    assert f"[holdfast] job {run.job} finished" in run.own_lines
    assert any("20 steps in " in line and "goodput " in line for line in run.own_lines)


def test_quiet_says_nothing_of_our_own(run: Run) -> None:
    run.train("--quiet", args=["5"], nproc=1, script=TRAINER + "\n    print('its own')\n")
    assert run.code() == 0
    assert run.err == ""
    assert "its own" in run.out


def test_the_newest_job_is_meant_when_none_is_named(run: Run) -> None:
    run.train(args=["5"], nproc=1)
    assert run.code() == 0
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "status"],
        env={k: v for k, v in run.env.items() if k != MARKER},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"job {run.job}: ended")


def test_a_checkpoint_section_is_booked_as_such(run: Run) -> None:
    saving = """
        if step == 5:
            entering = time.monotonic()
            with holdfast.section("checkpoint"):
                entered = time.monotonic()
                time.sleep(0.5)
                inside = time.monotonic() - entered
            around = time.monotonic() - entering
    trained = time.monotonic() - began - inside
    with open("seen", "w") as file:
        print(inside, around, trained, file=file)
"""
    run.train(args=["20"], nproc=1, script=TIMED + saving)
    assert run.code() == 0
    seconds = run.ask("goodput")["seconds"]
    inside, around, trained = map(float, (run.folder / "seen").read_text().split())
    assert 0.5 <= inside <= seconds["checkpoint"] <= around
    assert seconds["productive"] <= trained


EVALUATING = (
    TIMED
    + """
        if step in (100, 200) and not os.path.exists(f"evaluated_{step}"):
            with open("trained", "w") as file:
                file.write(str(time.monotonic() - began))
            open(f"evaluating_{step}", "w").close()
            while not os.path.exists(f"evaluated_{step}"):
                time.sleep(0.01)
"""
)


def test_an_evaluation_between_steps_is_never_training(run: Run) -> None:
    run.train(script=EVALUATING, nproc=1)
    wait_for((run.folder / "evaluating_100").exists, "the first evaluation")
    wait_for(lambda: run.ask("status")["no_step_s"], "the time without a step")
    status, first, later = run.ask("status"), run.ask("goodput"), run.ask("goodput")
    assert status["steps_per_s"] == pytest.approx(1 / status["no_step_s"], abs=0.01)
    assert later["goodput"] < first["goodput"]
    assert later["seconds"]["productive"] == first["seconds"]["productive"]
    assert first["seconds"]["productive"] <= float((run.folder / "trained").read_text())
    assert later["seconds"]["unknown"] >= 3
    assert first["unknown_since"] == later["unknown_since"]
    (run.folder / "evaluated_100").touch()
    wait_for((run.folder / "evaluating_200").exists, "the second evaluation")
    wait_for(lambda: run.ask("status")["no_step_s"], "the time without a step")
    run.kill_rank(0)
    (run.folder / "evaluated_200").touch()
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    books = run.ask("goodput")
    assert_adds_up(books, 1)
    assert books["seconds"]["other"] >= 2 * 2.5, "both evaluations"
    assert books["seconds"]["redo"] < 0.5, "the killed one threw no training away"
    assert books["seconds"]["unknown"] == 0


EVALUATED = """
    import os, time
    import holdfast

    rank, step, seen = int(os.environ["RANK"]), 0, {"inside": 0.0, "around": 0.0, "pauses": 0.0}
    while not os.path.exists("end"):
        began, inside = time.monotonic(), 0.0
        if step and step % 40 == 0:
            with holdfast.evaluating():
                entered = time.monotonic()
                time.sleep(0.5)
                inside = time.monotonic() - entered
            seen["inside"] += inside
            seen["around"] += time.monotonic() - began
        time.sleep(0.01)
        step += 1
        holdfast.progress(step)
        took = time.monotonic() - began - inside
        seen["pauses"] += took if took > PAUSE_LEAST_S else 0.0
    with open(f"seen_{rank}", "w") as file:
        print(*seen.values(), file=file)
""".replace("PAUSE_LEAST_S", str(PAUSE_LEAST_S))
"""Evaluates every 40 steps, and notes for how long, measured within and around; and how long the steps
were that had anything else in them, as those of a rank that the machine did not run for a while."""


def test_an_evaluation_that_is_marked_is_booked_as_such_and_nowhere_else(run: Run) -> None:
    run.train(script=EVALUATED)
    run.until_stepping()
    run.until(lambda job: all(rank.step > 90 for rank in job.ranks.values()), "two evaluations")
    run.end()
    assert run.code() == 0
    books = run.ask("goodput")
    assert_adds_up(books, 2)
    noted = [(run.folder / f"seen_{rank}").read_text().split() for rank in (0, 1)]
    inside, around, pauses = (sum(map(float, column)) for column in zip(*noted, strict=True))
    assert inside >= 2 * 2 * 0.5
    assert inside <= books["seconds"]["evaluation"] <= around
    assert books["seconds"]["other"] <= pauses


SAMPLED = (
    TRAINER
    + """
        from holdfast.data import link
        link.current().delivered(8)
        if step % 40 == 0:
            with holdfast.evaluating():
                link.current().delivered(1000)
        holdfast.barrier()
"""
)


def test_samples_a_second_are_those_of_the_training_alone(run: Run) -> None:
    run.train(script=SAMPLED, nproc=2)
    run.until_stepping()
    run.until(lambda job: min(rank.step for rank in job.ranks.values()) > 90, "two evaluations")
    run.until(lambda job: all(w.samples_per_s for w in job.speeds.windows.values()), "the speed")
    status = run.ask("status")
    (node,) = status["nodes"]
    for rank in node["ranks"]:
        assert rank["samples_per_s"] == pytest.approx(8 * rank["steps_per_s"], rel=0.01)
    a_step = sum(rank["samples_per_s"] for rank in node["ranks"]) / node["ranks"][0]["steps_per_s"]
    assert status["samples_per_s"] == pytest.approx(a_step * status["steps_per_s"], rel=0.01)
    run.kill_rank(1)
    run.until_stepping(round=2)
    run.until(lambda job: job.speed.samples_per_s, "the speed of the second round")
    run.end()
    assert run.code() == 0
    books = run.ask("goodput")
    assert_adds_up(books, 2)
    steps = run.ask("status")["step"]
    assert books["samples"] == pytest.approx(2 * 8 * steps, abs=100), "an evaluation has 1000"


TEARDOWN = (
    """
    import atexit, os, time
    if os.environ["RANK"] == "0":
        with open("at_" + os.environ["TORCHELASTIC_RESTART_COUNT"], "w") as file:
            file.write(str(time.monotonic()))
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            atexit.register(time.sleep, 2)
"""
    + TRAINER
    + """
        if step == 50 and rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            with open("at_0", "w") as file:
                file.write(str(time.monotonic()))
            raise ValueError("loss is nan")
"""
)
"""Notes when rank 0 raises, and when it is started again."""


def test_an_incident_costs_the_failed_processs_teardown_too(run: Run) -> None:
    run.train(script=TEARDOWN)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    (incident,) = run.ask("incidents")
    assert incident["signature"].startswith("ValueError at ")
    raised, again = (float((run.folder / f"at_{n}").read_text()) for n in (0, 1))
    assert 2 <= incident["phases"]["teardown"] <= again - raised
    assert incident["lost_s"] == pytest.approx(sum(incident["phases"].values()), abs=1e-3)
    assert f"(teardown {incident['phases']['teardown']:.2f}, " in incident["line"]
    books = run.ask("goodput")
    assert_adds_up(books, 2)
    assert books["seconds"]["detect"] >= 2, "rank 0's teardown"


# ---- steps of scripts with torch ---------------------------------------------------------------

OPTIMIZERS = """
    import os, sys, time
    import torch
    import holdfast

    def optimizer():
        return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    generator, critic = optimizer(), optimizer()
    for step in range(1, 21):
        critic.step()
        generator.step()
        if "--own" in sys.argv:
            holdfast.progress(1000 + step)
"""


def test_steps_are_counted_once_for_a_script_with_two_optimizers(run: Run) -> None:
    run.start(run.write(OPTIMIZERS), nproc=1)
    assert run.code() == 0
    assert run.ask("status")["step"] == 20


def test_the_scripts_own_count_wins_over_the_optimizers(run: Run) -> None:
    run.start("--standby", "0", run.write(OPTIMIZERS), "--own", nproc=1)
    assert run.code() == 0
    assert run.ask("status")["step"] == 1020


def test_progress_does_nothing_without_a_launcher(run: Run) -> None:
    script = run.write("import holdfast; holdfast.progress(1); print('fine')\n")
    plain = subprocess.run(
        [sys.executable, script], cwd=run.folder, env=run.env, capture_output=True, check=True
    )
    assert plain.stdout == b"fine\n"


DDP = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        going_on = torch.tensor([float(not os.path.exists("end"))])
        dist.broadcast(going_on, 0)
        if not going_on:
            break
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    print("world", dist.get_world_size())
"""


def test_a_plain_ddp_script_is_back_on_standbys_after_a_kill(run: Run) -> None:
    run.start(run.write(DDP))
    run.until_standbys(2)
    standbys = set(run.standbys())
    run.kill_rank(1)
    job = run.until_stepping(round=2)
    assert {rank.pid for rank in job.ranks.values()} == standbys
    run.end()
    assert run.code() == 0
    assert run.out.count("world 2") == 2
    (incident,) = run.ask("incidents")
    assert (incident["kind"], incident["rank"]) == ("signal", 1)
    assert incident["signature"] == "killed by SIGKILL"
    assert_adds_up(run.ask("goodput"), 2)


COUPLED = """
    import os, time
    import holdfast

    rank, first = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if rank == 0 and first:
        with open("pid.new", "w") as file:
            file.write(str(os.getpid()))
        os.replace("pid.new", "pid")

    def peer_is_dead():
        with open(f"/proc/{open('pid').read()}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"

    step = 0
    while not os.path.exists("end"):
        time.sleep(0.01)
        step += 1
        holdfast.progress(step)
        if rank == 1 and first and os.path.exists("pid") and peer_is_dead():
            raise RuntimeError("Connection closed by peer")
"""
"""Rank 1 fails when rank 0 is dead, with the words of a broken collective."""


def test_the_victim_is_blamed_and_not_the_rank_whose_collective_broke(run: Run) -> None:
    run.train(script=COUPLED)
    run.until_standbys(2)
    os.kill(run.agent(), signal.SIGSTOP)
    victim = run.kill_rank(0)
    other = run.rank_pid(1)
    wait_for(lambda: all(_is_zombie(pid) for pid in (victim, other)), "the death of both ranks")
    os.kill(run.agent(), signal.SIGCONT)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    (incident,) = run.ask("incidents")
    assert (incident["rank"], incident["signature"]) == (0, "killed by SIGKILL")


def _is_zombie(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"
