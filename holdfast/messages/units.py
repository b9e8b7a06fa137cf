"""The kinds of number and name that every other module speaks in.

They are plain values at run time; the types keep a rank from being passed where a step is wanted.
"""

from typing import Annotated, NewType

from msgspec import Meta

NodeId = NewType("NodeId", str)
"""Unique per agent process: an agent that is started again is another node."""

Rank = NewType("Rank", int)
"""Global rank of a worker within one round."""

RoundNumber = NewType("RoundNumber", int)
"""Rounds count from 1; 0 means that no round was agreed yet."""

StepNumber = NewType("StepNumber", int)
"""How many training steps are finished, counted from the job's first one."""

Time = NewType("Time", Annotated[float, Meta(ge=0.0, le=1e12)])
"""Job time: seconds on the coordinator's clock, which never goes back. What is no number at all is
refused on the wire: the journal's JSON could not hold it, and no later replay could read it."""

Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]

CauseId = str
"""An event of the job by its number ("17"), or an action by its event's and its own ("17.3")."""
