"""A service of the node, which knows things that we do not: asked over HTTP or a Unix socket.

It answers a GET with a JSON object. It finds the node healthy if that says `"success": true` and
`"fail_count": 0`, and unhealthy if it says otherwise. A service that is not there, or that says
something else altogether, has told us nothing: what that means is for the user to say, and is
"unknown" unless they do.
"""

from __future__ import annotations

import http.client
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from holdfast.errors import UsageError
from holdfast.health.baseline import Seen
from holdfast.health.finding import Finding, counted
from holdfast.health.node import Node

ANSWER_BYTES = 1 << 20
_SILENCE_S = 60.0
"""The probe's deadline comes before that; it only keeps a socket from waiting for good."""


class Target(Struct, frozen=True):
    """Where to ask: a Unix socket, or a host and port."""

    path: str
    host: str = "localhost"
    port: int | None = None
    socket: str | None = None
    tls: bool = False


def target(url: str) -> Target:
    """http://HOST[:PORT][/PATH], https://..., unix:/SOCKET[:/PATH]."""
    if url.startswith(("unix:", "/")):
        place, _, path = url.removeprefix("unix:").partition(":")
        if place.startswith("/"):
            return Target(path=path or "/", socket="/" + place.lstrip("/"))
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(
            f"{url}: a service is http://HOST:PORT/PATH or unix:/SOCKET, with :/PATH if it needs one"
        )
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(path=path, host=host, port=port, tls=parts.scheme == "https")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_SILENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def check_service(node: Node, url: str, before: Seen | None) -> Finding:
    begun = time.monotonic()
    try:
        status, body = _get(target(url))
    except (OSError, http.client.HTTPException) as error:
        told = str(error) or type(error).__name__
        return Finding(node.settings.service_unreachable, f"{url} cannot be reached: {told}")
    found = judge_answer(url, status, body)
    found.facts["answer_s"] = round(time.monotonic() - begun, 6)
    return found


def _get(where: Target) -> tuple[int, bytes]:
    connection: http.client.HTTPConnection
    if where.socket is not None:
        connection = _UnixConnection(where.socket)
    elif where.tls:
        connection = http.client.HTTPSConnection(where.host, where.port, timeout=_SILENCE_S)
    else:
        connection = http.client.HTTPConnection(where.host, where.port, timeout=_SILENCE_S)
    try:
        connection.request("GET", where.path, headers={"Accept": "application/json"})
        response = connection.getresponse()
        return response.status, response.read(ANSWER_BYTES)
    finally:
        connection.close()


def judge_answer(url: str, status: int, body: bytes) -> Finding:
    try:
        content: Any = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        return Finding("unknown", f"{url} answered {status} with no JSON ({error})")
    if not isinstance(content, dict):
        return Finding("unknown", f"{url} answered {status} with JSON that is no object")
    success, failures = content.get("success"), _count(content.get("fail_count"))
    told = _told(content)
    if success is False or failures:
        return Finding("fail", f"{url} reports {counted(failures or 1, 'failure')}{told}")
    if status != http.client.OK:
        return Finding("unknown", f"{url} answered {status}{told}")
    if success is not True or failures is None:
        return Finding("unknown", f"{url} says neither success nor failure (success, fail_count)")
    return Finding("pass", f"{url} reports no failure{told}")


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _told(content: dict[str, Any]) -> str:
    """What the service says in words, if it does."""
    for key in ("reason", "message", "error"):
        if isinstance(content.get(key), str) and content[key]:
            return f": {content[key]}"
    return ""
