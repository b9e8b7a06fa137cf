"""A job whose ranks use data sets: what they ask, what their nodes report, and what they are told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from driver import Driver

from holdfast.core.shards.account import account
from holdfast.core.shards.state import DataSet, Shards
from holdfast.messages.actions import Answered, AnyAction, LendShards
from holdfast.messages.data import DataSpec, ShardFailure, Span, Used, UsedBy
from holdfast.messages.events import Asked, ShardsReported
from holdfast.messages.reports import DataAccount, LineAccount
from holdfast.messages.requests import AnyAnswer, DataOpened, Denied, OpenData
from holdfast.messages.spans import SpanSet
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber

LEASES = DataSpec(name="d", sharing="leases", size=100, shard=10)
LOCKSTEP = DataSpec(name="d", sharing="lockstep", size=100)


def packed(*spans: tuple[int, int, int]) -> bytes:
    return SpanSet.of(Span(*span) for span in spans).pack()


def used_by(
    rank: int, span: tuple[int, int, int], first: int = 0, last: int | None = None
) -> UsedBy:
    steps = StepNumber(first), StepNumber(first if last is None else last)
    return UsedBy(Rank(rank), Used(Span(*span), *steps, span[2] - span[1]))


class Lender(Driver):
    """Two nodes of two ranks, unless told otherwise."""

    def __init__(self, *nodes: str, slots: int = 2, **terms: Any) -> None:
        nodes = nodes or ("a", "b")
        super().__init__(**{"min_nodes": 1, "max_nodes": len(nodes), **terms})
        self.running(*nodes, slots=slots)
        self._asked = 0

    # ---- saying ----

    def ask(self, rank: int, spec: DataSpec = LEASES, resumed: str = "fresh", **more: Any) -> Any:
        self._asked += 1
        step = StepNumber(more.pop("step", 0))
        return self.take(
            Asked(
                at=self.at,
                node=self.node_of(rank),
                round=self.round,
                rank=Rank(rank),
                channel=0,
                number=self._asked,
                request=OpenData(spec=spec, resumed=resumed, step=step, **more),  # type: ignore[arg-type]
            )
        )

    def open(self, rank: int, spec: DataSpec = LEASES, resumed: str = "fresh", **more: Any) -> Any:
        """The answer to a rank that asks."""
        return answers(self.ask(rank, spec, resumed, **more)).get(rank)

    def open_all(self, spec: DataSpec = LEASES, resumed: str = "fresh", **more: Any) -> None:
        for rank in self.job.ranks:
            assert isinstance(self.open(rank, spec, resumed, **more), DataOpened)

    def report(self, node: str, want: int = 0, round: int | None = None, **more: Any) -> Any:
        number = self.round if round is None else RoundNumber(round)
        for name in ("used", "failed", "returned"):
            more[name] = tuple(more.pop(name, ()))
        return self.take(
            ShardsReported(
                at=self.at,
                node=NodeId(node),
                round=number,
                dataset=more.pop("dataset", "d"),
                want=want,
                **more,
            )
        )

    def lend(self, node: str, want: int = 1) -> list[tuple[int, int, int]]:
        """The spans that a node is lent when it wants so many shards."""
        return lent(self.report(node, want)).get(node, [])

    def use(self, node: str, *spans: tuple[int, int, int], rank: int = 0, step: int = 0) -> Any:
        return self.report(node, used=[used_by(rank, span, step) for span in spans])

    def fail(self, node: str, span: tuple[int, int, int], error: str = "ValueError: bad") -> Any:
        return self.report(node, failed=[ShardFailure(Rank(0), Span(*span), error)])

    def advance(self) -> None:
        """Take a step beyond all others, so that the next fault is not one more of the same."""
        self.after(100).step_all(self.job.highest + 1, 1)

    def break_round(self) -> None:
        """A rank dies, and the next round of the same nodes begins."""
        self.advance()
        self.after(1).exit(0, signal=9)
        self.after(1).all_ready()
        if self.job.world is None:
            self.after(60).tick()
        self.after(1).start_all()

    # ---- looking ----

    @property
    def data(self) -> DataSet:
        return self.job.of(Shards).sets["d"]

    def account(self) -> DataAccount:
        return account(self.job.of(Shards))["d"]

    def line(self, line: int = 0) -> LineAccount:
        return next(one for one in self.account().lines if one.line == line)


def answers(actions: Iterable[AnyAction]) -> dict[int, AnyAnswer]:
    return {int(one.rank): one.answer for one in actions if isinstance(one, Answered)}


def denial(answer: AnyAnswer | None) -> str:
    assert isinstance(answer, Denied), answer
    assert answer.reason == "data set"
    return answer.detail


def lent(actions: Iterable[AnyAction]) -> dict[str, list[tuple[int, int, int]]]:
    found: dict[str, list[tuple[int, int, int]]] = {}
    for one in actions:
        if isinstance(one, LendShards):
            spans = [(span.line, span.start, span.stop) for span in one.spans]
            found.setdefault(one.node, []).extend(spans)
    return found


def finished(actions: Iterable[AnyAction]) -> list[str]:
    return sorted(one.node for one in actions if isinstance(one, LendShards) and one.finished)
