"""Defines the kinds of number and name that all messages use.

They are plain values at run time; the types keep a rank from being passed where a step is expected.
"""

from typing import Annotated, NewType

from msgspec import Meta

NodeId = NewType("NodeId", str)
"""Name of one agent process: an agent that is started again is another node."""

Rank = NewType("Rank", int)
"""Global rank of a worker within one round."""

RoundNumber = NewType("RoundNumber", int)
"""Number of a round, from 1; 0 before the first one."""

StepNumber = NewType("StepNumber", int)
"""Number of finished training steps, counted from the job's first."""

Time = NewType("Time", Annotated[float, Meta(ge=0.0, le=1e12)])
"""Job time: seconds on the coordinator's clock, which never goes back. NaN and infinity are refused on
the wire, because the journal's JSON cannot hold them and no replay could read them."""

Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]

CauseId = str
"""An event of the job by its number ("17"), or an action by its event's and its own ("17.3")."""
