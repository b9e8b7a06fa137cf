"""Healthy: one rank does something alone between two steps, and the others wait for it."""

from __future__ import annotations

from detection.patterns.pattern import Pattern, between, healthy, whole_script

ROWS: list[Pattern] = [
    healthy(
        "evaluate-5",
        "Rank 0 computes metrics in plain Python.",
        between("""
            if rank == 0:
                burn(5)
            dist.barrier()
        """),
        lasts_s=5,
    ),
    healthy(
        "evaluate-20-loader",
        "Rank 0 evaluates the model with batches from a loader.",
        between("""
            if rank == 0:
                forward_only(run.net, 20)
            dist.barrier()
        """),
        lasts_s=20,
    ),
    healthy(
        "evaluate-20-native",
        "Rank 0 evaluates in long calls into native code.",
        between("""
            if rank == 0:
                multiply(20)
        """),
        lasts_s=20,
    ),
    healthy(
        "evaluate-60",
        "Rank 0 computes metrics in plain Python for a minute; the others are in the next step.",
        between("""
            if rank == 0:
                burn(60)
        """),
        lasts_s=60,
    ),
    healthy(
        "evaluate-120",
        "Rank 0 evaluates for two minutes.",
        between("""
            if rank == 0:
                forward_only(run.net, 120)
            dist.barrier()
        """),
        lasts_s=120,
    ),
    healthy(
        "evaluate-own-group",
        "Half of the ranks validate in a process group of their own.",
        whole_script("""
            run.begin()
            validators = dist.new_group([0, 1])
            for step in run.steps():
                run.train()
                if run.now(step) and rank < 2:
                    for batch in range(50):
                        burn(0.3)
                        dist.all_reduce(torch.ones(1), group=validators)
            run.end()
        """),
        lasts_s=15,
        ranks=4,
    ),
    healthy(
        "early-stopping",
        "Rank 0 decides whether to go on, and the others wait for its word.",
        between("""
            verdict = torch.zeros(1)
            if rank == 0:
                burn(10)
            dist.broadcast(verdict, src=0)
        """),
        lasts_s=10,
    ),
    healthy(
        "broadcast-objects",
        "Rank 0 prepares objects for all.",
        between("""
            objects = [None]
            if rank == 0:
                burn(10)
                objects = [{"epoch": 1}]
            dist.broadcast_object_list(objects, src=0)
        """),
        lasts_s=10,
    ),
    healthy(
        "lr-finder",
        "Rank 0 takes many steps of its own to find a learning rate.",
        between("""
            if rank == 0:
                until = time.monotonic() + 12
                optimizer = torch.optim.SGD(run.net.parameters(), lr=1e-6)
                while time.monotonic() < until:
                    optimizer.zero_grad()
                    run.net(run.batch).sum().backward()
                    optimizer.step()
                    optimizer.param_groups[0]["lr"] *= 1.001
            dist.barrier()
        """),
        lasts_s=12,
    ),
    healthy(
        "reshuffle",
        "The last rank shuffles its part of the data.",
        between("""
            if rank == world - 1:
                until, order = time.monotonic() + 8, list(range(500_000))
                while time.monotonic() < until:
                    random.shuffle(order)
        """),
        lasts_s=8,
    ),
    healthy(
        "garbage",
        "Rank 0 collects garbage, and has much of it.",
        between("""
            if rank == 0:
                until, kept = time.monotonic() + 8, [[[]] for _ in range(1_500_000)]
                while time.monotonic() < until:
                    gc.collect()
        """),
        lasts_s=9,
    ),
    healthy(
        "gil-kept-by-work",
        "Rank 0 is in one call into C that computes for 10 s and keeps the GIL.",
        between("""
            if rank == 0:
                burn_with_gil(10)
        """),
        lasts_s=12,
    ),
    healthy(
        "profile",
        "Rank 0 profiles itself and exports the trace.",
        between("""
            if rank == 0:
                with torch.profiler.profile(record_shapes=True) as profile:
                    for _ in range(500):
                        run.net(run.batch).sum().backward()
                profile.export_chrome_trace("trace.json")
                profile.key_averages().table()
            dist.barrier()
        """),
        lasts_s=10,
    ),
    healthy(
        "turns",
        "Ranks read a large file one after the other.",
        between("""
            for turn in range(world):
                if turn == rank:
                    burn(5)
                dist.barrier()
        """),
        lasts_s=10,
    ),
    healthy(
        "file-lock",
        "One rank prepares the data set under a file lock; the others wait for the lock.",
        between("""
            with open("prepared.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not os.path.exists("prepared"):
                    burn(12)
                    open("prepared", "w").close()
            dist.barrier()
        """),
        lasts_s=12,
    ),
    healthy(
        "pause-5",
        "A rank pauses for five seconds.",
        between("""
            if rank == guilty:
                time.sleep(5)
        """),
        lasts_s=5,
    ),
    healthy(
        "pause-20",
        "A rank pauses for twenty seconds.",
        between("""
            if rank == guilty:
                time.sleep(20)
        """),
        lasts_s=20,
    ),
    healthy(
        "backoff",
        "Rank 0 asks a service again and again, and waits longer each time.",
        between("""
            if rank == 0:
                for wait_s in (0.5, 1, 2, 4, 8):
                    try:
                        socket.create_connection(("127.0.0.1", 1), timeout=1)
                    except OSError:
                        time.sleep(wait_s)
        """),
        lasts_s=16,
    ),
    healthy(
        "logger-thread",
        "Rank 0 sleeps for 20 s while a thread of it sends metrics.",
        between("""
            if rank == 0:
                done = threading.Event()
                def report():
                    while not done.wait(0.5):
                        open("metrics", "a").write("x")
                threading.Thread(target=report, daemon=True).start()
                time.sleep(20)
                done.set()
        """),
        lasts_s=20,
    ),
]
