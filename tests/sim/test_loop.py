"""The simulated event loop runs asyncio code in simulated time, one agent's apart from another's."""

import asyncio
from dataclasses import dataclass

from holdfast.sim.clock import START, SimClock
from holdfast.sim.loop import SimLoop


@dataclass
class Fate:
    dead: bool = False
    paused_until: float = 0.0


def a_loop() -> tuple[SimClock, Fate, SimLoop]:
    clock, fate = SimClock(), Fate()
    return clock, fate, SimLoop(clock, fate, [])


def run(clock: SimClock, until: float) -> None:
    while clock.step(START + until):
        pass


def test_sleeps_timeouts_and_events_take_simulated_time():
    clock, _, loop = a_loop()
    seen = []

    async def work() -> None:
        rang = asyncio.Event()
        asyncio.get_running_loop().call_later(3.0, rang.set)
        await asyncio.sleep(1.0)
        seen.append(loop.time() - START)
        try:
            await asyncio.wait_for(rang.wait(), 0.5)
        except asyncio.TimeoutError:
            seen.append(loop.time() - START)
        await rang.wait()
        seen.append(loop.time() - START)

    task = loop.enter(asyncio.ensure_future, work())
    run(clock, 10.0)
    assert seen == [1.0, 1.5, 3.0]
    assert task.done()


def test_two_callbacks_of_one_moment_run_in_the_order_in_which_they_were_asked_for():
    clock, _, loop = a_loop()
    seen = []
    for number in range(5):
        loop.call_later(1.0, seen.append, number)
    loop.call_later(1.0, seen.append, "cancelled").cancel()
    run(clock, 2.0)
    assert seen == [0, 1, 2, 3, 4]


def test_a_paused_agent_goes_on_where_it_was_and_a_dead_one_never():
    clock, fate, loop = a_loop()
    seen = []
    fate.paused_until = START + 5.0
    loop.call_later(1.0, lambda: seen.append(loop.time() - START))
    run(clock, 6.0)
    assert seen == [5.0]
    loop.call_later(1.0, seen.append, "too late")
    fate.dead = True
    run(clock, 10.0)
    assert seen == [5.0]


def test_each_agent_sees_its_own_loop_as_the_running_one():
    clock = SimClock()
    one, other = SimLoop(clock, Fate(), []), SimLoop(clock, Fate(), [])
    seen = []

    def look(loop: SimLoop) -> None:
        seen.append(asyncio.get_running_loop() is loop)

    def nest() -> None:
        other.enter(look, other)
        look(one)

    one.call_soon(nest)
    other.call_soon(look, other)
    run(clock, 1.0)
    assert seen == [True, True, True]
