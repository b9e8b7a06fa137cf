"""What a script says of its own failure, in the file that torch's `record` decorator writes.

The file's form is torch's: a message, or an object that has one with the stack beside it. A script
that does not use the decorator leaves no file, and one that dies while it writes leaves half of one:
then nothing is known, and that is no error.
"""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.messages.records import Raised

MESSAGE_CHARS = 2000
TRACEBACK_CHARS = 16000


def recorded(path: Path) -> Raised | None:
    """The failure that is written there, if any."""
    try:
        message = json.loads(path.read_text())["message"]
        if isinstance(message, str):
            return _raised("Error", message, message)
        stack = message.get("extraInfo", {}).get("py_callstack", "")
        text = str(message.get("message", ""))
        return _raised(text.partition(":")[0], text, stack)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _raised(kind: str, text: str, stack: str) -> Raised:
    traceback = stack[-TRACEBACK_CHARS:]
    return Raised(type=kind, message=text[:MESSAGE_CHARS], where="", traceback=traceback)
