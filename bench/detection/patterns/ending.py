"""Healthy: what a script still does after its last step."""

from __future__ import annotations

from detection.patterns.pattern import Pattern, healthy, whole_script

_TRAIN = """
            run.begin()
            for step in run.steps():
                run.train()
"""

ROWS: list[Pattern] = [
    healthy(
        "atexit",
        "An atexit handler of rank 0 writes a file for 40 s.",
        whole_script(f"""
            if rank == 0:
                atexit.register(write_slowly, "final", 40)
            {_TRAIN.strip()}
            run.end()
        """),
        lasts_s=40,
        whole=("final",),
    ),
    healthy(
        "thread-after-end",
        "A thread of rank 0 writes a file for 40 s after the script has ended.",
        whole_script(f"""
            {_TRAIN.strip()}
            run.end()
            if rank == 0:
                threading.Thread(target=write_slowly, args=("final", 40)).start()
        """),
        lasts_s=40,
        whole=("final",),
    ),
    healthy(
        "last-file",
        "Rank 0 writes its last file for 70 s; the other ranks have finished.",
        whole_script(f"""
            {_TRAIN.strip()}
            run.end()
            if rank == 0:
                write_slowly("final", 70)
        """),
        lasts_s=70,
        whole=("final",),
    ),
    healthy(
        "last-barrier",
        "Rank 0 writes its last file for 30 s; the other ranks wait in a barrier.",
        whole_script(f"""
            {_TRAIN.strip()}
            if rank == 0:
                write_slowly("final", 30)
            run.end()
        """),
        lasts_s=30,
        whole=("final",),
    ),
    healthy(
        "last-evaluation",
        "All ranks evaluate after the last step; one takes 20 s longer.",
        whole_script(f"""
            {_TRAIN.strip()}
            forward_only(run.net, 25 if rank == guilty else 5)
            dist.all_reduce(torch.ones(1))
            run.end()
        """),
        lasts_s=25,
    ),
]
