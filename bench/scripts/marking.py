"""What the frameworks' scripts do for the bench: write down each finished step, and end when told."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ddp import StepMarks, last_step

__all__ = ["StepMarks", "arguments", "last_step", "marks_of_this_rank"]


def arguments(doc: str | None) -> argparse.Namespace:
    """The flags that each of these scripts has."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps to train in all")
    parser.add_argument("--pause-ms", type=float, default=20.0, help="idle time in each step")
    parser.add_argument("--stop-at", type=Path, help="a file that may come to name the last step")
    return parser.parse_args()


def marks_of_this_rank() -> StepMarks:
    return StepMarks(Path(os.environ["BENCH_MARKS"]), int(os.environ["RANK"]))
