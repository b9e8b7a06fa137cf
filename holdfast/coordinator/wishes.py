"""Checks what somebody wants of a job and its nodes, and says what will come of it."""

from __future__ import annotations

from holdfast.core.commits import rules
from holdfast.core.commits.state import Commits
from holdfast.core.job import Job
from holdfast.messages.wire import AskExclude, AskScale


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


def refusal_of_exclusion(job: Job, asked: AskExclude) -> str:
    """Say why a node cannot be excluded; empty if it can."""
    if not job.membership.has(asked.node):
        return f"there is no node {asked.node}; see `holdfast status`"
    return ""


def exclusion_line(job: Job, asked: AskExclude) -> str:
    """Say what becomes of the job without a node."""
    member = job.membership.find(asked.node)
    host = member.spec.host if member is not None else asked.node
    line = f"node {asked.node} is sent away, and host {host} not let in again: {asked.reason}"
    if not job.can_do_without([asked.node]):
        line += "; the job has too few nodes without it and waits until another one joins"
    return line


def save_line(job: Job) -> str:
    """Say which snapshots are going to be written; empty if storage has all that there is."""
    due = rules.securable(job.of(Commits))
    return "; ".join(f"step {id.step} of {name} is being written" for name, id in due.items())


def _told(fewest: int, most: int, spares: int) -> str:
    numbers = f"{fewest}:{most}" if fewest != most else f"{most}"
    return f"{numbers} and {spares} spare{'s' * (spares != 1)}" if spares else numbers
