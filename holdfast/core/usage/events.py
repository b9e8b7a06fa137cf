"""Keeps each node's newest sample, for reports; nothing is decided by it."""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.core.decisions import NOT_A_MEMBER, Refused
from holdfast.core.machine import NONE, Effects, Machine, on
from holdfast.core.states import ALWAYS
from holdfast.core.view import View
from holdfast.messages.events import NodeSampled
from holdfast.messages.units import NodeId, Time
from holdfast.messages.usage import NodeUsage


class NodeSample(Struct, frozen=True):
    at: Time
    usage: NodeUsage


class NodeSamples(Struct):
    newest: dict[NodeId, NodeSample] = field(default_factory=dict)
    """Of the members that have sent one."""


class UsageMachine(NodeSamples, Machine):
    @on(NodeSampled, *ALWAYS)
    def on_sampled(self, job: View, event: NodeSampled, now: Time) -> Effects | Refused:
        if not job.membership.has(event.node):
            return NOT_A_MEMBER
        self.newest[event.node] = NodeSample(event.at, event.usage)
        return NONE

    def node_lost(self, job: View, node: NodeId, placed: bool, now: Time) -> Effects:
        self.newest.pop(node, None)
        return NONE

    def node_sent_away(self, job: View, node: NodeId, now: Time) -> Effects:
        self.newest.pop(node, None)
        return NONE

    def validate(self, job: View) -> None:
        for node in self.newest:
            assert job.membership.has(node), f"a sample of {node}, which is no member"
