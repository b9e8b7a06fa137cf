"""Keeps what a job has learnt about pauses in its home, for when it is queued again.

A job of the same name gets a new home; the file with these memories is carried over. What cannot be
read or written is lost without harm: the job learns again.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from holdfast.messages.hangs import Memory

log = logging.getLogger("holdfast.coordinator")


class Memories:
    """The file that holds them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Memory:
        """Return what an earlier run of the job has learnt; nothing if there was none."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Memory)
        except FileNotFoundError:
            return Memory()
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s: not read (%s); pauses are learnt again", self._path, error)
            return Memory()

    def write(self, memory: Memory) -> None:
        """Replace what the file holds."""
        temporary = self._path.with_suffix(".new")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.encode(memory))
            os.replace(temporary, self._path)
        except OSError as error:
            log.debug("%s: not written (%s)", self._path, error)
