"""Checkpoints work without `holdfast run`, in one process and in many."""

from __future__ import annotations

import copy
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forks import disk_control
from ports import free_port
from states import bits, check_same, flip
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from worlds import end_world, left_in_shared_memory, run_world, start_world

from holdfast.checkpoint.memory.image import Image
from holdfast.checkpoint.standalone import keeper_client, link
from holdfast.checkpoint.storage.backends import step_directory
from holdfast.checkpoint.storage.commit import verify
from holdfast.checkpoint.storage.manifest import find_step, refuse
from holdfast.checkpoint.storage.posix import PosixStorage
from holdfast.checkpoint.tickets import Result
from holdfast.errors import CheckpointError, UsageError
from holdfast.messages.actions import WriteRankFiles
from holdfast.messages.keeper import KeeperOrder
from holdfast.worker.checkpointer import Checkpointer

PATIENCE_S = 60.0


def is_complete(directory: Path, step: int) -> bool:
    storage = PosixStorage(directory)
    return find_step(storage, step).state == "complete" and verify(storage, step) == []


def keeper_of(checkpointer: Checkpointer) -> int:
    pid: int = checkpointer._link.keeper_pid  # type: ignore[attr-defined]
    return pid


def in_one_process(act: Callable[[], None]) -> None:
    run_world(1, lambda rank: act())


# ---- a script ----

SCRIPT = """
import os, sys, torch, holdfast
torch.set_num_threads(1)
state = {"weights": torch.zeros(50_000), "step": 0}
checkpointer = holdfast.Checkpointer(sys.argv[1], state)
print(checkpointer.restore(), state["step"], float(state["weights"].sum()), os.getpid())
state["weights"] += 1
state["step"] += 1
"""


def run_script(directory: Path, rest: str) -> tuple[str, list[str]]:
    """What it printed, and what it left in shared memory."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + rest, str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    *told, pid = done.stdout.splitlines()[0].split()
    return " ".join(told), left_in_shared_memory([int(pid)])


def test_a_script_goes_on_where_it_was(tmp_path: Path) -> None:
    """It saves as the last thing that it does; the save is finished all the same."""
    save = "checkpointer.save(1)"
    fork = "\nif os.fork() == 0: sys.exit()\nos.wait()"  # Whose end is not the script's.
    told, left = run_script(tmp_path, save + fork + "\ncheckpointer.save(9)\nsys.exit(0)")
    assert (told, left) == ("0 0 0.0", [])
    assert is_complete(tmp_path, 9)

    def again() -> None:
        state = {"weights": torch.zeros(50_000), "step": 0}
        assert Checkpointer(tmp_path, state).restore() == 9
        assert (state["step"], float(state["weights"].sum())) == (1, 50_000.0)

    in_one_process(again)


# ---- one process ----


def test_tickets_follow_a_save_to_storage(tmp_path: Path) -> None:
    def act() -> None:
        state = {"a": torch.ones(3)}
        checkpointer = Checkpointer(tmp_path, state)
        first = checkpointer.save(1)
        assert first.memory() == Result("saved", "memory")
        assert first.storage() == first.result() == Result("saved", "storage")
        assert checkpointer.save(1).storage() == first.storage(), "what is saved stays so"
        memory = checkpointer.save(2, to="memory")
        assert memory.storage() == Result("skipped", None, "it was meant for memory")
        assert memory.memory() == memory.result() == Result("saved", "memory")
        checkpointer.save(3)
        checkpointer.wait()
        assert is_complete(tmp_path, 3)

    in_one_process(act)


def test_everything_that_a_script_may_keep_comes_back(tmp_path: Path) -> None:
    def act() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)

        def step() -> None:
            model(torch.randn(5, 3)).sum().backward()
            optimizer.step()
            scheduler.step()

        def snapshot() -> Any:
            return copy.deepcopy(
                [model.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
            )

        state = {"model": model, "optim": optimizer, "schedule": scheduler, "seen": {1: (2, [3.5])}}
        checkpointer = Checkpointer(tmp_path, state)
        for _ in range(3):
            step()
        want = snapshot()
        assert checkpointer.save(3).storage().outcome == "saved"
        step()
        state["seen"] = None
        assert checkpointer.restore() == 3
        check_same(snapshot(), want)
        assert state["seen"] == {1: (2, [3.5])}

    in_one_process(act)


def test_what_a_keeper_that_dies_was_to_do_is_done_by_another(tmp_path: Path) -> None:
    def act() -> None:
        checkpointer = Checkpointer(tmp_path, {"a": torch.ones(3)})
        assert checkpointer.save(1).storage().outcome == "saved"
        for step in (2, 4):
            os.kill(keeper_of(checkpointer), signal.SIGSTOP)
            ticket = checkpointer.save(step)
            assert ticket.memory(0.05) == Result("pending")
            os.kill(keeper_of(checkpointer), signal.SIGKILL)
            assert ticket.storage() == Result("saved", "storage")
            os.kill(keeper_of(checkpointer), signal.SIGKILL)
            assert checkpointer.save(step + 1).storage() == Result("saved", "storage")
        assert checkpointer.restore() == 5
        os.kill(keeper_of(checkpointer), signal.SIGSTOP)
        checkpointer.save(6)
        os.kill(keeper_of(checkpointer), signal.SIGKILL)

    ranks = start_world(1, lambda rank: act())
    assert end_world(ranks) == [0]
    assert left_in_shared_memory([ranks[0].pid]) == []


def test_an_order_that_two_keepers_die_of_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in disk_control(tmp_path).items():
        monkeypatch.setenv(name, value)

    def act() -> None:
        checkpointer = Checkpointer(tmp_path / "ckpt", {"a": torch.ones(3)})
        given: list[KeeperOrder] = []
        send = keeper_client._Child.send

        def counted(child: Any, order: KeeperOrder) -> None:
            given.append(order)
            send(child, order)

        monkeypatch.setattr(keeper_client._Child, "send", counted)
        (tmp_path / "disk").write_text("die:1!")  # Each keeper, at the first thing that it writes.
        assert checkpointer.save(1).storage() == Result("failed", None, keeper_client.DIED)
        writes = [order for order in given if isinstance(order.action, WriteRankFiles)]
        assert len(writes) == 2, "a second keeper was given the order, and no third one"
        (tmp_path / "disk").write_text("")
        assert checkpointer.save(2).storage() == Result("saved", "storage")

    in_one_process(act)


def test_a_script_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    def act(rank: int) -> None:
        checkpointer = Checkpointer(tmp_path, {"a": torch.ones(1000)})
        assert checkpointer.save(1).storage().outcome == "saved"
        os.kill(os.getpid(), signal.SIGKILL)

    ranks = start_world(1, act)
    assert end_world(ranks) == [-signal.SIGKILL]
    until = time.monotonic() + PATIENCE_S
    while left_in_shared_memory([ranks[0].pid]):
        assert time.monotonic() < until, "its keeper does not notice"
        time.sleep(0.01)


def test_what_was_refused_before_is_told_and_the_older_one_restored(tmp_path: Path) -> None:
    """Nobody goes back behind what was saved in silence."""

    def act() -> None:
        state = {"a": torch.ones(3)}
        checkpointer = Checkpointer(tmp_path, state)
        for step in (1, 2):
            state["a"] += 1
            assert checkpointer.save(step).storage().outcome == "saved"
        refuse(PosixStorage(tmp_path), 2)
        assert checkpointer.restore() == 1
        assert (state["a"] == 2).all()
        (refused,) = checkpointer.restored.refused
        assert refused.startswith("step 2 from storage: ")
        refuse(PosixStorage(tmp_path), 1)
        with pytest.raises(CheckpointError, match=r"(?s)step 2 from storage.*step 1 from storage"):
            checkpointer.restore()
        assert checkpointer.save(3).storage().outcome == "saved"
        assert checkpointer.restore() == 3
        assert checkpointer.restored.refused == ()

    in_one_process(act)


def test_a_save_that_fails_does_not_stop_the_next(tmp_path: Path) -> None:
    def act() -> None:
        checkpointer = Checkpointer(tmp_path, {"a": torch.ones(3)})
        (tmp_path / "step_000000001").write_text("in the way")
        failed = checkpointer.save(1).storage()
        assert failed.outcome == "failed"
        assert "step_000000001" in failed.reason
        assert checkpointer.save(2).storage().outcome == "saved"

    in_one_process(act)


def test_the_last_save_is_finished_though_nobody_has_the_checkpointer_any_more(
    tmp_path: Path,
) -> None:
    def act() -> None:
        parameter = torch.nn.Parameter(torch.ones(1000))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        state = {"p": parameter.data, "o": optimizer}
        checkpointer = Checkpointer(tmp_path, state, overlap=True)
        checkpointer._slots._behind.submit(time.sleep, 0.3)
        checkpointer.save(1)

    in_one_process(act)
    assert is_complete(tmp_path, 1)


# ---- several ranks ----


def test_ranks_agree_before_there_is_a_process_group(tmp_path: Path) -> None:
    """The launcher has said which rank each is; else each would take itself for the only one."""
    port = free_port()

    def act(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.barrier()  # The other rank may still be connecting.
        dist.destroy_process_group()
        state = {"mine": torch.full((3,), rank)}
        checkpointer = Checkpointer(tmp_path, state)
        dist.init_process_group("gloo")
        assert checkpointer.save(1).storage() == Result("saved", "storage")
        state["mine"].zero_()
        assert checkpointer.restore() == 1
        assert (state["mine"] == rank).all()
        dist.barrier()

    run_world(2, act)
    assert len(list((tmp_path / step_directory(1)).glob("*.distcp"))) == 2


def test_ranks_that_cannot_meet_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=r"after torch.distributed.init_process_group"):
        Checkpointer(tmp_path, {"a": 1})


def test_ranks_agree_on_what_was_saved(tmp_path: Path) -> None:
    """And end right after: the last word of one is heard by all."""

    def act(rank: int) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(300, 300)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        state: dict[str, Any] = {"model": ddp, "optim": optimizer, "mine": torch.full((3,), rank)}
        checkpointer = Checkpointer(tmp_path, state)
        start = checkpointer.restore()
        assert start in (0, 3)
        if start:
            assert (state["mine"] == rank + 10).all()
        for step in range(start + 1, start + 4):
            ddp(torch.randn(4, 300)).sum().backward()
            optimizer.step()
            state["mine"] = torch.full((3,), rank + 10)
            checkpointer.wait()  # A third save would be skipped as long as two are being read.
            ticket = checkpointer.save(step, to="storage" if step % 3 == 0 else "memory")
        if start:
            assert ticket.storage() == Result("saved", "storage")
        dist.destroy_process_group()

    for step in (3, 6):
        ranks = start_world(2, act)
        assert end_world(ranks) == [0, 0]
        assert is_complete(tmp_path, step)
        assert left_in_shared_memory([one.pid for one in ranks]) == []
    sizes = [path.stat().st_size for path in (tmp_path / "step_000000006").glob("*.distcp")]
    assert sum(sizes) < 1.5 * 2 * 300 * 300 * 4, "what all ranks share was written twice"


def test_a_rank_that_cannot_save_fails_the_step_for_all(tmp_path: Path) -> None:
    def act(rank: int) -> None:
        checkpointer = Checkpointer(tmp_path, {"a": torch.ones(3)})
        real = os.posix_fallocate

        def full(fd: int, offset: int, size: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        if rank == 1:
            os.posix_fallocate = full
        ticket = checkpointer.save(1)
        for result in (ticket.memory(), ticket.storage()):
            assert result.outcome == "failed"
            assert "No space left" in result.reason
            assert rank == 1 or result.reason.startswith("rank 1: ")
        os.posix_fallocate = real
        assert checkpointer.save(2).storage() == Result("saved", "storage")
        # A dead keeper of one is no end for the others either.
        if rank == 1:
            os.kill(keeper_of(checkpointer), signal.SIGSTOP)
        ticket = checkpointer.save(3)
        if rank == 1:
            assert ticket.memory(0.05) == Result("pending")
            os.kill(keeper_of(checkpointer), signal.SIGKILL)
        assert ticket.storage() == Result("saved", "storage")
        assert checkpointer.save(4).storage() == Result("saved", "storage")

    run_world(2, act)
    assert is_complete(tmp_path, 2)
    assert is_complete(tmp_path, 4)
    assert not (tmp_path / step_directory(1)).exists()


def test_a_step_that_one_rank_skips_is_skipped_by_all(tmp_path: Path) -> None:
    def act(rank: int) -> None:
        checkpointer = Checkpointer(tmp_path, {"a": torch.ones(3)})
        for step in (1, 2):
            assert checkpointer.save(step).storage().outcome == "saved"
        images = [Image.open(path) for path in checkpointer._slots._paths]
        dist.barrier()
        if rank == 1:
            assert all(image.pin(image.state) for image in images)
        ticket = checkpointer.save(3)
        for result in (ticket.memory(), ticket.storage()):
            assert result.outcome == "skipped"
            assert rank == 0 or "both images are still being read" in result.reason
        for image in images:
            image.unpin()
        assert checkpointer.save(4).storage() == Result("saved", "storage")

    run_world(2, act)
    assert not (tmp_path / step_directory(3)).exists()


def test_a_rank_that_restores_still_tells_the_others_what_it_missed(tmp_path: Path) -> None:
    def act(rank: int) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        checkpointer = Checkpointer(tmp_path, {"p": parameter, "o": optimizer}, overlap=True)
        assert checkpointer.save(1).storage().outcome == "saved"
        ticket = checkpointer.save(2)
        if rank == 1:
            with torch.no_grad():
                parameter.mul_(2)
        else:
            assert ticket.storage(PATIENCE_S).outcome == "failed"
        assert checkpointer.restore() == 1

    run_world(2, act)


def test_a_step_that_one_rank_saves_by_itself_is_skipped_and_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def act(rank: int) -> None:
        checkpointer = Checkpointer(tmp_path, {"a": torch.ones(3)})
        alone = checkpointer.save(1) if rank == 1 else None
        for step in (2, 3):
            assert checkpointer.save(step).storage() == Result("saved", "storage")
        if alone is not None:
            assert alone.storage().outcome == "skipped"

    run_world(2, act)
    told = capfd.readouterr().err
    assert "step 1 is not on storage: rank 0 has not saved it" in told


@pytest.mark.parametrize("alone", [0, 1])
def test_a_checkpointer_that_one_rank_makes_by_itself_is_in_nobodys_way(
    tmp_path: Path, alone: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "END_S", 0.5)
    ended = tmp_path / "ended"

    def act(rank: int) -> None:
        if rank == alone:
            ticket = Checkpointer(tmp_path / "best", {"a": 1}).save(1)
        checkpointer = Checkpointer(tmp_path / "all", {"a": torch.full((3,), rank)})
        for step in (1, 2):
            assert checkpointer.save(step).storage() == Result("saved", "storage")
        if rank == alone:
            assert ticket.storage(0.0) == Result("pending")
        else:  # If it ended before, the store might be gone with it, which is another matter.
            until = time.monotonic() + PATIENCE_S
            while not ended.exists():
                assert time.monotonic() < until
                time.sleep(0.01)

    ranks = start_world(2, act)
    ranks[alone].join(PATIENCE_S)
    code = ranks[alone].exitcode
    ended.touch()
    assert end_world(ranks) == [0, 0]
    assert code == 0, "it waits for the other rank"
    assert is_complete(tmp_path / "all", 2)
    told = capfd.readouterr().err
    assert f"step 1 is not saved: rank {1 - alone} has made no such Checkpointer" in told


def test_nobody_waits_for_a_rank_that_ended_without_saving(tmp_path: Path) -> None:
    def act(rank: int) -> None:
        checkpointer = Checkpointer(tmp_path, {"a": 1})
        if rank == 0:
            result = checkpointer.save(1).storage(PATIENCE_S)
            assert result == Result("skipped", None, "rank 1 ended without saving it")

    run_world(2, act)


def test_what_is_damaged_for_one_rank_is_refused_by_all(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        state = {"a": torch.full((5,), rank)}
        checkpointer = Checkpointer(tmp_path, state)
        for step in (1, 2):
            state["a"] += 10
            assert checkpointer.save(step).storage().outcome == "saved"

    run_world(2, save)
    (damaged,) = (tmp_path / "step_000000002").glob("__1_*.distcp")
    flip(damaged, 200)

    def restore(rank: int) -> None:
        state = {"a": torch.zeros(5, dtype=torch.int64)}
        checkpointer = Checkpointer(tmp_path, state)
        assert checkpointer.restore() == 1
        assert (state["a"] == rank + 10).all()
        (refused,) = checkpointer.restored.refused
        assert refused.startswith("step 2 from storage: rank 1: ")

    run_world(2, restore)
    assert find_step(PosixStorage(tmp_path), 2).state == "refused"


def test_several_checkpointers_of_a_script_do_not_meet(tmp_path: Path) -> None:
    def act(rank: int) -> None:
        states = [{"a": torch.full((3,), rank)}, {"b": torch.full((3,), 10 + rank)}]
        both = [Checkpointer(tmp_path / name, s) for name, s in zip("ab", states, strict=True)]
        assert [one.restore() for one in both] == [0, 0]
        tickets = [one.save(step) for step in (1, 2) for one in both]
        assert [one.memory().outcome for one in tickets[2:]] == ["saved", "saved"]
        assert [one.storage().outcome for one in tickets[2:]] == ["saved", "saved"]
        assert [one.restore() for one in both] == [2, 2]
        assert both[0]._link.round != 0

    run_world(2, act)
    assert is_complete(tmp_path / "a", 2)
    assert is_complete(tmp_path / "b", 2)


def test_a_restore_in_the_midst_of_saves(tmp_path: Path) -> None:
    """Ranks are not equally fast, and each does both."""

    def act(rank: int) -> None:
        checkpointer = Checkpointer(tmp_path, {"a": torch.full((3,), rank)})
        assert checkpointer.save(1).storage().outcome == "saved"
        for step in range(2, 6):
            checkpointer.save(step, to="memory")
            if rank == 1:
                checkpointer.wait()
            assert checkpointer.restore() == 1

    run_world(2, act)


# ---- shards ----


class Net(torch.nn.Module):  # type: ignore[misc]
    """With uneven shards in any world: 7 rows and 5, and 3 that not all ranks have one of."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wide = torch.nn.Linear(6, 7)
        self.narrow = torch.nn.Linear(7, 3)
        self.large = torch.nn.Linear(3, 7001)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.large(self.narrow(self.wide(x).relu()))


class Training:
    def __init__(self, seed: int, size: int) -> None:
        self.net = Net(seed)
        if size > 1:
            mesh = init_device_mesh("cpu", (size,))
            for layer in (self.net.wide, self.net.narrow, self.net.large, self.net):
                fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.state = {"model": self.net, "optim": self.optimizer, "schedule": self.schedule}

    def step(self) -> None:
        torch.manual_seed(0)  # All ranks have the same batch: worlds of any size learn the same.
        self.net(torch.randn(4, 6)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def whole(self) -> dict[str, Any]:
        """All of it, put together from all ranks."""
        states = {name: one.state_dict() for name, one in self.state.items()}
        return copy.deepcopy(unsharded(states))


def unsharded(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach()
    if isinstance(value, dict):
        return {key: unsharded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(unsharded(one) for one in value)
    return value


def train_on(directory: Path, size: int, expected: int) -> None:
    """Restore that step in a world of that size, compare, go on for two steps, and save."""

    def act(rank: int) -> None:
        training = Training(seed=expected + 7, size=size)
        if expected % 4 == 2:
            training.step()  # Once into an optimizer that has a state, once into a fresh one.
        checkpointer = Checkpointer(directory, training.state)
        assert checkpointer.restore() == expected
        if expected:
            want = torch.load(directory / f"{expected}.pt", weights_only=False)
            check_same(training.whole(), want)
        for _ in range(2):
            training.step()
        assert checkpointer.save(expected + 2).storage() == Result("saved", "storage")
        whole = training.whole()
        if rank == 0:
            torch.save(whole, directory / f"{expected + 2}.pt")

    run_world(size, act)


def test_a_sharded_state_is_restored_in_worlds_of_any_size(tmp_path: Path) -> None:
    for number, size in enumerate([4, 2, 1, 4]):
        train_on(tmp_path, size, expected=2 * number)
    steps = [torch.load(tmp_path / f"{step}.pt", weights_only=False) for step in (2, 8)]
    assert steps[0]["schedule"]["last_epoch"] == 2
    assert steps[1]["schedule"]["last_epoch"] == 8


def test_plain_torch_reads_what_was_written(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        training = Training(seed=1, size=2)
        training.step()
        state = {**training.state, "extra": {"epoch": 3, "rng": torch.full((4,), rank)}}
        checkpointer = Checkpointer(tmp_path, state)
        assert checkpointer.save(1).storage().outcome == "saved"
        whole = training.whole()
        if rank == 0:
            torch.save(whole, tmp_path / "whole.pt")

    run_world(2, save)
    want = torch.load(tmp_path / "whole.pt", weights_only=False)

    def load(rank: int, size: int) -> None:
        training = Training(seed=9, size=size)
        training.step()
        state = {name: one.state_dict() for name, one in training.state.items()}
        state["optim"] = get_optimizer_state_dict(training.net, training.optimizer)
        state["extra"] = {"epoch": 0, "rng": torch.zeros(4, dtype=torch.int64)}
        dcp.load(state, checkpoint_id=tmp_path / "step_000000001", no_dist=size == 1)
        set_optimizer_state_dict(training.net, training.optimizer, state["optim"])
        state["optim"] = training.optimizer.state_dict()
        got = unsharded(state)
        extra = got.pop("extra")
        assert (extra["epoch"], extra["rng"].tolist()) == (3, [0] * 4)
        for entry in ("model", "optim", "schedule"):
            check_same({**got[entry]}, {**want[entry]})

    for size in (1, 3):
        run_world(size, lambda rank, size=size: load(rank, size))  # type: ignore[misc]


def test_shards_that_two_ranks_have_are_written_once(tmp_path: Path) -> None:
    """As with hybrid sharding: replicated one way, sharded the other; and resharded in between."""
    whole = torch.arange(40 * 3000, dtype=torch.float32).reshape(40, 3000)

    def act(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        placements = [Replicate(), Shard(0)]
        state: dict[str, Any] = {
            "t": distribute_tensor(whole, mesh, placements),
            "all": distribute_tensor(whole + 1, mesh, [Replicate(), Replicate()]),
        }
        checkpointer = Checkpointer(tmp_path, state)
        assert checkpointer.save(1).storage().outcome == "saved"
        # The same tensor, cut another way, is another layout.
        state["t"] = distribute_tensor(whole + 2, mesh, [Shard(1), Shard(0)])
        assert checkpointer.save(2).storage().outcome == "saved"
        for step, plus in ((1, 0), (2, 2)):
            state["t"] = distribute_tensor(whole * 0, mesh, [Shard(0), Shard(1)])
            checkpointer.restore(step)
            assert bits(state["t"].full_tensor()) == bits(whole + plus)
            assert bits(state["all"].full_tensor()) == bits(whole + 1)
        state["t"] = None
        assert checkpointer.restore() == 2
        assert bits(state["t"]) == bits(whole + 2)

    run_world(4, act)
    files = (tmp_path / "step_000000001").glob("*.distcp")
    assert sum(path.stat().st_size for path in files) < 2.2 * whole.nbytes


def test_saves_leave_no_keys_in_the_store_nor_a_closed_checkpointer_a_keeper(
    tmp_path: Path,
) -> None:
    def act(rank: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        counts = []
        for number in range(2):
            state = {"w": torch.ones(3)}
            with Checkpointer(tmp_path, state, memory_every=1, storage_every=2) as checkpointer:
                for step in range(1, 2 + 4 * number):
                    checkpointer.save(step + 10 * number).result()
                dist.barrier()
                counts.append(_settled(store.num_keys))
                dist.barrier()  # The other rank may still count.
                keeper = checkpointer._link.keeper_pid  # type: ignore[attr-defined]
            assert not os.path.exists(f"/proc/{keeper}")
            dist.barrier()
            counts.append(_settled(store.num_keys))
            dist.barrier()
        assert counts[0] == counts[2], "each save has left some"
        assert counts[1] == counts[3] == counts[0] - 2, "the meeting itself has left some"

    run_world(2, act)


def _settled(count: Callable[[], int]) -> int:
    """A number that did not change for a while: keys are deleted by threads of their own."""
    seen = [count()]
    while len(seen) < 10 or len(set(seen[-10:])) > 1:
        time.sleep(0.02)
        seen.append(count())
    return seen[-1]
