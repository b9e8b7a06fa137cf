"""No process that was got for a rank is forgotten; one with a GPU is for a rank that uses that one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest

from holdfast.agent.devices import Device
from holdfast.agent.processes import Exit, ProcessTable, WorkerProcess, spawn
from holdfast.agent.standbys import Pool
from holdfast.messages.local import GAVE_DEVICE_UP, DeviceUsed, Standing, TakeDevice
from holdfast.messages.records import Raised
from holdfast.shm.rank_page import create_page


@pytest.mark.parametrize("turns", range(7))
def test_when_a_start_is_given_up_whoever_was_got_for_it_stands_by(turns: int) -> None:
    got = []

    def get() -> MagicMock:
        got.append(MagicMock())
        return got[-1]

    orders = MagicMock(logs=Path())
    orders.settings = MagicMock(standby=0, entry="script", script="train.py", script_args=())
    orders.home.imports = Path("imports.json")

    async def scenario() -> None:
        pool = Pool(orders, MagicMock(), {})
        pool._spawn_fresh = get  # type: ignore[method-assign]
        taking = asyncio.ensure_future(pool.take(range(3)))
        for _ in range(turns):
            await asyncio.sleep(0)
        taking.cancel()
        taken = []
        with contextlib.suppress(asyncio.CancelledError):
            taken = await taking
        await asyncio.sleep(0)
        assert taken + pool.waiting == got

    asyncio.run(scenario())


# ---- GPUs ----

GIB = 1 << 30
LIMIT_S = 60.0
OUT_OF_MEMORY = Raised(type="OutOfMemoryError", message="", where="", traceback="")


class Node:
    """A pool whose standbys are real processes that only wait; the test speaks for them."""

    def __init__(self, folder: Path) -> None:
        orders = MagicMock(logs=folder)
        orders.settings = MagicMock(standby=None, nproc=2, entry="script", script_args=())
        orders.settings.script = str(folder / "train.py")
        orders.settings.virtual_local_rank = False
        orders.settings.standby_gpu = True
        orders.home.imports = folder / "imports.json"
        self.table = ProcessTable()
        self.said: list[str] = []
        self.pool = Pool(orders, self.table, {}, tell=self.said.append)
        self.pool._fork = self._fork  # type: ignore[method-assign]
        self.ends: dict[WorkerProcess, socket.socket] = {}
        self.leave: dict[WorkerProcess, int] = {}
        """Pipes: a line makes a standby exit as one that leaves its GPU."""

    async def _fork(self, rehearse: bool) -> WorkerProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        page = create_page()
        standby = WorkerProcess(ours, page, warm=True)
        os.close(page)
        stdin, self.leave[standby] = os.pipe()
        waits = ["sh", "-c", f"read line; exit {GAVE_DEVICE_UP}"]
        standby.process = self.table.watch(spawn(waits, os.environ, stdio=[stdin, None, None]))
        os.close(stdin)
        self.ends[standby] = theirs
        return standby

    async def ready(self) -> None:
        """Until the pool is full and its standbys have rehearsed."""

        def full() -> bool:
            self.pool.refill()  # The monitor of the workers does so all the time.
            return len(self.pool.waiting) == 2

        await self.until(full)
        for standby in list(self.pool.waiting):
            if not standby.rehearsed:
                await self.say(standby, Standing())

    async def say(self, standby: WorkerProcess, message: Standing) -> None:
        self.ends[standby].send(msgspec.msgpack.encode(message))
        before = standby.taking_device, standby.rehearsed
        await self.until(lambda: (standby.taking_device, standby.rehearsed) != before)

    async def until(self, done: Callable[[], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + LIMIT_S
        while not done():
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.001)

    def order(self, standby: WorkerProcess) -> TakeDevice:
        """The order that has reached a standby."""
        return msgspec.msgpack.decode(self.ends[standby].recv(65536), type=TakeDevice)

    async def first_steps(self) -> list[WorkerProcess]:
        """Ranks, each on its GPU, after their first step."""
        ranks = await self.pool.take(range(2))
        for index, rank in enumerate(ranks):
            used = DeviceUsed(index=index, free_bytes=70 * GIB, total_bytes=80 * GIB)
            self.pool.note_device(rank, used)
        return ranks

    async def hold_all(self) -> list[WorkerProcess]:
        """Ranks, once there is a standby for the GPU of each."""
        ranks = await self.first_steps()
        await self.ready()
        for _ in range(2):
            (busy,) = (standby for standby in self.pool.waiting if standby.taking_device)
            await self.say(busy, Standing(device_bytes=GIB))
        return ranks

    async def close(self) -> None:
        self.pool.close()
        for standby in self.ends:
            assert standby.process is not None
            standby.process.send(signal.SIGKILL)
            await self.until(lambda process=standby.process: process.exit is not None)  # type: ignore[misc]
            standby.close()
            os.close(self.leave[standby])
            self.ends[standby].close()


def on_a_node(folder: Path, scenario: Callable[[Node], Awaitable[None]]) -> None:
    async def run() -> None:
        node = Node(folder)
        try:
            await scenario(node)
        finally:
            await node.close()
            asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    asyncio.run(run())


def test_standbys_take_the_gpus_of_the_ranks_one_after_the_other(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await node.first_steps()
        await node.ready()
        taken = []
        for _ in range(2):
            (busy,) = (standby for standby in node.pool.waiting if standby.taking_device)
            taken.append(node.order(busy).index)
            await node.say(busy, Standing(device_bytes=GIB))
        assert taken == [0, 1]
        assert not any(standby.taking_device for standby in node.pool.waiting)

    on_a_node(tmp_path, scenario)


def test_each_rank_gets_the_standby_that_holds_its_gpu(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await node.hold_all()
        node.pool.waiting.reverse()
        ranks = await node.pool.take(range(2))
        assert [rank.device for rank in ranks] == [Device("", 0), Device("", 1)]
        assert [rank.local_rank for rank in ranks] == [0, 1]

    on_a_node(tmp_path, scenario)


def test_one_rank_alone_gets_its_own_standby(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await node.hold_all()
        (rank,) = await node.pool.take([1])
        assert rank.device == Device("", 1)
        assert [standby.device for standby in node.pool.waiting] == [Device("", 0)]

    on_a_node(tmp_path, scenario)


def test_the_user_is_told_once_what_it_costs(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await node.hold_all()
        assert node.said == ["standbys hold 1.0 GiB of each GPU (--standby-gpu off frees it)"]

    on_a_node(tmp_path, scenario)


def test_before_a_rank_that_ran_out_of_memory_is_tried_again_all_standbys_have_left(
    tmp_path: Path,
) -> None:
    async def scenario(node: Node) -> None:
        await node.hold_all()
        holders = list(node.pool.waiting)
        node.pool.note_failure(OUT_OF_MEMORY)
        ranks = await node.pool.take(range(2))
        assert all(one.process and one.process.exit == Exit(signal=9) for one in holders)
        assert all(rank.device is None for rank in ranks)
        assert node.said[1:] == ["standbys hold no GPU any more: a rank ran out of GPU memory"]

    on_a_node(tmp_path, scenario)


def test_standbys_that_have_left_do_not_come_back_to_the_gpus(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await node.hold_all()
        node.pool.note_failure(OUT_OF_MEMORY)
        await node.first_steps()
        await node.ready()
        assert not any(standby.device for standby in node.pool.waiting)
        assert len(node.said) == 2
        assert node.said[1].startswith("standbys hold no GPU any more: ")

    on_a_node(tmp_path, scenario)


def test_any_other_failure_leaves_them_where_they_are(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await node.hold_all()
        holders = list(node.pool.waiting)
        node.pool.note_failure(Raised(type="ValueError", message="no", where="", traceback=""))
        assert node.pool.waiting == holders
        assert not node.pool._leaving

    on_a_node(tmp_path, scenario)


def test_if_one_leaves_its_gpu_for_want_of_memory_all_do(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await node.hold_all()
        leaver, other = node.pool.waiting
        os.write(node.leave[leaver], b"\n")
        await node.until(lambda: other.process is not None and other.process.exit is not None)
        await node.ready()
        assert not any(standby.device for standby in node.pool.waiting)
        assert len(node.said) == 2
        assert node.said[1].startswith("standbys hold no GPU any more: ")

    on_a_node(tmp_path, scenario)
