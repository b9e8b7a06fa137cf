"""Remembers, in the job's home, what each target of notices was told.

The file is replaced after each delivery, so a sender that is killed at any moment goes on from the last
notice that arrived. A target is known by a digest, because its text is a secret. The file says whose it
is: a sender that outlived its job must not make a new job of the same name keep quiet.
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct

from holdfast.jobhome import JobHome, write_privately
from holdfast.view.notices.news import NoticesTold


class NoticesFile(Struct):
    """The content of notices.json."""

    job: str = ""
    """Id of the job."""
    targets: dict[str, NoticesTold] = {}
    """What each target was told, by the digest of its text."""


class NoticesMemory:
    """What the targets of one job were told."""

    def __init__(self, home: JobHome, job: str) -> None:
        self._path = home.notices
        found = self._read()
        self._kept = found if found.job == job else NoticesFile(job)

    def of(self, target: str) -> NoticesTold:
        return self._kept.targets.get(_digest(target), NoticesTold())

    def note(self, target: str, told: NoticesTold) -> None:
        """Remember what a target was told."""
        self._kept.targets[_digest(target)] = told
        try:
            write_privately(self._path, msgspec.json.encode(self._kept))
        except OSError:
            pass  # A full disk: a notice may come twice.

    def _read(self) -> NoticesFile:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=NoticesFile)
        except (OSError, msgspec.MsgspecError):
            return NoticesFile()


def _digest(target: str) -> str:
    return hashlib.sha256(target.encode()).hexdigest()[:16]
