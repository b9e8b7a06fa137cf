"""A rank dies, and training goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from holdfast.core.patience import STOP_UNKNOWN_S

from .harness import TRAINER, Run, gone, wait_for

BACK_WITHIN_S = STOP_UNKNOWN_S / 2
"""Half of what a rank that does not stop is waited for. How fast it really is, the bench says."""

DYING = """
    import os, sys, time
    import holdfast

    rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    open(f"started_{rank}_{restarts}", "w").close()
    step = 0 if restarts == 0 else 10
    while not os.path.exists("end"):
        time.sleep(0.01)
        step += 1
        holdfast.progress(step)
        if rank == 1 and restarts == 0 and step == 15:
            die()
"""
"""Rank 1 dies at step 15 of the first round in a way to be filled in; the next round goes on at 10."""


def dying(how: str) -> str:
    return DYING.replace("die()", how)


@pytest.mark.parametrize(
    ("how", "kind", "signature"),
    [
        ("os.kill(os.getpid(), 9)", "signal", "killed by SIGKILL"),
        ("os.kill(os.getpid(), 11)", "signal", "killed by SIGSEGV"),
        ("os.abort()", "signal", "killed by SIGABRT"),
        ("sys.exit(7)", "exit", "exit code 7"),
        ("os._exit(7)", "exit", "exit code 7"),
        ("raise RuntimeError('as it happens')", "exception", "RuntimeError at train.py:13"),
    ],
    ids=["SIGKILL", "SIGSEGV", "abort", "sys.exit", "os._exit", "exception"],
)
def test_whatever_ends_a_rank_after_progress_training_goes_on(
    run: Run, how: str, kind: str, signature: str
) -> None:
    run.train(script=dying(how))
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    (incident,) = run.ask("incidents")
    assert incident["kind"] == kind
    assert incident["signature"] == signature
    assert (incident["rank"], incident["round"], incident["step"]) == (1, 1, 15)
    assert incident["lost_steps"] == 5
    torn_down = ["teardown"] if kind == "exception" else []
    repair = ["detect", "stop", "rendezvous", "start", "first_step"]
    assert list(incident["phases"]) == [*torn_down, *repair]
    assert incident["lost_s"] == pytest.approx(sum(incident["phases"].values()), abs=1e-4)
    assert incident["lost_s"] < BACK_WITHIN_S
    assert {path.name for path in run.folder.glob("started_*")} == {
        f"started_{rank}_{restarts}" for rank in (0, 1) for restarts in (0, 1)
    }


def test_the_summary_tells_of_the_incident_in_one_line(run: Run) -> None:
    run.train()
    run.until_stepping()
    run.kill_rank(1)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    lines = [line for line in run.own_lines if "killed by SIGKILL" in line and "incident" in line]
    assert len(lines) == 1
    assert "rank 1 killed by SIGKILL at step " in lines[0]
    assert ": back in " in lines[0]
    assert lines[0].endswith(" steps redone")


def test_an_exceptions_traceback_is_in_the_incident_and_in_the_log(run: Run) -> None:
    run.train(script=dying("raise RuntimeError('as it happens')"))
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    (incident,) = run.ask("incidents")
    assert incident["detail"].endswith("RuntimeError: as it happens\n")
    assert "holdfast/worker" not in incident["detail"]
    assert run.log(1).endswith(b"RuntimeError: as it happens\n")


def test_two_ranks_killed_at_once_are_one_incident(run: Run) -> None:
    run.train(nproc=3)
    run.until_stepping()
    pids = [run.rank_pid(0), run.rank_pid(2)]
    os.kill(run.agent(), signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    os.kill(run.agent(), signal.SIGCONT)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    (incident,) = run.ask("incidents")
    assert incident["rank"] in (0, 2)
    assert incident["round"] == 1


def test_a_kill_during_the_repair_is_repaired_as_well(run: Run) -> None:
    run.train()
    run.until_stepping()
    run.kill_rank(0)
    run.until(lambda job: job.membership.round == 2 and job.ranks[1].pid, "rank 1 of round 2")
    run.kill_rank(1)
    run.until_stepping(round=3)
    run.end()
    assert run.code() == 0
    assert len(run.ask("incidents")) == 2


def test_a_rank_that_ends_early_with_0_is_no_failure(run: Run) -> None:
    run.train(script=dying("sys.exit(0)"))
    run.until(lambda job: job.ranks and job.ranks[1].finished, "the end of rank 1")
    run.until(lambda job: job.ranks[0].step >= 30, "more steps of rank 0")
    run.end()
    assert run.code() == 0
    assert run.ask("incidents") == []


def test_a_clean_end_of_all_ranks_ends_the_job_with_0(run: Run) -> None:
    run.train("--standby", "0", script="print('nothing to do')")
    assert run.code() == 0
    assert f"[holdfast] job {run.job} finished" in run.err


def test_a_rank_that_was_through_is_started_again_with_the_others(run: Run) -> None:
    run.train(script=dying("sys.exit(0)"))
    run.until(lambda job: job.ranks and job.ranks[1].finished, "the end of rank 1")
    run.kill_rank(0)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    assert (run.folder / "started_1_1").exists()


# ---- when it stops -----------------------------------------------------------------------------


def test_max_restarts_caps_the_restarts_and_then_the_job_ends_with_1(run: Run) -> None:
    run.train("--max-restarts", "2", script=dying("pass").replace("pass", "0") + EXIT_AT_15)
    assert run.code() == 1
    assert "2 restarts allowed and used" in run.err
    assert len(run.ask("incidents")) == 3
    started = {path.name for path in run.folder.glob("started_0_*")}
    assert started == {"started_0_0", "started_0_1", "started_0_2"}


EXIT_AT_15 = """
        if rank == 0 and step >= 15 + restarts:
            sys.exit(3)
"""


def test_max_restarts_0_allows_none(run: Run) -> None:
    run.train("--max-restarts", "0", script=dying("sys.exit(3)"))
    assert run.code() == 1
    assert "0 restarts allowed and used" in run.err


def test_max_restarts_also_counts_failures_before_the_first_step_as_torchrun_does(
    run: Run,
) -> None:
    run.train("--standby", "0", "--max-restarts", "1", nproc=1, script="raise ValueError('x')")
    assert run.code() == 1
    assert len(run.ask("incidents")) == 2


def test_the_same_failure_at_the_same_step_3_times_ends_with_93_and_the_reason(run: Run) -> None:
    script = dying("pass").replace("rank == 1 and restarts == 0 and", "rank == 1 and")
    run.train(script=script.replace("pass", "raise ValueError('bad batch')"))
    assert run.code() == 93
    assert "do not requeue" in run.err
    assert "ValueError at train.py:13 at step 15, 3 times in a row" in run.err
    assert len(run.ask("incidents")) == 3


# ---- how the others are stopped ----------------------------------------------------------------


def test_a_rank_that_ignores_sigterm_is_killed_at_once(run: Run) -> None:
    ignore = "\n    import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    run.train(script=TRAINER.replace("    import holdfast\n", "    import holdfast\n" + ignore))
    run.until_stepping()
    run.kill_rank(1)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    (incident,) = run.ask("incidents")
    assert incident["phases"]["stop"] < BACK_WITHIN_S


SAVES = """
    import signal
    def save(number, frame):
        time.sleep(1.0)
        open(f"saved_{rank}", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
"""


def test_a_rank_that_handles_sigterm_is_given_the_time_it_needs(run: Run) -> None:
    run.train(script=TRAINER.replace("    kept =", SAVES + "    kept ="))
    run.until_stepping()
    run.kill_rank(1)
    run.until_stepping(round=2)
    assert (run.folder / "saved_0").exists()
    run.end()
    assert run.code() == 0
    (incident,) = run.ask("incidents")
    assert 1.0 <= incident["phases"]["stop"] < BACK_WITHIN_S


def test_shutdown_timeout_limits_that_time(run: Run) -> None:
    run.train(
        "--shutdown-timeout",
        "0.2",
        script=TRAINER.replace("    kept =", SAVES.replace("1.0", "60") + "    kept ="),
    )
    run.until_stepping()
    run.kill_rank(1)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0


DAEMON = """
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            name = f"daemon_{rank}_" + os.environ["TORCHELASTIC_RESTART_COUNT"]
            with open(name + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(name + ".new", name)
            time.sleep(1000)
        os._exit(0)
"""


def test_a_daemon_that_a_rank_forked_off_twice_is_gone_after_the_round(run: Run) -> None:
    run.train(script=TRAINER.replace("    kept =", DAEMON + "    kept ="))
    run.until_stepping()
    daemons = [int(_content(run, f"daemon_{rank}_0")) for rank in (0, 1)]
    assert not any(map(gone, daemons))
    run.kill_rank(1)
    run.until_stepping(round=2)
    assert all(map(gone, daemons))
    run.end()
    assert run.code() == 0


def _content(run: Run, name: str) -> str:
    path: Path = run.folder / name
    wait_for(path.exists, name)
    return path.read_text()


def test_a_child_of_a_rank_dies_with_it(run: Run) -> None:
    child = """
    import subprocess
    sleeper = subprocess.Popen(["sleep", "1000"])
    with open(f"child_{rank}.new", "w") as file:
        file.write(str(sleeper.pid))
    os.rename(f"child_{rank}.new", f"child_{rank}")
"""
    run.train(script=TRAINER.replace("    kept =", child + "    kept ="))
    run.until_stepping()
    children = [int(_content(run, f"child_{rank}")) for rank in (0, 1)]
    run.kill_rank(1)
    run.until_stepping(round=2)
    assert all(map(gone, children))
    run.end()
    assert run.code() == 0
