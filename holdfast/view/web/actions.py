"""Does what a person on the page wants done: asks the job's coordinator, as the commands do.

Each action names the job once more (`confirm`), so that a click on the wrong page does nothing. The
journal keeps who asked: the user that runs this server, and the address the request came from.
"""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.config.faults import WORDS, injection
from holdfast.errors import UsageError
from holdfast.messages.units import NodeId
from holdfast.messages.wire import (
    AskExclude,
    AskFault,
    AskSave,
    AskScale,
    AskStop,
    ExcludeTaken,
    FaultTaken,
    SaveTaken,
    ScaleTaken,
    StopTaken,
)
from holdfast.view.web.parameters import BadParameter, text
from holdfast.view.web.watched import WatchedJob
from holdfast.wire.visitors import Coordinates, ask_at

STOPPED: Final = 130
"""Exit code of a job that was stopped here: as after an interrupt from the terminal."""
MOST_BODY: Final = 1 << 16
MOST_NODES: Final = 1 << 20

Given = dict[str, Any]


async def act(job: WatchedJob, name: str, body: bytes, client: str) -> str:
    """Carry an action out; return what will come of it, in words."""
    given = _read(body)
    if given.get("confirm") != job.name:
        raise BadParameter(f"confirm: the job's name, {job.name}, is wanted, to be sure")
    by = f"{_user()} (page, {client or 'unknown'})"
    where = job.coordinates()
    try:
        return await asyncio.to_thread(ACTIONS[name], where, given, by)
    except UsageError as error:
        raise BadParameter(str(error)) from None


def _read(body: bytes) -> Given:
    if len(body) > MOST_BODY:
        raise BadParameter("the request is too large")
    try:
        given = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise BadParameter(f"the request is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadParameter("the request is not a JSON object")
    return given


def _stop(where: Coordinates, given: Given, by: str) -> str:
    said = given.get("reason") or "stopped from the page"
    question = AskStop(code=STOPPED, reason=text({"reason": said}, "reason"), by=by)
    return ask_at(where, question, StopTaken).line


def _exclude(where: Coordinates, given: Given, by: str) -> str:
    said = given.get("reason") or "not wanted"
    question = AskExclude(
        node=NodeId(text(given, "node")), reason=text({"reason": said}, "reason"), by=by
    )
    return ask_at(where, question, ExcludeTaken).line


def _save(where: Coordinates, given: Given, by: str) -> str:
    return ask_at(where, AskSave(by=by), SaveTaken).line


def _fault(where: Coordinates, given: Given, by: str) -> str:
    said = {word: [str(given[word])] for word in WORDS if given.get(word) is not None}
    asked = injection(text(given, "fault"), said, f"job {where.job}")
    taken = ask_at(where, AskFault(injection=asked, by=by), FaultTaken).taken
    return "; ".join(one.line for one in taken)


def _scale(where: Coordinates, given: Given, by: str) -> str:
    fewest = _count(given, "min_nodes")
    most = _count(given, "max_nodes") if given.get("max_nodes") is not None else fewest
    spares = _count(given, "spares") if given.get("spares") is not None else None
    question = AskScale(min_nodes=fewest, max_nodes=most, spares=spares, by=by)
    return ask_at(where, question, ScaleTaken).line


def _count(given: Given, name: str) -> int:
    found = given.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= MOST_NODES:
        raise BadParameter(f"{name}: a whole number of nodes is wanted")
    return found


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # No such user in this container.
        return "somebody"


ACTIONS: Final[dict[str, Callable[[Coordinates, Given, str], str]]] = {
    "stop": _stop,
    "exclude": _exclude,
    "save": _save,
    "fault": _fault,
    "scale": _scale,
}
