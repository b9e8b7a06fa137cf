"""Says what the committed history of each data set has used, how often, and in which round.

`history` has applied the rule already: a round counts up to the step from which the next one went on.
Here its pieces are laid over each other, line by line, and compared with what the job holds to be used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from holdfast.core.shards.history import uses
from holdfast.core.shards.state import DataSet, Shards
from holdfast.messages.data import DataName, Line, Span
from holdfast.messages.reports import (
    DataAccount,
    LineAccount,
    RoundAccount,
    SkippedShard,
    SpanUse,
)
from holdfast.messages.spans import SpanSet
from holdfast.messages.units import RoundNumber


def account(state: Shards) -> dict[DataName, DataAccount]:
    """Account for every data set of a job."""
    return {name: _of(data) for name, data in state.sets.items()}


def _of(data: DataSet) -> DataAccount:
    spec, history = data.spec, data.history
    held, skipped = _held(data), SpanSet.of(one.span for one in data.skipped)
    lines = [*_folded(data, skipped), *_listed(data, held, skipped)]
    return DataAccount(
        dataset=spec.name,
        sharing=spec.sharing,
        task=spec.task,
        exact=spec.exact,
        epochs=spec.epochs,
        size=spec.size,
        order=spec.order,
        seed=spec.seed,
        shard=spec.shard,
        sound=not any(line.more or line.lost or line.skipped for line in lines),
        whole_lines=history.folded,
        lines=lines,
        rounds=[
            RoundAccount(
                round=use.round,
                resumed=use.step,
                until=use.until,
                records=sum(span.stop - span.start for span in use.spans()),
            )
            for use in history.rounds
        ],
        skipped=_skipped(data),
        misfits=data.misfits,
    )


def skipped(state: Shards) -> list[SkippedShard]:
    """List the shards of all data sets that were left out."""
    return [one for data in state.sets.values() for one in _skipped(data)]


def _skipped(data: DataSet) -> list[SkippedShard]:
    names = data.spec.partitions
    return [
        SkippedShard(
            dataset=data.spec.name,
            line=one.span.line,
            partition=names[one.span.line] if data.spec.size is None else "",
            start=one.span.start,
            stop=one.span.stop,
            error=one.error,
            round=one.round,
        )
        for one in data.skipped
    ]


def _held(data: DataSet) -> SpanSet:
    """Return what the job holds to be used: it will not come again."""
    held = data.used.copy()
    if data.spec.sharing == "lockstep" and data.history.rounds:
        held.update(SpanSet.of(one.span for one in data.history.rounds[-1].stretches))
        if data.spec.size is not None:
            held.collapse_below(max(held.lines, default=0))
    return held


def _listed(data: DataSet, held: SpanSet, skipped: SpanSet) -> Iterator[LineAccount]:
    spec, history = data.spec, data.history
    if spec.size is None:
        lines = range(len(spec.partitions))
    else:
        begun = [span.line for use in history.rounds for span in use.spans()]
        newest = max([*begun, *held.lines, held.below - 1], default=-1)
        lines = range(history.folded, newest + 1)
    for line in lines:
        if spec.size is None:
            reached = held.lines.get(line, [0])[-1]
            divided = uses(history, line, None)
            known = divided[-1][0].stop if divided else 0
            if reached > known:
                divided.append((Span(line, known, reached), ()))
        else:
            divided = uses(history, line, spec.size)
        yield _line(data, line, divided, held, skipped)


def _folded(data: DataSet, skipped: SpanSet) -> Iterator[LineAccount]:
    by_line: dict[Line, list[tuple[Span, tuple[RoundNumber, ...]]]] = {}
    for one in data.history.irregular:
        by_line.setdefault(one.span.line, []).append((one.span, one.rounds))
    for line, odd in sorted(by_line.items()):
        yield _line(data, line, odd, SpanSet({}, line + 1), skipped)


def _line(
    data: DataSet,
    line: Line,
    divided: list[tuple[Span, tuple[RoundNumber, ...]]],
    held: SpanSet,
    skipped: SpanSet,
) -> LineAccount:
    spec = data.spec
    spans = [piece for one in divided for piece in _pieces(one, held, skipped)]
    seen = dict.fromkeys(("once", "more", "lost", "skipped", "ahead"), 0)
    for one in spans:
        kind: str = one.fate
        if one.fate == "used":
            kind = "once" if one.times == 1 else "more"
        seen[kind] += one.stop - one.start
    if spec.size is not None and line < data.history.folded:
        seen["once"] = spec.size - sum(seen.values())
    name = spec.partitions[line] if spec.size is None else ""
    return LineAccount(line=line, name=name, size=spec.size, spans=spans, **seen)


def _pieces(
    one: tuple[Span, tuple[RoundNumber, ...]], held: SpanSet, skipped: SpanSet
) -> Iterator[SpanUse]:
    """Divide positions that were used alike by what else is known of them."""
    span, rounds = one
    if rounds:
        yield _use(span, rounds, "used")
        return
    found = [(part, "skipped") for part in skipped.within(span)]
    for part in skipped.without(span):
        found += [(lost, "lost") for lost in held.within(part)]
        found += [(ahead, "ahead") for ahead in held.without(part)]
    for part, fate in sorted(found):
        yield _use(part, (), fate)  # type: ignore[arg-type]


def _use(
    span: Span,
    rounds: tuple[RoundNumber, ...],
    fate: Literal["used", "ahead", "skipped", "lost"],
) -> SpanUse:
    return SpanUse(
        start=span.start, stop=span.stop, times=len(rounds), rounds=list(rounds), fate=fate
    )
