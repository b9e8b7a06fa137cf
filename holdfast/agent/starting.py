"""Gives the ranks of a round to processes: to standbys, or to fresh ones that run a command.

What a rank needs is settled before its process runs the script: its environment, its standard
streams, where its log and its error go, and for rank 0 the socket of the round's store. Whoever minds
the workers hears of each twice: before it has its rank, so that nothing it says is missed, and after.

The store's port is promised to the other nodes before there is a round, so it is offered here at all
times. With the round it goes to rank 0, or is closed; after the round there is another.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from holdfast.agent.environment import rank_environment
from holdfast.agent.output import Console, Output, rank_output
from holdfast.agent.ports import StorePort
from holdfast.agent.processes import Process, ProcessTable, spawn
from holdfast.agent.standbys import Pool, Standby
from holdfast.agent.worker import Worker
from holdfast.config.settings import RunSettings
from holdfast.messages.local import Assign
from holdfast.messages.records import Part
from holdfast.messages.units import Rank

log = logging.getLogger("holdfast.agent")

STDIN = 0
"""A rank reads what we would; in a session of its own it may, a terminal too."""


class Minder(Protocol):
    """Who takes the workers over."""

    def expect(self, worker: Worker) -> None:
        """It is about to have its rank."""

    def follow(self, worker: Worker) -> None:
        """It has its rank; it may be gone already."""


@dataclass
class Starter:
    settings: RunSettings
    run_id: str
    address: str
    """Where other nodes reach this one."""
    store_port: int
    """Where the user wants rank 0's store; 0: anywhere."""
    logs: Path
    images: Path
    """The directory of this node's snapshots."""
    console: Console
    table: ProcessTable
    pool: Pool
    env: dict[str, str]
    """What all processes of the node have in common."""
    port: StorePort = field(init=False)

    def __post_init__(self) -> None:
        self.offer_port()

    def offer_port(self) -> None:
        """Have a port for the store of the next round."""
        self.port = StorePort(self.address, self.store_port)

    def renew_port(self) -> None:
        self.port.close()
        self.offer_port()

    async def start(self, part: Part, minder: Minder) -> None:
        """Have a process for each rank of the part."""
        try:
            self._make_log_folder(part)
            if self.settings.entry == "command":
                for local_rank in range(part.slots):
                    self._run_command(part, local_rank, minder)
                return
            standbys = await self.pool.take(part.slots)
            for local_rank, standby in enumerate(standbys):
                self._hand_over(part, local_rank, standby, minder)
        finally:
            self.port.close()

    def _hand_over(self, part: Part, local_rank: int, standby: Standby, minder: Minder) -> None:
        assert standby.process is not None
        output = self._output(part, local_rank)
        worker = self._worker(part, local_rank, standby.process, standby, output)
        worker.stacks_fd = os.memfd_create("holdfast-stacks", os.MFD_CLOEXEC)
        minder.expect(worker)
        assign = Assign(
            env=self._environment(part, local_rank),
            entry=self.settings.entry,
            agent_pid=os.getpid(),
            round=part.round,
            images=str(self.images),
            flight=str(worker.flight),
        )
        store = [self.port.fileno()] if worker.rank == 0 else []
        standby.assign(assign, [STDIN, *output.writers(), worker.stacks_fd, *store])
        output.handed_over()
        minder.follow(worker)

    def _run_command(self, part: Part, local_rank: int, minder: Minder) -> None:
        output = self._output(part, local_rank)
        env = {**self.env, **self._environment(part, local_rank)}
        command = [self.settings.script, *self.settings.script_args]
        pid = spawn(command, env, stdio=[STDIN, *output.writers()])
        output.handed_over()
        worker = self._worker(part, local_rank, self.table.watch(pid), None, output)
        minder.expect(worker)
        minder.follow(worker)

    def _worker(
        self,
        part: Part,
        local_rank: int,
        process: Process,
        standby: Standby | None,
        output: Output,
    ) -> Worker:
        return Worker(
            round=part.round,
            rank=Rank(part.first_rank + local_rank),
            process=process,
            standby=standby,
            output=output,
            error_file=self._file(part, local_rank, "error.json"),
            flight=self._file(part, local_rank, "flight"),
        )

    def _environment(self, part: Part, local_rank: int) -> dict[str, str]:
        error_file = self._file(part, local_rank, "error.json")
        return rank_environment(self.settings, part, local_rank, self.run_id, error_file, self.env)

    def _output(self, part: Part, local_rank: int) -> Output:
        path = self._file(part, local_rank, "log")
        rank = part.first_rank + local_rank
        return rank_output(self.settings, self.console, path, rank, local_rank)

    # ---- files ----

    def _folder(self, part: Part) -> Path:
        return self.logs / f"round_{part.round}"

    def _file(self, part: Part, local_rank: int, kind: str) -> Path:
        return self._folder(part) / f"rank_{part.first_rank + local_rank}.{kind}"

    def _make_log_folder(self, part: Part) -> None:
        """Error files are written by the ranks themselves, into a folder that must be there."""
        try:
            self._folder(part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.error("%s: no logs of round %d (%s)", self.logs, part.round, error.strerror)
