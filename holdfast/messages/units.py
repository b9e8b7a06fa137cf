"""Defines the kinds of number, name and collection that all messages use.

They are plain values at run time; the types keep a rank from being passed where a step is expected.

Every kind has bounds, which the decoder checks, so that no message that decodes can make the journal
unreadable: its JSON has neither NaN nor infinity, and what overflows somewhere was refused before.
The bounds are far beyond what any agent sends; a frame's size is the tighter one for texts and lists.
`tests/messages/test_bounds.py` walks all messages and fails on a field without bounds.
"""

from typing import Annotated, NewType, TypeVar

from msgspec import Meta

T = TypeVar("T")
K = TypeVar("K")

MAX_TEXT_CHARS = 1 << 20
MAX_ITEMS = 1 << 20
MAX_NODES = 1 << 20
MAX_SLOTS = 1 << 16
"""Ranks of one node."""
MAX_INT64 = (1 << 63) - 1

NodeId = NewType("NodeId", Annotated[str, Meta(max_length=512)])
"""Name of one agent process: an agent that is started again is another node."""

Rank = NewType("Rank", Annotated[int, Meta(ge=0, le=1 << 36)])
"""Global rank of a worker within one round."""

RoundNumber = NewType("RoundNumber", Annotated[int, Meta(ge=0, le=1 << 53)])
"""Number of a round, from 1; 0 before the first one."""

StepNumber = NewType("StepNumber", Annotated[int, Meta(ge=0, le=1 << 53)])
"""Number of finished training steps, counted from the job's first."""

Time = NewType("Time", Annotated[float, Meta(ge=0.0, le=1e12)])
"""Job time: seconds on the coordinator's clock, which never goes back."""

Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]

CauseId = Annotated[str, Meta(max_length=64)]
"""An event of the job by its number ("17"), or an action by its event's and its own ("17.3")."""

Count = Annotated[int, Meta(ge=0, le=MAX_INT64)]
Int64 = Annotated[int, Meta(ge=-MAX_INT64 - 1, le=MAX_INT64)]
Float = Annotated[float, Meta(ge=-1e300, le=1e300)]
Port = Annotated[int, Meta(ge=0, le=65535)]
ProcessId = Annotated[int, Meta(ge=0, le=1 << 31)]
ExitCode = Annotated[int, Meta(ge=0, le=255)]
NodeCount = Annotated[int, Meta(ge=0, le=MAX_NODES)]
Slots = Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
WorldSize = Annotated[int, Meta(ge=0, le=MAX_NODES * MAX_SLOTS)]

Word = Annotated[str, Meta(max_length=1024)]
"""A name or address."""
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
"""A sentence, a traceback, the tail of a log."""

Listed = Annotated[tuple[T, ...], Meta(max_length=MAX_ITEMS)]
Mapped = Annotated[dict[K, T], Meta(max_length=MAX_ITEMS)]
