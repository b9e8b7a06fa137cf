"""Decides whether ranks may use a data set, and what was used of it before their round.

All ranks say what the data set is and what they restored. The first description of a name holds for
the whole job. What was used must be the same for all ranks of a round: ranks that contradict each other
have restored different checkpoints, and to train on would use records twice or never.
"""

from __future__ import annotations

import msgspec

from holdfast.core.shards.state import MOST_SETS, DataSet, Opening, Shards
from holdfast.messages.data import DataSpec
from holdfast.messages.requests import OpenData
from holdfast.messages.spans import SpanSet
from holdfast.messages.units import Rank

MOST_EMPTY_LINES = 4096
"""Lines without a used position before the last one that has some: more make no state of training."""


def register(shards: Shards, spec: DataSpec) -> DataSet | str:
    """Find the data set of that name, or take it in; or say why it cannot be used."""
    wrong = flaw(spec)
    if wrong:
        return f"data set {spec.name!r}: {wrong}"
    known = shards.sets.get(spec.name)
    if known is None:
        if len(shards.sets) >= MOST_SETS:
            return f"data set {spec.name!r}: the job has {MOST_SETS} data sets already"
        known = shards.sets[spec.name] = DataSet(spec)
    return difference(known.spec, spec) or known


def flaw(spec: DataSpec) -> str:
    """Say what is wrong with a description in itself; nothing if it is sound."""
    if spec.size is None and not spec.partitions:
        return "it has neither a size nor partitions; give one of them"
    if spec.size is not None and spec.partitions:
        return "it has a size and partitions; a stream has no size"
    if len(set(spec.partitions)) < len(spec.partitions):
        return "two of its partitions have the same name"
    if spec.size is None:
        for name, plain in (("order", "plain"), ("epochs", 1), ("sub_epochs", 1)):
            if getattr(spec, name) != plain:
                return f"a stream has no {name} ({getattr(spec, name)!r})"
    elif spec.sub_epochs > spec.size:
        return f"{spec.size} records cannot be divided into {spec.sub_epochs} sub-epochs"
    return ""


def difference(known: DataSpec, given: DataSpec) -> str:
    """Say how a description differs from the one that the job knows."""
    for name in msgspec.structs.fields(known):
        before, now = getattr(known, name.name), getattr(given, name.name)
        if before != now:
            if name.name == "partitions":
                before, now = f"{len(before)} partitions", f"{len(now)} others"
            return (
                f"data set {known.name!r} has {name.name} {before} in this job, not {now};"
                " use another name for another data set, or start another job"
            )
    return ""


def restored(data: DataSet, request: OpenData) -> SpanSet | str:
    """Unpack what a rank says was used; or say why that cannot be."""
    name, spec = data.spec.name, data.spec
    try:
        used = SpanSet.unpack(request.used if request.resumed != "fresh" else b"")
    except ValueError as error:
        return f"data set {name!r}: the restored state is damaged: {error}"
    last = max(used.lines, default=used.below)
    if last - used.below > len(used.lines) + MOST_EMPTY_LINES:
        return f"data set {name!r}: the restored state is damaged: it begins with line {last}"
    if spec.size is None:
        if used.below or last >= len(spec.partitions):
            there = len(spec.partitions)
            return f"data set {name!r} has {there} partitions, and the checkpoint knows of more"
        return used
    beyond = max((edges[-1] for edges in used.lines.values()), default=0)
    if beyond > spec.size:
        return (
            f"data set {name!r} has {spec.size} records, and the checkpoint has used its record"
            f" number {beyond}: the data set has shrunk since; restore the one that was trained on,"
            " or begin without the checkpoint's data state"
        )
    used.collapse(spec.size)
    if spec.sharing == "lockstep":
        used.collapse_below(max(used.lines, default=0))  # Epochs are used one after the other.
    return used


def contradiction(opening: Opening, rank: Rank, request: OpenData) -> str:
    """Say how a rank contradicts the one that decided what was used; nothing if it does not."""
    mine, theirs, other = request.resumed, opening.resumed, opening.rank
    if mine == "fresh" and opening.parts:
        theirs, other = "part", min(opening.parts)  # type: ignore[assignment]
    if other is None or (mine == "part" and theirs == "whole"):
        return ""
    if mine == theirs and (mine == "fresh" or _same(request.used, opening.given)):
        return ""
    words = {"fresh": "begins afresh", "part": "restored its part", "whole": "restored a state"}
    said = "restored another state" if mine == theirs else words[theirs]
    return (
        f"data set {request.spec.name!r}: rank {rank} {words[mine]} (step {request.step}), and rank"
        f" {other} {said}; all ranks must restore the same checkpoint"
    )


def _same(packed: bytes, other: bytes) -> bool:
    return packed == other or SpanSet.unpack(packed) == SpanSet.unpack(other)
