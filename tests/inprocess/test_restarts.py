"""The loop that enters and leaves a restartable function, on a link whose rounds the test decides."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from holdfast.errors import FencedError, StateLost, StopRestarting, UnfitProcess, UsageError
from holdfast.inprocess import Context, link, restartable, restarts
from holdfast.inprocess.hooks import Hook, HookState
from holdfast.inprocess.link import Leave, RoundEntry
from holdfast.messages.records import Raised

WAITING_S = 30.0


class TestLink:
    """A world of one rank: a round ends when its function raises, or when the test breaks it."""

    __test__ = False
    replaces = True

    def __init__(self) -> None:
        self.log: list[str] = []
        self.rounds = 5
        """The rounds that this process has a place in."""
        self.all_return = True
        self.breaks_while_gathering = False
        self._round = 0
        self._why = ""
        self._leave: Leave = lambda why: None

    def tell_to_leave(self, why: str) -> None:
        """Break the round, as the agent would: from another thread."""
        self._why = why
        threading.Thread(target=self._leave, args=[why], daemon=True).start()

    def open(self, leave: Leave) -> RoundEntry:
        self._leave = leave
        return self._entry()

    def _entry(self) -> RoundEntry:
        self._round += 1
        return RoundEntry(
            round=self._round, rank=0, world_size=1, local_rank=0, node_rank=0, why=self._why
        )

    def returned(self) -> bool:
        self.log.append("returned")
        done, self.all_return = self.all_return, True
        return done

    def raised(self, error: Raised) -> None:
        self.log.append(f"raised {error.type}")
        self._why = error.type

    def postponed(self) -> None:
        self.log.append("postponed")

    def left(self) -> None:
        self.log.append("left")

    def next(self) -> RoundEntry | None:
        return self._entry() if self._round < self.rounds else None

    def gather(self, name: str, value: bytes) -> list[bytes]:
        broken, self.breaks_while_gathering = self.breaks_while_gathering, False
        if broken:
            raise FencedError("the round is over")
        return [value]

    def serve_store(self) -> None: ...

    def resumed(self, step: int) -> None: ...

    def ping(self) -> None:
        self.log.append("ping")

    def pause_watch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stop(self, reason: str, code: int) -> None:
        self.log.append(f"stop {code}: {reason}")

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> TestLink:
    found = TestLink()
    monkeypatch.setattr(link._ProcessLink, "link", found)
    monkeypatch.setattr(restarts._Process, "called", False)
    return found


def failing(times: int) -> Callable[..., Any]:
    """A function that raises in its first entries, and then returns its arguments."""
    left = iter(range(times))

    def function(*args: object, **kwargs: object) -> object:
        for number in left:
            raise ValueError(number)
        return args, kwargs

    return function


# ---- entering ----------------------------------------------------------------------------------


def test_a_function_that_returns_is_entered_once(rounds: TestLink) -> None:
    assert restartable()(failing(0))(1, two=2) == ((1,), {"two": 2})
    assert rounds.log == ["returned", "close"]


def test_a_function_that_raises_is_entered_again_with_the_same_arguments(rounds: TestLink) -> None:
    kept = object()
    assert restartable()(failing(2))(kept) == ((kept,), {})
    raised = ["raised ValueError", "left"]
    assert rounds.log == [*raised, *raised, "returned", "close"]


def test_a_round_that_breaks_after_the_function_has_returned_means_another_entry(
    rounds: TestLink,
) -> None:
    rounds.all_return = False
    assert restartable()(failing(0))() == ((), {})
    assert rounds.log == ["returned", "left", "returned", "close"]


def test_a_process_without_a_place_in_the_next_round_ends_with_75(rounds: TestLink) -> None:
    rounds.rounds = 1
    ended: list[int] = []
    with pytest.raises(SystemExit) as ending:
        restartable(terminate=lambda state: ended.append(state.iteration))(failing(9))()
    assert ending.value.code == 75
    assert ended == [0]


def test_a_keyboard_interrupt_is_no_fault_of_a_rank(rounds: TestLink) -> None:
    @restartable()
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert rounds.log == []


def test_disabled_the_function_is_the_function() -> None:
    function = failing(0)
    assert restartable(enabled=False)(function) is function


def test_the_name_and_the_text_of_the_function_stay() -> None:
    @restartable()
    def train() -> None:
        """Train."""

    assert (train.__name__, train.__doc__) == ("train", "Train.")


def test_a_process_calls_one_restartable_function_once(rounds: TestLink) -> None:
    function = restartable()(failing(0))
    function()
    with pytest.raises(UsageError, match="one restartable function, once"):
        function()


def test_a_restartable_function_within_another_is_refused(rounds: TestLink) -> None:
    inner = restartable()(failing(0))
    with pytest.raises(UsageError, match="one restartable function, once"):
        _raising(restartable()(lambda: inner()), rounds)


def _raising(function: Callable[[], object], rounds: TestLink) -> None:
    """Call it in a job of one round, and raise what it raised in there."""
    rounds.rounds = 1
    seen: list[Raised] = []
    rounds.raised = seen.append  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        function()
    raise UsageError(seen[0].message)


def test_groups_that_were_made_before_the_function_are_refused(
    rounds: TestLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "_has_groups", lambda: True)
    with pytest.raises(UsageError, match="move init_process_group into it"):
        restartable()(failing(0))()


# ---- the context -------------------------------------------------------------------------------


def test_a_parameter_with_the_annotation_gets_the_context(rounds: TestLink) -> None:
    seen: list[tuple[int, int, str]] = []

    @restartable()
    def train(value: int, ctx: Context) -> int:
        seen.append((ctx.iteration, ctx.round, ctx.why))
        ctx.ping()
        if ctx.iteration == 0:
            raise ValueError
        return value

    assert train(7) == 7  # type: ignore[call-arg]
    assert seen == [(0, 1, ""), (1, 2, "ValueError")]
    assert rounds.log.count("ping") == 2


def test_an_annotation_may_be_a_string_and_stand_beside_one_that_means_nothing(
    rounds: TestLink,
) -> None:
    def train(other: Any, ctx: Any) -> int:
        found: int = ctx.iteration
        return found

    train.__annotations__ = {"other": "NoSuchType", "ctx": "holdfast.inprocess.Context"}
    assert restartable()(train)(None) == 0


# ---- leaving -----------------------------------------------------------------------------------


def test_a_function_that_is_told_to_leave_is_left_and_entered_again(rounds: TestLink) -> None:
    @restartable()
    def train(ctx: Context) -> str:
        if ctx.iteration == 0:
            rounds.tell_to_leave("rank 1 died")
            time.sleep(WAITING_S)
        return ctx.why

    began = time.monotonic()
    assert train() == "rank 1 died"  # type: ignore[call-arg]
    assert time.monotonic() - began < WAITING_S / 2
    assert rounds.log == ["left", "returned", "close"]


def test_what_a_function_raises_while_it_is_left_is_not_reported(rounds: TestLink) -> None:
    @restartable()
    def train(ctx: Context) -> None:
        if ctx.iteration == 0:
            rounds.tell_to_leave("rank 1 died")
            try:
                time.sleep(WAITING_S)
            finally:
                raise ValueError("in cleaning up")

    train()  # type: ignore[call-arg]
    assert rounds.log == ["left", "returned", "close"]


def test_an_atomic_section_is_finished_before_and_reported(rounds: TestLink) -> None:
    done: list[str] = []

    @restartable()
    def train(ctx: Context) -> None:
        if ctx.iteration == 0:
            with ctx.atomic():
                rounds.tell_to_leave("rank 1 died")
                while "postponed" not in rounds.log:
                    time.sleep(0.001)
                done.append("whole")
            done.append("never")

    train()  # type: ignore[call-arg]
    assert done == ["whole"]
    assert rounds.log == ["postponed", "left", "returned", "close"]


def test_the_round_may_break_while_ranks_are_assigned(rounds: TestLink) -> None:
    rounds.breaks_while_gathering = True
    entered: list[int] = []

    @restartable(assign=lambda members: members)
    def train(ctx: Context) -> None:
        entered.append(ctx.iteration)

    train()  # type: ignore[call-arg]
    assert entered == [1]
    assert rounds.log == ["left", "returned", "close"]


# ---- hooks -------------------------------------------------------------------------------------


def noted(log: list[str], name: str) -> Hook:
    def hook(state: HookState) -> None:
        log.append(f"{name} {state.iteration}")

    return hook


NAMES = ("initialize", "health_check", "abort", "finalize", "completion", "terminate")


def test_hooks_run_in_the_order_of_the_documentation(rounds: TestLink) -> None:
    log: list[str] = []

    @restartable(**{name: noted(log, name) for name in NAMES})  # type: ignore[arg-type]
    def train(ctx: Context) -> None:
        log.append(f"function {ctx.iteration}")
        if ctx.iteration == 0:
            raise ValueError
        if ctx.iteration == 1:
            rounds.tell_to_leave("rank 1 died")
            time.sleep(WAITING_S)

    train()  # type: ignore[call-arg]
    entry = ["initialize", "health_check", "function"]
    left = ["abort", "finalize", "health_check"]
    expected = [(name, n) for n in (0, 1) for name in [*entry, *left]]
    expected += [(name, 2) for name in [*entry, "completion"]]
    assert log == [f"{name} {number}" for name, number in expected]


def test_a_health_check_that_raises_gives_the_process_up(rounds: TestLink) -> None:
    ended: list[str] = []

    def check(state: HookState) -> None:
        raise OSError("a broken device")

    with pytest.raises(UnfitProcess, match="a broken device"):
        restartable(health_check=check, terminate=noted(ended, "terminate"))(failing(0))()
    assert ended == ["terminate 0"]
    assert rounds.log == ["close"]


def test_a_hook_can_stop_the_job(rounds: TestLink) -> None:
    def stop(state: HookState) -> None:
        if state.iteration == 1:
            raise StopRestarting("enough", code=93)

    with pytest.raises(SystemExit) as ending:
        restartable(initialize=stop)(failing(9))()
    assert ending.value.code == 93
    assert rounds.log == ["raised ValueError", "left", "close", "stop 93: enough"]


def test_the_function_itself_can_stop_the_job(rounds: TestLink) -> None:
    @restartable()
    def stop() -> None:
        raise StopRestarting("enough", code=75)

    with pytest.raises(SystemExit) as ending:
        stop()
    assert ending.value.code == 75
    assert rounds.log == ["close", "stop 75: enough"]


def test_the_function_itself_can_give_its_process_up(rounds: TestLink) -> None:
    @restartable()
    def give_up() -> None:
        raise UnfitProcess("a broken device")

    with pytest.raises(UnfitProcess, match="a broken device"):
        give_up()
    assert rounds.log == ["close"]


def test_a_lost_state_ends_the_job_instead_of_being_looked_for_again(rounds: TestLink) -> None:
    @restartable()
    def lost() -> None:
        raise StateLost("living state cannot be used, and there is no checkpointer")

    with pytest.raises(SystemExit) as ending:
        lost()
    assert ending.value.code == 93
    why = "living state cannot be used, and there is no checkpointer"
    assert rounds.log == ["close", f"stop 93: {why}"]


def test_a_hook_is_told_what_the_process_itself_raised(rounds: TestLink) -> None:
    seen: list[str | None] = []

    def check(state: HookState) -> None:
        seen.append(state.error.type if state.error else None)

    restartable(initialize=check)(failing(1))()
    assert seen == [None, "ValueError"]
