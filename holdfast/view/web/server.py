"""Serves the page of `holdfast web` until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvicorn

from holdfast.config.values import Price
from holdfast.errors import UsageError
from holdfast.view.remote import RemoteJournal
from holdfast.view.web.app import make_app
from holdfast.view.web.guard import Secrets
from holdfast.view.web.keyfile import FILE, WebKey
from holdfast.view.web.watched import WatchedJob, WatchedJobs
from holdfast.wire.tls import TlsFiles
from holdfast.wire.visitors import Coordinates

FIRST_PORT: Final = 18800
"""First of the ports that are used if none is given; below those that systems hand out by chance."""
PORTS: Final = 400
PORT_TRIES: Final = 8
"""Servers of one home that get the same ports again."""


@dataclass(frozen=True, kw_only=True)
class WebSettings:
    """What is served, where, and to whom."""

    home: Path
    """The Holdfast home, which keeps the key of the links."""
    host: str
    port: int | None
    """0: any that is free; None: one that this home gets again after a restart."""
    new_tokens: bool = False
    """End all links of earlier runs."""
    names: Sequence[str] = ()
    """Names by which browsers reach this server, besides its address."""
    may_act: bool = False
    price: Price | None = None
    """What the page reckons the cost of lost time with."""
    job: str | None = None
    """The one job that is shown; None for a list of all."""
    coordinator: Coordinates | None = None
    """The coordinator of that job, if it is on another machine."""
    tls: TlsFiles | None = None
    """What the coordinators want to be shown."""


def serve(settings: WebSettings, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `say` is given the lines that tell where."""
    asyncio.run(_serve(settings, say))


async def _serve(settings: WebSettings, say: Callable[[str], None]) -> None:
    listener = listener_of(settings)
    key = WebKey(settings.home / FILE, renew=settings.new_tokens)
    address, port = listener.getsockname()[:2]
    remote, only = None, settings.job
    if settings.coordinator is not None:
        where = settings.coordinator
        source = await asyncio.to_thread(RemoteJournal, where)
        remote, only = WatchedJob(source, None, lambda: where), source.name
    secrets = Secrets(key)
    jobs = WatchedJobs(settings.tls, remote)
    app = make_app(
        jobs,
        secrets,
        port,
        names=settings.names,
        may_act=settings.may_act,
        price=settings.price,
        only=only,
    )
    shown = settings.names[0] if settings.names else address
    base = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
    path = "/" if only is None else f"/job/{only}"
    say(f"{base}{path}?token={secrets.tokens['all']}")
    say(f"to share, for looking alone: {base}{path}?view={secrets.tokens['view']}")
    if key.notice is not None:
        say(key.notice)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,  # It would write the tokens down.
            server_header=False,
            timeout_graceful_shutdown=1,
            lifespan="on",
        )
    )

    def leave() -> None:
        jobs.leave()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(ValueError):  # In a thread there are no signals to handle.
            loop.add_signal_handler(number, leave)
    await server.serve([listener])


def listener_of(settings: WebSettings) -> socket.socket:
    """Listen on the port that was given, or on the first free one of those that this home uses."""
    chosen = [*ports_of(settings.home), 0] if settings.port is None else [settings.port]
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    for port in chosen:
        try:
            return socket.create_server((settings.host, port), family=family, backlog=128)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port != chosen[-1]:
                continue
            shown = "" if settings.port is None else f":{port}"
            raise UsageError(
                f"--listen {settings.host}{shown}: {error.strerror or error}"
            ) from None
    raise AssertionError("there is always a port to try")


def ports_of(home: Path) -> range:
    """The ports that servers of a home try in turn: the same after a restart, so that open pages find
    them again, and seldom those of another user."""
    digest = hashlib.blake2b(f"{os.geteuid()} {home}".encode(errors="surrogateescape"))
    first = FIRST_PORT + int.from_bytes(digest.digest()[:4], "big") % PORTS
    return range(first, first + PORT_TRIES)
