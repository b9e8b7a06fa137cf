"""The site of a launcher: where the job's coordinator listens, the token, and where files go.

A launcher either hosts the coordinator (and creates the job's home) or joins one that runs already.
Which of the two follows from the settings, and where they leave it open, from whether this machine
has the coordinator's address and the port is free.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast import jobhome
from holdfast.config.schema import Settings
from holdfast.config.settings import RunSettings
from holdfast.errors import JobError, UsageError
from holdfast.jobhome import JobFile, JobHome
from holdfast.messages.exits import EXIT_TRY_AGAIN
from holdfast.platforms.slurm_environment import in_step

log = logging.getLogger("holdfast")

JOB_FILE_LIMIT_S = 5.0
JOB_FILE_LOOK_S = 0.02
SHARED_FILE_LIMIT_S = 40.0
"""How long a file on a shared file system may take to be seen: NFS remembers a missing one for 30 s."""
STEP_LIMIT_S = 300.0
"""How long the tasks of one step of Slurm may be started apart."""
STEP_LOOK_S = 0.2
LISTENS_LIMIT_S = 5.0
MAX_TOKEN_CHARS = 1024
READ_CHARS = 1 << 16


@dataclass(frozen=True)
class Site:
    """The coordinator's address, the job's token, and the home for this node's files."""

    host: str
    port: int
    token: str
    home: JobHome
    listener: socket.socket | None
    """The coordinator's listening socket, if this launcher hosts it."""


class PortTaken(JobError):
    """Another process listens on the address, or it is not this machine's."""


def find_site(settings: RunSettings) -> Site:
    """Host the coordinator where that is this node's part, join it where it runs already."""
    token = given_token(settings.token_file)
    address, hosts = coordinator_address(settings)
    if address is None:
        return _host(settings, "127.0.0.1", 0, token)
    host, port = address
    if hosts is False:
        return _join(settings, host, port, token)
    try:
        return _host(settings, host, port, token)
    except PortTaken:
        if hosts:  # No other node could listen there.
            raise
        return _join(settings, host, port, token)


def coordinator_address(settings: RunSettings) -> tuple[tuple[str, int] | None, bool | None]:
    """The coordinator's address, None for any on loopback; and whether this launcher hosts it, None
    if that depends on whether the address is this machine's and free."""
    meeting = settings.rendezvous
    if meets_at_master(settings):
        assert meeting.master_addr is not None
        return (meeting.master_addr, meeting.master_port or 0), is_master(settings)
    if meeting.coordinator is None:
        return None, True
    host, _, port = meeting.coordinator.rpartition(":")
    hosts = meeting.hosts_coordinator
    return (host.strip("[]"), int(port)), True if hosts is None and settings.places == 1 else hosts


def meets_at_master(settings: RunSettings) -> bool:
    """Whether nodes meet in torchrun's static way, at node 0's MASTER_ADDR:MASTER_PORT."""
    rendezvous = settings.rendezvous
    several = settings.terms.max_nodes > 1 and rendezvous.coordinator is None
    return several and rendezvous.master_addr is not None


def is_master(settings: RunSettings) -> bool:
    """Whether this is the node that MASTER_ADDR names, if it names one."""
    return settings.terms.max_nodes == 1 or settings.node_rank in (None, 0)


def _host(settings: RunSettings, host: str, port: int, token: str | None) -> Site:
    listener = listen(host, port)
    name = settings.job or settings.rendezvous.run_id
    if settings.requeued and name is not None and goes_on(name):
        home = jobhome.reopen(name)
        return hosted(home, listener, token or home.read_job_file().token)
    return hosted(jobhome.create(name, settings.script), listener, token)


def goes_on(name: str) -> bool:
    """Whether a job of this name had to stop, and can go on: it ended with 75, or was cut short."""
    from holdfast.coordinator.journal import replay

    home = jobhome.home_of(name)
    if not home.journal.exists() or home.alive():
        return False
    before = replay(home.journal)
    if before is None:
        return False
    result = before.job.result
    return result is None or result.code == EXIT_TRY_AGAIN


def hosted(home: JobHome, listener: socket.socket, token: str | None) -> Site:
    """Publish a coordinator that this process hosts in the job's home."""
    token = token or secrets.token_urlsafe(32)
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # All interfaces: others reach it by the machine's name.
        host = socket.gethostname()
    home.write_job_file(
        JobFile(
            job=home.name,
            host=host,
            port=port,
            token=token,
            pid=os.getpid(),
            id=home.opened_id(),
        )
    )
    return Site(host, port, token, home, listener)


def _join(settings: RunSettings, host: str, port: int, token: str | None) -> Site:
    name = settings.job or settings.rendezvous.run_id
    if token is not None:
        return Site(host, port, token, jobhome.share(name or f"joined-{port}"), None)
    home = _home_with_token(name, host, port)
    if home is None:
        raise JobError(
            f"no token for the coordinator at {host}:{port}; set HOLDFAST_TOKEN or --token-file"
            " (the token is in job.json on the coordinator's machine), or HOLDFAST_HOME to a directory"
            " that all nodes share"
        )
    if name is not None and name != home.name:
        raise JobError(
            f"the coordinator at {host}:{port} belongs to job {home.name}, not to {name};"
            " correct --job or the address"
        )
    return Site(host, port, home.read_job_file().token, home, None)


def _home_with_token(name: str | None, host: str, port: int) -> JobHome | None:
    """Find the home of the job whose coordinator is there, on this machine or a shared file system."""
    now = time.monotonic()
    deadline, comes_by = now + JOB_FILE_LIMIT_S, now
    if in_step(
        os.environ
    ):  # The task that hosts the coordinator may be started later than this one.
        deadline, comes_by = now + SHARED_FILE_LIMIT_S, now + STEP_LIMIT_S
    while True:
        home = jobhome.at_port(port) or (jobhome.shared_at(name, port) if name else None)
        now = time.monotonic()
        if home is not None or now >= deadline:
            return home
        # A coordinator that starts at this moment has its port before its job.json.
        if now < comes_by and not _listens(host, port):
            deadline = now + SHARED_FILE_LIMIT_S
            time.sleep(STEP_LOOK_S)
        time.sleep(JOB_FILE_LOOK_S)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=LISTENS_LIMIT_S).close()
        return True
    except OSError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Open a coordinator's listening socket."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=4096)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        kind = PortTaken if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) else JobError
        raise kind(f"cannot listen on {host}:{port} ({reason}); choose another address") from None


def given_token(path: str | None) -> str | None:
    """The token that the user provides, from a file or HOLDFAST_TOKEN."""
    if path is not None:
        return _token_in(Path(path))
    variable = Settings.token.variables[0]
    if variable not in os.environ:
        return None
    return _checked_token(os.environ[variable], variable)


def _token_in(path: Path) -> str:
    """Read a token file; warn of one that other users can read too."""
    flag = f"--token-file {path}"
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(READ_CHARS)
    except OSError as error:
        raise UsageError(f"{flag}: {error.strerror}; name a file with the job's token") from None
    except ValueError:
        raise UsageError(f"{flag}: is no text; name a file with the job's token") from None
    token = _checked_token(text, flag)
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("%s can be read by other users of this machine; chmod 600 it", flag)
    return token


def _checked_token(text: str, source: str) -> str:
    """A token without the white space around it; the message never shows the token."""
    token = text.strip()
    if not token:
        raise UsageError(f"{source}: is empty; put the job's token there, or leave it out")
    if len(token) > MAX_TOKEN_CHARS or not token.isprintable():
        raise UsageError(
            f"{source}: is no token; one line of at most {MAX_TOKEN_CHARS} characters is needed"
        )
    return token


def own_address(settings: RunSettings, coordinator: str) -> str:
    """The address at which other nodes reach this one: --local-addr, or the one it connects from."""
    if settings.rendezvous.local_addr is not None:
        return settings.rendezvous.local_addr
    try:
        family = socket.getaddrinfo(coordinator, 1)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((coordinator, 1))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
