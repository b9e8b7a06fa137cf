"""`holdfast goodput`: where every second of every rank went."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cli.view import look, print_json, print_table
from holdfast.core import report

MEANING = {
    "productive": "steps finished for the first time",
    "redo": "steps that a fault threw away and that had to be taken again",
    "start": "from the launch, or from the round's freezing, until the script ran",
    "init": "imports and process group, until the first step",
    "checkpoint": "saving",
    "detect": "from the fault until it was known",
    "stop": "ending the other ranks",
    "rendezvous": "agreeing on the next round",
    "restore": "loading state",
    "wait": "for nodes",
    "idle": "finished before the others",
}


def main(argv: Sequence[str]) -> int:
    about = "The ledger: every second of every rank by cause; they add up to wall clock × ranks."
    viewed, as_json = look("goodput", about, argv)
    books = report.goodput(viewed.job, viewed.now)
    if as_json:
        print_json(books)
        return 0
    total = sum(books["seconds"].values())
    title = (
        f"job {books['job']}: goodput {books['goodput']:.1%}"
        f" of {books['wall_s']:.1f} s × {books['ranks']} ranks"
    )
    rows = [
        (cause, f"{seconds:.2f}", f"{seconds / total if total else 0:.1%}", MEANING[cause])
        for cause, seconds in sorted(books["seconds"].items(), key=lambda item: -item[1])
        if seconds
    ]
    print_table(title, ("cause", "rank-seconds", "share", "what it is"), rows)
    return 0
