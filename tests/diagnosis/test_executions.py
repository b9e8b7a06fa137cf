"""Nothing that is seen of a healthy execution proves a hang, whenever each of its ranks is seen; and
every hang of a kind that can be proven is, once all that take part are in it."""

from __future__ import annotations

import math
from random import Random

from executions import Call, Execution, PairCall
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diagnosis.verdict import judge
from holdfast.messages.evidence import Verdict
from holdfast.messages.units import Rank

OPS = ["all_reduce", "barrier", "all_gather", "broadcast", "reduce", "all_to_all"]
WORK_S = [0.0, 0.01, 0.3, 2.0, 40.0]
LAG_S = [0.0, 0.001, 0.2, 3.0]
SOON_S = [0.0, 0.3, 2.0]
SIZES = [(3,), (2, 2), (50,)]


def execution(chance: Random) -> Execution:
    """Return a program's execution: groups, operations and durations by chance."""
    size = chance.randint(2, 5)
    groups = {
        str(name): tuple(sorted(chance.sample(range(size), chance.randint(2, size))))
        for name in range(1, chance.randint(1, 3))
    }
    run = Execution(groups, size, ring=chance.choice([3, 2000]))
    for _ in range(chance.randint(1, 2)):
        run_some(run, chance)
        run.end_world(lambda: chance.choice(WORK_S))
    run.end(lambda: chance.choice(WORK_S))
    return run


def run_some(run: Execution, chance: Random) -> None:
    """Create the groups and call some operations on them."""
    run.begin_world(chance.random() < 0.5, lambda: chance.choice(WORK_S))
    posted: list[tuple[int, PairCall]] = []
    for _ in range(chance.randint(0, 8)):
        if chance.random() < 0.5:
            run_pair(run, chance, posted)
            continue
        call = Call(
            group=chance.choice(sorted(run.groups)),
            op=chance.choice(OPS),
            waits=chance.random() < 0.5,
            root=chance.randint(0, 4),
            sizes=chance.choice(SIZES),
        )
        run.run(call, lambda: chance.choice(WORK_S), lambda: chance.choice(LAG_S))


def run_pair(run: Execution, chance: Random, posted: list[tuple[int, PairCall]]) -> None:
    """Have two ranks exchange something, or wait for what has been called and has its other end.

    Both ends are called here or wait for later steps; a rank waits at once, later, or never.
    """

    def work_s() -> float:
        return chance.choice(WORK_S)

    group = chance.choice(sorted(run.groups))
    source, target = chance.sample(run.groups[group], 2)
    ends = [(source, "send", target), (target, "recv", source)]
    chance.shuffle(ends)
    for number, op, peer in ends[: chance.choice([1, 2, 2])]:
        posted.append((number, run.call_pair(number, op, group, peer, work_s)))
    ready = [one for one in posted if run.can_meet(*one)]
    chance.shuffle(ready)
    for number, call in ready[: chance.randint(0, len(ready))]:
        posted.remove((number, call))
        run.await_pair(number, call, lambda: chance.choice(LAG_S))


def moments(run: Execution, chance: Random) -> list[float]:
    """Return when each rank is seen: at any time, or around one at which something happens."""
    end = max(one.gone for one in run.ranks) + 1.0
    edges = [t for one in run.ranks for s in one.stays for t in (s.entered, s.finished)]
    edges += [t for one in run.ranks for w in one.pair_waits for t in (w.began, w.until)]
    edges += [t for one in run.ranks for t in (*one.worlds, *one.destroyed, one.ended, one.gone)]
    common = chance.choice(edges) + chance.choice([0.0005, 0.6, 5.0])
    choices = [
        lambda: chance.uniform(0, end),
        lambda: chance.choice(edges) + chance.choice([0.0005, 0.6]),
        lambda: common + chance.choice([0.0, 0.0, 0.1, 0.4]),
    ]
    return [chance.choice(choices)() for _ in run.ranks]


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_no_proof_is_drawn_from_a_healthy_execution(seed: int) -> None:
    chance = Random(seed)
    run = execution(chance)
    at = moments(run, chance)
    finished = [Rank(one.rank) for one in run.ranks if one.gone <= min(at)]
    evidence = [run.seen(r, at[r]) for r in range(len(run.ranks)) if chance.random() < 0.9]
    verdict = judge(evidence, len(run.ranks), finished)
    assert verdict.proof is None, verdict.sentence


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_no_circle_is_drawn_from_ranks_that_exchange_something(seed: int) -> None:
    """Each looks as if it waited for the other: when another moment is seen of it, or its network is
    slow."""
    chance = Random(seed)
    size = chance.randint(2, 3)
    run = Execution({}, size)
    run.begin_world(True, lambda: 0.0)
    for _ in range(chance.randint(2, 6)):
        source, target = chance.sample(range(size), 2)
        ends = [(source, "send", target), (target, "recv", source)]
        if chance.random() < 0.3:
            ends += [(target, "send", source), (source, "recv", target)]
        calls = [
            (end[0], run.call_pair(end[0], end[1], "0", end[2], lambda: chance.choice(SOON_S)))
            for end in ends
        ]
        for one in calls:
            run.await_pair(*one, lambda: chance.choice([0.001, 3.0]))
    run.end(lambda: chance.choice(SOON_S))
    at = moments(run, chance)
    verdict = judge([run.seen(r, at[r]) for r in range(size)], size)
    assert verdict.proof is None, verdict.sentence


# ---- true hangs ----


def prefix(chance: Random, groups: dict[str, tuple[int, ...]], size: int) -> Execution:
    run = Execution(groups, size)
    run_some(run, chance)
    return run


def seen_late(run: Execution, chance: Random) -> Verdict:
    """Judge on looks at different moments, all of them after the hang."""
    times = [t for one in run.ranks for s in one.stays for t in (s.entered, s.finished)]
    times += [t for one in run.ranks for w in one.pair_waits for t in (w.began, w.until)]
    times += [one.gone for one in run.ranks]
    at = max((t for t in times if t < math.inf), default=0.0) + 1.0
    evidence = [run.seen(r, at + chance.choice([0, 0.3, 9])) for r in range(len(run.ranks))]
    return judge(evidence, len(run.ranks))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_a_rank_that_calls_another_operation_is_found(seed: int) -> None:
    chance = Random(seed)
    size = chance.randint(3, 5)
    run = prefix(chance, {"1": (0, 1)}, size)
    odd = chance.randrange(size)
    op, other = chance.sample(["all_reduce", "barrier", "all_gather", "broadcast"], 2)
    calls = {r: Call("0", other if r == odd else op) for r in range(size)}
    if chance.random() < 0.3:
        calls = {r: Call("0", sizes=(9,) if r == odd else (3, 2)) for r in range(size)}
    run.stick(calls, lambda: chance.choice(SOON_S))
    verdict = seen_late(run, chance)
    assert (verdict.proof, verdict.guilty) == ("mismatch", (odd,)), verdict.sentence


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_a_rank_that_ends_while_others_wait_for_it_is_found(seed: int) -> None:
    chance = Random(seed)
    size = chance.randint(2, 5)
    run = prefix(chance, {"1": (0, 1)}, size)
    gone = chance.randrange(size)
    call = Call("0", chance.choice(["all_reduce", "barrier", "all_gather"]))
    run.leave(gone, lambda: chance.choice(SOON_S))
    run.stick({r: call for r in range(size) if r != gone}, lambda: chance.choice(SOON_S))
    verdict = seen_late(run, chance)
    assert (verdict.proof, verdict.guilty) == ("left", (gone,)), verdict.sentence
    assert set(verdict.waiting) == set(range(size)) - {gone}


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_ranks_that_wait_for_each_other_in_a_circle_are_found(seed: int) -> None:
    chance = Random(seed)
    size = chance.randint(2, 5)
    groups = {str(r + 1): tuple(sorted({r, (r + 1) % size})) for r in range(size)}
    if size == 2:
        groups = {"1": (0, 1), "2": (0, 1)}
    run = prefix(chance, groups, size)
    # Each waits for the next in the group that it shares with it.
    run.stick({r: Call(str(r + 1)) for r in range(size)}, lambda: chance.choice(SOON_S))
    verdict = seen_late(run, chance)
    assert (verdict.proof, verdict.guilty) == ("circle", ()), verdict.sentence
    assert set(verdict.waiting) == set(range(size))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_ranks_that_receive_or_send_in_a_circle_are_found(seed: int) -> None:
    chance = Random(seed)
    size = chance.randint(2, 5)
    groups = {"1": tuple(sorted(chance.sample(range(size), size)))}
    run = prefix(chance, groups, size)
    order = chance.sample(range(size), size)
    one_kind = chance.choice(["recv", "send"])
    calls = {}
    for at, number in enumerate(order):
        # A recv and the send that it waits for would meet.
        op = one_kind if size == 2 else chance.choice(["recv", "send"])
        group, peer = chance.choice(["0", "1"]), order[(at + 1) % size]
        calls[number] = run.call_pair(number, op, group, peer, lambda: chance.choice(SOON_S))
    hangs = {number: call for number, call in calls.items() if not run.can_meet(number, call)}
    if len(hangs) < size:
        return  # The program had sent before what is received now, or had asked for it.
    if size > 2 and chance.random() < 0.3:
        run.stick({order[0]: Call("0")}, lambda: chance.choice(SOON_S))
        del hangs[order[0]]
    for number, call in hangs.items():
        run.await_pair(number, call, lambda: 0.0)
    verdict = seen_late(run, chance)
    assert (verdict.proof, verdict.guilty) == ("circle", ()), verdict.sentence
    assert set(verdict.waiting) == set(range(size))
