"""Injected faults end to end: each strikes its target in its step, and the job goes on."""

from __future__ import annotations

import io
import json
import os
import re
import statistics
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast import cgroups
from holdfast.cli.main import main
from holdfast.core.chaos.plans import Chaos

from .harness import TRAINER, Run, of_the_machine, wait_for

TOGETHER = TRAINER + "        holdfast.barrier()\n"
"""The same, in step with the others."""


class Said(NamedTuple):
    code: int
    text: str


def say(run: Run, *words: str) -> Said:
    """What `holdfast WORDS` says; in this process, since starting one takes longer than the rest."""
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(told), redirect_stderr(told):
        patch.setenv("HOLDFAST_HOME", str(run.home))
        return Said(main(words), told.getvalue())


def chaos(run: Run, *words: str) -> Said:
    return say(run, "chaos", run.job, *words)


def inject(run: Run, *words: str) -> Any:
    said = chaos(run, *words, "--json")
    assert said.code == 0, said.text
    (taken,) = json.loads(said.text)
    return taken


def ask(run: Run, command: str) -> Any:
    answer = json.loads(say(run, command, run.job, "--json").text)
    if command == "incidents":
        return [one for one in answer if not of_the_machine(one["kind"])]
    return answer


def incidents(run: Run) -> list[tuple[Any, ...]]:
    """What each incident was, whom it befell and in which step, and whether it was asked for."""
    found = ask(run, "incidents")
    return [(i["kind"], i["rank"], i["step"], (i["injected"] or "real").split()[0]) for i in found]


def until_injected(run: Run, count: int) -> None:
    run.until(lambda job: job.of(Chaos).count >= count, f"{count} injections")


def until_back(run: Run, count: int) -> None:
    """Wait until there were so many incidents, and the last one is over."""

    def back(job: Any) -> bool:
        return len(job.incidents) >= count and job.incidents[-1].closed_at is not None

    run.until(back, f"the end of incident {count}")


def until_in_state(pid: int, states: str) -> None:
    def look() -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in states

    wait_for(look, f"process {pid} in state {states}")


def test_a_schedule_befalls_the_same_ranks_in_the_same_steps_each_time(
    make_run: Callable[[], Run],
) -> None:
    schedule = (
        "kill@step=15,rank=1; term@step=30,rank=0; exception@step=45,seed=3; segfault@step=75,rank=0;"
        "exit@step=60,rank=1,value=9; abort@step=90,rank=any,seed=4; kill@every=125,seed=11"
    )
    stories = []
    for _ in range(2):
        run = make_run()
        run.train(script=TOGETHER, args=["140"], env={"HOLDFAST_CHAOS": schedule})
        assert run.code() == 0
        stories.append(incidents(run))
        for rank in (0, 1):
            (run.folder / f"step_{rank}").unlink()
    assert stories[0] == stories[1]
    by_step = {step: (kind, rank, injected) for kind, rank, step, injected in stories[0]}
    assert by_step[15] == ("signal", 1, "kill")
    assert by_step[30] == ("signal", 0, "term")
    assert by_step[45] == ("exception", 0, "exception")
    assert by_step[60] == ("exit", 1, "exit")
    assert by_step[75] == ("signal", 0, "segfault")
    assert by_step[90] == ("signal", 1, "abort")
    assert by_step[111] == ("signal", 1, "kill")
    assert len(by_step) == 7
    assert "InjectedFault: requested with `holdfast chaos`, at step 45" in run.err
    assert "[injected: exit on rank 1 at step 60]" in run.err


def test_each_way_to_stand_still_is_found_and_repaired(run: Run) -> None:
    schedule = "stop@step=10,rank=1; hang@step=20,rank=0; gil@step=30,rank=1; loop@step=40,rank=0"
    flags = ("--rank-heartbeat-timeout", "5", "--chaos", schedule)
    run.train(*flags, script=TOGETHER, args=["50"])
    assert run.code() == 0
    assert [(i["kind"], i["rank"], i["injected"]) for i in ask(run, "incidents")] == [
        ("hang", 1, "stop on rank 1 at step 10"),
        ("hang", 0, "hang on rank 0 at step 20"),
        ("hang", 1, "gil on rank 1 at step 30"),
        ("hang", 0, "loop on rank 0 at step 40"),
    ]


def test_a_running_job_is_asked_from_outside(run: Run) -> None:
    run.train()
    run.until_stepping()
    taken = inject(run, "kill", "--rank", "1")
    assert (taken["outcome"], taken["rank"]) == ("done", 1)
    until_back(run, 1)
    done = chaos(run, "exit", "--rank", "0", "--at-step", "3000", "--value", "3")
    assert done.text.startswith("to come: exit (3) on rank 0 at step 3000")
    (pending,) = ask(run, "status")["faults"]["pending"]
    assert (pending["fault"], pending["rank"], pending["step"]) == ("exit", 0, 3000)

    def refused(*words: str) -> str:
        done = chaos(run, *words)
        assert done.code in (1, 2)
        return done.text

    assert "ranks 0 to 1" in refused("kill", "--rank", "7")
    assert "is over: the job has come to step" in refused("kill", "--at-step", "1")
    assert "did you mean kill?" in refused("kil")
    assert "takes no value" in refused("kill", "--value", "3")
    assert "a rank is a number, or any" in refused("kill", "--rank", "x")
    if not os.path.exists("/dev/nvidia0"):
        assert "no CUDA device" in refused("gpu-error", "--rank", "0")
    assert "no keeper" in refused("diskfull")
    run.end()
    assert run.code() == 0
    assert incidents(run)[0][3] == "kill"
    assert len(incidents(run)) == 1


def test_whoever_has_not_the_jobs_token_can_do_nothing(run: Run) -> None:
    run.train()
    run.until_stepping()
    job_file = run.job_home / "job.json"
    good = job_file.read_text()
    job_file.write_text(re.sub(r'"token": "[^"]*"', '"token": "guessed"', good))
    done = chaos(run, "kill", "--rank", "0")
    assert done.code == 1
    assert "wrong token" in done.text
    job_file.write_text(good)
    run.end()
    assert run.code() == 0
    job = run.peek()
    assert job is not None
    assert job.of(Chaos).plans == []
    assert job.incidents == []


def test_a_stopped_rank_can_be_continued(run: Run) -> None:
    run.train("--no-hang-detection")
    run.until_stepping()
    pid = run.rank_pid(1)
    assert inject(run, "stop", "--rank", "1")["outcome"] == "done"
    until_in_state(pid, "T")
    assert inject(run, "cont", "--rank", "1")["outcome"] == "done"
    until_in_state(pid, "SR")
    run.end()
    assert run.code() == 0
    assert incidents(run) == []


def test_a_slow_rank_is_as_slow_as_it_was_asked_to_be(run: Run) -> None:
    # In such a script the delay comes at the end of a step, within the call that reports it.
    script = TRAINER.replace(
        "holdfast.progress(step)",
        "own = time.monotonic(); holdfast.progress(step); ended = time.monotonic()",
    ).replace("        time.sleep(0.01)\n", "        began = time.monotonic(); time.sleep(0.01)\n")
    script += "        print('took', own - began, ended - own, flush=True)\n"
    schedule = "slow@step=40,rank=0,value=4; slow@step=60,rank=0,value=1"
    run.train("--chaos", schedule, script=script, args=["100"])
    assert run.code() == 0
    said = [line.split()[1:] for line in run.log(0).decode().splitlines() if "took" in line]
    own, delays = ([float(words[n]) for words in said] for n in (0, 1))
    usual = statistics.median(own[:38])
    assert 1.5 < statistics.median(delays[41:58]) / usual < 7, "three more steps of the usual time"
    assert statistics.median(delays[62:]) < 0.5 * usual
    assert incidents(run) == []


@pytest.mark.skipif(not cgroups.possible(), reason="no memory cgroup can be made here")
def test_a_rank_runs_out_of_memory_alone(run: Run) -> None:
    run.train("--chaos", "oom@step=10,rank=1,value=32", args=["30"])
    assert run.code() == 0
    assert incidents(run) == [("oom", 1, 10, "oom")]


def test_what_is_to_come_survives_the_coordinator(run: Run) -> None:
    schedule = "kill-coordinator@step=20; exit@step=40,rank=0; kill@step=60,rank=1"
    run.train("--chaos", schedule, script=TOGETHER)
    before = run.coordinator()
    wait_for(lambda: run.coordinator() != before, "another coordinator")
    until_back(run, 2)
    inject(run, "kill-coordinator")
    run.end()
    assert run.code() == 0
    assert incidents(run) == [("exit", 0, 40, "exit"), ("signal", 1, 60, "kill")]
    job = run.peek()
    assert job is not None
    assert job.of(Chaos).count == 4


def test_an_agent_that_is_killed_is_another_one_soon(run: Run) -> None:
    run.train("--chaos", "kill-agent@step=20")
    until_back(run, 1)
    until_injected(run, 1)
    run.until_stepping(round=2)
    run.end()
    assert run.code() == 0
    ((kind, rank, _, injected),) = incidents(run)
    assert (kind, rank, injected) == ("node", None, "kill-agent")


def test_an_agent_that_is_stopped_for_a_moment_goes_on(run: Run) -> None:
    run.train()
    run.until_stepping()
    agent = run.agent()
    inject(run, "stop-agent", "--value", "3")
    until_in_state(agent, "T")
    until_in_state(agent, "SR")
    run.end()
    assert run.code() == 0
    assert incidents(run) == []


def test_a_node_that_is_cut_off_and_that_nobody_can_replace_goes_on(run: Run) -> None:
    run.train()
    job = run.until_stepping()
    agent = run.agent()
    # On a busy machine the coordinator may have learnt to wait longer, and may learn it once more.
    cut_s = 2 * job.membership.silence_s + 2
    assert inject(run, "netcut", "--value", f"{cut_s:g}")["outcome"] == "done"
    run.until(lambda job: job.membership.absent, "the cut")
    job = run.until(lambda job: not job.membership.absent, "the node to be back")
    assert job.membership.round == 1
    assert run.agent() == agent
    run.end()
    assert run.code() == 0
    assert incidents(run) == []


def test_only_signals_reach_a_command(run: Run) -> None:
    run.write("while [ ! -e end ]; do sleep 0.02; done", "wait.sh")
    run.start("--chaos", "hang@step=5", "--no-python", "sh", "wait.sh")
    run.until(lambda job: job.state.name == "running" and not job.unstarted, "the command")
    taken = chaos(run, "hang", "--rank", "0")
    assert taken.code == 1
    assert "only signals reach it" in taken.text
    refused = ask(run, "status")["faults"]["refused"]
    assert [one["line"] for one in refused] == ["hang on any rank at step 5", "hang on rank 0 now"]
    assert inject(run, "kill", "--rank", "0")["outcome"] == "done"
    until_back(run, 1)
    run.end()
    assert run.code() == 0
    assert [i[3] for i in incidents(run)] == ["kill"]


CHECKPOINTS = """
    import os, time
    import torch
    import holdfast

    class State:
        def __init__(self):
            self.weights, self.step = torch.zeros(5000), 0
        def state_dict(self):
            return {"weights": self.weights, "step": self.step}
        def load_state_dict(self, state):
            self.weights, self.step = state["weights"], state["step"]

    state = State()
    ckpt = holdfast.Checkpointer("ckpt", {"state": state}, memory_every=25, storage_every=25)
    step = ckpt.restore()
    print("from", step, flush=True)
    while step < 110:
        time.sleep(0.01)
        step += 1
        state.step = step
        ticket = ckpt.save(step)
        if ticket.to == "storage":
            ticket.storage()
        holdfast.progress(step)
"""


def test_snapshots_survive_a_full_disk_a_dead_keeper_and_a_flipped_bit(run: Run) -> None:
    schedule = (
        "diskfull@step=10,value=1; kill-keeper@step=35; corrupt-image@step=90,rank=1,seed=5;"
        "kill@step=95,rank=1"
    )
    run.start("--chaos", schedule, run.write(CHECKPOINTS))
    assert run.code() == 0
    found = ask(run, "incidents")
    assert [(i["kind"], (i["injected"] or "real").split()[0]) for i in found] == [
        ("storage", "diskfull"),
        ("signal", "kill"),
    ]
    assert "No space left on device" in found[0]["detail"]
    job = run.peek()
    assert job is not None
    assert [told.trap.kind for told, _ in job.of(Chaos).struck] == [
        "diskfull",
        "kill-keeper",
        "corrupt-image",
        "kill",
    ]
    assert "is not what its digest says" in run.err, "the flipped bit was noticed"
    resumed = [run.log(rank, 2).decode().splitlines()[-1] for rank in (0, 1)]
    assert resumed[0] == resumed[1] != "from 0"
