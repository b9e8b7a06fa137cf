"""What things are called on storage.

    <root>/
        step_000000500/
            __<rank>_<round>.distcp           a rank's part; two rounds never write the same file
            .metadata                         for readers that know only torch's own format
            holdfast.json                     the manifest: it comes last, and makes it a checkpoint
            holdfast.json.refused             a manifest set aside: what it lists does not verify
            holdfast.json.deleted             a manifest whose files are being deleted
            .<name>.<16 hex digits>.partial   a file that is being written, or never was finished

Whatever has another name is somebody else's, and is never touched.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

MANIFEST: Final = "holdfast.json"
METADATA: Final = ".metadata"
REFUSED: Final = "refused"
DELETED: Final = "deleted"

LAST_STEP: Final = 10**18 - 1
_STEP: Final = re.compile(r"step_([0-9]{9}|[1-9][0-9]{9,17})")
_RANK_FILE: Final = re.compile(r"__([0-9]+)_([0-9]+)\.distcp")
_JOB: Final = 10**6
_PARTIAL: Final = re.compile(
    rf"\.({_RANK_FILE.pattern}|{re.escape(METADATA)}|{re.escape(MANIFEST)})\.[0-9a-f]{{16}}\.partial"
)


def step_directory(step: int) -> str:
    return f"step_{step:09d}"


def step_of(directory: str) -> int | None:
    """The step whose directory that is; None for any other name."""
    match = _STEP.fullmatch(directory)
    return int(match[1]) if match else None


def rank_file(rank: int, round: int, job: int = 0) -> str:
    """A rank's file. Jobs count their rounds alike, and may save at one place: each has a number of
    its own, so that none writes over another's file."""
    return f"__{rank}_{round + _JOB * job}.distcp"


def is_file_of(name: str, rank: int, round: int) -> bool:
    """Whether that is a name for the rank's file of that round, in whichever job."""
    match = _RANK_FILE.fullmatch(name)
    if match is None or int(match[1]) != rank:
        return False
    return int(match[2]) >= round and (int(match[2]) - round) % _JOB == 0


def is_rank_file(name: str) -> bool:
    return _RANK_FILE.fullmatch(name) is not None


def partial(name: str) -> str:
    """A name, used by nobody else, for a file until it is whole."""
    return f".{name}.{secrets.token_hex(8)}.partial"


def is_partial(name: str) -> bool:
    return _PARTIAL.fullmatch(name) is not None


def aside(name: str, why: str, taken: set[str]) -> str:
    """What a file is called once it is set aside; nothing that is there already is replaced."""
    first = f"{name}.{why}"
    others = (f"{first}.{number}" for number in range(1, len(taken) + 2))
    return next(choice for choice in (first, *others) if choice not in taken)


def is_aside(name: str, why: str) -> bool:
    """Whether it is a manifest that was set aside for that reason."""
    return re.fullmatch(rf"{re.escape(MANIFEST)}\.{why}(\.[0-9]+)?", name) is not None
