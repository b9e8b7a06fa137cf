"""Chaos for platforms: random faults around the real core, the real supplier and any platform.

    endure(engine, seed=7)

runs 500 faults in simulated time. A platform takes part through an `Engine`: a fake of what outlives
its supplier, with the faults that such an engine can have. To these come the faults that all have:

    supplier    killed and started again, with a new client of the engine
    stream      cut
    coordinator killed; it comes back from its journal
    doubled     plans come twice for a while
    silence     a node's agent is gone, and the platform says that the node runs
    scale       another number of nodes is wanted
    late        the next nodes take a minute to join after they run
    calm        nothing, for some minutes

After each fault (some come in twos and threes) everything has time to heal. Then must hold:

    every node that exists is wanted, and every wanted node exists, once
    no name was made a second time after the coordinator had heard of it
    all wanted nodes are members of the job, and the core's own invariants hold
    plans are not made for ever: once healed, nothing changes any more

At the end of the job nothing is left. A failure names its seed, the fault, and the faults before it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from random import Random
from typing import Any, Protocol

from office import NodeStub, Office
from simtime import JumpingLoop

from holdfast.messages.events import JobStopAsked, ScaleAsked
from holdfast.messages.exits import EXIT_TRY_AGAIN
from holdfast.messages.records import Terms
from holdfast.messages.supply import Cordon, NodeWish, RequestId, Sighting, SupplyTerms
from holdfast.platforms.supplier import Endpoint, Platform, Supplier

HERE = Endpoint("coordinator", 1, "a-token")
MOST_NODES = 6
HEALS_WITHIN_S = 900.0
LOOK_EVERY_S = 1.0
QUIET_LOOKS = 3
"""Looks in a row that find everything as it should be."""
TERMS = Terms(
    min_nodes=1,
    max_nodes=3,
    spares=1,
    supply=SupplyTerms(memory_mib=1, memory_limit_mib=1 << 40, relaunches=1 << 20),
)
_life: ContextVar[int] = ContextVar("life", default=0)
"""Which supplier a task belongs to."""


class Engine(Protocol):
    """A fake engine: what of a platform outlives its supplier."""

    faults: Mapping[str, Callable[[Random], None]]
    """Faults that this engine can have, by name. One fault may not end all nodes for good (with a
    fatal reason), and hosts must not run out: the job would be right to end."""

    def open(self) -> Platform:
        """Return a new client, as a restarted supplier would open it. The one before is dead: none of
        its code runs any more."""

    def nodes(self) -> Sequence[RequestId]:
        """Return the nodes that exist or will, one entry each: a name twice is a leak."""

    def settle(self) -> None:
        """Let what is pending happen: a pending node runs, a leaving one is gone; faults that last
        (an API that is down) are over."""


def endure(
    engine: Engine,
    seed: int,
    faults: int = 500,
    only: Sequence[str] | None = None,
    terms: Terms = TERMS,
    patience_s: float = 0.0,
) -> Counter[str]:
    """Run a platform through faults; return how often each occurred. AssertionError if it breaks.

    `only` names the faults to draw from; None for all. With `patience_s`, for engines that answer
    from other processes, the clock does not jump before so much real time has passed in silence.
    """
    loop = _ChaosLoop(patience_s)
    chaos = Chaos(loop, engine, Random(seed), terms, only)
    loop.office = chaos.office
    try:
        loop.run_until_complete(chaos.run(faults))
    except AssertionError as error:
        told = "\n  ".join(chaos.story)
        raise AssertionError(f"seed {seed}: {error}\nbefore, newest last:\n  {told}") from error
    finally:
        _close(loop)
    return chaos.counts


class _ChaosLoop(JumpingLoop):
    """A loop on which suppliers find the simulated coordinator, and tasks have an owner."""

    office: Office

    def __init__(self, patience_s: float) -> None:
        super().__init__(patience_s)
        self.owned: dict[int, list[asyncio.Task[Any]]] = {}
        self.set_task_factory(self._new_task)  # type: ignore[arg-type]

    def _new_task(self, loop: JumpingLoop, coro: Any, **more: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **more)
        tasks = self.owned.setdefault(_life.get(), [])
        tasks.append(task)
        if len(tasks) > 1000:
            self.owned[_life.get()] = [one for one in tasks if not one.done()]
        return task

    async def create_connection(  # type: ignore[override]
        self, factory: Any, host: Any = None, port: Any = None, **more: Any
    ) -> Any:
        if host == HERE.host:
            return await self.office.connect(factory)
        return await super().create_connection(factory, host, port, **more)


def _close(loop: JumpingLoop) -> None:
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


class _Watched:
    """A platform's client whose calls are seen by the harness."""

    def __init__(self, inner: Platform, chaos: Chaos) -> None:
        self._inner, self._chaos = inner, chaos

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def together(self) -> bool:
        return self._inner.together

    async def list(self) -> Sequence[Sighting]:
        self._chaos.look_at_names()
        return await self._inner.list()

    async def ask(self, wishes: Sequence[NodeWish], avoid: Sequence[Cordon]) -> None:
        for wish in wishes:
            self._chaos.tell(f"ask {wish.id}")
        try:
            await self._inner.ask(wishes, avoid)
        finally:
            self._chaos.look_at_names()

    async def release(self, requests: Sequence[RequestId]) -> None:
        for request in requests:
            self._chaos.tell(f"release {request}")
            stub = self._chaos.office.nodes.get(request)
            if stub is not None:
                stub.told_to_leave()
        await self._inner.release(requests)
        self._chaos.look_at_names()

    async def changed(self) -> None:
        await self._inner.changed()


class Chaos:
    """One run: an engine, a job that it supplies, and what befalls them."""

    def __init__(
        self,
        loop: _ChaosLoop,
        engine: Engine,
        rng: Random,
        terms: Terms,
        only: Sequence[str] | None,
    ) -> None:
        self._loop, self._engine, self._rng = loop, engine, rng
        self.office = Office(loop, rng, terms)
        self.counts: Counter[str] = Counter()
        self.story: deque[str] = deque(maxlen=60)
        self._lives = 0
        self._supplier: asyncio.Task[None] | None = None
        self._joins_late = False
        self._found = ""
        """What is wrong with the names that exist."""
        self._were: set[RequestId] = set()
        """Names that existed when they were last looked at."""
        self._gone: set[RequestId] = set()
        """Names that existed, of which the coordinator knew, and that do not exist any more."""
        own: dict[str, Callable[[Random], None]] = {
            "supplier": self._kill_supplier,
            "stream": lambda _: self.office.cut_streams(),
            "coordinator": lambda rng: self.office.restart(rng.choice((0.0, 0.2, 5.0))),
            "doubled": self._double,
            "silence": self._silence,
            "scale": self._scale,
            "late": self._be_late,
            "calm": lambda _: None,
        }
        both = own.keys() & engine.faults.keys()
        assert not both, f"faults that all engines have are named {sorted(own)}"
        everything = {**own, **engine.faults}
        self._faults = {name: everything[name] for name in only or everything}

    async def run(self, faults: int) -> None:
        self._start_supplier()
        await self._heal("the first nodes")
        for _ in range(faults):
            names = [self._strike()]
            while self._rng.random() < 0.25:
                await asyncio.sleep(self._rng.choice((0.0, 0.01, 0.5, 3.0)))
                names.append(self._strike())
            await asyncio.sleep(self._rng.choice((0.0, 0.1, 2.0)))
            await self._heal(" and ".join(names))
        await self._end()

    def tell(self, what: str) -> None:
        self.story.append(f"{self._loop.time():9.2f}  {what}")

    # ---- faults ----

    def _strike(self) -> str:
        name = self._rng.choice(list(self._faults))
        self.tell(f"fault: {name}")
        self.counts[name] += 1
        self._faults[name](self._rng)
        self.look_at_names()
        return name

    def _start_supplier(self) -> None:
        self._lives += 1
        context = copy_context()
        context.run(_life.set, self._lives)
        self._supplier = context.run(self._loop.create_task, self._supply())

    async def _supply(self) -> None:
        await Supplier(_Watched(self._engine.open(), self), lambda: HERE).run()

    def _kill_supplier(self, rng: Random) -> None:
        """End all code of the supplier, wherever it stands, and start another a little later."""
        if self._supplier is None:
            return
        self._supplier = None
        for task in self._loop.owned.pop(self._lives, []):
            task.cancel()
        self.office.later(rng.choice((0.0, 0.1, 3.0)), self._start_supplier)

    def _double(self, rng: Random) -> None:
        self.office.doubles = True
        self._kill_supplier(rng)

    def _silence(self, rng: Random) -> None:
        alive = [one for one in self.office.nodes.values() if not one.dead]
        for stub in rng.sample(alive, min(len(alive), rng.choice((1, 1, 2)))):
            self.tell(f"the agent of {stub.request} dies")
            stub.die(rng.uniform(0.0, 5.0))

    def _scale(self, rng: Random) -> None:
        self._ask_scale(rng.randrange(3, MOST_NODES + 1), rng.randrange(0, 3))

    def _ask_scale(self, most: int, spares: int) -> None:
        self.tell(f"{most} nodes and {spares} spares are wanted")
        now = self.office.now()
        self.office.post(ScaleAsked(at=now, min_nodes=1, max_nodes=most, spares=spares))

    def _be_late(self, rng: Random) -> None:
        self._joins_late = True

    # ---- nodes ----

    def _populate(self) -> None:
        """Have nodes that exist join, and the agents of those that do not die."""
        there = self._engine.nodes()
        for request in dict.fromkeys(there):
            if request not in self.office.nodes:
                self._boot(request)
        for request, stub in list(self.office.nodes.items()):
            if request not in there:
                stub.die(self._rng.uniform(0.0, 3.0))
                del self.office.nodes[request]

    def _boot(self, request: RequestId) -> None:
        stub = NodeStub(self.office, request, f"host-{request}")
        self.office.nodes[request] = stub
        slow_s = 60.0 if self._joins_late else 2.0
        self.office.later(self._rng.uniform(0.0, slow_s), self._join, stub)

    def _join(self, stub: NodeStub) -> None:
        if not stub.dead and stub.request in self._engine.nodes():
            stub.join()

    # ---- what must hold ----

    def look_at_names(self) -> None:
        """Note what is there twice, now or one after the other, and what nobody asked for."""
        there = Counter(self._engine.nodes())
        wrong = {
            "exist twice": {name for name, count in there.items() if count > 1},
            "exist, and nobody asked for them": there.keys() - self.office.asked,
            "were made again after they were gone": there.keys() & self._gone,
        }
        for what, names in wrong.items():
            if names and not self._found:
                self._found = f"nodes {sorted(names)} {what}"
                self.tell(self._found)
        self._gone |= (self._were - there.keys()) & self.office.seen
        self._were = set(there)

    async def _heal(self, after: str) -> None:
        """Wait until all is as it should be, and stays so."""
        quiet, deadline = 0, self._loop.time() + HEALS_WITHIN_S
        plans = -1
        while quiet < QUIET_LOOKS:
            await asyncio.sleep(LOOK_EVERY_S)
            self._check_supplier()
            self._engine.settle()
            self.look_at_names()
            self._populate()
            self._look_at_what_was_given_up()
            wrong = self._wrong()
            calm = not wrong and self.office.plans == plans
            plans = self.office.plans
            quiet = quiet + 1 if calm else 0
            late = self._loop.time() > deadline
            assert not late, f"after {after}: {wrong or 'plans are made without end'}"
        self._joins_late = self.office.doubles = False

    def _check_supplier(self) -> None:
        assert not self._found, self._found
        result = self.office.job.result
        assert result is None, f"the job ended: {result.reason}"
        if self._supplier is not None and self._supplier.done():
            self._supplier.result()
            raise AssertionError("the supplier ended before the job")

    def _look_at_what_was_given_up(self) -> None:
        """Have somebody look at positions that are not asked for again."""
        supply = self.office.job.supply
        if supply.given_up and self.office.up:
            self._ask_scale(self.office.job.terms.max_nodes, self.office.job.terms.spares)

    def _wrong(self) -> str:
        """Say what is not as it should be; nothing if all is."""
        supply = self.office.job.supply
        if not self.office.up or not supply.connected:
            return "the supplier is not connected"
        wanted = {p.request for p in supply.positions.values() if p.stands}
        there = set(self._engine.nodes())
        if there - wanted:
            return f"nodes {sorted(there - wanted)} exist, and nobody wants them"
        if wanted - there:
            return f"nodes {sorted(wanted - there)} are wanted, and do not exist"
        number = supply.wanted(self.office.job)
        if len(wanted) != number:
            return f"{len(wanted)} requests stand, {number} nodes are wanted"
        absent = [p.request for p in supply.positions.values() if p.stands and not p.node]
        return f"the nodes of {absent} are not in the job" if absent else ""

    async def _end(self) -> None:
        """End the job: nodes leave, the supplier carries out the last plan, and nothing is left."""
        self.tell("the job is told to end")
        stop = JobStopAsked(at=self.office.now(), reason="enough", code=EXIT_TRY_AGAIN)
        self.office.post(stop)
        deadline = self._loop.time() + HEALS_WITHIN_S
        while self._supplier is None or not self._supplier.done() or self._engine.nodes():
            assert self._loop.time() < deadline, (
                f"the job ended; nodes {list(self._engine.nodes())} are left,"
                f" the supplier {'ended' if self._supplier and self._supplier.done() else 'goes on'}"
            )
            await asyncio.sleep(LOOK_EVERY_S)
            self._engine.settle()
            self._populate()
        self._supplier.result()
