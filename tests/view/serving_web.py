"""Serves the application of `holdfast web` for tests, over real HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn

from holdfast.config.values import Price
from holdfast.view.web.app import make_app
from holdfast.view.web.guard import Secrets
from holdfast.view.web.keyfile import WebKey
from holdfast.view.web.watched import WatchedJob, WatchedJobs


class ServedPage:
    """A server and what it takes to come in."""

    def __init__(self, port: int, secrets: Secrets, client: httpx.AsyncClient) -> None:
        self.port = port
        self.secrets = secrets
        self.client = client
        """Logged in, by the first link."""
        self.base = f"http://127.0.0.1:{port}"

    async def get(self, path: str, **parameters: Any) -> Any:
        """The JSON at a path, which has to be there."""
        answer = await self.client.get(path, params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def events(self, path: str, until: Callable[[str, Any], bool]) -> list[tuple[str, Any]]:
        """Read server-sent events up to one that is looked for."""
        import msgspec

        heard: list[tuple[str, Any]] = []
        async with self.client.stream("GET", path, timeout=60.0) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            name = ""
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    heard.append((name, msgspec.json.decode(line[6:])))
                    if until(*heard[-1]):
                        return heard
        return heard


@asynccontextmanager
async def page(
    may_act: bool = False,
    only: str | None = None,
    names: tuple[str, ...] = (),
    remote: Callable[[], WatchedJob] | None = None,
    key: WebKey | None = None,
    price: Price | None = None,
) -> AsyncIterator[ServedPage]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    secrets = Secrets(key)
    jobs = WatchedJobs(None, remote() if remote is not None else None)
    app = make_app(jobs, secrets, port, names=names, may_act=may_act, only=only, price=price)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server.serve([listener]))
    base = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=base, timeout=60.0, trust_env=False) as client:
        while not server.started:
            await asyncio.sleep(0.01)
        logged_in = await client.get("/api/session", params={"token": secrets.tokens["all"]})
        assert logged_in.status_code == 200
        try:
            yield ServedPage(port, secrets, client)
        finally:
            server.should_exit = server.force_exit = True
            await serving


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 120.0)

    asyncio.run(limited())
