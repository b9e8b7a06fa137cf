"""What Slurm does, tried on a real one: the facts that the Slurm platform is built on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import slurm
from .slurm import ENDED, SlurmCluster

pytestmark = [
    pytest.mark.platform,
    pytest.mark.timeout(300),
    pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing())),
]

STUBBORN = """
echo start restart=$SLURM_RESTART_COUNT
trap 'echo batch TERM' TERM; trap 'echo batch USR1' USR1
srun bash -c 'trap "echo step TERM" TERM; trap "echo step USR1" USR1; echo step up;
              while true; do sleep 0.2; done' &
while true; do wait; sleep 0.1; done
"""
"""A job that names each signal it gets and goes on."""

UP_AND_STAY = "bash -c 'echo up on $SLURMD_NODENAME; exec sleep 1000'"


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    """Four nodes of a cluster of its own for each test."""
    with SlurmCluster(4) as cluster:
        yield cluster


def on_all_nodes(cluster: SlurmCluster, step_options: str, *options: str) -> int:
    """Submit a job with one task a node, and return it when all tasks run."""
    job = cluster.submit(f"srun {step_options} {UP_AND_STAY}; echo srun=$?", "-N4", *options)
    for name in cluster.nodes:
        cluster.wait_for_output(job, f"up on {name}")
    return job


def test_srun_runs_one_task_on_each_of_four_nodes(cluster: SlurmCluster) -> None:
    names = cluster.run("srun", "-N4", "--ntasks-per-node=1", "bash", "-c", "echo $SLURMD_NODENAME")
    assert sorted(names.split()) == list(cluster.nodes)


def test_a_hostlist_is_expanded_by_scontrol_without_the_controller(cluster: SlurmCluster) -> None:
    assert cluster.run("scontrol", "show", "hostnames", "n[1-2,4]").split() == ["n1", "n2", "n4"]


def test_a_step_knows_its_job_its_nodes_and_its_place(cluster: SlurmCluster) -> None:
    wanted = (
        *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_STEP_ID"),
        *("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURMD_NODENAME", "SLURM_CPUS_ON_NODE"),
        *("SLURM_LAUNCH_NODE_IPADDR", "SLURM_SUBMIT_DIR", "SLURM_JOB_PARTITION"),
    )
    text = cluster.run("srun", "-N2", "--ntasks-per-node=1", "-w", "n1,n3", "--label", "env")
    last = dict(line[3:].split("=", 1) for line in text.splitlines() if line.startswith("1: SLURM"))
    assert set(wanted) <= set(last)
    assert last["SLURM_JOB_NODELIST"] == "n[1,3]"
    assert (last["SLURM_NODEID"], last["SLURM_PROCID"], last["SLURM_LOCALID"]) == ("1", "1", "0")
    assert "SLURM_RESTART_COUNT" not in last
    assert "SLURM_JOB_END_TIME" not in last


def test_a_killed_node_loses_every_process_at_once(cluster: SlurmCluster) -> None:
    job = cluster.submit("srun setsid sleep 1000 & srun --overlap sleep 1000", "-N1", "-w", "n2")
    cluster.wait_for_job(job, "RUNNING")
    cluster.wait_for(lambda: len(cluster.processes("n2")) >= 6, "slurmstepds and tasks")
    there = cluster.processes("n2")
    cluster.kill_node("n2")
    assert not [pid for pid in there if Path("/proc", str(pid)).exists()]


def test_a_lost_node_is_down_and_its_job_without_requeue_fails(cluster: SlurmCluster) -> None:
    job = on_all_nodes(cluster, "", "--no-requeue")
    cluster.kill_node("n3")
    cluster.wait_for_node("n3", "DOWN")
    assert cluster.wait_for_job(job, *ENDED)["JobState"] == "NODE_FAIL"


def test_a_job_with_requeue_goes_back_to_the_queue_and_counts_restarts(
    cluster: SlurmCluster,
) -> None:
    job = cluster.submit(
        "echo restart=$SLURM_RESTART_COUNT on $SLURM_JOB_NODELIST; sleep 1000",
        *("-N3", "--nodelist=n3", "--requeue", "--open-mode=append"),
    )
    cluster.wait_for_output(job, "restart= on")
    cluster.kill_node("n3")
    fields = cluster.wait_for_job(job, "PENDING")
    assert fields["Restarts"] == "1"
    cluster.wait_for(lambda: cluster.job(job)["Reason"] == "BeginTime", "the two minutes' wait")
    cluster.start_node("n3")
    cluster.wait_for_node("n3", "IDLE")
    cluster.start_now(job)
    cluster.wait_for_output(job, "restart=1 on")


def test_with_no_kill_the_job_and_its_step_outlive_a_lost_node(cluster: SlurmCluster) -> None:
    job = on_all_nodes(cluster, "--no-kill --kill-on-bad-exit=0", "--no-kill")
    cluster.kill_node("n3")
    cluster.wait_for_node("n3", "DOWN")
    cluster.wait_for_output(job, "Node failure on n3")
    fields = cluster.job(job)
    assert (fields["JobState"], fields["NodeList"]) == ("RUNNING", "n[1-2,4]")
    assert "srun=" not in cluster.output(job)


def test_a_killed_slurmd_alone_leaves_its_tasks_running(cluster: SlurmCluster) -> None:
    job = on_all_nodes(cluster, "", "--no-requeue")
    cluster.kill_slurmd("n2")
    cluster.wait_for(
        lambda: all(_name(pid) != "slurmd" for pid in cluster.processes("n2")), "slurmd gone"
    )
    assert "sleep" in {_name(pid) for pid in cluster.processes("n2")}
    assert cluster.job(job)["JobState"] == "RUNNING"


def test_a_node_can_be_excluded_from_a_pending_requeued_job_only(cluster: SlurmCluster) -> None:
    job = cluster.submit("sleep 1000", "-N2", "--requeue")
    cluster.wait_for_job(job, "RUNNING")
    exclude = ("scontrol", "update", f"jobid={job}", "excnodelist=n2")
    with pytest.raises(RuntimeError, match="no longer pending"):
        cluster.run(*exclude)
    cluster.requeue(job)
    cluster.run(*exclude)
    cluster.start_now(job)
    nodes = cluster.run("scontrol", "show", "hostnames", cluster.job(job)["NodeList"]).split()
    assert len(nodes) == 2
    assert "n2" not in nodes


def test_a_drained_node_names_its_reason_and_takes_no_job(cluster: SlurmCluster) -> None:
    cluster.drain("n4", "broken GPU 3")
    assert cluster.node("n4")["Reason"].startswith("broken GPU 3")
    job = cluster.submit("sleep 1000", "-N4")
    cluster.wait_for(lambda: "n4" in cluster.job(job)["Reason"], "a reason that names the node")
    cluster.resume("n4")
    cluster.wait_for_job(job, "RUNNING")


def test_a_preempted_job_that_stays_is_requeued_and_only_its_steps_are_warned() -> None:
    with SlurmCluster(2, grace_s=60) as cluster:
        job = cluster.submit(STUBBORN, "-N2", "--requeue", "--open-mode=append")
        cluster.wait_for_output(job, "step up")
        cluster.preempt(hold_s=0.1)
        warned = cluster.wait_for_output(job, "step TERM")
        assert "batch TERM" not in warned
        assert cluster.job(job)["JobState"] == "RUNNING"
        fields = cluster.wait_for_job(job, "PENDING", timeout=200)
        assert fields["Restarts"] == "1"
        assert "DUE TO PREEMPTION" in cluster.output(job)
        cluster.start_now(job)
        cluster.wait_for_output(job, "restart=1")


def test_a_preempted_job_that_ends_in_its_grace_time_is_not_requeued() -> None:
    script = "srun bash -c 'trap \"exit 75\" TERM; echo up; while true; do sleep 0.1; done'"
    with SlurmCluster(1, grace_s=60) as cluster:
        job = cluster.submit(script, "--requeue")
        cluster.wait_for_output(job, "up")
        cluster.preempt(hold_s=0.1)
        fields = cluster.wait_for_job(job, *ENDED)
        assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "75:0")
        assert fields["Restarts"] == "0"


def test_a_preempted_job_can_requeue_itself_in_its_grace_time() -> None:
    script = """
echo restart=$SLURM_RESTART_COUNT
srun bash -c 'trap "exit 75" TERM; echo up; while true; do sleep 0.1; done'
[ $? = 75 ] && scontrol requeue $SLURM_JOB_ID
"""
    with SlurmCluster(1, grace_s=60) as cluster:
        job = cluster.submit(script, "--requeue", "--open-mode=append")
        cluster.wait_for_output(job, "up")
        cluster.preempt(hold_s=0.1)
        assert cluster.wait_for_job(job, "PENDING")["Restarts"] == "1"
        cluster.start_now(job)
        cluster.wait_for_output(job, "restart=1")


def test_preemption_sends_the_jobs_own_signal_where_slurm_is_told_to() -> None:
    settings = (slurm.FAST_SCHEDULING, "SlurmctldParameters=preempt_send_user_signal")
    with SlurmCluster(1, grace_s=60, settings=settings) as cluster:
        job = cluster.submit(STUBBORN, "--requeue", "--signal=B:USR1@1", "--time=60")
        cluster.wait_for_output(job, "step up")
        cluster.preempt(hold_s=0.1)
        warned = cluster.wait_for_output(job, "batch USR1")
        assert "step" not in warned.replace("step up", "")


def test_the_time_limits_signal_goes_to_the_script_or_to_the_steps_and_then_it_ends() -> None:
    with SlurmCluster(1) as cluster:
        script = cluster.submit(STUBBORN, "--time=1", "--signal=B:USR1@20")
        steps = cluster.submit(STUBBORN, "--time=1", "--signal=USR1@20")
        assert "step USR1" not in cluster.wait_for_output(script, "batch USR1")
        assert "batch USR1" not in cluster.wait_for_output(steps, "step USR1")
        for job in (script, steps):
            assert cluster.wait_for_job(job, *ENDED, timeout=200)["JobState"] == "TIMEOUT"
            assert "DUE TO TIME LIMIT" in cluster.output(job)


def test_a_second_step_on_the_same_cpus_needs_overlap(cluster: SlurmCluster) -> None:
    job = on_all_nodes(cluster, "--exact")
    again = ("srun", f"--jobid={job}", "-N4", "--ntasks-per-node=1")
    with pytest.raises(RuntimeError, match="busy"):
        cluster.run(*again, "--immediate=2", "true")
    cluster.run(*again, "--overlap", "true")


def test_srun_exits_with_the_highest_code_unless_it_kills_the_others(cluster: SlurmCluster) -> None:
    one_fails = ("bash", "-c", "[ $SLURM_PROCID = 1 ] && exit 75; sleep 1; echo done")
    command = ("srun", "-N2", "--ntasks-per-node=1")
    kept = cluster.start(*command, "--kill-on-bad-exit=0", *one_fails)
    output, _ = kept.communicate()
    assert (kept.returncode, "done" in output) == (75, True)
    one_stays = ("bash", "-c", "[ $SLURM_PROCID = 1 ] && exit 75; exec sleep 1000")
    killed = cluster.start(*command, "--kill-on-bad-exit=1", *one_stays)
    killed.communicate()
    assert killed.returncode == 143


def test_a_running_job_can_be_shrunk_but_not_grown(cluster: SlurmCluster) -> None:
    job = cluster.submit("sleep 1000", "-N3")
    cluster.wait_for_job(job, "RUNNING")
    with pytest.raises(RuntimeError, match="not supported"):
        cluster.run("scontrol", "update", f"jobid={job}", "numnodes=4")
    cluster.run("scontrol", "update", f"jobid={job}", "numnodes=2")
    assert cluster.job(job)["NodeList"] == "n[1-2]"
    with pytest.raises(RuntimeError, match="not supported"):
        cluster.run("sbatch", "-N1", f"--dependency=expand:{job}", "--wrap", "true")


def test_a_step_sees_the_gpus_it_was_given() -> None:
    with SlurmCluster(1, gpus=2) as cluster:
        seen = cluster.run("srun", "--gres=gpu:2", "bash", "-c", "echo $CUDA_VISIBLE_DEVICES")
        assert seen.strip() == "0,1"


def test_two_clusters_run_side_by_side(cluster: SlurmCluster) -> None:
    with SlurmCluster(1) as other:
        job = cluster.submit("sleep 1000", "-N4")
        cluster.wait_for_job(job, "RUNNING")
        assert other.run("squeue", "--noheader") == ""
        assert other.run("srun", "bash", "-c", "echo $SLURM_CONF").strip() == str(other.conf)


def test_nothing_is_left_when_the_test_process_is_killed() -> None:
    script = """
import sys, time
from tests.engines.slurm import SlurmCluster
with SlurmCluster(1) as cluster:
    job = cluster.submit("srun setsid sleep 1000")
    cluster.wait_for(lambda: len(cluster.processes("n1")) >= 5, "tasks")
    print(cluster.folder, *cluster.processes("n1"), flush=True)
    time.sleep(1000)
"""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert process.stdout is not None
    folder, *pids = process.stdout.readline().split()
    process.kill()
    process.communicate()
    assert pids
    deadline = time.monotonic() + 60
    while any(Path("/proc", pid).exists() for pid in pids) or os.path.exists(folder):
        assert time.monotonic() < deadline, (pids, folder)
        time.sleep(0.05)


def _name(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "comm").read_text().strip()
    except OSError:
        return ""
