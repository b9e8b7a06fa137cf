"""Any process of ours may die: standby, nursery, agent, coordinator, launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.patience import STOP_UNKNOWN_S

from .harness import TRAINER, Run, gone, wait_for

GONE_WITHIN_S = STOP_UNKNOWN_S / 2
"""Half of what a rank that does not stop is waited for."""


# ---- standbys and the nursery ------------------------------------------------------------------


def test_a_standby_killed_while_waiting_is_replaced(run: Run) -> None:
    run.train()
    before = run.until_standbys(2)
    run.kill(before[0])
    after = wait_for(
        lambda: found if len(found := run.standbys()) == 2 and before[0] not in found else [],
        "another standby",
    )
    run.kill_rank(1)
    job = run.until_stepping(round=2)
    assert {rank.pid for rank in job.ranks.values()} == set(after)
    run.end()
    assert run.code() == 0
    assert len(run.ask("incidents")) == 1


def test_standbys_are_replaced_after_they_were_used(run: Run) -> None:
    run.train()
    first = run.until_standbys(2)
    run.kill_rank(0)
    run.until_stepping(round=2)
    second = run.until_standbys(2)
    assert not set(first) & set(second)
    run.end()
    assert run.code() == 0


def test_no_standby_means_a_fresh_process_for_each_rank(run: Run) -> None:
    run.train("--standby", "0")
    run.until_stepping()
    run.kill_rank(0)
    run.until_stepping(round=2)
    assert run.standbys() == []
    run.end()
    assert run.code() == 0


def test_a_nursery_that_is_killed_is_replaced_and_the_next_repair_works(run: Run) -> None:
    run.train()
    run.until_standbys(2)
    nursery = run.nursery()
    run.kill(nursery)
    wait_for(lambda: run.nursery() != nursery, "another nursery")
    run.kill_rank(0)
    run.until_stepping(round=2)
    run.kill_rank(0)
    run.until_stepping(round=3)
    run.end()
    assert run.code() == 0
    assert len(run.ask("incidents")) == 2


def test_the_nursery_and_all_standbys_killed_together_with_a_rank(run: Run) -> None:
    run.train()
    standbys = run.until_standbys(2)
    for pid in [run.nursery(), *standbys, run.rank_pid(1)]:
        run.kill(pid)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0


def test_a_nursery_that_always_dies_costs_the_standbys_and_not_the_job(run: Run) -> None:
    run.train()
    for _ in range(3):
        run.until_stepping()
        nursery = run.nursery()
        run.kill(nursery)
        wait_for(lambda pid=nursery: gone(pid), "its death")  # type: ignore[misc]
    run.kill_rank(0)
    run.until_stepping(round=2)
    run.kill_rank(0)
    run.until_stepping(round=3)
    run.end()
    assert run.code() == 0


SLOW_START = """
    import os, time
    with open("starting.new", "w") as file:
        file.write(str(os.getpid()))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
        os.rename("starting.new", "starting")
        time.sleep(1000)
"""


def test_a_worker_killed_while_its_script_starts_is_started_again(run: Run) -> None:
    run.train(script=SLOW_START + TRAINER)
    path = run.folder / "starting"
    wait_for(path.exists, "the start of rank 0")
    run.kill(int(path.read_text()))
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    (incident,) = run.ask("incidents")
    assert incident["signature"] == "killed by SIGKILL"


def test_a_worker_killed_before_its_script_runs_is_started_again(run: Run) -> None:
    run.without_torch()
    run.start("--standby", "0", run.write(TRAINER))
    agent = run.agent()
    children = Path(f"/proc/{agent}/task/{agent}/children")
    victim = wait_for(lambda: children.read_text().split(), "the first worker")[0]
    run.kill(int(victim))
    run.until_stepping()
    run.end()
    assert run.code() == 0


# ---- agent and coordinator ---------------------------------------------------------------------


def test_an_agent_that_is_killed_is_replaced_and_the_job_goes_on(run: Run) -> None:
    run.train()
    run.until_stepping()
    agent, ranks = run.agent(), [run.rank_pid(0), run.rank_pid(1)]
    run.kill(agent)
    run.until(lambda job: job.membership.round >= 2 and not job.unstepped, "steps in a new round")
    assert all(map(gone, ranks))
    assert run.agent() != agent
    run.end()
    assert run.code() == 0
    (incident,) = run.ask("incidents")
    assert incident["kind"] == "node"
    books = run.ask("goodput")
    assert books["ranks"] == 2
    assert sum(books["seconds"].values()) == pytest.approx(2 * books["wall_s"], rel=0.01)


def test_an_agent_that_always_dies_ends_the_job_with_one_line(run: Run) -> None:
    run.train("--standby", "0", nproc=1)
    run.until_stepping()
    killed: set[int] = set()

    def kill_next() -> bool:
        found = {pid for pid in run.alive() if _comm(pid) == "holdfast-agent"} - killed
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        killed.update(found)
        assert run.process is not None
        return run.process.poll() is not None

    wait_for(kill_next, "the end of the job")
    assert run.code() == 1
    assert "the agent was killed by signal 9, 6 times within a minute" in run.err


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_training_never_notices_that_the_coordinator_was_killed(run: Run) -> None:
    run.train()
    before = run.until_stepping()
    coordinator = run.coordinator()
    run.kill(coordinator)
    wait_for(lambda: run.coordinator() != coordinator, "another coordinator")
    highest = before.highest
    after = run.until(lambda job: job.highest > highest + 20, "steps after that")
    assert after.membership.round == 1
    assert [after.ranks[rank].pid for rank in (0, 1)] == [before.ranks[rank].pid for rank in (0, 1)]
    assert run.ask("incidents") == []
    run.kill_rank(1)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    assert len(run.ask("incidents")) == 1
    books = run.ask("goodput")
    assert books["ranks"] == 2
    assert sum(books["seconds"].values()) == pytest.approx(2 * books["wall_s"], rel=0.01)


def test_a_rank_and_the_coordinator_killed_together_are_both_back(run: Run) -> None:
    run.train()
    run.until_stepping()
    coordinator, rank = run.coordinator(), run.rank_pid(0)
    run.kill(coordinator)
    run.kill(rank)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    (incident,) = run.ask("incidents")
    assert incident["rank"] == 0


def test_a_coordinator_that_is_back_does_not_tell_again_of_what_is_over(run: Run) -> None:
    run.train()
    for number in (1, 2):
        run.until_stepping(round=number)
        run.kill_rank(number - 1)
        run.until(
            lambda job, n=number: len(job.incidents) == n and job.incidents[-1].closed_at,
            f"the end of incident {number}",
        )
        coordinator = run.coordinator()
        run.kill(coordinator)
        wait_for(lambda was=coordinator: run.coordinator() != was, "another coordinator")
    run.until_stepping(round=3)
    run.end()
    assert run.code() == 0
    told = [line for line in run.own_lines if line.startswith("[holdfast] rank")]
    assert len(told) == len(set(told)) <= 2, "each once, if its coordinator lived to tell of it"


def test_standbys_that_somebody_stopped_are_found_when_they_get_ranks(run: Run) -> None:
    run.train()
    for pid in run.until_standbys(2):
        run.kill(pid, signal.SIGSTOP)
    run.kill_rank(1)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    first, *others = run.ask("incidents")
    assert first["kind"] == "signal"
    assert {other["kind"] for other in others} == {"hang"}
    assert "stopped" in run.err, "with or without a closer look, which may come too late to be told"


def test_a_nursery_that_somebody_stopped_still_forks(run: Run) -> None:
    run.train()
    standbys = run.until_standbys(2)
    run.kill(run.nursery(), signal.SIGSTOP)
    for pid in standbys:
        run.kill(pid)
    wait_for(lambda: all(gone(pid) for pid in standbys), "the end of the standbys")
    run.kill_rank(1)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0


def test_an_agent_that_stays_stopped_is_ended_and_another_one_joins(run: Run) -> None:
    run.env["HOLDFAST_STOPPED_LIMIT"] = "0.5"
    run.train()
    run.until_stepping()
    stopped = run.agent()
    run.kill(stopped, signal.SIGSTOP)
    wait_for(lambda: gone(stopped), "the end of the stopped agent")
    run.until_stepping(round=2)
    assert run.agent() != stopped
    run.end()
    assert run.code() == 0
    assert "the agent is stopped and nobody continues it" in run.err


def test_a_coordinator_that_stays_stopped_is_started_again(run: Run) -> None:
    run.env["HOLDFAST_STOPPED_LIMIT"] = "0.5"
    run.train()
    run.until_stepping()
    stopped = run.coordinator()
    run.kill(stopped, signal.SIGSTOP)
    wait_for(lambda: gone(stopped) and run.coordinator(), "another coordinator")
    run.kill_rank(1)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0


def test_an_agent_that_is_continued_in_time_goes_on(run: Run) -> None:
    run.env["HOLDFAST_STOPPED_LIMIT"] = "2"
    run.train()
    run.until_stepping()
    agent, kept = run.agent(), run.folder / "step_0"
    run.kill(agent, signal.SIGSTOP)
    stopped_at = int(kept.read_text())
    wait_for(lambda: int(kept.read_text()) > stopped_at + 10, "steps of its ranks meanwhile")
    run.kill(agent, signal.SIGCONT)
    run.until(lambda job: job.highest > stopped_at + 300, "steps after the limit")
    assert run.agent() == agent
    run.end()
    assert run.code() == 0


def test_a_job_whose_agent_is_stopped_can_be_ended_by_hand(run: Run) -> None:
    run.train()
    run.until_stepping()
    run.kill(run.agent(), signal.SIGSTOP)
    run.kill(run.pid, signal.SIGINT)
    assert run.code() == 1
    run.assert_nobody_left()


def test_a_coordinator_killed_at_the_very_end_loses_no_exit_code(run: Run) -> None:
    run.train(args=["30"])
    run.until_stepping()
    run.kill(run.coordinator())
    assert run.code() == 0
    assert run.ask("status")["state"] == "ended"


def test_an_agent_killed_after_the_job_has_ended_is_not_replaced(run: Run) -> None:
    reader, writer = os.pipe()
    more_than_a_pipe_holds = '    print("\\n" * (1 << 16))\n'  # The agent waits for its reader.
    run.train(script=TRAINER + more_than_a_pipe_holds, args=["30"], nproc=1, stdout=writer)
    os.close(writer)
    agent, coordinator = run.agent(), run.coordinator()
    wait_for(lambda: not Path(f"/proc/{coordinator}").exists(), "the coordinator's end")
    run.kill(agent)
    assert run.code(GONE_WITHIN_S) == 0
    os.close(reader)
    assert "starting it again" not in run.err
    assert run.ask("status")["state"] == "ended"


# ---- the launcher ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (signal.SIGTERM, 75, "stopped by SIGTERM"),
        (signal.SIGINT, 1, "stopped by SIGINT"),
        (signal.SIGHUP, 75, "stopped by SIGHUP"),
    ],
    ids=["SIGTERM", "SIGINT", "SIGHUP"],
)
def test_a_launcher_told_to_stop_ends_all_ranks_and_says_so(
    run: Run, number: signal.Signals, code: int, says: str
) -> None:
    run.train()
    run.until_standbys(2)
    run.kill(run.pid, number)
    assert run.code(GONE_WITHIN_S) == code
    run.assert_nobody_left(0.0)
    assert f"exit code {code}" in run.err
    assert says in run.err
    assert run.ask("status")["state"] == "ended"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_launcher_told_to_stop_while_it_starts_ends_as_well(
    run: Run, number: signal.Signals
) -> None:
    run.train(script="import time; time.sleep(1000)")
    run.agent()
    run.kill(run.pid, number)
    assert run.code(GONE_WITHIN_S) == (1 if number == signal.SIGINT else 75)
    run.assert_nobody_left()


def test_ranks_are_told_before_the_launcher_ends(run: Run) -> None:
    saves = """
    import signal
    def save(number, frame):
        time.sleep(0.5)
        open(f"saved_{rank}", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
"""
    run.train(script=TRAINER.replace("    kept =", saves + "    kept ="))
    run.until_stepping()
    run.kill(run.pid, signal.SIGTERM)
    assert run.code() == 75
    assert (run.folder / "saved_0").exists()
    assert (run.folder / "saved_1").exists()


def test_a_second_sigint_ends_ranks_that_take_too_long(run: Run) -> None:
    slow = """
    import signal
    def linger(number, frame):
        open(f"lingering_{rank}", "w").close()
        time.sleep(1000)
    signal.signal(signal.SIGINT, linger)
"""
    run.train(script=TRAINER.replace("    kept =", slow + "    kept ="))
    run.until_stepping()
    run.kill(run.pid, signal.SIGINT)
    lingering = [run.folder / f"lingering_{rank}" for rank in (0, 1)]
    wait_for(lambda: all(path.exists() for path in lingering), "ranks that linger")
    run.kill(run.pid, signal.SIGINT)
    assert run.code(GONE_WITHIN_S) == 1


DAEMON = """
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        while True:
            time.sleep(1000)
"""


def test_a_launcher_that_is_killed_leaves_nobody_behind(run: Run) -> None:
    ignores = "    import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    run.train(script=TRAINER.replace("    kept =", DAEMON + ignores + "    kept ="))
    run.until_stepping()
    everybody = 3 + 1 + 2 + 2 + 2  # of the launcher, the nursery, standbys, ranks, daemons
    wait_for(lambda: len(run.alive()) == everybody, "standbys and daemons")
    run.kill(run.pid)
    assert run.code() == -signal.SIGKILL
    run.assert_nobody_left(GONE_WITHIN_S)


def test_a_launcher_and_its_agent_killed_together_leave_no_rank_behind(run: Run) -> None:
    run.train()
    run.until_standbys(2)
    agent = run.agent()
    run.kill(run.pid, signal.SIGSTOP)
    run.kill(agent)
    run.kill(run.pid)
    run.assert_nobody_left(GONE_WITHIN_S)


def test_a_launcher_whose_terminal_is_gone_still_ends_well(run: Run) -> None:
    reader, writer = os.pipe()
    run.train(args=["30"], stdout=writer, stderr=writer)
    os.close(writer)
    os.close(reader)
    assert run.code() == 0
    assert run.ask("status")["state"] == "ended"


def test_the_launcher_never_imports_torch(run: Run) -> None:
    run.train()
    run.until_stepping()
    for pid in (run.pid, run.agent(), run.coordinator()):
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    run.end()
    assert run.code() == 0


# ---- again and again ---------------------------------------------------------------------------


def test_10_kills_leave_no_process_file_or_socket_behind(run: Run) -> None:
    run.train()
    run.until_standbys(2)
    shared = set(os.listdir("/dev/shm"))
    agent, coordinator = run.agent(), run.coordinator()
    run.kill_rank(1)
    run.until_stepping(round=2)
    run.until_standbys(2)
    before = _open_files(agent) + _open_files(coordinator)
    for round in range(3, 12):
        run.kill_rank(round % 2)
        run.until_stepping(round)
        run.until_standbys(2)
    # Whatever is in the making at either moment is not a leak; one file a kill would be 9 more.
    wait_for(
        lambda: _open_files(agent) + _open_files(coordinator) < before + 5,
        f"no more than the {before} open files of the second round",
    )
    wait_for(lambda: len(run.alive()) == 3 + 1 + 2 + 2, "as many processes as at the start")
    run.end()
    assert run.code() == 0
    assert len(run.ask("incidents")) == 10
    mine = {name for name in set(os.listdir("/dev/shm")) - shared if run.marker in name}
    assert not mine


def _open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_the_help_of_a_command_costs_next_to_nothing(run: Run) -> None:
    """Loosely: the exact number is the bench's. What matters is that nothing heavy is imported."""
    code = "import sys; from holdfast.cli.main import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "numpy", "rich", "asyncio", "msgspec", "sqlite3"}
