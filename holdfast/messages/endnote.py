"""The end of a job in a few words, for a platform that outlives its coordinator.

`holdfast coordinator --end-file` writes it when the job is over. On Kubernetes the file is the
container's termination message, which the operator finds in the status of the coordinator's pod.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.messages.units import Count, ExitCode, RoundNumber, StepNumber, Text


class EndNote(Struct, frozen=True, kw_only=True):
    """How a job ended."""

    job: Text
    code: ExitCode
    reason: Text
    round: RoundNumber
    step: StepNumber
    goodput: float
    requeues: Count
    """How often the job was started again before."""
    last_incident: Text = ""
