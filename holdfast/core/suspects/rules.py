"""When faults make a node a suspect, what is done about it, and what clears it.

Only faults of the newest WINDOW are looked at (`evidence` says which count, and for how much):

1. At least FEWEST crashes struck the machine, and chance would do that in CRASH_CHANCE of all cases at
   most; or at least FEWEST faults of any sign, and FAULT_CHANCE. Then it is a suspect. So many faults
   that takes if all of them strike one machine:

       nodes of equal size     1 or 2   3   4   5   8   16 and more
       crashes                   7      5   4   4   3   3
       other faults              9      6   5   5   4   3

2. A suspect is the last choice for a place: the next round is formed without it if as many nodes can
   form it, else with it. It is not sent away. A round that runs is never broken for that. One that
   could not be replaced is no suspect any more when so many faults have struck others meanwhile that
   chance would do the same in LAPSE_CHANCE of all cases.
3. The same failure at the same step REPEATS times in a row on one machine is tried on another, if one
   waits: once more would end the job. If it fails there too, the failure is the script's. If the step
   then goes well, the machine is a suspect, but only after crashes: what made a script raise may have
   passed by itself meanwhile (a file server that was away), so that blames nobody, and is not tried
   again.
4. If a failure that made a node a suspect strikes the ranks that it had, on another node, it follows
   the ranks and not the node: the suspect is cleared, and that failure in those ranks never counts
   again.
5. A machine's host is excluded only with proof, and only when another node has taken its place: if it
   is a suspect and a health check that no script can upset warned of it (HARDWARE); or if it was
   replaced, got a place again because it was needed, and is a suspect once more by faults that struck
   it since, in other ranks than before.

A bug of the script that always strikes the same ranks can thus cost their node its place once, never
more: rule 4 finds out. Faults that strike nodes at random make a suspect of one now and then (once in
more than 200 crashes, or 500 other faults); what that costs is that a spare gets the next place first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from holdfast.core.suspects import evidence
from holdfast.core.suspects.state import Followed, MachineName, NodeTrial, Strike, Suspect, Suspects
from holdfast.messages.units import NodeId, Rank

WINDOW = 30
FEWEST = 3
CRASH_CHANCE = 0.02
FAULT_CHANCE = 0.005
LAPSE_CHANCE = 0.2
REPEATS = 2
HARDWARE = ("gpu-ecc", "gpu-recovery", "nvlink")
"""Health checks whose warnings no script can cause; a program can cause an Xid."""
CAME_BACK = "the faults came back with it, in other ranks"


class Case(Struct, frozen=True):
    """What speaks against a machine."""

    hits: list[Strike]
    total: int
    """Faults that could have struck it."""
    chance: float

    def __str__(self) -> str:
        crashes = all(one.sign == "crash" for one in self.hits)
        told = f"{len(self.hits)} of the last {self.total} {'crashes' if crashes else 'faults'}"
        told += f" struck it ({_told(self.hits)})"
        if self.hits[-1].nodes == 1:
            return f"{told}, and there is no other node to compare it with"
        return f"{told}, by chance less than once in {int(1 / self.chance)} such jobs"


def _told(hits: Sequence[Strike]) -> str:
    """Name the commonest failure, and the ranks."""
    commonest = Counter(one.signature for one in hits).most_common()
    more = f" and {len(commonest) - 1} other failures" if len(commonest) > 1 else ""
    ranks = sorted({one.rank for one in hits})
    named = ", ".join(str(rank) for rank in ranks[:8])
    return f"{commonest[0][0]}{more}, rank{'s' if len(ranks) > 1 else ''} {named}"


def case_against(
    s: Suspects,
    machine: MachineName,
    crashes_by: float = CRASH_CHANCE,
    faults_by: float = FAULT_CHANCE,
) -> Case | None:
    """Return what makes a machine a suspect, if chance is as unlikely; None if it is none."""
    crashes = [one for one in s.strikes if one.sign == "crash"]
    for among, bound in ((crashes, crashes_by), (s.strikes, faults_by)):
        hits = evidence.hits(among, machine)
        if len(hits) < FEWEST:
            continue
        chance = evidence.chance(hits, len(among))
        if chance <= bound:
            return Case(hits, len(among), chance)
    return None


def take(s: Suspects, strike: Strike, node: NodeId, ranks: list[Rank]) -> list[Suspect]:
    """Take in a fault that struck a node with these ranks; the suspects that it clears."""
    if any(strike.signature == one.signature and strike.rank in one.ranks for one in s.followed):
        return []
    tried, s.trial = s.trial, None
    if tried is not None and tried.away and _is_same(tried.strike, strike):
        _follow(s, Followed(strike.signature, tuple(tried.ranks)))
        return []
    refuted = [m for m, one in s.all.items() if m != strike.machine and _refutes(strike, one)]
    if refuted:
        return [_clear(s, machine, strike.signature) for machine in refuted]
    s.strikes = [*s.strikes, strike][-WINDOW:]
    for machine, one in list(s.all.items()):
        if one.state == "named" and not case_against(s, machine, LAPSE_CHANCE, LAPSE_CHANCE):
            del s.all[machine]
    case = case_against(s, strike.machine)
    if case is not None:
        _accuse(s, strike.machine, node, ranks, case)
    elif strike.machine not in s.all and _is_repeated(s.strikes):
        s.trial = NodeTrial(machine=strike.machine, node=node, strike=strike, ranks=ranks)
    return []


def _is_same(one: Strike, other: Strike) -> bool:
    return (one.rank, one.signature, one.step) == (other.rank, other.signature, other.step)


def _is_repeated(strikes: Sequence[Strike]) -> bool:
    """Whether the newest failures are one and the same, on one machine and at one step."""
    newest = strikes[-REPEATS:]
    same = all(_is_same(one, newest[0]) and one.machine == newest[0].machine for one in newest)
    countable = newest[0].step is not None and newest[0].sign != "outside"
    return len(newest) == REPEATS and same and countable


def _refutes(strike: Strike, suspect: Suspect) -> bool:
    """Whether a failure on another machine follows the ranks that a suspect had."""
    replaced = suspect.state != "named"
    return replaced and strike.rank in suspect.ranks and strike.signature in suspect.signatures


def _clear(s: Suspects, machine: MachineName, signature: str) -> Suspect:
    cleared = s.all.pop(machine)
    _follow(s, Followed(signature, tuple(cleared.ranks)))
    return cleared


def _follow(s: Suspects, failure: Followed) -> None:
    s.followed.append(failure)
    s.strikes = [
        one
        for one in s.strikes
        if one.signature != failure.signature or one.rank not in failure.ranks
    ]


def _accuse(s: Suspects, machine: MachineName, node: NodeId, ranks: list[Rank], case: Case) -> None:
    known = s.all.get(machine)
    warnings = s.warnings.get(machine, {})
    why = "; ".join([str(case), *(f"{check}: {said}" for check, said in warnings.items())])
    proof = next((f"{check}: {warnings[check]}" for check in HARDWARE if check in warnings), "")
    if known is not None:
        elsewhere = {one.rank for one in case.hits}.isdisjoint(known.ranks)
        came_back = CAME_BACK if known.state == "back" and elsewhere else ""
        proof = proof or known.unfit or came_back
    s.all[machine] = Suspect(
        node=node,
        why=why,
        ranks=ranks,
        signatures=sorted({one.signature for one in case.hits}),
        told=known is not None and known.told and known.state == "named",
        unfit=proof if machine != node else "",
    )


def replaced(s: Suspects, machine: MachineName) -> None:
    """Note that a round has begun without a suspect: only faults from now on count once more."""
    s.all[machine].state = "replaced"
    s.strikes = [one for one in s.strikes if one.machine != machine]


def went_well(s: Suspects, trial: NodeTrial) -> Suspect | None:
    """Note that a step went well on another node; the suspect, if a crash was the machine's."""
    s.trial = None
    strike = trial.strike
    if strike.sign != "crash":
        _follow(s, Followed(strike.signature, tuple(trial.ranks)))
        return None
    where = f"before the first step of rank {strike.rank}"
    if strike.step:
        where = f"at step {strike.step} of rank {strike.rank}"
    suspect = Suspect(
        node=trial.node,
        why=f"{strike.signature} {where} {REPEATS} times in a row, and not on another node",
        ranks=trial.ranks,
        signatures=[strike.signature],
    )
    s.all[trial.machine] = suspect
    replaced(s, trial.machine)
    return suspect


def validate(s: Suspects) -> None:
    assert len(s.strikes) <= WINDOW, "more faults than the window holds"
    assert s.trial is None or s.trial.machine not in s.all, "a suspect is on trial"
    assert all(len(machines) <= 2 for machines in s.struck.values())
