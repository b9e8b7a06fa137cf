"""Runs a whole job on a Ray cluster, from a Python program there: `holdfast.platforms.ray.run`.

The job is a process of its own, `holdfast up --on ray`: a coordinator and a supplier must not share
their process with a driver's threads. It is a child of the program, and dies with it. With `detached`
it is the child of an actor on the cluster's head node instead, and outlives the program.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast import kernel
from holdfast.errors import PlatformError, UsageError
from holdfast.jobhome import home_of
from holdfast.platforms.ray_engine import ActorTerms, Death, RayClient, connect
from holdfast.platforms.ray_node import NodeState, RayNodeStart, forwarded

DETACHED = "holdfast-detached"
"""Namespace of the actors that run detached jobs; their names are those of the jobs."""
HEAD = {"node:__internal_head__": 0.001}
"""A resource that only the cluster's head node has: it lives as long as the cluster."""
KEPT_S = 3600.0
"""How long the actor of a detached job that has ended can be asked for its exit code."""
LEAVE_LIMIT_S = 600.0
AWAY_PAUSE_S = 1.0


@dataclass(frozen=True)
class RayRun:
    """A job that `run` has started."""

    job: str
    home: Path
    """The job's home, on the machine of its coordinator."""
    code: int | None
    """Exit code; None of a detached job that has not ended yet."""

    def wait(self) -> RayRun:
        """Wait for the end of a detached job; return the run with its exit code."""
        if self.code is not None:
            return self
        code = asyncio.run(_end_of(connect(DETACHED), self.job))
        return RayRun(self.job, self.home, code)


def run(
    script: str,
    args: Sequence[str] = (),
    *,
    nodes: int | tuple[int, int] = 1,
    spares: int = 0,
    nproc_per_node: int = 1,
    resources: Mapping[str, float] | None = None,
    strategy: str = "spread",
    job: str | None = None,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    detached: bool = False,
) -> RayRun:
    """Train with `script` and its `args` on nodes of the Ray cluster that this program is in.

    `nodes` is their number, or the fewest and the most to train with, each of `nproc_per_node` ranks;
    `spares` more wait for a place. `resources` are those of Ray that each node gets, as in
    `{"CPU": 8, "GPU": 8, "spot": 1}`; by default one CPU a rank. `strategy` is "spread" or "pack".
    `job` names the job. `flags` are further flags of `holdfast run`, `env` variables for the job.

    Returns when the job has ended; the result has the exit code and the job's home. If the program
    ends before that, so does the job. A `detached` job goes on without it: the result is returned at
    once, and its `wait()` waits for the end.
    """
    name = job or f"ray-{secrets.token_hex(4)}"
    command = command_of(script, args, nodes, spares, nproc_per_node, name, flags)
    said = {**variables(resources or {}, strategy), **(env or {})}
    address = _address()
    environ = {**os.environ, **said, **({"RAY_ADDRESS": address} if address else {})}
    home = home_of(name).path
    if detached:
        start = RayNodeStart(
            request="up",
            command=tuple(command[1:]),
            environ={**forwarded(environ), **said},
            limit_s=LEAVE_LIMIT_S,
            directory=os.getcwd(),
            kept_s=KEPT_S,
        )
        asyncio.run(_start_detached(connect(DETACHED), name, start))
        return RayRun(name, home, None)
    return RayRun(name, home, _run_here(command, environ))


def command_of(
    script: str,
    args: Sequence[str],
    nodes: int | tuple[int, int],
    spares: int,
    nproc_per_node: int,
    job: str,
    flags: Sequence[str],
) -> list[str]:
    """The command of a job: `holdfast up --on ray` with its flags."""
    fewest, most = (nodes, nodes) if isinstance(nodes, int) else nodes
    if not 1 <= fewest <= most:
        raise UsageError(f"nodes={nodes!r}: a number from 1, or the fewest and the most, is needed")
    up = [sys.executable, "-m", "holdfast", "up", "--on", "ray", f"--nodes={fewest}:{most}"]
    own = [f"--spares={spares}", f"--nproc-per-node={nproc_per_node}", f"--job={job}"]
    return [*up, *own, *flags, script, *args]


def variables(resources: Mapping[str, float], strategy: str = "") -> dict[str, str]:
    """The variables that tell `holdfast up --on ray` what each node gets of Ray."""
    custom = dict(resources)
    said = {"HOLDFAST_RAY_STRATEGY": strategy} if strategy else {}
    for ray_name, variable in (("CPU", "HOLDFAST_RAY_CPUS"), ("GPU", "HOLDFAST_RAY_GPUS")):
        if ray_name in custom:
            said[variable] = f"{custom.pop(ray_name):g}"
    if custom:
        said["HOLDFAST_RAY_RESOURCES"] = ",".join(f"{name}={n:g}" for name, n in custom.items())
    return said


def _address() -> str:
    """Address of the cluster that this program is connected to; nothing if it is to none yet."""
    from holdfast.platforms.ray_engine import require_ray

    ray = require_ray()
    return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else ""


def _run_here(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the job as a child that dies with this process; Ctrl-C and SIGTERM end it in order."""
    process = subprocess.Popen(command, env=dict(environ), preexec_fn=_die_with_parent)
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise


def _die_with_parent() -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)


async def _start_detached(client: RayClient, name: str, start: RayNodeStart) -> None:
    if name in await client.names():
        raise UsageError(f"job={name!r}: a detached job of this name runs; give another name")
    await client.create(name, start, ActorTerms(resources=HEAD))
    state = await client.runs(name)
    if isinstance(state, Death):
        raise PlatformError(f"the job's actor died: {state.text.splitlines()[0]}")


async def _end_of(client: RayClient, name: str) -> int:
    while True:
        state = await client.ended(name)
        if isinstance(state, NodeState) and state.code is not None:
            return state.code
        if isinstance(state, Death):
            raise PlatformError(
                f"the actor of job {name} is gone: {state.text.splitlines()[0]}; `holdfast status "
                f"{name}` on the cluster's head node may tell more"
            )
        await asyncio.sleep(AWAY_PAUSE_S)
