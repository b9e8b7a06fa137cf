"""What is said about a check of the nodes: what each test showed, and what it means.

A round here is one of the check's own, counted from 1; it has nothing to do with the job's rounds.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from holdfast.messages.units import NodeId, Seconds

Verdict = Literal["healthy", "faulty", "slow", "undetermined"]


class TestResult(Struct, frozen=True, kw_only=True):
    """What one node saw in one round: its solo test, then the collective test of its group."""

    node: NodeId
    round: int
    group: int
    """Which of the round's groups, counted from 0."""
    solo_passed: bool | None = None
    """None when it was not run to its end."""
    solo_s: Seconds | None = None
    passed: bool | None = None
    """The collective; None when there was none, because the node is alone or did not get that far."""
    seconds: Seconds | None = None
    detail: Annotated[str, Meta(max_length=2000)] = ""
    """What went wrong, in the words of whoever noticed."""


class NodeVerdict(Struct, frozen=True, kw_only=True):
    node: NodeId
    verdict: Verdict
    reason: str
    """One sentence that names the evidence."""
