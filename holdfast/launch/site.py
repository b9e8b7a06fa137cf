"""The site of a launcher: where the job's coordinator listens, the token, and where files go.

A launcher either hosts the coordinator (and creates the job's home) or joins one that runs already.
Which of the two follows from the settings, and where they leave it open, from whether this machine
has the coordinator's address and the port is free.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast import jobhome
from holdfast.config.settings import RunSettings
from holdfast.config.sources import from_environment
from holdfast.errors import JobError, UsageError
from holdfast.jobhome import JobHome

JOB_FILE_LIMIT_S = 5.0
JOB_FILE_LOOK_S = 0.02


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
    hosts, address = settings.rendezvous.hosts_coordinator, settings.rendezvous.coordinator
    if meets_at_master(settings):
        address = f"{settings.rendezvous.master_addr}:{settings.rendezvous.master_port}"
        hosts = is_master(settings)
    if address is None:
        return _host(settings, "127.0.0.1", 0)
    name, _, number = address.rpartition(":")
    host, port = name.strip("[]"), int(number)
    if hosts is False:
        return _join(settings, host, port)
    try:
        return _host(settings, host, port)
    except PortTaken:
        if hosts or settings.places == 1:  # No other node could listen there.
            raise
        return _join(settings, host, port)


def meets_at_master(settings: RunSettings) -> bool:
    """Whether nodes meet in torchrun's static way, at node 0's MASTER_ADDR:MASTER_PORT."""
    rendezvous = settings.rendezvous
    several = settings.terms.max_nodes > 1 and rendezvous.coordinator is None
    return several and rendezvous.master_addr is not None


def is_master(settings: RunSettings) -> bool:
    """Whether this is the node that MASTER_ADDR names, if it names one."""
    return settings.terms.max_nodes == 1 or settings.node_rank in (None, 0)


def _host(settings: RunSettings, host: str, port: int) -> Site:
    listener = listen(host, port)
    home = jobhome.create(settings.job or settings.rendezvous.run_id, settings.script)
    return hosted(home, listener, given_token(settings.token_file))


def hosted(home: JobHome, listener: socket.socket, token: str | None) -> Site:
    """Publish a coordinator that this process hosts in the job's home."""
    token = token or secrets.token_urlsafe(32)
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # All interfaces: others reach it by the machine's name.
        host = socket.gethostname()
    content = {"job": home.name, "host": host, "port": port, "token": token, "pid": os.getpid()}
    home.write_job_file(content)
    return Site(host, port, token, home, listener)


def _join(settings: RunSettings, host: str, port: int) -> Site:
    name = settings.job or settings.rendezvous.run_id
    token = given_token(settings.token_file)
    if token is not None:
        return Site(host, port, token, jobhome.share(name or f"joined-{port}"), None)
    # A coordinator that starts on this machine at this moment has its port before its job.json.
    deadline = time.monotonic() + JOB_FILE_LIMIT_S
    while (home := jobhome.at_port(port)) is None and time.monotonic() < deadline:
        time.sleep(JOB_FILE_LOOK_S)
    if home is None:
        raise JobError(
            f"no token for the coordinator at {host}:{port}; set HOLDFAST_TOKEN or --token-file"
            " (the token is in job.json on the coordinator's machine)"
        )
    if name is not None and name != home.name:
        raise JobError(
            f"the coordinator at {host}:{port} belongs to job {home.name}, not to {name};"
            " correct --job or the address"
        )
    return Site(host, port, str(home.read_job_file()["token"]), home, None)


def listen(host: str, port: int) -> socket.socket:
    """Open a coordinator's listening socket."""
    try:
        return socket.create_server((host, port), backlog=4096)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        kind = PortTaken if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) else JobError
        raise kind(f"cannot listen on {host}:{port} ({reason}); choose another address") from None


def given_token(path: str | None) -> str | None:
    """The token that the user provides, from a file or HOLDFAST_TOKEN."""
    if path is None:
        return from_environment(os.environ).token
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise UsageError(f"--token-file {path}: {error.strerror}") from None


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
