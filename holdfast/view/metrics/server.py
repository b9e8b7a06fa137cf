"""Serves the metrics of a job over HTTP, and pushes them where that was asked for.

The journal is followed by one thread; those that answer requests take turns with it. While a long
journal is being read for the first time, a request is answered with 503 and how far that is: wrong
numbers would be worse than none.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from holdfast.view.follower import Follower
from holdfast.view.metrics import otlp
from holdfast.view.metrics.families import families
from holdfast.view.metrics.text import OPENMETRICS, PLAIN, accepted, metrics_text

LOOK_EVERY_S = 1.0
TURN_S = 0.25
"""How long the journal is read before requests may have their turn."""


class MetricsOfJob:
    """The metrics of a job, from whichever thread."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._turn = threading.Lock()
        self.progress = 0.0
        """Share of the journal that was read."""

    def catch_up(self) -> bool:
        """Read on for a moment; True if there is more. Only one thread may: SQLite wants it so."""
        with self._turn:
            self._follower.catch_up(TURN_S)
            self.progress = self._follower.progress
            return self._follower.behind

    def text(self, openmetrics: bool) -> str | None:
        """Return the metrics; None while the journal is being read."""
        with self._turn:
            if not self._ready:
                return None
            return metrics_text(self._follower, openmetrics=openmetrics)

    def otlp(self) -> bytes | None:
        with self._turn:
            if not self._ready:
                return None
            found = families([self._follower])
            now = self._follower.now
            return otlp.encoded(found, now, self._follower.job.opened_at)

    @property
    def _ready(self) -> bool:
        return self._follower.opened and not self._follower.behind


class MetricsServer(ThreadingHTTPServer):
    """Answers Prometheus."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, host: str, port: int, metrics: MetricsOfJob, token: str = "") -> None:
        self.metrics = metrics
        self.token = token
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Request)


class _Request(BaseHTTPRequestHandler):
    server: MetricsServer
    server_version = "holdfast"
    sys_version = ""
    timeout = 30.0

    def do_GET(self) -> None:
        if not self._admitted():
            self._answer(HTTPStatus.UNAUTHORIZED, "the token is missing or wrong\n")
        elif self.path.partition("?")[0] == "/metrics":
            self._metrics()
        elif self.path == "/":
            self._answer(HTTPStatus.OK, "the metrics are at /metrics\n")
        else:
            self._answer(HTTPStatus.NOT_FOUND, "the metrics are at /metrics\n")

    def _metrics(self) -> None:
        openmetrics = accepted(self.headers.get("Accept", ""))
        text = self.server.metrics.text(openmetrics)
        if text is None:
            share = f"{self.server.metrics.progress:.0%}"
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"reading the journal: {share}\n")
        else:
            self._answer(HTTPStatus.OK, text, OPENMETRICS if openmetrics else PLAIN)

    def _admitted(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self.server.token.encode()) or (
            not self.server.token
        )

    def _answer(self, status: HTTPStatus, text: str, kind: str = PLAIN) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing of requests: there are some every minute for as long as the job runs."""


def keep_up(
    metrics: MetricsOfJob, pusher: otlp.Pusher | None, push_every_s: float, end: threading.Event
) -> None:
    """Follow the journal until the end, and push now and then."""
    push_at = 0.0
    while not end.is_set():
        more = metrics.catch_up()
        if pusher is not None and not more and time.monotonic() >= push_at:
            body = metrics.otlp()
            if body is not None:
                pusher.put(body)
                push_at = time.monotonic() + push_every_s
        if not more:
            end.wait(LOOK_EVERY_S)
