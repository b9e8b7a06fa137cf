"""A job whose ranks have a loader each: they hear of changes late, and step at their own pace.

Each rank does what `holdfast.data.tuning` does: it acknowledges what it hears, and asks at the first
boundary at or after the step of a proposal that it knows.
"""

from __future__ import annotations

from typing import Any

from driver import Driver
from msgspec import Struct, field

from holdfast.core.tuning.state import TunedLoader, Tunings
from holdfast.messages.actions import Answered, AnyAction
from holdfast.messages.events import AnyEvent, Asked, TuningAsked
from holdfast.messages.requests import AwaitTuning, Denied, SettleTuning, Truth, TuningNotice
from holdfast.messages.tuning import LoaderConfig, LoaderMeasured, MemoryRoom
from holdfast.messages.units import Rank, StepNumber

DATA = "train"
OWN = LoaderConfig(micro_batch=8, workers=2, prefetch=2)
ROOM = MemoryRoom(free_bytes=90 << 30, total_bytes=100 << 30)


class TunedRank(Struct):
    """One rank, and what is on its way to it."""

    step: int = 0
    proposal: TuningNotice | None = None
    version: int = 0
    config: LoaderConfig = OWN
    measures: bool = False
    inbox: list[TuningNotice] = field(default_factory=list)
    switched: list[tuple[int, int]] = field(default_factory=list)
    """Steps and versions of all changes."""
    numbers: dict[int, int] = field(default_factory=dict)
    open: dict[int, Asked] = field(default_factory=dict)
    """Requests that are not answered, by channel."""
    opening: int = 0
    denied: list[Denied] = field(default_factory=list)


class TunedJob(Driver):
    """Channel 0 of each rank waits for notices, channel 1 asks whether to change."""

    def __init__(self, nodes: int = 2, slots: int = 2, **loader: Any) -> None:
        super().__init__(min_nodes=nodes, max_nodes=nodes)
        self.loader = {"own": OWN, "most": 64, **loader}
        self.all: dict[int, TunedRank] = {}
        self.deaf = False
        """Whether answers are lost on their way."""
        self.running(*[f"n{i}" for i in range(nodes)], slots=slots)
        self.renew()

    def renew(self) -> None:
        """The ranks of a new round."""
        self.all = {rank: TunedRank() for rank in self.job.ranks}

    @property
    def tuned(self) -> TunedLoader:
        return self.job.of(Tunings).loaders[DATA]

    def take(self, event: AnyEvent) -> list[AnyAction]:
        actions = super().take(event)
        for action in actions:
            if isinstance(action, Answered) and action.round == self.round and not self.deaf:
                self.answered(action)
        return actions

    def answered(self, action: Answered) -> None:
        """Pass an answer on, as an agent does: not twice, and not to an older request."""
        rank, answer = self.all[action.rank], action.answer
        asked = rank.open.get(action.channel)
        if asked is None or asked.number != action.number:
            return
        del rank.open[action.channel]
        if isinstance(answer, TuningNotice):
            rank.inbox.append(answer)
        elif isinstance(answer, Denied):
            rank.denied.append(answer)
        else:
            assert isinstance(answer, Truth)
            assert rank.proposal is not None
            if answer.so:
                rank.switched.append((rank.step, rank.proposal.version))
                self.apply(rank, rank.proposal)
            rank.proposal = None

    def apply(self, rank: TunedRank, notice: TuningNotice) -> None:
        rank.version, rank.config = notice.version, notice.config.over(OWN)
        rank.measures = notice.measure

    # ---- what ranks do ----

    def ask(self, rank: int, channel: int, request: AwaitTuning | SettleTuning) -> list[AnyAction]:
        one = self.all[rank]
        one.numbers[channel] = one.numbers.get(channel, 0) + 1
        event = Asked(
            at=self.at,
            node=self.node_of(rank),
            round=self.round,
            rank=Rank(rank),
            channel=channel,
            number=one.numbers[channel],
            request=request,
        )
        one.open[channel] = event
        return self.take(event)

    def ask_again(self) -> None:
        """Agents have a new stream, on which they repeat what was not answered."""
        for one in self.all.values():
            for event in list(one.open.values()):
                self.take(event)

    def open(self, *ranks: int, **more: Any) -> None:
        for rank in ranks or tuple(self.all):
            one = self.all[rank]
            one.opening += 1
            one.step, one.proposal = 0, None
            one.inbox.clear()
            self.await_tuning(rank, 0, **more)
            self.apply(one, one.inbox.pop(0))
            self.await_tuning(rank, 0 if not self.tuned.issued else self.tuned.issued, **more)

    def await_tuning(self, rank: int, after: int, **more: Any) -> None:
        one = self.all[rank]
        said = {"at": StepNumber(one.step), "step_s": 0.1, **self.loader, **more}
        request = AwaitTuning(dataset=DATA, opening=one.opening, after=after, **said)
        self.ask(rank, 0, request)

    def hear(self, rank: int) -> bool:
        """A rank hears what has been on its way, and acknowledges; whether there was anything."""
        one = self.all[rank]
        if not one.inbox:
            return False
        notice = one.inbox.pop(0)
        if notice.at_step and one.step < notice.at_step:
            one.proposal = notice
        self.await_tuning(rank, notice.number)
        return True

    def hear_all(self) -> None:
        while any(self.hear(rank) for rank in self.all):
            pass

    def advance(self, rank: int) -> None:
        """A rank passes its next boundary, and asks if a change is proposed for it. One that waits for
        the answer stays where it is."""
        one = self.all[rank]
        if 1 in one.open:
            return
        one.step += 1
        proposal = one.proposal
        if proposal is not None and proposal.at_step is not None and one.step >= proposal.at_step:
            self.ask(rank, 1, SettleTuning(dataset=DATA, number=proposal.number))

    def advance_all(self, steps: int) -> None:
        for _ in range(steps):
            for rank in self.all:
                self.advance(rank)

    def measure(self, steps_per_s: float, memory: MemoryRoom = ROOM) -> None:
        """All ranks report how fast they are with what they use."""
        self.hear_all()
        for rank, one in self.all.items():
            found = LoaderMeasured(version=one.version, steps_per_s=steps_per_s, memory=memory)
            self.await_tuning(rank, self.tuned.issued, measured=found)
        self.hear_all()

    # ---- what users do ----

    def tune(self, by: str = "ann@host", auto: bool = False, **config: int) -> list[AnyAction]:
        event = TuningAsked(
            at=self.at, dataset=DATA, config=LoaderConfig(**config), by=by, auto=auto
        )
        return self.take(event)

    def next_round(self, rank: int = 0, **how: Any) -> None:
        """A rank dies, and the job goes on in a new round."""
        self.exit(rank, **(how or {"signal": 9}))
        self.all_ready()
        self.renew()
        self.after(1).start_all()
