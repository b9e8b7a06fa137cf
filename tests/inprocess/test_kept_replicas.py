"""Living state of replicas: with DDP every survivor has all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kept_worlds import Body, Fault, enter
from torch.nn.parallel import DistributedDataParallel

from holdfast.checkpoint.checkpointer import Restored
from holdfast.data import ElasticDataLoader
from holdfast.errors import CheckpointError
from holdfast.inprocess.kept import exchange
from holdfast.inprocess.kept.keep import KeptState, keep

STEPS = 6
DATA = torch.arange(200, dtype=torch.float32).reshape(50, 4).sin()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, 2)
        self.unused = torch.nn.Linear(2, 2)  # Never has a gradient, so it has no optimizer state.

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return found


class Script:
    """A script that trains; its objects are made once in a process, or in each entry."""

    def __init__(self, seed: int = 1, checkpointer: Any = None) -> None:
        self.seed = seed
        self.checkpointer = checkpointer
        self.make()

    def make(self) -> None:
        torch.manual_seed(self.seed)
        self.model = Net()
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sched = torch.optim.lr_scheduler.StepLR(self.optim, 2, gamma=0.5)
        self.data = ElasticDataLoader(DATA, 2, shuffle=True, seed=3)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optim": self.optim,
            "sched": self.sched,
            "data": self.data,
            "note": 0,
        }

    def enter(self) -> KeptState:
        kept = keep(self.state, self.checkpointer)
        kept.restore()
        return kept

    def train(
        self, kept: KeptState, to: int = STEPS, fault: Callable[[str, int], None] | None = None
    ) -> None:
        """Train; `fault` is called at each place of a step, and may raise."""
        at = fault or (lambda place, step: None)
        replica = DistributedDataParallel(self.model, find_unused_parameters=True)
        step = kept.step
        for batch in self.data:
            at("begin", step + 1)
            loss = replica(batch).pow(2).sum()
            self.optim.zero_grad()
            loss.backward()
            at("before step", step + 1)
            self.optim.step()
            at("after step", step + 1)
            self.sched.step()
            step += 1
            self.state["note"] = step * 10
            kept.commit(step)
            at("committed", step)
            if step == to:
                return

    def report(self, kept: KeptState, buffers: bool = True) -> dict[str, Any]:
        model = self.model.state_dict() if buffers else dict(self.model.named_parameters())
        return {
            "step": kept.step,
            "where": kept.restored.where,
            "sources": kept.restored.sources,
            "refused": kept.restored.refused,
            "model": {name: value.detach().clone() for name, value in model.items()},
            "optim": self.optim.state_dict(),
            "sched": self.sched.state_dict(),
            "data": self.data.state_dict(),
            "note": self.state["note"],
        }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in ("step", "model", "optim", "sched", "data", "note"):
        one, other = found[key], wanted[key]
        parts = [k for k in one if not same(one[k], other[k])] if isinstance(one, dict) else one
        assert same(one, other), (key, parts, other)


def undisturbed(tmp_path: Path, size: int = 2, to: int = STEPS, buffers: bool = True) -> list[Any]:
    def make() -> Body:
        script = Script()

        def body(rank: int, entry: int) -> Any:
            kept = script.enter()
            script.train(kept, to)
            return script.report(kept, buffers)

        return body

    return enter(size, make, tmp_path / "undisturbed", entries=1)[0]


def disturbed(
    tmp_path: Path,
    fault: Callable[[int, str, int], bool],
    *,
    size: int = 2,
    replaced: tuple[int, ...] = (),
    anew: bool = False,
    buffers: bool = True,
) -> list[Any]:
    """Train with a fault in the first entry; return what ranks have after the second."""

    def make() -> Body:
        script = Script()

        def body(rank: int, entry: int) -> Any:
            if anew and entry:
                script.make()
            kept = script.enter()

            def at(place: str, step: int) -> None:
                if entry == 0 and fault(rank, place, step):
                    raise Fault

            script.train(kept, fault=at)
            return script.report(kept, buffers)

        return body

    return enter(size, make, tmp_path / "disturbed", replaced=replaced)[1]


def in_step_4(rank: int, place: str, step: int) -> bool:
    return (place, step) == ("before step", 4)


def test_a_run_that_was_left_in_a_backward_pass_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    wanted = undisturbed(tmp_path)
    for found, want in zip(disturbed(tmp_path, in_step_4), wanted, strict=True):
        assert (found["where"], found["sources"]) == ("living", (0, 1))
        check_same(found, want)


def test_objects_made_anew_get_the_state_of_those_before(tmp_path: Path) -> None:
    wanted = undisturbed(tmp_path)
    for found, want in zip(disturbed(tmp_path, in_step_4, anew=True), wanted, strict=True):
        check_same(found, want)


def test_a_fresh_process_gets_the_state_of_a_survivor(tmp_path: Path) -> None:
    """Of the running statistics each rank has its own; the dead rank's are gone with it."""
    wanted = undisturbed(tmp_path, size=3, buffers=False)
    every = disturbed(tmp_path, in_step_4, size=3, replaced=(0, 2), buffers=False)
    for found, want in zip(every, wanted, strict=True):
        assert (found["where"], found["sources"]) == ("living", (1, 1, 1))
        check_same(found, want)


def test_a_rank_left_between_two_steps_gets_the_state_of_another(tmp_path: Path) -> None:
    def fault(rank: int, place: str, step: int) -> bool:
        return step == 4 and place == ("after step" if rank == 0 else "committed")

    wanted = undisturbed(tmp_path, buffers=False)
    for found, want in zip(disturbed(tmp_path, fault, buffers=False), wanted, strict=True):
        assert (found["where"], found["sources"]) == ("living", (1, 1))
        check_same(found, want)


def test_of_two_neighbouring_steps_the_later_is_taken(tmp_path: Path) -> None:
    def fault(rank: int, place: str, step: int) -> bool:
        return (place, step) == (("before step", 4) if rank == 0 else ("committed", 4))

    def make() -> Body:
        script = Script()

        def body(rank: int, entry: int) -> Any:
            kept = script.enter()
            if entry:
                return script.report(kept, buffers=False)
            script.train(kept, fault=lambda place, step: _raise_if(fault(rank, place, step)))

        return body

    wanted = undisturbed(tmp_path, to=4, buffers=False)
    found = enter(2, make, tmp_path / "disturbed")[1]
    assert [one["step"] for one in found] == [4, 4]
    assert [one["sources"] for one in found] == [(1, 1), (1, 1)]
    for one, want in zip(found, wanted, strict=True):
        check_same(one, want)


def _raise_if(condition: bool) -> None:
    if condition:
        raise Fault


class Saved:
    """A checkpointer that has saved one step."""

    def __init__(self, step: int) -> None:
        self.restored = Restored(0, None)
        self._step = step

    def restore(self) -> int:
        self.restored = Restored(self._step, "storage" if self._step else None)
        return self._step


def diverge(tmp_path: Path, checkpointer: Saved | None) -> list[Any]:
    def make() -> Body:
        script = Script(checkpointer=checkpointer)

        def body(rank: int, entry: int) -> Any:
            try:
                kept = script.enter()
            except CheckpointError as error:
                return str(error)
            if entry == 0:
                script.train(kept, 3)
                with torch.no_grad():
                    script.model.last.bias[rank] += 1e-6
                raise Fault
            return script.report(kept)

        return body

    return enter(2, make, tmp_path)[1]


def test_replicas_that_differ_are_refused_and_the_checkpointer_restores(tmp_path: Path) -> None:
    for found in diverge(tmp_path, Saved(2)):
        assert (found["step"], found["where"]) == (2, "storage")
        assert "ranks 0 and 1 both hold step" in found["refused"][0]


def test_refused_state_without_a_checkpoint_is_an_error_and_no_new_start(tmp_path: Path) -> None:
    for number, checkpointer in enumerate((None, Saved(0))):
        for found in diverge(tmp_path / str(number), checkpointer):
            assert "ranks 0 and 1 both hold step" in found
            assert "start the job anew" in found


def test_a_job_without_any_state_begins_at_step_0(tmp_path: Path) -> None:
    def make() -> Body:
        script = Script()

        def body(rank: int, entry: int) -> Any:
            return script.report(script.enter())

        return body

    for found in enter(2, make, tmp_path, entries=1)[0]:
        assert (found["step"], found["where"], found["refused"]) == (0, None, ())


def test_a_first_step_left_by_all_ranks_in_the_middle_is_an_error(tmp_path: Path) -> None:
    """The parameters are neither those of the beginning nor of the first step."""

    def make() -> Body:
        script = Script()

        def body(rank: int, entry: int) -> Any:
            try:
                kept = script.enter()
            except CheckpointError as error:
                return str(error)
            script.train(kept, fault=lambda place, step: _raise_if(place == "after step"))

        return body

    for found in enter(2, make, tmp_path)[1]:
        assert "left between steps 0 and 1" in found


def test_ranks_that_begin_with_other_parameters_may_be_left_before_the_first_step(
    tmp_path: Path,
) -> None:
    def make() -> Body:
        script = Script(seed=torch.seed())

        def body(rank: int, entry: int) -> Any:
            kept = script.enter()
            if entry == 0:
                raise Fault
            script.train(kept, 2)
            return script.report(kept)

        return body

    found = enter(2, make, tmp_path)[1]
    assert [one["step"] for one in found] == [2, 2]


def test_a_restore_that_was_left_leaves_survivors_as_they_were(tmp_path: Path) -> None:
    """The second entry ends in its restore, on all ranks; the third one goes on."""

    def make() -> Body:
        script = Script()

        def body(rank: int, entry: int) -> Any:
            script.make() if entry else None
            kept = keep(script.state)
            if entry == 1:
                kept._take = lambda *_: _raise_if(True)  # type: ignore[method-assign]
            kept.restore()
            script.train(kept, fault=lambda place, step: _raise_if(entry == 0 and step == 4))
            return script.report(kept)

        return body

    wanted = undisturbed(tmp_path)
    for found, want in zip(enter(2, make, tmp_path / "found", entries=3)[2], wanted, strict=True):
        check_same(found, want)


def test_generators_of_a_survivor_go_on_where_the_step_left_them(tmp_path: Path) -> None:
    def make() -> Body:
        script = Script()

        def body(rank: int, entry: int) -> Any:
            kept = script.enter()
            if entry == 0:
                torch.manual_seed(rank)
                kept.commit(1)
                drawn = torch.rand(3)
                dist.barrier()
                torch.save(drawn, tmp_path / f"drawn-{rank}")
                raise Fault
            return torch.equal(torch.rand(3), torch.load(tmp_path / f"drawn-{rank}"))

        return body

    assert enter(2, make, tmp_path / "results")[1] == [True, True]


def odd_tensors() -> dict[str, Any]:
    """Tensors of many forms, more of them than fit in a bucket of the test."""
    torch.manual_seed(4)
    model = torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    model.register_buffer("empty", torch.empty(0, 3))
    half = torch.nn.Linear(33, 17, dtype=torch.bfloat16)
    values = {"complex": torch.randn(7, dtype=torch.complex64), "scalar": torch.tensor(True)}
    return {"model": model, "half": half, "values": values, "list": [1, torch.randn(3, 4).t()]}


def test_tensors_of_any_form_come_over_whole(tmp_path: Path) -> None:
    def make() -> Body:
        exchange.BUCKET_BYTES = 100
        state = odd_tensors()
        optims = [torch.optim.Adam(state[name].parameters()) for name in ("model", "half")]
        state |= {"optim": optims[0], "half_optim": optims[1]}

        def body(rank: int, entry: int) -> Any:
            kept = keep(state)
            kept.restore()
            if entry == 0:
                state["model"](torch.ones(1, 3, 4, 4)).sum().backward()
                state["half"](torch.ones(2, 33, dtype=torch.bfloat16)).sum().backward()
                for optim in optims:
                    optim.step()
                state["values"]["complex"] *= 2
                state["list"][0] = 8
                kept.commit(1)
            found = {name: one.state_dict() for name, one in state.items() if name in LOADED}
            return found | {"values": state["values"], "list": state["list"]}

        return body

    before, after = enter(2, make, tmp_path, replaced=(0,))
    assert same(after[0], before[0])
    assert same(after[1], before[1])
    weight = after[0]["model"]["weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last)


LOADED = ("model", "half", "optim", "half_optim")


def test_parameters_that_ddp_changed_before_restore_are_not_taken(tmp_path: Path) -> None:
    """A fresh rank 0 would give its untrained parameters to all others."""

    def make() -> Body:
        script = Script()

        def body(rank: int, entry: int) -> Any:
            if entry:
                DistributedDataParallel(script.model)
                with pytest.raises(CheckpointError, match=r"init_sync=False") as caught:
                    script.enter()
                return str(caught.value)
            script.train(script.enter(), 2)
            raise Fault

        return body

    said = enter(2, make, tmp_path, replaced=[0])[1]
    assert all("rank 1: parameters were changed before restore()" in one for one in said)


def test_ddp_made_before_restore_without_copying_changes_nothing(tmp_path: Path) -> None:
    def make() -> Body:
        script = Script()

        def body(rank: int, entry: int) -> Any:
            if not entry:
                script.train(script.enter(), 2)
                raise Fault
            DistributedDataParallel(script.model, init_sync=False)
            return script.enter().step

        return body

    assert enter(2, make, tmp_path, replaced=[0])[1] == [2, 2]
