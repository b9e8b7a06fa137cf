"""Keeps what a job has learnt about pauses in its home, for when it is queued again.

A job of the same name gets a new home; the file with these memories is carried over. What cannot be
read or written is lost without harm: the job learns again.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from holdfast.jobhome import write_privately
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
        try:
            write_privately(self._path, msgspec.json.encode(memory))
        except OSError as error:
            log.debug("%s: not written (%s)", self._path, error)
