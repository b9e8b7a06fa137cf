"""Runs checks of the user: functions named on the command line or by installed packages.

A check is a function without arguments:

    def fan() -> None:                  # returning nothing, or True, passes
        assert rpm() > 900, "fan 3 is slow"          # raising fails, with the message as reason
        # or: return "warn", "fan 3 is slow"         # a verdict and a reason

A package offers its checks to every job by an entry point of the group `holdfast.checks`. Each runs
in a process of its own that ends with it, so it may import torch, take a GPU, or crash. One that does
not answer in time fails: a sick device makes its user hang.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from typing import Any, get_args

from holdfast.health.judgement import Judgement, unknown
from holdfast.health.node import Node
from holdfast.messages.health import Fact, HealthResult, Verdict
from holdfast.messages.units import MAX_INT64

GROUP = "holdfast.checks"


def installed_checks() -> dict[str, str]:
    """Return name and module:function of every check that an installed package offers."""
    from importlib import metadata

    return {point.name: point.value for point in metadata.entry_points(group=GROUP)}


def check_own(node: Node, target: str, before: None) -> Judgement:
    for directory in node.settings.import_path:
        if directory not in sys.path:
            sys.path.insert(0, directory)
    try:
        function = loaded(target)
    except Exception as error:
        # A user's module may raise anything; that it cannot be loaded says nothing of the node.
        return unknown(f"{target} cannot be loaded: {_described(error)}")
    try:
        return understood(function())
    except BaseException as error:
        # Raising is how a check says no, and sys.exit(0) how a careless one says yes.
        if isinstance(error, SystemExit) and not error.code:
            return Judgement("pass", f"{target} passed")
        return Judgement("fail", f"{target}: {_described(error)}")


def loaded(target: str) -> Callable[..., Any]:
    """Import the function that module:function names."""
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("[")[0].strip().split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError("it is not a function")
    function: Callable[..., Any] = found
    return function


def _described(error: BaseException) -> str:
    kind = type(error).__name__
    return f"{kind}: {error}" if str(error) else kind


def understood(answer: object) -> Judgement:
    """Interpret what a check returned."""
    if answer is None or answer is True:
        return Judgement("pass", "passed")
    if answer is False:
        return Judgement("fail", "it returned False")
    if isinstance(answer, HealthResult):
        facts = {str(name): _told(value) for name, value in answer.facts.items()}
        return Judgement(answer.verdict, answer.reason, facts)
    if isinstance(answer, tuple) and len(answer) == 2:
        verdict, reason = answer
        if verdict in get_args(Verdict) and isinstance(reason, str):
            return Judgement(verdict, reason)
    return unknown(f"it returned {answer!r:.80}, not None, a bool, or a verdict and a reason")


def _told(value: object) -> Fact:
    """Return what a check measured, in words if no message could carry it as a number."""
    whole = isinstance(value, int) and abs(value) <= MAX_INT64
    if whole or (isinstance(value, float) and math.isfinite(value)):
        return value  # type: ignore[return-value]
    return str(value)
