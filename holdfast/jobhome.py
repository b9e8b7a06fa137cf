"""A job's home is the directory that holds everything about it, while it runs and afterwards.

    $HOLDFAST_HOME/jobs/<job>/
        job.json      address and token of the coordinator, mode 0600
        journal.db    every event
        logs/         round_<n>/rank_<r>.log
        incidents/    stacks and other evidence on hung ranks
        trace.json    opens in Perfetto, written when the job ends
        pauses.json   where its ranks were seen to pause; a new job of the same name inherits it
        imports.json  what its script imports, for standbys; inherited likewise
        lock          held by the launcher or coordinator while the job runs

A home is never overwritten: a new job of the same name first renames the old one's home.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from holdfast.config.sources import holdfast_home, nearest
from holdfast.errors import JobError, JobHomeError

SHOWN_JOBS: Final = 5
"""Jobs that are named when one is not found."""


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
        self._job_file = path / "job.json"
        self._lock_file = path / "lock"
        self._lock_fd = -1

    def write_job_file(self, content: dict[str, Any]) -> None:
        """Write job.json atomically, readable by this user only."""
        write_privately(self._job_file, (json.dumps(content, indent=1) + "\n").encode())

    def has_job_file(self) -> bool:
        return self._job_file.exists()

    def read_job_file(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self._job_file.read_text())
        return content

    def lock(self) -> bool:
        """Lock the job for this process and those it forks; False if it runs already."""
        fd = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._lock_fd = fd
        return True

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


def write_privately(path: Path, content: bytes) -> None:
    """Write a file atomically, readable by this user only."""
    temporary = path.with_suffix(".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def create(name: str | None, script: str) -> JobHome:
    """Create a home for a job that starts now, locked by this process."""
    jobs = _jobs()
    stem = Path(script).stem or "job"
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).lstrip(".") or "job"
    chosen = name or f"{safe[:60]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    home = JobHome(jobs / chosen)
    before: JobHome | None = None
    try:
        jobs.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(jobs):
            if home.path.exists():
                if home.alive():
                    raise JobHomeError(
                        f"job {chosen} is running already ({home.path}); choose another --job name"
                    )
                before = JobHome(_set_aside(home.path))
            home.logs.mkdir(parents=True, mode=0o700)
            if before is not None:
                _inherit(before.memories, home.memories)
                _inherit(before.imports, home.imports)
            if not home.lock():
                raise JobHomeError(f"job {chosen} was started twice at the same time; try again")
    except OSError as error:
        raise _unwritable(home, error) from None
    return home


def _inherit(old: Path, new: Path) -> None:
    if old.exists():
        write_privately(new, old.read_bytes())


def _unwritable(home: JobHome, error: OSError) -> JobHomeError:
    return JobHomeError(
        f"{home.path}: cannot be written ({error.strerror}); set HOLDFAST_HOME to another directory"
    )


@contextmanager
def _one_at_a_time(directory: Path) -> Iterator[None]:
    """Keep two jobs that start at the same time from renaming each other's home."""
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


def share(name: str) -> JobHome:
    """Open the home of a job that another machine hosts, for this node's logs."""
    home = JobHome(_jobs() / name)
    try:
        home.logs.mkdir(parents=True, mode=0o700, exist_ok=True)
    except OSError as error:
        raise _unwritable(home, error) from None
    return home


def at_port(port: int) -> JobHome | None:
    """The running job on this machine whose coordinator listens on this port."""
    for path in _homes(_jobs()):
        home = JobHome(path)
        if home.alive() and home.read_job_file().get("port") == port:
            return home
    return None


def find(name: str | None) -> JobHome:
    """Find the home of a job by its name, or of the newest job."""
    jobs = _jobs()
    if name is not None:
        home = JobHome(jobs / name)
        if not home.journal.exists():
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


def _jobs() -> Path:
    return holdfast_home() / "jobs"


def _homes(jobs: Path) -> list[Path]:
    try:
        return [path for path in jobs.iterdir() if (path / "job.json").exists()]
    except FileNotFoundError:
        return []
