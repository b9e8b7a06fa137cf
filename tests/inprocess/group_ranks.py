"""Ranks for tests of process groups: processes that run this file.

Each plays a part in one of the cases below, and prints what it measured as lines of JSON. A line that
it is sent lets it go on. By hand, as on a machine with a GPU:

    python tests/inprocess/group_ranks.py try nccl 2 5
"""

from __future__ import annotations

import gc
import http.server
import json
import os
import queue
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from holdfast import proc
from holdfast.inprocess import groups
from holdfast.inprocess.groups import gloo, records
from holdfast.inprocess.leaving import InterruptibleCall

LONG_S = 60.0
ROOT = Path(__file__).parent.parent.parent

Line = dict[str, Any]

KINDS = ("all_reduce", "barrier", "async_wait", "recv", "ddp_backward", "subgroup", "new_group")


class Rank:
    """A process that plays a part."""

    def __init__(self, case: str, rank: int, world: int, ports: list[int], **more: str) -> None:
        words = [sys.executable, "-W", "ignore", __file__, case, ",".join(map(str, ports))]
        environment = dict(
            *(os.environ,),
            RANK=str(rank),
            WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            PYTHONPATH=str(ROOT),
            OMP_NUM_THREADS="1",
            TORCH_CPP_LOG_LEVEL="FATAL",
            **more,
        )
        self.process = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put("")

    def said(self) -> Line:
        line = self._lines.get(timeout=LONG_S)
        assert line, f"the rank ended with {self.process.wait()}"
        said: Line = json.loads(line)
        return said

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def playing(
    case: str, world: int, cycles: int, ranks: list[int] | None = None, **more: str
) -> Iterator[list[Rank]]:
    from ports import free_ports  # The ranks themselves run this file without the tests' folders.

    ports = free_ports(cycles)
    with ExitStack() as ends:
        started = []
        for rank in range(world) if ranks is None else ranks:
            started.append(Rank(case, rank, world, ports, **more))
            ends.callback(started[-1].end)
        yield started


CALL = InterruptibleCall()


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def awaits(thread: int) -> bool:
    """Return whether a thread comes to wait outside of Python, and stays there."""
    quiet, end = 0, time.monotonic() + LONG_S
    while quiet < 5 and time.monotonic() < end:
        asleep = proc.thread_state(os.getpid(), thread) == "S"
        quiet = quiet + 1 if asleep else 0
        time.sleep(0.01)
    return quiet == 5


def leave(function: Callable[[threading.Event], object]) -> Line:
    """Run a function, make it leave once it waits, and clear up; return what was measured."""
    ready, seen = threading.Event(), {}
    thread = threading.get_native_id()

    def watch() -> None:
        ready.wait(LONG_S)
        seen["waited"] = awaits(thread)
        seen["told"] = time.perf_counter()
        CALL.leave("test")
        CALL.settle(1.0)
        groups.abort_groups()

    watcher = threading.Thread(target=watch)
    watcher.start()
    caught: BaseException | None = None
    CALL.renew()
    try:
        CALL.run(function, ready)
    except BaseException as error:  # A Departure, or what the abort made of the wait.
        caught = error
    left = time.perf_counter()
    if not ready.is_set():
        raise AssertionError("it failed before it waited") from caught
    watcher.join()
    began = time.perf_counter()
    groups.forget_groups(caught)
    return {
        "waited": seen["waited"],
        "left_s": left - seen["told"],
        "forget_s": time.perf_counter() - began,
        "error": type(caught).__name__,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "resident_kib": resident_kib(),
    }


def resident_kib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


def ports() -> list[int]:
    return [int(port) for port in sys.argv[2].split(",")]


def join(port: int) -> float:
    import torch.distributed as dist

    os.environ["MASTER_PORT"] = str(port)
    began = time.perf_counter()
    dist.init_process_group("gloo")
    return time.perf_counter() - began


def model_of(size: int = 8) -> Any:
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.Linear(size, size))


def play_blocked() -> None:
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    ones = torch.ones(4)

    def wait_in(kind: str, port: int, ready: threading.Event) -> None:
        join(port)
        pair = dist.new_group([0, 1]) if kind == "subgroup" else None
        replica = (
            torch.nn.parallel.DistributedDataParallel(model_of())
            if kind == "ddp_backward"
            else None
        )
        dist.barrier()
        ready.set()
        if rank == 1:
            sys.stdin.readline()
        elif kind == "all_reduce":
            dist.all_reduce(ones)
        elif kind == "barrier":
            dist.barrier()
        elif kind == "async_wait":
            dist.all_reduce(ones, async_op=True).wait()
        elif kind == "recv":
            dist.recv(ones, 1)
        elif kind == "ddp_backward":
            assert replica is not None
            replica(torch.ones(2, 8)).sum().backward()
        elif kind == "subgroup":
            dist.all_reduce(ones, group=pair)
        elif kind == "new_group":
            dist.new_group([0, 1])

    with innocents() as check:
        for kind, port in zip(KINDS, ports(), strict=True):
            if rank == 0:
                say(**leave(lambda ready, kind=kind, port=port: wait_in(kind, port, ready)))  # type: ignore[misc]
            else:
                try:
                    wait_in(kind, port, threading.Event())
                finally:
                    groups.forget_groups()
        if rank == 0:
            say(**check())


INNOCENTS = ("plain", "http", "unix", "store")


@contextmanager
def innocents() -> Iterator[Callable[[], dict[str, bool]]]:
    """Have connections that are none of gloo's; the result says which of them still work."""
    import torch.distributed as dist

    with ExitStack() as held:
        server = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = held.enter_context(socket.create_connection(server.getsockname()))
        accepted = held.enter_context(server.accept()[0])
        here, there = socket.socketpair()
        held.enter_context(here)
        held.enter_context(there)
        web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        held.callback(web.server_close)
        held.callback(web.shutdown)
        own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

        def check() -> dict[str, bool]:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{web.server_port}", timeout=5)
            except urllib.error.HTTPError as error:
                served = error.code == 501
            own.set("key", "value")
            return {
                "plain": passes(client, accepted),
                "http": served,
                "unix": passes(here, there),
                "store": own.get("key") == b"value",
            }

        yield check


def passes(one: socket.socket, other: socket.socket) -> bool:
    one.sendall(b"x")
    other.settimeout(5)
    return other.recv(1) == b"x"


def play_lazy() -> None:
    import torch
    import torch.distributed as dist

    def wait(ready: threading.Event) -> None:
        join(ports()[0])
        ready.set()
        dist.all_reduce(torch.ones(4))

    if os.environ["RANK"] == os.environ["BLOCKED"]:
        say(**leave(wait))
    else:
        join(ports()[0])
    sys.stdin.readline()


def play_alone() -> None:
    def wait(ready: threading.Event) -> None:
        ready.set()
        join(ports()[0])

    say(**leave(wait))


def play_shared() -> None:
    import torch.distributed as dist

    served = dist.TCPStore("127.0.0.1", ports()[0], is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", ports()[0], is_master=False, wait_for_workers=False)
    served.set("key", "value")

    def wait(ready: threading.Event) -> None:
        ready.set()
        join(ports()[0])

    line = leave(wait)
    say(**line, answered=client.get("key") == served.get("key") == b"value")


def play_rounds() -> None:
    import torch
    import torch.distributed as dist

    def train(port: int, ready: threading.Event) -> None:
        times["init_s"] = join(port)
        began = time.perf_counter()
        replica = torch.nn.parallel.DistributedDataParallel(model_of())
        replica(torch.ones(2, 8)).sum().backward()
        times["step_s"] = time.perf_counter() - began
        dist.barrier()
        ready.set()
        if os.environ["RANK"] == "0":
            dist.all_reduce(torch.ones(4))
        else:
            time.sleep(LONG_S)

    for port in ports():
        times: dict[str, float] = {}
        say(**leave(lambda ready, port=port: train(port, ready)), **times)  # type: ignore[misc]


def play_fsdp() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def train(port: int, ready: threading.Event) -> None:
        join(port)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "pieces"))
        seen["names"] = [mesh.get_group(name).group_name for name in mesh.mesh_dim_names or ()]
        model = model_of()
        for part in [*model, model]:
            fully_shard(part, mesh=mesh["pieces"])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            loss = model(torch.ones(2, 8)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        seen["loss"] = loss.item()
        dist.barrier()
        ready.set()
        if os.environ["RANK"] == "0":
            model(torch.ones(2, 8)).sum().backward()
        else:
            time.sleep(LONG_S)

    for port in ports():
        seen: Line = {}
        say(**leave(lambda ready, port=port: train(port, ready)), **seen)  # type: ignore[misc]


def play_killed() -> None:
    import torch
    import torch.distributed as dist

    first, second = ports()

    def wait(ready: threading.Event) -> None:
        join(first)
        dist.barrier()
        say(ready=True)
        ready.set()
        if os.environ["RANK"] == "0":
            time.sleep(LONG_S)
        for _ in range(1000):
            dist.all_reduce(torch.ones(4))

    # Its peers notice by themselves that rank 0 is gone, and leave when they are told.
    line = leave(wait)
    os.environ["RANK"] = str(int(os.environ["RANK"]) - 1)
    os.environ["WORLD_SIZE"] = "3"
    join(second)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    say(**line, sum=ones.item())
    sys.stdin.readline()


def play_functional() -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    def wait(port: int, ready: threading.Event) -> None:
        join(port)
        dist.barrier()
        if os.environ["RANK"] == "0":
            pending = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
            assert torch._C._distributed_c10d._get_work_registry_size() == 1
        ready.set()
        time.sleep(LONG_S)
        del pending

    for port in ports():
        line = leave(lambda ready, port=port: wait(port, ready))  # type: ignore[misc]
        say(**line, works=torch._C._distributed_c10d._get_work_registry_size())


def play_nccl() -> None:
    """Two ranks share a GPU. NCCL refuses that on one host, so each says that it is its own."""
    import torch
    import torch.distributed as dist

    os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"
    rank = os.environ["RANK"]

    def train(port: int, ready: threading.Event) -> None:
        os.environ["MASTER_PORT"] = str(port)
        began = time.perf_counter()
        dist.init_process_group("nccl")
        ones = torch.ones(1024, device="cuda")
        dist.all_reduce(ones)
        torch.cuda.synchronize()
        seen["init_s"] = time.perf_counter() - began
        ready.set()
        if rank == "0":
            dist.all_reduce(ones)
            torch.cuda.synchronize()
        else:
            time.sleep(LONG_S)

    for port in ports():
        seen: Line = {}
        line = leave(lambda ready, port=port: train(port, ready))  # type: ignore[misc]
        free, total = torch.cuda.mem_get_info()
        say(**line, **seen, device_bytes=total - free)


def play() -> None:
    groups.watch()
    globals()[f"play_{sys.argv[1]}"]()
    groups.unwatch()
    assert gc.get_freeze_count() == 0
    assert not records.groups()
    assert not gloo.threads()


def try_case(case: str, world: int, cycles: int) -> None:
    with playing(case, world, cycles) as ranks:
        for rank in ranks:
            for _ in range(cycles):
                print(rank.said())


if __name__ == "__main__":
    if sys.argv[1] == "try":
        try_case(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        play()
        sys.stdout.flush()
        os._exit(0)
