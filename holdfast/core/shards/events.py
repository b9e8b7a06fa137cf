"""What ranks and agents say about data sets, and what they are told.

`opening` decides whether ranks may use a data set, `lending` who is lent what, `history` keeps what was
used. Here that meets the rest of the job: rounds, nodes, open requests, incidents and the end.

Nothing is lent while no round is in force. Leases return when the next round begins: until then the
last words of a broken round still count, and cannot do harm.
"""

from __future__ import annotations

from typing import Literal

from holdfast.core.decisions import AnswerRequest, Asker, Effect, EndJob, Note, Refused
from holdfast.core.faults import Fault
from holdfast.core.machine import NONE, Effects, Machine, on
from holdfast.core.shards import history, lending, opening
from holdfast.core.shards.state import MOST_SKIPPED, DataSet, Opening, Shards, named
from holdfast.core.states import ALWAYS, Running
from holdfast.core.view import View
from holdfast.messages.actions import LendShards
from holdfast.messages.data import ShardFailure, Span, UsedBy
from holdfast.messages.events import Asked, NodeResumed, ShardsReported, WorkerExited
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE
from holdfast.messages.records import JobResult, World
from holdfast.messages.requests import DataOpened, Denied, OpenData
from holdfast.messages.spans import SpanSet
from holdfast.messages.units import NodeId, Time

OTHER_ROUND = Refused(reason="the shards are of another round")
NOT_IN_ROUND = Refused(reason="the node is not in the round")
NOT_OPENED = Refused(reason="no rank has opened the data set in this round")
NOTHING_FITS = Refused(reason="none of the shards is lent to the node")


class ShardsMachine(Shards, Machine):
    # ---- events ----

    @on(ShardsReported, *ALWAYS)
    def on_reported(self, job: View, event: ShardsReported, now: Time) -> Effects | Refused:
        """Take in what became of shards, and lend more."""
        if event.round != job.membership.round:
            return OTHER_ROUND
        member = job.membership.find(event.node)
        if member is None or member.round != event.round:
            return NOT_IN_ROUND
        data = self.sets.get(event.dataset)
        if data is None or data.round != event.round:
            return NOT_OPENED
        data.heard[event.node] = max(event.number, data.heard.get(event.node, 0))
        if data.spec.sharing == "lockstep":
            return self._in_lockstep(data, event)
        return self._of_leases(job, data, event)

    def _in_lockstep(self, data: DataSet, event: ShardsReported) -> Effects:
        for one in event.used:
            history.note_stretch(data.history, one.used)
            _count(data, one)
        if event.used and data.spec.size is not None:
            newest = max(one.used.span.line for one in event.used)
            history.fold(data.history, newest, data.spec.size)
        return NONE

    def _of_leases(self, job: View, data: DataSet, event: ShardsReported) -> Effects | Refused:
        misfits = data.misfits
        for one in event.used:
            _use(data, event.node, one)
        for span in event.returned:
            lending.give_back(data, event.node, span)
        effects: list[Effect] = []
        for failure in event.failed:
            found = lending.fail(data, event.node, failure.span)
            for part in found.given_up:
                effects.append(_give_up(job, data, event.node, failure, part, found.times))
        spans = [*(one.used.span for one in event.used), *(one.span for one in event.failed)]
        told = sum(span.stop - span.start for span in (*spans, *event.returned))
        if event.want and job.world is not None:
            data.wants.pop(event.node, None)
            data.wants[event.node] = event.want
        elif told and told == data.misfits - misfits:
            return NOTHING_FITS
        return [*effects, *_lend(job, data)]

    # ---- moments ----

    def request_held(self, job: View, asker: Asker, event: Asked, now: Time) -> Effects:
        """A script wants to use a data set."""
        request = event.request
        if not isinstance(request, OpenData):
            return NONE
        data = opening.register(self, request.spec)
        if isinstance(data, str):
            return [_denied(asker, data)]
        known = data.opening if data.round == event.round else Opening()
        repeats = known.rank is not None and request.used == known.given  # As a thousand ranks do.
        used = SpanSet() if repeats else opening.restored(data, request)
        if isinstance(used, str):
            return [_denied(asker, used)]
        wrong = opening.contradiction(known, event.rank, request) if data.is_coupled else ""
        if wrong:
            return [_denied(asker, wrong)]
        if data.round != event.round:
            _renew(data)
            data.round = event.round
        data.nodes[event.node] = None
        if data.spec.sharing == "leases" and data.spec.exact and request.resumed == "part":
            data.opening.parts[event.rank] = asker
        elif data.opening.rank is None:
            _decide(data, event, request, used)
        return [*_answers(job, data, asker), *_lend(job, data)]

    def rank_exited(self, job: View, event: WorkerExited, now: Time) -> Effects:
        """A rank ended with 0: nobody waits for what it might have restored."""
        if event.code != 0 or not isinstance(job.state, Running):
            return NONE
        return [effect for data in self.sets.values() for effect in _without_whole(job, data)]

    def round_began(self, job: View, world: World, now: Time) -> Effects:
        for data in self.sets.values():
            _renew(data)
        return NONE

    def round_ended(self, job: View, fault: Fault, now: Time) -> Effects:
        self._stop_lending()
        return NONE

    def job_ended(self, job: View, result: JobResult, secure: bool, now: Time) -> Effects:
        self._stop_lending()
        return NONE

    def _stop_lending(self) -> None:
        for data in self.sets.values():
            data.wants.clear()
            data.opening.parts.clear()

    def node_lost(self, job: View, node: NodeId, placed: bool, now: Time) -> Effects:
        for data in self.sets.values():
            lending.leave(data, node)
        return NONE

    def node_sent_away(self, job: View, node: NodeId, now: Time) -> Effects:
        return self.node_lost(job, node, False, now)

    def node_resumed(self, job: View, event: NodeResumed, now: Time) -> Effects:
        """Say again what is lent to a node, and what is finished."""
        if job.world is None or event.round != job.world.round:
            return NONE
        effects = []
        for data in self.sets.values():
            if data.round == job.world.round and data.spec.sharing == "leases":
                spans = lending.lent(data, event.node)
                finished = data.told and event.node in data.nodes
                if spans or finished:
                    effects.append(_order(data, event.node, spans, finished))
        return effects

    def validate(self, job: View) -> None:
        for data in self.sets.values():
            lending.validate(data)
            assert job.world is not None or not data.wants, "a node waits without a round"
            gone = [node for node in data.leases if not job.membership.has(node)]
            assert not gone, f"shards are lent to {gone}, which are not members"
            if data.told:
                assert lending.is_finished(data), "nodes were told too early that it is finished"


# ---- opening -------------------------------------------------------------------------------------


def _renew(data: DataSet) -> None:
    """Prepare for another round: nothing is lent, and what was used is not known if that depends on
    what the ranks restore."""
    for node in list(data.leases):
        lending.leave(data, node)
    data.opening, data.told = Opening(), False
    data.wants, data.heard, data.nodes, data.by_rank = {}, {}, {}, {}
    if data.is_coupled:
        data.is_open = False


def _decide(data: DataSet, event: Asked, request: OpenData, used: SpanSet) -> None:
    """Go on with what a rank restored; or, where that does not matter, with what is known."""
    step, size = request.step, data.spec.size
    if not data.is_coupled:
        history.begin(data.history, event.round, step)
        if not data.is_open:
            lending.start(data, used)  # Of an earlier job, if a rank has restored that.
    else:
        skipped = SpanSet.of(one.span for one in data.skipped)
        history.resume(data.history, event.round, step, used, skipped, size)
        used.update(skipped)
        lending.start(data, used)
    resumed: Literal["fresh", "whole"] = "fresh" if request.resumed == "fresh" else "whole"
    packed = request.used if data.spec.sharing == "lockstep" else data.used.pack()
    data.opening = Opening(event.rank, resumed, request.used, packed, data.opening.parts)


def _answers(job: View, data: DataSet, asker: Asker) -> list[Effect]:
    """Answer a rank, and those that waited for the whole state, once it is known."""
    if data.opening.rank is None:
        return _without_whole(job, data)
    waiting, data.opening.parts = list(data.opening.parts.values()), {}
    answer = DataOpened(used=data.opening.used)
    return [AnswerRequest(asker=one, answer=answer) for one in dict.fromkeys([*waiting, asker])]


def _without_whole(job: View, data: DataSet) -> list[Effect]:
    """Deny all ranks that wait for the whole state if none is left that could bring it."""
    parts = data.opening.parts
    if not parts or len(parts) < job.unfinished:
        return []
    why = (
        f"data set {data.spec.name!r}: every rank has restored its own part, and none the state of"
        " all ranks; rank 0 has to restore the parts of all of them"
    )
    data.opening.parts = {}
    return [_denied(asker, why) for asker in parts.values()]


def _denied(asker: Asker, why: str) -> AnswerRequest:
    return AnswerRequest(asker=asker, answer=Denied(reason="data set", detail=why))


# ---- lending -------------------------------------------------------------------------------------


def _lend(job: View, data: DataSet) -> list[Effect]:
    """Lend to all nodes that wait, as far as there is something; tell them when all is used."""
    if job.world is None or not data.is_open or data.spec.sharing == "lockstep":
        return []
    effects: list[Effect] = []
    nodes = len(job.world.places)
    for node, want in list(data.wants.items()):
        spans = lending.lend(data, node, want, nodes)
        if spans:
            del data.wants[node]
            effects.append(_order(data, node, tuple(spans)))
        elif data.spec.size is not None:
            break
    if lending.is_finished(data):
        told = dict.fromkeys(data.wants) if data.told else {**data.nodes, **data.wants}
        data.told = True
        data.wants.clear()
        effects += [_order(data, node, (), finished=True) for node in told]
    return effects


def _order(
    data: DataSet, node: NodeId, spans: tuple[Span, ...], finished: bool = False
) -> LendShards:
    return LendShards(
        node=node,
        round=data.round,
        dataset=data.spec.name,
        spans=spans,
        heard=data.heard.get(node, 0),
        finished=finished,
    )


def _use(data: DataSet, node: NodeId, one: UsedBy) -> None:
    parts = lending.use(data, node, one.used.span)
    for part in parts:
        history.note_span(data.history, part, one.used.first_step, one.used.last_step)
    if parts:
        _count(data, one)
        if data.spec.size is not None:
            history.fold(data.history, data.used.below, data.spec.size)


def _count(data: DataSet, one: UsedBy) -> None:
    data.by_rank[one.rank] = data.by_rank.get(one.rank, 0) + one.used.records


def _give_up(
    job: View, data: DataSet, node: NodeId, failure: ShardFailure, part: Span, times: int
) -> Effect:
    """Leave out a shard that failed too often, or end the job over it."""
    what = f"{named(data.spec, part)} of data set {data.spec.name!r} failed {times} times"
    if not data.spec.skip or len(data.skipped) >= MOST_SKIPPED:
        lending.put_back(data, part)
        last = failure.error.strip().rpartition("\n")[2]
        reason = f"{what}, the last time on rank {failure.rank}: {last}"
        return EndJob(code=EXIT_DO_NOT_REQUEUE, reason=reason)
    lending.skip(data, part, failure.error, data.round)
    return Note(
        kind="data",
        node=node,
        rank=failure.rank,
        round=data.round,
        step=job.highest,
        signature=what,
        detail=failure.error,
        action="they are left out; training goes on",
    )
