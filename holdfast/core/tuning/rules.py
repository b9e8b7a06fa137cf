"""Brings all ranks of a round to change their loaders' settings at the same step, or none.

Ranks step together, but no two are at the same step at the same moment, and none may wait for another
between steps: that other one may wait for it in a collective. So a change has a step, some way ahead,
and whether it takes place there is decided once, by the first rank that comes to it:

    wanted ──▶ survey      every rank is asked at which step it is
           ──▶ proposed    every rank is told of a step ahead of all; each acknowledges, and says by
                           which step it did so
           ──▶ settled     the first rank comes to the step, and all have acknowledged before it: they
                           all change there
           └── cancelled   the first rank comes to the step, or one acknowledges too late: none
                           changes there. It is tried again, further ahead

A rank that has acknowledged before the step is certain to ask when it comes there, and gets the same
answer as all others, whenever that is. The next change begins when all have asked.

Steps are those of the loader in its round. A data set that a rank opens anew counts from 0, so a change
waits until all ranks have opened it equally often. Settings in force are given to each rank when it
opens the data set. They cannot differ between ranks: while one of them has not opened it, nothing
changes.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from holdfast.core.decisions import AnswerRequest, Effect
from holdfast.core.tuning import auto
from holdfast.core.tuning.auto import MicroBatchSearch
from holdfast.core.tuning.state import (
    KEPT_CHANGES,
    LoaderSeat,
    Proposal,
    TunedLoader,
    WantedConfig,
    is_open,
    named,
)
from holdfast.core.view import View
from holdfast.messages.requests import AwaitTuning, TuningNotice
from holdfast.messages.tuning import ChangeOutcome, LoaderConfig, TuningChange
from holdfast.messages.units import Rank, StepNumber, Time

MARGIN_S: Final = 2.0
MARGIN_STEPS: Final = 10
"""How far ahead of all ranks a change is proposed; both double with each try."""
TRIES: Final = 4
TRIAL_S: Final = 300.0
"""An out-of-memory failure within this time of a raise of the micro-batch undoes the raise."""
AUTOMATIC: Final = "automatic"


# ---- what is wanted ------------------------------------------------------------------------------


def want(
    loader: TunedLoader, wanted: WantedConfig, search: bool, job: View, now: Time
) -> list[Effect]:
    """Take a user's change, in place of one that ranks have not heard of."""
    if search:
        loader.search, loader.searched = MicroBatchSearch(), True
        wanted.anyway = True  # The ranks have to hear that they shall measure.
    elif loader.search is not None and not loader.search.over:
        loader.search.over = f"{wanted.by} chose the settings"
    return _want(loader, wanted, job, now)


def _want(loader: TunedLoader, wanted: WantedConfig, job: View, now: Time) -> list[Effect]:
    before, proposal = loader.wanted, loader.proposal
    if before is not None:
        _note(loader, before, "replaced", job, now, why=f"{wanted.by} asked for another change")
        if before.by != AUTOMATIC:
            wanted.config = wanted.config.over(before.config)
    if proposal is not None and proposal.phase != "settled":
        loader.proposal = None
    loader.wanted = wanted
    return pursue(loader, job, now)


def pursue(loader: TunedLoader, job: View, now: Time) -> list[Effect]:
    """Begin with what is wanted, if all ranks have the loader open."""
    wanted = loader.wanted
    if wanted is None or loader.proposal is not None or job.world is None:
        return []
    if wanted.config.over(loader.config) == loader.config and not wanted.anyway:
        _note(loader, wanted, "applied", job, now, why="it was so already")
        loader.wanted = None
        return []
    if not is_open(loader, job):
        return []
    return _propose(loader, None)


# ---- proposals -----------------------------------------------------------------------------------


def _propose(loader: TunedLoader, at_step: StepNumber | None) -> list[Effect]:
    loader.issued += 1
    loader.proposal = Proposal(
        phase="survey" if at_step is None else "proposed",
        number=loader.issued,
        missing=len(loader.seats),
        at_step=at_step,
    )
    for seat in loader.seats.values():
        seat.done = False
    return _retell(loader)


def _retell(loader: TunedLoader) -> list[Effect]:
    """Answer all requests to which there is news."""
    found = (answer(loader, seat) for seat in loader.seats.values())
    return [effect for effects in found for effect in effects]


def answer(loader: TunedLoader, seat: LoaderSeat) -> list[Effect]:
    """Answer a rank that does not know the newest notice."""
    proposal = loader.proposal
    if proposal is None or seat.asker is None or seat.after >= proposal.number:
        return []
    assert loader.wanted is not None, "all ranks know of a change that is settled"
    config = loader.wanted.config.over(loader.config)
    return _tell(
        seat,
        TuningNotice(
            number=proposal.number,
            at_step=proposal.at_step,
            version=loader.version + 1,
            config=config,
            measure=searching(loader),
        ),
    )


def in_force(loader: TunedLoader, number: int) -> TuningNotice:
    """Make the notice for a rank that opens the data set, or that wanted an answer by now."""
    return TuningNotice(
        number=number,
        at_step=StepNumber(0),
        version=loader.version,
        config=loader.config,
        measure=searching(loader),
    )


def _tell(seat: LoaderSeat, notice: TuningNotice) -> list[Effect]:
    assert seat.asker is not None
    asker, seat.asker, seat.until = seat.asker, None, None
    return [AnswerRequest(asker=asker, answer=notice)]


def times_up(loader: TunedLoader, now: Time) -> list[Effect]:
    """Answer the requests that wanted an answer by now."""
    effects: list[Effect] = []
    for seat in loader.seats.values():
        if seat.asker is not None and seat.until is not None and seat.until <= now:
            effects += _tell(seat, in_force(loader, seat.after))
    return effects


def acknowledged(loader: TunedLoader, seat: LoaderSeat, job: View, now: Time) -> list[Effect]:
    """A rank has the newest notice: go on when all have."""
    proposal = loader.proposal
    if proposal is None or proposal.phase == "settled":
        return []
    if seat.done or seat.after != proposal.number:
        return []
    if proposal.at_step is not None and seat.at >= proposal.at_step:
        return cancel(loader, "a rank heard of it too late", job, now)
    seat.done = True
    proposal.missing -= 1
    if proposal.missing == 0 and proposal.phase == "survey":
        assert loader.wanted is not None
        return _propose(loader, _step_ahead(loader, loader.wanted.tries, now))
    return []


def _step_ahead(loader: TunedLoader, tries: int, now: Time) -> StepNumber:
    """Choose a step that no rank comes to before all have heard of it."""
    reached, steps = 0.0, MARGIN_STEPS << tries
    for seat in loader.seats.values():
        since = (now - seat.heard_at) / seat.step_s if seat.step_s else 0.0
        reached = max(reached, seat.at + since)
        if seat.step_s:
            steps = max(steps, ceil(MARGIN_S * (1 << tries) / seat.step_s))
    return StepNumber(int(reached) + steps)


def settle(loader: TunedLoader, rank: Rank, number: int, job: View, now: Time) -> list[Effect]:
    """Decide whether all ranks change where one of them is now; the rest follows from it."""
    proposal, seat = loader.proposal, loader.seats.get(rank)
    if proposal is None or seat is None or number != proposal.number or proposal.phase == "survey":
        return []
    if proposal.phase == "proposed":
        if proposal.missing:
            late = named(rank for rank, seat in loader.seats.items() if not seat.done)
            why = f"rank {rank} came to step {proposal.at_step} before {late} had heard of it"
            return cancel(loader, why, job, now)
        _put_in_force(loader, proposal.at_step, job, now)
        proposal.phase, proposal.missing = "settled", len(loader.seats)
        for one in loader.seats.values():
            one.done = False
    return _asked(loader, seat, job, now)


def _asked(loader: TunedLoader, seat: LoaderSeat, job: View, now: Time) -> list[Effect]:
    """A rank has changed; when all have, the next change may begin."""
    assert loader.proposal is not None
    loader.proposal.missing -= not seat.done
    seat.done = True
    if loader.proposal.missing:
        return []
    loader.proposal = None
    return pursue(loader, job, now)


def is_settled(loader: TunedLoader, number: int) -> bool:
    """Return whether ranks change by that notice."""
    proposal = loader.proposal
    return proposal is not None and proposal.phase == "settled" and proposal.number == number


def cancel(loader: TunedLoader, why: str, job: View, now: Time) -> list[Effect]:
    """Try a change again at a later step, or give it up."""
    assert loader.wanted is not None
    loader.proposal = None
    loader.wanted.tries += 1
    if loader.wanted.tries == TRIES:
        _note(loader, loader.wanted, "given up", job, now, why=f"{why}; {TRIES} tries were made")
        if loader.wanted.by == AUTOMATIC and loader.search is not None:
            loader.search.over = "the ranks could not agree on a step to change at"
        loader.wanted = None
        return []
    return pursue(loader, job, now)


def _put_in_force(loader: TunedLoader, step: StepNumber | None, job: View, now: Time) -> None:
    wanted = loader.wanted
    assert wanted is not None
    before, loader.wanted = loader.config, None
    loader.config = wanted.config.over(before)
    loader.version += 1
    was, now_is = micro_batch(loader, before), micro_batch(loader, loader.config)
    loader.raised_at = now if was is not None and now_is is not None and now_is > was else None
    if loader.raised_at is not None:
        loader.before = before
    _measure_again(loader)
    _note(loader, wanted, "applied", job, now, step=step)


def micro_batch(loader: TunedLoader, config: LoaderConfig) -> int | None:
    """Return the micro-batch of settings, which may be the script's own."""
    own = next((seat.own for seat in loader.seats.values()), LoaderConfig())
    return config.over(own).micro_batch


def _note(
    loader: TunedLoader,
    wanted: WantedConfig,
    outcome: ChangeOutcome,
    job: View,
    now: Time,
    step: StepNumber | None = None,
    why: str = "",
) -> None:
    change = TuningChange(
        version=loader.version,
        config=wanted.config,
        by=wanted.by,
        at=now,
        outcome=outcome,
        round=job.membership.round,
        step=step,
        why=why,
        visit=wanted.visit,
    )
    loader.changes = [*loader.changes, change][-KEPT_CHANGES:]


# ---- ranks come and go ---------------------------------------------------------------------------


def opened(
    loader: TunedLoader, rank: Rank, seat: LoaderSeat, request: AwaitTuning, job: View, now: Time
) -> list[Effect]:
    """Give a rank that opens the data set the settings in force."""
    left(loader, rank)
    loader.seats[rank] = seat
    seat.done = loader.proposal is not None  # It begins with settings that are settled.
    loader.openings[seat.opening] = loader.openings.get(seat.opening, 0) + 1
    loader.unmeasured += 1
    if request.auto and not loader.searched and request.most:
        loader.search, loader.searched = MicroBatchSearch(), True
    return [*_tell(seat, in_force(loader, loader.issued)), *pursue(loader, job, now)]


def left(loader: TunedLoader, rank: Rank) -> None:
    """A rank has ended, or is about to open the data set anew: its steps count no more."""
    seat = loader.seats.pop(rank, None)
    if seat is None:
        return
    loader.openings[seat.opening] -= 1
    if not loader.openings[seat.opening]:
        del loader.openings[seat.opening]
    loader.unmeasured -= seat.measured is None
    proposal = loader.proposal
    if proposal is None:
        return
    if proposal.phase == "settled" and proposal.missing > (not seat.done):
        proposal.missing -= not seat.done
    else:  # It is tried again when all ranks have the loader open.
        loader.proposal = None


def forget_round(loader: TunedLoader) -> None:
    """Forget the loaders of a round; a change that was not settled is tried again."""
    loader.seats.clear()
    loader.openings.clear()
    loader.proposal, loader.unmeasured = None, 0
    if loader.wanted is not None:
        loader.wanted.tries = 0


# ---- the search for a micro-batch ----------------------------------------------------------------


def searching(loader: TunedLoader) -> bool:
    return loader.search is not None and not loader.search.over


def begin_round(loader: TunedLoader, world_size: int) -> None:
    """MicroBatchSearch anew if the world is another one: speeds of two worlds cannot be compared."""
    forget_round(loader)
    if searching(loader) and loader.searched_in != world_size:
        loader.search = MicroBatchSearch()
    loader.searched_in = world_size


def _measure_again(loader: TunedLoader) -> None:
    for seat in loader.seats.values():
        seat.measured = None
    loader.unmeasured = len(loader.seats)


def measured(
    loader: TunedLoader, seat: LoaderSeat, request: AwaitTuning, job: View, now: Time
) -> list[Effect]:
    """Take a rank's measurement; with the last one, choose the next micro-batch."""
    found = request.measured
    if found is None or found.version != loader.version or seat.measured is not None:
        return []
    seat.measured = found
    loader.unmeasured -= 1
    search, size = loader.search, micro_batch(loader, loader.config)
    if loader.unmeasured or search is None or search.over or not is_open(loader, job):
        return []
    if loader.wanted is not None or size is None:
        return []
    loader.raised_at = None  # All ranks have worked with it for a while.
    results = [one.measured for one in loader.seats.values() if one.measured is not None]
    most = min(one.most for one in loader.seats.values())
    choice = auto.judge(search, auto.trial(size, results), most, loader.limit)
    if choice.micro_batch is None:
        return []
    config = LoaderConfig(micro_batch=choice.micro_batch)
    return _want(loader, WantedConfig(config, AUTOMATIC), job, now)


def out_of_memory(loader: TunedLoader, job: View, now: Time) -> None:
    """Undo a raise of the micro-batch if memory ran out soon after it."""
    if loader.raised_at is None or now - loader.raised_at > TRIAL_S:
        return
    assert loader.config.micro_batch is not None, "a raise has a micro-batch"
    loader.limit = min(loader.limit or loader.config.micro_batch, loader.config.micro_batch)
    why = f"memory did not suffice for a micro-batch of {loader.limit}"
    loader.raised_at = None
    loader.config = loader.before
    loader.version += 1
    if loader.search is not None:
        loader.search.over = loader.search.over or why
    if loader.wanted is not None and loader.wanted.by == AUTOMATIC:
        loader.wanted = None
    _note(loader, WantedConfig(loader.before, AUTOMATIC), "applied", job, now, why=why)


# ---- invariants ----------------------------------------------------------------------------------


def validate(loader: TunedLoader, job: View) -> None:
    seats = loader.seats.values()
    counted: dict[int, int] = {}
    for seat in seats:
        counted[seat.opening] = counted.get(seat.opening, 0) + 1
        assert seat.asker is not None or seat.until is None
    assert counted == loader.openings, "miscounted openings"
    assert loader.unmeasured == sum(seat.measured is None for seat in seats)
    proposal = loader.proposal
    if proposal is None:
        return
    assert proposal.number == loader.issued
    assert proposal.missing == sum(not seat.done for seat in seats), "miscounted acknowledgements"
    assert (proposal.at_step is None) == (proposal.phase == "survey")
    if proposal.phase == "settled":
        assert proposal.missing > 0, "a change that all ranks have made is under way"
    else:
        assert loader.wanted is not None, "nobody wants what is proposed"
        assert len(seats) == len(job.ranks), "a proposal without all ranks"
        assert len(loader.openings) == 1
