"""What a restartable function may ask for: a parameter annotated with `Context` gets one."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from holdfast.inprocess.leaving import InterruptibleCall
from holdfast.inprocess.link import RoundEntry, RoundLink


class Context:
    """The present entry into a restartable function."""

    def __init__(
        self, iteration: int, entry: RoundEntry, call: InterruptibleCall, link: RoundLink
    ) -> None:
        self.iteration = iteration
        """How often this process has entered the function before."""
        self.round = entry.round
        self.why = entry.why
        """What ended the entry before; empty if there was none."""
        self._call = call
        self._link = link

    def ping(self) -> None:
        """Give a sign of life where a step takes unusually long."""
        self._link.ping()

    def atomic(self) -> AbstractContextManager[None]:
        """Enclose what must be finished or not begun: the function is not left in the middle of it."""
        return self._call.atomic()

    def pause_watch(self) -> AbstractContextManager[None]:
        """Enclose what may take any time without a sign of life: it is never taken for a hang."""
        return self._link.pause_watch()


def wants_context(function: Callable[..., Any]) -> str | None:
    """Return the name of the parameter that asks for a context, if there is one."""
    try:
        hints = typing.get_type_hints(function)
    except Exception:
        # Annotations of the user's may name what does not exist at run time; those that are no
        # strings, and a plain "Context", are understood even so.
        hints = dict(getattr(function, "__annotations__", {}))
    for name in inspect.signature(function).parameters:
        hint = hints.get(name)
        if hint is Context or (isinstance(hint, str) and hint.rpartition(".")[2] == "Context"):
            return name
    return None
