"""In any world with one guilty rank, however little of it can be seen, no healthy one is blamed.

A world is made as it would be: every healthy rank waits, in the front of one of its groups, and its
evidence is drawn from all that such a rank may look like. One rank is guilty in one of many ways.
Then parts of the evidence are taken away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from test_verdict import (
    ASLEEP,
    IN_ALL_REDUCE,
    IN_BACKWARD,
    IN_ITEM,
    IN_ITEM_UNSEEN,
    IN_KERNEL,
    IN_REDUCER,
    call,
    frame,
    noted,
    rank,
)

from holdfast.core.hangs.deadlines import OLD_BEAT_S
from holdfast.diagnosis.verdict import judge
from holdfast.messages.evidence import (
    Collective,
    Frame,
    ProcessState,
    RankEvidence,
    StackSource,
    ThreadStack,
    Verdict,
)
from holdfast.messages.units import NodeId, Rank, RoundNumber

WAITING = [IN_ALL_REDUCE, IN_REDUCER, IN_BACKWARD, IN_ITEM, IN_ITEM_UNSEEN, ()]
READING = (call("read"), frame("load_batch", "/home/me/loader.py"), frame("step"))
KINDS = ["stopped", "dead", "stuck", "gil", "asleep", "reading", "computing", "mismatch"]


@dataclass(frozen=True)
class World:
    size: int
    guilty: int
    kind: str
    pairs: bool
    """Whether the ranks are also in groups of two, and some wait in those."""
    evidence: list[RankEvidence]


def log_of(each: int, behind: bool, pairs: bool, in_pair: bool, number: int) -> Any:
    """A rank's log: it waits in the world's front, or in its pair's, or is behind in both."""
    of_world = [] if behind or in_pair else [noted(number)]
    past = [noted(n, "completed") for n in range(number - 1, max(0, number - 4), -1)]
    pair: dict[str, Any] = {
        "group": f"pair-{each // 2}",
        "ranks": (each - each % 2, each - each % 2 + 1),
    }
    of_pair = [noted(7, **pair)] if in_pair else []
    past_of_pair = [noted(6, "completed", **pair)] if pairs else []
    return (*of_world, *of_pair, *past, *past_of_pair)


@st.composite
def worlds(draw: st.DrawFn, complete: bool = False) -> World:
    size = draw(st.integers(2, 5)) * 2
    guilty = draw(st.integers(0, size - 1))
    kind = draw(st.sampled_from(KINDS))
    pairs = kind != "mismatch" and draw(st.booleans())
    number = draw(st.integers(1, 1000))
    found = []
    for each in range(size):
        if each == guilty:
            found.append(guilty_rank(draw, each, kind, pairs, number))
        else:
            # Only the guilty rank's partner can wait in its pair: the others' pairs would go on.
            in_pair = pairs and each // 2 == guilty // 2 and draw(st.booleans())
            found.append(healthy_rank(draw, each, pairs, in_pair, number))
    if not complete:
        found = [faded(draw, each) for each in found if draw(st.integers(0, 9))]
    return World(size, guilty, kind, pairs, found)


def healthy_rank(
    draw: st.DrawFn, each: int, pairs: bool, in_pair: bool, number: int
) -> RankEvidence:
    stack = draw(st.sampled_from(WAITING))
    # A rank that waits is seen in the kernel now and then, and its beat may be late by a little.
    state = draw(st.sampled_from("SSSR"))
    return rank(
        each,
        stack,
        collectives=log_of(each, False, pairs, in_pair, number),
        process_state=state,
        beat_age_s=draw(st.sampled_from([None, 0.1, 1.2])),
    )


def guilty_rank(draw: st.DrawFn, each: int, kind: str, pairs: bool, number: int) -> RankEvidence:
    log: Any = log_of(each, True, pairs, False, number)
    cannot_dump = kind in ("stopped", "dead", "gil")
    more: dict[str, Any] = {"collectives": None if cannot_dump else log}
    if kind == "mismatch":
        more["collectives"] = (noted(number, op="gloo:barrier"), *log)
    stack = {
        "asleep": ASLEEP,
        "reading": READING,
        "computing": IN_KERNEL,
        "mismatch": IN_ALL_REDUCE,
        "stuck": READING,
    }.get(kind, draw(st.sampled_from([ASLEEP, IN_KERNEL])))
    states = {"stopped": "T", "dead": "X", "stuck": "D", "computing": "R"}
    more["process_state"] = states.get(kind, "S")
    more["beat_age_s"] = OLD_BEAT_S if kind in ("gil", "stopped") else 0.1
    return rank(each, stack if kind != "dead" else (), holds_gil=kind == "gil", **more)


def faded(draw: st.DrawFn, each: RankEvidence) -> RankEvidence:
    """The same rank, less well seen."""
    changes: dict[str, Any] = {}
    if draw(st.integers(0, 4)) == 0:
        changes["collectives"] = None
    if draw(st.integers(0, 4)) == 0:
        changes |= {"stacks": (), "stack_source": "none"}
    if draw(st.integers(0, 9)) == 0:
        changes["process_state"] = "?"
    return msgspec.structs.replace(each, **changes)


@given(world=worlds())
def test_nobody_healthy_is_ever_blamed(world: World) -> None:
    verdict = judge(world.evidence, world.size)
    assert set(verdict.guilty) <= {world.guilty}, verdict.sentence


@given(world=worlds(complete=True))
def test_who_can_be_seen_is_found(world: World) -> None:
    verdict = judge(world.evidence, world.size)
    assert verdict.guilty == (world.guilty,), verdict.sentence
    assert f"rank {world.guilty} on" in verdict.sentence


@given(world=worlds(complete=True))
def test_when_the_guilty_one_is_gone_from_sight_nobody_is_blamed(world: World) -> None:
    others = [each for each in world.evidence if each.rank != world.guilty]
    verdict = judge(others, world.size)
    assert verdict.guilty == ()
    assert verdict.sentence.startswith("unknown: ")
    assert f"nothing is known of rank {world.guilty}" in verdict.sentence


# ---- any evidence at all ----

frames = st.lists(
    st.builds(
        Frame,
        file=st.sampled_from(["", "kernel", "/a/train.py", IN_ALL_REDUCE[1].file, "<string>"]),
        line=st.integers(0, 99),
        function=st.sampled_from(["f", "futex", "read", "c10d::x", "cudaLaunch", "_bootstrap", ""]),
        native=st.booleans(),
    ),
    max_size=4,
).map(tuple)
stacks = st.lists(
    st.builds(
        ThreadStack,
        name=st.sampled_from(["MainThread", "other"]),
        active=st.booleans(),
        holds_gil=st.booleans(),
        frames=frames,
    ),
    max_size=3,
).map(tuple)
collectives = st.none() | st.lists(
    st.builds(
        Collective,
        group=st.sampled_from(["0", "1"]),
        number=st.integers(-1, 5),
        op=st.sampled_from(["a:x", "x", "b:send 0->1", "b:recv 9<-8", "a:p2p z", ":", ""]),
        state=st.sampled_from(["scheduled", "started", "completed"]),
        ranks=st.sampled_from([(), (0, 1), (1, 2, 3), (7,)]),
        sizes=st.sampled_from(["", "F[3]"]),
    ),
    max_size=6,
).map(tuple)
anything = st.builds(
    RankEvidence,
    node=st.sampled_from([NodeId("a"), NodeId("b")]),
    round=st.integers(1, 2).map(RoundNumber),
    rank=st.integers(0, 5).map(Rank),
    pid=st.just(1),
    process_state=st.sampled_from(ProcessState.__args__),  # type: ignore[attr-defined]
    beat_age_s=st.none() | st.floats(0, 10),
    stacks=stacks,
    stack_source=st.sampled_from(StackSource.__args__),  # type: ignore[attr-defined]
    collectives=collectives,
    sections=st.sampled_from([(), ("data",)]),
)


@given(evidence=st.lists(anything, max_size=6), size=st.integers(0, 8))
def test_any_evidence_gets_a_verdict(evidence: list[RankEvidence], size: int) -> None:
    verdict = judge(evidence, size)
    assert verdict.sentence
    assert set(verdict.guilty) <= {each.rank for each in evidence}
    assert not (verdict.guilty and verdict.sentence.startswith("unknown: "))
    assert len(verdict.place) <= 120
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict
