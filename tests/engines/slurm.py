"""A real Slurm on this machine, for tests: munged, slurmctld and one slurmd a node, all on loopback.

Everything is the cluster's own (key, sockets, ports, folder), so several clusters run side by side.
Each daemon runs under a keeper: a node that is killed loses its slurmd, its slurmstepds and all that
its jobs started there, and nothing outlives the test process. It needs root; `install.sh` beside this
file installs Slurm.

What this Slurm (22.05.8) was seen to do here; the tests beside this file hold most of it:

Node loss (`SlurmdTimeout=10`, node killed with all its processes):

- +NOT_RESPONDING after 13 to 16 s, DOWN after 26 to 29 s. Until then Slurm tells nobody, srun neither.
- `sbatch --requeue`: the whole job is cancelled when the node is DOWN, then PENDING with
  Restarts=1 (Reason None at first, then BeginTime). `--no-requeue`: NODE_FAIL, ExitCode 0:15.
- `sbatch --no-kill` with `srun --no-kill --kill-on-bad-exit=0`: the job and the step go on; the job's
  NodeList loses the node, the step's environment does not change. One without the other
  was not tried.
- With `--no-kill` the loss of the node that ran the batch script leaves a job that is RUNNING for ever
  on the others, without a script: BatchHost is not in NodeList any more. `scontrol requeue` helps.
- A node that comes back is IDLE by itself (`ReturnToService=2`).

Requeue:

- A requeued job may not begin for 121 s (Reason=BeginTime). `scontrol update jobid=J starttime=now`
  lifts that, and the job runs 0.3 to 1.7 s later; once in twelve tries it had no effect in 90 s, so
  `start_now` repeats it.
- A job that is started within a second of its requeue may be refused by nodes that have just ended it
  ("Job credential revoked"): it is then over, with WEXITSTATUS 1. `start_now` waits for three seconds.
- SLURM_RESTART_COUNT is absent in the first run and 1, 2, … in later ones; the job id stays.
- `scontrol update jobid=J excnodelist=n2` works on a pending (requeued) job; on a running one it fails:
  "Job is no longer pending execution". So: requeue, exclude, start now.
- A job may requeue itself (`scontrol requeue $SLURM_JOB_ID` in the batch script), also after its time
  limit, in the KillWait seconds between SIGTERM and SIGKILL. An exit code alone never requeues: exit 75
  is FAILED, ExitCode 75:0.

Preemption (PreemptMode=REQUEUE, partition GraceTime=5):

- At once SIGCONT and SIGTERM go to the steps' tasks, not to the batch script. The script gets SIGCONT
  and SIGTERM only at the end of the grace time, KillWait seconds before SIGKILL.
- The grace time is a minimum: its end is noticed by a sweep, 14 to 26 s after the preemption here.
- **A job that ends by itself within the grace time is not requeued**: COMPLETED with exit 0, FAILED
  with 75, Restarts=0. It has to call `scontrol requeue` before it ends.
- With `SlurmctldParameters=preempt_send_user_signal` a job with `--signal=B:USR1@T` gets USR1 in the
  batch script instead (and `--signal=USR1@T` in the tasks), and SIGTERM only at the end.
  `PreemptParameters` is not a key of this version; slurm.conf is then refused.

Time limit:

- `--time=0:40` is rounded up to a minute. The limit is enforced by a sweep every 30 s: a job of 60 s
  ended after 88 s. `--signal=B:USR1@20` (batch script only) or `USR1@20` (tasks only) came 28 s after
  the start, that is 32 s before the limit.
- Then SIGTERM to all, KillWait, SIGKILL; TIMEOUT, ExitCode 0:9.

Steps:

- `--nodes=1-3` gets three nodes of four idle ones; with `--ntasks-per-node=1` it gets one.
- SIGTERM and SIGHUP to srun kill its tasks with SIGKILL ("forcing job termination"); USR1 is passed on.
  `scancel --signal=TERM J.S` reaches the tasks, and then fails with "Invalid job id specified" (225).
- An srun that is killed (SIGKILL) takes its tasks with it within a second, silent ones too: a helper of
  its own cancels the step. If that is killed too, as with the node, the tasks elsewhere go on.
- An srun whose node goes DOWN ends with "Node failure on n2", and not always with a code of its own.
- `scontrol requeue` within the batch script: with SIGTERM ignored, the script lives on for KillWait and
  may set `excnodelist`; `starttime=now` at that moment is overwritten when the job's end is complete.
- Every step that shares the CPUs of another one needs `--overlap`; without it srun waits for them.
- srun exits with the highest exit code of its tasks (75 stays 75), 137 after a task was killed by
  SIGKILL; with `--kill-on-bad-exit=1` it ended with 143, the code of the tasks that it killed, so the
  cause is lost; with 0, the default here, the other tasks go on.
- A job may span several components: `sbatch -N1 : -N2` and `srun --het-group=0,1` give one step with
  ranks 0 to 2; SLURM_JOB_NODELIST_HET_GROUP_0 and so on name the nodes.

Size:

- Shrinking works: `scontrol update jobid=J numnodes=1` drops the last nodes.
- Growing does not: `numnodes=3` on a running job is refused ("not supported on this system"; with
  permit_job_expansion "no longer pending execution"). After an
  earlier resize every further update of the job is refused, after 5 s ("DB index is being set"): there
  is no accounting here. `--dependency=expand:J` is refused ("not supported on this system") unless
  SchedulerParameters has permit_job_expansion; then `salloc --dependency=expand:J` gets its node and
  gives it up with `numnodes=0`, but `update jobid=J numnodes=ALL` is refused for the DB index. With
  accounting it was not tried. So growth means further jobs that join.

Submission: an unknown partition is refused ("invalid partition specified: nope", exit 1); more nodes
than there are (`-N9`) is accepted and pends (60 s watched); `srun -I` refuses at once.

Environment: the batch script has SLURM_JOB_ID, SLURM_JOB_NODELIST, SLURM_JOB_NUM_NODES,
SLURM_JOB_PARTITION, SLURM_CPUS_ON_NODE, SLURM_SUBMIT_DIR, SLURMD_NODENAME, SLURM_PROCID=0 and
SLURM_NODEID=0; SLURM_NTASKS only with a task option. A step adds SLURM_STEP_ID, SLURM_STEP_NODELIST,
SLURM_STEP_NUM_NODES, SLURM_STEP_NUM_TASKS, SLURM_STEP_TASKS_PER_NODE, SLURM_LOCALID, SLURM_GTIDS and
SLURM_LAUNCH_NODE_IPADDR. SLURM_JOB_END_TIME does not exist in this version. HOSTNAME is the node's
name while `hostname` is the machine's, and node names do not resolve: use addresses from
`scontrol show node`. With `--gres=gpu:2` a step has SLURM_GPUS_ON_NODE=2, SLURM_STEP_GPUS=0,1 and
CUDA_VISIBLE_DEVICES=0,1 (the GPUs here are device nodes without a device).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType

from holdfast.kernel import PR_SET_PDEATHSIG, prctl

from .keeper import descendants, end_kept, start_kept
from .ports import PORTS_EACH, PortBlock

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "sinfo")
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
)
"""States that a job does not leave by itself."""

FAST_SCHEDULING = "SchedulerParameters=sched_interval=2,bf_interval=2"

_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
_PATIENCE_S = 90.0


REVOKED_S = 3.0
"""How long nodes may refuse a job that ended there: it would fail if it came back before."""


def _age_s(moment: str) -> float:
    return (datetime.now() - datetime.fromisoformat(moment)).total_seconds()


def missing() -> str | None:
    """Why Slurm cannot run here, with what to do; None where it can."""
    path = f"{os.environ.get('PATH', '')}:{_SBIN}"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return (
            f"Slurm is not installed (no {', '.join(absent)}): "
            "apt-get install slurm-wlm munge, or run tests/engines/install.sh as root"
        )
    if os.geteuid() != 0:
        return "the Slurm test bed needs root, and this is not root: its daemons run as root"
    return None


def _end_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class SlurmCluster:
    """Nodes n1 to nN of one Slurm cluster, up on entry and gone on exit.

    All nodes are in two partitions: `main`, whose jobs are requeued to make room for those of
    `urgent`. `env` is the environment for Slurm's commands, `folder` where they run and where the
    output of batch jobs lands (slurm-J.out).
    """

    def __init__(
        self,
        nodes: int = 4,
        *,
        cpus: int = 4,
        memory_mb: int = 16_000,
        gpus: int = 0,
        grace_s: int = 5,
        settings: Sequence[str] = (FAST_SCHEDULING,),
    ) -> None:
        if not 1 <= nodes < PORTS_EACH:
            raise ValueError(f"nodes={nodes}: a cluster here has 1 to {PORTS_EACH - 1} nodes")
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self._cpus, self._memory_mb, self._gpus, self._grace_s = cpus, memory_mb, gpus, grace_s
        self._settings = settings
        self._undo = contextlib.ExitStack()
        self._slurmds: dict[str, tuple[subprocess.Popen[bytes], int]] = {}

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            print(self.story())
        self.close()

    def close(self) -> None:
        """End every process of the cluster and of its jobs, and remove its folder."""
        self._undo.close()

    # The daemons.

    def _start(self) -> None:
        why = missing()
        if why is not None:
            raise RuntimeError(why)
        ports = PortBlock()
        self._undo.callback(ports.close)
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.folder.chmod(0o755)
        self.conf = self.folder / "slurm.conf"
        self._write_configuration(ports.first)
        foreign = ("SLURM", "SBATCH", "SRUN", "SALLOC")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        self.env["SLURM_CONF"] = str(self.conf)
        self.env["PATH"] = f"{self.env.get('PATH', '/usr/bin:/bin')}:{_SBIN}"
        self._start_munged()
        self.start_controller()
        for name in self.nodes:
            self.start_node(name)
        self.wait_for(
            lambda: all(self.node_state(name) == "IDLE" for name in self.nodes), "all nodes idle"
        )

    def _keep(self, *command: str) -> tuple[subprocess.Popen[bytes], int]:
        log = self.folder / f"{command[0]}.out"
        kept = start_kept(list(command), self.env, log, self.folder)
        self._undo.callback(end_kept, kept[0])
        return kept

    def _start_munged(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        files = {"key-file": "key", "socket": "sock", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{name}={self.folder}/munge.{ending}" for name, ending in files.items()]
        self._keep("munged", "--foreground", "--force", *options)
        self.wait_for((self.folder / "munge.sock").exists, "munged's socket")

    def _write_configuration(self, first_port: int) -> None:
        host = socket.gethostname().split(".")[0]
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={first_port}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={self.folder}/munge.sock",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory",
            f"DefMemPerCPU={self._memory_mb // self._cpus}",
            "ReturnToService=2",
            "SlurmdTimeout=10",
            "KillWait=3",
            "JobRequeue=1",
            "SlurmdParameters=config_overrides",
            "MpiDefault=none",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            f"StateSaveLocation={self._new_folder('state')}",
            f"SlurmdSpoolDir={self._new_folder('spool')}/%n",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/slurmd-%n.pid",
            f"SlurmctldLogFile={self.folder}/slurmctld.log",
            f"SlurmdLogFile={self.folder}/slurmd-%n.log",
            *self._settings,
            *self._node_lines(first_port),
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 "
            f"PreemptMode=REQUEUE GraceTime={self._grace_s}",
            "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 "
            "PreemptMode=OFF",
        ]
        self.conf.write_text("\n".join(lines) + "\n")

    def _node_lines(self, first_port: int) -> list[str]:
        size = f"CPUs={self._cpus} RealMemory={self._memory_mb}"
        lines = []
        if self._gpus:
            lines.append("GresTypes=gpu")
            size += f" Gres=gpu:{self._gpus}"
            self._write_gpus()
        place = "NodeHostname=localhost NodeAddr=127.0.0.1"
        return lines + [
            f"NodeName={name} {place} Port={first_port + index} {size}"
            for index, name in enumerate(self.nodes, start=1)
        ]

    def _write_gpus(self) -> None:
        devices = [self.folder / f"nvidia{number}" for number in range(self._gpus)]
        for number, device in enumerate(devices):  # a plain file would give no CUDA_VISIBLE_DEVICES
            os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(195, number))
        text = "".join(f"Name=gpu File={device}\n" for device in devices)
        (self.folder / "gres.conf").write_text(text)

    def _new_folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        return folder

    # Commands.

    def run(self, *words: str, check: bool = True, timeout: float = _PATIENCE_S) -> str:
        """Run one of Slurm's commands (srun, squeue, scontrol, …); return its stdout."""
        done = subprocess.run(
            words, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=timeout
        )
        if check and done.returncode != 0:
            raise RuntimeError(
                f"{' '.join(words)} exited with {done.returncode}: {done.stdout}{done.stderr}"
            )
        return done.stdout

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command that stays (an srun, say); it is killed with the cluster.

        Its stdout and stderr are one pipe.
        """
        process = subprocess.Popen(
            words,
            env=self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_end_with_parent,
        )
        assert process.stdout is not None
        self._undo.callback(process.stdout.close)
        self._undo.callback(process.wait)
        self._undo.callback(process.kill)
        return process

    def submit(self, script: str, *options: str) -> int:
        """Submit a bash script with sbatch; return the job id."""
        path = self.folder / f"batch-{secrets.token_hex(4)}.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        return int(self.run("sbatch", "--parsable", *options, str(path)).split(";")[0])

    def output(self, job: int) -> str:
        """What a batch job and its steps have written so far."""
        path = self.folder / f"slurm-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    # Jobs.

    def job(self, job: int) -> dict[str, str]:
        """The fields of `scontrol show job`: JobState, Reason, NodeList, Restarts, ExitCode, …"""
        return self._show("job", str(job))

    def wait_for_job(self, job: int, *states: str, timeout: float = _PATIENCE_S) -> dict[str, str]:
        """Wait until the job is in one of these states; return its fields."""
        fields: dict[str, str] = {}

        def is_there() -> bool:
            fields.clear()
            fields.update(self.job(job))
            return fields["JobState"] in states

        self.wait_for(is_there, f"job {job} {' or '.join(states)}", timeout)
        return fields

    def wait_for_output(self, job: int, text: str, timeout: float = _PATIENCE_S) -> str:
        """Wait until the job's output contains a text; return the output."""
        self.wait_for(lambda: text in self.output(job), f"{text!r} from job {job}", timeout)
        return self.output(job)

    def requeue(self, job: int) -> None:
        """Requeue a running job, and wait until it is pending."""
        self.run("scontrol", "requeue", str(job))
        self.wait_for_job(job, "PENDING")

    def start_now(self, job: int) -> None:
        """Lift the two minutes that a requeued job waits for; return when the job runs."""

        def runs() -> bool:
            fields = self.job(job)
            waits = fields["JobState"] == "PENDING" and fields["Reason"] == "BeginTime"
            if waits and _age_s(fields["SubmitTime"]) > REVOKED_S:
                self.run("scontrol", "update", f"jobid={job}", "starttime=now")
            return fields["JobState"] == "RUNNING"

        self.wait_for(runs, f"job {job} running")

    def preempt(self, *nodes: str, hold_s: float = 1.0) -> int:
        """Submit an urgent job that takes these nodes whole for a while; return its id."""
        names = ",".join(nodes or self.nodes)
        options = ("--partition=urgent", "--exclusive", f"--nodelist={names}")
        return self.submit(f"sleep {hold_s}", *options)

    # The controller.

    def start_controller(self) -> None:
        """Start slurmctld, also after it was stopped: it goes on from its saved state."""
        self._controller = self._keep("slurmctld", "-D", "-f", str(self.conf))

    def stop_controller(self) -> None:
        """Stop slurmctld in order, so that it knows its jobs later; nodes and what runs there go on."""
        self.run("scontrol", "shutdown", "slurmctld")
        self._controller[0].wait(_PATIENCE_S)

    # Nodes.

    def start_node(self, name: str) -> None:
        """Start a node's slurmd, also after the node was killed."""
        self._slurmds[name] = self._keep("slurmd", "-D", "-N", name, "-f", str(self.conf))

    def kill_node(self, name: str) -> None:
        """Kill a node: slurmd, slurmstepds and all that jobs started there, as a power cut would."""
        end_kept(self._slurmds.pop(name)[0])

    def kill_slurmd(self, name: str) -> None:
        """Kill a node's slurmd only; what jobs started there goes on."""
        os.kill(self._slurmds[name][1], signal.SIGKILL)

    def processes(self, name: str) -> list[int]:
        """The process ids of a node, nearest to its keeper first."""
        return descendants(self._slurmds[name][0].pid)

    def node(self, name: str) -> dict[str, str]:
        """The fields of `scontrol show node`: State, Reason, …"""
        return self._show("node", name)

    def node_state(self, name: str) -> str:
        return self.node(name)["State"]

    def wait_for_node(self, name: str, state: str, timeout: float = _PATIENCE_S) -> str:
        """Wait until a node's state contains a word ("DOWN", "IDLE", …); return the state."""
        self.wait_for(
            lambda: state in self.node_state(name).split("+"), f"node {name} {state}", timeout
        )
        return self.node_state(name)

    def drain(self, name: str, reason: str) -> None:
        self.run("scontrol", "update", f"nodename={name}", "state=drain", f"reason={reason}")

    def resume(self, name: str) -> None:
        self.run("scontrol", "update", f"nodename={name}", "state=resume")

    # What both need.

    def _show(self, kind: str, name: str) -> dict[str, str]:
        text = self.run("scontrol", "show", kind, "--oneliner", name)
        return dict(re.findall(r"(\S+?)=(.*?)(?=\s+[A-Z][\w:/]*=|\s*$)", text))

    def wait_for(
        self, question: Callable[[], bool], what: str, timeout: float = _PATIENCE_S
    ) -> None:
        deadline = time.monotonic() + timeout
        while not question():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout:.0f} s for {what}\n{self.story()}")
            time.sleep(0.05)

    def story(self) -> str:
        """The queue, and the end of each log, for a test that failed."""
        logs = sorted([*self.folder.glob("*.log"), *self.folder.glob("slurm-*.out")])
        texts = [f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs]
        return "\n".join([self.run("squeue", check=False), *texts])
