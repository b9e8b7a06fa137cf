"""Defines every exception that Holdfast raises on purpose.

    HoldfastError            1   root; catches all of them
    ├── UsageError           2   invalid flag, variable or argument
    ├── JobError             1   job cannot be started or found
    │   └── JobHomeError     2   job home cannot be written, or its name is in use
    ├── WireError            1   connection refused or closed
    │   ├── Cancelled            transfer cancelled on this side
    │   ├── FrameTooLarge        peer announced a frame above the limit; none of it was read
    │   ├── BadFrame             bytes that do not decode to the expected message
    │   ├── WrongToken           peer does not know the job's token
    │   ├── WrongProtocol        peer speaks another protocol version
    │   └── JobUnknown           journal knows nothing of the job that the peer trains in
    ├── JournalError         1   journal cannot be written or read
    │   └── JournalCorrupt       journal record does not decode, so nothing after it is trusted
    ├── CheckpointError      1   state cannot be saved, or no saved state verifies
    │   ├── StorageError         checkpoint storage failed: full, broken, not mounted
    │   │   └── NotThere         no file or checkpoint of that name
    │   ├── StateLost            no rank has the state that they trained, and none is saved
    │   ├── StepTaken            step is already committed and is never overwritten
    │   └── Unusable             bytes do not match their digest; they were not used
    ├── DataError            1   data set or its saved state cannot be used, or a record not be read
    ├── FencedError          1   message from an older round, refused
    ├── PlatformError        1   platform refused, failed or cannot be reached
    │   └── ApiRefused           Kubernetes' API server answered with an error
    ├── InjectedFault        1   fault requested with `holdfast chaos` (also a RuntimeError)
    ├── StopRestarting      93   restartable function shall not be entered again, on any rank; or 75
    ├── UnfitProcess         1   process shall be replaced, not re-enter its restartable function
    └── RequestError         1   request of a script was not fulfilled
        ├── NotUnderHoldfast     process is not a worker of `holdfast run`
        ├── RequestDenied        coordinator refused it: too large, not a number, too many
        └── RequestTimeout       request timed out (also a TimeoutError)

The type says who has to act: the user at the command line (UsageError, JobHomeError), the peer
(WireError, FencedError), the author of the script (RequestError, DataError), or the operator of the
machine (the rest). The number is the exit code of a process that ends with that error. Each message
says what happened, where (job, node, rank, round, path) and what the reader can do about it.
"""

from __future__ import annotations

from typing import ClassVar


class HoldfastError(Exception):
    """Root of the exception tree."""

    exit_code: ClassVar[int] = 1


class UsageError(HoldfastError):
    """Invalid flag, variable or argument. Unprintable characters in the message become "?"."""

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else "?" for c in message))


class JobError(HoldfastError):
    """A job that cannot be started or found."""


class PlatformError(HoldfastError):
    """A platform that refused requests, failed, or cannot be reached."""

    def __init__(
        self, message: str, requests: tuple[str, ...] = (), *, for_good: bool = False
    ) -> None:
        """`requests` are those concerned, none for all; `for_good` if asking again is in vain."""
        super().__init__(message)
        self.requests, self.for_good = requests, for_good


class ApiRefused(PlatformError):
    """An error that Kubernetes' API server answered with."""

    def __init__(self, message: str, code: int, reason: str) -> None:
        """`code` is the HTTP status, `reason` the API's word for it, such as AlreadyExists."""
        super().__init__(message)
        self.code, self.reason = code, reason


class JobHomeError(JobError):
    """A job home that cannot be written, or that a live job of the same name uses."""

    exit_code: ClassVar[int] = 2


class WireError(HoldfastError):
    """A connection that was refused or closed; what it carried before stays valid."""


class Cancelled(WireError):
    """A transfer that this side cancelled because its result is no longer needed."""


class FrameTooLarge(WireError):
    """A frame announced above the size limit, refused before any allocation."""


class BadFrame(WireError):
    """Bytes that do not decode to the expected message."""


class WrongToken(WireError):
    """A peer whose token is not the job's."""


class WrongProtocol(WireError):
    """A peer that speaks another protocol version."""


class JobUnknown(WireError):
    """A node whose job is not in the coordinator's journal."""


class JournalError(HoldfastError):
    """A journal that cannot be written or read, so that no event may be acted on."""


class JournalCorrupt(JournalError):
    """A journal record that does not decode or is out of order."""


class DataError(HoldfastError):
    """A data set or its saved state that cannot be used, or a record that cannot be read."""


class FencedError(HoldfastError):
    """A message or request from an older round; the text names both rounds."""


class InjectedFault(HoldfastError, RuntimeError):
    """A fault that `holdfast chaos` injected into a script."""


class StopRestarting(HoldfastError):
    """The end of a job: its restartable function is not entered again, for this `reason`. The launcher
    ends with `code`; `exit_code` is its default."""

    exit_code: ClassVar[int] = 93

    def __init__(self, reason: str, *, code: int = 93) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code
        """The job's exit code: 93 if the same would happen again, 75 if it may work later."""


class UnfitProcess(HoldfastError):
    """A process that shall not enter its restartable function again; another takes its place."""


class RequestError(HoldfastError):
    """A script's request that its agent or the coordinator did not fulfil."""


class NotUnderHoldfast(RequestError):
    """A request from a process that `holdfast run` did not start, or that a worker forked."""


class RequestDenied(RequestError):
    """A request that the coordinator refused; the message says why."""


class RequestTimeout(RequestError, TimeoutError):
    """A request that timed out."""


class CheckpointError(HoldfastError):
    """A state that cannot be saved, or no saved state that verifies."""


class StorageError(CheckpointError):
    """Failed checkpoint storage. The message gives the path, the operation and the remedy."""


class NotThere(StorageError):
    """No file or checkpoint of that name."""


class StateLost(CheckpointError):
    """A trained state that survives on no rank and in no checkpoint. It ends the job: entering the
    function again would not bring it back, and fresh processes would silently start over."""


class StepTaken(CheckpointError):
    """A step that is already committed, so that the new write is dropped."""


class Unusable(CheckpointError):
    """Bytes that do not match their digest or are incomplete; they were not used."""
