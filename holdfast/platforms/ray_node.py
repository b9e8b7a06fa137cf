"""One node of the Ray platform, from inside: an actor that runs a launcher and tells how it ended.

The actor is named after its request and detached, so that it outlives the supplier that made it and is
found by the next one. It starts the guard of `local_node` with the launcher below it; guard and
launcher die with the actor's process, however that ends.

    runs()    answers once the launcher was started: on which host
    ended()   answers once it has ended: with which exit code
    leave()   tells the launcher to leave, once

What has ended keeps Ray's resources until the supplier removes the actor. Where no supplier comes, the
actor ends by itself. The same holds for a node that nobody wants any more: the *lifeline* is the
coordinator's listening socket, which its launcher holds and never closes, not even while a coordinator
is started again. If connections are refused there, the launcher is gone, and the node ends at once; if
the machine cannot be reached, it ends after some minutes.

This module does not import Ray: the class is an ordinary one, which `ray_engine` makes an actor.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from holdfast import __version__

LOOK_S = 5.0
"""How often a node looks whether the launcher of its job is there."""
REFUSALS = 2
"""Refused connections in a row that say that it is gone."""
UNREACHED_S = 300.0
"""How long the launcher's machine may be out of reach."""
KEPT_S = 30.0
"""How long a node that has ended waits for somebody who wants to know how."""
FORWARDED = ("HOLDFAST_", "PET_", "NCCL_", "TORCH_", "GLOO_", "UCX_", "FI_")
"""Beginnings of the variables that a node has from its supplier; the others are its host's."""


class RayNodeStart(Struct, frozen=True, kw_only=True):
    """What an actor is told to run."""

    request: str
    command: tuple[str, ...]
    """The launcher's arguments, without the path of Python, which is the host's own."""
    environ: dict[str, str]
    limit_s: float
    """How long it may take to leave."""
    directory: str
    """Working directory, where the host has it."""
    lifeline: tuple[str, int] | None = None
    """Address of the coordinator; None for a process that shall outlive all others."""
    kept_s: float = KEPT_S
    version: str = __version__


class NodeState(Struct, frozen=True, kw_only=True):
    """What an actor says of its launcher."""

    host: str
    """Ray's id of the node that it is on."""
    code: int | None = None
    """How it ended, 128 more than the signal's number after a signal; None while it runs."""
    detail: str = ""


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that nodes have from their supplier."""
    kept = {name: value for name, value in environ.items() if name.startswith(FORWARDED)}
    if "PYTHONPATH" in environ:
        kept["PYTHONPATH"] = environ["PYTHONPATH"]
    return kept


class RayNode:
    """The actor of one request."""

    def __init__(self, start: bytes, host: str = "", leave: Callable[[], None] | None = None):
        """`start` is a RayNodeStart in JSON; `host` and `leave` are for tests without Ray."""
        self._host = host or _own_host()
        self._end_process = leave or _end_process
        self._told = False
        self._over = threading.Event()
        self._code: int | None = None
        self._detail = ""
        told = msgspec.json.decode(start)
        if told.get("version") != __version__:
            self._detail = skew(str(told.get("version")), self._host)
            self._code = 93  # It would be so again.
            self._over.set()
            return
        self._start = msgspec.convert(told, RayNodeStart)
        self._folder = tempfile.mkdtemp(prefix="holdfast-node-")
        self._guard = self._run()
        threading.Thread(target=self._await_guard, daemon=True).start()
        threading.Thread(target=self._mind_lifeline, daemon=True).start()

    async def runs(self) -> bytes:
        """Answer now: Ray calls no method before the launcher was started."""
        return msgspec.json.encode(NodeState(host=self._host, code=self._code, detail=self._detail))

    async def ended(self) -> bytes:
        """Answer once the launcher has ended."""
        await asyncio.to_thread(self._over.wait)
        return await self.runs()

    async def leave(self) -> None:
        """Tell the launcher to leave; its guard ends it if it takes too long."""
        if not self._told and not self._over.is_set():
            self._told = True
            self._guard.send_signal(signal.SIGTERM)

    # ---- the guard ----

    def _run(self) -> subprocess.Popen[bytes]:
        start = self._start
        lifeline, self._held = os.pipe()
        claimed, held = os.pipe()
        names = {"HOLDFAST_REQUEST": start.request, "HOLDFAST_NODE_NAME": self._host}
        guard = [sys.executable, "-m", "holdfast.platforms.local_node"]
        record = str(Path(self._folder, f"{start.request}.json"))
        told = [record, str(lifeline), str(held), str(start.limit_s), self._host]
        try:
            return subprocess.Popen(
                [*guard, *told, sys.executable, *start.command],
                env={**os.environ, **self._environ(), **names},
                cwd=start.directory if os.path.isdir(start.directory) else None,
                pass_fds=(lifeline, held),
                start_new_session=True,
            )
        finally:
            for fd in (lifeline, claimed, held):
                os.close(fd)

    def _environ(self) -> dict[str, str]:
        environ = dict(self._start.environ)
        paths = [environ.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
        if any(paths):
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return environ

    def _await_guard(self) -> None:
        code = self._guard.wait()
        self._code = code if code >= 0 else 128 - code
        shutil.rmtree(self._folder, ignore_errors=True)
        self._over.set()
        time.sleep(self._start.kept_s)
        self._end_process()

    # ---- the lifeline ----

    def _mind_lifeline(self) -> None:
        """End the node when nobody is there any more for whom it should run."""
        if self._start.lifeline is None:
            return
        refusals, reached_at = 0, time.monotonic()
        while not self._over.wait(LOOK_S):
            answer = _knock(self._start.lifeline)
            refusals = refusals + 1 if answer == "refused" else 0
            if answer == "open":
                reached_at = time.monotonic()
            if refusals >= REFUSALS or time.monotonic() - reached_at > UNREACHED_S:
                os.close(self._held)  # The guard sees it, and ends all processes of the node.
                self._over.wait()
                self._end_process()
                return


def skew(version: str, host: str) -> str:
    """Say that two versions of Holdfast meet."""
    return (
        f"Ray node {host} has Holdfast {__version__}, the job's driver {version}; install the same "
        "version on all nodes, or name it in the runtime environment"
    )


def _knock(address: tuple[str, int]) -> str:
    try:
        socket.create_connection(address, timeout=LOOK_S).close()
        return "open"
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "unreached"


def _own_host() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _end_process() -> None:
    os._exit(0)
