"""Tells who started the launcher why it failed, in the file that torchrun would write.

A scheduler names a file in the launcher's own TORCHELASTIC_ERROR_FILE. If the job fails on this node,
the file holds what the first rank that failed here recorded, or what is known of its end where it
recorded nothing; if none failed here, why the node ended.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from holdfast.agent.processes import Exit
from holdfast.messages.records import Raised
from holdfast.messages.units import Rank

log = logging.getLogger("holdfast.agent")

VARIABLE = "TORCHELASTIC_ERROR_FILE"

Failure = dict[str, Any]
"""A failure as torch's `record` decorator writes it."""


def of_rank(rank: Rank, end: Exit, raised: Raised | None, recorded: Path) -> Failure:
    """Describe how a rank failed: in its own words if it recorded them."""
    code = -end.signal if end.signal is not None else end.code
    try:
        failure = json.loads(recorded.read_text())
        if isinstance(failure["message"], dict):
            failure["message"]["errorCode"] = code
        return dict(failure)
    except (OSError, ValueError, KeyError, TypeError):  # Nothing, or half of it.
        pass
    if raised is not None:
        failure = _failure(f"{raised.type}: {raised.message}", raised.traceback)
    elif end.signal is not None:
        failure = _failure(f"rank {rank} was killed by {signal.Signals(end.signal).name}")
    else:
        failure = _failure(f"rank {rank} ended with exit code {end.code}")
    failure["message"]["errorCode"] = code
    return failure


def write(failure: Failure | str) -> None:
    """Write a failure, or a reason, to the file that the launcher was given; none if it has none."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    content = _failure(failure) if isinstance(failure, str) else failure
    try:
        Path(path).write_text(json.dumps(content))
    except OSError as error:
        log.error("%s=%s cannot be written (%s)", VARIABLE, path, error.strerror)


def _failure(message: str, traceback: str = "") -> Failure:
    extra = {"py_callstack": traceback, "timestamp": str(int(time.time()))}
    return {"message": {"message": message, "extraInfo": extra}}
