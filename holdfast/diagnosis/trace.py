"""From a dump of torch's flight recorder to the collectives that matter.

The dump's form has changed over torch's versions and differs between backends; the differences are
dealt with here and nowhere else:

- gloo never notes a start or an end; a finished operation is only marked as retired. NCCL retires one
  that timed out as well, so there only the state counts.
- Before torch 2.4 an operation had one sequence number and its group was a bare number.
- gloo does not say who is in a group, so the worker says it beside the dump (see `flight`).

A recorder holds thousands of operations and a verdict needs few: of each group the newest, by which
one sees who is behind, and the oldest that is not finished, in which the group stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

from msgspec import Meta, Struct

from holdfast.messages.evidence import MAX_COLLECTIVES, Collective, CollectiveState

WORLD = "0"
"""The name of the group of all ranks."""

_MAX_SIZES_CHARS = 80
_BEFORE_ALL = -2
_UNNAMED = {"", "undefined", "default_pg"}

_Series = tuple[str, str, bool]
Count = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=4096)]


class Entry(Struct):
    """One operation in a dump."""

    profiling_name: Text
    state: Text = "scheduled"
    retired: bool = False
    collective_seq_id: Count = -1
    p2p_seq_id: Count = -1
    seq_id: Count = -1
    op_id: Count = -1
    record_id: Count = -1
    time_created_ns: Count = -1
    pg_id: Count = -1
    process_group: tuple[Text, Text] | None = None
    is_p2p: bool = False
    input_sizes: list[list[int]] = []
    input_dtypes: list[Text] = []


class Group(Struct):
    ranks: Text = "[]"
    """A list of numbers, as text."""


class Trace(Struct):
    """A dump."""

    entries: Annotated[list[Entry], Meta(max_length=100_000)] = []
    pg_config: dict[Text | int, Group | list[int]] = {}


def collectives(
    traces: Iterable[Trace], members: Mapping[str, tuple[int, ...]]
) -> tuple[Collective, ...]:
    """What matters of these dumps of one rank, the newest first; `members` has each group's ranks."""
    known = dict(members)
    seen: dict[tuple[str, int, int, int, str], Entry] = {}
    for trace in traces:
        for name, group in trace.pg_config.items():
            known.setdefault(str(name), _ranks(group))
        for entry in trace.entries:
            # Two dumps of a process may share operations; their own numbers are the same then.
            seen[_name(entry), _number(entry), entry.op_id, entry.record_id, _op(entry)] = entry
    by_age = sorted(seen.values(), key=lambda e: (e.time_created_ns, e.record_id), reverse=True)
    return _telling(_of_living_groups(by_age), known)


def _of_living_groups(newest_first: list[Entry]) -> list[Entry]:
    """Without those of a group that was destroyed and made again: its numbers began anew."""
    lowest: dict[_Series, int] = {}
    kept = []
    for entry in newest_first:
        series = _series(entry)
        if _number(entry) > lowest.get(series, _number(entry)):
            lowest[series] = _BEFORE_ALL
        else:
            lowest[series] = _number(entry)
            kept.append(entry)
    return kept


def _telling(
    newest_first: list[Entry], members: Mapping[str, tuple[int, ...]]
) -> tuple[Collective, ...]:
    """At most MAX_COLLECTIVES of them: what each group's place hangs on, then the newest."""
    newest: dict[_Series, int] = {}
    oldest_open: dict[_Series, int] = {}
    for index, entry in enumerate(newest_first):
        newest.setdefault(_series(entry), index)
        if _state(entry) != "completed":
            oldest_open[_series(entry)] = index
    chosen = list(
        dict.fromkeys([*oldest_open.values(), *newest.values(), *range(len(newest_first))])
    )
    firsts = set(newest.values())
    return tuple(
        _collective(newest_first[index], members if index in firsts else {})
        for index in sorted(chosen[:MAX_COLLECTIVES])
    )


def _collective(entry: Entry, members: Mapping[str, tuple[int, ...]]) -> Collective:
    name = _name(entry)
    description = entry.process_group[1] if entry.process_group is not None else ""
    return Collective(
        group=name if description in _UNNAMED else f"{name} ({description})",
        number=_number(entry),
        op=_op(entry),
        state=_state(entry),
        ranks=() if name == WORLD else members.get(name, ()),
        sizes=_sizes(entry),
    )


def _series(entry: Entry) -> _Series:
    """What is counted together: one group's operations on one backend."""
    return _name(entry), entry.profiling_name.partition(":")[0], entry.is_p2p


def _name(entry: Entry) -> str:
    return entry.process_group[0] if entry.process_group is not None else str(entry.pg_id)


def _number(entry: Entry) -> int:
    if entry.is_p2p and entry.p2p_seq_id >= 0:
        return entry.p2p_seq_id
    return entry.collective_seq_id if entry.collective_seq_id >= 0 else entry.seq_id


def _op(entry: Entry) -> str:
    """What was done; a point-to-point operation always says so."""
    backend, colon, op = entry.profiling_name.rpartition(":")
    said = op.startswith(("send", "recv"))
    return f"{backend}{colon}{op}" if said or not entry.is_p2p else f"{backend}{colon}p2p {op}"


def _state(entry: Entry) -> CollectiveState:
    by_gloo = entry.profiling_name.startswith("gloo:")
    if entry.state == "completed" or (by_gloo and entry.retired):
        return "completed"
    return "started" if entry.state == "started" else "scheduled"


def _sizes(entry: Entry) -> str:
    kinds = [*entry.input_dtypes, *[""] * len(entry.input_sizes)]
    text = ", ".join(
        f"{kind}{size}" for kind, size in zip(kinds, entry.input_sizes[:16], strict=False)
    )
    return text if len(text) <= _MAX_SIZES_CHARS else text[: _MAX_SIZES_CHARS - 3] + "..."


def _ranks(group: Group | list[int]) -> tuple[int, ...]:
    if isinstance(group, list):
        return tuple(group)
    words = group.ranks.strip("[]() ").split(",")
    return tuple(int(word) for word in words if word.strip().isdecimal())
