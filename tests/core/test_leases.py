"""When a silent node is given up: never before its own lease is over, whatever clocks and words do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.leases import AFTER_RESTART_S, CUT_OFF_S, LOOK_EVERY_S, STOOD_S, Leases, lease_s
from holdfast.core.patience import SILENCE_FLOOR_S, SILENCE_MOST_S
from holdfast.messages.units import NodeId

A, B, C, D = (NodeId(name) for name in "abcd")
SILENCE_S = 8.0
JUST = LOOK_EVERY_S / 2


def dispensable(nodes: Collection[NodeId]) -> bool:
    return True


def indispensable(nodes: Collection[NodeId]) -> bool:
    return False


class Watch:
    """Leases that are looked at as often as they should be, except where a test says otherwise."""

    def __init__(self, **remote: bool) -> None:
        self.now = 100.0
        self.leases = Leases(self.now)
        self.given_up: dict[NodeId, float] = {}
        self.dispensable = dispensable
        for node, other in remote.items():
            self.leases.begin(NodeId(node), other, self.now)

    def look(self) -> list[NodeId]:
        found = self.leases.look(self.now, SILENCE_S, self.dispensable)
        for node in found:
            self.given_up[node] = self.now
            self.leases.forget(node)
        return found

    def run(self, seconds: float, *heard: NodeId) -> None:
        """Let time pass, in which these nodes beat."""
        until = self.now + seconds
        while self.now < until:
            self.now += LOOK_EVERY_S
            for node in heard:
                self.leases.hear(node, self.now)
            self.look()

    def stand(self, seconds: float) -> None:
        """Let time pass in which the coordinator does not run, and look at once after it."""
        self.now += seconds
        self.look()


# ---- who is given up, and when ----


def test_a_node_is_given_up_once_it_was_silent_for_longer_than_the_silence() -> None:
    watch = Watch(a=True, b=True)
    watch.run(SILENCE_S, B)
    assert watch.given_up == {}
    watch.run(LOOK_EVERY_S, B)
    assert watch.given_up == {A: watch.now}


def test_a_node_that_beats_is_never_given_up() -> None:
    watch = Watch(a=True, b=True)
    watch.run(10 * CUT_OFF_S, A, B)
    assert watch.given_up == {}


def test_a_node_that_is_forgotten_is_not_given_up_again() -> None:
    watch = Watch(a=True, b=True)
    watch.run(4 * SILENCE_S, B)
    assert list(watch.given_up) == [A]
    watch.run(4 * CUT_OFF_S, B)
    assert list(watch.given_up) == [A]


def test_a_lease_and_one_look_that_comes_late_fit_into_the_shortest_silence() -> None:
    assert lease_s(SILENCE_FLOOR_S) + LOOK_EVERY_S + STOOD_S <= SILENCE_FLOOR_S


def test_hearing_tells_how_long_a_node_was_silent_while_we_listened() -> None:
    watch = Watch(a=True, b=True)
    watch.run(3.0, B)
    assert watch.leases.hear(A, watch.now) == 3.0
    watch.stand(20.0)
    watch.run(1.0, B)
    assert watch.leases.hear(A, watch.now) == 1.0, "that we stood was not the node's silence"


# ---- a coordinator that stood, or was restarted ----


def test_a_coordinator_that_stood_gives_everybody_the_whole_silence_again() -> None:
    watch = Watch(a=True, b=True)
    watch.run(SILENCE_S - LOOK_EVERY_S, B)
    watch.stand(LOOK_EVERY_S + STOOD_S + JUST)
    stood_until = watch.now
    watch.run(SILENCE_S - LOOK_EVERY_S, B)
    assert watch.given_up == {}
    watch.run(2 * LOOK_EVERY_S, B)
    assert list(watch.given_up) == [A]
    assert watch.given_up[A] - stood_until >= SILENCE_S


def test_a_look_that_is_only_a_little_late_gives_nobody_more_time() -> None:
    watch = Watch(a=True, b=True)
    watch.run(SILENCE_S - LOOK_EVERY_S, B)
    watch.leases.hear(B, watch.now)
    watch.stand(LOOK_EVERY_S + STOOD_S)
    assert list(watch.given_up) == [A]


def test_after_a_restart_agents_have_time_to_find_the_coordinator() -> None:
    watch = Watch()
    began = watch.now
    watch.leases.restarted([A, B], SILENCE_FLOOR_S, began)
    watch.leases.begin(B, True, began)
    assert SILENCE_FLOOR_S < AFTER_RESTART_S
    while not watch.given_up:
        watch.now += LOOK_EVERY_S
        watch.leases.hear(B, watch.now)
        for node in watch.leases.look(watch.now, SILENCE_FLOOR_S, dispensable):
            watch.given_up[node] = watch.now
    assert list(watch.given_up) == [A]
    assert AFTER_RESTART_S < watch.now - began <= AFTER_RESTART_S + LOOK_EVERY_S


def test_after_a_restart_a_long_silence_is_waited_for_in_full() -> None:
    leases_then, began = Leases(50.0), 50.0
    leases_then.restarted([A], SILENCE_MOST_S, began)
    assert leases_then.heard[A] == began


# ---- cut off, or with nobody to go on with ----


def test_all_remote_nodes_that_fall_silent_together_are_waited_for() -> None:
    watch = Watch(a=True, b=True, c=False)
    began = watch.now
    watch.run(CUT_OFF_S, C)
    assert watch.given_up == {}
    watch.run(LOOK_EVERY_S, C)
    assert set(watch.given_up) == {A, B}
    assert watch.now - began > CUT_OFF_S


def test_one_remote_node_is_no_proof_that_the_coordinator_is_cut_off() -> None:
    watch = Watch(a=True, c=False)
    watch.run(SILENCE_S + LOOK_EVERY_S, C)
    assert list(watch.given_up) == [A]


def test_nodes_on_this_host_that_fall_silent_together_are_not_waited_for() -> None:
    watch = Watch(a=True, b=True, c=False, d=False)
    watch.run(SILENCE_S + LOOK_EVERY_S, A, B)
    assert set(watch.given_up) == {C, D}


def test_who_comes_back_first_after_a_cut_gives_the_others_the_whole_silence_again() -> None:
    watch = Watch(a=True, b=True)
    watch.run(2 * SILENCE_S)
    assert watch.given_up == {}
    back_at = watch.now
    watch.run(SILENCE_S - LOOK_EVERY_S, A)
    assert watch.given_up == {}, "the others' words may come a little later"
    watch.run(2 * LOOK_EVERY_S, A)
    assert list(watch.given_up) == [B]
    assert watch.given_up[B] - back_at >= SILENCE_S


def test_nodes_without_which_the_job_cannot_go_on_are_waited_for() -> None:
    watch = Watch(a=True, b=True)
    watch.dispensable = indispensable
    began = watch.now
    watch.run(CUT_OFF_S, B)
    assert watch.given_up == {}
    watch.run(LOOK_EVERY_S, B)
    assert list(watch.given_up) == [A]
    assert watch.now - began > CUT_OFF_S


def test_the_job_is_asked_about_all_that_are_late_together() -> None:
    watch = Watch(a=True, b=True, c=True)
    asked: list[set[NodeId]] = []

    def ask(nodes: Collection[NodeId]) -> bool:
        asked.append(set(nodes))
        return True

    watch.dispensable = ask
    watch.run(SILENCE_S + LOOK_EVERY_S, C)
    assert asked == [{A, B}]


def test_a_silence_longer_than_the_wait_for_a_cut_counts() -> None:
    long_s = 2 * CUT_OFF_S
    watch = Watch(a=True, b=True)
    for seconds in range(1, 2 * int(long_s)):
        watch.now = 100.0 + seconds / 2
        found = watch.leases.look(watch.now, long_s, indispensable)
        assert found == [], f"{seconds / 2} s"


# ---- members that never had a stream here ----


def test_a_member_that_was_never_heard_of_is_counted_for_from_the_last_look_on() -> None:
    watch = Watch(b=True)
    watch.run(5.0, B)
    began = watch.now
    watch.leases.attend([A, B], {B})
    watch.run(SILENCE_S, B)
    assert watch.given_up == {}
    watch.run(LOOK_EVERY_S, B)
    assert watch.given_up == {A: began + SILENCE_S + LOOK_EVERY_S}


def test_to_be_attended_to_again_gives_no_more_time() -> None:
    watch = Watch(b=True)
    watch.leases.attend([A, B], {B})
    for _ in range(int(SILENCE_S / LOOK_EVERY_S) + 1):
        watch.run(LOOK_EVERY_S, B)
        watch.leases.attend([node for node in (A, B) if node not in watch.given_up], {B})
    assert list(watch.given_up) == [A]


def test_who_is_neither_a_member_nor_connected_is_not_counted_for() -> None:
    watch = Watch(a=True, b=True, c=True)
    watch.leases.attend([B], {C})
    assert set(watch.leases.heard) == {B, C}
    assert set(watch.leases.remote) == {B, C}


# ---- no two worlds at once ----


class World:
    """An agent and a coordinator, each with a clock of its own and words on the way.

    The coordinator is as unlucky as it can be: whenever it runs, it looks for silent nodes before it
    reads what is in its buffers. An agent that was given up joins as another.
    """

    def __init__(self, coordinator_offset: float, agent_offset: float) -> None:
        self.true = 0.0
        self.offset, self.agent_offset = coordinator_offset, agent_offset
        self.silence_s = SILENCE_FLOOR_S
        self.leases = Leases(self.here)
        self.join()

    @property
    def here(self) -> float:
        """The coordinator's clock."""
        return self.true + self.offset

    @property
    def there(self) -> float:
        """The agent's clock."""
        return self.true + self.agent_offset

    def join(self) -> None:
        self.for_s = lease_s(self.silence_s)
        self.until = self.there + self.for_s
        """When its lease is over, on the agent's clock."""
        self.up: deque[float] = deque()
        """Beats on their way to the coordinator's kernel: when each was sent, on the agent's clock."""
        self.unread: deque[float] = deque()
        """Beats that its kernel has and its process not read."""
        self.down: deque[tuple[float, float]] = deque()
        """Answers on their way: to which beat, and for how long."""
        self.leases.begin(A, False, self.here)

    # ---- the agent ----

    def beat(self, fate: str) -> None:
        if fate == "late":
            self.up.append(self.there)
        elif fate != "lost":
            self._arrive(self.there, fate == "acknowledged")

    def late_beat(self, acknowledged: bool) -> None:
        if self.up:
            self._arrive(self.up.popleft(), acknowledged)

    def _arrive(self, sent: float, acknowledged: bool) -> None:
        """The coordinator's kernel has a beat; its acknowledgement may get lost."""
        self.unread.append(sent)
        if acknowledged:
            self._renew(sent, revives=False)

    def answer(self) -> None:
        if self.down:
            sent, self.for_s = self.down.popleft()
            self._renew(sent, revives=True)

    def _renew(self, sent: float, revives: bool) -> None:
        until = sent + self.for_s
        if until > self.there and (revives or self.until > self.there):
            self.until = max(self.until, until)

    def cut(self) -> None:
        self.up.clear()
        self.down.clear()

    # ---- the coordinator ----

    def stand(self, seconds: float) -> None:
        self.true += seconds

    def run(self, seconds: float, every_s: float) -> None:
        until = self.true + seconds
        while self.true < until:
            self.true = min(until, self.true + every_s)
            given_up = self.leases.look(self.here, self.silence_s, dispensable)
            if given_up:
                self._give_up()
            while self.unread:
                self.leases.hear(A, self.here)
                self.down.append((self.unread.popleft(), lease_s(self.silence_s)))

    def _give_up(self) -> None:
        assert self.until <= self.there, "it may still run"
        while self.down:  # What was said before is heard late.
            self.answer()
            assert self.until <= self.there, "it runs again"
        self.join()

    def restart(self, refused: bool) -> None:
        """Until now its host may have refused connections, which renews the lease."""
        self.unread.clear()
        if refused:
            self._renew(self.there, revives=False)
        self.leases = Leases(self.here)
        self.leases.restarted([A], self.silence_s, self.here)

    def raise_silence(self) -> None:
        self.silence_s = 2 * SILENCE_FLOOR_S


class Chance:
    """Draws what happens next. Each seed prefers some things and leaves out others."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        steps: list[Callable[[World], None]] = [
            lambda world: world.beat(self._random.choice(FATES)),
            lambda world: world.late_beat(self._random.random() < 0.5),
            World.answer,
            World.cut,
            lambda world: world.stand(self._seconds()),
            lambda world: world.run(self._seconds(), self._random.choice(LOOKS)),
            lambda world: world.restart(self._random.random() < 0.5),
            World.raise_silence,
        ]
        self._steps = steps
        self._weights = [self._random.random() ** 3 for _ in steps]

    def offset(self) -> float:
        return float(self._random.randint(-(10**6), 10**6))

    def _seconds(self) -> float:
        """Eighths are exact in binary: sums of them have no rounding errors."""
        return self._random.randint(0, 8 * self._random.choice((1, 2, 4))) / 8

    def step(self) -> Callable[[World], None]:
        return self._random.choices(self._steps, self._weights)[0]


FATES = ("acknowledged", "acknowledged", "arrives", "late", "lost")
LOOKS = (LOOK_EVERY_S, LOOK_EVERY_S + STOOD_S)


@settings(max_examples=200)
@given(seed=st.integers(0, 1 << 32))
def test_the_lease_of_a_node_is_over_before_it_is_given_up(seed: int) -> None:
    chance = Chance(seed)
    world = World(chance.offset(), chance.offset())
    for _ in range(500):
        chance.step()(world)


def test_a_beat_that_arrives_while_the_coordinator_stands_unnoticed_does_no_harm() -> None:
    world = World(5.0, 1000.0)
    late_s = LOOK_EVERY_S + STOOD_S
    world.run(SILENCE_FLOOR_S - late_s + 0.125, LOOK_EVERY_S)
    world.beat("acknowledged")
    world.run(late_s, late_s)


def test_a_beat_that_arrives_while_the_coordinator_stands_for_long_does_no_harm() -> None:
    world = World(1000.0, 5.0)
    for _ in range(10):
        world.stand(1.0)
        world.beat("acknowledged")
    world.run(LOOK_EVERY_S, LOOK_EVERY_S)
    assert world.until > world.there
