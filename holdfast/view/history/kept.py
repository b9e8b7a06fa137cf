"""Keeps what was read of a long journal in a file, so that the next viewer need not read it again.

The file holds the job as it was after some event, and the history up to there: one line of JSON that
says what follows and its digest, then msgpack. Any viewer may write it: what each of them has read of
one journal is the same.

It is never needed. A file that is missing, torn, damaged, or written by another version is ignored, and
the journal is read from its first event.
"""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

import holdfast
from holdfast.coordinator.journal import VERSION
from holdfast.core.ledger.books import Ledger
from holdfast.core.replay import Entry, JobSnapshot
from holdfast.jobhome import write_privately
from holdfast.view.history.history import JobHistory

FORMAT = f"1, holdfast {holdfast.__version__}, journal {VERSION}"


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
    write_privately(path, header + b"\n" + body)


def read(path: Path) -> KeptHistory | None:
    """Read the file; None if there is none that is of use."""
    try:
        head, _, body = path.read_bytes().partition(b"\n")
        header = msgspec.json.decode(head, type=_Header)
        if header.format != FORMAT or header.digest != _digest(body):
            return None
        return _decoder.decode(body)
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
