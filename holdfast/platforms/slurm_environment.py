"""What Slurm's environment says about a job, so that `srun holdfast run train.py` needs no flag.

Each task of a step finds there how many nodes meet, and which is the first: that one hosts the
coordinator, on a port that follows from the ids of job and step. The job's name does too, and it
stays the same when Slurm queues the job again; the token is found in the job's home by all nodes that
share it. Whatever the user says wins: `settings` fills in what is left open.

Hostlists are expanded by Slurm's own command. A host whose name does not resolve is reached at the
address that Slurm has for it.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Container, Mapping

from holdfast.config.schema import Said
from holdfast.errors import UsageError
from holdfast.platforms.slurm_commands import records, require_commands, run_now
from holdfast.platforms.topology import request

FIRST_PORT, PORTS = 20_000, 10_000
"""Below those that kernels give to clients."""
MEETING = frozenset(
    {"coordinator", "standalone", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint"}
)
"""Settings by which a user says where nodes meet."""


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task that `srun` started, and no rank of a job of ours."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and "SLURM_STEP_NUM_NODES" in environ and not _in_rank(environ)


def settings(environ: Mapping[str, str], given: Container[str], spares: int) -> dict[str, Said]:
    """Say what a step knows of settings that were not given. `spares` of its nodes get no rank."""
    if not in_step(environ):
        return {}
    nodes = _number(environ, "SLURM_STEP_NUM_NODES")
    _require_one_task_a_node(environ, nodes)
    said: dict[str, Said] = {}
    if "nnodes" not in given and "standalone" not in given:
        if not 0 <= spares < nodes:
            raise UsageError(
                f"--spares {spares}: Slurm's step has {nodes} nodes; give it more with `srun --nodes`"
            )
        said["nnodes"] = Said(str(nodes - spares), "SLURM_STEP_NUM_NODES")
    if "job" not in given and "rdzv_id" not in given:
        said["job"] = Said(job_name(environ), "SLURM_JOB_ID")
    if "requeued" not in given and environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0"):
        said["requeued"] = Said("true", "SLURM_RESTART_COUNT")
    if nodes > 1 and not any(name in given for name in MEETING):
        said |= _meeting(environ)
    return said


def warning(environ: Mapping[str, str], given: Container[str]) -> str:
    """Say that all nodes of an allocation but this one would be idle; empty if that is not so."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    outside = "SLURM_STEP_ID" not in environ and not _in_rank(environ)
    if not outside or nodes in ("", "1") or "nnodes" in given or "standalone" in given:
        return ""
    return (
        f"Slurm gave this job {nodes} nodes, and one is used; `srun holdfast run` uses all of them"
    )


def job_name(environ: Mapping[str, str]) -> str:
    """Name a job after Slurm's: the same after a requeue, another one for each step."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", environ.get("SLURM_JOB_NAME", "")).lstrip(".")[:60]
    step = environ.get("SLURM_STEP_ID", "0")
    return f"{name or 'job'}-{environ['SLURM_JOB_ID']}" + (f".{step}" if step != "0" else "")


def allocation_id(environ: Mapping[str, str]) -> str:
    """Return the id of the Slurm job in which this process runs."""
    id = environ.get("SLURM_JOB_ID", "")
    if not id.isdecimal():
        raise UsageError(
            "this is not within a Slurm allocation (SLURM_JOB_ID is not set); submit the job with "
            "`holdfast submit slurm`, or start this in `salloc`"
        )
    return id


def queue_headless_again(environ: Mapping[str, str]) -> str:
    """Put a job whose batch script died with its node back into the queue; say so if it was done.

    With --no-kill a job outlives the loss of a node, also of the one that ran its script: Slurm then
    lets it run for ever, with nobody in charge. A node that misses its coordinator asks for this.
    """
    id = environ.get("SLURM_JOB_ID", "")
    if not id.isdecimal() or not request(environ):
        return ""
    fields = next(records(run_now("scontrol", "show", "job", "--oneliner", id)), {})
    head, hostlist = fields.get("BatchHost", ""), fields.get("NodeList", "")
    if fields.get("JobState") != "RUNNING" or not head or not hostlist:
        return ""
    if head in run_now("scontrol", "show", "hostnames", hostlist).split():
        return ""
    run_now("scontrol", "requeue", id)
    return f"{head}, which ran the job, is lost; Slurm job {id} is queued again"


def own_address(environ: Mapping[str, str]) -> str:
    """Return how other nodes reach this one: its name, or Slurm's address for it."""
    return address_of(environ.get("SLURMD_NODENAME") or socket.gethostname())


def address_of(host: str) -> str:
    """Return the name of a host if it resolves, else the address that Slurm has for it."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return host
    except OSError:
        pass
    fields = next(records(run_now("scontrol", "show", "node", "--oneliner", host)), {})
    address = fields.get("NodeAddr", "")
    if not address or address == host:
        raise UsageError(
            f"the host {host} is not known here, and Slurm has no address for it; "
            "say with --rdzv-endpoint HOST:PORT where nodes meet"
        )
    return address


def _meeting(environ: Mapping[str, str]) -> dict[str, Said]:
    """Say where the nodes of a step meet: at its first node, which hosts the coordinator."""
    require_commands()
    hostlist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    hosts = run_now("scontrol", "show", "hostnames", hostlist).split()
    if not hosts:
        raise UsageError(f"SLURM_STEP_NODELIST={hostlist!r} names no hosts; give --rdzv-endpoint")
    first = address_of(hosts[0])
    place = 7 * _number(environ, "SLURM_JOB_ID") + _number(environ, "SLURM_STEP_ID")
    endpoint = f"[{first}]" if ":" in first else first
    is_first = environ.get("SLURMD_NODENAME") == hosts[0]
    return {
        "rdzv_backend": Said("c10d", "SLURM_STEP_NODELIST"),
        "rdzv_endpoint": Said(f"{endpoint}:{FIRST_PORT + place % PORTS}", "SLURM_STEP_NODELIST"),
        "rdzv_conf": Said(f"is_host={str(is_first).lower()}", "SLURM_STEP_NODELIST"),
    }


def _require_one_task_a_node(environ: Mapping[str, str], nodes: int) -> None:
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS") if "SLURM_STEP_NUM_TASKS" in environ else nodes
    if tasks > nodes:
        raise UsageError(
            f"srun started {tasks} tasks on {nodes} node{'s' if nodes > 1 else ''}, and one a node "
            "is needed, which starts the ranks itself; give srun --ntasks-per-node=1, and "
            "holdfast run --nproc-per-node"
        )


def _in_rank(environ: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in environ or "HOLDFAST_WORKER" in environ


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r}: Slurm sets it to a number; unset it, or give --nnodes")
    return int(text)
