"""Sends and receives are counted only where the counts say which of them meet."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from holdfast.diagnosis import flight
from holdfast.diagnosis.flight import CountedPair
from holdfast.messages.evidence import ANY_PEER, MAX_PAIRS, UNCOUNTED
from holdfast.worker.torch_hooks.pairs import PairCalls

TENSORS = [SimpleNamespace(is_cpu=True)]
ON_GPU = [SimpleNamespace(is_cpu=False)]


class Work:
    """An operation, as torch returns it."""


class Group:
    """A process group with torch's methods; a call to rank 99 fails."""

    group_desc = "undefined"
    _device_types = (SimpleNamespace(type="cpu"),)

    def __init__(self, name: str = "0", backend: str = "gloo") -> None:
        self.group_name, self.backend = name, backend

    def rank(self) -> int:
        return 5

    def _get_backend(self, device: object) -> Any:
        return SimpleNamespace(name=lambda: self.backend)

    def send(self, tensors: Any, dstRank: int, tag: int) -> Work:
        if dstRank == 99:
            raise ValueError("no such rank")
        return Work()

    def recv(self, tensors: Any, srcRank: int, tag: int) -> Work:
        return Work()

    def recv_anysource(self, tensors: Any, tag: int) -> Work:
        return Work()


class Registered(dict[Any, Any]):
    def __contains__(self, group: object) -> bool:
        return True


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> PairCalls:
    """The counts of a process whose groups have members 0, 10, 20 and so on."""
    name = "torch.distributed.distributed_c10d"
    module: Any = ModuleType(name)
    module.ProcessGroup = type("ProcessGroup", (Group,), dict(vars(Group)))
    module.Work, module._world = Work, SimpleNamespace(pg_group_ranks=Registered())
    module.get_global_rank = lambda group, peer: 10 * peer
    module._update_default_pg = lambda group: None
    monkeypatch.setitem(sys.modules, name, module)
    flight.count_worlds(module)
    module._update_default_pg(object())
    made = PairCalls()
    made.install()
    return made


def group(name: str = "0", backend: str = "gloo") -> Any:
    return sys.modules["torch.distributed.distributed_c10d"].ProcessGroup(name, backend)


def pair(peer: int, sends: int = 0, receives: int = 0, name: str = "0") -> CountedPair:
    return CountedPair((name, "undefined"), peer, sends, receives)


def test_each_peer_of_each_group_counts_for_itself(calls: PairCalls) -> None:
    world, other = group(), group("3")
    world.send(TENSORS, 1, 0)
    world.send(TENSORS, dstRank=1, tag=0)
    world.recv(TENSORS, 1, 0)
    other.recv(tensors=TENSORS, srcRank=2, tag=4)
    world.send(ON_GPU, 2, 0)
    assert calls.counted() == [pair(10, 2, 1), pair(20, 0, 1, "3")]


def test_an_operation_that_is_waited_for_has_its_number(calls: PairCalls) -> None:
    world = group()
    first, second = world.recv(TENSORS, 1, 0), world.recv(TENSORS, 1, 0)
    named = [(one.profiling_name, one.number) for one in map(calls.awaited, (first, second)) if one]
    assert named == [("gloo:recv 5<-1", 1), ("gloo:recv 5<-1", 2)]
    assert calls.awaited(Work()) is None, "a collective"
    assert calls.awaited(group(backend="mpi").send(TENSORS, 1, 0)) is None


def test_a_call_that_fails_is_not_counted(calls: PairCalls) -> None:
    with pytest.raises(ValueError, match="no such rank"):
        group().send(TENSORS, 99, 0)
    assert calls.counted() == []


def test_calls_without_one_order_have_no_count(calls: PairCalls) -> None:
    one, again = group("1"), group("1")
    one.send(TENSORS, 1, 0)
    again.send(TENSORS, 1, 0)  # One of them has been destroyed.
    tagged = group("2")
    tagged.recv(TENSORS, 1, 0)
    last = tagged.recv(TENSORS, 1, 7)
    threads = group("3")
    threads.send(TENSORS, 1, 0)
    other = threading.Thread(target=threads.send, args=(TENSORS, 1, 0))
    other.start()
    other.join()
    assert calls.counted() == [
        pair(10, UNCOUNTED, 0, "1"),
        pair(10, 0, UNCOUNTED, "2"),
        pair(10, UNCOUNTED, 0, "3"),
    ]
    found = calls.awaited(last)
    assert found is not None
    assert found.number == 0


def test_receives_of_a_rank_that_takes_from_any_have_no_number(calls: PairCalls) -> None:
    world = group()
    direct, open_end = world.recv(TENSORS, 1, 0), world.recv_anysource(TENSORS, 0)
    sent = world.send(TENSORS, 1, 0)
    assert calls.awaited(open_end) is None
    assert [calls.awaited(one).number for one in (direct, sent)] == [0, 1]  # type: ignore[union-attr]
    assert pair(ANY_PEER, 0, 1) in (calls.counted() or [])


def test_a_new_world_counts_from_the_start(calls: PairCalls) -> None:
    old = group()
    old.send(TENSORS, 1, 0)
    sys.modules["torch.distributed.distributed_c10d"]._update_default_pg(object())
    assert calls.counted() == []
    group().send(TENSORS, 1, 0)
    assert calls.counted() == [pair(10, 1)]


def test_too_many_peers_are_not_counted(calls: PairCalls) -> None:
    world = group()
    for peer in range(MAX_PAIRS + 1):
        world.send(TENSORS, peer + 100, 0)
    assert calls.counted() is None


def test_an_operation_is_not_kept_by_being_counted(calls: PairCalls) -> None:
    for _ in range(3):
        group().send(TENSORS, 1, 0)
    assert not calls._works
