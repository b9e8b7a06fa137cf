"""Everything Holdfast raises on purpose.

    HoldfastError            1   root; catch this to catch all of ours
    ├── UsageError           2   a flag, variable or argument makes no sense
    ├── JobError             1   a job cannot be started or found
    │   └── JobHomeError     2   its home cannot be written, or its name is in use
    ├── WireError            1   a connection is refused or given up
    │   ├── Cancelled            given up on this side; nobody wants it any more
    │   ├── FrameTooLarge        the peer announced more bytes than allowed; none were read
    │   ├── BadFrame             the bytes are no message of ours
    │   ├── WrongToken           the peer does not know the job's token
    │   └── WrongProtocol        the peer speaks another version
    ├── JournalError         1   the journal cannot be written or read
    │   └── JournalCorrupt       a record in it does not decode: nothing after it is trusted
    ├── CheckpointError      1   a state cannot be saved, or none that verifies can be restored
    │   ├── StorageError         what checkpoints are kept on failed: full, broken, not there
    │   │   └── NotThere         there is nothing of that name
    │   ├── StepTaken            that step is committed already; it is never written over
    │   └── Refused              bytes are not what their digest says; they were not used
    ├── FencedError          1   a message from an older round: refused, never applied
    ├── InjectedFault        1   injected with `holdfast chaos` (a RuntimeError too)
    └── RequestError         1   what a script asked for was not done
        ├── NotUnderHoldfast     the process is no worker of `holdfast run`
        ├── RequestDenied        the coordinator refused: too large, not a number, too many
        └── RequestTimeout       what was waited for did not come in time (a TimeoutError too)

The type says who has to act: the person who typed the command (UsageError, JobHomeError), the peer
(WireError, FencedError), the author of the script (RequestError), or whoever looks after the machine
(the rest). The number is the exit code of a process that ends by it. Messages say what happened,
where (job, node, rank, round, path) and what to do about it.
"""

from __future__ import annotations

from typing import ClassVar


class HoldfastError(Exception):
    """Root of the tree."""

    exit_code: ClassVar[int] = 1


class UsageError(HoldfastError):
    """What was typed makes no sense. The message is one printable line, whatever was typed."""

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else "?" for c in message))


class JobError(HoldfastError):
    """A job cannot be started or found."""


class JobHomeError(JobError):
    """A job's home cannot be written, or another live job has its name."""

    exit_code: ClassVar[int] = 2


class WireError(HoldfastError):
    """A connection is refused or given up; what it carried so far stays valid."""


class Cancelled(WireError):
    """Given up on this side, because nobody wants it any more."""


class FrameTooLarge(WireError):
    """A frame longer than the limit was announced; it was refused before anything was allocated."""


class BadFrame(WireError):
    """Bytes that do not decode to the message expected here."""


class WrongToken(WireError):
    """The peer's token is not the job's."""


class WrongProtocol(WireError):
    """The peer speaks another version of the protocol."""


class JournalError(HoldfastError):
    """The journal cannot be written or read, so nothing may be acted on."""


class JournalCorrupt(JournalError):
    """A record of the journal does not decode or is out of order."""


class FencedError(HoldfastError):
    """Something from an older round arrived; the message names both rounds."""


class InjectedFault(HoldfastError, RuntimeError):
    """A fault that `holdfast chaos` injected into a script."""


class RequestError(HoldfastError):
    """What a script asked its agent or the coordinator for was not done."""


class NotUnderHoldfast(RequestError):
    """There is nobody to ask: `holdfast run` did not start this process, or a worker forked it."""


class RequestDenied(RequestError):
    """The coordinator understood, and refused; the message says why."""


class RequestTimeout(RequestError, TimeoutError):
    """What was waited for did not come in time."""


class CheckpointError(HoldfastError):
    """A state cannot be saved, or none that verifies can be restored."""


class StorageError(CheckpointError):
    """What checkpoints are kept on failed. Says the path, what was done there, and what to do."""


class NotThere(StorageError):
    """There is no file or checkpoint of that name."""


class StepTaken(CheckpointError):
    """A step is committed already, so what was to be written of it is not needed."""


class Refused(CheckpointError):
    """Bytes are not what their digest says, or not all there; they were not used."""
