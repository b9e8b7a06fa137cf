"""Healthy: data that comes late, and everything that happens before the first step."""

from __future__ import annotations

from detection.patterns.pattern import Pattern, healthy, whole_script

_LOADER = """
    run.begin()
    items = Items(16 * run.last, slow=16 * run.event if rank == guilty else -1, seconds=8)
    for step, batch in zip(run.steps(), DataLoader(items, batch_size=16, num_workers={workers})):
        run.now(step)
        run.train(batch)
    run.end()
"""

ROWS: list[Pattern] = [
    healthy(
        "slow-item",
        "One item of one rank's data takes 8 s.",
        whole_script(_LOADER.format(workers=0)),
        lasts_s=8,
    ),
    healthy(
        "slow-item-workers",
        "One item of one rank's data takes a loader's worker 8 s.",
        whole_script(_LOADER.format(workers=2)),
        lasts_s=8,
    ),
    healthy(
        "new-epoch",
        "The last rank's loader starts new workers, and its first item takes 8 s.",
        whole_script("""
            run.begin()
            half = run.last // 2
            steps = run.steps()
            for epoch in range(2):
                slow = 0 if epoch and rank == world - 1 else -1
                for batch in DataLoader(Items(16 * half, slow, 8), batch_size=16, num_workers=2):
                    next(steps)
                    run.train(batch)
            run.end()
        """),
        lasts_s=8,
    ),
    healthy(
        "first-compile",
        "The first step of all ranks takes 15 s of computing.",
        whole_script("""
            run.begin()
            burn(15)
            for step in run.steps():
                run.train()
            run.end()
        """),
        lasts_s=15,
    ),
    healthy(
        "compile-one-rank",
        "The first step of one rank takes 15 s longer, and the others wait within theirs.",
        whole_script("""
            run.begin()
            if rank == guilty:
                burn(15)
            for step in run.steps():
                run.train()
            run.end()
        """),
        lasts_s=15,
    ),
    healthy(
        "recompile",
        "A new shape comes up on one rank, and its step is compiled again.",
        whole_script("""
            run.begin()
            for step in run.steps():
                if run.now(step) and rank == guilty:
                    multiply(10)
                run.train()
            run.end()
        """),
        lasts_s=10,
    ),
    healthy(
        "long-import",
        "One rank imports for 15 s, and the others are in init_process_group.",
        whole_script("""
            if rank == guilty:
                burn(15)
            run.begin()
            for step in run.steps():
                run.train()
            run.end()
        """),
        lasts_s=15,
    ),
    healthy(
        "tokenise-before-init",
        "Rank 0 tokenises for 70 s before it joins the process group.",
        whole_script("""
            if rank == 0:
                burn(70)
            run.begin()
            for step in run.steps():
                run.train()
            run.end()
        """),
        lasts_s=70,
    ),
    healthy(
        "tokenise-in-barrier",
        "Rank 0 tokenises for 70 s, and the others wait in a barrier before their first step.",
        whole_script("""
            run.begin()
            if rank == 0:
                burn(70)
            dist.barrier()
            for step in run.steps():
                run.train()
            run.end()
        """),
        lasts_s=70,
    ),
    healthy(
        "tokenise-in-subprocess",
        "Rank 0 has another program tokenise before the first step.",
        whole_script("""
            run.begin()
            if rank == 0:
                subprocess.run(["timeout", "20", "sh", "-c", "while :; do :; done"])
            dist.barrier()
            for step in run.steps():
                run.train()
            run.end()
        """),
        lasts_s=20,
    ),
]
