"""The user's own checks: functions of theirs, named on the command line or by installed packages.

A check is a function without arguments:

    def fan() -> None:                  # returning nothing, or True, passes
        assert rpm() > 900, "fan 3 is slow"          # raising fails, with the message as reason
        # or: return "warn", "fan 3 is slow"         # a verdict and a reason

A package offers its checks to every job by an entry point of the group `holdfast.checks`. Each runs
in a process of its own that ends with it, so it may import torch, take a GPU, or crash. One that
does not answer in time fails: a sick device makes its user hang.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any, get_args

from holdfast.health.baseline import Seen
from holdfast.health.finding import Finding, unknown
from holdfast.health.node import Node
from holdfast.messages.health import Result, Verdict

GROUP = "holdfast.checks"


def installed_checks() -> dict[str, str]:
    """Name and module:function of every check that an installed package offers."""
    return {point.name: point.value for point in metadata.entry_points(group=GROUP)}


def check_own(node: Node, target: str, before: Seen | None) -> Finding:
    for directory in node.settings.import_path:
        if directory not in sys.path:
            sys.path.insert(0, directory)
    try:
        function = _loaded(target)
    except Exception as error:
        # Somebody's module may raise anything. That it cannot be loaded says nothing of the node.
        return unknown(f"{target} cannot be loaded: {_said(error)}")
    try:
        return understood(function())
    except BaseException as error:
        # Raising is how a check says no, and sys.exit(0) how a careless one says yes.
        if isinstance(error, SystemExit) and not error.code:
            return Finding("pass", f"{target} passed")
        return Finding("fail", f"{target}: {_said(error)}")


def _loaded(target: str) -> Callable[[], Any]:
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("[")[0].strip().split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError("it is no function")
    function: Callable[[], Any] = found
    return function


def _said(error: BaseException) -> str:
    kind = type(error).__name__
    return f"{kind}: {error}" if str(error) else kind


def understood(answer: object) -> Finding:
    """What a check meant by what it returned."""
    if answer is None or answer is True:
        return Finding("pass", "passed")
    if answer is False:
        return Finding("fail", "it says no")
    if isinstance(answer, Result):
        return Finding(answer.verdict, answer.reason, dict(answer.facts))
    if isinstance(answer, tuple) and len(answer) == 2:
        verdict, reason = answer
        if verdict in get_args(Verdict) and isinstance(reason, str):
            return Finding(verdict, reason)
    return unknown(f"it answered {answer!r:.80}: no verdict (say None, a bool, or verdict, reason)")
