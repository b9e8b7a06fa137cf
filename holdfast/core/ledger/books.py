"""Books every second of every rank to one cause.

Each rank has a cursor in time and a current cause. Booking moves the cursor forward and adds the
distance to one cause, so the causes of a rank add up to the time that its account was open: not by
care, but because there is no other way to add.

Workers report the past from time to time (n steps until time t, so much of it saving, restoring,
evaluating or pausing). What a rank does after its last finished step is unknown until something decides
it:

- Its next steps finish. Their time is productive, or redo if they had been finished once before; what
  the worker found to be no step (`RankProgress.pause_s`) is other. While the worker does not know yet
  how long its steps usually take, its first steps stay undecided too.
- The round breaks. A fault discards the step under way, which is at most one usual step: redo. All
  before the fault that was not saving or that step is other; after it comes the time to detect it.
- The rank's script ends. It had finished its last step: finish.

So the productive seconds grow when a step was finished, and never while time merely passes.

Samples are counted like steps: used when their step was finished for the first time, redone when it had
been finished before. Which records they were is not known here: see `core.shards`.
"""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.messages.records import Cause, RankProgress
from holdfast.messages.reports import Booking
from holdfast.messages.units import Rank, RoundNumber, Seconds, StepNumber, Time

_UNDER_WAY = ("start", "init", "unknown")
"""Causes of a rank whose script runs; a late report does not bring a rank back from another one."""


class Account(Struct):
    """Account of one rank."""

    opened_at: Time
    cursor: Time
    cause: Cause
    """Cause of the time after the cursor, unless a report says otherwise; unknown once it steps."""
    step: StepNumber = StepNumber(0)
    steps: int = 0
    checkpoint_s: Seconds = 0.0
    restore_s: Seconds = 0.0
    evaluation_s: Seconds = 0.0
    pause_s: Seconds = 0.0
    step_s: Seconds | None = None
    """Usual time of a step, in this round or before."""
    samples: int = 0
    """Samples counted so far of its present process."""
    sampled_steps: int = 0
    """Steps of its present process up to which samples are counted."""
    undecided: RankProgress | None = None
    """Newest report of steps that are not booked, because their usual time is unknown."""


class Samples(Struct):
    """Samples that all ranks have used."""

    used: int = 0
    """In steps finished for the first time."""
    redone: int = 0
    timed: float = 0.0
    """Those used in steps whose time is productive; the first of a process belongs to its init."""


class Ledger(Struct):
    """Seconds by cause, and the open accounts."""

    opened_at: Time
    seconds: dict[Cause, Seconds] = field(default_factory=dict)
    accounts: dict[Rank, Account] = field(default_factory=dict)
    round: RoundNumber = RoundNumber(0)
    redo_until: StepNumber = StepNumber(0)
    """Last step of this round that had been finished before."""
    now: Time | None = None
    """Time of the event being handled: nothing is booked beyond it, whatever an agent's clock says."""
    waiting_since: Time | None = None
    fault_at: Time | None = None
    noticed_at: Time | None = None
    closed_s: Seconds = 0.0
    """Rank-seconds of closed accounts."""
    samples: Samples | None = None
    """None while no rank counts them."""
    spans: list[Booking] | None = None
    """Bookings; kept only for a trace."""


def size(ledger: Ledger, ranks: int, now: Time) -> None:
    """Open and close accounts so that there is one for each rank."""
    for rank in [rank for rank in ledger.accounts if rank >= ranks]:
        book(ledger, rank, now)
        gone = ledger.accounts.pop(rank)
        ledger.closed_s += gone.cursor - gone.opened_at
    first = ledger.round == 0
    since = ledger.opened_at if first else now
    for rank in map(Rank, range(ranks)):
        if rank not in ledger.accounts:
            ledger.accounts[rank] = Account(since, since, "start" if first else "wait")
            if first and ledger.waiting_since is not None:
                enter(ledger, "wait", ledger.waiting_since, rank)


def book(ledger: Ledger, rank: Rank, until: Time, cause: Cause | None = None) -> None:
    """Book a rank's time until then, to a cause or to its current one."""
    account = ledger.accounts[rank]
    if ledger.now is not None:
        until = min(until, ledger.now)
    if until <= account.cursor:
        return
    cause = cause or account.cause
    ledger.seconds[cause] = ledger.seconds.get(cause, 0.0) + (until - account.cursor)
    if ledger.spans is not None:
        booking = Booking(rank, cause, account.cursor, until, ledger.round, account.step)
        ledger.spans.append(booking)
    account.cursor = until


def enter(ledger: Ledger, cause: Cause, now: Time, rank: Rank | None = None) -> None:
    """Change the current cause of a rank, or of all ranks."""
    for each in [rank] if rank is not None else list(ledger.accounts):
        book(ledger, each, now)
        ledger.accounts[each].cause = cause


def wait(ledger: Ledger, now: Time) -> None:
    """Book from now on that there are too few nodes for a round."""
    ledger.waiting_since = now
    enter(ledger, "wait", now)


def begin_round(ledger: Ledger, round: RoundNumber, highest: StepNumber, now: Time) -> None:
    """Begin a round: its ranks are being started."""
    ledger.round = round
    ledger.redo_until = highest
    ledger.waiting_since = None
    for rank, account in ledger.accounts.items():
        book(ledger, rank, now)
        account.cause = "start"
        account.step, account.steps = StepNumber(0), 0
        account.checkpoint_s = account.restore_s = account.pause_s = account.evaluation_s = 0.0
        account.samples = account.sampled_steps = 0
        account.undecided = None


def script_began(ledger: Ledger, rank: Rank, at: Time) -> None:
    """Book the time until the script's first step as init."""
    if ledger.accounts[rank].cause == "start":
        enter(ledger, "init", at, rank)


def progressed(ledger: Ledger, progress: RankProgress) -> None:
    """Book what a rank's page says about its past."""
    account = ledger.accounts[progress.rank]
    if progress.steps < account.steps or progress.steps == 0 or progress.last_at is None:
        return
    if progress.samples is not None:
        _count_samples(ledger, account, progress, progress.samples)
    if progress.step_s is not None:
        account.step_s = progress.step_s
    if account.steps == 0 and progress.first_at is not None:
        _book_aside(ledger, progress.rank, "restore", progress.restore_s, progress.first_at)
        _book_aside(ledger, progress.rank, "evaluation", progress.evaluation_s, progress.first_at)
        account.restore_s, account.evaluation_s = progress.restore_s, progress.evaluation_s
        book(ledger, progress.rank, progress.first_at)
        # The first step ends here; the steps before it were another process's.
        account.step = StepNumber(progress.step - progress.steps + 1)
        account.steps = 1
        if account.cause in _UNDER_WAY:
            account.cause = "unknown"
    if progress.step_s is None:
        account.undecided = progress
    else:
        _decide(ledger, progress, progress.last_at)


def _decide(ledger: Ledger, progress: RankProgress, last_at: Time) -> None:
    """Book the time of finished steps, and of what was saved or restored after the last of them."""
    account = ledger.accounts[progress.rank]
    account.undecided = None
    stepped = progress.steps > account.steps
    until = last_at if stepped else ledger.fault_at or ledger.now
    if until is None or not (stepped or account.cause == "unknown"):
        return
    rank = progress.rank
    _book_aside(ledger, rank, "restore", progress.restore_s - account.restore_s, until)
    _book_aside(ledger, rank, "checkpoint", progress.checkpoint_s - account.checkpoint_s, until)
    _book_aside(ledger, rank, "evaluation", progress.evaluation_s - account.evaluation_s, until)
    _book_aside(ledger, rank, "other", progress.pause_s - account.pause_s, until)
    if stepped:
        _book_steps(ledger, account, progress, last_at)
    account.step, account.steps = progress.step, progress.steps
    account.checkpoint_s, account.restore_s = progress.checkpoint_s, progress.restore_s
    account.evaluation_s, account.pause_s = progress.evaluation_s, progress.pause_s


def _count_samples(ledger: Ledger, account: Account, progress: RankProgress, samples: int) -> None:
    """Count the samples of newly finished steps, split between repeated and new steps alike."""
    steps, count = progress.steps - account.sampled_steps, samples - account.samples
    if steps <= 0 or count < 0:
        return
    if ledger.samples is None:
        ledger.samples = Samples()
    again = min(max(ledger.redo_until - (progress.step - steps), 0), steps)
    redone = count * again // steps
    ledger.samples.redone += redone
    ledger.samples.used += count - redone
    untimed = again == 0 and account.sampled_steps == 0
    ledger.samples.timed += (count - redone) * (steps - untimed) / steps
    account.samples, account.sampled_steps = samples, progress.steps


def _book_aside(ledger: Ledger, rank: Rank, cause: Cause, took_s: Seconds, until: Time) -> None:
    """Book what a rank spent on another cause than steps, at most as much as there is until then."""
    if took_s > 0:
        book(ledger, rank, Time(min(ledger.accounts[rank].cursor + took_s, until)), cause)


def _book_steps(ledger: Ledger, account: Account, progress: RankProgress, last_at: Time) -> None:
    """Split the time of newly finished steps between repeated and new ones."""
    first, last = account.step, progress.step
    if last <= first:
        book(ledger, progress.rank, last_at, "productive")
        return
    again = min(max(ledger.redo_until - first, 0), last - first)
    share = again / (last - first)
    redone_at = account.cursor + share * (last_at - account.cursor)
    book(ledger, progress.rank, Time(redone_at), "redo")
    account.step = StepNumber(first + again)
    book(ledger, progress.rank, last_at, "productive")


def finished(ledger: Ledger, rank: Rank, at: Time) -> None:
    """Book a rank whose script has ended: what followed its last step was its finish."""
    account = ledger.accounts[rank]
    _decide_rest(ledger, account)
    book(ledger, rank, at, "finish" if account.cause == "unknown" else None)
    account.cause = "idle"


def _decide_rest(ledger: Ledger, account: Account) -> None:
    """Book steps that will never be compared with usual ones: there were too few of them."""
    progress = account.undecided
    if progress is not None and progress.last_at is not None:
        _decide(ledger, progress, progress.last_at)


def broke(ledger: Ledger, fault_at: Time, now: Time) -> None:
    """Note a fault and when it was noticed; `stopped` books both once all workers are gone."""
    ledger.fault_at, ledger.noticed_at = fault_at, now


def blamed(ledger: Ledger, fault_at: Time) -> None:
    """Note when the fault happened that turned out to be the cause."""
    if ledger.noticed_at is not None:
        ledger.fault_at = min(fault_at, ledger.noticed_at)


def stopped(ledger: Ledger, now: Time) -> None:
    """Book a broken round whose workers are all gone and have reported their progress.

    The step in progress at the fault is lost; then come the time to detect it and to stop the others.
    """
    fault_at, noticed_at = ledger.fault_at or now, ledger.noticed_at or now
    for rank, account in ledger.accounts.items():
        _decide_rest(ledger, account)
        if account.cause == "unknown" and account.step_s is not None:
            book(ledger, rank, Time(min(account.cursor + account.step_s, fault_at)), "redo")
            book(ledger, rank, fault_at, "other")
        book(ledger, rank, fault_at)
        book(ledger, rank, noticed_at, "detect")
        book(ledger, rank, now, "stop")
        account.cause = "rendezvous"
    ledger.fault_at = ledger.noticed_at = None


def requeued(ledger: Ledger, since: Time, now: Time) -> None:
    """Book the time in which the job had no nodes, because its platform had taken them all."""
    broke(ledger, since, since)
    stopped(ledger, since)
    for rank in ledger.accounts:
        book(ledger, rank, now, "wait")
    ledger.waiting_since = None


def seconds_until(ledger: Ledger, now: Time) -> dict[Cause, Seconds]:
    """Return the seconds by cause as if all accounts were closed now."""
    seconds = dict(ledger.seconds)
    for account in ledger.accounts.values():
        if now > account.cursor:
            seconds[account.cause] = seconds.get(account.cause, 0.0) + (now - account.cursor)
    return seconds


def unknown_since(ledger: Ledger, now: Time) -> Time | None:
    """Return since when the causes of all ranks' time are not known; None if they are."""
    open_at = [
        a.cursor for a in ledger.accounts.values() if a.cause == "unknown" and a.cursor < now
    ]
    return min(open_at, default=None)


def rank_seconds(ledger: Ledger, now: Time) -> Seconds:
    """Return the rank-seconds that there are to account for."""
    open_s = sum(max(now, a.cursor) - a.opened_at for a in ledger.accounts.values())
    return ledger.closed_s + open_s


def validate(ledger: Ledger) -> None:
    """Check that nothing is negative, and that the causes add up to the time of all accounts."""
    assert all(s >= 0 for s in ledger.seconds.values()), "negative seconds"
    booked = sum(ledger.seconds.values())
    due = ledger.closed_s + sum(a.cursor - a.opened_at for a in ledger.accounts.values())
    assert abs(booked - due) <= 1e-6 * max(1.0, due), f"booked {booked} s of {due} s"
