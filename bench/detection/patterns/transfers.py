"""Healthy: a rank waits for storage, a network, a file or another process, and the others for it."""

from __future__ import annotations

from detection.patterns.pattern import Pattern, between, healthy

ROWS: list[Pattern] = [
    healthy(
        "upload-20",
        "Rank 0 uploads for 20 s; the receiver is slow.",
        between("""
            if rank == 0:
                send(20)
            dist.barrier()
        """),
        lasts_s=20,
        beside="sink",
    ),
    healthy(
        "upload-75",
        "Rank 0 uploads for more than a minute, at a low rate.",
        between("""
            if rank == 0:
                send(75, rate=MIB // 16)
            dist.barrier()
        """),
        lasts_s=75,
        beside="sink",
    ),
    healthy(
        "upload-thread",
        "A thread of rank 0 uploads, and the training thread joins it.",
        between("""
            if rank == 0:
                upload = threading.Thread(target=send, args=(15,))
                upload.start()
                upload.join()
        """),
        lasts_s=15,
        beside="sink",
    ),
    healthy(
        "download-15",
        "Rank 0 downloads a data set from a slow server.",
        between("""
            if rank == 0:
                download()
            dist.barrier()
        """),
        lasts_s=15,
        beside="source",
    ),
    healthy(
        "download-75",
        "Rank 0 downloads for more than a minute, at a low rate.",
        between("""
            if rank == 0:
                download()
            dist.barrier()
        """),
        lasts_s=75,
        beside="source",
    ),
    healthy(
        "save-slowly",
        "Rank 0 saves with torch.save, and the target is slow.",
        between("""
            if rank == 0:
                with open(os.environ["BENCH_BESIDE"], "wb") as target:
                    torch.save(torch.ones(15 * MIB // 4), target)
            dist.barrier()
        """),
        lasts_s=15,
        beside="fifo reader",
    ),
    healthy(
        "poll-0.1",
        "Rank 0 waits for a file and looks ten times a second.",
        between("""
            if rank == 0:
                while not os.path.exists(os.environ["BENCH_BESIDE"]):
                    time.sleep(0.1)
        """),
        lasts_s=10,
        beside="late word",
    ),
    healthy(
        "poll-1",
        "Rank 0 waits for a file and looks once a second.",
        between("""
            if rank == 0:
                while not os.path.exists(os.environ["BENCH_BESIDE"]):
                    time.sleep(1)
        """),
        lasts_s=20,
        beside="late word",
    ),
    healthy(
        "poll-5",
        "Rank 0 waits for a file for more than a minute and looks every five seconds.",
        between("""
            if rank == 0:
                while not os.path.exists(os.environ["BENCH_BESIDE"]):
                    time.sleep(5)
        """),
        lasts_s=75,
        beside="late word",
    ),
    healthy(
        "pipe",
        "Rank 0 reads from a pipe into which somebody writes after 15 s.",
        between("""
            if rank == 0:
                with open(os.environ["BENCH_BESIDE"] + ".pipe") as pipe:
                    pipe.read(1)
        """),
        lasts_s=15,
        beside="late word",
    ),
    healthy(
        "socket",
        "Rank 0 waits for an answer that takes 15 s.",
        between("""
            if rank == 0:
                with socket.socket(socket.AF_UNIX) as service:
                    service.connect(os.environ["BENCH_BESIDE"] + ".sock")
                    service.recv(1)
        """),
        lasts_s=15,
        beside="late word",
    ),
    healthy(
        "subprocess-busy",
        "Rank 0 waits for a program that computes.",
        between("""
            if rank == 0:
                subprocess.run(["timeout", "15", "sh", "-c", "while :; do :; done"])
            dist.barrier()
        """),
        lasts_s=15,
    ),
    healthy(
        "subprocess-idle",
        "Rank 0 waits for a program that waits.",
        between("""
            if rank == 0:
                subprocess.run(["sleep", "20"])
            dist.barrier()
        """),
        lasts_s=20,
    ),
    healthy(
        "subprocess-75",
        "Rank 0 waits for more than a minute for a program that does a little every second.",
        between("""
            if rank == 0:
                script = "for i in $(seq 75); do sleep 1; echo $i >> progress; done"
                subprocess.run(["sh", "-c", script])
            dist.barrier()
        """),
        lasts_s=75,
    ),
]
