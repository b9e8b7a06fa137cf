"""Reads keys from a terminal."""

from __future__ import annotations

import re

NAMES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "k": "up",
    "j": "down",
    "l": "right",
    "h": "left",
    " ": "page down",
    "g": "home",
    "G": "end",
    "\x1b": "back",
    "\x7f": "back",
    "Q": "q",
    "\x03": "q",
    "\x04": "q",
}
_KEY = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)


def keys(typed: bytes) -> list[str]:
    """Return the names of the keys in what was typed: "up", "back", "q", ..."""
    found = _KEY.findall(typed.decode("utf-8", "ignore"))
    return [NAMES.get(one.replace("\x1bO", "\x1b["), one) for one in found]
