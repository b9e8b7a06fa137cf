"""What `keep` and `commit` promise in one process: zones, records, cost, memory."""

from __future__ import annotations

import gc
import importlib
import itertools
import statistics
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from yardstick import cost_in_calls

from holdfast.checkpoint.checkpointer import Restored
from holdfast.data import ElasticDataLoader, ElasticIterableDataset
from holdfast.errors import CheckpointError, UsageError
from holdfast.inprocess.kept.boundary import BufferCopies, detached
from holdfast.inprocess.kept.keep import KeptState, keep
from holdfast.inprocess.kept.registry import forget, function_left
from holdfast.inprocess.kept.zones import before_steps
from holdfast.inprocess.zones import install_zones


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    install_zones(None)
    forget()


class Departed(BaseException):
    pass


class Gate:
    """Zones as a restartable function has them."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.asked = False

    def begin_zone(self) -> None:
        if self.asked:
            raise Departed
        self.told.append("begin")

    def end_zone(self) -> None:
        self.told.append("end")
        if self.asked:
            raise Departed

    def atomic(self) -> AbstractContextManager[None]:
        return nullcontext()


def state() -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optim = torch.optim.Adam(model.parameters())
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 10)
    data = ElasticDataLoader(torch.arange(40.0), 4)
    return {"model": model, "optim": optim, "sched": sched, "data": data}


def take_step(of: dict[str, Any]) -> None:
    of["model"](torch.ones(1, 3)).sum().backward()
    of["optim"].step()
    of["sched"].step()


def restored(of: dict[str, Any]) -> KeptState:
    kept = keep(of)
    kept.restore()
    return kept


def test_a_zone_lasts_from_the_first_optimizer_step_to_the_commit() -> None:
    gate = Gate()
    install_zones(gate)
    one = state()
    one["other"] = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    kept = restored(one)
    assert gate.told == []
    take_step(one)
    one["other"].step()
    assert gate.told == ["begin"]
    kept.commit(1)
    assert gate.told == ["begin", "end"]
    kept.commit(2)  # Nothing was changed.
    assert gate.told == ["begin", "end"]


def test_a_step_that_may_not_begin_changes_nothing() -> None:
    gate = Gate()
    install_zones(gate)
    one = state()
    restored(one)
    gate.asked = True
    before = [p.detach().clone() for p in one["model"].parameters()]
    with pytest.raises(Departed):
        take_step(one)
    assert all(map(torch.equal, before, one["model"].parameters()))
    function_left()
    again = keep(one)
    assert again.restore() == 0
    assert again.restored.where == "living"


def test_a_commit_at_whose_end_the_function_is_left_counts() -> None:
    gate = Gate()
    install_zones(gate)
    one = state()
    kept = restored(one)
    take_step(one)
    gate.asked = True
    with pytest.raises(Departed):
        kept.commit(1)
    function_left()
    install_zones(None)
    assert keep(one).restore() == 1


def test_a_survivor_goes_back_to_its_last_commit() -> None:
    one = state()
    kept = restored(one)
    batches = iter(one["data"])
    first = [next(batches) for _ in range(2)]
    take_step(one)
    kept.commit(1)
    lost = next(batches)
    one["sched"].step()
    rate = kept._boundary.groups["optim"][0]["lr"]  # type: ignore[union-attr]
    function_left()
    assert keep(one).restore() == 1
    assert torch.equal(next(iter(one["data"])), lost)
    assert not torch.equal(first[1], lost)
    assert one["optim"].param_groups[0]["lr"] == rate
    assert one["sched"].last_epoch == 1
    assert all(p.grad is None for p in one["model"].parameters())


def test_a_plain_value_is_that_of_the_last_commit() -> None:
    one = {**state(), "seen": [1, {"a": 2}], "count": 1}
    kept = restored(one)
    take_step(one)
    one["count"] = 2
    kept.commit(1)
    one["seen"].append(3)
    one["seen"][1]["a"] = 9
    one["count"] = 3
    function_left()
    keep(one).restore()
    assert (one["seen"], one["count"]) == ([1, {"a": 2}], 2)


def test_an_object_that_is_kept_in_place_is_not_asked_at_commits() -> None:
    class Average:
        kept_in_place = True
        asked = 0

        def state_dict(self) -> dict[str, int]:
            Average.asked += 1
            return {"mean": 4}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    one = {**state(), "mean": Average()}
    kept = restored(one)
    before = Average.asked
    for step in range(3):
        kept.commit(step)
    assert Average.asked == before


@pytest.mark.parametrize("size", [8, 1 << 18], ids=["small", "large"])
def test_buffers_that_change_in_a_forward_pass_go_back_too(size: int) -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(size))

        def forward(self) -> None:
            self.seen += 1

    model = Counting()
    kept = restored({"model": model})
    model()
    kept.commit(1)
    model()
    function_left()
    assert keep({"model": model}).restore() == 1
    assert model.seen.tolist() == [1.0] * size


def test_a_large_buffer_is_copied_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Module()
    model.register_buffer("mask", torch.zeros(1 << 18))
    copies = BufferCopies([model])
    copies.update()
    copied = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda targets, sources: copied.append(sources))
    copies.update()
    assert copied == []
    model.mask += 1
    copies.update()
    assert len(copied) == 1


def test_what_is_recorded_does_not_change_later() -> None:
    tensor = torch.zeros(2)
    value = {"a": [1, (2, {"b": 3})], "t": tensor}
    found = detached(value)
    value["a"][1][1]["b"] = 4  # type: ignore[index]
    assert found == {"a": [1, (2, {"b": 3})], "t": tensor}
    assert found["t"] is tensor


def test_objects_that_a_checkpointer_was_overwriting_are_not_trusted() -> None:
    """It was called because the names differ, and was left in the middle of its restore."""

    class Interrupted:
        restored = Restored(0, None)

        def restore(self) -> int:
            with torch.no_grad():
                one["model"].weight.zero_()
            raise Departed

    one = state()
    kept = restored(one)
    take_step(one)
    kept.commit(1)
    function_left()
    other = keep({**one, "more": 1}, Interrupted())
    with pytest.raises(Departed):
        other.restore()
    function_left()
    with pytest.raises(CheckpointError, match="left between steps 1 and 2"):
        keep(one).restore()


def test_a_new_wrapper_of_a_module_does_not_hide_that_its_step_was_not_finished() -> None:
    inner = torch.nn.Linear(3, 2)
    optim = torch.optim.Adam(inner.parameters())

    def wrapped() -> dict[str, Any]:
        return {"model": torch.nn.Sequential(inner), "optim": optim}

    kept = restored(wrapped())
    inner(torch.ones(1, 3)).sum().backward()
    optim.step()
    function_left()
    with pytest.raises(CheckpointError, match="left between steps 0 and 1"):
        keep(wrapped()).restore()
    del kept


# ---- misuse ----


def test_a_second_kept_state_in_one_entry_is_refused() -> None:
    restored(state())
    with pytest.raises(UsageError, match="already keeps a state"):
        keep(state())


def test_a_kept_state_of_an_entry_before_is_refused() -> None:
    kept = restored(state())
    function_left()
    with pytest.raises(UsageError, match="its function was left"):
        kept.commit(1)


def test_a_commit_before_restore_or_of_an_earlier_step_is_refused() -> None:
    kept = keep(state())
    with pytest.raises(UsageError, match=r"call restore\(\) first"):
        kept.commit(1)
    kept.restore()
    kept.commit(5)
    with pytest.raises(UsageError, match="lies before step 5"):
        kept.commit(4)


def test_what_is_spread_over_ranks_is_refused() -> None:
    class Stream(ElasticIterableDataset):
        def partitions(self) -> list[str]:
            return ["a"]

        def read(self, partition: str, offset: int) -> Iterator[Any]:
            yield from ()

    with pytest.raises(UsageError, match="'data' is spread over ranks"):
        keep({"data": ElasticDataLoader(Stream(), 2)})


def test_a_value_that_cannot_be_encoded_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r"what: a builtins\.object cannot be saved"):
        keep({"what": object()})


# ---- cost and memory ----


def test_a_commit_costs_less_than_two_thousand_function_calls() -> None:
    one = state()
    kept = restored(one)
    take_step(one)
    steps = itertools.count(1)
    assert cost_in_calls(lambda: kept.commit(next(steps)), 100) < 2000


def test_objects_of_an_entry_before_are_released_after_the_restore() -> None:
    one = state()
    kept = restored(one)
    take_step(one)
    kept.commit(1)
    old = weakref.ref(one["model"]), weakref.ref(one["optim"]), weakref.ref(kept)
    function_left()
    new = state()
    del one, kept
    again = keep(new)
    gc.collect()
    assert old[0]() is not None
    assert again.restore() == 1
    gc.collect()
    assert [ref() for ref in old] == [None, None, None]


def test_optimizer_state_is_handed_over_and_not_copied() -> None:
    one = state()
    kept = restored(one)
    take_step(one)
    kept.commit(1)
    before = {s["exp_avg"].data_ptr() for s in one["optim"].state.values()}
    function_left()
    new = state()
    keep(new).restore()
    assert {s["exp_avg"].data_ptr() for s in new["optim"].state.values()} == before


def test_a_thousand_entries_leave_nothing_behind() -> None:
    one = state()
    for step in range(1000):
        kept = restored(one)
        take_step(one)
        kept.commit(step + 1)
        function_left()
    assert len(one["optim"]._optimizer_step_pre_hooks) == 0
    gc.collect()
    assert sum(type(found) is KeptState for found in gc.get_objects()) <= 1


def test_the_compiler_makes_no_step_of_a_kept_optimizer_slow() -> None:
    importlib.import_module("torch._dynamo")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    begun: list[int] = []

    class Owner:
        def begin(self) -> None:
            begun.append(1)

    def steps_s() -> float:
        optimizer.step()  # The first one may prepare what the others use.
        took_s = []
        for _ in range(50):
            since = time.perf_counter()
            optimizer.step()
            took_s.append(time.perf_counter() - since)
        return statistics.median(took_s)

    owner = Owner()
    plain_s = steps_s()
    end = before_steps([optimizer], owner.begin)
    kept_s = steps_s()
    end()
    assert len(begun) == 51
    assert kept_s < 10 * plain_s
