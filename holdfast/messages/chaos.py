"""Faults that somebody asked for: what there is to ask for, and what is said about it.

An *injection* is what was asked for: a kind of fault, whom it shall befall, and when. Its
*occurrences* are counted from 1; each becomes a *trap*, which is laid on one rank: it springs when
that rank finishes a certain step, or at once.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NamedTuple, get_args

from msgspec import Meta, Struct

from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

FaultName = Literal[
    "kill",
    "term",
    "stop",
    "cont",
    "hang",
    "gil",
    "loop",
    "segfault",
    "abort",
    "oom",
    "exception",
    "exit",
    "slow",
    "gpu-error",
    "netcut",
    "diskfull",
    "kill-agent",
    "stop-agent",
    "kill-keeper",
    "corrupt-image",
    "kill-coordinator",
]
FAULT_NAMES: Final[tuple[FaultName, ...]] = get_args(FaultName)

Where = Literal["rank", "node", "coordinator"]


class Value(NamedTuple):
    """What the number after a fault means, and which numbers make sense."""

    meaning: str
    default: float
    least: float
    most: float
    whole: bool = False


class About(NamedTuple):
    """What a fault is."""

    befalls: Where
    text: str
    value: Value | None = None


FAULTS: Final[dict[FaultName, About]] = {
    "kill": About("rank", "SIGKILL"),
    "term": About("rank", "SIGTERM"),
    "stop": About("rank", "SIGSTOP: the process is there and does nothing"),
    "cont": About("rank", "SIGCONT, for one that was stopped; only now, not at a step"),
    "hang": About("rank", "the main thread sleeps for ever"),
    "gil": About("rank", "the main thread holds the interpreter's lock for ever, in C"),
    "loop": About("rank", "the main thread runs round an empty loop for ever"),
    "segfault": About("rank", "reads from address 0"),
    "abort": About("rank", "abort()"),
    "oom": About(
        "rank",
        "takes memory until the kernel kills it, in a memory cgroup of its own; where there can be"
        " none this is refused, unless --force: then the whole machine runs out of memory",
        Value("MiB that it may take", 256, 16, 1 << 20),
    ),
    "exception": About("rank", "raises InjectedFault, a RuntimeError, in the main thread"),
    "exit": About("rank", "sys.exit(V)", Value("exit code", 1, 0, 255, whole=True)),
    "slow": About(
        "rank",
        "each step takes V times as long from now on; 1 ends it",
        Value("times as long", 2, 1, 1000),
    ),
    "gpu-error": About("rank", "a CUDA kernel writes where it must not; refused without CUDA"),
    "netcut": About(
        "node",
        "for V seconds the agent neither hears nor says anything to the coordinator, and what"
        " other nodes send to its ranks and its keeper on open connections is dropped; no"
        " connection is closed",
        Value("seconds", 10, 0.1, 3600),
    ),
    "diskfull": About(
        "node",
        "the next V files of checkpoints cannot be written: no space left",
        Value("files", 1, 1, 1_000_000, whole=True),
    ),
    "kill-agent": About("node", "SIGKILL for the node's agent; its ranks die with it"),
    "stop-agent": About(
        "node",
        "SIGSTOP for the node's agent, and SIGCONT V seconds later; with 0 never, and its launcher"
        " ends one that stays stopped for 15 s",
        Value("seconds", 10, 0, 3600),
    ),
    "kill-keeper": About("node", "SIGKILL for the node's keeper"),
    "corrupt-image": About("rank", "flips a bit in the rank's newest image in memory"),
    "kill-coordinator": About(
        "coordinator",
        "SIGKILL for the job's coordinator; its launcher starts it again, but one that runs alone"
        " (`holdfast coordinator`) is for whoever started it to start again",
    ),
}

IN_MAIN_THREAD: Final[frozenset[FaultName]] = frozenset(
    {
        *("hang", "gil", "loop", "segfault", "abort", "oom", "exception", "exit", "slow"),
        "gpu-error",
    }
)
"""These happen only where a rank's main thread comes by: at the end of a step."""
BY_AGENT: Final[frozenset[FaultName]] = frozenset(
    name for name, about in FAULTS.items() if about.befalls == "node"
) | {"corrupt-image", "kill-coordinator"}
"""These are nothing that a rank does to itself: when it comes to the step, its agent is told."""

MOST_AT_ONCE: Final = 16
"""Injections in one schedule."""

Number = Annotated[int, Meta(ge=1, le=1 << 53)]


class Injection(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What somebody asked for."""

    kind: FaultName
    ranks: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 30)], ...], Meta(max_length=64)] = ()
    """Each of these; with none, any one: the seed says which."""
    node: Annotated[str, Meta(max_length=300)] = ""
    """Its place in the round (0 is the first), its name or its host's; empty: any."""
    at_step: Number | None = None
    """When the rank has finished that step."""
    every: Number | None = None
    """Once in so many steps: in the last of them, or in one that the seed picks, if there is one."""
    seed: Annotated[int, Meta(ge=0, le=1 << 53)] | None = None
    value: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None
    force: bool = False
    """Although the machine may suffer."""

    @property
    def now(self) -> bool:
        return self.at_step is None and self.every is None

    @property
    def amount(self) -> float:
        """The number after it, said or not."""
        value = FAULTS[self.kind].value
        return float(self.value if self.value is not None else value.default if value else 0)


def complaint(injection: Injection) -> str:
    """Why this cannot be meant; empty when it can."""
    kind, about = injection.kind, FAULTS[injection.kind]
    if injection.at_step is not None and injection.every is not None:
        return "a step or a number of steps between two, not both"
    if kind == "cont" and not injection.now:
        return "cont: a rank that is stopped comes to no step; leave the step out"
    if injection.node and injection.ranks:
        return "a rank or a node, not both: each rank is on one node"
    if about.befalls == "coordinator" and (injection.node or injection.ranks):
        return f"{kind}: there is one coordinator; leave rank and node out"
    if len(set(injection.ranks)) < len(injection.ranks):
        return "the same rank twice"
    return _complaint_of_value(injection)


def _complaint_of_value(injection: Injection) -> str:
    kind, value, given = injection.kind, FAULTS[injection.kind].value, injection.value
    if given is None:
        return ""
    if value is None:
        return f"{kind} takes no value"
    if not value.least <= given <= value.most or (value.whole and given != int(given)):
        whole = "a whole number" if value.whole else "a number"
        return f"{kind}: {whole} from {value.least:g} to {value.most:g} is needed ({value.meaning})"
    return ""


def sentence(injection: Injection) -> str:
    """What was asked for, in words."""
    words: list[str] = [injection.kind]
    if injection.value is not None:
        words.append(f"({injection.value:g})")
    if injection.ranks:
        words.append(f"on rank {', '.join(map(str, injection.ranks))}")
    elif injection.node:
        words.append(f"on node {injection.node}")
    elif FAULTS[injection.kind].befalls != "coordinator":
        words.append(f"on any {FAULTS[injection.kind].befalls}")
    if injection.at_step is not None:
        words.append(f"at step {injection.at_step}")
    elif injection.every is not None:
        words.append(f"once in {injection.every} steps")
    else:
        words.append("now")
    if injection.seed is not None:
        words.append(f"(seed {injection.seed})")
    return " ".join(words)


class Trap(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One occurrence, laid on one rank."""

    injection: Number
    """The injection's number in its job."""
    occurrence: Number
    kind: FaultName
    node: NodeId
    rank: Rank
    """Whom it befalls; for what befalls a node, the rank whose steps are counted."""
    step: StepNumber = StepNumber(0)
    """0: now, or where it must be the main thread, at the end of its current step."""
    value: float = 0.0
    spot: int = 0
    """A number from the seed, for what has to be picked where it happens."""
    force: bool = False


Outcome = Literal["armed", "done", "missed", "refused"]
"""The trap is laid; it was sprung; it was sprung and there was nothing to befall; it cannot be laid."""


class Done(Struct, frozen=True, kw_only=True):
    """A fault that was injected."""

    injection: int
    occurrence: int
    kind: FaultName
    node: NodeId
    rank: Rank
    round: RoundNumber
    step: StepNumber
    at: Time
    known_at: Time
    """When that was written down."""
