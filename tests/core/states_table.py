"""Prints the table of states and events: `python tests/core/states_table.py` writes docs/states.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from holdfast.core import job as jobs
from holdfast.core.machine import Rule
from holdfast.core.states import ALWAYS, FOLLOWS
from holdfast.messages.events import AnyEvent, JobOpened
from holdfast.messages.records import Terms
from holdfast.messages.units import Time

PAGE = Path(__file__).parents[2] / "docs" / "states.md"

HEAD = """\
# States and events

This page is printed from the code by `python tests/core/states_table.py`; a test holds it equal.

A job is in one of five states (`holdfast/core/states.py`), each a type that carries its own data. An
event goes to every function that its row names for that state, in that order. Where none is named,
or where all of them say that the event does not fit (a rank of another round, a node that is no
member), it is refused: nothing changes, and `holdfast status --json` counts it under `refused`, by
event and reason.

"""


def table() -> list[tuple[str, dict[str, str]]]:
    """List for each event, by state, the functions that take it, or why it is refused."""
    job = jobs.opened(JobOpened(at=Time(0.0), job="", terms=Terms()))
    found: dict[str, dict[str, str]] = {}
    for event in get_args(AnyEvent):
        own, listeners = jobs.OWN.get(event), job.listeners.get(event, [])
        cells = {state.name: cell(state, listeners) for state in ALWAYS}
        if own is not None:
            cells = dict.fromkeys(cells, f"job.{own.__name__}")
        found[event.__name__] = cells
    return sorted(found.items())


def cell(state: type, listeners: list[tuple[Rule, Any]]) -> str:
    names = [
        f"{handler.__func__.__module__.split('.')[2]}.{handler.__name__}"
        for rule, handler in listeners
        if issubclass(state, rule.states)
    ]
    refusal = listeners[0][0].refusal if listeners else "the job is open already"
    return ", ".join(names) or f"refused: {refusal}"


def page() -> str:
    names = [state.name for state in ALWAYS]
    follows = "\n".join(
        f"| {state.name} | {', '.join(one.name for one in after) or '–'} |"
        for state, after in FOLLOWS.items()
    )
    rows = "\n".join(
        f"| {event} | " + " | ".join(cells[name] for name in names) + " |"
        for event, cells in table()
    )
    return (
        f"{HEAD}| state | may be followed by |\n| --- | --- |\n{follows}\n\n"
        f"| event | {' | '.join(names)} |\n|{' --- |' * (len(names) + 1)}\n{rows}\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page())
