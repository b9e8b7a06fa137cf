"""Reads torch's flight recorder: which collectives a rank has entered.

Torch keeps the last operations of its process groups in a ring in memory. A worker's heartbeat
thread dumps it as JSON (the main thread is the one that hangs), and the agent reads the dump
without torch. There are two recorders in a process, one for NCCL (torch 2.5) and one for every
backend (torch 2.8); both are asked. Recording costs 2 µs an operation (3 µs under a deep stack) and
3 MB; torch 2.11 and later record by default, for gloo too, and `turn_on` has
older versions record as well.

Backends differ: gloo never notes a start or an end and only marks a finished operation as retired,
while NCCL also retires one that timed out, so that there only the state counts. Gloo does not record
the members of a group, so the worker adds them to the dump, and it records no send and no recv: of
those the worker tells how many it has called, and the one that its training thread waits for. Group
names come back when a script destroys its groups and creates them again, so the worker also counts
these worlds, and tells which groups live and have been used.

A recorder holds thousands of operations and a verdict needs few: the newest of each group, which
shows who is behind, and the oldest unfinished one, which holds the group up.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from holdfast.core.collectives import is_pair
from holdfast.diagnosis.frames import place_of
from holdfast.errors import BadFrame
from holdfast.messages.evidence import (
    ANY_PEER,
    MAX_COLLECTIVES,
    MAX_PAIRS,
    Collective,
    CollectiveState,
    PairCount,
)

ENTRIES = 2000
"""Operations in the ring: torch's own default."""
MAX_PLACE_CHARS = 120
MAX_DUMP_BYTES = 16 << 20
WORLD = "0"
"""The name of the group of all ranks."""

_WORLD_MARK = ", world "
_MAGIC = b"holdfast flight 1\n"
_C10D = "torch._C._distributed_c10d"
_DUMP_FUNCTIONS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_MAX_SIZES_CHARS = 80
_DISTRIBUTED = "/torch/distributed/distributed_c10d.py"
_LEADS_TO_WAIT = re.compile(
    r"/torch/distributed/(distributed_c10d|c10d_logger)\.py$|/holdfast/worker/torch_hooks/waits\.py$"
    r"|/torch/(_ops|_compile)\.py$"
)
"""Python code between torch's function and the wait within it."""
_OUR_WAIT = "/holdfast/worker/torch_hooks/waits.py"
_MAX_DEPTH = 8
_CALLS = frozenset(
    {
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "gather",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "send",
    }
)
"""Torch's functions that wait for the operation that they have just recorded."""
_UNNAMED = {"", "undefined", "default_pg"}

T = TypeVar("T")
Series = tuple[str, str, bool]
"""What is numbered together: a group's collectives, or its point-to-point calls, on one backend."""
Count = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=4096)]


class RecordedOperation(Struct):
    """One operation, as torch recorded it."""

    profiling_name: Text
    process_group: tuple[Text, Text]
    state: Text = "scheduled"
    retired: bool = False
    collective_seq_id: Count = -1
    p2p_seq_id: Count = -1
    op_id: Count = -1
    record_id: Count = -1
    pg_id: Count = -1
    time_created_ns: Count = -1
    timeout_ms: Count = -1
    is_p2p: bool = False
    input_sizes: list[list[int]] = []
    input_dtypes: list[Text] = []

    @property
    def group(self) -> str:
        return self.process_group[0]

    @property
    def series(self) -> Series:
        return self.group, self.profiling_name.partition(":")[0], self.is_p2p

    @property
    def number(self) -> int:
        use_p2p = self.is_p2p and self.p2p_seq_id >= 0
        return self.p2p_seq_id if use_p2p else self.collective_seq_id

    @property
    def outcome(self) -> CollectiveState:
        by_gloo = self.profiling_name.startswith("gloo:")
        if self.state == "completed" or (by_gloo and self.retired):
            return "completed"
        return "started" if self.state == "started" else "scheduled"

    @property
    def op(self) -> str:
        """The recorded name; a point-to-point operation always says so."""
        backend, colon, op = self.profiling_name.rpartition(":")
        named = op.startswith(("send", "recv")) or not self.is_p2p
        return f"{backend}{colon}{op}" if named else f"{backend}{colon}p2p {op}"

    @property
    def sizes(self) -> str:
        kinds = [*self.input_dtypes, *[""] * len(self.input_sizes)]
        pairs = zip(kinds, self.input_sizes[:16], strict=False)
        text = ", ".join(f"{kind}{size}" for kind, size in pairs)
        return text if len(text) <= _MAX_SIZES_CHARS else text[: _MAX_SIZES_CHARS - 3] + "..."


class FlightTrace(Struct):
    """One recorder's dump."""

    entries: Annotated[list[RecordedOperation], Meta(max_length=100_000)] = []


class LivingGroup(Struct):
    """A process group that exists."""

    ranks: tuple[int, ...] = ()
    used: bool = True
    """Whether it has had an operation; assumed if unknown."""


class CountedPair(Struct):
    """A rank's sends to and receives from one member of a group, that no recorder notes."""

    process_group: tuple[Text, Text]
    """Name and description."""
    peer: Annotated[int, Meta(ge=ANY_PEER, le=1 << 30)]
    """Its rank in the job."""
    sends: Count = 0
    receives: Count = 0


class FlightDump(Struct):
    """What a worker writes: each recorder's dump as it is, and what the recorders do not know."""

    groups: dict[str, LivingGroup] | None = None
    """None if unknown."""
    world: Annotated[int, Meta(ge=1, le=1 << 30)] = 1
    """How often the script has created its groups, the last time included."""
    traces: list[msgspec.Raw] = []
    at_ns: int = 0
    """When it was written, by the clock that the recorders use."""
    since_ns: int = 0
    """Operations before this belong to an earlier entry into the script's function."""
    call: str = ""
    """The function of torch's that the training thread waited in all the while; empty if none."""
    pair: RecordedOperation | None = None
    """The send or recv that it waited for, if the backend does not record these: what it would have
    recorded, under the number of the call to that peer, or 0."""
    pairs: Annotated[list[CountedPair], Meta(max_length=2 * MAX_PAIRS)] | None = None
    """All calls of these in this world; None if unknown."""
    place: Text = ""
    """Line of the user's code that the training thread was at."""
    missing: str = ""
    """Why there is no recorder."""


@dataclass(frozen=True)
class Recorded:
    """What an agent reads from a dump."""

    collectives: tuple[Collective, ...]
    """Newest first."""
    blocked: bool = False
    """Whether the training thread waited in a call of one of them."""
    pairs: tuple[PairCount, ...] | None = None
    """The sends and receives that no recorder notes; None if unknown."""
    evicted: bool = False
    """Whether older ones were dropped from the ring."""
    world: int = 1
    """How often the script has created its groups."""
    place: str = ""
    """Line of the user's code that the training thread was at."""


class UnrecordedCalls(Protocol):
    """What a worker knows of the sends and receives that no recorder notes."""

    def counted(self) -> list[CountedPair] | None: ...

    def awaited(self, work: object) -> RecordedOperation | None: ...


# ---- in a worker ----


def turn_on(torch: ModuleType) -> None:
    """Turn the recorder on where it is off by default, before the first process group is created."""
    os.environ.update(settings(torch.__version__, os.environ))


def settings(torch_version: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that turns the recorder on, if the user has not set it.

    Before torch 2.8 it has another name, of which later versions warn.
    """
    old, new = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"
    numbers = [int(word) for word in torch_version.split(".")[:2] if word.isdecimal()]
    if old in environment or new in environment or not numbers or numbers >= [2, 11]:
        return {}
    return {new if numbers >= [2, 8] else old: str(ENTRIES)}


def count_worlds(c10d: ModuleType) -> None:
    """Count how often the script creates the group of all ranks, before it creates the first."""
    real = c10d.__dict__["_update_default_pg"]

    @functools.wraps(real)
    def update(group: Any) -> None:
        real(group)
        vars(update)["worlds"] += group is not None

    vars(update)["worlds"] = 0
    c10d.__dict__["_update_default_pg"] = update


def begin_again(c10d: ModuleType | None) -> None:
    """Forget the worlds that were created so far: the script's function is entered again, and other
    ranks may do so in fresh processes."""
    update = getattr(c10d, "_update_default_pg", None)
    if hasattr(update, "worlds"):
        vars(update)["worlds"] = 0
        vars(update)["since_ns"] = time.time_ns()


def _since_ns() -> int:
    """Return when the script began to create its groups anew; 0 if it did not."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    since_ns: int = getattr(getattr(c10d, "_update_default_pg", None), "since_ns", 0)
    return since_ns


def world() -> int:
    """Return how often the script has created its groups, or 1."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return max(1, getattr(getattr(c10d, "_update_default_pg", None), "worlds", 1))


def dump(
    trainer: int = 0,
    rank_and_size: tuple[int, int] | None = None,
    calls: UnrecordedCalls | None = None,
    failed_at: str = "",
) -> bytes:
    """Dump the recorders of this process, from any thread; or say why there are none.

    `trainer` is the identifier of the training thread. A script may give its processes ranks of its
    own; then its groups cannot be compared with those of other ranks, and nothing is dumped.
    """
    functions = _dump_functions()
    if "torch" not in sys.modules:
        found = FlightDump(at_ns=time.time_ns())
    elif not functions:
        version = getattr(sys.modules["torch"], "__version__", "of this version")
        found = FlightDump(missing=f"torch {version} has none in this build")
    elif rank_and_size not in (None, _own_numbers()) and _own_numbers() is not None:
        found = FlightDump(missing="the script gave its processes ranks of its own")
    else:
        found = _dump_of(functions, trainer, calls)
    found.place = failed_at or place_of(sys._current_frames().get(trainer))[:MAX_PLACE_CHARS]
    return _MAGIC + zlib.compress(msgspec.json.encode(found), level=1)


def _dump_of(
    functions: list[Callable[[], bytes | str]], trainer: int, calls: UnrecordedCalls | None
) -> FlightDump:
    """Dump the recorders, and what the training thread waited for from before to after."""
    before = _wait_of(trainer)
    answers = [dump_json() for dump_json in functions]
    traces = [one.encode() if isinstance(one, str) else one for one in answers]
    pairs = calls.counted() if calls is not None else None
    groups, at_ns = _groups(), time.time_ns()
    found = FlightDump(
        groups=groups,
        traces=[msgspec.Raw(trace) for trace in traces],
        pairs=pairs,
        at_ns=at_ns,
        world=world(),
        since_ns=_since_ns(),
    )
    if before is not None and _is_same(before, _wait_of(trainer)):
        found.call = before.call
        if calls is not None and (pair := calls.awaited(before.work)) is not None:
            pair.time_created_ns = before.since_ns
            found.pair = pair
    return found


@dataclass(frozen=True)
class _Wait:
    """A thread's wait in a call of a function of torch's, or for an operation called before."""

    frame: FrameType
    instruction: int
    """How far it has come."""
    call: str
    """Torch's function; empty if the script itself waits."""
    work: object
    """What it waits for without a timeout of its own; None if unknown."""
    since_ns: int
    """When it began; 0 if unknown."""


def _wait_of(thread: int) -> _Wait | None:
    """Return what a thread waits for; None if it is anywhere else."""
    inner = sys._current_frames().get(thread)
    if inner is None:
        return None
    local = inner.f_locals if _is_ours(inner) else {}
    began, args = local.get("began"), local.get("args", ())
    since_ns = time.time_ns() - int((time.monotonic() - began) * 1e9) if began is not None else 0
    work = args[0] if len(args) == 1 and not local["kwargs"] else None
    call = _call_around(inner)
    if call is not None:
        return _Wait(call, call.f_lasti, call.f_code.co_name, work, since_ns)
    return _Wait(inner, inner.f_lasti, "", work, since_ns) if work is not None else None


def _call_around(inner: FrameType | None) -> FrameType | None:
    """Return the call of a function of torch's that waits at this frame."""
    for _ in range(_MAX_DEPTH):
        if inner is None or not _LEADS_TO_WAIT.search(inner.f_code.co_filename):
            return None
        if inner.f_code.co_filename.endswith(_DISTRIBUTED):
            return inner if inner.f_code.co_name in _CALLS else None
        inner = inner.f_back
    return None


def _is_ours(frame: FrameType) -> bool:
    """Return whether this frame is the wait that Holdfast measures, which knows when it began."""
    code = frame.f_code
    return code.co_name == "wait" and code.co_filename.endswith(_OUR_WAIT)


def _is_same(before: _Wait, after: _Wait | None) -> bool:
    return (
        after is not None
        and before.frame is after.frame
        and before.instruction == after.instruction
        and before.work is after.work
    )


def _own_numbers() -> tuple[int, int] | None:
    """Return the rank and size that the script gave torch; None if there is no process group."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(getattr(c10d, "group", None), "WORLD", None)
    return (world.rank(), world.size()) if world is not None else None


def _dump_functions() -> list[Callable[[], bytes | str]]:
    c10d = sys.modules.get(_C10D)
    return [getattr(c10d, name) for name in _DUMP_FUNCTIONS if hasattr(c10d, name)]


def _groups() -> dict[str, LivingGroup] | None:
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    names, ranks = getattr(world, "pg_names", None), getattr(world, "pg_group_ranks", None)
    if names is None or ranks is None:
        return None
    return {
        str(name): LivingGroup(tuple(ranks.get(group) or ()), _is_used(group))
        for group, name in list(names.items())
    }


def _is_used(group: Any) -> bool:
    try:
        return bool(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):  # Not every backend counts.
        return True


# ---- in an agent ----


def read(data: bytes) -> Recorded:
    """Return the operations of a dump that matter."""
    if len(data) > MAX_DUMP_BYTES or not data.startswith(_MAGIC):
        raise BadFrame(f"not a flight recorder dump: {len(data)} bytes")
    found = _decode(_decompress(data[len(_MAGIC) :]), FlightDump)
    if found.missing:
        raise BadFrame(found.missing)
    traces = [_decode(bytes(each), FlightTrace) for each in found.traces]
    # The two recorders of a process may share operations, which then have the same numbers.
    seen = {
        (one.group, one.pg_id, one.number, one.op_id, one.record_id, one.op): one
        for trace in traces
        for one in trace.entries
        if not found.since_ns or one.time_created_ns >= found.since_ns
    }
    living = found.groups or {}
    if not seen and found.pair is None and any(group.used for group in living.values()):
        raise BadFrame("it has recorded nothing of the process groups that are in use")
    by_age = sorted(seen.values(), key=lambda e: (e.time_created_ns, e.record_id), reverse=True)
    if found.pair is not None:
        by_age.insert(0, found.pair)
    collectives = _selected(_of_newest_groups(by_age, living), found)
    evicted = any(_is_cut(trace, found.since_ns) for trace in traces if trace.entries)
    blocked = _is_blocked(found, collectives)
    return Recorded(collectives, blocked, _pairs(found), evicted, found.world, found.place)


def _is_blocked(found: FlightDump, newest_first: tuple[Collective, ...]) -> bool:
    """Return whether the training thread waits for the newest operation. A call that has not recorded
    its operation yet, or whose operation has finished, is no wait; and a receive from any rank is not
    recorded at all."""
    if not newest_first or newest_first[0].state == "completed":
        return False
    if found.pair is not None:
        return True
    return bool(found.call) and is_pair(newest_first[0]) == (found.call in ("send", "recv"))


def _pairs(found: FlightDump) -> tuple[PairCount, ...] | None:
    if found.pairs is None or len(found.pairs) > MAX_PAIRS:
        return None
    return tuple(
        PairCount(
            group=_label(each.process_group, found),
            peer=each.peer,
            sends=each.sends,
            receives=each.receives,
        )
        for each in found.pairs
    )


def _label(process_group: tuple[str, str], dump: FlightDump) -> str:
    """Return a group's name for people, which tells apart the groups of all worlds."""
    name, description = process_group
    world = f"{_WORLD_MARK}{dump.world}" if dump.world > 1 else ""
    return (name if description in _UNNAMED else f"{name} ({description})") + world


def _is_cut(trace: FlightTrace, since_ns: int) -> bool:
    """Return whether a ring has lost operations that matter; torch counts from 0."""
    first = min(trace.entries, key=lambda one: one.record_id)
    return first.record_id != 0 and first.time_created_ns >= since_ns


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"not a flight recorder dump: {error}") from error


def _decompress(data: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    try:
        plain = decompressor.decompress(data, MAX_DUMP_BYTES)
    except zlib.error as error:
        raise BadFrame(f"a flight recorder dump is corrupt: {error}") from error
    if not decompressor.eof:
        raise BadFrame("a flight recorder dump is truncated or unpacks to more than allowed")
    return plain


def _of_newest_groups(
    newest_first: list[RecordedOperation], living: Mapping[str, LivingGroup]
) -> list[RecordedOperation]:
    """Drop the operations of a group whose name another has taken since."""
    return [one for one in _of_last_numbering(newest_first) if _is_of(one, living)]


def _is_of(one: RecordedOperation, living: Mapping[str, LivingGroup]) -> bool:
    """Return whether an operation may be of the group that has its group's name now."""
    return one.is_p2p or one.group not in living or living[one.group].used


def _of_last_numbering(newest_first: list[RecordedOperation]) -> Iterator[RecordedOperation]:
    """Skip what a group of the same name recorded before: the id was another, or numbers restarted."""
    lowest: dict[Series, int] = {}
    ids: dict[Series, int] = {}
    for one in newest_first:
        same = ids.setdefault(one.series, one.pg_id) == one.pg_id
        if not same or one.number > lowest.get(one.series, one.number):
            lowest[one.series] = -2  # Below every number: nothing older is kept.
        else:
            lowest[one.series] = one.number
            yield one


def _selected(newest_first: list[RecordedOperation], dump: FlightDump) -> tuple[Collective, ...]:
    """Return at most MAX_COLLECTIVES: those that decide where a group stands, then the newest."""
    newest: dict[Series, int] = {}
    oldest_open: dict[Series, int] = {}
    for index, one in enumerate(newest_first):
        newest.setdefault(one.series, index)
        if one.outcome != "completed":
            oldest_open[one.series] = index
    by_worth = [*oldest_open.values(), *newest.values(), *range(len(newest_first))]
    chosen = sorted(list(dict.fromkeys(by_worth))[:MAX_COLLECTIVES])
    firsts = set(newest.values())
    return tuple(_collective(newest_first[index], dump, index in firsts) for index in chosen)


def _collective(one: RecordedOperation, dump: FlightDump, tell_ranks: bool) -> Collective:
    name = one.group
    group = (dump.groups or {}).get(name)
    known_age = one.time_created_ns > 0 and dump.at_ns > 0
    destroyed = dump.groups is not None and group is None
    return Collective(
        group=_label(one.process_group, dump),
        number=one.number,
        op=one.op,
        state="completed" if destroyed else one.outcome,  # Destroying its group ended it.
        ranks=group.ranks if group is not None and tell_ranks and name != WORLD else (),
        sizes=one.sizes,
        age_s=max(0.0, (dump.at_ns - one.time_created_ns) / 1e9) if known_age else None,
        timeout_s=one.timeout_ms / 1000 if one.timeout_ms > 0 else None,
    )


def is_world(group: str) -> bool:
    """Return whether a collective's group is the one of all ranks."""
    return group.partition(_WORLD_MARK)[0] == WORLD


def world_of(group: str) -> int:
    """Return in which of the script's worlds a collective's group is."""
    return int(group.rpartition(_WORLD_MARK)[2] if _WORLD_MARK in group else 1)
