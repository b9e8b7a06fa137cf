"""Rounds on torchrun's store: real stores and threads, and real torchrun processes."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from ports import free_port

from holdfast.errors import FencedError, StopRestarting, UnfitProcess, UsageError, WireError
from holdfast.inprocess.link import RoundEntry, RoundLink
from holdfast.inprocess.torchrun import TorchrunLink, launched_as
from holdfast.messages.records import Raised

dist = pytest.importorskip("torch.distributed")

LIMIT_S = 60.0


def error(message: str = "boom") -> Raised:
    return Raised(type="ValueError", message=message, where="train.py:3", traceback="")


class Rank:
    """A rank of a world: its link, a thread for its function, and what its watcher was told."""

    def __init__(self, rank: int, world_size: int, port: int, attempt: int = 0) -> None:
        self.environ = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        self.link: RoundLink = TorchrunLink(self.environ)
        self.told: SimpleQueue[str] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1, f"rank {rank}")

    def begin(self, call: Callable[..., Any], *arguments: object) -> Future[Any]:
        return self._thread.submit(call, *arguments)

    def do(self, call: Callable[..., Any], *arguments: object) -> Any:
        return self.begin(call, *arguments).result(LIMIT_S)

    def open(self) -> RoundEntry:
        entry: RoundEntry = self.do(self.link.open, self.told.put)
        return entry

    def is_told(self) -> str:
        return self.told.get(timeout=LIMIT_S)

    def begin_next(self) -> Future[RoundEntry]:
        self.do(self.link.left)
        return self.begin(self.link.next)


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """Ranks that are threads share torch's table, which each rank's link changes."""
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    before = dict(handlers)
    yield
    handlers.update(before)


@pytest.fixture
def ranks(store: Any) -> Iterator[list[Rank]]:
    world = [Rank(rank, 3, store.port) for rank in range(3)]
    yield world
    for rank in world:
        if hasattr(rank.link, "_watcher"):
            rank.link.close()


def opened(ranks: list[Rank]) -> list[RoundEntry]:
    return [rank.open() for rank in ranks]


def all_next(ranks: list[Rank]) -> list[RoundEntry]:
    waiting = [rank.begin_next() for rank in ranks]
    return [entry.result(LIMIT_S) for entry in waiting]


def results(ranks: list[Rank], call: str, *arguments: object) -> list[Any]:
    waiting = [rank.begin(getattr(rank.link, call), *arguments) for rank in ranks]
    return [result.result(LIMIT_S) for result in waiting]


# ---- rounds ----


def test_an_exception_in_one_rank_makes_all_leave_and_enter_again(ranks: list[Rank]) -> None:
    first = opened(ranks)
    assert [(e.round, e.rank, e.world_size, e.why) for e in first] == [
        (0, r, 3, "") for r in range(3)
    ]
    ranks[1].do(ranks[1].link.raised, error())
    why = "rank 1 raised ValueError: boom"
    assert [rank.is_told() for rank in ranks] == [why] * 3
    again = all_next(ranks)
    assert [(e.round, e.rank, e.world_size, e.why) for e in again] == [
        (1, r, 3, why) for r in range(3)
    ]


def test_an_entry_does_not_find_the_numbers_that_the_one_before_was_given(
    ranks: list[Rank],
) -> None:
    opened(ranks)
    for rank in ranks:
        rank.environ.update(RANK="0", WORLD_SIZE="1")
    ranks[1].do(ranks[1].link.raised, error())
    all_next(ranks)
    found = [(rank.environ["RANK"], rank.environ["WORLD_SIZE"]) for rank in ranks]
    assert found == [("0", "3"), ("1", "3"), ("2", "3")]


def test_nobody_enters_before_all_have_left(ranks: list[Rank]) -> None:
    opened(ranks)
    ranks[0].do(ranks[0].link.raised, error())
    early = [rank.begin_next() for rank in ranks[:2]]
    ranks[2].is_told()
    assert not any(entry.done() for entry in early)
    assert ranks[2].begin_next().result(LIMIT_S).round == 1
    assert [entry.result(LIMIT_S).round for entry in early] == [1, 1]


def test_the_first_of_several_exceptions_is_the_reason_everywhere(ranks: list[Rank]) -> None:
    opened(ranks)
    results(ranks, "raised", error())
    told = {rank.is_told() for rank in ranks}
    assert len(told) == 1
    assert {entry.why for entry in all_next(ranks)} == told


def test_round_follows_round(ranks: list[Rank]) -> None:
    opened(ranks)
    for cycle in range(1, 20):
        ranks[cycle % 3].do(ranks[cycle % 3].link.raised, error(f"fault {cycle}"))
        assert all(rank.is_told().endswith(f"fault {cycle}") for rank in ranks)
        assert [entry.round for entry in all_next(ranks)] == [cycle] * 3
    assert results(ranks, "returned") == [True] * 3


def test_a_watcher_never_speaks_of_a_round_that_is_over(ranks: list[Rank]) -> None:
    """A slow callback holds up its own rank, so that what it does cannot hit the next entry."""
    held, speaking = threading.Event(), threading.Event()

    def slow(why: str) -> None:
        speaking.set()
        assert held.wait(LIMIT_S)
        ranks[0].told.put(why)

    ranks[0].do(ranks[0].link.open, slow)
    opened(ranks[1:])
    raising = ranks[0].begin(ranks[0].link.raised, error())
    assert speaking.wait(LIMIT_S)
    assert ranks[1].is_told()
    assert not raising.done()
    held.set()
    raising.result(LIMIT_S)
    assert ranks[0].told.qsize() == 1
    assert [entry.round for entry in all_next(ranks)] == [1, 1, 1]


def test_what_the_callback_raises_is_raised_in_the_functions_thread(ranks: list[Rank]) -> None:
    def fail(why: str) -> None:
        raise UnfitProcess("the hook abort raised")

    ranks[0].do(ranks[0].link.open, fail)
    opened(ranks[1:])
    ranks[1].do(ranks[1].link.raised, error())
    with pytest.raises(UnfitProcess, match="hook abort"):
        ranks[0].do(ranks[0].link.left)


# ---- returning ----


def test_a_rank_that_returned_waits_for_all(ranks: list[Rank]) -> None:
    opened(ranks)
    early = ranks[0].begin(ranks[0].link.returned)
    second = ranks[1].begin(ranks[1].link.returned)
    assert not early.done()
    assert ranks[2].do(ranks[2].link.returned) is True
    assert early.result(LIMIT_S) is second.result(LIMIT_S) is True
    assert all(rank.told.empty() for rank in ranks)


def test_an_exception_after_others_have_returned_makes_them_enter_again(ranks: list[Rank]) -> None:
    opened(ranks)
    early = [rank.begin(rank.link.returned) for rank in ranks[:2]]
    ranks[2].do(ranks[2].link.raised, error())
    assert [returned.result(LIMIT_S) for returned in early] == [False, False]
    assert [entry.round for entry in all_next(ranks)] == [1, 1, 1]
    assert results(ranks, "returned") == [True] * 3


def test_a_second_function_begins_with_a_round_of_its_own(store: Any) -> None:
    for _ in range(2):
        ranks = [Rank(rank, 2, store.port) for rank in range(2)]
        assert [entry.round for entry in opened(ranks)] == [0, 0]
        ranks[0].do(ranks[0].link.raised, error())
        all_next(ranks)
        assert results(ranks, "returned") == [True, True]
        results(ranks, "close")


def test_what_an_earlier_attempt_of_torchrun_left_behind_is_not_seen(store: Any) -> None:
    old = [Rank(rank, 2, store.port) for rank in range(2)]
    opened(old)
    old[0].do(old[0].link.raised, error("old"))
    new = [Rank(rank, 2, store.port, attempt=1) for rank in range(2)]
    assert [entry.why for entry in opened(new)] == ["", ""]
    assert results(new, "returned") == [True, True]
    assert all(rank.told.empty() for rank in new)
    results(old + new, "close")


# ---- exchanges ----


def test_an_exchange_gives_all_values_in_the_order_of_ranks(ranks: list[Rank]) -> None:
    opened(ranks)
    for turn in range(3):
        waiting = [
            r.begin(r.link.gather, "step", b"%d:%d" % (turn, n)) for n, r in enumerate(ranks)
        ]
        expected = [b"%d:%d" % (turn, n) for n in range(3)]
        assert [values.result(LIMIT_S) for values in waiting] == [expected] * 3


def test_an_exchange_ends_when_the_round_does(ranks: list[Rank]) -> None:
    opened(ranks)
    waiting = [rank.begin(rank.link.gather, "step", b"1") for rank in ranks[:2]]
    ranks[2].do(ranks[2].link.raised, error())
    for exchange in waiting:
        with pytest.raises(FencedError, match=r"round 0 ended.*rank 2 raised"):
            exchange.result(LIMIT_S)
    all_next(ranks)
    assert results(ranks, "gather", "step", b"2") == [[b"2"] * 3] * 3


class Struck(BaseException):
    """What a departure is to the function."""


def test_an_exchange_that_a_departure_interrupts_does_not_block_the_next(ranks: list[Rank]) -> None:
    identity = ranks[0].do(threading.get_ident)

    def strike(why: str) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(identity), ctypes.py_object(Struck)
        )

    ranks[0].do(ranks[0].link.open, strike)
    opened(ranks[1:])
    struck = ranks[0].begin(ranks[0].link.gather, "step", b"1")
    ranks[1].do(ranks[1].link.raised, error())
    with pytest.raises(Struck):
        struck.result(LIMIT_S)
    assert [entry.round for entry in all_next(ranks)] == [1, 1, 1]
    assert results(ranks, "gather", "step", b"2") == [[b"2"] * 3] * 3


def test_fifty_rounds_leave_neither_keys_nor_threads(store: Any) -> None:
    ranks = [Rank(rank, 2, store.port) for rank in range(2)]
    opened(ranks)

    def one_round() -> None:
        results(ranks, "gather", "step", b"1")
        waiting = ranks[1].begin(ranks[1].link.gather, "more", b"1")
        ranks[0].do(ranks[0].link.raised, error())
        with pytest.raises(FencedError):
            waiting.result(LIMIT_S)
        all_next(ranks)

    one_round()
    keys, threads = store.num_keys(), threading.active_count()
    for _ in range(50):
        one_round()
    assert store.num_keys() <= keys
    assert threading.active_count() <= threads
    assert results(ranks, "returned") == [True, True]
    results(ranks, "close")
    assert not [t for t in threading.enumerate() if t.name.startswith("holdfast ")]


# ---- ends ----


@pytest.mark.parametrize("when", ["inside", "returned", "left"])
def test_nobody_waits_for_a_rank_that_will_not_enter_again(ranks: list[Rank], when: str) -> None:
    opened(ranks)
    others = ranks[:2]
    if when == "returned":
        waiting = [rank.begin(rank.link.returned) for rank in others]
    elif when == "left":
        ranks[2].do(ranks[2].link.raised, error())
        waiting = [rank.begin_next() for rank in others]
    ranks[2].do(ranks[2].link.close)
    if when == "inside":
        assert [rank.is_told() for rank in others] == [
            "rank 2 does not enter the function again"
        ] * 2
    if when == "returned":
        assert [returned.result(LIMIT_S) for returned in waiting] == [False, False]
    if when != "left":
        waiting = [rank.begin_next() for rank in others]
    for entry in waiting:
        with pytest.raises(StopRestarting, match="rank 2 does not enter"):
            entry.result(LIMIT_S)


def test_a_store_that_is_gone_makes_ranks_leave_and_is_named() -> None:
    code = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
    server = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        ranks = [Rank(rank, 2, port) for rank in range(2)]
        opened(ranks)
        returning = ranks[0].begin(ranks[0].link.returned)
        server.kill()
        assert "torchrun's store cannot be listened to" in ranks[1].is_told()
        with pytest.raises(WireError, match="did torchrun end"):
            returning.result(LIMIT_S)
        with pytest.raises(WireError, match="did torchrun end"):
            ranks[1].begin_next().result(LIMIT_S)
    finally:
        server.kill()
        server.wait()


# ---- without a launcher ----


def test_a_process_without_a_launcher_is_a_world_of_one() -> None:
    told: SimpleQueue[str] = SimpleQueue()
    link: RoundLink = TorchrunLink({})
    first = link.open(told.put)
    assert (first.round, first.rank, first.world_size) == (0, 0, 1)
    link.raised(error())
    assert told.get(timeout=LIMIT_S) == "rank 0 raised ValueError: boom"
    link.left()
    again = link.next()
    assert again is not None
    assert (again.round, again.why) == (1, "rank 0 raised ValueError: boom")
    assert link.gather("x", b"1") == [b"1"]
    assert link.returned()
    assert not link.replaces
    link.close()
    assert told.empty()


def test_a_world_without_a_store_of_its_launcher_is_refused_with_what_to_do() -> None:
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(UsageError, match=r"WORLD_SIZE is 2.*holdfast run"):
        launched_as(by_hand)
    with pytest.raises(UsageError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        launched_as({**by_hand, "TORCHELASTIC_USE_AGENT_STORE": "False"})


def test_a_world_of_one_by_hand_is_accepted() -> None:
    assert launched_as({"RANK": "0", "WORLD_SIZE": "1"}).store is None


# ---- real processes ----

SCRIPT = """
import json, os, sys, threading
import torch, torch.distributed as dist
from holdfast.inprocess.torchrun import TorchrunLink
from holdfast.messages.records import Raised

ROUNDS = 4
told = threading.Event()
link = TorchrunLink()
entry = link.open(lambda why: told.set())
sums = []
while True:
    told.clear()
    store, _, _ = next(dist.rendezvous("env://"))
    assert not store.check(["of an older round"])
    dist.init_process_group("gloo")
    total = torch.ones(1) * (entry.rank + 1 + entry.round)
    dist.all_reduce(total)
    sums.append(total.item())
    store.set("of an older round", "1")
    if entry.round == ROUNDS:
        done = link.returned()
        assert done
        break
    if entry.rank == entry.round % entry.world_size:
        link.raised(Raised(type="ValueError", message="x", where="", traceback=""))
    told.wait()
    dist.destroy_process_group()
    link.left()
    entry = link.next()
dist.destroy_process_group()
link.close()
with open(sys.argv[1] + f"/{entry.rank}.json", "w") as out:
    json.dump({"pid": os.getpid(), "sums": sums, "round": entry.round}, out)
"""


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def run_script(command: list[str], folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "TORCHELASTIC"))}
    environ = {**kept, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(folder)],
        env=environ,
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_torchruns_ranks_make_a_new_group_in_each_round(rendezvous: str, tmp_path: Path) -> None:
    port = f"--master-port={free_port()}"
    where = ["--standalone"] if rendezvous == "c10d" else ["--master-addr=127.0.0.1", port]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    run_script([*torchrun, *where], tmp_path)
    found = reports(tmp_path)
    assert [report["round"] for report in found] == [4, 4]
    assert [report["sums"] for report in found] == [[3.0 + 2 * r for r in range(5)]] * 2


def test_a_process_without_a_launcher_makes_a_new_group_in_each_round(tmp_path: Path) -> None:
    run_script([sys.executable], tmp_path)
    assert reports(tmp_path)[0]["sums"] == [1.0 + r for r in range(5)]
