"""Assigns ranks along a tree: racks, nodes in them, ranks on those.

Each layer groups the members of the layer above it, and the leaves are the members. Four rules, in this
order:

1. A subtree with fewer living members than its layer's `least` is left out, innermost first.
2. No subtree has more active members than `most`. Within these limits as many are active as can be, and
   of those that were active before as many as can be.
3. A gap is a number whose holder is gone or was left out. It belongs to the subtrees its holder was in.
   With `Fill.RESERVE` a member that was not active takes the number, from the innermost subtree that
   has one, as far out as layers have the flag without interruption. With `Fill.BACKFILL` the highest
   numbers of the outermost such subtree move into the gaps that are left.
4. Gaps that are still there are closed by shifting, and members that took no gap are numbered after all
   others, subtree by subtree.

So with reserves on its own node, a lost rank changes no other rank's number, and with BACKFILL on a
layer only numbers of the same subtree change before the shift. The place of a member that is gone is
known if it is listed (`with_gone`). Otherwise its number is a gap somewhere in the outermost layer.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from msgspec import Struct

from holdfast.errors import UsageError
from holdfast.inprocess.arguments import require_count
from holdfast.inprocess.assignment.members import (
    Assignment,
    Key,
    Member,
    Members,
    group_of,
    in_order,
    renumbered,
)

_Found = TypeVar("_Found")


class Fill(enum.Flag):
    """How the numbers of those that are gone are taken within one subtree."""

    NONE = 0
    RESERVE = enum.auto()
    """By members that were not active."""
    BACKFILL = enum.auto()
    """By its highest numbers."""


class Layer(Struct, frozen=True, kw_only=True):
    """A level of the tree: how members are grouped, and what holds for each group.

    - `key`: what members are grouped by; None puts all in one group, for limits on the whole.
    - `least`: living members, active or in reserve, without which a group is left out.
    - `most`: limit of active members; None for no limit.
    - `fill`: where a gap is filled from.
    """

    key: Key | None = None
    least: int = 1
    most: int | None = None
    fill: Fill = Fill.RESERVE

    def __post_init__(self) -> None:
        require_count("Layer", "least", self.least)
        if self.most is not None:
            require_count("Layer", "most", self.most)
            if self.most < self.least:
                raise UsageError(
                    f"a layer cannot have at least {self.least} and at most {self.most} ranks"
                )
        if not isinstance(self.fill, Fill):
            raise UsageError(f"a layer's fill is a Fill, not {self.fill!r}")


Path = tuple[Hashable, ...]
"""Groups of a member, from the outermost layer; a beginning of it names one subtree."""


def tree(layers: Sequence[Layer]) -> Assignment:
    """Assign ranks by these `layers`, given from the outermost to the innermost."""
    layers = tuple(layers)
    if not layers or not all(isinstance(layer, Layer) for layer in layers):
        raise UsageError("tree needs a list of at least one Layer")

    def assign(members: Members) -> Members:
        work = _Assigning(layers, members)
        work.leave_out()
        work.keep_active()
        work.take_from_reserve()
        work.backfill()
        return renumbered(members, work.close_up())

    return assign


class _Assigning:
    """One assignment under way."""

    def __init__(self, layers: tuple[Layer, ...], members: Members) -> None:
        self.layers = layers
        self.candidates = in_order(members)
        self.paths = {member.rank: self._path(member) for member in self.candidates}
        self.numbers: dict[int, int] = {}
        """Numbers of active members, by rank; they may have gaps."""
        self.active: Counter[Path] = Counter()
        """Active members of each subtree."""
        self.gaps: dict[int, Path] = {
            member.previous: self._path(member)
            for member in members
            if member.gone and member.previous is not None
        }
        self._add_unlisted(members)

    def _path(self, member: Member) -> Path:
        return tuple(
            None if layer.key is None else group_of(member, layer.key) for layer in self.layers
        )

    def _add_unlisted(self, members: Members) -> None:
        """Take up gaps whose holders are not listed; all that is known is the outermost subtree."""
        tops = {path[:1] for path in self.paths.values()}
        somewhere = next(iter(tops)) if len(tops) == 1 else ()
        had = {member.previous for member in members if member.previous is not None}
        for number in range(max(had, default=-1)):
            if number not in had:
                self.gaps[number] = somewhere

    def leave_out(self) -> None:
        """Drop the members of subtrees that have too few, from the innermost layer outwards."""
        for depth in range(len(self.layers), 0, -1):
            sizes = Counter(self.paths[member.rank][:depth] for member in self.candidates)
            least = self.layers[depth - 1].least
            staying = []
            for member in self.candidates:
                if sizes[self.paths[member.rank][:depth]] >= least:
                    staying.append(member)
                elif member.previous is not None:
                    self.gaps[member.previous] = self.paths[member.rank]
            self.candidates = staying

    def keep_active(self) -> None:
        """Activate those that were active before, under their numbers, as far as limits allow."""
        for member in sorted(self.candidates, key=lambda member: member.seniority):
            if member.previous is None:
                continue
            if self._has_room(self.paths[member.rank]):
                self._activate(member, member.previous)
            else:
                self.gaps[member.previous] = self.paths[member.rank]

    def take_from_reserve(self) -> None:
        """Give gaps to members that were not active, those of the innermost subtrees first."""
        for depth in self._depths_with(Fill.RESERVE):
            reserves = self._by_subtree(self._waiting(), depth, self._path_of)
            for subtree, gaps in self._by_subtree(sorted(self.gaps), depth, self._gap_path).items():
                unfilled = iter(gaps)
                number = next(unfilled, None)
                for member in reserves.get(subtree, ()):
                    if number is None:
                        break
                    if self._has_room(self.paths[member.rank]):
                        self._activate(member, number)
                        del self.gaps[number]
                        number = next(unfilled, None)

    def backfill(self) -> None:
        """Move the highest numbers of each outermost BACKFILL subtree into its gaps."""
        depth = min(self._depths_with(Fill.BACKFILL), default=None)
        if depth is None:
            return
        holders = [m for m in self.candidates if m.rank in self.numbers]
        of_subtree = self._by_subtree(holders, depth, self._path_of)
        for subtree, gaps in self._by_subtree(sorted(self.gaps), depth, self._gap_path).items():
            inside = of_subtree.get(subtree, [])
            lowest = sorted([*(self.numbers[m.rank] for m in inside), *gaps])[: len(inside)]
            kept = {self.numbers[m.rank] for m in inside} & set(lowest)
            moving = [m for m in inside if self.numbers[m.rank] not in kept]
            moving.sort(key=lambda member: self.numbers[member.rank])
            free = (number for number in lowest if number not in kept)
            self.numbers.update({m.rank: number for m, number in zip(moving, free, strict=True)})

    def close_up(self) -> dict[int, int]:
        """Return the numbers without gaps, with the rest of the members that there is room for."""
        order = sorted(self.numbers, key=self.numbers.__getitem__)
        for member in self._waiting():
            if self._has_room(self.paths[member.rank]):
                self._activate(member, len(self.numbers))
                order.append(member.rank)
        return {rank: number for number, rank in enumerate(order)}

    # ---- the tree ----

    def _subtrees(self, path: Path) -> Iterable[tuple[Layer, Path]]:
        return ((layer, path[: depth + 1]) for depth, layer in enumerate(self.layers))

    def _has_room(self, path: Path) -> bool:
        return all(
            layer.most is None or self.active[subtree] < layer.most
            for layer, subtree in self._subtrees(path)
        )

    def _activate(self, member: Member, number: int) -> None:
        self.numbers[member.rank] = number
        for _, subtree in self._subtrees(self.paths[member.rank]):
            self.active[subtree] += 1

    def _waiting(self) -> list[Member]:
        """Return the candidates that are not active, subtree by subtree, in the order of ranks."""
        first: dict[Path, int] = {}
        for member in sorted(self.candidates, key=lambda member: member.rank):
            for _, subtree in self._subtrees(self.paths[member.rank]):
                first.setdefault(subtree, member.rank)

        def place(member: Member) -> tuple[int, ...]:
            path = self.paths[member.rank]
            return (*(first[subtree] for _, subtree in self._subtrees(path)), member.rank)

        waiting = [member for member in self.candidates if member.rank not in self.numbers]
        return sorted(waiting, key=place)

    def _depths_with(self, fill: Fill) -> list[int]:
        """Return the lengths of paths whose layers have that flag, from the innermost layer on."""
        depths = []
        for depth in range(len(self.layers), 0, -1):
            if fill not in self.layers[depth - 1].fill:
                break
            depths.append(depth)
        return depths

    def _path_of(self, member: Member) -> Path:
        return self.paths[member.rank]

    def _gap_path(self, number: int) -> Path:
        return self.gaps[number]

    @staticmethod
    def _by_subtree(
        found: Iterable[_Found], depth: int, path: Callable[[_Found], Path]
    ) -> dict[Path, list[_Found]]:
        """Group by the subtrees of that depth; what is known less exactly belongs to none."""
        groups: defaultdict[Path, list[_Found]] = defaultdict(list)
        for one in found:
            if len(path(one)) >= depth:
                groups[path(one)[:depth]].append(one)
        return groups
