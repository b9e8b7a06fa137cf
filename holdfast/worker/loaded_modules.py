"""Tells the agent which installed modules a script had imported before its first step.

Standbys import these too, so that the script's next life does not wait for them. Only installed
modules count: the standard library, site-packages and Holdfast itself. A file that the user may change
between two lives (in the script's directory, on PYTHONPATH, in an editable install) is never imported
before its time. A directory may be both, as a virtual environment in the script's directory: then the
innermost of them decides.

Most scripts import little beside torch, and a nursery is not replaced for that. How long the training
thread was importing is sampled by the heartbeat, so that nothing of it can be seen by the script.
"""

from __future__ import annotations

import hashlib
import os
import site
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Final

import holdfast
from holdfast.messages.local import Loaded
from holdfast.shm.vital_signs import Vitals
from holdfast.worker.channel import Channel

WORTH_S: Final = 0.3
"""Time spent importing that is worth another nursery."""
LONGEST_NAME: Final = 100
NAMES_PER_MESSAGE: Final = 250
"""With the longest names and reasons, a message still fits into one packet."""

MOST_VARIABLES: Final = 100

_IMPORTLIB = "<frozen importlib._bootstrap>"
_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")


class LoadedModules:
    """What the script imports until its first step. It exists before the script runs."""

    def __init__(self, channel: Channel, vitals: Vitals) -> None:
        self._channel = channel
        self._vitals = vitals
        self._before = frozenset(sys.modules)
        self._environ = dict(os.environ)
        self._importing_s = 0.0
        self._beat_at = time.monotonic()
        self._stepped = False

    def beat(self) -> None:
        """Sample whether the training thread imports; called on another thread."""
        if self._stepped:
            return
        now = time.monotonic()
        if is_importing(sys._current_frames().get(self._vitals.trainer)):
            self._importing_s += now - self._beat_at
        self._beat_at = now

    def stepped(self) -> None:
        """Tell the agent if there is something to gain; called after the first step."""
        self._stepped = True
        if self._importing_s < WORTH_S:
            return
        names = list(installed([name for name in list(sys.modules) if name not in self._before]))
        variables = changed(self._environ, dict(os.environ))
        for first in range(0, len(names), NAMES_PER_MESSAGE):
            some = tuple(names[first : first + NAMES_PER_MESSAGE])
            self._channel.send(Loaded(modules=some, variables=variables))


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that were set, changed or removed, with a digest of their values."""
    names = {name for name, _ in before.items() ^ now.items() if len(name) <= LONGEST_NAME}
    return {
        name: digest(now[name]) if name in now else "" for name in sorted(names)[:MOST_VARIABLES]
    }


def digest(value: str) -> str:
    """Return what tells a value from others and does not reveal it."""
    return hashlib.blake2b(value.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def is_importing(frame: FrameType | None) -> bool:
    """Return whether a thread at this frame is importing a module."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _IMPORTLIB and code.co_name == "_find_and_load":
            return True
        frame = frame.f_back
    return False


def installed(names: Iterable[str]) -> Iterator[str]:
    """Yield those modules that a process without the script would find, and that are installed."""
    roots = _roots()
    known: dict[str, bool] = {}
    for name in names:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        origin = getattr(spec, "origin", None)
        if getattr(spec, "name", None) != name or not isinstance(origin, str):
            continue
        folder = os.path.dirname(origin)
        if folder not in known:
            known[folder] = _is_installed(folder, roots)
        if known[folder] and len(name) <= LONGEST_NAME:
            yield name


def _roots() -> dict[str, bool]:
    """Return the directories that modules come from, and whether those in it are installed."""
    paths = (*map(sysconfig.get_path, _PATHS), *site.getsitepackages(), site.getusersitepackages())
    roots = {os.path.realpath(path): True for path in paths if path}
    own = [sys.path[0], os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    roots |= {os.path.realpath(path): False for path in own if path}
    return roots | {os.path.realpath(os.path.dirname(holdfast.__file__)): True}


def _is_installed(folder: str, roots: dict[str, bool]) -> bool:
    """Return what the innermost known directory around a folder says."""
    inner = os.path.realpath(folder)
    while inner not in roots:
        outer = os.path.dirname(inner)
        if outer == inner:
            return False
        inner = outer
    return roots[inner]
