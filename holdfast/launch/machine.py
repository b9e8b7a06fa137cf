"""Checks settings against the machine before anything is started: addresses, directories, variables.

`config/` has checked the settings against each other. What is wrong here would otherwise come to light
in an agent or coordinator, which would be restarted and fail the same way again.

A host name that is not known is a mistake if only this machine could have it. If it is another
machine's, it may become known in a moment: Kubernetes creates the name of a pod's service when the pod
is ready, and answers "no such name" until then. So it is tried again for a while.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import socket
import time
from collections.abc import Sequence
from typing import Any

from holdfast.config.rendezvous import Rendezvous
from holdfast.config.settings import RunSettings
from holdfast.config.values import is_url
from holdfast.errors import UsageError
from holdfast.launch.site import coordinator_address
from holdfast.platforms import topology

log = logging.getLogger("holdfast")

HOST_LIMIT_S = 30.0
"""How long another machine's name may stay unknown."""
HOST_RETRY_S = 0.5


def check_machine(settings: RunSettings, *, waits: bool = True) -> None:
    """Refuse what cannot work on this machine. `waits`: give names of others time to be known."""
    topology.infra_rank(os.environ, socket.gethostname())  # Raises UsageError, as all of these do.
    meeting = settings.rendezvous
    if meeting.local_addr is not None:
        require_own(meeting.local_addr, f"--local-addr {meeting.local_addr}")
    if not topology.request(os.environ):  # A supplier's node sends no notices.
        check_commands(settings.notify)
    address, hosts = coordinator_address(settings)
    if address is None:
        if meeting.master_addr is not None:
            _addresses(meeting.master_addr, _flag(meeting))
        return
    only_here = hosts and settings.places == 1
    limit_s = HOST_LIMIT_S if waits and not only_here else 0.0
    check = require_own if hosts else _addresses
    check(address[0], _flag(meeting), limit_s)


def check_commands(targets: Sequence[str]) -> None:
    """Refuse a command for notices that does not exist."""
    for target in targets:
        if not is_url(target) and shutil.which(shlex.split(target)[0]) is None:
            raise UsageError(
                f"--notify: {shlex.split(target)[0]}: no such command, and no http:// or https:// URL"
            )


def _flag(meeting: Rendezvous) -> str:
    """The flag by which the user said where nodes meet."""
    if meeting.coordinator is None:
        return "--master-addr or --rdzv-endpoint"
    return "--coordinator" if meeting.hosts_coordinator is False else "--rdzv-endpoint"


def make_directories(settings: RunSettings) -> None:
    """Create the directories that the user names."""
    for path, flag in ((settings.log_dir, "--log-dir"), (settings.image_dir, "--image-dir")):
        if path is not None:
            try:
                os.makedirs(path, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"{flag} {path}: cannot be created ({error.strerror}); name another directory"
                ) from None


def require_own(host: str, flag: str, limit_s: float = 0.0) -> None:
    """Refuse a host that is not this machine."""
    if not any(_can_bind(family, address) for family, address in _addresses(host, flag, limit_s)):
        raise UsageError(
            f"{flag}: {host} is not an address of this machine; name one that it has, or leave it out"
        )


def _addresses(host: str, flag: str, limit_s: float = 0.0) -> list[tuple[int, tuple[Any, ...]]]:
    """The addresses of a host, by family; within the limit its name may still become known."""
    deadline, told = time.monotonic() + limit_s, False
    while True:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return [(family, address) for family, *_, address in found]
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                reason = error.strerror if isinstance(error, OSError) else "no valid name"
                tried = f", for {limit_s:g} s" if limit_s else ""
                raise UsageError(
                    f"{flag}: the host {host} is not known ({reason}{tried}); correct its name"
                ) from None
            if not told:
                log.info("the host %s is not known yet; trying for %g s", host, limit_s)
                told = True
            time.sleep(HOST_RETRY_S)


def _can_bind(family: int, address: tuple[Any, ...]) -> bool:
    with socket.socket(family) as probe:
        try:
            probe.bind(address)
            return True
        except OSError:
            return False
