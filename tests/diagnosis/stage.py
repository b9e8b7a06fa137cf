"""Three real gloo ranks that come to stand still in a chosen way.

Importing torch takes seconds, so it is done once: this process imports it, then forks three ranks for
each scene that it is told on stdin, and prints their pids. A rank beats and, when there is a file
named `ask`, dumps its flight recorder from a thread, as a worker's watcher does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.diagnosis import flight
from holdfast.shm.vital_signs import VITALS_BYTES, Vitals
from holdfast.worker.torch_hooks.pairs import PairCalls
from holdfast.worker.torch_hooks.waits import OwnTimes

GUILTY = 1
ONES = torch.ones(3)


def load_batch() -> None:
    """Where a rank is when it is not where it should be."""
    (Path(f"at_{dist.get_rank()}")).touch()
    time.sleep(100)


def arrive() -> None:
    Path(f"at_{dist.get_rank()}").touch()


def asleep(rank: int) -> None:
    if rank == GUILTY:
        load_batch()
    arrive()
    dist.all_reduce(ONES)


def backward(rank: int) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(3):
        loss = model(torch.ones(2, 4)).sum()
        if step == 2:
            if rank == GUILTY:
                load_batch()
            arrive()
        loss.backward()


def skipped(rank: int) -> None:
    arrive()
    if rank != GUILTY:
        dist.all_reduce(ONES)
    dist.barrier()


def stopped(rank: int) -> None:
    arrive()
    if rank == GUILTY:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(ONES)


def gil(rank: int) -> None:
    if rank == GUILTY:
        arrive()
        ctypes.PyDLL(None).usleep(100_000_000)
    arrive()
    dist.all_reduce(ONES)


def computing(rank: int) -> None:
    arrive()
    while rank == GUILTY:
        pass
    dist.all_reduce(ONES)


def chain(rank: int) -> None:
    """Rank 2 waits for rank 0, which waits for rank 1, each in another group."""
    first, second = dist.new_group([0, 2]), dist.new_group([0, 1])
    dist.barrier()
    if rank == GUILTY:
        load_batch()
    arrive()
    if rank == 0:
        dist.all_reduce(ONES, group=second)
    dist.all_reduce(ONES, group=first)


def circle(rank: int) -> None:
    """Ranks 0 and 1 call the collectives of two groups in different orders; rank 2 waits for both."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    dist.barrier()
    arrive()
    if rank < 2:
        dist.all_reduce(ONES, group=groups[rank])
        dist.all_reduce(ONES, group=groups[1 - rank])
    dist.all_reduce(ONES)


def receives(rank: int) -> None:
    """Each rank receives from the one before it, after an exchange that all have been through."""
    exchange(rank)
    arrive()
    dist.recv(ONES, (rank - 1) % 3)


def sends(rank: int) -> None:
    """Each rank sends to the next one, in a group of its own and by its place there."""
    exchange(rank)
    group = dist.new_group([0, 1, 2])
    arrive()
    dist.send(ONES, group=group, group_dst=(rank + 1) % 3)


def posted(rank: int) -> None:
    """Rank 0 waits for what it has asked for before, which rank 1 does not send: it receives itself."""
    exchange(rank)
    asked = dist.irecv(torch.ones(3), 1) if rank == 0 else None
    arrive()
    if asked is not None:
        asked.wait()
    dist.recv(ONES, 2 if rank == 1 else 0)


def sent(rank: int) -> None:
    """Ranks 0 and 2 wait for rank 1, which has sent before and is on its way."""
    exchange(rank)
    if rank == GUILTY:
        dist.isend(torch.ones(3), 0)
        load_batch()
    arrive()
    if rank == 0:
        dist.recv(ONES, 1)
    dist.recv(ONES, 1)


def any_source(rank: int) -> None:
    """Each rank receives from any other: nobody knows from which."""
    exchange(rank)
    arrive()
    dist.recv(ONES)


def tagged(rank: int) -> None:
    """Each rank receives from the one before it, now with another tag than before."""
    exchange(rank)
    arrive()
    dist.recv(ONES, (rank - 1) % 3, tag=7)


def exchange(rank: int) -> None:
    """Give and take once, in the ways that torch has."""
    given = dist.isend(ONES, (rank + 1) % 3)
    dist.recv(torch.ones(3), (rank - 1) % 3)
    given.wait()
    pairs = [
        dist.P2POp(dist.isend, ONES, (rank + 1) % 3),
        dist.P2POp(dist.irecv, torch.ones(3), (rank - 1) % 3),
    ]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    if rank == 0:
        dist.send_object_list(["any"], dst=1)
    elif rank == 1:
        dist.recv_object_list([None], src=0)


def left(rank: int) -> None:
    """The guilty rank leaves the loop early, and its script ends."""
    if rank == GUILTY:
        Path("ended").touch()
        arrive()
        threading.Event().wait()
    arrive()
    dist.all_reduce(ONES)


def resized(rank: int) -> None:
    """The guilty rank skips an operation; its next one has another size."""
    arrive()
    if rank != GUILTY:
        dist.all_reduce(torch.ones(3))
    dist.all_gather([torch.ones(5)] * 3, torch.ones(5))


def again(rank: int) -> None:
    """All groups are destroyed and created again; the guilty rank does not come to use them."""
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{Path.cwd()}/store2", rank=rank, world_size=3)
    if rank == GUILTY:
        load_batch()
    arrive()
    dist.all_gather([torch.ones(5)] * 3, torch.ones(5))


def watch(rank: int, calls: PairCalls) -> None:
    trainer = threading.main_thread().ident or 0
    while True:
        Path(f"beat_{rank}").touch()
        if Path("ask").exists() and not Path(f"dump_{rank}").exists():
            Path(f"new_{rank}").write_bytes(flight.dump(trainer, (rank, 3), calls))
            os.rename(f"new_{rank}", f"dump_{rank}")
        time.sleep(0.05)


def act(rank: int, scene: str) -> None:
    torch.set_num_threads(1)
    flight.count_worlds(torch.distributed.distributed_c10d)
    calls, vitals = PairCalls(), Vitals(memoryview(bytearray(VITALS_BYTES)))
    calls.install()
    OwnTimes(vitals, lambda: threading.current_thread() is threading.main_thread()).install()
    threading.Thread(target=watch, args=(rank, calls), name="watch", daemon=True).start()
    dist.init_process_group("gloo", f"file://{Path.cwd()}/store", rank=rank, world_size=3)
    for _ in range(3):
        dist.all_reduce(ONES)
    globals()[scene](rank)


def main() -> None:
    for line in sys.stdin:
        scene, folder = line.split()
        pids = []
        for rank in range(3):
            pids.append(os.fork())
            if pids[-1] == 0:
                os.chdir(folder)
                act(rank, scene)
                os._exit(0)
        print(*pids, flush=True)


if __name__ == "__main__":
    main()
