"""A webhook that behaves as badly as a test wants."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "T000-very-secret"


class Webhooks:
    """A server that remembers what it was sent."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        """Notices that are answered with 200."""
        self.asked: list[dict[str, Any]] = []
        """All notices, whatever the answer was."""
        self.headers: list[dict[str, str]] = []
        self.answers: list[int | str] = []
        """Status codes to answer with, the last one from then on; `close`: no answer, but an end;
        `half`: the begin of one, and an end."""
        self.hangs = threading.Event()
        """Set while requests are not answered."""
        self.retry_after = ""
        webhooks = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                webhooks.asked.append(body)
                webhooks.headers.append(dict(self.headers.items()))
                while webhooks.hangs.is_set():
                    time.sleep(0.02)
                answers = webhooks.answers
                answer = (answers.pop(0) if len(answers) > 1 else answers[0]) if answers else 200
                if answer == 200:
                    webhooks.received.append(body)
                if answer == "half":
                    self.wfile.write(b"HTTP/1.1 20")
                if isinstance(answer, int):
                    self._answer(answer)

            def _answer(self, code: int) -> None:
                self.send_response(code)
                if webhooks.retry_after:
                    self.send_header("Retry-After", webhooks.retry_after)
                if code == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/services/{SECRET}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def kinds(self) -> list[str]:
        """Kinds of the notices that were received."""
        return [one["kind"] for one in self.received]

    def close(self) -> None:
        self.hangs.clear()
        self._server.shutdown()
        self._server.server_close()
