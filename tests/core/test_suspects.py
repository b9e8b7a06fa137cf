"""Which node the faults come from: each row of the tables in docs/faults.md, and what is never done."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from driver import Driver, encoded, raised, replayed
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import Lab

from holdfast.core import report
from holdfast.core.suspects import rules
from holdfast.core.suspects.state import Sign, Strike, Suspect, Suspects
from holdfast.messages.events import HealthFound
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE
from holdfast.messages.health import HealthResult
from holdfast.messages.records import Incident
from holdfast.messages.units import NodeId, Rank
from holdfast.view.summary import summary

DOCS = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
SEGV: dict[str, Any] = {"signal": 11}
KILL: dict[str, Any] = {"signal": 9}
ERROR: dict[str, Any] = {"code": 1, "raised": raised()}


class Nodes(Driver):
    """Nodes n0, n1, ... on hosts of their own, the last of them spares; each round gets further."""

    def __init__(self, count: int = 2, spares: int = 1, slots: int = 2, **terms: Any) -> None:
        super().__init__(min_nodes=count, max_nodes=count, spares=spares, **terms)
        self.slots = slots
        self.reached = 0
        for i in range(count + spares):
            self.add(f"n{i}")
        self.go_on()

    def add(self, node: str, host: str = "") -> None:
        self.join(node, self.slots, host=host or f"host-{node}")

    def go_on(self) -> None:
        """Take some steps, if there is a round."""
        if self.job.world is not None:
            self.start_all()
            self.reached += 10
            self.after(10).step_all(self.reached)

    @property
    def places(self) -> list[str]:
        return [place.node for place in self.world.places]

    def first_rank(self, node: str) -> int:
        return next(place.first_rank for place in self.world.places if place.node == node)

    def strike(self, node: str, local: int = 0, moving: bool = True, **how: Any) -> None:
        """A rank of that node fails, and the job goes on from there; or not, if nothing moves."""
        rank = self.first_rank(node) + local
        self.after(1).exit(rank, step=self.reached, **(how or SEGV))
        self.all_ready()
        if moving:
            self.go_on()

    def lose_and_return(self, node: str, after: str) -> None:
        """The node is lost, and its host comes back as another."""
        host = f"host-{node.partition('-')[0]}"
        self.lose(node)
        self.add(after, host=host)
        self.all_ready()
        self.go_on()

    def warn(self, node: str, check: str, reason: str = "something") -> None:
        results = (HealthResult(check, "warn", reason, 0.1),)
        self.take(HealthFound(at=self.at, node=NodeId(node), results=results))

    @property
    def suspicions(self) -> dict[str, Suspect]:
        return self.job.of(Suspects).all

    @property
    def told(self) -> list[Incident]:
        return [one for one in self.job.incidents if one.kind == "suspect"]

    @property
    def shown(self) -> dict[str, str]:
        return report.status(self.job, self.at, alive=True).suspects


# ---- how many faults it takes ------------------------------------------------------------------


def needed(nodes: int, sign: Sign) -> int:
    """Count the faults in a row that make a node a suspect."""
    s = Suspects()
    for count in range(1, 31):
        share, signature = 1 / nodes, f"failed like {sign}"
        strike = struck("bad", Rank(2 + count % 2), sign, signature, share, nodes)
        rules.take(s, strike, NodeId("bad:1"), [Rank(2), Rank(3)])
        if "bad" in s.all:
            return count
    raise AssertionError("never")


def struck(
    machine: str, rank: Rank, sign: Sign, signature: str, share: float, nodes: int
) -> Strike:
    return Strike(
        machine=machine,
        rank=rank,
        sign=sign,
        signature=signature,
        step=None,
        share=share,
        nodes=nodes,
    )


def counts_in_docs() -> Iterator[tuple[int, str, int]]:
    """The rows of the table of numbers: nodes, what failed, faults that it takes."""
    lines = DOCS.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("| nodes of equal size"))
    head = [int(cell) for cell in re.findall(r"\d+", lines[at])]
    for line in lines[at + 2 : at + 4]:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for nodes, cell in zip(head, cells, strict=True):
            yield nodes, name, int(cell)


@pytest.mark.parametrize(("nodes", "what", "count"), list(counts_in_docs()))
def test_as_many_faults_make_a_suspect_as_the_table_says(nodes: int, what: str, count: int) -> None:
    for sign in ("crash",) if what == "crashes" else ("outside", "script"):
        assert needed(nodes, sign) == count


def test_the_docs_say_which_numbers_decide() -> None:
    text = " ".join(DOCS.read_text().split())
    assert f"the newest {rules.WINDOW} faults" in text
    assert f"at least {rules.FEWEST} of them" in text
    assert f"{rules.CRASH_CHANCE:.0%}".replace("%", " %") in text
    assert f"{100 * rules.FAULT_CHANCE:g} %" in text
    assert f"{100 * rules.LAPSE_CHANCE:g} % of all cases" in text


# ---- the rows of the policy --------------------------------------------------------------------


def crashes() -> Nodes:
    job = Nodes()
    for i in range(7):
        job.strike("n1", local=i % 2)
    return job


def other_faults() -> Nodes:
    job = Nodes(count=4)
    for i in range(5):
        job.strike("n2", local=i % 2, **KILL)
    return job


def lost_nodes() -> Nodes:
    job = Nodes(count=4, spares=0)
    node = "n3"
    for i in range(5):
        job.lose_and_return(node, node := f"n3-{i}")
    return job


def repeated(how: dict[str, Any] = SEGV) -> Nodes:
    job = Nodes()
    for _ in range(2):
        job.strike("n1", moving=False, **how)
    assert job.places == ["n0", "n2"], "the third try is on another node"
    job.go_on()
    return job


def before_the_first_step() -> Nodes:
    job = Nodes.__new__(Nodes)
    Driver.__init__(job, min_nodes=2, max_nodes=2, spares=1)
    job.slots, job.reached = 2, 0
    for node in ("n0", "n1", "n2"):
        job.add(node)
    for _ in range(2):
        job.start_all()
        job.strike("n0", moving=False)
    assert job.places == ["n2", "n1"]
    job.go_on()
    return job


def no_spare() -> Nodes:
    job = Nodes(spares=0)
    for i in range(7):
        job.strike("n1", local=i % 2)
    return job


def rank_0_alone() -> Nodes:
    job = Nodes(count=8)
    for i in range(20):
        job.strike("n0", **{**ERROR, "raised": raised(where=f"train.py:{i}")})
    return job


def elsewhere_too() -> Nodes:
    job = Nodes(count=8)
    job.strike("n5", **ERROR)
    for i in range(20):
        job.strike("n3", local=i % 2, **ERROR)
    return job


def several_at_once() -> Nodes:
    job = Nodes(count=4)
    for _ in range(10):
        ranks = [job.first_rank(node) for node in ("n1", "n2")]
        for rank in ranks:
            job.after(1).exit(rank, step=job.reached, **ERROR)
        job.all_ready()
        job.go_on()
    return job


def at_random() -> Nodes:
    job = Nodes(count=4)
    rng = Random(2)
    for _ in range(40):
        job.strike(f"n{rng.randrange(4)}", local=rng.randrange(2))
    return job


def follows_the_ranks() -> Nodes:
    job = crashes()
    job.strike("n2", local=1)
    return job


def hardware() -> Nodes:
    job = Nodes()
    job.warn("n1", "gpu-ecc", "GPU 3 had 1 uncorrected memory error since its reset")
    for i in range(7):
        job.strike("n1", local=i % 2)
    return job


def came_back() -> Nodes:
    job = crashes()
    job.lose("n0")
    job.all_ready()
    job.go_on()
    assert job.places == ["n1", "n2"], "it is needed, and has other ranks than before"
    for i in range(7):
        job.strike("n1", local=i % 2)
    assert not job.job.membership.excluded, "it is still needed"
    job.add("n3")
    job.strike("n1")
    return job


SUSPECT, STAYS, NOTHING, CLEARED, EXCLUDED = "suspect", "stays", "nothing", "cleared", "excluded"
ROWS: dict[str, tuple[str, Callable[[], Nodes]]] = {
    "crashes": (SUSPECT, crashes),
    "other faults": (SUSPECT, other_faults),
    "lost again and again": (STAYS, lost_nodes),
    "the same step": (SUSPECT, repeated),
    "the same exception": (NOTHING, lambda: repeated(ERROR)),
    "before the first step": (SUSPECT, before_the_first_step),
    "no spare": (STAYS, no_spare),
    "rank 0 alone": (NOTHING, rank_0_alone),
    "elsewhere too": (NOTHING, elsewhere_too),
    "several at once": (NOTHING, several_at_once),
    "at random": (NOTHING, at_random),
    "follows the ranks": (CLEARED, follows_the_ranks),
    "hardware": (EXCLUDED, hardware),
    "came back": (EXCLUDED, came_back),
}


def test_the_policy_has_the_same_rows_here_and_in_the_docs() -> None:
    rows = re.findall(
        r"^\| \*\*([a-z0-9 ]+)\*\*: [^|]+ \| ([a-z]+) \|", DOCS.read_text(), re.MULTILINE
    )
    assert dict(rows) == {name: outcome for name, (outcome, _) in ROWS.items()}


@pytest.mark.parametrize("name", ROWS)
def test_what_is_done_about_each_kind_of_evidence(name: str) -> None:
    outcome, row = ROWS[name]
    job = row()
    states = [one.state for one in job.suspicions.values()]
    excluded = job.job.membership.excluded
    assert states == {SUSPECT: ["replaced"], STAYS: ["named"]}.get(outcome, [])
    assert bool(excluded) == (outcome == EXCLUDED)
    assert bool(job.told) == (outcome != NOTHING)
    assert job.job.state.name == "running"
    assert encoded(replayed(job.history, len(job.history) // 2)) == encoded(job.job)


# ---- what comes of it --------------------------------------------------------------------------


def test_a_suspect_makes_place_for_a_spare_and_is_named_with_the_reason() -> None:
    job = crashes()
    assert job.places == ["n0", "n2"]
    assert "n1" in job.job.membership.waiting, "it is not sent away"
    (incident,) = job.told
    assert incident.node == "n1"
    assert incident.signature == (
        "is a suspect: 7 of the last 7 crashes struck it (killed by SIGSEGV, ranks 2, 3),"
        " by chance less than once in 64 such jobs"
    )
    assert "another node has its place" in incident.action
    assert job.shown["n1"].startswith("7 of the last 7 crashes")
    told = summary(
        report.status(job.job, job.at, alive=True),
        report.goodput(job.job, job.at),
        report.incidents(job.job),
    )
    assert any(line.startswith("suspect: node n1: 7 of the last 7") for line in told)


def test_twenty_five_faults_do_not_all_strike_the_same_node() -> None:
    """The node that each of them would strike is out after the ninth, whatever they are."""
    for how in (SEGV, KILL, ERROR):
        job = Nodes()
        strikes = 0
        while "n1" in job.places and strikes < 25:
            job.strike("n1", local=strikes % 2, **how)
            strikes += 1
        assert strikes <= 9


def test_a_suspect_is_needed_when_nobody_else_is_left() -> None:
    job = crashes()
    job.lose("n2")
    job.all_ready()
    assert job.places == ["n0", "n1"]
    assert job.shown["n1"].endswith("it was replaced, and is needed again")


def test_a_suspect_that_stayed_is_replaced_at_the_next_fault_once_a_spare_waits() -> None:
    job = no_spare()
    assert "n1" in job.places
    assert "it stays" in job.told[-1].action
    job.add("n9")
    assert job.job.world is not None, "a round that runs is not broken for it"
    job.strike("n0")
    assert job.places == ["n0", "n9"]
    assert "another node has its place" in job.told[-1].action


def test_the_only_node_of_a_job_makes_place_too() -> None:
    job = Nodes(count=1)
    for i in range(7):
        job.strike("n0", local=i % 2)
    assert job.places == ["n1"]
    assert "no other node to compare it with" in job.told[-1].signature


def test_a_bug_at_one_step_is_tried_on_another_node_and_then_ends_the_job() -> None:
    job = Nodes()
    for _ in range(2):
        job.strike("n0", moving=False, **ERROR)
    assert job.places == ["n2", "n1"]
    job.strike("n2", moving=False, **ERROR)
    assert job.job.result is not None
    assert job.job.result.code == EXIT_DO_NOT_REQUEUE
    assert job.suspicions == {}
    assert job.told == [], "nobody is blamed"


def test_a_cleared_failure_never_counts_again_in_those_ranks() -> None:
    job = follows_the_ranks()
    assert "no suspect any more" in job.told[-1].signature
    before = len(job.told)
    for i in range(20):
        job.strike(job.places[1], local=i % 2)
    assert len(job.told) == before
    assert job.suspicions == {}


def test_a_host_is_excluded_with_what_proves_it() -> None:
    for row, proof in ((hardware, "gpu-ecc: GPU 3 had 1"), (came_back, rules.CAME_BACK)):
        job = row()
        assert proof in job.job.membership.excluded["host-n1"]
        assert "n1" not in job.places
        assert len(job.places) == 2, "another node has its place"
        assert not job.job.membership.has(NodeId("n1"))


def test_an_xid_that_a_program_can_cause_makes_no_proof() -> None:
    job = Nodes()
    job.warn("n1", "gpu-xid", "Xid 31 on GPU 3")
    for i in range(7):
        job.strike("n1", local=i % 2, **ERROR)
    assert "gpu-xid: Xid 31" in job.shown["n1"], "it makes exceptions count as crashes"
    assert job.job.membership.excluded == {}


def test_of_two_nodes_on_one_host_only_the_one_that_fails_is_a_suspect() -> None:
    job = Nodes(spares=0)
    job.add("n2", host="host-n1")
    for i in range(3):
        job.strike("n0", local=i % 2)
    for i in range(20):
        job.strike("n1", local=i % 2)
        if "n1" not in job.places:
            break
    assert job.places == ["n0", "n2"]
    assert list(job.suspicions) == ["n1"]


def test_a_spare_that_is_not_checked_yet_takes_nobodys_place() -> None:
    job = Lab(min_nodes=2, max_nodes=2).gather("a", "b", "c")
    job.answer_all()
    for i in range(7):
        job.start_all()
        job.after(10).step_all(10 * i + 10)
        job.exit(2 + i % 2, step=10 * i + 10, **SEGV)
        if i == 6:
            job.join("late")
        job.all_ready()
        job.answer_all()
    assert {place.node for place in job.world.places} == {"a", "c"}


# ---- chance, and bugs --------------------------------------------------------------------------


RATES: list[tuple[Sign, float]] = [("crash", 1 / 200), ("outside", 1 / 500), ("script", 1 / 500)]


@pytest.mark.parametrize("nodes", [2, 3, 4, 8, 64, 1000])
@pytest.mark.parametrize(("sign", "most"), RATES)
def test_faults_that_strike_at_random_almost_never_make_a_suspect(
    nodes: int, sign: Sign, most: float
) -> None:
    """Over 6,000 faults in jobs of 100; each suspect is forgotten, so that there may be others."""
    suspects = 0
    for seed in range(60):
        rng, s = Random(f"{seed} {nodes} {sign}"), Suspects()
        for i in range(100):
            machine = rng.randrange(nodes)
            rank = Rank(8 * machine + rng.randrange(8))
            strike = struck(f"h{machine}", rank, sign, f"failure {i}", 1 / nodes, nodes)
            rules.take(s, strike, NodeId(f"h{machine}:1"), [rank])
            suspects += len(s.all)
            assert not any(one.unfit for one in s.all.values())
            for found in list(s.all):
                rules.replaced(s, found)
                del s.all[found]
    assert suspects / 6000 <= most


hows = st.sampled_from([SEGV, KILL, ERROR, {"signal": 9, "oom": True}, {"code": 3}, {"signal": 7}])


@settings(max_examples=40)
@given(
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(0, 7),
    hows,
    st.lists(st.booleans(), min_size=30, max_size=30),
    st.integers(1, 3),
)
def test_a_bug_that_always_strikes_one_rank_never_excludes_a_node(
    count: int, spares: int, rank: int, how: dict[str, Any], moving: list[bool], slots: int
) -> None:
    """Whatever the rank, at the same step or at others: its node loses its place once at most."""
    job = Nodes(count=count, spares=spares, slots=slots)
    rank %= count * slots
    hosts = []
    for moves in moving:
        if job.job.world is None:
            break
        node = job.node_of(rank)
        hosts.append(node)
        job.strike(node, local=rank - job.first_rank(node), moving=moves, **how)
    assert job.job.membership.excluded == {}
    moved = sum(one != other for one, other in pairwise(hosts))
    assert moved <= 1, hosts
    if len(hosts) == 30:
        assert job.suspicions == {}, "it followed the rank"


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(0, 2), st.data())
def test_a_suspect_never_costs_a_place(count: int, spares: int, data: st.DataObject) -> None:
    """A round has as many nodes as it can have, and faults on two nodes never exclude a third."""
    job = Nodes(count=count, spares=spares)
    for _ in range(25):
        if job.job.world is None:
            break
        assert len(job.places) == count
        node = data.draw(st.sampled_from(job.places[:2]))
        job.strike(node, local=data.draw(st.integers(0, 1)), **data.draw(hows))
    assert not {f"host-{node}" for node in job.job.membership.nodes()} & set(
        job.job.membership.excluded
    )


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 4))
def test_a_suspect_always_has_enough_faults_and_little_chance_while_it_is_one(
    machines: list[int], nodes: int
) -> None:
    s = Suspects()
    for i, machine in enumerate(machines):
        number = machine % nodes
        strike = struck(f"h{number}", Rank(number), "crash", f"failure {i}", 1 / nodes, nodes)
        rules.take(s, strike, NodeId(f"h{number}:1"), [Rank(number)])
        for name in s.all:
            case = rules.case_against(s, name)
            assert case is None or len(case.hits) >= rules.FEWEST
            assert rules.case_against(s, name, rules.LAPSE_CHANCE, rules.LAPSE_CHANCE)
        rules.validate(s)


def test_steps_that_cannot_be_compared_are_never_the_same_step() -> None:
    s = Suspects()
    for _ in range(5):
        rules.take(s, struck("h1", Rank(0), "crash", "failure", 0.5, 2), NodeId("h1:1"), [Rank(0)])
        assert s.trial is None
