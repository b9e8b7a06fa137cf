"""Decides which ranks of a round enter the function, and under which numbers.

An assignment is a pure function from the members of a round to the same members with other `active`
numbers. Every rank computes it for itself from the same members, so it may look at nothing else. There
are two kinds, joined from left to right:

    at_most, divisible_by, only_groups   selections: put members in reserve, the others keep their order
    fill_gaps, shift                     numberings: number the active members by the numbers they had

`tree` does both at once. A selection by number goes after a numbering, and one by group before it:

    compose(only_groups("host", exactly=8), fill_gaps, at_most(64))
"""

from holdfast.inprocess.assignment.limits import at_most, divisible_by, only_groups
from holdfast.inprocess.assignment.members import Member
from holdfast.inprocess.assignment.numbering import fill_gaps, shift
from holdfast.inprocess.assignment.topology import Fill, Layer, tree

__all__ = [
    "Fill",
    "Layer",
    "Member",
    "at_most",
    "divisible_by",
    "fill_gaps",
    "only_groups",
    "shift",
    "tree",
]
