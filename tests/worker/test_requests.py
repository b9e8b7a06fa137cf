"""A script's end of its requests: many threads, one socket, and whatever befalls them.

The agent at the other end is a thread that answers as the test says.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import holdfast
from holdfast.errors import (
    FencedError,
    NotUnderHoldfast,
    RequestDenied,
    RequestError,
    RequestTimeout,
)
from holdfast.messages.local import PACKET_BYTES, Ask, Piece, ScriptReply
from holdfast.messages.requests import (
    MAX_VALUE_BYTES,
    Add,
    AnyAnswer,
    CastVote,
    CompareSet,
    Denied,
    Get,
    Granted,
    JoinBarrier,
    Set,
    Total,
    Values,
)
from holdfast.wire.packets import Joiner, packets_of
from holdfast.worker import runtime
from holdfast.worker.channel import Channel
from holdfast.worker.requests import RequestClient

from_worker = msgspec.msgpack.Decoder(Ask | Piece)


class FakeAgent:
    """Answers each request with what `react` says; None leaves it open."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = Channel(theirs.detach())
        self.requests = RequestClient(self.channel)
        self.asked: list[Ask] = []
        self.react: Callable[[Ask], AnyAnswer | None] = lambda ask: Granted()
        self._joiner = Joiner()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while packet := self.socket.recv(PACKET_BYTES):
            message = from_worker.decode(packet)
            if isinstance(message, Piece):
                whole = self._joiner.add(message)
                if whole is None:
                    continue
                message = from_worker.decode(whole)
            assert isinstance(message, Ask)
            self.asked.append(message)
            answer = self.react(message)
            if answer is not None:
                self.reply(message, answer)

    def reply(self, ask: Ask, answer: AnyAnswer) -> None:
        for packet in packets_of(
            ScriptReply(channel=ask.channel, number=ask.number, answer=answer)
        ):
            self.socket.send(packet)

    def until_asked(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.asked) < count:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def close(self) -> None:
        self.channel.close()
        self._thread.join(60)
        self.socket.close()


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    agent = FakeAgent()
    yield agent
    agent.close()


def in_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_each_thread_gets_its_own_answer(agent: FakeAgent) -> None:
    def react(ask: Ask) -> AnyAnswer:
        assert isinstance(ask.request, Add)
        return Total(number=ask.request.amount)

    agent.react = react
    wrong: list[object] = []

    def ask_often(first: int) -> None:
        for amount in range(first, first + 50):
            answer = agent.requests.ask(Add(key="k", amount=amount))
            if answer != Total(number=amount):
                wrong.append(answer)

    threads = [in_thread(lambda first=1000 * i: ask_often(first)) for i in range(20)]
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert len(agent.asked) == 1000
    numbers: dict[int, int] = {}
    for ask in agent.asked:
        assert ask.number == numbers.get(ask.channel, 0) + 1, "a channel was skipped or used twice"
        numbers[ask.channel] = ask.number
    assert len(numbers) <= 20, "no more channels than threads"


def test_answers_may_come_in_any_order(agent: FakeAgent) -> None:
    agent.react = lambda ask: None
    got: dict[int, AnyAnswer] = {}

    def ask(i: int) -> None:
        got[i] = agent.requests.ask(Add(key="k", amount=i))

    threads = [in_thread(lambda i=i: ask(i)) for i in range(10)]
    agent.until_asked(10)
    shuffled = random.Random(3).sample(agent.asked, 10)
    for asked in shuffled:
        assert isinstance(asked.request, Add)
        agent.reply(asked, Total(number=asked.request.amount))
    for thread in threads:
        thread.join(60)
    assert got == {i: Total(number=i) for i in range(10)}


def test_the_largest_values_pass_both_ways(agent: FakeAgent) -> None:
    value = random.Random(1).randbytes(MAX_VALUE_BYTES)

    def react(ask: Ask) -> AnyAnswer:
        assert isinstance(ask.request, Set)
        return Values(values=(ask.request.items[0][1],))

    agent.react = react
    got: list[AnyAnswer] = []
    threads = [
        in_thread(lambda: got.append(agent.requests.ask(Set(items=(("k", value),)))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.join(60)
    assert got == [Values(values=(value,))] * 4


@pytest.mark.parametrize(
    "request_",
    [
        Set(items=(("k", b"x" * (MAX_VALUE_BYTES + 1)),)),
        CompareSet(key="k", expected=b"x" * MAX_VALUE_BYTES, desired=b"x" * MAX_VALUE_BYTES),
        Get(keys=()),
        Get(keys=("x" * 5000,)),
        Get(keys=("\udcff",)),
        Add(key="k", amount=1 << 70),
        CastVote(name="v", ballot="x" * 1000),
        CastVote(name="v", ballot=1.5),  # type: ignore[arg-type]
        JoinBarrier(name="", timeout_s=None),
        JoinBarrier(name="x", timeout_s=-1.0),
    ],
)
def test_what_nobody_would_take_is_refused_before_it_is_sent(
    agent: FakeAgent, request_: Set
) -> None:
    with pytest.raises(RequestDenied):
        agent.requests.ask(request_)
    assert agent.asked == []
    assert agent.requests.ask(Add(key="k", amount=1)) == Granted()


@pytest.mark.parametrize(
    ("reason", "error"),
    [("fenced", FencedError), ("timeout", RequestTimeout), ("too large", RequestDenied)],
)
def test_a_denial_is_raised(agent: FakeAgent, reason: str, error: type[Exception]) -> None:
    agent.react = lambda ask: Denied(reason=reason, detail="because")  # type: ignore[arg-type]
    with pytest.raises(error, match="because"):
        agent.requests.ask(Add(key="k", amount=1))


def test_an_answer_that_never_comes_is_not_waited_for_for_ever(agent: FakeAgent) -> None:
    agent.react = lambda ask: None
    with pytest.raises(RequestTimeout):
        agent.requests.ask(Add(key="k", amount=1), patience_s=0.05)
    agent.until_asked(1)
    # Its answer comes late, to nobody: the next request must not take it for its own.
    agent.reply(agent.asked[0], Total(number=666))
    agent.react = lambda ask: Total(number=1)
    for _ in range(3):
        assert agent.requests.ask(Add(key="k", amount=1)) == Total(number=1)
    assert {ask.channel for ask in agent.asked[2:]} <= {0, 1}


POLLS = {"7", "271", "73"}
"""Numbers of poll and ppoll, on x86-64 and ARM."""


def until_it_polls(task: int) -> None:
    """Wait until a thread of this process is in the kernel, waiting for a socket."""
    path = Path(f"/proc/self/task/{task}/syscall")
    while path.read_text().split()[0] not in POLLS:
        os.sched_yield()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as a script has it, whatever ran in this process before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    signal.signal(signal.SIGINT, before or signal.default_int_handler)


def test_an_interrupted_call_does_no_harm_to_the_next(
    agent: FakeAgent, interruptible: None
) -> None:
    agent.react = lambda ask: None
    main, task = threading.get_ident(), threading.get_native_id()

    def interrupt() -> None:
        agent.until_asked(1)
        until_it_polls(task)  # A signal right before a system call does not interrupt it.
        signal.pthread_kill(main, signal.SIGINT)

    thread = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        agent.requests.ask(JoinBarrier(name="x"), patience_s=None)
    thread.join()
    agent.react = lambda ask: Granted()
    assert agent.requests.ask(JoinBarrier(name="x")) == Granted()


def test_who_reads_may_leave_while_others_wait(agent: FakeAgent) -> None:
    agent.react = lambda ask: None
    got: list[AnyAnswer] = []
    waiting = in_thread(lambda: got.append(agent.requests.ask(JoinBarrier(name="x"), 60)))
    agent.until_asked(1)
    with pytest.raises(RequestTimeout):
        agent.requests.ask(JoinBarrier(name="y"), patience_s=0.05)
    agent.reply(agent.asked[0], Granted())
    waiting.join(60)
    assert got == [Granted()]


def test_an_agent_that_is_gone_is_an_error_for_everybody(agent: FakeAgent) -> None:
    agent.react = lambda ask: None
    errors: list[type] = []

    def ask() -> None:
        try:
            agent.requests.ask(JoinBarrier(name="x"), None)
        except RequestError as error:
            errors.append(type(error))

    threads = [in_thread(ask) for _ in range(3)]
    agent.until_asked(3)
    agent.socket.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(60)
    assert errors == [RequestError] * 3
    with pytest.raises(RequestError):
        agent.requests.ask(Add(key="k", amount=1))


def test_a_forked_process_is_told_that_it_cannot_ask(agent: FakeAgent) -> None:
    agent.requests._round.changed.acquire()  # As if a thread were just asking.
    pid = os.fork()
    if pid == 0:
        try:
            agent.requests.ask(Add(key="k", amount=1))
        except NotUnderHoldfast as error:
            os._exit(0 if "forked from worker" in str(error) else 2)
        finally:
            os._exit(1)
    agent.requests._round.changed.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert agent.requests.ask(Add(key="k", amount=1)) == Granted()


@pytest.mark.parametrize(
    "call",
    [
        lambda: holdfast.store(),
        lambda: holdfast.barrier("x"),
        lambda: holdfast.vote("x", True),
        lambda: holdfast.exclude_this_node("hot"),
        lambda: holdfast.stop_job("done"),
    ],
)
def test_outside_holdfast_run_a_script_is_told_what_to_do(call: Callable[[], object]) -> None:
    assert runtime.current() is None
    with pytest.raises(NotUnderHoldfast, match="holdfast run"):
        call()
