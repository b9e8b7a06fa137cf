"""Talks to an API server in plain JSON.

The node agent and the tests' set-up need a handful of verbs on dicts; the models of the generated
client cost more CPU for 300 pods than the API server itself does. What the operator uses, the tests
of the operator use.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
_WATCH_S = 60


class Refused(Exception):
    """The API server answered with an error; `code` is its HTTP status, `reason` the API's word."""

    def __init__(self, method: str, path: str, code: int, status: Json) -> None:
        super().__init__(f"{method} {path}: {code} {status.get('message', '')}")
        self.code = code
        self.reason = str(status.get("reason", ""))


class KubeApi:
    """Connection to one API server, as one user; may be used from several threads."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(
            kubeconfig.read_text()
        )  # `Cluster` writes it as JSON, which is YAML too
        cluster = config["clusters"][0]["cluster"]
        self.server: str = cluster["server"]
        self._headers = {"Authorization": "Bearer " + config["users"][0]["user"]["token"]}
        self._pool = urllib3.PoolManager(
            maxsize=64, ca_certs=cluster["certificate-authority"], retries=False
        )

    def request(
        self, method: str, path: str, body: Json | None = None, content: str = "", **query: Any
    ) -> Json:
        """Send one request, return its answer; raise Refused for an error."""
        response = self._send(method, path, body, content, 30.0, query)
        answer = response.data
        if response.status >= 300:
            raise Refused(method, path, response.status, _status(answer))
        parsed: Json = json.loads(answer) if answer[:1] == b"{" else {"text": answer.decode()}
        return parsed

    def find(self, path: str) -> Json | None:
        """Get an object, or None if there is no such object."""
        try:
            return self.request("GET", path)
        except Refused as refused:
            if refused.code == 404:
                return None
            raise

    def patch(self, path: str, body: Json, content: str = STRATEGIC) -> Json:
        return self.request("PATCH", path, body, content)

    def follow(self, path: str, stop: threading.Event, **query: Any) -> Iterator[tuple[str, Json]]:
        """Yield ("LISTED", list) and then each change, until `stop`; list again when a watch breaks."""
        while not stop.is_set():
            try:
                listed = self.request("GET", path, **query)
                yield "LISTED", listed
                version = listed["metadata"]["resourceVersion"]
                for kind, changed in self._watch(path, version, query):
                    if stop.is_set():
                        return
                    yield kind, changed
            except (urllib3.exceptions.HTTPError, Refused):
                stop.wait(0.2)

    def _watch(self, path: str, version: str, query: Json) -> Iterator[tuple[str, Json]]:
        asked = {**query, "watch": 1, "resourceVersion": version, "timeoutSeconds": _WATCH_S}
        response = self._send("GET", path, None, "", _WATCH_S + 30.0, asked, preload=False)
        try:
            if response.status >= 300:
                raise Refused("WATCH", path, response.status, _status(response.data))
            pending = b""
            for chunk in response.stream(None):
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":  # too old to go on from: list again
                        return
                    yield event["type"], event["object"]
        finally:
            response.close()

    def _send(
        self,
        method: str,
        path: str,
        body: Json | None,
        content: str,
        timeout_s: float,
        query: Json,
        preload: bool = True,
    ) -> urllib3.BaseHTTPResponse:
        words = f"?{urlencode(query)}" if query else ""
        return self._pool.request(
            method,
            self.server + path + words,
            body=None if body is None else json.dumps(body),
            headers={**self._headers, "Content-Type": content or "application/json"},
            timeout=timeout_s,
            preload_content=preload,
        )


def _status(answer: bytes) -> Json:
    try:
        status = json.loads(answer)
    except ValueError:
        return {"message": answer.decode(errors="replace")}
    return status if isinstance(status, dict) else {"message": str(status)}
