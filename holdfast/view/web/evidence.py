"""Reads what a job's home keeps besides the journal: stacks of hung ranks, and the ends of logs.

What is asked for comes from a browser, so paths are made from numbers alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.jobhome import JobHome
from holdfast.messages.evidence import RankEvidence

MOST_BYTES: Final = 256 << 10
"""Of a log's end that is read at once."""
MOST_STACKS: Final = 64


def stacks(home: JobHome, incident: int) -> dict[str, str]:
    """Stacks that were kept of an incident, by rank."""
    found: dict[str, str] = {}
    folder = home.incidents / str(incident)
    for path in sorted(folder.glob("rank_*.json"), key=_rank)[:MOST_STACKS]:
        try:
            evidence = msgspec.json.decode(path.read_bytes(), type=RankEvidence)
        except (OSError, msgspec.MsgspecError):
            continue
        found[str(evidence.rank)] = written(evidence)
    return found


def verdict(home: JobHome, incident: int) -> dict[str, Any] | None:
    """What the examination of a hang found; None if there was none."""
    try:
        content: dict[str, Any] = msgspec.json.decode(
            (home.incidents / str(incident) / "verdict.json").read_bytes()
        )
    except (OSError, msgspec.MsgspecError):
        return None
    return content


def written(evidence: RankEvidence) -> str:
    """Write the stacks of a rank as text."""
    lines = []
    for thread in evidence.stacks:
        lines.append(f"thread {thread.name}" if thread.name else "thread")
        lines += [
            f"    {frame.function}  {frame.file}:{frame.line}"
            if frame.line
            else f"    {frame.file}"
            for frame in thread.frames
        ]
    return "\n".join(lines)


def log_tail(home: JobHome, round: int, rank: int, lines: int) -> list[str]:
    """The last lines that a rank printed in a round."""
    text, _ = log_after(home, round, rank, None)
    return text.splitlines()[-lines:]


def log_after(home: JobHome, round: int, rank: int, offset: int | None) -> tuple[str, int]:
    """What a rank printed in a round after a place in its log, or lately; and the place after it."""
    try:
        with open(_log(home, round, rank), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            since = max(0, size - MOST_BYTES if offset is None else max(offset, size - MOST_BYTES))
            if since > size:
                since = 0  # The log was begun anew.
            file.seek(since)
            data = file.read(MOST_BYTES)
    except OSError:
        return "", 0
    return data.decode(errors="replace"), since + len(data)


def _log(home: JobHome, round: int, rank: int) -> Path:
    return home.logs / f"round_{round}" / f"rank_{rank}.log"


def _rank(path: Path) -> int:
    number = path.stem.removeprefix("rank_")
    return int(number) if number.isdigit() else 0
