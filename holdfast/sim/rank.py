"""Simulates one rank's process: what its script does, and what its agent sees of it.

The script restores what it is offered, saves at certain steps and asks the coordinator this and that;
how far it has come is computed by `training`. To its agent the process is what
`holdfast.agent.processes.Process` is: it takes signals, and its end is told once.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from holdfast.agent.processes import Exit
from holdfast.messages import local, requests
from holdfast.messages.checkpoints import CheckpointerId, Tier, Tried
from holdfast.messages.data import Span
from holdfast.messages.local import FromWorker, ScriptReply
from holdfast.messages.records import Raised
from holdfast.messages.requests import (
    AnyAnswer,
    FindState,
    JoinBarrier,
    ScriptRequest,
    StateFound,
)
from holdfast.messages.units import Rank, RoundNumber
from holdfast.sim.function import SimEntry
from holdfast.sim.training import SimRound
from holdfast.sim.tuning import tune

if TYPE_CHECKING:
    from holdfast.sim.agent import SimAgent

CHECKPOINTER: CheckpointerId = "sim"
STORED_EVERY = 3
"""Saves of which one goes to storage at once; the others only when a fault makes it worthwhile."""
RESTORING, CHATTING, SAVING, WATCHING, PARTING, TRACKING = range(6)
"""Lanes of the script's threads: each asks again only when it was answered."""
AT_EXIT = "exit"
"""How a rank is stuck whose script has ended and whose process has not."""
STORE_REQUESTS: tuple[ScriptRequest, ...] = (
    requests.Set(items=(("a", b"1"), ("b", b"2"))),
    requests.Get(keys=("a", "b")),
    requests.Add(key="n", amount=1),
    requests.Append(key="log", value=b"x"),
    requests.CompareSet(key="a", expected=b"1", desired=b"3"),
    requests.CheckKeys(keys=("a",)),
    requests.Delete(key="b"),
    requests.CountKeys(),
    requests.WaitForKeys(keys=("b",), timeout_s=2.0),
    requests.Add(key="log", amount=1),
)
"""The last is denied where the key is no number."""


class SimRank:
    """One rank's process; one that was parked in another place goes on in this one."""

    def __init__(
        self,
        agent: SimAgent,
        round: SimRound,
        rank: Rank,
        local_rank: int = 0,
        before: SimRank | None = None,
    ) -> None:
        self.agent = agent
        self.round = round
        self.rank = rank
        self.local_rank = local_rank
        self.pid: int = agent.cluster.next_pid() if before is None else before.pid
        self.next: SimRank | None = None
        """The same process in the place that it got after this one."""
        self.entry: SimEntry | None = None
        """Its restartable function, if its script has one."""
        self.exit: Exit | None = None
        self.on_exit: Callable[[Exit], None] = lambda end: None
        self.hear: Callable[[FromWorker], None] = lambda message: None
        """The agent's ear for what the process says."""
        self.ended_at: float | None = None
        self.oom = False
        self.stuck = ""
        self.stuck_at = 0.0
        """When its process began to hang at its end."""
        """How the process does not move: "stopped", or by its script a "hang", "gil" or "loop"."""
        self.has_data = False
        """It knows what was used of its data sets."""
        self.shards: list[Span] = []
        """Shards that it has taken and not used."""
        self._stopping = False
        self._offer = (0, RoundNumber(0))
        """Step and round of the state that it was last told to load."""
        self._error = ""
        """Why that could not be loaded."""
        self._put_off: list[tuple[int, ScriptRequest, Callable[[AnyAnswer], None]]] = []
        """What it would ask if it moved."""
        self._numbers: dict[int, int] = {}
        self._open: dict[int, tuple[ScriptRequest, Callable[[AnyAnswer], None]]] = {}
        if agent.cluster.functions is not None:
            agent.cluster.functions.given(self)
            self.entry = SimEntry(agent.cluster.functions, self, before)
        if before is not None:
            before.next = self
            agent.parked.pop(self.pid, None)
        round.ranks[rank] = agent.ranks[rank] = self

    @property
    def again(self) -> bool:
        """Whether it was parked before."""
        return self.entry is not None and self.entry.stage == "entering"

    @property
    def departed(self) -> bool:
        """Whether its script does nothing in this place any more."""
        return self.entry is not None and self.entry.departed

    # ---- its script ----

    def begin(self) -> None:
        """Begin the user's script, or enter its function again."""
        if self.exit is not None or self.departed:
            return
        if self.agent.lease_over:  # It is paused at once.
            self.agent.later(0.1, self.begin)
            return
        self.agent.cluster.invariants.rank_begins(self.agent, self.round.number)
        self.hear(local.Began(at=self.agent.clock.now))
        training = self.agent.cluster.training
        self.round.started += 1
        if self.entry is not None:
            self.entry.begin()
        elif training.script.checkpoints:
            self.restore()
        else:
            training.go_on_from_saved(self.round, 1)

    def opens_function(self) -> None:
        """Tell the agent of the restartable function: the light model knows it by itself."""

    def restore(self) -> None:
        """Restore with Holdfast's checkpoints."""
        opened = local.OpenCheckpointer(checkpointer=CHECKPOINTER, directory="/", keep=b"")
        self.hear(opened)
        self.ask(RESTORING, FindState(checkpointer=CHECKPOINTER), self._offered)

    def _offered(self, answer: AnyAnswer) -> None:
        """Load what the ranks shall restore, and say how that went."""
        if not isinstance(answer, StateFound):
            return  # The round is over.
        if answer.where in ("nowhere", "loaded"):
            self._restored(answer.where == "loaded")
            return
        self._offer = (int(answer.step), answer.round)
        self._error = self.agent.cluster.storage.load_error(answer)
        tried = FindState(checkpointer=CHECKPOINTER, tried=Tried(self._error))
        self.agent.later(0.01, self.ask, RESTORING, tried, self._offered)

    def _restored(self, loaded: bool) -> None:
        base, source = self._offer if loaded else (0, RoundNumber(0))
        round, demand = self.round, self.agent.cluster.invariants.demand
        lacks = self._error if loaded else ""
        demand(not lacks, f"rank {self.rank} goes on without its state: {lacks}")
        agreed = round.ready == 0 or (round.base, round.source) == (base, source)
        demand(agreed, f"rank {self.rank} restored step {base}, others another")
        if self.agent.cluster.data is None:
            self._go_on(base, source)
        else:
            self.agent.cluster.data.open(self, base, source, partial(self._go_on, base, source))

    def _go_on(self, base: int, source: RoundNumber) -> None:
        self.agent.cluster.training.ready(self.round, 1, base, source)

    def save(self, step: int, missed: str) -> None:
        """Copy the state of a step; it may be that there is no image of it."""
        which = {"checkpointer": CHECKPOINTER, "step": step}
        if missed:
            self.tell(local.ImageMissed(**which, outcome="skipped", reason=missed))  # type: ignore[arg-type]
            return
        every = self.agent.cluster.training.script.save_every * STORED_EVERY
        wish = "if needed" if step % every else "now"
        self.tell(local.ImageWhole(**which, path="", state=0, wish=wish))  # type: ignore[arg-type]

    def ask(
        self,
        channel: int,
        request: ScriptRequest,
        then: Callable[[AnyAnswer], None] = lambda answer: None,
    ) -> None:
        """Have a thread of the script ask; one that waits for an answer asks nothing else."""
        if self.stuck:
            self._put_off.append((channel, request, then))
        if channel in self._open or self.exit is not None or self.stuck or self.departed:
            return
        self._open[channel] = (request, then)
        number = self._numbers[channel] = self._numbers.get(channel, 0) + 1
        if isinstance(request, JoinBarrier):
            self.round.meetings.setdefault(request.name, {})[self.rank] = None
        self.hear(local.Ask(channel=channel, number=number, request=request))

    def reply(self, message: ScriptReply) -> None:
        """Take the answer to a request in."""
        self.agent.later(0.0005, self._answered, message)

    def _answered(self, message: ScriptReply) -> None:
        if self.exit is not None or message.number != self._numbers.get(message.channel):
            return
        if self.departed:
            return
        request, then = self._open.pop(message.channel)
        if isinstance(request, JoinBarrier) and isinstance(message.answer, requests.Granted):
            here, round = len(self.round.meetings[request.name]), self.round
            all_there = here + round.size - len(round.ranks) >= round.size
            self.agent.cluster.invariants.demand(all_there, f"a barrier opened for {here} ranks")
        then(message.answer)

    def tell(self, message: FromWorker) -> None:
        """Say something to the agent."""
        if self.exit is None and not self.stuck and not self.departed:
            self.agent.later(0.0, self._hear_if_alive, message)

    def _hear_if_alive(self, message: FromWorker) -> None:
        if self.exit is None and not self.departed:
            self.hear(message)

    # ---- standing still ----

    def hang(self, how: str) -> None:
        """Do not move any more."""
        if self.exit is None and not self.stuck:
            self.stuck = how
            self.agent.cluster.training.hold(self.round, self.rank)

    def go_on(self) -> None:
        if self.stuck:
            self.stuck = ""
            self.agent.cluster.training.release(self.round, self.rank)
            if self._stopping:
                self.die(signal=signal.SIGTERM)
            put_off, self._put_off = self._put_off, []
            for asked in put_off:
                self.agent.later(0.0, self.ask, *asked)
            if self.entry is not None:
                self.entry.moves_again()

    # ---- its end ----

    def finish(self) -> None:
        """Come to the end of the function or of the script, unless the process is asked to stop."""
        if self.stuck or self._stopping or self.exit is not None:
            return
        if self.entry is not None and self.entry.stage == "inside":
            self.entry.returns()
        elif self.entry is None or self.entry.stage == "released":
            self.die(code=0, done=True)

    def hang_at_exit(self) -> None:
        """Come to the end of the script, and hang with its threads' locks."""
        if self.exit is None and not self.stuck and not self._stopping:
            self.stuck, self.stuck_at = AT_EXIT, self.agent.clock.now
            self.agent.later(0.0, self.hear, local.ScriptFinished())

    def send(self, number: signal.Signals) -> None:
        """Take a signal."""
        if self.next is not None:
            self.next.send(number)
            return
        if self.exit is not None or self.agent.dead:
            return
        self._stopping = self._stopping or number == signal.SIGTERM
        if number == signal.SIGSTOP:
            self.hang("stopped")
        elif number == signal.SIGCONT and self.stuck == "stopped":
            self.go_on()
        elif number == signal.SIGKILL:
            self.agent.later(0.002, self.die, None, signal.SIGKILL)
        elif number == signal.SIGTERM and not self.stuck:
            took_s, by_itself = self.agent.chance.stop_s()
            code, by = (0, None) if by_itself else (None, int(signal.SIGTERM))
            self.agent.later(took_s, self.die, code, by)

    def send_to_group(self, number: signal.Signals) -> None:
        """Be paused or continued with the whole node: `SimAgent` has the truth of that."""

    def reaction_to(self, number: signal.Signals) -> str:
        return "handles"

    def die(
        self,
        code: int | None = None,
        signal: int | None = None,
        oom: bool = False,
        raised: Raised | None = None,
        done: bool = False,
    ) -> None:
        """End the process; `done` says that its script ran to its end. What a restartable function
        raises does not end it."""
        if self.next is not None:
            if raised is None:  # What this place's code would raise is not raised in the next.
                self.next.die(code, signal, oom)
            return
        if self.exit is not None or self.agent.dead:
            return
        if raised is not None and self.entry is not None and self.entry.stays:
            self.entry.raises(raised)
            return
        if raised is not None:
            self.agent.later(0.0, self.hear, local.Died(raised=raised, at=self.agent.clock.now))
        if done:
            self.agent.later(0.0, self.hear, local.ScriptFinished())
        elif self.stuck != AT_EXIT:
            self.agent.cluster.training.break_(self.round)
            if code == 0:
                self.round.left[self.rank] = None
        end = Exit(code, signal)
        self.gone(end, oom)
        self.agent.later(0.0, lambda: self.on_exit(end))

    def gone(self, end: Exit, oom: bool = False) -> None:
        self.exit, self.oom, self.ended_at = end, oom, self.agent.clock.now
        self.give_up_place()
        self.agent.parked.pop(self.pid, None)

    def give_up_place(self) -> None:
        for ranks in (self.round.ranks, self.agent.ranks):
            if ranks.get(self.rank) is self:
                del ranks[self.rank]

    def seen_until(self) -> float:
        """Return the moment up to which its page was written."""
        return self.agent.clock.now if self.ended_at is None else self.ended_at


def save_and_ask(round: SimRound, step: int, rng: Random, skipped: float) -> None:
    """Have all ranks of a round save a step, and use what else Holdfast offers to scripts.

    `skipped` is the share of saves of which one rank has no image.
    """
    ranks = list(round.ranks.values())
    skips = rng.choice(ranks) if ranks and rng.random() < skipped else None
    for one in ranks:
        one.save(step, "storage is slower than the saves" if one is skips else "")
    topic = rng.choice(("barrier", "vote", "store", "save"))
    late = rng.random() < 0.2
    for number, one in enumerate(ranks):
        if topic == "barrier" and not (late and number == 0):
            name, limit_s = f"barrier {step}", 3.0 if late else None
            one.ask(CHATTING, JoinBarrier(name=name, timeout_s=limit_s))
        elif topic == "vote":
            one.ask(CHATTING, requests.CastVote(name=f"vote {step}", ballot=rng.random() < 0.5))
        elif topic == "store":
            one.ask(CHATTING, rng.choice(STORE_REQUESTS))
        elif topic == "save" and number < 2:
            to: Tier = "memory" if late else "storage"
            save = requests.AwaitSave(checkpointer=CHECKPOINTER, step=step, to=to, timeout_s=5.0)
            one.ask(SAVING, save)
    if ranks:
        _watch_stragglers(ranks[0], 0)
        ranks[0].ask(TRACKING, requests.ReadAccount())
        tune(round, step, step // ranks[0].agent.cluster.training.script.save_every)


def _watch_stragglers(one: SimRank, after: int) -> None:
    def found(answer: AnyAnswer) -> None:
        if isinstance(answer, requests.StragglersFound):
            _watch_stragglers(one, answer.total)

    one.ask(WATCHING, requests.AwaitStragglers(after=after), found)
