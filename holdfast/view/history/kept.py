"""Keeps what was read of a long journal in a file, so that the next viewer need not read it again.

The file holds the job as it was after some event, and the history up to there: one line of JSON that
says what follows and its digest, then msgpack. Any viewer may write it: what each of them has read of
one journal is the same.

It is never needed. A file that is missing, torn, damaged, or written by another version is ignored, and
the journal is read from its first event.
"""

from __future__ import annotations

import hashlib
import os
import stat
from array import array
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

import holdfast
from holdfast.coordinator.journal import VERSION
from holdfast.core.ledger.books import Ledger
from holdfast.core.replay import Entry, JobSnapshot
from holdfast.jobhome import one_at_a_time, write_privately
from holdfast.view.history.history import JobHistory

FORMAT = f"1, holdfast {holdfast.__version__}, journal {VERSION}"
LONGEST_HEADER = 4096
"""Bytes of the first line, at most: more than that was written by somebody else."""


class KeptHistory(Struct):
    """What a viewer knew of a job."""

    newest: Entry | None
    """The event that it had read last: a journal in which that is another one is not the same."""
    snapshot: JobSnapshot
    history: JobHistory


class _Header(Struct):
    format: str
    digest: str


def write(path: Path, known: KeptHistory) -> None:
    """Write the file, readable by this user only; an OSError if that is not possible."""
    ledger = known.snapshot.job.of(Ledger)
    spans, ledger.spans = ledger.spans, None
    try:
        body = _encoder.encode(known)
    finally:
        ledger.spans = spans
    header = msgspec.json.encode(_Header(FORMAT, _digest(body)))
    with one_at_a_time(path.parent):
        write_privately(path, header + b"\n" + body)


def read(path: Path) -> KeptHistory | None:
    """Read the file; None if there is none that is of use."""
    try:
        # Not blocking: a pipe would be waited for.
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            header = msgspec.json.decode(file.readline(LONGEST_HEADER), type=_Header)
            if header.format != FORMAT:
                return None
            body = file.read()
        return _decoder.decode(body) if header.digest == _digest(body) else None
    except (OSError, msgspec.MsgspecError, ValueError):
        return None


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _from_array(value: Any) -> bytes:
    if isinstance(value, array):
        return value.typecode.encode() + value.tobytes()
    raise NotImplementedError(f"a history cannot hold a {type(value).__name__}")


def _to_array(kind: type, value: Any) -> Any:
    if kind is array:
        return array(chr(value[0]), value[1:])
    raise NotImplementedError(f"a history cannot hold a {kind}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_from_array)
_decoder = msgspec.msgpack.Decoder(KeptHistory, dec_hook=_to_array)
