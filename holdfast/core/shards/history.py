"""Keeps which round has used what, up to which step: the committed history of a data set.

A round that goes on from step S undoes all that was used after S: its predecessors count up to S. What
was used at which step comes from the ranks' reports. Where these do not say (a report was lost with its
node; a shard was half used at S), the state that the round went on with decides. It never overrules the
reports: a script that restores its model and not its data uses records twice, and one that restores its
data and not its model never uses some, and both are to be seen.

    lockstep    the whole round uses stretches of positions, the same number each step; those that
                continue each other are joined, and cut in proportion
    leases      ranks use spans in any order; they are kept by ranges of steps, at most `MOST_RANGES` of
                them, which grow with the round; a range that S lies in is decided by the state

Every rank reports the same stretches. Positions that are reported with other steps were used again in
the same round: a loop began the epoch anew.

Lines that lie far behind fold: what was used once is only counted, the rest is listed.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, field

from holdfast.messages.data import Line, Position, Span, Used
from holdfast.messages.spans import SpanSet
from holdfast.messages.units import RoundNumber, StepNumber

MOST_RANGES = 64
KEPT_LINES = 4
"""Whole lines whose history is kept in detail."""
MOST_LINES = 1000
"""Lines of which nothing was ever reported that are looked at one by one."""
MOST_IRREGULAR = 1000
STEPS_APART = 1
"""Ranks of a step may report it as this many steps apart."""
BEFORE = RoundNumber(0)
"""Stands for what was used before this job."""
UNKNOWN = RoundNumber(-1)


class Stretch(Struct, frozen=True):
    """Positions that a whole round used, the same number each step."""

    span: Span
    first: StepNumber
    """The last step that was finished before they were used."""
    last: StepNumber

    def step_at(self, position: Position) -> StepNumber:
        steps = self.last - self.first + 1
        size = self.span.stop - self.span.start
        return StepNumber(self.first + (position - self.span.start) * steps // size)

    def part(self, start: Position, stop: Position) -> Stretch:
        span = Span(self.span.line, start, stop)
        return Stretch(span, self.step_at(start), self.step_at(stop - 1))

    def before(self, step: StepNumber) -> Stretch | None:
        """Return what was used up to that step, inclusive of the one that finished it."""
        if self.last < step:
            return self
        if self.first >= step:
            return None
        steps, kept = self.last - self.first + 1, step - self.first
        stop = self.span.start + (self.span.stop - self.span.start) * kept // steps
        return None if stop <= self.span.start else self.part(self.span.start, stop)

    def continues(self, other: Stretch) -> bool:
        """Whether it goes on where another ends, at the same rate."""
        mine, theirs = self.span, other.span
        if mine.line != theirs.line or mine.start != theirs.stop or self.first != other.last + 1:
            return False
        my_rate = (mine.stop - mine.start) * (other.last - other.first + 1)
        return my_rate == (theirs.stop - theirs.start) * (self.last - self.first + 1)


class StepRange(Struct):
    """Positions that were used within a range of steps."""

    first: StepNumber
    last: StepNumber
    spans: SpanSet = field(default_factory=SpanSet)


class RoundUse(Struct):
    """What one round contributed, as far as it counts."""

    round: RoundNumber
    step: StepNumber
    """The step that it went on from."""
    until: StepNumber | None = None
    """The step that the next round went on from."""
    stretches: list[Stretch] = field(default_factory=list)
    again: list[Stretch] = field(default_factory=list)
    """Positions that it used once more, at other steps."""
    width: int = 1
    """Steps of a range."""
    ranges: dict[int, StepRange] = field(default_factory=dict)

    def spans(self) -> Iterator[Span]:
        for stretch in (*self.stretches, *self.again):
            yield stretch.span
        for one in self.ranges.values():
            yield from one.spans

    def drop_lines(self, below: Line) -> StepNumber:
        """Forget the lines before that one; the last step at which they were used."""
        gone = [one for one in (*self.stretches, *self.again) if one.span.line < below]
        last = max((one.last for one in gone), default=StepNumber(0))
        self.stretches = [one for one in self.stretches if one.span.line >= below]
        self.again = [one for one in self.again if one.span.line >= below]
        for key, one in list(self.ranges.items()):
            lines = [line for line in one.spans.lines if line < below]
            for line in lines:
                one.spans.drop_line(line)
                last = max(last, one.last)
            if not one.spans:
                del self.ranges[key]
        return last


class Irregular(Struct, frozen=True):
    """Positions of a folded line that were not used exactly once."""

    span: Span
    rounds: tuple[RoundNumber, ...]
    """Rounds that used them."""


class UseHistory(Struct):
    before: SpanSet = field(default_factory=SpanSet)
    """What was used before this job."""
    before_step: StepNumber | None = None
    """The step that the first round went on from."""
    rounds: list[RoundUse] = field(default_factory=list)
    """Rounds of which something counts, and the newest one."""
    folded: Line = 0
    """Lines before this one are not listed any more."""
    folded_step: StepNumber = StepNumber(0)
    """The last step at which something of them was used."""
    irregular: list[Irregular] = field(default_factory=list)


# ---- reports -------------------------------------------------------------------------------------


def note_stretch(history: UseHistory, used: Used) -> None:
    """Take in what the whole round used; every rank may say the same, in other pieces."""
    use = history.rounds[-1]
    if used.span.line < history.folded:
        return  # Others have reported it long ago.
    new = Stretch(used.span, used.first_step, used.last_step)
    if not use.stretches or use.stretches[-1].span < new.span:
        last = use.stretches[-1] if use.stretches else None
        if last is None or last.span.line < new.span.line or last.span.stop <= new.span.start:
            _append(use.stretches, new)
            return
    known = SpanSet.of(one.span for one in use.stretches if one.span.line == new.span.line)
    for part in known.within(new.span):
        repeated = new.part(part.start, part.stop)
        if _is_repeated(use.stretches, repeated) and not _overlaps(use.again, part):
            use.again.append(repeated)  # Another rank that says the same finds it there.
    fresh = [new.part(part.start, part.stop) for part in known.without(new.span)]
    if fresh:
        ordered = sorted([*use.stretches, *fresh], key=lambda one: one.span)
        use.stretches = []
        for one in ordered:
            _append(use.stretches, one)


def _is_repeated(known: list[Stretch], new: Stretch) -> bool:
    """Return whether positions are among those that were used at other steps than now."""
    for one in known:
        start, stop = max(one.span.start, new.span.start), min(one.span.stop, new.span.stop)
        if one.span.line == new.span.line and start < stop:
            apart = abs(new.step_at(start) - one.step_at(start))
            if apart > STEPS_APART:
                return True
    return False


def _overlaps(known: list[Stretch], span: Span) -> bool:
    return any(
        one.span.line == span.line and one.span.start < span.stop and span.start < one.span.stop
        for one in known
    )


def _append(stretches: list[Stretch], new: Stretch) -> None:
    last = stretches[-1] if stretches else None
    if last is not None and new.continues(last):
        span = Span(new.span.line, last.span.start, new.span.stop)
        stretches[-1] = Stretch(span, last.first, new.last)
    else:
        stretches.append(new)


def note_span(history: UseHistory, span: Span, first: StepNumber, last: StepNumber) -> None:
    """Take in what one rank used."""
    use = history.rounds[-1]
    key = last // use.width
    found = use.ranges.get(key)
    if found is None:
        found = use.ranges[key] = StepRange(first, last)
    found.first, found.last = min(found.first, first), max(found.last, last)
    found.spans.add(span)
    while len(use.ranges) > MOST_RANGES:
        _widen(use)


def _widen(use: RoundUse) -> None:
    """Make ranges of twice as many steps."""
    use.width *= 2
    before, use.ranges = use.ranges, {}
    for key, one in before.items():
        into = use.ranges.setdefault(key // 2, one)
        if into is not one:
            into.first, into.last = min(into.first, one.first), max(into.last, one.last)
            into.spans.update(one.spans)


# ---- a round goes on from a step -------------------------------------------------------------------


def resume(
    history: UseHistory,
    round: RoundNumber,
    step: StepNumber,
    used: SpanSet,
    skipped: SpanSet,
    size: int | None,
) -> None:
    """Begin a round that goes on from a step, with what was used or left out by then; what earlier
    rounds used after that step does not count."""
    undone = _cut(history, step, used)
    undone.update(skipped)
    if size is not None:
        _list_again(history, used, size)
    _fill_in(history, step, used, undone, size)
    for use in history.rounds:
        use.until = step if use.until is None else min(use.until, step)
    begin(history, round, step)


def begin(history: UseHistory, round: RoundNumber, step: StepNumber) -> None:
    """Begin a round that undoes nothing: its data does not go back with the model."""
    history.rounds = [use for use in history.rounds if any(use.spans())]
    history.rounds.append(RoundUse(round, step))


def _cut(history: UseHistory, step: StepNumber, used: SpanSet) -> SpanSet:
    """Undo what was used after a step; return that."""
    undone = SpanSet()
    if history.before_step is None or step < history.before_step:
        # A model that begins from nothing has used nothing, whatever its data's state says.
        history.before_step, history.before = step, used.copy() if step else SpanSet()
    if step <= history.folded_step:
        _unfold(history, step, used)
    kept = []
    for use in history.rounds:
        if use.step < step:
            _cut_round(use, step, used, undone)
            kept.append(use)
        else:
            undone.update(SpanSet.of(use.spans()))
    history.rounds = kept
    return undone


def _unfold(history: UseHistory, step: StepNumber, used: SpanSet) -> None:
    history.folded = min(history.folded, used.below)
    history.folded_step = StepNumber(max(0, step - 1))
    known = history.irregular
    history.irregular = [one for one in known if one.span.line < history.folded]


def _list_again(history: UseHistory, used: SpanSet, size: int) -> None:
    """List folded lines that are going to be used again, though the model has used them."""
    for line in range(max(used.below, history.folded - MOST_LINES), history.folded):
        history.before.add(Span(line, 0, size))
    history.folded = min(history.folded, used.below)


def _cut_round(use: RoundUse, step: StepNumber, used: SpanSet, undone: SpanSet) -> None:
    stretches = []
    for stretch in use.stretches:
        kept = stretch.before(step)
        if kept is not None:
            stretches.append(kept)
        start = stretch.span.start if kept is None else kept.span.stop
        undone.add(Span(stretch.span.line, start, stretch.span.stop))
    use.stretches = stretches
    use.again = [kept for one in use.again if (kept := one.before(step)) is not None]
    for key, one in list(use.ranges.items()):
        if one.last < step:
            continue
        if one.first >= step:
            undone.update(one.spans)
            del use.ranges[key]
            continue
        one.spans = common(one.spans, used)
        one.last = StepNumber(step - 1)
        if not one.spans:
            del use.ranges[key]


def common(some: SpanSet, other: SpanSet) -> SpanSet:
    """Return what is in both sets, of the lines that the first one lists."""
    return SpanSet.of(part for span in some for part in other.within(span))


def _fill_in(
    history: UseHistory, step: StepNumber, used: SpanSet, unused: SpanSet, size: int | None
) -> None:
    """Count what no report speaks of and what was used by that step, as the state has it; `unused`
    is known not to be."""
    if not history.rounds:
        return
    use = history.rounds[-1]
    reported = max((one.last for one in use.stretches), default=StepNumber(0))
    if use.stretches and reported + 1 >= step:
        return
    known = SpanSet({}, history.folded)
    for one in (history.before, unused):
        known.update(one)
    for earlier in history.rounds:
        known.update(SpanSet.of(earlier.spans()))
    missing = SpanSet.of(part for span in _all_of(used, size) for part in known.without(span))
    if missing:
        first = StepNumber(max(use.step, reported))
        key = (step - 1) // use.width
        found = use.ranges.setdefault(key, StepRange(first, StepNumber(step - 1)))
        found.first = min(found.first, first)
        found.spans.update(missing)


def _all_of(used: SpanSet, size: int | None) -> Iterator[Span]:
    if size is not None:
        for line in range(max(0, used.below - MOST_LINES), used.below):
            yield Span(line, 0, size)
    yield from used


# ---- lines that lie far behind -----------------------------------------------------------------------


def fold(history: UseHistory, whole: Line, size: int) -> None:
    """Stop listing lines that lie far behind; those before `whole` have all been used."""
    below = whole - KEPT_LINES
    if below <= history.folded:
        return
    for line in range(max(history.folded, below - MOST_LINES), below):
        odd = [one for one in uses(history, line, size) if len(one[1]) != 1]
        room = MOST_IRREGULAR - len(history.irregular)
        history.irregular += [Irregular(span, rounds) for span, rounds in odd[:room]]
    for use in history.rounds:
        history.folded_step = max(history.folded_step, use.drop_lines(below))
    for line in [line for line in history.before.lines if line < below]:
        history.before.drop_line(line)
    history.folded = below


def uses(
    history: UseHistory, line: Line, size: int | None
) -> list[tuple[Span, tuple[RoundNumber, ...]]]:
    """Divide a line by which rounds used its positions; without a size, as far as any did."""
    found: list[tuple[Position, Position, RoundNumber]] = []
    if line < history.before.below and size is not None:
        found.append((0, size, BEFORE))
    found += [(span.start, span.stop, BEFORE) for span in history.before if span.line == line]
    for use in history.rounds:
        found += [(s.start, s.stop, use.round) for s in use.spans() if s.line == line]
    return _divided(line, found, size)


def _divided(
    line: Line, found: list[tuple[Position, Position, RoundNumber]], size: int | None
) -> list[tuple[Span, tuple[RoundNumber, ...]]]:
    """Sweep over the edges; neighbours with the same rounds are joined."""
    end = max((stop for _, stop, _ in found), default=0) if size is None else size
    edges: list[tuple[Position, bool, RoundNumber]] = []
    for start, stop, round in found:
        edges += ((start, True, round), (stop, False, round))
    edges.sort()
    divided: list[tuple[Span, tuple[RoundNumber, ...]]] = []
    now: list[RoundNumber] = []
    at = 0
    for position, begins, round in [*edges, (end, False, UNKNOWN)]:
        if position > at:
            rounds = tuple(sorted(now))
            last = divided[-1] if divided else None
            if last is not None and last[1] == rounds:
                divided[-1] = (Span(line, last[0].start, position), rounds)
            else:
                divided.append((Span(line, at, position), rounds))
            at = position
        if begins:
            now.append(round)
        elif round != UNKNOWN:
            now.remove(round)
    return divided
