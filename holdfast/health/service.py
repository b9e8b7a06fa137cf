"""Asks a health service of the node over HTTP or a Unix socket.

The service answers a GET with a JSON object. The node is healthy if that contains `"success": true` and
`"fail_count": 0`, and unhealthy if it says otherwise. A service that is not there, or answers something
else altogether, has told nothing: the user may choose the verdict for that, which is "unknown" by
default.
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
from holdfast.health.judgement import Judgement, counted
from holdfast.health.node import Node

ANSWER_BYTES = 1 << 20
_SILENCE_S = 60.0
"""Socket timeout; the probe's deadline comes before that."""


class ServiceAddress(Struct, frozen=True):
    """A Unix socket, or a host and port."""

    path: str
    host: str = "localhost"
    port: int | None = None
    socket: str | None = None
    tls: bool = False


def service_address(url: str) -> ServiceAddress:
    """Parse http://HOST[:PORT][/PATH], https://... or unix:/SOCKET[:/PATH]."""
    if url.startswith(("unix:", "/")):
        place, _, path = url.removeprefix("unix:").partition(":")
        if place.startswith("/"):
            return ServiceAddress(path=path or "/", socket="/" + place.lstrip("/"))
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
    return ServiceAddress(path=path, host=host, port=port, tls=parts.scheme == "https")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_SILENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def check_service(node: Node, url: str, before: None) -> Judgement:
    begun = time.monotonic()
    try:
        status, body = _get(service_address(url))
    except (OSError, http.client.HTTPException) as error:
        told = str(error) or type(error).__name__
        return Judgement(node.settings.service_unreachable, f"{url} cannot be reached: {told}")
    found = judge_answer(url, status, body)
    found.facts["answer_s"] = round(time.monotonic() - begun, 6)
    return found


def _get(where: ServiceAddress) -> tuple[int, bytes]:
    tcp = http.client.HTTPSConnection if where.tls else http.client.HTTPConnection
    connection = (
        tcp(where.host, where.port, timeout=_SILENCE_S)
        if where.socket is None
        else _UnixConnection(where.socket)
    )
    try:
        connection.request("GET", where.path, headers={"Accept": "application/json"})
        response = connection.getresponse()
        return response.status, response.read(ANSWER_BYTES)
    finally:
        connection.close()


def judge_answer(url: str, status: int, body: bytes) -> Judgement:
    try:
        content: Any = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        return Judgement("unknown", f"{url} answered {status} without JSON ({error})")
    if not isinstance(content, dict):
        return Judgement("unknown", f"{url} answered {status} with JSON that is not an object")
    success, failures = content.get("success"), content.get("fail_count")
    if not isinstance(failures, int) or isinstance(failures, bool) or failures < 0:
        failures = None
    texts = (content.get(key) for key in ("reason", "message", "error"))
    told = next((f": {text}" for text in texts if isinstance(text, str) and text), "")
    if success is False or failures:
        return Judgement("fail", f"{url} reports {counted(failures or 1, 'failure')}{told}")
    if status != http.client.OK:
        return Judgement("unknown", f"{url} answered {status}{told}")
    if success is not True or failures is None:
        return Judgement(
            "unknown", f"{url} reports neither success nor failure (success, fail_count)"
        )
    return Judgement("pass", f"{url} reports no failure{told}")
