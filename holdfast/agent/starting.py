"""Gives the ranks of a round to processes: to standbys, or to fresh ones that run a command.

Everything that a rank needs is set before its process runs the script: its environment (torchrun's,
variable by variable), its standard streams, its log and error files, and for rank 0 the socket of
the round's store. The worker monitor hears of each worker twice: before it has its rank, so that
nothing it says is missed, and after.

Rank 0's worker serves the store, but its address is promised to the other nodes before there is a
round. So the agent offers a listening socket at all times: no other process can take the port, and
ranks that connect before rank 0 is there wait in the socket's queue. With the round the socket goes
to rank 0, or is closed; after the round there is another.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.agent.console import Console
from holdfast.agent.devices import visible_device
from holdfast.agent.orders import AgentOrders
from holdfast.agent.output import Output, StreamFolder, rank_output
from holdfast.agent.processes import Process, ProcessTable, WorkerProcess, spawn
from holdfast.agent.standbys import Pool
from holdfast.agent.worker import Worker
from holdfast.agent.worker_monitor import WorkerMonitor
from holdfast.config.schema import Settings
from holdfast.config.settings import RunSettings
from holdfast.config.values import with_local_rank
from holdfast.errors import JobError
from holdfast.jobhome import make_private_directory
from holdfast.messages.local import Assign
from holdfast.messages.records import Part
from holdfast.messages.units import Rank, Time

log = logging.getLogger("holdfast.agent")

STDIN = 0
"""The agent's own stdin, which ranks read too; in a session of its own a rank may read a terminal."""
BACKLOG = 4096


class StorePort:
    """A listening socket that a worker will serve."""

    def __init__(self, address: str, port: int = 0) -> None:
        local = address in ("127.0.0.1", "localhost", "::1")
        dual = not local and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual or address == "::1" else socket.AF_INET
        host = address if local else ""
        try:
            self._socket = socket.create_server(
                (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=dual
            )
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise JobError(
                f"cannot listen on port {port} for the ranks' store ({reason});"
                " choose another --master-port or none"
            ) from None
        self.number: int = self._socket.getsockname()[1]

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Close the agent's copy: a worker has the socket, or none will."""
        self._socket.close()


@dataclass
class Starter:
    orders: AgentOrders
    console: Console
    table: ProcessTable
    pool: Pool
    env: dict[str, str]
    """The environment that all processes of the node share."""

    def __post_init__(self) -> None:
        self.settings = self.orders.settings
        self.port = self._open_port()
        log_dir = self.settings.log_dir
        base = Path(log_dir).absolute() if log_dir is not None else self.orders.logs
        self._streams = StreamFolder(self.settings, base, self.orders.run_id)

    def renew_port(self) -> None:
        """Offer a socket for the store of the next round."""
        self.port.close()
        self.port = self._open_port()

    def _open_port(self) -> StorePort:
        orders = self.orders
        return StorePort(orders.store_name or orders.address, orders.store_port)

    async def start(self, part: Part, monitor: WorkerMonitor) -> None:
        """Start a process for each rank of the part."""
        folder = self.orders.logs / f"round_{part.round}"
        try:
            make_private_directory(folder)  # Ranks write their error files into it.
        except OSError as error:
            log.error("%s: no logs of round %d (%s)", folder.parent, part.round, error.strerror)
        attempt = self._streams.attempt(part.restarts)
        is_command = self.settings.entry == "command"
        vacant: list[int] = []
        try:
            for local_rank in range(part.slots):
                parked = monitor.workers.parked.get(local_rank)
                if parked is None:
                    vacant.append(local_rank)
                else:
                    self._start_rank(
                        part, local_rank, parked.runtime, folder, attempt, monitor, parked
                    )
            standbys = [None] * len(vacant) if is_command else await self.pool.take(vacant)
            for local_rank, standby in zip(vacant, standbys, strict=True):
                self._start_rank(part, local_rank, standby, folder, attempt, monitor)
        finally:
            self.port.close()

    def _start_rank(
        self,
        part: Part,
        local_rank: int,
        standby: WorkerProcess | None,
        folder: Path,
        attempt: Path | None,
        monitor: WorkerMonitor,
        parked: Worker | None = None,
    ) -> None:
        """Give a rank to a standby or a parked worker, or to the user's command if there is none."""
        rank = Rank(part.first_rank + local_rank)
        path = folder / f"rank_{rank}"
        error_file = path.with_suffix(".error.json")
        if attempt is not None:
            error_file = attempt / str(local_rank) / "error.json"
            error_file.parent.mkdir(exist_ok=True)
        unwanted = self.settings.log_dir == os.devnull
        log_file = Path(os.devnull) if unwanted else path.with_suffix(".log")
        output = rank_output(self.settings, self.console, log_file, rank, local_rank, attempt)
        run_id = self.orders.run_id
        env = rank_environment(self.settings, part, local_rank, run_id, error_file, self.env)
        process = (
            standby.process if standby is not None else self._run_command(env, output, local_rank)
        )
        assert process is not None
        flight = path.with_suffix(".flight")
        worker = Worker(part.round, rank, process, standby, output, error_file, flight)
        worker.local_rank = local_rank
        if parked is not None:
            worker.succeed(parked)
        monitor.expect(worker)
        if standby is not None:
            self._assign(worker, standby, env, output, local_rank, part.opened_at)
        output.handed_over()
        monitor.follow(worker)

    def _run_command(self, env: dict[str, str], output: Output, local_rank: int) -> Process:
        arguments = with_local_rank(self.settings.script_args, local_rank)
        command = [self.settings.script, *arguments]
        stdio = [STDIN, *output.writers()]
        return self.table.watch(spawn(command, {**self.env, **env}, stdio=stdio))

    def _assign(
        self,
        worker: Worker,
        standby: WorkerProcess,
        env: dict[str, str],
        output: Output,
        local_rank: int,
        opened_at: Time,
    ) -> None:
        worker.stacks_fd = os.memfd_create("holdfast-stacks", os.MFD_CLOEXEC)
        assign = Assign(
            env=env,
            entry=self.settings.entry,
            agent_pid=os.getpid(),
            local_rank=local_rank,
            round=worker.round,
            images=str(self.orders.images),
            flight=str(worker.flight),
            opened_at=opened_at,
            tell_imports=local_rank == 0 and self.pool.want > 0,
            tell_device=self.settings.standby_gpu and self.pool.want > 0,
        )
        store = [self.port.fileno()] if worker.rank == 0 else []
        fds = [STDIN, *output.writers(), worker.stacks_fd, *store]
        if worker.again and standby.function is not None:
            standby.function.enter(assign, fds)
        else:
            standby.order(assign, fds)


def node_environment(settings: RunSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that all processes of the node share."""
    env = dict(environ)
    for setting in (Settings.request, Settings.node_name):
        env.pop(setting.variables[0], None)  # Of this node, not of one that a script starts.
    if settings.nproc > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(settings.signals_to_handle)
    return env


def rank_environment(
    settings: RunSettings,
    part: Part,
    local_rank: int,
    run_id: str,
    error_file: Path,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return the variables that differ between ranks."""
    rank = str(part.first_rank + local_rank)
    env = {  # These are `known_imports.RANK_VARIABLES`.
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(part.group_rank),
        "ROLE_RANK": str(part.first_role_rank + local_rank),
        "ROLE_NAME": settings.role,
        "LOCAL_WORLD_SIZE": str(part.slots),
        "WORLD_SIZE": str(part.world_size),
        "GROUP_WORLD_SIZE": str(part.group_world_size),
        "ROLE_WORLD_SIZE": str(part.role_size),
        "MASTER_ADDR": part.store_address,
        "MASTER_PORT": str(part.store_port),
        "TORCHELASTIC_RESTART_COUNT": str(part.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(part.max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        # Rank 0's worker hosts the store of its own round; the agent never imports torch.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }
    if settings.virtual_local_rank:
        env["LOCAL_RANK"] = "0"
        env["CUDA_VISIBLE_DEVICES"] = visible_device(settings, local_rank, environ) or ""
    return env
