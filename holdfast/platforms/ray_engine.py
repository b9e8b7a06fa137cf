"""All that Holdfast asks of Ray, in one class; nothing else imports it.

Calls that block (they go to Ray's head) are made in threads; answers of actors are awaited. What an
actor's death means is not decided here: `Death` carries Ray's words, and `platforms/ray.py` reads them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from holdfast.errors import PlatformError, UsageError
from holdfast.platforms.ray_node import NodeState, RayNode, RayNodeStart

CONNECT_LIMIT_S = 5.0
STRATEGIES: Mapping[str, str] = {"spread": "SPREAD", "pack": "DEFAULT"}
"""Ways to choose hosts, and Ray's names for them."""
NODE_ID_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class ActorTerms:
    """What an actor needs, and where it may be."""

    cpus: float = 0.0
    gpus: float = 0.0
    memory_bytes: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: str = "spread"
    avoid: tuple[str, ...] = ()
    """Ray's ids of nodes that it must not be on."""

    def needs(self) -> dict[str, float]:
        """Say what it needs in Ray's names."""
        all_needs = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory_bytes)}
        return {name: amount for name, amount in {**all_needs, **self.resources}.items() if amount}


class HostView(NamedTuple):
    """A node of the Ray cluster."""

    id: str
    total: Mapping[str, float]
    """Its resources, whether they are free or not."""


class Death(NamedTuple):
    """How an actor died, in Ray's words."""

    kind: str
    """Name of Ray's exception."""
    text: str
    preempted: bool = False


class RayClient(Protocol):
    """What the platform asks of a Ray cluster. Each method may raise `PlatformError`."""

    async def names(self) -> Sequence[str]:
        """List the names of the job's actors that are pending or alive."""

    async def create(self, name: str, start: RayNodeStart, terms: ActorTerms) -> None:
        """Create an actor; nothing if there is one of this name."""

    async def runs(self, name: str) -> NodeState | Death | None:
        """Wait until an actor's launcher runs; None if the actor cannot be reached just now."""

    async def ended(self, name: str) -> NodeState | Death | None:
        """Wait until an actor's launcher has ended; None if the actor cannot be reached just now."""

    async def leave(self, name: str) -> None:
        """Have an actor tell its launcher to leave."""

    async def remove(self, name: str) -> None:
        """End an actor with all of its processes; nothing if it is gone."""

    async def hosts(self) -> Sequence[HostView]:
        """List the nodes of the cluster that are alive."""

    async def scales(self) -> bool:
        """Whether the cluster adds nodes by itself when actors do not fit."""


class RayEngine:
    """A Ray cluster, to which this process is connected as a driver."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._handles: dict[str, Any] = {}

    async def names(self) -> Sequence[str]:
        import ray.util

        return list(await self._ask(ray.util.list_named_actors))

    async def create(self, name: str, start: RayNodeStart, terms: ActorTerms) -> None:
        await self._ask(self._create, name, start, terms)

    async def runs(self, name: str) -> NodeState | Death | None:
        return await self._call(name, "runs")

    async def ended(self, name: str) -> NodeState | Death | None:
        return await self._call(name, "ended")

    async def leave(self, name: str) -> None:
        await self._call(name, "leave")

    async def remove(self, name: str) -> None:
        await self._ask(self._remove, name)

    async def hosts(self) -> Sequence[HostView]:
        import ray

        found = await self._ask(ray.nodes)
        return [HostView(one["NodeID"], one["Resources"]) for one in found if one["Alive"]]

    async def scales(self) -> bool:
        return bool(await self._ask(_scales))

    # ---- in threads ----

    async def _ask(self, function: Any, *arguments: Any) -> Any:
        from ray.exceptions import RayError

        try:
            return await asyncio.to_thread(function, *arguments)
        except (RayError, RuntimeError, ConnectionError, TimeoutError) as error:
            raise PlatformError(f"Ray does not answer: {first_line(error)}") from error

    def _create(self, name: str, start: RayNodeStart, terms: ActorTerms) -> None:
        import ray

        options: dict[str, Any] = {"resources": dict(terms.resources)}
        if terms.memory_bytes:
            options["memory"] = terms.memory_bytes
        if terms.avoid:
            options["label_selector"] = {NODE_ID_LABEL: f"!in({','.join(terms.avoid)})"}
        try:
            self._handles[name] = (
                ray.remote(RayNode)
                .options(
                    name=name,
                    namespace=self._namespace,
                    lifetime="detached",
                    max_restarts=0,
                    num_cpus=terms.cpus,
                    num_gpus=terms.gpus,
                    scheduling_strategy=STRATEGIES[terms.strategy],
                    **options,
                )
                .remote(msgspec.json.encode(start))
            )
        except ValueError as error:
            if "already" not in str(error):
                raise PlatformError(f"Ray refuses the actor: {first_line(error)}") from error

    def _handle(self, name: str) -> Any:
        import ray

        if name not in self._handles:
            self._handles[name] = ray.get_actor(name, namespace=self._namespace)
        return self._handles[name]

    def _remove(self, name: str) -> None:
        import ray

        try:
            ray.kill(self._handle(name), no_restart=True)
        except ValueError:  # It is gone.
            pass
        finally:
            self._handles.pop(name, None)

    # ---- calls ----

    async def _call(self, name: str, method: str) -> NodeState | Death | None:
        from ray import exceptions

        try:
            handle = await self._ask(self._handle, name)
        except ValueError:
            return Death("unknown", "Ray does not know it any more")
        try:
            answer = await getattr(handle, method).remote()
        except exceptions.ActorUnavailableError:
            return None
        except exceptions.RayActorError as error:
            return Death(type(error).__name__, str(error), error.preempted)
        except exceptions.RayError as error:
            return Death(type(error).__name__, str(error))
        return None if answer is None else msgspec.json.decode(answer, type=NodeState)


def connect(namespace: str) -> RayEngine:
    """Connect this process to the cluster that RAY_ADDRESS names, or the one on this machine."""
    # Ranks that print the same are not one rank. Ray reads it when it is imported.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    ray = require_ray()
    address = os.environ.get("RAY_ADDRESS") or "auto"
    _reach(address)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if not ray.is_initialized():
            ray.init(address=address, namespace=namespace, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise UsageError(_not_connected(address, error)) from error
    finally:
        for number, action in before.items():
            signal.signal(number, action)
    return RayEngine(namespace)


def require_ray() -> Any:
    """Import Ray, or say what to install."""
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "Ray is not installed here; install it with pip install 'holdfast[ray]'"
        ) from error
    return ray


def _reach(address: str) -> None:
    """Refuse an address at which nobody listens: Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_LIMIT_S).close()
    except OSError as error:
        raise UsageError(_not_connected(address, error)) from error


def _not_connected(address: str, error: Exception) -> str:
    said = first_line(error)
    if "ersion mismatch" in str(error):
        words = " ".join(str(error).split())
        return f"{words}; start the driver with the Ray and Python of the cluster"
    where = "on this machine" if address == "auto" else f"at {address}"
    return (
        f"no Ray cluster can be reached {where} ({said}); start one with `ray start --head`, or say "
        "with RAY_ADDRESS where it is"
    )


def first_line(error: Exception) -> str:
    """The first line of Ray's message, without its stack."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _scales() -> bool:
    from ray.experimental.internal_kv import _internal_kv_get

    return may_scale(_internal_kv_get("__autoscaling_status"))


def may_scale(status: bytes | None) -> bool:
    """Read the report of Ray's autoscaler: False only where it says that it cannot add nodes.

    Without a configuration it makes up a node type for each node, `node_ID`.
    """
    if not status:
        return True
    types = (json.loads(status).get("autoscaler_report") or {}).get("node_type_mapping") or {}
    return not types or any(kind != f"node_{node}" for node, kind in types.items())
