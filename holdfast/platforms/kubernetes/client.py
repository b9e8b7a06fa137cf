"""Speaks to an API server, in plain JSON.

The generated models of the `kubernetes` package cost more CPU for 300 pods than the API server itself
needs, and its calls changed between versions. So only its configuration is used: where the server is,
whom to trust, and who we are (a kubeconfig, or the service account of this pod).

Requests block, and run in a few threads. A watch has a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlencode

import msgspec

from holdfast.errors import ApiRefused, PlatformError, UsageError

log = logging.getLogger("holdfast.kubernetes")

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
AT_ONCE = 16
"""Requests under way at the same time."""
LIMIT_S = 30.0
WATCH_S = 300
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0


class KubeApi(Protocol):
    """What this platform needs of an API server."""

    async def request(
        self, method: str, path: str, body: Json | None = None, content: str = "", **query: str
    ) -> Json:
        """Send a request and return the answer; ApiRefused or PlatformError if there is none."""

    def watch(
        self, path: str, selector: str, seen: Callable[[Json], None], broken: Callable[[], None]
    ) -> None:
        """Call `seen` with each object that changes, and `broken` when changes may have been missed,
        on the event loop and until the loop ends."""


async def find(api: KubeApi, path: str) -> Json | None:
    """Get an object, or None if there is no such object."""
    try:
        return await api.request("GET", path)
    except ApiRefused as refused:
        if refused.code == 404:
            return None
        raise


class KubeClient:
    """One API server, as one user."""

    def __init__(self) -> None:
        self._configuration = _configuration()
        self.server = str(self._configuration.host)
        self._pool = _pool(self._configuration)
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kube")

    async def request(
        self, method: str, path: str, body: Json | None = None, content: str = "", **query: str
    ) -> Json:
        loop = asyncio.get_running_loop()
        send = partial(self._request, method, path, body, content, query)
        return await loop.run_in_executor(self._threads, send)

    def _request(
        self, method: str, path: str, body: Json | None, content: str, query: Json
    ) -> Json:
        response = self._send(method, path, body, content, query)
        if response.status >= 300:
            raise _refused(method, path, response.status, response.data)
        answer: Json = msgspec.json.decode(response.data)
        return answer

    def _send(
        self, method: str, path: str, body: Json | None, content: str, query: Json, **how: Any
    ) -> Any:
        from urllib3.exceptions import HTTPError

        headers = {"Content-Type": content or "application/json", "Accept": "application/json"}
        for setting in self._configuration.auth_settings().values():
            if setting["in"] == "header" and setting["value"]:
                headers[setting["key"]] = setting["value"]
        words = f"?{urlencode(query)}" if query else ""
        data = None if body is None else msgspec.json.encode(body)
        try:
            return self._pool.request(
                method,
                f"{self.server}{path}{words}",
                body=data,
                headers=headers,
                **{"timeout": LIMIT_S, **how},
            )
        except HTTPError as error:
            raise PlatformError(unreachable(self.server, str(error))) from None

    # ---- watches ----

    def watch(
        self, path: str, selector: str, seen: Callable[[Json], None], broken: Callable[[], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        follow = partial(self._follow, path, selector, seen, broken, loop)
        threading.Thread(target=follow, name=f"watch {path}", daemon=True).start()

    def _follow(
        self,
        path: str,
        selector: str,
        seen: Callable[[Json], None],
        broken: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Watch until the event loop is closed."""
        pause_s, wait = FIRST_PAUSE_S, threading.Event().wait
        while not loop.is_closed():
            try:
                self._watch_once(path, selector, lambda found: _tell(loop, seen, found))
                pause_s = FIRST_PAUSE_S
            except PlatformError as error:
                log.warning("%s; trying again", error)
                wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            _tell(loop, broken)

    def _watch_once(self, path: str, selector: str, seen: Callable[[Json], None]) -> None:
        from urllib3.exceptions import HTTPError

        query = {"watch": "1", "labelSelector": selector, "timeoutSeconds": str(WATCH_S)}
        how = {"preload_content": False, "timeout": WATCH_S + LIMIT_S}
        response = self._send("GET", path, None, "", query, **how)
        try:
            if response.status >= 300:
                raise _refused("GET", path, response.status, response.data, verb="watch")
            rest = b""
            for chunk in response.stream(None):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = msgspec.json.decode(line)
                    if event["type"] == "ERROR":
                        return
                    seen(event["object"])
        except HTTPError as error:
            raise PlatformError(unreachable(self.server, str(error))) from None
        finally:
            response.close()


def _tell(loop: asyncio.AbstractEventLoop, told: Callable[..., None], *words: Json) -> None:
    try:
        loop.call_soon_threadsafe(told, *words)
    except RuntimeError:  # The loop was closed meanwhile: nobody is there to be told.
        pass


def _configuration() -> Any:
    """Where the API server is and who we are: the pod's service account, else the kubeconfig."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise UsageError(
            "the packages for Kubernetes are not installed; pip install 'holdfast[kubernetes]'"
        ) from None
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        try:
            # The package itself reads the variable once, when it is imported.
            file = os.environ.get("KUBECONFIG") or None
            config.load_kube_config(file, client_configuration=configuration)
        except config.ConfigException as error:
            raise UsageError(
                f"no API server is known ({error}); set KUBECONFIG, or run this in a pod"
            ) from None
    return configuration


def _pool(configuration: Any) -> Any:
    import urllib3

    return urllib3.PoolManager(
        maxsize=AT_ONCE + 8,
        retries=False,
        cert_reqs="CERT_REQUIRED" if configuration.verify_ssl else "CERT_NONE",
        ca_certs=configuration.ssl_ca_cert or None,
        cert_file=configuration.cert_file or None,
        key_file=configuration.key_file or None,
    )


def unreachable(server: str, why: str) -> str:
    return (
        f"the API server at {server} cannot be reached ({why}); check that it runs, KUBECONFIG, and"
        " the network between"
    )


_VERBS = {"POST": "create", "GET": "get", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


def _refused(method: str, path: str, code: int, answer: bytes, verb: str = "") -> ApiRefused:
    """Put an error answer of the API server in one sentence."""
    try:
        status = msgspec.json.decode(answer, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError):
        status = {"message": answer.decode(errors="replace")[:500]}
    reason, message = str(status.get("reason", "")), str(status.get("message", ""))
    return ApiRefused(refusal(method, path, code, message, verb), code, reason)


def refusal(method: str, path: str, code: int, message: str, verb: str = "") -> str:
    """Say what the API server refused, and what to do where that is known."""
    doing = verb or _VERBS.get(method, method)
    if code == 401:
        return "the API server does not know us (401); renew the kubeconfig or the service account"
    if code == 403 and "quota" not in message:
        what = _resource(path)
        return (
            f"no permission to {doing} {what}: {message}; give the operator's service account that"
            " right (deploy/kubernetes/rbac.yaml has all that it needs)"
        )
    return f"the API server refused to {doing} {_resource(path)} ({code}): {message}"


def _resource(path: str) -> str:
    """The plural of what a path names, such as pods or holdfastjobs/status."""
    words = path.strip("/").split("/")
    words = words[2:] if words[0] == "api" else words[3:]
    if words[:1] == ["namespaces"] and len(words) > 2:
        words = words[2:]
    return "/".join([*words[:1], *words[2:]]) if words else path
