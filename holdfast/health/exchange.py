"""What a checker and its probe say to each other: a line of JSON each, a question and its answer."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from holdfast.health.baseline import Seen
from holdfast.health.finding import Finding
from holdfast.health.settings import HealthSettings

READY = b"ready"
"""A probe's first line: it has started, and from now on its answers can be waited for."""


class Question(Struct, frozen=True):
    kind: str
    subject: str
    look: int
    """Questions of one look share what was read once."""
    settings: HealthSettings
    before: Seen | None


def written(message: Question | Finding) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def question_in(line: bytes) -> Question:
    return msgspec.json.decode(line, type=Question)


def finding_in(line: bytes) -> Finding:
    return msgspec.json.decode(line, type=Finding)
