"""Writes what was used of a job's data sets, for `holdfast data`, `holdfast status` and the summary.

Positions count along the order of an epoch. Those who know that order give a function that names the
records at them; without it, positions of a plain order are the record numbers anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from holdfast.messages.reports import DataAccount, LineAccount, SkippedShard, SpanUse

FAULTS_SHOWN = 20
SKIPPED_SHOWN = 10
RECORDS_SHOWN = 16
"""Records named of one span."""
LISTED = ("data set", "for", "shared", "records", "epochs", "used", "to come", "verdict")
"""Columns of `holdfast data ls`."""

Records = Callable[[DataAccount, int, range], Sequence[int]]
"""Names the records at positions of an epoch."""


# ---- all data sets ----


def listed(accounts: Sequence[DataAccount]) -> list[tuple[str, ...]]:
    """Make the rows of a table of data sets: see `LISTED`."""
    return [
        (
            one.dataset,
            one.task,
            one.sharing if one.exact else f"{one.sharing}, at least once",
            "stream" if one.size is None else f"{one.size:,}",
            _epochs(one),
            f"{used(one):,}",
            _to_come(one),
            verdict(one),
        )
        for one in accounts
    ]


def used(account: DataAccount) -> int:
    """Count the records that were used, each once."""
    listed = {line.line for line in account.lines}
    whole = sum(line not in listed for line in range(account.whole_lines)) * (account.size or 0)
    return whole + sum(line.once + line.more for line in account.lines)


def is_finished(account: DataAccount) -> bool:
    """Return whether nothing is to come; a stream and a data set without end are never finished."""
    return bool(account.epochs) and account.size is not None and not _ahead(account)


def is_as_promised(account: DataAccount) -> bool:
    """Return whether each record was used once, or, if no more was promised, at least once."""
    wrong = any(line.lost or line.skipped for line in account.lines)
    return account.sound or not (account.exact or wrong)


def verdict(account: DataAccount) -> str:
    """Say whether each record was used as promised, so far or for good."""
    wrong = [
        (sum(line.more for line in account.lines), "used more than once"),
        (sum(line.lost for line in account.lines), "never used"),
        (sum(line.skipped for line in account.lines), "left out"),
    ]
    if account.sound:
        return "exact" if is_finished(account) else "exact so far"
    found = "at least once" if is_as_promised(account) else "not exact"
    return f"{found}: " + ", ".join(f"{count:,} {what}" for count, what in wrong if count)


def _epochs(account: DataAccount) -> str:
    if account.size is None:
        return "-"
    begun = max([account.whole_lines, *(line.line + 1 for line in account.lines)])
    return f"{begun} of {account.epochs or 'endless'}"


def _ahead(account: DataAccount) -> int:
    begun = max([account.whole_lines, *(line.line + 1 for line in account.lines)])
    later = max(0, account.epochs - begun) * (account.size or 0)
    return later + sum(line.ahead for line in account.lines)


def _to_come(account: DataAccount) -> str:
    return f"{_ahead(account):,}" if account.epochs and account.size is not None else "no end"


# ---- the audit of one ----


def audit(account: DataAccount, records: Records | None = None) -> list[str]:
    """Describe what was used, by epoch or partition and by round, then all that is wrong."""
    return [
        f"data set {account.dataset} ({account.task}, {_shared(account)}): {verdict(account)}",
        *(f"  {line}" for line in _lines(account)),
        *(f"  {line}" for line in _rounds(account)),
        *(f"  {line}" for line in _faults(account, records)),
    ]


def _shared(account: DataAccount) -> str:
    how = {"lockstep": "in lockstep", "leases": "by leases"}[account.sharing]
    return f"shared {how}" if account.exact else f"shared {how}, at least once"


def _lines(account: DataAccount) -> Iterator[str]:
    listed = {line.line for line in account.lines}
    whole = [line for line in range(account.whole_lines) if line not in listed]
    if whole:
        each = "each record once" if account.exact else "whole"
        yield f"{_epoch_numbers(whole)}: {each}"
    for line in account.lines:
        counts = [
            (line.once, "once"),
            (line.more, "more than once"),
            (line.lost, "never"),
            (line.skipped, "left out"),
            (line.ahead, "to come"),
        ]
        told = ", ".join(f"{count:,} {what}" for count, what in counts if count)
        yield f"{_named(line.line, line.name)}: {told or 'nothing used'}"


def _epoch_numbers(epochs: Sequence[int]) -> str:
    if len(epochs) == 1:
        return f"epoch {epochs[0]}"
    consecutive = epochs[-1] - epochs[0] + 1 == len(epochs)
    return f"epochs {epochs[0]} to {epochs[-1]}" + ("" if consecutive else " but for those below")


def _named(line: int, partition: str) -> str:
    return f"partition {partition}" if partition else f"epoch {line}"


def _rounds(account: DataAccount) -> Iterator[str]:
    for one in account.rounds:
        until = "on" if one.until is None else f"to {one.until}"
        yield f"round {one.round}, from step {one.resumed} {until}: {one.records:,} records"


def _faults(account: DataAccount, records: Records | None) -> Iterator[str]:
    found = list(_wrong_spans(account, records))
    yield from found[:FAULTS_SHOWN]
    if len(found) > FAULTS_SHOWN:
        yield f"... and {len(found) - FAULTS_SHOWN} more: --json has all"
    for one in account.skipped[:FAULTS_SHOWN]:
        yield f"left out in round {one.round}: {_skipped(one)}"
    if len(account.skipped) > FAULTS_SHOWN:
        yield f"... and {len(account.skipped) - FAULTS_SHOWN} more: --json has all"
    if account.misfits:
        yield f"{account.misfits:,} records were reported by nodes that had not been lent them"


def _wrong_spans(account: DataAccount, records: Records | None) -> Iterator[str]:
    for line in account.lines:
        for span in line.spans:
            which = f"{positions(span.start, span.stop)} of {_named(line.line, line.name)}"
            if span.fate == "lost":
                yield f"never used: {which}{_translated(account, line, span, records)}"
            elif span.times > 1:
                rounds = ", ".join("an earlier job" if r == 0 else str(r) for r in span.rounds)
                told = f"{which}, in rounds {rounds}{_translated(account, line, span, records)}"
                yield f"used {span.times} times: {told}"


def _translated(
    account: DataAccount, line: LineAccount, span: SpanUse, records: Records | None
) -> str:
    """Name the records behind positions, the first ones of many."""
    if records is None or account.size is None:
        return ""
    shown = range(span.start, min(span.stop, span.start + RECORDS_SHOWN))
    names = ", ".join(map(str, records(account, line.line, shown)))
    more = ", ..." if span.stop > shown.stop else ""
    return f": records {names}{more}"


def positions(start: int, stop: int) -> str:
    """Name positions by the first and the last of them."""
    return f"position {start}" if stop - start == 1 else f"positions {start} to {stop - 1}"


# ---- shards that were left out ----


def skipped_lines(skipped: Sequence[SkippedShard]) -> list[str]:
    """Describe shards that were left out, the first ones of many, in a line each."""
    lines = [f"left out: data set {one.dataset}: {_skipped(one)}" for one in skipped]
    if len(lines) > SKIPPED_SHOWN:
        more = len(lines) - SKIPPED_SHOWN
        lines[SKIPPED_SHOWN:] = [f"left out: {more} more shards (`holdfast data audit` has all)"]
    return lines


def _skipped(one: SkippedShard) -> str:
    where = f"{positions(one.start, one.stop)} of {_named(one.line, one.partition)}"
    return f"{where}: {one.error.strip().splitlines()[-1] if one.error.strip() else 'no reason'}"
