"""Defines what a node check reports: the result of each test, and the verdict on each node.

A round here is one of the node check, counted from 1; it has nothing to do with the job's rounds.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from holdfast.messages.units import Count, NodeId, Seconds

Verdict = Literal["healthy", "faulty", "slow", "undetermined"]


class TestResult(Struct, frozen=True, kw_only=True):
    """What one node measured in one round: its solo test, then the collective test of its group."""

    node: NodeId
    round: Count
    group: Count
    """Index of the group in its round, from 0."""
    solo_passed: bool | None = None
    """None if the solo test did not finish."""
    solo_s: Seconds | None = None
    passed: bool | None = None
    """Whether the collective test passed; None if the node had no partner or did not get that far."""
    seconds: Seconds | None = None
    detail: Annotated[str, Meta(max_length=2000)] = ""
    """What went wrong, in the words of the process that noticed."""


class NodeVerdict(Struct, frozen=True, kw_only=True):
    """The verdict on one node."""

    node: NodeId
    verdict: Verdict
    reason: str
    """One sentence that names the evidence."""
