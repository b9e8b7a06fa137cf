"""What an agent is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.config.settings import RunSettings
from holdfast.errors import JobError
from holdfast.jobhome import JobHome
from holdfast.messages.records import Terms
from holdfast.messages.units import NodeId


@dataclass(frozen=True)
class AgentOrders:
    """An agent's identity, its job, and where everything is."""

    node: NodeId
    replaces: NodeId
    """The agent of this launcher before this one, if there was one; all that it had is gone."""
    settings: RunSettings
    host: str
    port: int
    token: str
    terms: Terms
    address: str
    """Where other nodes reach this one."""
    store_port: int
    """The port that the user wants for rank 0's store; 0 for any."""
    store_name: str
    """MASTER_ADDR as the user gave it, if that is this node; else empty."""
    run_id: str
    logs: Path
    launcher_pid: int
    home: JobHome
    images: Path
    """The directory of this node's snapshots, which outlives this agent."""

    def find_coordinator(self) -> tuple[str, int] | None:
        """Return the coordinator's address from the job's home, if it is still this job's."""
        try:
            content = self.home.read_job_file()
        except JobError:  # There is none on this machine, or it is damaged.
            return None
        return (content.host, content.port) if content.token == self.token else None
