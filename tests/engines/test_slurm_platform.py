"""Holdfast on a real Slurm: `srun holdfast run`, `holdfast submit slurm`, and what befalls them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.harness import TRAINER

from holdfast.coordinator.journal import replay
from holdfast.core.job import Job
from holdfast.errors import JournalError

from . import slurm
from .slurm import ENDED, SlurmCluster

pytestmark = [
    pytest.mark.platform,
    pytest.mark.timeout(400),
    pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing())),
]

HOLDFAST = (sys.executable, "-m", "holdfast")
LONG_GRACE_S = 60


class Site:
    """A cluster with a folder that all nodes share: scripts, the jobs' homes, what jobs print."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster, self.folder = cluster, cluster.folder
        self.home = cluster.folder / "home"
        blocked = cluster.folder / "blocked"
        blocked.mkdir()
        (blocked / "torch.py").write_text("raise ImportError('these tests go without torch')\n")
        paths = [str(blocked), str(Path(__file__).parents[2])]
        cluster.env |= {"HOLDFAST_HOME": str(self.home), "PYTHONPATH": os.pathsep.join(paths)}
        self.write(TRAINER)

    def write(self, text: str, name: str = "train.py") -> None:
        (self.folder / name).write_text(textwrap.dedent(text))

    def holdfast(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [*HOLDFAST, *words],
            env=self.cluster.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def submit(self, *words: str) -> Submitted:
        answer = json.loads(self.holdfast("submit", "slurm", "--json", *words))
        return Submitted(self, answer["slurm_job"], answer["job"], Path(answer["output"]))


class Submitted:
    """A job that was submitted with `holdfast submit slurm`."""

    def __init__(self, site: Site, id: int, name: str, output: Path) -> None:
        self.site, self.id, self.name, self.output = site, id, name, output
        self.home = site.home / "jobs" / name

    def peek(self) -> Job | None:
        try:
            snapshot = replay(self.home / "journal.db")
        except JournalError:
            return None
        return snapshot.job if snapshot is not None else None

    def until(self, found: Callable[[Job], Any], what: str, timeout: float = 90) -> Job:
        def look() -> bool:
            job = self.peek()
            return job is not None and bool(found(job))

        try:
            self.site.cluster.wait_for(look, what, timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n--- {self.output.name}\n{self.out}") from None
        job = self.peek()
        assert job is not None
        return job

    def stepping(self, nodes: int, round: int = 1, requeues: int = 0) -> Job:
        """Wait until all ranks of so many nodes have stepped in that round or a later one."""
        return self.until(
            lambda job: (
                job.requeues >= requeues
                and job.membership.round >= round
                and job.world is not None
                and len(job.world.places) == nodes
                and job.state.name == "running"
                and not job.unstepped
            ),
            f"steps of {nodes} nodes in round {round}",
        )

    @property
    def out(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def end(self) -> dict[str, str]:
        """Let the trainer come to its end; the fields of the Slurm job then."""
        (self.site.folder / "end").touch()
        return self.over()

    def over(self) -> dict[str, str]:
        return self.site.cluster.wait_for_job(self.id, *ENDED)

    def hosts(self, job: Job) -> dict[str, str]:
        """The hosts of nodes that have a place, by request."""
        members = job.membership.placed.values()
        return {
            one.spec.request: job.supply.positions[_position(one.spec.request)].host
            for one in members
        }

    def queued_again(self) -> dict[str, str]:
        """Wait until Slurm has the job in its queue again; its fields."""
        fields = self.site.cluster.wait_for_job(self.id, "PENDING", timeout=120)
        assert fields["Restarts"] == "1"
        return fields


def _position(request: str) -> int:
    return int(request.partition("-")[0])


@pytest.fixture
def site() -> Iterator[Site]:
    with SlurmCluster(4, grace_s=LONG_GRACE_S) as cluster:
        yield Site(cluster)


# ---- srun holdfast run ----


def test_srun_holdfast_run_needs_no_flag(site: Site) -> None:
    site.write(TRAINER + '\n    print("world", os.environ["WORLD_SIZE"])\n')
    out = site.cluster.run(
        "srun", "-N3", "--ntasks-per-node=1", "--job-name=llm", *HOLDFAST, "run", "train.py", "20"
    )
    assert out.count("world 3") == 3
    (home,) = (site.home / "jobs").iterdir()
    snapshot = replay(home / "journal.db")
    assert snapshot is not None
    assert (home.name, snapshot.job.result.code) == ("llm-1", 0)  # type: ignore[union-attr]


def test_spares_are_taken_from_the_nodes_of_the_step(site: Site) -> None:
    site.write(TRAINER + '\n    print("world", os.environ["WORLD_SIZE"])\n')
    run = (*HOLDFAST, "run", "--spares", "1", "train.py", "20")
    assert site.cluster.run("srun", "-N3", "--ntasks-per-node=1", *run).count("world 2") == 2


def test_several_tasks_on_a_node_are_refused_with_the_option_that_helps(site: Site) -> None:
    words = ("srun", "-N2", "--ntasks-per-node=2", *HOLDFAST, "run", "train.py")
    process = site.cluster.start(*words)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--ntasks-per-node=1" in output


def test_a_home_that_is_not_shared_is_told_in_one_line(site: Site) -> None:
    script = f"HOLDFAST_HOME=$HOLDFAST_HOME/$SLURMD_NODENAME exec {' '.join(HOLDFAST)} run train.py"
    site.write(
        "import holdfast.launch.site as s; s.SHARED_FILE_LIMIT_S = 2.0\n", "sitecustomize.py"
    )
    site.cluster.env["PYTHONPATH"] += f":{site.folder}"
    process = site.cluster.start("srun", "-N2", "--ntasks-per-node=1", "-K1", "bash", "-c", script)
    output, _ = process.communicate(timeout=90)
    assert process.returncode != 0
    assert "set HOLDFAST_TOKEN" in output


def test_with_a_token_the_homes_of_nodes_may_be_apart(site: Site) -> None:
    site.cluster.env["HOLDFAST_TOKEN"] = "0123456789abcdef0123456789abcdef"
    command = f"{' '.join(HOLDFAST)} run train.py 20"
    script = f"HOLDFAST_HOME=$HOLDFAST_HOME/$SLURMD_NODENAME exec {command}"
    site.cluster.run("srun", "-N2", "--ntasks-per-node=1", "bash", "-c", script)
    snapshot = replay(site.home / "n1" / "jobs" / "bash-1" / "journal.db")
    assert snapshot is not None
    assert snapshot.job.result is not None
    assert snapshot.job.result.code == 0


# ---- a job from submit to end ----


def test_a_submitted_job_runs_on_the_nodes_of_its_allocation_to_its_end(site: Site) -> None:
    job = site.submit("--nodes", "3", "train.py", "30")
    fields = job.over()
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "0"), job.out
    assert "finished" in job.out
    found = job.peek()
    assert found is not None
    assert {p.host for p in found.supply.positions.values()} == {"n1", "n2", "n3"}
    assert site.cluster.run("squeue", "--noheader") == ""


@pytest.mark.parametrize(("script", "code"), [("raise ValueError('no data')", 1), ("", 93)])
def test_a_job_that_failed_is_not_queued_again(site: Site, script: str, code: int) -> None:
    if code == 93:
        script = "import holdfast\nraise holdfast.inprocess.StopRestarting('enough')"
        script = "raise SystemExit(93)"
    site.write(script)
    job = site.submit("--nodes", "2", "--max-restarts", "0", "train.py")
    fields = job.over()
    assert (fields["JobState"], fields["Restarts"]) == ("FAILED", "0"), job.out


def test_a_cancelled_job_stays_cancelled(site: Site) -> None:
    job = site.submit("--nodes", "2", "train.py")
    job.stepping(2)
    site.cluster.run("scancel", str(job.id))
    assert job.over()["JobState"] == "CANCELLED"
    site.cluster.wait_for(lambda: site.cluster.run("squeue", "--noheader") == "", "an empty queue")
    assert site.cluster.job(job.id)["Restarts"] == "0"


def test_in_salloc_a_launcher_that_is_killed_takes_its_nodes_with_it(site: Site) -> None:
    script = f"{' '.join(HOLDFAST)} up --on slurm --nodes 2 --job llm train.py; sleep 1000"
    site.cluster.start("salloc", "-N2", "--exclusive", "bash", "-c", script)
    job = Submitted(site, 1, "llm", site.folder / "none")
    found = job.stepping(2)
    ranks = [rank.pid for rank in found.ranks.values()]
    home = json.loads((site.home / "jobs" / "llm" / "job.json").read_text())
    os.kill(home["pid"], signal.SIGKILL)
    site.cluster.wait_for(
        lambda: not any(Path("/proc", str(pid)).exists() for pid in ranks), "the ranks to end"
    )
    assert site.cluster.job(1)["JobState"] == "RUNNING"


# ---- lost nodes ----


def test_a_spare_takes_the_place_of_a_node_that_is_lost_and_its_host_is_excluded_for_good(
    site: Site,
) -> None:
    job = site.submit("--nodes", "2", "--spares", "1", "--drain", "train.py")
    job.stepping(2)
    before = job.until(lambda one: len(one.membership.waiting) == 1, "a spare")
    lost = next(host for host in job.hosts(before).values() if host != "n1")
    site.cluster.kill_node(lost)
    job.stepping(2, round=2)
    incidents = json.loads(site.holdfast("incidents", job.name, "--json"))
    assert "a spare took the lost node's place" in incidents[-1]["action"]
    after = job.until(lambda one: lost in one.supply.cordoned, "the host to be blamed")
    job.until(lambda one: len(one.membership.waiting) == 1, "another spare")
    assert lost not in job.hosts(after).values()
    assert site.cluster.job(job.id)["JobState"] == "RUNNING"
    assert "DRAIN" in site.cluster.node_state(lost)
    assert "holdfast job" in site.cluster.node(lost)["Reason"]
    site.cluster.run("scancel", "--batch", "--signal=USR1", str(job.id))
    job.queued_again()
    site.cluster.wait_for(
        lambda: site.cluster.job(job.id)["ExcNodeList"] == lost, "the host to be excluded"
    )


def test_without_a_node_left_in_the_allocation_a_further_job_joins(site: Site) -> None:
    job = site.submit("--nodes", "2", "train.py")
    job.stepping(2)
    site.cluster.kill_node("n2")
    found = job.until(
        lambda one: one.supply.positions[1].attempt >= 2 and one.supply.positions[1].host,
        "another request",
    )
    job.stepping(2, round=2)
    assert found.supply.positions[1].host not in ("n1", "n2")
    names = site.cluster.run("squeue", "--noheader", "--format=%j").split()
    assert f"holdfast-{job.name}-{found.supply.positions[1].request}" in names
    assert job.end()["JobState"] == "COMPLETED"
    site.cluster.wait_for(
        lambda: site.cluster.run("squeue", "--noheader") == "", "the further job to end"
    )


def test_a_job_is_scaled_beyond_its_allocation_and_back(site: Site) -> None:
    job = site.submit("--nodes", "1:2", "train.py")
    job.stepping(2)
    site.holdfast("scale", job.name, "1:3")
    job.stepping(3)
    assert len(site.cluster.run("squeue", "--noheader").splitlines()) == 2
    site.holdfast("scale", job.name, "1:2")
    job.stepping(2, round=3)
    site.cluster.wait_for(
        lambda: len(site.cluster.run("squeue", "--noheader").splitlines()) == 1, "one job"
    )
    assert job.end()["JobState"] == "COMPLETED"


# ---- saved and queued again ----


def goes_on(job: Submitted, before: Job, nodes: int) -> None:
    """The job comes back from the queue as the same job, and goes on."""
    job.site.cluster.start_now(job.id)
    after = job.stepping(nodes, requeues=1)
    assert (after.id, after.requeues) == (before.id, 1)
    assert after.highest > before.highest
    (report,) = [json.loads(job.site.holdfast("goodput", job.name, "--json"))]
    assert report["wall_s"] > 0
    assert job.end()["JobState"] == "COMPLETED", job.out


def test_a_job_that_is_warned_of_its_time_limit_is_queued_again_and_goes_on(site: Site) -> None:
    job = site.submit("--nodes", "2", "--time", "1", "--warn-before", "20", "train.py")
    before = job.stepping(2)
    job.queued_again()
    goes_on(job, before, 2)


def test_a_preempted_job_is_queued_again_within_its_grace_time_and_goes_on(site: Site) -> None:
    job = site.submit("--nodes", "2", "train.py")
    before = job.stepping(2)
    site.cluster.preempt(hold_s=0.1)
    job.queued_again()
    goes_on(job, before, 2)


def test_a_job_whose_first_node_is_lost_is_queued_again_by_slurm_and_goes_on(site: Site) -> None:
    job = site.submit("--nodes", "2", "train.py")
    before = job.stepping(2)
    site.cluster.kill_node("n1")
    job.queued_again()
    goes_on(job, before, 2)


# ---- bad input ----


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("submit", "slurm", "--partition", "nope", "train.py"), "invalid partition"),
        (("up", "--on", "slurm", "train.py"), "not within a Slurm allocation"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(site: Site, words: tuple[str, ...], said: str) -> None:
    text = site.holdfast(*words, code=2)
    assert said in text
    assert len(text.splitlines()) == 1


def test_a_controller_that_is_away_is_no_loss_of_nodes(site: Site) -> None:
    job = site.submit("--nodes", "2", "train.py")
    before = job.stepping(2)
    site.cluster.stop_controller()
    text = site.holdfast("submit", "slurm", "train.py", code=1)
    assert "controller does not answer" in text or "no answer from Slurm" in text
    after = job.until(lambda one: one.highest > before.highest + 500, "steps without it")
    assert after.membership.round == before.membership.round
    site.cluster.start_controller()
    assert job.end()["JobState"] == "COMPLETED"
