"""The Slurm platform: nodes are steps of the job's allocation, and jobs of their own beyond it.

A request is one `srun` of one task on a host that we choose: one of the allocation's that is up, that
the job does not avoid and on which nothing of ours runs. The `srun` has a guard (see `guards`), so how
it ended is known whoever was killed meanwhile, and without Slurm's controller. When no host is left,
the request is a Slurm job of one node that joins the running job:

    step    --job-name=3-2                  srun, in the allocation
    job     --job-name=holdfast-llm-3-2     sbatch; of two under one name the older counts

What Slurm last said of jobs stands until it speaks again: a command that fails tells nothing of nodes.

srun takes SIGTERM for an order to kill its task. So a step is told to leave by `scancel --signal=TERM`,
and only what has not left within its limit gets its srun signalled.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from msgspec.structs import replace

from holdfast.errors import PlatformError
from holdfast.jobhome import write_privately
from holdfast.messages.supply import Cordon, NodeWish, RequestId, Sighting
from holdfast.platforms.guards import GuardedNodes, NodeStart
from holdfast.platforms.opening import NodeOrders
from holdfast.platforms.slurm_commands import (
    BROKEN,
    SQUEUE_FORMAT,
    UNUSABLE,
    Commands,
    QueuedJob,
    SlurmCommands,
    exit_code,
    flags,
    meaning,
    queue,
    records,
    require_commands,
)
from holdfast.platforms.slurm_environment import allocation_id, own_address

log = logging.getLogger("holdfast.supplier")

SRUN_FAILED = 212
"""Exit code of an srun that could not even start its task (SLURM_EXIT_ERROR)."""
AVOIDED = "avoided"
"""File with the hosts that a requeued job excludes, beside the records of its nodes."""
BEYOND = 1_000_000
"""Place of the first node beyond the allocation: after all that it can have."""
LEAVING_S = 1.0
"""How long a step may take to end by itself before it is told to: Slurm reports that as cancelled."""
ALIVE = frozenset({"pending", "running"})
GONE = re.compile(r"invalid job id|already compl", re.IGNORECASE)


class Steps(Protocol):
    """Sruns, each with a guard."""

    def seen(self) -> list[Sighting]: ...
    async def start(self, starts: Sequence[NodeStart]) -> None: ...
    def end(self, requests: Sequence[RequestId]) -> None: ...
    async def changed(self) -> None: ...
    def hosts_in_use(self) -> set[str]: ...


class SlurmPlatform:
    """Nodes of one allocation, and jobs beyond it."""

    name = "slurm"

    def __init__(self, orders: NodeOrders, commands: Commands, steps: Steps) -> None:
        self._orders, self._commands, self._steps = orders, commands, steps
        self._id = allocation_id(orders.environ)
        self._prefix = f"holdfast-{orders.job}-"
        self._jobs: dict[RequestId, tuple[QueuedJob, Sighting]] | None = None
        """What Slurm last said of jobs beyond the allocation; None before it ever did."""
        self._explained: dict[RequestId, Sighting] = {}
        """Steps of whose end more is known than an exit code."""
        self._judged: set[RequestId] = set()
        self._told: dict[RequestId, float] = {}
        """When steps were told to leave."""
        self._avoided: dict[str, str] = {}
        self._order: dict[str, int] = {}
        """Places of the allocation's hosts in Slurm's order."""
        self._complaint = ""

    # ---- the four methods ----

    async def list(self) -> Sequence[Sighting]:
        """List steps by their guards, and jobs as Slurm last said."""
        steps = self._steps.seen()
        try:
            await self._look()
        except PlatformError as error:
            if self._jobs is None:
                raise
            if str(error) != self._complaint:
                log.warning("%s; going by what it said before", error)
            self._complaint = str(error)
        judged = await self._judge(steps)
        jobs = {} if self._jobs is None else self._jobs
        names = {one.request for one in judged}
        return [*judged, *(one for name, (_, one) in jobs.items() if name not in names)]

    async def ask(self, wishes: Sequence[NodeWish], avoid: Sequence[Cordon]) -> None:
        """Start steps on hosts that are free, and submit jobs for what is left."""
        waiting = {wish.id: wish for wish in wishes}
        try:
            free = await self._free_hosts(avoid)
            within = [wish for wish in wishes if not self._needs_more(wish)][: len(free)]
            starts = [self._step(wish, host) for wish, host in zip(within, free, strict=False)]
            await self._steps.start(starts)
            for start in starts:
                del waiting[start.wish.id]
            for wish in tuple(waiting.values()):
                await self._submit(wish)
                del waiting[wish.id]
        except PlatformError as error:
            raise PlatformError(str(error), tuple(waiting), for_good=error.for_good) from error

    async def release(self, requests: Sequence[RequestId]) -> None:
        """Have Slurm tell steps to leave, and cancel jobs; what is gone already is no error."""
        jobs = self._jobs or {}
        ids = [jobs[request][0].id for request in requests if request in jobs]
        steps = [request for request in requests if request not in jobs]
        now = asyncio.get_running_loop().time()
        late = [one for one in steps if now - self._told.get(one, now) > self._orders.limit_s]
        fresh = [one for one in steps if one not in self._told]
        if ids:
            await self._cancel(*ids)
        if fresh and (left := await self._not_leaving(fresh)):
            await self._tell_to_leave(left, now)
        self._steps.end(late)

    async def changed(self) -> None:
        """Wait for the end of a step. Of jobs beyond the allocation Slurm tells only who asks."""
        await self._steps.changed()

    # ---- what is there ----

    async def _look(self) -> None:
        """Ask Slurm for the jobs beyond the allocation, and for the exit codes of those that ended."""
        text = await self._commands.run(
            "squeue", "--me", "--states=all", "--noheader", SQUEUE_FORMAT
        )
        mine = re.compile(re.escape(self._prefix) + r"(\d+-\d+)")
        found: dict[RequestId, QueuedJob] = {}
        doubles = []
        for job in sorted(queue(text), key=lambda job: _number(job.id)):
            match = mine.fullmatch(job.name)
            if match is None:
                continue
            if match[1] in found and meaning(job.state).status in ALIVE:
                doubles.append(job.id)
            found.setdefault(match[1], job)
        if doubles:
            await self._cancel(*doubles)
        known = self._jobs or {}
        seen = {}
        for request, job in found.items():
            before = known.get(request)
            same = before is not None and before[0] == job
            seen[request] = (
                job,
                before[1] if same and before else await self._sighted(request, job),
            )
        self._jobs = seen

    async def _sighted(self, request: RequestId, job: QueuedJob) -> Sighting:
        status, reason = meaning(job.state)
        code = None
        detail = f"Slurm job {job.id} is {job.state.lower()}"
        if status == "pending":
            detail += f": {job.why}"
        if status == "failed":
            fields = await self._job_fields(job.id)
            code = exit_code(fields.get("ExitCode", ""))
            detail += f" with exit code {code}" if reason is None and code is not None else ""
        return Sighting(
            request=request, status=status, reason=reason, code=code, host=job.hosts, detail=detail
        )

    async def _judge(self, steps: Sequence[Sighting]) -> Sequence[Sighting]:
        """Say of steps that are over whether their hosts failed, where Slurm can say so.

        The srun of a host that went down may end with 0: nobody told it of another code.
        """
        fresh = [
            one for one in steps if one.status not in ALIVE and one.request not in self._judged
        ]
        self._judged.update(one.request for one in fresh)
        try:
            states = await self._states([one.host for one in fresh])
        except PlatformError as error:
            log.warning("%s; nothing is known of hosts whose nodes ended", error)
            states = {}
        for one in fresh:
            if down := flags(states.get(one.host, "")) & BROKEN:
                detail = f"Slurm says that {one.host} is {' and '.join(sorted(down)).lower()}"
                self._explained[one.request] = Sighting(
                    request=one.request,
                    status="failed",
                    reason="hardware",
                    host=one.host,
                    detail=detail,
                )
            elif one.code == SRUN_FAILED:
                output = f"see the output of Slurm job {self._id}"
                detail = f"srun could not start it on {one.host}: {output}"
                self._explained[one.request] = replace(one, reason="unknown", detail=detail)
        return [self._explained.get(one.request, one) for one in steps]

    async def _job_fields(self, job: str) -> Mapping[str, str]:
        text = await self._commands.run("scontrol", "show", "job", "--oneliner", job)
        return next(records(text), {})

    async def _states(self, hosts: Sequence[str]) -> Mapping[str, str]:
        if not hosts:
            return {}
        text = await self._commands.run("scontrol", "show", "node", "--oneliner", ",".join(hosts))
        return {one["NodeName"]: one.get("State", "") for one in records(text) if "NodeName" in one}

    # ---- steps ----

    async def _free_hosts(self, avoid: Sequence[Cordon]) -> Sequence[str]:
        """Return the allocation's hosts that can take a node, in Slurm's order."""
        fields = await self._job_fields(self._id)
        await self._note_avoided(avoid, fields.get("ExcNodeList", ""))
        if "PreemptTime" in fields:
            raise PlatformError(f"Slurm preempts job {self._id}, and takes its nodes away")
        if meaning(fields.get("JobState", "")).status != "running":
            raise PlatformError(f"Slurm job {self._id} is {fields.get('JobState', 'gone').lower()}")
        if "NodeList" not in fields:
            raise PlatformError(f"Slurm does not say which nodes job {self._id} has")
        hosts = await self._expanded(fields["NodeList"])
        for host in hosts:
            self._order.setdefault(host, len(self._order))
        states = await self._states(hosts)
        taken = {cordon.host for cordon in avoid} | self._steps.hosts_in_use()
        return [h for h in hosts if h not in taken and not flags(states.get(h, "")) & UNUSABLE]

    async def _expanded(self, hostlist: str) -> Sequence[str]:
        return (await self._commands.run("scontrol", "show", "hostnames", hostlist)).split()

    def _needs_more(self, wish: NodeWish) -> bool:
        """Whether a node is to have more memory than the allocation's have."""
        return wish.memory_mib > self._orders.settings.terms.supply.memory_mib

    def _step(self, wish: NodeWish, host: str) -> NodeStart:
        srun = shutil.which("srun", path=self._orders.environ.get("PATH")) or "srun"
        command = [srun, *step_options(wish.id, host), *self._orders.command]
        environ = {**self._orders.environ, **self._place(self._order.get(host, BEYOND))}
        environ["SLURM_EXIT_ERROR"] = str(SRUN_FAILED)
        return NodeStart(wish, host, command, environ)

    def _place(self, place: int) -> Mapping[str, str]:
        """Say a node's place among the others: to itself each of them is task 0 of 1."""
        known = {"HOLDFAST_INFRA_RANK", "HOLDFAST_RANK_FROM_NODENAME", "SLURM_TOPOLOGY_ADDR"}
        return {} if known & self._orders.environ.keys() else {"HOLDFAST_INFRA_RANK": str(place)}

    async def _tell_to_leave(self, requests: Sequence[RequestId], now: float) -> None:
        text = await self._commands.run(
            "squeue", "--steps", f"--jobs={self._id}", "--noheader", "--format=%i|%j"
        )
        pairs = [line.strip().split("|", 1) for line in text.splitlines() if "|" in line]
        steps = {name: id for id, name in pairs}
        running = [steps[request] for request in requests if request in steps]
        if running:
            await self._cancel("--signal=TERM", *running)
        self._told.update(dict.fromkeys(requests, now))
        self._steps.end([request for request in requests if request not in steps])

    async def _not_leaving(self, requests: Sequence[RequestId]) -> Sequence[RequestId]:
        """Return those that do not end by themselves at this moment, as at the end of their job."""

        def left() -> Sequence[RequestId]:
            alive = {one.request for one in self._steps.seen() if one.status in ALIVE}
            return [request for request in requests if request in alive]

        async def all_ended() -> None:
            while left():
                await self._steps.changed()

        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(all_ended(), LEAVING_S)
        return left()

    async def _cancel(self, *words: str) -> None:
        """Run scancel. It also complains of what it has just ended (22.05): that is no error."""
        try:
            await self._commands.run("scancel", "--quiet", *words)
        except PlatformError as error:
            if not GONE.search(str(error)):
                raise

    # ---- jobs ----

    async def _submit(self, wish: NodeWish) -> None:
        """Submit a job of one node like those of the allocation, on none of the hosts to avoid."""
        fields = await self._job_fields(self._id)
        options = [
            f"--job-name={self._prefix}{wish.id}",
            # Of two jobs of one name the second cannot start: no request runs twice.
            "--dependency=singleton",
            *further_options(fields),
            *([f"--mem={wish.memory_mib}M"] if wish.memory_mib else ()),
            *([f"--qos={wish.priority}"] if wish.priority not in ("", "high", "low") else ()),
            *([f"--exclude={','.join(self._avoided)}"] if self._avoided else ()),
            f"--output={self._orders.records}/{wish.id}.out",
        ]
        srun = shlex.join(["srun", *step_options(wish.id), *self._orders.command])
        environ = {k: v for k, v in self._orders.environ.items() if not _of_the_job(k)}
        environ |= {**self._place(BEYOND + wish.position), "HOLDFAST_REQUEST": wish.id}
        words = ["sbatch", "--parsable", *options, f"--wrap=exec {srun}"]
        id = (await self._commands.run(*words, environ=environ)).strip().partition(";")[0]
        log.info("Slurm job %s is asked for request %s: the allocation has no node", id, wish.id)

    # ---- hosts that are blamed ----

    async def _note_avoided(self, avoid: Sequence[Cordon], excluded: str) -> None:
        """Write down which hosts a requeued job is not to get; drain them if the user wishes it."""
        fresh = {one.host: one.why for one in avoid if one.host not in self._avoided}
        if not fresh:
            return
        self._avoided |= fresh
        before = await self._expanded(excluded) if excluded else []
        hosts = ",".join(dict.fromkeys([*before, *self._avoided]))
        write_privately(self._orders.records / AVOIDED, f"{hosts}\n".encode())
        if not self._orders.settings.drain:
            return
        for host, why in fresh.items():
            reason = f"reason=holdfast job {self._orders.job}: {why}"[:200]
            try:
                await self._commands.run(
                    "scontrol", "update", f"nodename={host}", "state=drain", reason
                )
                log.info("%s is drained: %s", host, why)
            except PlatformError as error:
                log.warning("%s cannot be drained: %s", host, error)


def step_options(request: RequestId, host: str = "") -> list[str]:
    """Options of an srun that is one node: all of one host, whatever runs there besides."""
    where = [f"--nodelist={host}"] if host else []
    return [
        *("--nodes=1", "--ntasks=1", *where, f"--job-name={request}"),
        *("--overlap", "--mem=0", "--cpu-bind=none", "--input=none", "--export=ALL"),
        *("--kill-on-bad-exit=0", "--quiet"),
    ]


def further_options(fields: Mapping[str, str]) -> list[str]:
    """Options of a further job of one node, like those of the job whose fields these are."""
    options = ["--nodes=1", "--no-requeue", "--export=ALL"]
    for option, field in (
        ("partition", "Partition"),
        ("account", "Account"),
        ("qos", "QOS"),
        ("reservation", "Reservation"),
        ("constraint", "Features"),
        ("time", "TimeLimit"),
        ("gres", "TresPerNode"),
    ):
        if field in fields:
            options.append(f"--{option}={fields[field].replace('gres:', '')}")
    if fields.get("OverSubscribe") == "NO":
        options.append("--exclusive")
    elif "CPUs/Task" in fields:
        options.append(f"--cpus-per-task={fields['CPUs/Task']}")
    return options


def _of_the_job(variable: str) -> bool:
    """Whether a variable says where this process runs, and would mislead a job elsewhere."""
    return variable.startswith(("SLURM_", "SBATCH_", "SRUN_")) and variable != "SLURM_CONF"


def _number(id: str) -> int:
    digits = re.match(r"\d+", id)
    return int(digits[0]) if digits else 0


def open_platform(orders: NodeOrders) -> SlurmPlatform:
    """Provide nodes of the allocation in which this process runs."""
    return SlurmPlatform(orders, SlurmCommands(), GuardedNodes(orders))


def own_host(environ: Mapping[str, str]) -> str:
    """Return the address at which nodes reach this one; UsageError outside of an allocation."""
    allocation_id(environ)
    require_commands()
    return own_address(environ)
