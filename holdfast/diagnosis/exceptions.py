"""Describes an exception of a script as a report has it: where in the user's code, and why."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from types import TracebackType

from holdfast.messages.records import Raised

_OUR_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MAX_MESSAGE = 2_000
_MAX_TRACEBACK = 13_000
"""Limits in characters: even at four bytes each, the report fits into one packet."""


def users_part(tb: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of Holdfast and runpy that started the script."""
    ours = (_OUR_PACKAGE + os.sep, runpy.__file__, "<frozen runpy>")
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(ours):
        tb = tb.tb_next
    return tb


def describe(error: BaseException) -> Raised:
    """Describe an exception within the limits of a report."""
    tb = users_part(error.__traceback__)
    frames = traceback.extract_tb(tb)
    where = ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{os.path.basename(error.filename)}:{error.lineno}"
    elif frames:
        script = next((f for f in reversed(frames) if not _is_library(f.filename)), frames[-1])
        where = f"{os.path.basename(script.filename)}:{script.lineno}"
    text = "".join(traceback.format_exception(type(error), error, tb))
    return Raised(
        type=_sendable(type(error).__name__[:200]),
        message=_sendable(_message(error)[:_MAX_MESSAGE]),
        where=_sendable(where[:300]),
        traceback=_sendable(text[-_MAX_TRACEBACK:]),
    )


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # The user's own exception class; Python's traceback says the same.
        return "<exception str() failed>"


def _sendable(text: str) -> str:
    """Replace lone surrogates, which stand for undecodable bytes in file names."""
    return text.encode("utf-8", "replace").decode()


def _is_library(filename: str) -> bool:
    ours = _OUR_PACKAGE + os.sep
    return "site-packages" in filename or filename.startswith((sys.base_prefix, ours, "<"))
