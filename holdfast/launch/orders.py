"""The orders tell the agent and the coordinator of this node what to do, from settings and site.

Both are built in the child that carries them out: the launcher itself never imports an agent or a
coordinator, and starts in tenths of a second.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.config.settings import RunSettings
from holdfast.jobhome import JobHome
from holdfast.launch.site import Site, is_master, meets_at_master, own_address
from holdfast.messages.node_ids import node_id
from holdfast.messages.records import Terms
from holdfast.messages.units import NodeId
from holdfast.wire.tls import TlsFiles

if TYPE_CHECKING:
    from holdfast.agent.orders import AgentOrders
    from holdfast.coordinator.main import CoordinatorOrders


def node_of(agent_pid: int, launch: str) -> NodeId:
    """The id of the node of this machine whose agent has this pid and that launcher."""
    return node_id(socket.gethostname(), agent_pid, launch)


def agent_orders(
    settings: RunSettings, site: Site, images: Path, launch: str, agent_before: int
) -> AgentOrders:
    """Orders for this process, which is to be the agent, after one with that pid (0: the first)."""
    from holdfast.agent.orders import AgentOrders

    static = meets_at_master(settings)
    return AgentOrders(
        node=node_of(os.getpid(), launch),
        replaces=node_of(agent_before, launch) if agent_before else NodeId(""),
        settings=settings,
        host=site.host,
        port=site.port,
        token=site.token,
        terms=settings.terms,
        address=own_address(settings, site.host),
        store_port=0 if static else settings.rendezvous.master_port or 0,
        store_name=settings.rendezvous.master_addr or "" if is_master(settings) else "",
        run_id=settings.rendezvous.run_id or site.home.name,
        logs=_logs(settings, site.home),
        launcher_pid=os.getppid(),
        home=site.home,
        images=images,
    )


def coordinator_orders(
    site: Site,
    tls: TlsFiles | None,
    terms: Terms | None,
    since_monotonic: float,
    requeued: bool = False,
) -> CoordinatorOrders:
    """Orders for this process, which is to be the coordinator."""
    from holdfast.coordinator.main import CoordinatorOrders

    assert site.listener is not None, "a site that joins a coordinator does not host one"
    return CoordinatorOrders(
        home=site.home,
        listener=site.listener,
        token=site.token,
        tls=tls,
        terms=terms,
        since_monotonic=since_monotonic,
        requeued=requeued,
    )


def _logs(settings: RunSettings, home: JobHome) -> Path:
    if settings.log_dir in (None, os.devnull):
        return home.logs
    logs = Path(settings.log_dir).absolute() / home.name
    logs.mkdir(parents=True, exist_ok=True)
    return logs
