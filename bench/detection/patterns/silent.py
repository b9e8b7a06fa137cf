"""Hangs that nothing proves: the others wait, and of one rank nothing moves at all."""

from __future__ import annotations

from detection.patterns.pattern import Pattern, between, whole_script


def _silent(name: str, story: str, body: str) -> Pattern:
    return Pattern(name, "silent", story, body, ranks=4)


ROWS: list[Pattern] = [
    _silent(
        "sleep",
        "A rank sleeps.",
        between("""
            if rank == guilty:
                time.sleep(10_000)  # here
        """),
    ),
    _silent(
        "receive",
        "A rank waits for an answer from a service that never gives one.",
        between("""
            if rank == guilty:
                ours, theirs = socket.socketpair()
                ours.recv(1)  # here
        """),
    ),
    _silent(
        "loader-worker",
        "A worker of a rank's loader is stuck.",
        whole_script("""
            class Stuck(Items):
                def __getitem__(self, index):
                    if index == 16 * run.event and rank == guilty and run.note():
                        time.sleep(10_000)  # here
                    return super().__getitem__(index)

            run.begin()
            batches = DataLoader(Stuck(16 * run.last), batch_size=16, num_workers=1)
            for step, batch in zip(run.steps(), batches):
                run.train(batch)
            run.end()
        """),
    ),
    _silent(
        "pipe-without-writer",
        "A rank reads from a named pipe into which nobody writes.",
        between("""
            if rank == guilty:
                os.mkfifo("pipe")
                open("pipe").read()  # here
        """),
    ),
    _silent(
        "file-lock-kept",
        "A rank waits for a file lock that another process keeps.",
        between("""
            if rank == guilty:
                keeper = subprocess.Popen(["flock", "lock", "sleep", "10000"])
                time.sleep(0.5)
                with open("lock", "w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)  # here
        """),
    ),
]
