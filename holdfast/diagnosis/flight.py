"""Torch's flight recorder: which collectives a rank has entered.

Torch keeps the last operations of its process groups in a ring in memory. A worker's watcher thread
takes a dump of it (its main thread is the one that hangs), the agent reads it, without torch.

There are two recorders in a process, one for NCCL and one for everything else, and which of them can
be asked, and in which form they answer, depends on torch's version. JSON is taken where there is any;
before torch 2.5 there are only pickles, which are read as plain data or not at all. Dumps that NCCL
writes to files when it times out are pickles too and can be read as well.

Keeping the recorder costs 2 µs an operation (3 µs under a deep stack) and 3 MB; torch 2.11 and later
has it on by default, for gloo too, and `settings` turns it on in the older ones.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from holdfast.diagnosis import plain_pickle
from holdfast.diagnosis.trace import Trace, collectives
from holdfast.errors import BadFrame
from holdfast.messages.evidence import Collective

ENTRIES = 2000
"""Operations in the ring: torch's own default."""
MAX_DUMP_BYTES = 16 << 20

_MAGIC = b"holdfast flight 1\n"
_C10D = "torch._C._distributed_c10d"
_JSON_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_PICKLE_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")

T = TypeVar("T")


class _Dump(msgspec.Struct):
    """What a worker sends: dumps as they are, and who is in which group."""

    groups: dict[str, tuple[int, ...]]
    traces: list[msgspec.Raw] = []
    pickles: list[bytes] = []


# ---- in a worker ----


def settings(torch_version: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to a worker's environment, before it imports torch, so that the recorder is on.

    A user's own setting stays; setting both names would make torch complain of the older one.
    """
    old, new = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"
    if old in environment or new in environment:
        return {}
    words = torch_version.split(".")
    parts = tuple(int(word) if word.isdecimal() else 0 for word in words[:2])
    return {new if parts >= (2, 8) else old: str(ENTRIES)}


def dump() -> bytes:
    """All that the recorder of this process holds; empty when there is none to ask (see `missing`).

    It may be called on any thread but must not be on the main one, which is the one that hangs.
    """
    if missing():
        return b""
    found = _Dump(groups=_groups())
    if traces := [_call(ask) for ask in _asks(_JSON_DUMPS)]:
        found.traces = [msgspec.Raw(trace) for trace in traces]
    else:
        found.pickles = [_call(ask, True, False, False) for ask in _asks(_PICKLE_DUMPS)]
    return _MAGIC + zlib.compress(msgspec.json.encode(found), level=1)


def missing() -> str:
    """Why this process has no flight recorder to ask; empty when it has one."""
    if "torch" not in sys.modules:
        return "flight recorder: the script has not imported torch"
    if not _asks(_JSON_DUMPS) and not _asks(_PICKLE_DUMPS):
        version = getattr(sys.modules["torch"], "__version__", "of this version")
        return f"flight recorder: torch {version} has none for this build"
    return ""


def _asks(names: tuple[str, ...]) -> list[Callable[..., bytes | str]]:
    c10d = sys.modules.get(_C10D)
    return [getattr(c10d, name) for name in names if hasattr(c10d, name)]


def _call(ask: Callable[..., bytes | str], *arguments: bool) -> bytes:
    answer = ask(*arguments)
    return answer.encode() if isinstance(answer, str) else answer


def _groups() -> dict[str, tuple[int, ...]]:
    """The ranks of each process group of this process, by its name."""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    names = getattr(world, "pg_names", None) or {}
    ranks = getattr(world, "pg_group_ranks", None) or {}
    return {str(name): tuple(ranks.get(group) or ()) for group, name in list(names.items())}


# ---- in an agent ----


def read(data: bytes) -> tuple[Collective, ...]:
    """The operations that matter of a dump: ours, or torch's own, JSON or pickle."""
    if len(data) > MAX_DUMP_BYTES:
        raise BadFrame(f"a flight recorder's dump of {len(data)} bytes is larger than allowed")
    if not data.startswith(_MAGIC):
        return collectives([_trace(data)], {})
    found = _decode(_inflate(data[len(_MAGIC) :]), _Dump)
    traces = [_trace(bytes(each)) for each in [*found.traces, *found.pickles]]
    return collectives(traces, found.groups)


def _trace(data: bytes) -> Trace:
    if not data.startswith(b"\x80"):
        return _decode(data, Trace)
    try:
        return msgspec.convert(plain_pickle.load(data), Trace)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadFrame(f"this pickle is no dump of a flight recorder: {error}") from error


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"this is no dump of a flight recorder: {error}") from error


def _inflate(data: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(data, MAX_DUMP_BYTES)
    except zlib.error as error:
        raise BadFrame(f"a flight recorder's dump is broken: {error}") from error
    if not unpacking.eof:
        raise BadFrame("a flight recorder's dump is cut off or unfolds to more than allowed")
    return plain
