"""Defines the faults that can be injected, and the records in which they are requested and reported.

An *injection* is a request: a kind of fault, what it strikes, and when. Its *occurrences* are counted
from 1; each becomes a *trap* for one rank, which springs when that rank finishes a given step, or at
once. `FAULTS` is the only list of faults: parser, help, checks and marks on incidents derive from it.
"""

from __future__ import annotations

import signal
from typing import Annotated, Final, Literal, NamedTuple

from msgspec import Meta, Struct

from holdfast.messages.units import Float, Int64, NodeId, Rank, StepNumber, Word

Strikes = Literal["rank", "node", "coordinator"]
Actor = Literal["worker", "agent"]


class FaultValue(NamedTuple):
    """The number that a fault takes, and its range."""

    meaning: str
    default: float
    least: float
    most: float
    whole: bool = False


class FaultType(NamedTuple):
    """One fault that can be injected."""

    strikes: Strikes
    help: str
    causes: tuple[str, ...] = ()
    """Kinds of the incidents that it may lead to."""
    value: FaultValue | None = None
    actor: Actor = "worker"
    """Who carries it out at a step: the rank's main thread, or its agent once the rank is there."""
    signal: int = 0
    """Signal that carries it out; without a step, the agent sends it at once."""

    @property
    def needs_main_thread(self) -> bool:
        """Whether it happens only at the end of a step, even if it is requested for now."""
        return self.actor == "worker" and not self.signal

    @property
    def described(self) -> str:
        value = self.value
        return self.help + (f" (V: {value.meaning}, default {value.default:g})" if value else "")


_DEATH = ("signal", "oom", "exit", "exception")
_HANG = ("hang",)

FAULTS: Final[dict[str, FaultType]] = {
    "kill": FaultType("rank", "SIGKILL", _DEATH, signal=signal.SIGKILL),
    "term": FaultType("rank", "SIGTERM", _DEATH, signal=signal.SIGTERM),
    "stop": FaultType("rank", "SIGSTOP: the process exists but makes no progress", _HANG,
        signal=signal.SIGSTOP),
    "cont": FaultType("rank", "SIGCONT, for a stopped rank; only now, not at a step",
        signal=signal.SIGCONT),
    "hang": FaultType("rank", "the main thread sleeps forever", _HANG),
    "gil": FaultType("rank", "the main thread holds the GIL forever, in C", _HANG),
    "loop": FaultType("rank", "the main thread runs an empty loop forever", _HANG),
    "segfault": FaultType("rank", "reads from address 0", _DEATH),
    "abort": FaultType("rank", "abort()", _DEATH),
    "oom": FaultType("rank", "allocates memory until the kernel kills it, in a memory cgroup of its"
        " own; refused where none can be created, unless --force: then the whole machine runs out of"
        " memory", _DEATH, FaultValue("limit in MiB", 256, 16, 1 << 20)),
    "exception": FaultType("rank", "raises InjectedFault, a RuntimeError, in the main thread",
        _DEATH),
    "exit": FaultType("rank", "sys.exit(V)", _DEATH, FaultValue("exit code", 1, 0, 255, whole=True)),
    "slow": FaultType("rank", "each step takes V times as long from now on; 1 ends it",
        ("hang", "straggler", "exclude"), FaultValue("factor", 2, 1, 1000)),
    "gpu-error": FaultType("rank", "a CUDA kernel writes to an illegal address; refused without CUDA",
        (*_DEATH, "hang")),
    "netcut": FaultType("node", "for V seconds the agent neither receives from the coordinator nor"
        " sends to it, and packets from other nodes to open connections of its ranks and keeper are"
        " dropped; no connection is closed", ("node", "hang"),
        FaultValue("seconds", 10, 0.1, 3600), "agent"),
    "diskfull": FaultType("node", "the next V checkpoint files cannot be written: no space left",
        ("storage",), FaultValue("files", 1, 1, 1_000_000, whole=True), "agent"),
    "kill-agent": FaultType("node", "SIGKILL for the node's agent; its ranks die with it", ("node",),
        actor="agent"),
    "stop-agent": FaultType("node", "SIGSTOP for the node's agent, and SIGCONT V seconds later; with 0"
        " never, and its launcher kills an agent that stays stopped for 15 s", ("node",),
        FaultValue("seconds", 10, 0, 3600), "agent"),
    "kill-keeper": FaultType("node", "SIGKILL for the node's keeper", ("storage",), actor="agent"),
    "corrupt-image": FaultType("rank", "flips a bit in the rank's newest image in memory",
        actor="agent"),
    "kill-coordinator": FaultType("coordinator", "SIGKILL for the job's coordinator; its launcher"
        " restarts it, but one that runs alone (`holdfast coordinator`) must be restarted by the user",
        actor="agent"),
}  # fmt: skip
FAULT_NAMES: Final = tuple(FAULTS)

MAX_SCHEDULED: Final = 16
"""Injections in one schedule."""

MAX_RANKS: Final = 64
"""Ranks of one injection."""

Number = Annotated[int, Meta(ge=1, le=1 << 53)]
RankNumber = Annotated[int, Meta(ge=0, le=1 << 30)]


class Injection(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request for a fault."""

    kind: Word
    ranks: Annotated[tuple[RankNumber, ...], Meta(max_length=MAX_RANKS)] = ()
    """Each of these ranks; if empty, one rank that the seed selects."""
    node: Annotated[str, Meta(max_length=300)] = ""
    """Index in the round (0 is the first), name or host name; if empty, any node."""
    at_step: Number | None = None
    """Strike when the rank has finished this step."""
    every: Number | None = None
    """Strike once in this many steps: in the last of them, or in one that the seed selects."""
    seed: Annotated[int, Meta(ge=0, le=1 << 53)] | None = None
    value: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None
    force: bool = False
    """Accept harm to the whole machine."""

    @property
    def now(self) -> bool:
        return self.at_step is None and self.every is None

    @property
    def amount(self) -> float:
        """The value, or its default."""
        value = FAULTS[self.kind].value
        return float(self.value if self.value is not None else value.default if value else 0)


def complaint(injection: Injection) -> str:
    """Return why an injection makes no sense; empty if it does."""
    kind, given, fault = injection.kind, injection.value, FAULTS.get(injection.kind)
    if fault is None:
        return f"no fault is called {kind}"
    if injection.at_step is not None and injection.every is not None:
        return "a step or an interval in steps, not both"
    if kind == "cont" and not injection.now:
        return "cont: a stopped rank comes to no step; leave the step out"
    if injection.node and injection.ranks:
        return "a rank or a node, not both: each rank is on one node"
    if fault.strikes == "coordinator" and (injection.node or injection.ranks):
        return f"{kind}: there is one coordinator; leave rank and node out"
    if len(set(injection.ranks)) < len(injection.ranks):
        return "the same rank twice"
    if given is None:
        return ""
    if fault.value is None:
        return f"{kind} takes no value"
    meaning, _, least, most, whole = fault.value
    if not least <= given <= most or (whole and given != int(given)):
        number = "a whole number" if whole else "a number"
        return f"{kind}: {number} from {least:g} to {most:g} is needed ({meaning})"
    return ""


def sentence(injection: Injection) -> str:
    """Describe an injection in words."""
    strikes = FAULTS[injection.kind].strikes
    value = "" if injection.value is None else f" ({injection.value:g})"
    where = "" if strikes == "coordinator" else f" on any {strikes}"
    if injection.ranks:
        where = f" on rank {', '.join(map(str, injection.ranks))}"
    elif injection.node:
        where = f" on node {injection.node}"
    when = "now" if injection.at_step is None else f"at step {injection.at_step}"
    if injection.every is not None:
        when = f"once in {injection.every} steps"
    seed = "" if injection.seed is None else f" (seed {injection.seed})"
    return f"{injection.kind}{value}{where} {when}{seed}"


class Trap(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One occurrence of an injection, assigned to one rank."""

    injection: Number
    """Number of the injection in its job."""
    occurrence: Number
    kind: Word
    node: NodeId
    rank: Rank
    """The rank that is struck; for a fault that strikes a node, the rank whose steps count."""
    step: StepNumber = StepNumber(0)
    """0: now, or at the end of the current step if the main thread must do it."""
    value: Float = 0.0
    spot: Int64 = 0
    """Pseudorandom number for choices on the node, such as which bit to flip."""
    force: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.injection, self.occurrence

    @property
    def target(self) -> str:
        """What it strikes, in words."""
        strikes = FAULTS[self.kind].strikes
        rank_or_node = f"rank {self.rank}" if strikes == "rank" else f"node {self.node}"
        return "the coordinator" if strikes == "coordinator" else rank_or_node


class Sprung(Struct, frozen=True, array_like=True):
    """What a worker says of a trap that springs."""

    injection: int
    occurrence: int
    step: StepNumber
    at: float
    """Monotonic clock of the machine."""


Outcome = Literal["armed", "done", "missed", "refused"]
"""The trap is set; it has struck; it sprang but found nothing to strike; it cannot be set."""


class InjectionReport(Struct, frozen=True, kw_only=True):
    """What has become of one injection so far."""

    injection: int
    """The injection's number in its job."""
    fault: str
    """Kind of fault."""
    outcome: Outcome | None
    """What the node reported; null: nothing yet."""
    line: str
    """The injection, and where and when it strikes next, in words."""
    rank: Rank | None = None
    """Rank that it strikes; null when it strikes a node or the coordinator."""
    node: NodeId | None = None
    """Node that it strikes."""
    step: StepNumber | None = None
    """Step after which it strikes; null for at once."""
    missed: bool = False
    """Its rank is past that step, or has finished: it strikes only if training goes back to before
    it."""
    why: str = ""
    """Why it was refused, or strikes nothing as the job is now."""


class FaultsReport(Struct, frozen=True, kw_only=True):
    """The injected faults of a job, as `holdfast status` shows them."""

    pending: list[InjectionReport]
    """Faults that have yet to strike."""
    injected: int
    """Number of faults injected so far."""
    refused: list[InjectionReport]
    """Faults that cannot strike, or did not before the job ended, each with the reason."""
