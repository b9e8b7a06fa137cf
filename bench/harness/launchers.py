"""How each launcher is told to run the script on one machine, restarting as often as it takes.

Every launcher gets the same script, the same environment and its own defaults: nothing is tuned
for or against any of them. What a launcher needs running beside it (DLRover's master) is a
*service*: it is up before the clock starts, as it would be on a cluster, and does not count towards
the start.
"""

from __future__ import annotations

import importlib.util
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RESTARTS = "1000"
FOREIGN = {"PYTHONPATH": "", "VIRTUAL_ENV": ""}
"""For a peer: what belongs to the environment of the bench is not its business."""


@dataclass(frozen=True)
class Command:
    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """The processes to start for one job."""

    commands: list[Command]
    service: Command | None = None
    service_port: int | None = None
    """Accepts connections once the service is up."""


@dataclass(frozen=True)
class Launcher:
    name: str
    launch: Callable[[str, int, Sequence[str]], Launch]
    """From a job's name, its number of ranks and the script with its arguments."""


class LauncherMissingError(RuntimeError):
    """A launcher was asked for that cannot be started here."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ready_python(module: str) -> str:
    if importlib.util.find_spec(module) is None:
        raise LauncherMissingError(
            f"{sys.executable} has no {module}: install it, or choose launchers with --only"
        )
    return sys.executable


def plain() -> Launcher:
    """No launcher: one process a rank. Brings nothing back; the yardstick for steady-state cost."""
    python = _ready_python("torch")

    def launch(_: str, ranks: int, script: Sequence[str]) -> Launch:
        world = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        return Launch(
            [
                Command([python, *script], world | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                for rank in range(ranks)
            ]
        )

    return Launcher("plain", launch)


def torchrun() -> Launcher:
    python = _ready_python("torch")

    def launch(_: str, ranks: int, script: Sequence[str]) -> Launch:
        flags = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={RESTARTS}"]
        return Launch([Command([python, "-m", "torch.distributed.run", *flags, *script])])

    return Launcher("torchrun", launch)


def holdfast(*flags: str, nodes: int = 1, env: dict[str, str] | None = None) -> Launcher:
    """Holdfast with further flags; on several nodes, a launcher for each, which meet at a port."""
    _ready_python("torch")
    python = _ready_python("holdfast")

    def launch(job: str, ranks: int, script: Sequence[str]) -> Launch:
        words = ["--nproc-per-node", str(ranks // nodes), "--job", job, *flags]
        if nodes > 1:
            words += ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
            words += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        command = Command([python, "-m", "holdfast", "run", *words, *script], env or {})
        return Launch([command] * nodes)

    return Launcher("holdfast", launch)


def dlrover(environment: Path) -> Launcher:
    """DLRover 0.6.1; its --standalone fails on torch 2.13, so its master is started by hand."""
    programs = environment / "bin"

    def launch(job: str, ranks: int, script: Sequence[str]) -> Launch:
        port = free_port()
        address = FOREIGN | {"DLROVER_MASTER_ADDR": f"127.0.0.1:{port}", "ELASTIC_JOB_NAME": job}
        node = {"NODE_RANK": "0", "NODE_ID": "0", "NODE_NUM": "1"}
        master = [
            str(programs / "python"),
            "-m",
            "dlrover.python.master.main",
            "--platform",
            "local",
        ]
        flags = ["--nnodes=1", f"--nproc-per-node={ranks}", f"--max-restarts={RESTARTS}"]
        return Launch(
            [Command([str(programs / "dlrover-run"), *flags, *script], address | node)],
            service=Command(
                [*master, f"--port={port}", "--node_num=1", f"--job_name={job}"], address
            ),
            service_port=port,
        )

    return Launcher("dlrover", launch)


def nvrx(environment: Path) -> Launcher:
    """NVIDIA's Resiliency Extension: ft_launcher, without a configuration of its own."""
    program = str(environment / "bin" / "ft_launcher")

    def launch(_: str, ranks: int, script: Sequence[str]) -> Launch:
        flags = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={RESTARTS}"]
        return Launch(
            [Command([program, *flags, "--ignore-missing-fault-tol-cfg", *script], FOREIGN)]
        )

    return Launcher("nvrx", launch)
