"""A job's home is the directory that holds everything about it, while it runs and afterwards.

    $HOLDFAST_HOME/jobs/<job>/
        job.json      address and token of the coordinator, mode 0600
        journal.db    every event
        logs/         round_<n>/rank_<r>.log
        incidents/    stacks and other evidence on hung ranks
        trace.json    opens in Perfetto, written when the job ends
        pauses.json   where its ranks were seen to pause; a new job of the same name inherits it
        nodes/        <request>.json: processes of a node that `holdfast up` started
        imports.json  what its script imports, for standbys; inherited likewise
        notices.json  what each target of notices was told (--notify)
        history       what viewers have read of the journal, so that the next one need not
        line          status line of the job's terminal, while it runs
        lock          held by the launcher or coordinator while the job runs

A home is never overwritten: a new job of the same name first renames the old one's home. It is for its
user alone, directories 0700 and files 0600 whatever the umask: it holds the token, the ends of logs,
tracebacks and values that scripts have stored. An older home with wider modes is tightened when it is
used again.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from holdfast.config.sources import holdfast_home, nearest
from holdfast.config.values import run_id
from holdfast.errors import JobError, JobHomeError

SHOWN_JOBS: Final = 5
"""Jobs that are named when one is not found."""
LOCK_TRIES: Final = 5
LOCK_PAUSE_S: Final = 0.01


class JobFile(Struct, frozen=True, kw_only=True):
    """What job.json says: how to reach the job's coordinator."""

    job: str
    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    token: Annotated[str, Meta(min_length=1)]
    pid: int
    """The process that hosts the coordinator."""
    id: str = ""
    """Id of the job, once it was opened."""


class JobHome:
    """The paths of one job, and the lock that says whether it runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.journal = path / "journal.db"
        self.logs = path / "logs"
        self.incidents = path / "incidents"
        self.trace = path / "trace.json"
        self.memories = path / "pauses.json"
        self.imports = path / "imports.json"
        self.nodes = path / "nodes"
        self.history = path / "history"
        self.line = path / "line"
        self.notices = path / "notices.json"
        self._job_file = path / "job.json"
        self._lock_file = path / "lock"
        self._lock_fd = -1

    def write_job_file(self, content: JobFile) -> None:
        """Write job.json atomically, readable by this user only."""
        encoded = msgspec.json.format(msgspec.json.encode(content), indent=1)
        try:
            write_privately(self._job_file, encoded + b"\n")
        except OSError as error:
            raise _unwritable(self._job_file, error) from None

    def has_job_file(self) -> bool:
        return self._job_file.exists()

    def read_job_file(self) -> JobFile:
        """Read job.json; a file that is damaged or unreadable is a JobError."""
        try:
            return msgspec.json.decode(self._job_file.read_bytes(), type=JobFile)
        except OSError as error:
            reason = f"cannot be read ({error.strerror})"
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            reason = f"is damaged ({error})"
        raise JobError(
            f"{self._job_file} {reason}: the address and token of job {self.name} are not known;"
            " restore the file, or end the job and start it again"
        )

    def note_opened(self, id: str) -> None:
        """Note the id of the job that was opened, so that its journal will be missed if it goes."""
        with suppress(JobError):  # A job whose job.json is damaged goes on without the note.
            self.write_job_file(replace(self.read_job_file(), id=id))

    def opened_id(self) -> str:
        """The id of the job that was opened here; empty if none was, or job.json is damaged."""
        try:
            return self.read_job_file().id if self.has_job_file() else ""
        except JobError:
            return ""

    def lock(self) -> bool:
        """Lock the job for this process and those it forks; False if it runs already.

        Whoever asks `alive` holds the lock for some microseconds, so it is tried a few times."""
        fd = open_privately(self._lock_file, os.O_RDWR)
        for last in (*[False] * (LOCK_TRIES - 1), True):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if last:
                    os.close(fd)
                    return False
                time.sleep(LOCK_PAUSE_S)
            else:
                break
        self._lock_fd = fd
        return True

    def leave(self) -> None:
        """Close the lock that this process inherited: it is no part of the job."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def alive(self) -> bool:
        """Whether a live process holds the job's lock."""
        try:
            fd = os.open(self._lock_file, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)


def open_privately(path: Path, flags: int) -> int:
    """Open a file, created if it is missing, that only this user can read, whatever the umask.

    A device or pipe that a user named as a file keeps its mode: it is there for others, too."""
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.fchmod(fd, 0o600)
    return fd


def write_privately(path: Path, content: bytes) -> None:
    """Write a file atomically, readable by this user only. One that cannot be written leaves nothing:
    the room on a full disk is not its own."""
    temporary = path.with_suffix(".new")
    try:
        with os.fdopen(open_privately(temporary, os.O_WRONLY | os.O_TRUNC), "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def make_private_directory(path: Path) -> None:
    """Create a directory, with missing parents, that only this user can enter, whatever the umask."""
    if path.is_dir():
        return
    make_private_directory(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    path.chmod(0o700)


def _tighten(home: Path) -> None:
    """Close an older home, in which modes followed the umask, to other users."""
    if not home.stat().st_mode & 0o077:
        return
    home.chmod(0o700)
    for folder, directories, files in os.walk(home):
        for names, mode in ((directories, 0o700), (files, 0o600)):
            for path in (Path(folder, name) for name in names):
                if not path.is_symlink():
                    path.chmod(mode)


def create(name: str | None, script: str) -> JobHome:
    """Create a home for a job that starts now, locked by this process."""
    jobs = _jobs()
    stem = Path(script).stem or "job"
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).lstrip(".") or "job"
    chosen = name or f"{safe[:60]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    home = home_of(chosen)
    before: JobHome | None = None
    try:
        make_private_directory(jobs)
        with one_at_a_time(jobs):
            if home.path.exists():
                if home.alive():
                    raise JobHomeError(
                        f"job {chosen} is running already ({home.path}); choose another --job name"
                    )
                _tighten(home.path)
                before = JobHome(_set_aside(home.path))
            make_private_directory(home.logs)
            if before is not None:
                _inherit(before.memories, home.memories)
                _inherit(before.imports, home.imports)
            if not home.lock():
                raise JobHomeError(f"job {chosen} was started twice at the same time; try again")
    except OSError as error:
        raise _unwritable(home.path, error) from None
    return home


def _inherit(old: Path, new: Path) -> None:
    if old.exists():
        write_privately(new, old.read_bytes())


def _unwritable(path: Path, error: OSError) -> JobHomeError:
    return JobHomeError(
        f"{path}: cannot be written ({error.strerror}); set HOLDFAST_HOME to another directory"
    )


@contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Keep two processes from replacing the same thing in a directory at the same time."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _set_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return path.rename(aside)


def reopen(name: str) -> JobHome:
    """Open the home of a job that goes on after it had to stop, locked by this process."""
    home = share(name)
    if not home.lock():
        raise JobHomeError(f"job {name} is running already ({home.path})")
    return home


def share(name: str) -> JobHome:
    """Open the home of a job that another machine hosts, for this node's logs."""
    home = home_of(name)
    try:
        make_private_directory(home.logs)
        _tighten(home.path)
    except OSError as error:
        raise _unwritable(home.path, error) from None
    return home


def at_port(port: int) -> JobHome | None:
    """The running job on this machine whose coordinator listens on this port."""
    for home in map(JobHome, _homes(_jobs())):
        try:
            if home.alive() and home.read_job_file().port == port:
                return home
        except JobError:  # Damaged. That of another job must not keep a node from joining its own.
            continue
    return None


def shared_at(name: str, port: int) -> JobHome | None:
    """The home of this job, of a coordinator with this port that may be on another machine."""
    home = home_of(name)
    try:
        return home if home.has_job_file() and home.read_job_file().port == port else None
    except JobError:  # Damaged, or set aside at this moment.
        return None


def find(name: str | None) -> JobHome:
    """Find the home of a job by its name, or of the newest job."""
    jobs = _jobs()
    if name is not None:
        home = home_of(name)
        if not home.journal.exists():
            if home.opened_id():
                raise JobError(f"{home.journal} is gone, and with it what is known of job {name}")
            raise JobError(f"no job {name} in {jobs}; {_meant(name, jobs)}")
        return home
    homes = _homes(jobs)
    if not homes:
        raise JobError(f"no jobs in {jobs}; start one with `holdfast run`")
    return JobHome(max(homes, key=lambda path: (path / "job.json").stat().st_mtime))


def _meant(name: str, jobs: Path) -> str:
    """Say which jobs a user may have meant: those with a similar name, else the newest."""
    homes = [home for home in _homes(jobs) if JobHome(home).journal.exists()]
    homes.sort(key=lambda home: -(home / "job.json").stat().st_mtime)
    names = [home.name for home in homes]
    if (near := nearest(name, names)) is not None:
        return f"did you mean {near}?"
    more = f" and {len(names) - SHOWN_JOBS} older ones" if len(names) > SHOWN_JOBS else ""
    return f"known are: {', '.join(names[:SHOWN_JOBS]) or 'none'}{more}"


def home_of(name: str) -> JobHome:
    """The home of a job of this name. A path is no name, and is refused."""
    return JobHome(_jobs() / run_id(name, "job"))


def homes() -> list[JobHome]:
    """The homes of all jobs of this machine, in no order."""
    return [JobHome(path) for path in _homes(_jobs())]


def _jobs() -> Path:
    return holdfast_home() / "jobs"


def _homes(jobs: Path) -> list[Path]:
    try:
        return [path for path in jobs.iterdir() if (path / "job.json").exists()]
    except FileNotFoundError:
        return []
