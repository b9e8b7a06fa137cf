"""Hangs that can be proven: nothing that a rank could still do would let the others go on."""

from __future__ import annotations

from detection.patterns.pattern import Guilty, Pattern, between, whole_script


def _proven(
    name: str, story: str, body: str, guilty: Guilty = "one", within_s: float = 2.0
) -> Pattern:
    return Pattern(name, "proven", story, body, ranks=4, guilty=guilty, within_s=within_s)


ROWS: list[Pattern] = [
    _proven(
        "stopped",
        "A rank is stopped by SIGSTOP.",
        between("""
            if rank == guilty:
                os.kill(os.getpid(), signal.SIGSTOP)
        """),
    ),
    _proven(
        "operation",
        "One rank calls another operation than the others.",
        between("""
            if rank == guilty:
                dist.broadcast(torch.ones(4), src=(guilty + 1) % world)  # here
            else:
                dist.all_reduce(torch.ones(4))
        """),
    ),
    _proven(
        "shape",
        "One rank's tensor is larger than the others'.",
        between("""
            size = 1000 if rank == guilty else 999
            dist.all_reduce(torch.ones(size))  # here
        """),
    ),
    _proven(
        "order",
        "One rank calls two operations in another order.",
        between("""
            losses, counts = torch.ones(100), torch.ones(7)
            if rank == guilty:
                dist.all_gather([torch.ones(7) for _ in range(world)], counts)  # here
                dist.all_reduce(losses)  # here
            else:
                dist.all_reduce(losses)
                dist.all_gather([torch.ones(7) for _ in range(world)], counts)
        """),
    ),
    _proven(
        "skipped",
        "One rank does not take part in a collective, and goes on to the next one.",
        whole_script("""
            run.begin()
            for step in run.steps():
                run.train()  # here
                if run.now(step) and rank == guilty:
                    continue
                dist.all_reduce(torch.ones(1))
            run.end()
        """),
    ),
    _proven(
        "fewer-batches",
        "One rank has fewer batches, leaves the loop, and waits for the others at its end.",
        whole_script("""
            run.begin()
            for step in run.steps():
                run.train()
                if run.now(step) and rank == guilty:
                    break
            dist.barrier()  # here
            run.end()
        """),
    ),
    _proven(
        "ended-but-alive",
        "One rank's script ends early; a thread that serves metrics keeps its process alive.",
        whole_script("""
            run.begin()
            for step in run.steps():
                run.train()
                if run.now(step) and rank == guilty:
                    threading.Thread(target=threading.Event().wait).start()
                    sys.exit()
            run.end()
        """),
    ),
    _proven(
        "exited",
        "One rank exits with 0 while the others go on.",
        between("""
            if rank == guilty:
                sys.exit()
        """),
    ),
    _proven(
        "circle-of-receives",
        "Each rank receives from the one before it, and none has sent.",
        between("""
            token = torch.ones(1)
            dist.recv(token, src=(rank - 1) % world)  # here
            dist.send(token, dst=(rank + 1) % world)
        """),
        guilty="all",
    ),
    _proven(
        "groups-in-opposite-order",
        "Two ranks meet in two groups, each in another group first.",
        whole_script("""
            run.begin()
            pair = sorted((guilty, (guilty + 1) % world))
            first, second = dist.new_group(pair), dist.new_group(pair)
            for step in run.steps():
                run.train()
                if run.now(step) and rank in pair:
                    groups = [first, second] if rank == guilty else [second, first]
                    for group in groups:
                        dist.all_reduce(torch.ones(1), group=group)  # here
            run.end()
        """),
        guilty="circle",
    ),
    _proven(
        "lock-twice",
        "A rank acquires a lock that it has already.",
        between("""
            if rank == guilty:
                lock = threading.Lock()
                lock.acquire()
                lock.acquire()  # here
        """),
    ),
    _proven(
        "locks-in-opposite-order",
        "Two threads of a rank wait for each other's lock.",
        between("""
            if rank == guilty:
                ours, theirs, ready = threading.Lock(), threading.Lock(), threading.Event()
                def log():
                    with theirs:
                        ready.set()
                        with ours:  # here
                            pass
                with ours:
                    threading.Thread(target=log, daemon=True).start()
                    ready.wait()
                    with theirs:  # here
                        pass
        """),
    ),
    _proven(
        "queue-without-producer",
        "A rank waits for a queue of its own that nobody fills any more.",
        between("""
            if rank == guilty:
                queue.Queue().get()  # here
        """),
    ),
    _proven(
        "gil-kept-asleep",
        "A rank is in a native call that sleeps and keeps the GIL.",
        between("""
            if rank == guilty:
                ctypes.PyDLL(None).usleep(4_000_000_000)  # here
        """),
        within_s=6.0,
    ),
]
