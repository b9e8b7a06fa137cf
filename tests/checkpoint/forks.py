"""Processes with torch in them, without waiting for torch each time.

Run as a script it imports torch once, and then forks a child for each line that it is given: the name
of a function below, and its arguments. Children are killed, or end as any script does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

CUSTOMIZE = """
import errno, os, signal, time
from pathlib import Path
if "HOLDFAST_TEST_DISK" in os.environ:
    from holdfast.checkpoint.storage.posix import Disk
    control, names, calls = Path(os.environ["HOLDFAST_TEST_DISK"]), {}, [0]
    def told(what, name):
        return what in (said := control.read_text()) and said.partition(":")[2] in name
    def counted(method):
        def call(*args):
            calls[0] += 1
            if told("die", f"{calls[0]}!"):
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args)
        return call
    def create(self, name, directory, real=Disk.create):
        fd = real(self, name, directory)
        names[fd] = name
        return fd
    def write(self, fd, data, real=Disk.write):
        while told("hold", names[fd]):
            time.sleep(0.002)
        if told("full", names[fd]):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, fd, data)
    Disk.create, Disk.write = create, write
    for name in [n for n in vars(Disk) if not n.startswith("_")]:
        setattr(Disk, name, counted(getattr(Disk, name)))
"""
"""What a keeper does to its disk, as a file says: `hold:NAME`, `full:NAME` or `die:CALL!`."""


def disk_control(directory: Path) -> dict[str, str]:
    """The environment in which keepers obey the file `disk` there."""
    site = directory / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(CUSTOMIZE)
    (directory / "disk").write_text("")
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "HOLDFAST_TEST_DISK": str(directory / "disk")}


class Forks:
    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, **request: Any) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())

    def start(self, name: str, *arguments: Any) -> int:
        """The id of a process that runs that function."""
        return self._ask(run=name, arguments=arguments, log=str(self._logs / f"{name}.log"))

    def wait(self, pid: int) -> int:
        """Its exit code; negative, if it was killed."""
        return self._ask(wait=pid)

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


# ---- what children do ---------------------------------------------------------------------------


def save_for_ever(at: str, number: int) -> None:
    """Save one state after the other at the same place; `began` and `saved` tell how far it is."""
    import torch

    from holdfast.checkpoint import AsyncWriter

    def tell(what: str, number: int) -> None:
        Path(f"{at}.new").write_text(str(number))
        os.replace(f"{at}.new", f"{at}.{what}")

    writer = AsyncWriter(no_dist=True)
    state = {f"t{i}": torch.zeros(5000) for i in range(20)}
    while True:
        number += 1
        for tensor in state.values():
            tensor.fill_(number)
        tell("began", number)
        writer.save({**state, "number": number}, checkpoint_id=at).result()
        tell("saved", number)


def save_and_end(at: str) -> None:
    import torch

    from holdfast.checkpoint import async_save

    for number in range(3):
        async_save({"t": torch.full((1000,), number)}, checkpoint_id=f"{at}/{number}")


def a_rank(rank: int, port: int, directory: str) -> None:
    """One of two ranks that train a sharded model; rank 1's keeper is killed once."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard

    from holdfast.checkpoint import AsyncWriter

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 301), torch.nn.ReLU(), torch.nn.Linear(301, 7))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adam(model.parameters())
    table = torch.arange(50_000.0)

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments, "table": table, "rank 0 says": "hello"}

    def train() -> None:
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        table.add_(1)

    writer = AsyncWriter(optimizers=[optimizer])
    apart = dist.new_group(backend="gloo")  # Torch's own saves meet in the midst of training.
    for number in range(3):
        train()
        dist.barrier()
        mine = writer.save(state(), checkpoint_id=f"{directory}/ours{number}")
        there = f"{directory}/torch{number}"
        theirs = dcp.async_save(state(), checkpoint_id=there, process_group=apart)
        train()  # An optimizer's step waits for the copy.
        assert mine.result(60) == f"{directory}/ours{number}"
        theirs.result()

    control = Path(os.environ["HOLDFAST_TEST_DISK"])
    dist.barrier()
    control.write_text("hold:__1_")
    dist.barrier()
    pid = writer._link.keeper_pid
    future = writer.save(state(), checkpoint_id=f"{directory}/killed")
    dist.barrier()
    time.sleep(0.3)
    at = time.monotonic()
    if rank == 1:
        assert pid is not None
        os.kill(pid, 9)
    control.write_text("")
    error = str(future.exception(60))
    took_s = time.monotonic() - at
    dist.barrier()
    writer.save(state(), checkpoint_id=f"{directory}/after").result(60)
    told = {"error": error, "took_s": took_s, "pid": os.getpid()}
    Path(f"{directory}/rank{rank}.json").write_text(json.dumps(told))
    # Rank 0 has the store, and does not wait for anybody: the writer does, at exit.
    writer.save(state(), checkpoint_id=f"{directory}/last")
    dist.destroy_process_group()


# ---- the server ---------------------------------------------------------------------------------


def main() -> None:
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp  # noqa: F401

    import holdfast.checkpoint.async_writer  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for fd in (1, 2):
            os.dup2(log, fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            globals()[request["run"]](*request["arguments"])
        except BaseException:
            traceback.print_exc()
            sys.exit(1)
        sys.exit(0)


if __name__ == "__main__":
    main()
