"""Tells which entries of a state are spread over ranks.

Most of a state is the same on all ranks, or is cut into shards of which torch knows the places. Some is
neither: where a rank is in data that ranks read at their own pace is known to that rank alone, and only
all ranks together have the state. What such an object saved cannot come back rank by rank, because
there may be fewer ranks now, or more. So it is merged:

    class UsedNumbers:
        def state_dict(self): ...                  # this rank's part
        def merge_state_dicts(self, parts): ...    # the parts of all ranks that saved, in their order
        def load_state_dict(self, state): ...      # what merge_state_dicts returned

Every rank reads all parts, unless the class says `merged_by_rank_0 = True`. Then rank 0 alone merges
and loads the whole; every other rank is given its own part with `load_part(part)`, None if the world
that saved it had no such rank. It is for states that rank 0 passes on to somebody who serves all ranks,
and keeps the cost of a restore from growing with the square of the number of ranks.

A module and an optimizer are never merged: torch knows how their tensors are cut.
"""

from __future__ import annotations

from typing import Any

import torch

from holdfast.errors import UsageError


def is_spread(entry: Any) -> bool:
    """Return whether each rank saves a part of that entry, and the parts are merged."""
    if isinstance(entry, torch.nn.Module | torch.optim.Optimizer):
        return False
    return hasattr(entry, "load_state_dict") and callable(getattr(entry, "merge_state_dicts", None))


def is_merged_by(rank: int, entry: Any) -> bool:
    """Return whether that rank merges the parts of all ranks; if not, it loads its own."""
    return rank == 0 or not getattr(entry, "merged_by_rank_0", False)


def spread_names(state: dict[str, Any]) -> frozenset[str]:
    """Return the names of the entries that are spread over ranks."""
    return frozenset(name for name, entry in state.items() if is_spread(entry))


def needs_all_parts(state: dict[str, Any], rank: int) -> bool:
    """Return whether that rank reads what other ranks saved, even in a world of the same size."""
    return any(is_spread(entry) and is_merged_by(rank, entry) for entry in state.values())


def check_spread(state: dict[str, Any]) -> None:
    """Refuse an entry that rank 0 merges and that cannot take the parts of other ranks."""
    for name, entry in state.items():
        lacking = not callable(getattr(entry, "load_part", None))
        if is_spread(entry) and getattr(entry, "merged_by_rank_0", False) and lacking:
            raise UsageError(
                f"Checkpointer: {name!r} has merged_by_rank_0, but no method load_part(part), which"
                " ranks other than 0 restore it with"
            )
