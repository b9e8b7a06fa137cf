"""What comes of faults that point at a node: see `suspects.rules`.

a round is broken and its workers are gone ──▶ the fault is counted; a node may become a suspect
the next round is frozen ──▶ suspects are withheld if as many nodes can form it without them
it has begun ──▶ an incident says who is a suspect, why, and whether another took its place
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from holdfast.core import faults
from holdfast.core.decisions import NOT_A_MEMBER, Effect, Exclude, Note, Refused, SendAway
from holdfast.core.faults import Fault
from holdfast.core.machine import NONE, Effects, Machine, on
from holdfast.core.states import LIVE, Gathering
from holdfast.core.suspects import evidence, rules
from holdfast.core.suspects.state import MachineName, Strike, Suspect, Suspects
from holdfast.core.view import Candidate, Members, View
from holdfast.messages.events import HealthFound, WorkerExited
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE
from holdfast.messages.records import RankProgress, World
from holdfast.messages.units import NodeId, Rank, Time

LOST = "lost"
"""Under which the losses of nodes in a round are noted."""
GPU_CHECKS = ("gpu-", "nvlink")
REPLACED = "another node has its place; it waits as the last choice"
GONE = "it has left the job"
STAYS = "it stays: no other node can take its place"


class SuspectsMachine(Suspects, Machine):
    @on(HealthFound, *LIVE, refusal="the job is ending")
    def on_health(self, job: View, event: HealthFound, now: Time) -> Effects | Refused:
        """Remember warnings of the GPUs; failures are for the node check, which acts on them."""
        member = job.membership.find(event.node)
        if member is None:
            return NOT_A_MEMBER
        for result in event.results:
            if result.verdict == "warn" and result.check.startswith(GPU_CHECKS):
                machine = self.machines.get(event.node, member.spec.host)
                self.warnings.setdefault(machine, {})[result.check] = result.reason
        return NONE

    # ---- moments ----

    def rank_exited(self, job: View, event: WorkerExited, now: Time) -> Effects:
        if event.code != 0 and not isinstance(job.state, Gathering):
            fault = faults.death(event, job.highest)
            if not fault.wake:
                self._note(fault.signature, event.node)
        return NONE

    def node_lost(self, job: View, node: NodeId, placed: bool, now: Time) -> Effects:
        self._note(LOST, node)
        return NONE

    def _note(self, failure: str, node: NodeId) -> None:
        machine = self.machines.get(node)
        machines = self.struck.setdefault(failure, [])
        if machine is not None and machine not in machines and len(machines) < 2:
            machines.append(machine)

    def round_stopped(self, job: View, fault: Fault, now: Time) -> Effects:
        ranks = [rank for rank, one in job.ranks.items() if one.node == fault.node]
        strike = self._strike(job, fault, ranks)
        if strike is None:
            return NONE
        refuted = rules.take(self, strike, fault.node, ranks)
        return [_clearing(job, one, strike) for one in refuted]

    def _strike(self, job: View, fault: Fault, ranks: Sequence[Rank]) -> Strike | None:
        """Reduce a fault to what it says about a node that had these ranks; None if nothing."""
        sign, machine = evidence.sign_of(fault), self.machines.get(fault.node)
        failure = LOST if fault.kind == "node" else fault.signature
        if sign is None or machine is None or not ranks or len(self.struck.get(failure, ())) > 1:
            return None
        if sign == "script" and machine in self.warnings:
            sign = "crash"
        return Strike(
            machine=machine,
            rank=ranks[0] if fault.rank is None else fault.rank,
            sign=sign,
            signature=fault.signature,
            step=fault.step if job.comparable else None,
            share=len(ranks) / len(job.ranks),
            nodes=len(self.machines),
        )

    def withheld(self, job: View, waiting: Mapping[NodeId, Candidate]) -> Collection[NodeId]:
        """Withhold suspects that the round can be formed without."""
        machines = set(self.all)
        if self.trial is not None:
            machines.add(self.trial.machine)
        if not machines:
            return ()
        found: list[NodeId] = []
        for node, one in waiting.items():
            suspect = node in machines or one.spec.host in machines
            if suspect and _dispensable(job.membership, waiting, [*found, node]):
                found.append(node)
        return found

    def round_began(self, job: View, world: World, now: Time) -> Effects:
        m = job.membership
        self.machines, self.struck = _machines(m), {}
        here = {*m.placed, *(one.spec.host for one in m.placed.values())}
        self._try_elsewhere(here)
        effects: list[Effect] = []
        for machine, one in list(self.all.items()):
            if machine in here:
                effects += self._stays(job, one)
            elif one.state == "named":
                rules.replaced(self, machine)
                effects += self._goes(job, machine, one)
            else:
                one.state = "replaced"
        return effects

    def _goes(self, job: View, machine: MachineName, one: Suspect) -> list[Effect]:
        if one.node not in job.membership.waiting:
            return [_naming(job, one, GONE)]
        if not one.unfit:
            return [_naming(job, one, REPLACED)]
        del self.all[machine]
        return _exclusion(job, one)

    def _stays(self, job: View, one: Suspect) -> list[Effect]:
        if one.state == "replaced":
            one.state = "back"
        alone = job.membership.count() == 1  # Nothing tells its faults from the job's.
        if one.state != "named" or one.told or alone:
            return []
        one.told = True
        return [_naming(job, one, STAYS)]

    def _try_elsewhere(self, here: Collection[MachineName]) -> None:
        trial = self.trial
        if trial is not None:
            trial.away = trial.machine not in here
            self.trial = trial if trial.away else None

    def rank_stepped(self, job: View, progress: RankProgress, first: bool, now: Time) -> Effects:
        trial = self.trial
        if trial is None or not trial.away or job.world is None:
            return NONE
        step = trial.strike.step
        if progress.rank != trial.strike.rank or step is None or progress.step <= step:
            return NONE
        suspect = rules.went_well(self, trial)
        return [] if suspect is None else [_naming(job, suspect, REPLACED)]

    def validate(self, job: View) -> None:
        rules.validate(self)


def _machines(m: Members) -> dict[NodeId, MachineName]:
    """Say under which name the faults of each placed node are counted."""
    members = [*m.placed.values(), *m.busy.values(), *m.waiting.values()]
    nodes = Counter(one.spec.host for one in members)
    return {
        node: one.spec.host if nodes[one.spec.host] == 1 else node for node, one in m.placed.items()
    }


def _dispensable(
    m: Members, waiting: Mapping[NodeId, Candidate], nodes: Collection[NodeId]
) -> bool:
    """Whether the others can form as large a round."""
    others = {node: one for node, one in waiting.items() if node not in nodes}
    return 0 < m.formable(waiting) <= m.formable(others)


# ---- what incidents say ----


def _naming(job: View, one: Suspect, action: str) -> Note:
    return _note(job, one, f"is a suspect: {one.why}", action)


def _clearing(job: View, one: Suspect, strike: Strike) -> Note:
    found = (
        f"is no suspect any more: without it, rank {strike.rank} failed in the same way"
        f" ({strike.signature})"
    )
    return _note(job, one, found, "it gets a place like any other node")


def _note(job: View, one: Suspect, signature: str, action: str) -> Note:
    return Note(
        kind="suspect",
        node=one.node,
        round=job.membership.round,
        step=job.highest,
        signature=signature,
        action=action,
    )


def _exclusion(job: View, one: Suspect) -> list[Effect]:
    """Send a node away whose place another has."""
    why = f"{one.why}; {one.unfit}"
    action = "another node has its place; its host is excluded"
    note = _note(job, one, f"is at fault: {why}", action)
    away = SendAway(node=one.node, kind="exclude", code=EXIT_DO_NOT_REQUEUE, why=f"suspect: {why}")
    return [note, Exclude(node=one.node, why=why), away]
