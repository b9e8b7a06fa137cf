"""Reads torch's flight recorder: which collectives a rank has entered.

Torch keeps the last operations of its process groups in a ring in memory. A worker's heartbeat
thread dumps it as JSON (the main thread is the one that hangs), and the agent reads the dump
without torch. There are two recorders in a process, one for NCCL (torch 2.5) and one for every
backend (torch 2.8); both are asked. Recording costs 2 µs an operation (3 µs under a deep stack) and
3 MB; torch 2.11 and later record by default, for gloo too, and `turn_on` has
older versions record as well.

Backends differ: gloo never notes a start or an end and only marks a finished operation as retired,
while NCCL also retires one that timed out, so that there only the state counts; and gloo does not
record the members of a group, so the worker adds them to the dump.

A recorder holds thousands of operations and a verdict needs few: the newest of each group, which
shows who is behind, and the oldest unfinished one, which holds the group up.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from holdfast.errors import BadFrame
from holdfast.messages.evidence import MAX_COLLECTIVES, Collective, CollectiveState

ENTRIES = 2000
"""Operations in the ring: torch's own default."""
MAX_DUMP_BYTES = 16 << 20
WORLD = "0"
"""The name of the group of all ranks."""

_MAGIC = b"holdfast flight 1\n"
_C10D = "torch._C._distributed_c10d"
_DUMP_FUNCTIONS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_MAX_SIZES_CHARS = 80
_UNNAMED = {"", "undefined", "default_pg"}

T = TypeVar("T")
Members = Mapping[str, tuple[int, ...]]
"""The ranks of each process group, by its name."""
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
    time_created_ns: Count = -1
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


class FlightDump(Struct):
    """What a worker writes: each recorder's dump as it is, and the members of its groups."""

    groups: dict[str, tuple[int, ...]] = {}
    traces: list[msgspec.Raw] = []
    missing: str = ""
    """Why there is no recorder."""


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


def dump() -> bytes:
    """Dump the recorders of this process, from any thread; or say why there are none."""
    functions = _dump_functions()
    if "torch" not in sys.modules:
        found = FlightDump(missing="the script has not imported torch")
    elif not functions:
        version = getattr(sys.modules["torch"], "__version__", "of this version")
        found = FlightDump(missing=f"torch {version} has none in this build")
    else:
        answers = [dump_json() for dump_json in functions]
        traces = [one.encode() if isinstance(one, str) else one for one in answers]
        found = FlightDump(groups=_groups(), traces=[msgspec.Raw(trace) for trace in traces])
    return _MAGIC + zlib.compress(msgspec.json.encode(found), level=1)


def _dump_functions() -> list[Callable[[], bytes | str]]:
    c10d = sys.modules.get(_C10D)
    return [getattr(c10d, name) for name in _DUMP_FUNCTIONS if hasattr(c10d, name)]


def _groups() -> dict[str, tuple[int, ...]]:
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    names = getattr(world, "pg_names", None) or {}
    ranks = getattr(world, "pg_group_ranks", None) or {}
    return {str(name): tuple(ranks.get(group) or ()) for group, name in list(names.items())}


# ---- in an agent ----


def read(data: bytes) -> tuple[Collective, ...]:
    """Return the operations of a dump that matter, newest first."""
    if len(data) > MAX_DUMP_BYTES or not data.startswith(_MAGIC):
        raise BadFrame(f"not a flight recorder dump: {len(data)} bytes")
    found = _decode(_decompress(data[len(_MAGIC) :]), FlightDump)
    if found.missing:
        raise BadFrame(found.missing)
    traces = [_decode(bytes(each), FlightTrace) for each in found.traces]
    # The two recorders of a process may share operations, which then have the same numbers.
    seen = {
        (one.group, one.number, one.op_id, one.record_id, one.op): one
        for trace in traces
        for one in trace.entries
    }
    by_age = sorted(seen.values(), key=lambda e: (e.time_created_ns, e.record_id), reverse=True)
    return _selected(_of_living_groups(by_age), found.groups)


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


def _of_living_groups(newest_first: list[RecordedOperation]) -> list[RecordedOperation]:
    """Drop the operations of a group that was destroyed and created again: its numbers restarted."""
    lowest: dict[Series, int] = {}
    kept = []
    for one in newest_first:
        if one.number > lowest.get(one.series, one.number):
            lowest[one.series] = -2  # Below every number: nothing older is kept.
        else:
            lowest[one.series] = one.number
            kept.append(one)
    return kept


def _selected(newest_first: list[RecordedOperation], members: Members) -> tuple[Collective, ...]:
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
    return tuple(
        _collective(newest_first[index], members if index in firsts else {}) for index in chosen
    )


def _collective(one: RecordedOperation, members: Members) -> Collective:
    name, description = one.process_group
    return Collective(
        group=name if description in _UNNAMED else f"{name} ({description})",
        number=one.number,
        op=one.op,
        state=one.outcome,
        ranks=() if name == WORLD else members.get(name, ()),
        sizes=one.sizes,
    )
