"""Estimates what a job's faults would have cost with torchrun.

The estimate is on torchrun's side: each fault costs as long as its measured recovery, where the job's
own was shorter, and nothing else changes. Steps that torchrun would redo from an older checkpoint, its
silence about hangs, and the faults from which it did not come back at all, are left out.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from holdfast.core import report
from holdfast.core.job import Job
from holdfast.messages.reports import GoodputReport
from holdfast.messages.units import Seconds

RECOVERY_S: Final[Seconds] = 4.63
"""`kill -9` of a rank until every rank has finished a step, torchrun of torch 2.13: the table in
README.md, from `bench/recovery.py`."""


class TorchrunEstimate(Struct, frozen=True, kw_only=True):
    goodput: float
    lost_s: Seconds
    """Time that the faults would have cost, of the wall clock."""
    ours_s: Seconds
    """Time that they did cost."""
    faults: int
    assumption: str


def estimate(job: Job, goodput: GoodputReport) -> TorchrunEstimate:
    """Estimate the goodput if every fault that broke a round had cost what it costs torchrun."""
    lost = [
        found
        for incident in job.incidents
        if incident.back_at is not None and (found := report.lost_s(incident)) is not None
    ]
    theirs_s = sum(max(one, RECOVERY_S) for one in lost)
    total = sum(goodput.seconds.values()) + (theirs_s - sum(lost)) * goodput.ranks
    productive = goodput.seconds.get("productive", 0.0)
    return TorchrunEstimate(
        goodput=round(productive / total, 6) if total > 0 else 0.0,
        lost_s=round(theirs_s, 3),
        ours_s=round(sum(lost), 3),
        faults=len(lost),
        assumption=(
            f"each of {len(lost)} faults costs at least {RECOVERY_S} s, what torchrun (torch 2.13)"
            " took to come back from a killed rank in bench/recovery.py (README.md); steps redone from"
            " older checkpoints, hangs, and that it came back in 3 of 5 tries are not counted"
        ),
    )
