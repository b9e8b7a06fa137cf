"""The Ray platform: each node of a job is an actor of a Ray cluster.

The supplier of `holdfast up --on ray` is a driver of the cluster. A request is a detached actor with
the request's name, `JOB/3-2`, in a namespace of the job; so a supplier that is killed and started again
finds all that the one before it made. For each actor there is a task that waits for what the actor
says (see `ray_node`): that its launcher runs, and how it ended. So an end is known at once, and nothing
is polled.

    Ray says                           the sighting is
    actor not placed yet               pending, with what it needs and whether any host has it
    its launcher runs                  running, on the Ray node's id
    its launcher ended                 succeeded or failed, with the exit code
    a call failed, actor unavailable   as before: a host may be gone, and only Ray can know
    the actor died                     failed, with the reason that Ray gives (`reason_of_death`)

Ray declares a host dead after some 13 s. A spare does not wait for that: the coordinator notices the
loss by the node's own stream. What has ended is removed once it was told, for an actor keeps its
resources until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence

from holdfast.config.schema import Settings
from holdfast.config.settings import RunSettings
from holdfast.config.sources import from_environment
from holdfast.errors import PlatformError, UsageError
from holdfast.messages.supply import Cordon, ExitReason, NodeWish, RequestId, Sighting
from holdfast.platforms.opening import NodeOrders
from holdfast.platforms.ray_engine import ActorTerms, Death, HostView, RayClient, connect
from holdfast.platforms.ray_job import RayRun, run
from holdfast.platforms.ray_node import NodeState, RayNodeStart, forwarded

__all__ = ["RayPlatform", "RayRun", "open_platform", "reason_of_death", "run"]

AWAY_PAUSE_S = 0.5
"""How long to wait before an actor that cannot be reached is asked again."""
VERDICT_S = 2.0
"""How long an actor that Ray does not list any more may take to say how it died."""
MIB = 1 << 20
ELSEWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737): packets to it would leave by the default route."""


class RayPlatform:
    """Nodes that are actors, by their names in a namespace."""

    name = "ray"

    def __init__(self, orders: NodeOrders, client: RayClient, terms: ActorTerms) -> None:
        """`terms` are those of every node, before its request's memory and hosts to avoid."""
        self._orders, self._client, self._terms = orders, client, terms
        self._seen: dict[RequestId, Sighting] = {}
        self._told: set[RequestId] = set()
        """Requests whose end was listed."""
        self._waiting: dict[RequestId, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._had_nodes = False

    async def list(self) -> Sequence[Sighting]:
        """List the job's actors, and those whose end nobody was told yet."""
        prefix = self._named("")
        there = {name.removeprefix(prefix) for name in await self._client.names()}
        for request in there:
            self._follow(request)
        await self._await_verdicts([name for name in self._waiting if name not in there])
        await self._forget([name for name in self._told if name in self._seen], there)
        listed: Sequence[Sighting] = tuple(self._seen.values())
        if any(one.status == "pending" for one in listed):
            listed = await self._with_details(listed)
        self._told |= {one.request for one in listed if _over(one)}
        return listed

    async def ask(self, wishes: Sequence[NodeWish], avoid: Sequence[Cordon]) -> None:
        """Create an actor for each request. What Ray has no room for waits there, as its demand."""
        hosts = await self._client.hosts()
        known = {host.id for host in hosts}
        shunned = tuple(sorted({cordon.host for cordon in avoid} & known))
        await self._refuse_the_impossible(wishes, hosts)
        for wish in wishes:
            await self._remove_attempts_before(wish)
            try:
                await self._client.create(
                    self._named(wish.id), self._start(wish), self._terms_of(wish, shunned)
                )
            except PlatformError as error:
                rest = tuple(one.id for one in wishes[wishes.index(wish) :])
                raise PlatformError(str(error), rest, for_good=error.for_good) from error
            self._follow(wish.id)

    async def release(self, requests: Sequence[RequestId]) -> None:
        """Have nodes leave; an actor that was never placed is removed."""
        for request in requests:
            seen = self._seen.get(request)
            if seen is not None and seen.status == "pending":
                await self._client.remove(self._named(request))
            elif seen is not None and not _over(seen):
                await self._client.leave(self._named(request))

    async def changed(self) -> None:
        """Wait for the news of an actor."""
        await self._news.wait()
        self._news.clear()

    # ---- following actors ----

    def _follow(self, request: RequestId) -> None:
        if request not in self._seen:
            self._seen[request] = Sighting(request=request, status="pending")
            self._waiting[request] = asyncio.ensure_future(self._watch(request))

    async def _watch(self, request: RequestId) -> None:
        """Note what becomes of an actor, until it is over."""
        name = self._named(request)
        state = await _answer(self._client.runs, name)
        self._note(request, state)
        if isinstance(state, NodeState) and state.code is None:
            self._note(request, await _answer(self._client.ended, name))
        self._waiting.pop(request, None)

    def _note(self, request: RequestId, state: NodeState | Death) -> None:
        if request not in self._seen:
            return
        host = self._seen[request].host
        self._seen[request] = _sighting(request, state, host, self._named(request))
        self._had_nodes = True
        self._news.set()

    async def _await_verdicts(self, missing: Collection[RequestId]) -> None:
        """Give actors that are gone the time to say why; what stays silent is forgotten."""
        tasks = [self._waiting[request] for request in missing]
        if tasks:
            await asyncio.wait(tasks, timeout=VERDICT_S)
        for request in missing:
            task = self._waiting.pop(request, None)
            if task is not None and not task.done():
                task.cancel()
                del self._seen[request]

    async def _forget(self, ended: Collection[RequestId], there: Collection[RequestId]) -> None:
        """Remove actors whose end was told: they keep resources."""
        for request in ended:
            if request in there:
                await self._client.remove(self._named(request))
            self._drop(request)

    async def _remove_attempts_before(self, wish: NodeWish) -> None:
        for request, seen in list(self._seen.items()):
            if request.partition("-")[0] == str(wish.position) and _over(seen):
                await self._client.remove(self._named(request))
                self._drop(request)

    def _drop(self, request: RequestId) -> None:
        self._seen.pop(request, None)
        self._told.discard(request)

    # ---- what is asked for ----

    def _named(self, request: RequestId) -> str:
        return f"{self._orders.job}/{request}"

    def _start(self, wish: NodeWish) -> RayNodeStart:
        orders = self._orders
        return RayNodeStart(
            request=wish.id,
            command=tuple(orders.command[1:]),
            environ=forwarded(orders.environ),
            limit_s=orders.limit_s,
            directory=_directory(),
            lifeline=_coordinator(orders.command),
        )

    def _terms_of(self, wish: NodeWish, avoid: tuple[str, ...]) -> ActorTerms:
        terms = self._terms
        return ActorTerms(
            cpus=terms.cpus,
            gpus=terms.gpus,
            memory_bytes=wish.memory_mib * MIB or terms.memory_bytes,
            resources=terms.resources,
            strategy=terms.strategy,
            avoid=avoid,
        )

    async def _refuse_the_impossible(
        self, wishes: Sequence[NodeWish], hosts: Sequence[HostView]
    ) -> None:
        """Refuse for good what no host can ever hold: hosts that only are away may come back."""
        had_nodes = self._had_nodes or any(wish.attempt > 1 for wish in wishes)
        if had_nodes or await self._client.scales():
            return
        needs = self._terms_of(wishes[0], ()).needs()
        lacks = _lacks(needs, hosts)
        if lacks:
            why = f"{lacks}, and the cluster does not scale; ask for less, or add such a node"
            raise PlatformError(why, tuple(wish.id for wish in wishes), for_good=True)

    async def _with_details(self, listed: Sequence[Sighting]) -> Sequence[Sighting]:
        """Say of pending requests what they wait for."""
        needs, hosts = self._terms.needs(), await self._client.hosts()
        large = sum(_holds(host, needs) for host in hosts)
        waits = f"waits until {_amounts(needs)} is free on one of {large} nodes of the Ray cluster"
        detail = _lacks(needs, hosts) or waits
        return [
            Sighting(request=one.request, status="pending", detail=detail)
            if one.status == "pending"
            else one
            for one in listed
        ]


async def _answer(call: Callable[[str], object], name: str) -> NodeState | Death:
    """Ask an actor until it answers or is dead; what cannot be reached may come back."""
    while True:
        try:
            answer = await call(name)  # type: ignore[misc]
        except PlatformError:
            answer = None
        if isinstance(answer, (NodeState, Death)):
            return answer
        await asyncio.sleep(AWAY_PAUSE_S)


def _over(sighting: Sighting) -> bool:
    return sighting.status not in ("pending", "running")


def _sighting(request: RequestId, state: NodeState | Death, host: str, actor: str) -> Sighting:
    if isinstance(state, Death):
        reason, detail = reason_of_death(state)
        return Sighting(request=request, status="failed", reason=reason, host=host, detail=detail)
    if state.code is None:
        detail = f"actor {actor}"
        return Sighting(request=request, status="running", host=state.host, detail=detail)
    if state.code == 0:
        return Sighting(request=request, status="succeeded", code=0, host=state.host)
    how = f"signal {state.code - 128}" if state.code > 128 else f"exit code {state.code}"
    detail = state.detail or f"its launcher ended with {how} on Ray node {state.host}"
    return Sighting(
        request=request, status="failed", code=state.code, host=state.host, detail=detail
    )


_DEATHS: tuple[tuple[str, ExitReason, str], ...] = (
    ("No module named 'holdfast'", "fatal", "Holdfast is not installed on the Ray node; install it "
     "there, or name it in the runtime environment, as in {\"pip\": [\"holdfast\"]}"),
    ("node has died", "lost", ""),
    ("ray.kill", "deleted", ""),
    ("memory", "oom", ""),
    ("runtime environment", "fatal", ""),
    ("creation task", "fatal", ""),
)  # fmt: skip
"""What Ray's words contain, what that means, and our words where Ray's do not help."""


def reason_of_death(death: Death) -> tuple[ExitReason, str]:
    """Say why an actor died, and the same in words."""
    lines = [line.strip() for line in death.text.splitlines() if line.strip()]
    said = " ".join(lines[:1]) or death.kind
    if death.preempted:
        return "preempted", said
    if death.kind == "OutOfMemoryError":
        return "oom", said
    for words, reason, told in _DEATHS:
        if words in death.text:
            return reason, told or next((line for line in lines if words in line), said)
    return "killed", said


def _holds(host: HostView, needs: Mapping[str, float]) -> bool:
    """Whether a host is large enough, were it free."""
    return all(host.total.get(name, 0.0) >= amount for name, amount in needs.items())


def _amounts(needs: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_amount(name, n)}" for name, n in needs.items()) or "a process"


def _amount(name: str, number: float) -> str:
    return f"{number / (1 << 30):.3g} GiB" if name == "memory" else f"{number:g}"


def _lacks(needs: Mapping[str, float], hosts: Sequence[HostView]) -> str:
    """Say what no host has enough of; nothing if one host could hold it all."""
    if any(_holds(host, needs) for host in hosts):
        return ""
    most = {name: max((host.total.get(name, 0.0) for host in hosts), default=0.0) for name in needs}
    parts = [
        f"{name} {_amount(name, amount)} (the most is {_amount(name, most[name])})"
        for name, amount in needs.items()
        if most[name] < amount
    ]
    if not parts:
        return f"no node of the Ray cluster has all of {_amounts(needs)}"
    return f"no node of the Ray cluster has {' and '.join(parts)}"


def _directory() -> str:
    """The working directory; none where Ray has removed it, as it does with copies of its own."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _coordinator(command: Sequence[str]) -> tuple[str, int] | None:
    flag = f"{Settings.coordinator.flag}="
    said = next((word.removeprefix(flag) for word in command if word.startswith(flag)), None)
    if said is None:
        return None
    host, _, port = said.rpartition(":")
    return host.strip("[]"), int(port)


def own_host(environ: Mapping[str, str]) -> str:
    """Where the nodes of a Ray cluster reach this machine: names are not known everywhere, so it is
    the address from which packets go there. None is sent."""
    head, _, _ = environ.get("RAY_ADDRESS", "").rpartition(":")
    for target in (head.rpartition("/")[2].strip("[]"), ELSEWHERE):
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect((target or ELSEWHERE, 9))
            return str(probe.getsockname()[0])
    return socket.gethostname()


def open_platform(orders: NodeOrders) -> RayPlatform:
    """Connect to the Ray cluster, and provide nodes that are actors there."""
    token = orders.environ.get(Settings.token.variables[0], "")
    client = connect(namespace_of(orders.job, token))
    return RayPlatform(orders, client, actor_terms(orders.settings, orders.environ))


def namespace_of(job: str, token: str) -> str:
    """Name a job's namespace: jobs of the same name, of other users, have other tokens."""
    return f"holdfast-{job}-{hashlib.sha256(token.encode()).hexdigest()[:12]}"


def actor_terms(settings: RunSettings, environ: Mapping[str, str]) -> ActorTerms:
    """Read what a node needs of Ray: by default a CPU for each rank."""
    said = from_environment(environ)
    cpus = said.ray_cpus if said.ray_cpus is not None else float(settings.nproc)
    named = {"CPU", "GPU", "memory"} & said.ray_resources.keys()
    if named:
        raise UsageError(
            f"HOLDFAST_RAY_RESOURCES: {', '.join(sorted(named))} has a variable of its own; "
            "see HOLDFAST_RAY_CPUS, HOLDFAST_RAY_GPUS and --memory"
        )
    return ActorTerms(
        cpus=cpus,
        gpus=said.ray_gpus,
        resources=said.ray_resources,
        strategy=said.ray_strategy,
    )
