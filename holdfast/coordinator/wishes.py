"""Says what will come of another number of nodes that somebody wants for a job."""

from __future__ import annotations

from holdfast.core.job import Job
from holdfast.messages.wire import AskScale


def scale_line(job: Job, asked: AskScale) -> str:
    """Say what changes, from what to what, and who provides the nodes."""
    terms = job.terms
    spares = terms.spares if asked.spares is None else asked.spares
    line = f"nodes: from {_told(terms.min_nodes, terms.max_nodes, terms.spares)}"
    line += f" to {_told(asked.min_nodes, asked.max_nodes, spares)}"
    if asked.max_nodes + spares <= job.membership.count():
        return line
    if not job.supply.active:
        return f"{line}; no platform provides nodes for this job: start them with `holdfast run`"
    return f"{line}; {job.supply.platform} is asked for what is missing"


def _told(fewest: int, most: int, spares: int) -> str:
    numbers = f"{fewest}:{most}" if fewest != most else f"{most}"
    return f"{numbers} and {spares} spare{'s' * (spares != 1)}" if spares else numbers
