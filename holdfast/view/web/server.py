"""Serves the page of `holdfast web` until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import uvicorn

from holdfast.errors import UsageError
from holdfast.view.remote import RemoteJournal
from holdfast.view.web.app import make_app
from holdfast.view.web.guard import Secrets
from holdfast.view.web.watched import WatchedJob, WatchedJobs
from holdfast.wire.tls import TlsFiles
from holdfast.wire.visitors import Coordinates


@dataclass(frozen=True, kw_only=True)
class WebSettings:
    """What is served, where, and to whom."""

    host: str
    port: int
    """0: any that is free."""
    names: Sequence[str] = ()
    """Names by which browsers reach this server, besides its address."""
    may_act: bool = False
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
    listener = _listen(settings)
    address, port = listener.getsockname()[:2]
    remote, only = None, settings.job
    if settings.coordinator is not None:
        where = settings.coordinator
        source = await asyncio.to_thread(RemoteJournal, where)
        remote, only = WatchedJob(source, None, lambda: where), source.name
    secrets = Secrets()
    app = make_app(
        WatchedJobs(settings.tls, remote),
        secrets,
        port,
        names=settings.names,
        may_act=settings.may_act,
        only=only,
    )
    shown = settings.names[0] if settings.names else address
    base = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
    path = "/" if only is None else f"/job/{only}"
    say(f"{base}{path}?token={secrets.tokens['all']}")
    say(f"to share, for looking alone: {base}{path}?view={secrets.tokens['view']}")
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
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(ValueError):  # In a thread there are no signals to handle.
            loop.add_signal_handler(number, setattr, server, "should_exit", True)
    await server.serve([listener])


def _listen(settings: WebSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=128)
    except OSError as error:
        raise UsageError(
            f"--listen {settings.host}:{settings.port}: {error.strerror or error}"
        ) from None
