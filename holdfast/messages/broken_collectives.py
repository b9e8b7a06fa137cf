"""Tells failures of a script by itself from those in what it shares with other ranks."""

from __future__ import annotations

import re

from holdfast.messages.records import Raised

_BROKEN_COLLECTIVE = re.compile(
    r"connection (reset|closed|refused|timed out|was likely closed)|broken pipe|\bgloo\b|\bnccl\b"
    r"|socket (timeout|has timed out)",
    re.IGNORECASE,
)
_COLLECTIVE_ERRORS = re.compile(r"(Dist\w*Error|FencedError|RequestTimeout|StoreTimeout)$")
"""Exceptions that only collectives, stores and barriers raise."""
_DISTRIBUTED = re.compile(r"torch[/.]distributed")


def is_broken_collective(raised: Raised) -> bool:
    """Return whether a script failed in what it shares with other ranks.

    Torch raises a RuntimeError there, or one of its own; a script whose data base refuses its
    connection fails by itself.
    """
    if _COLLECTIVE_ERRORS.fullmatch(raised.type):
        return True
    shared = raised.type == "RuntimeError" or _DISTRIBUTED.search(raised.traceback)
    return bool(shared and _BROKEN_COLLECTIVE.search(raised.message))
