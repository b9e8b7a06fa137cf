"""Knows what the script imports, and keeps it in the job's home.

The list grows with what workers report, and shrinks by the modules that cannot be preloaded (see
`holdfast.worker.preloading`). It is written down only once a nursery has imported it and was fit to be
forked, so a job that is queued again starts from a list that is known to work. It belongs to one script
with its arguments in one Python environment: what another one imports is learnt afresh.

After a few nurseries in a row that were unfit the list is left alone until something new is learnt.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from holdfast import __version__
from holdfast.config.settings import RunSettings
from holdfast.jobhome import write_privately
from holdfast.messages.local import ImportPlan, Loaded

log = logging.getLogger("holdfast.agent")

MOST_TRIES: Final = 4
MOST_MODULES: Final = 20_000
RANK_VARIABLES: Final = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "CUDA_VISIBLE_DEVICES",
)
"""Variables that only ranks have, or have with another value than the node."""


class Remembered(Struct, frozen=True):
    """Content of the file in the job's home."""

    key: str
    modules: tuple[str, ...] = ()
    refused: dict[str, str] = {}
    """Modules that are not preloaded, and why."""
    variables: dict[str, str] = {}


class KnownImports:
    def __init__(self, path: Path, settings: RunSettings, python: str) -> None:
        self._path = path
        self._key = key(settings, python)
        known = self._read()
        self._modules = dict.fromkeys(known.modules)
        self._refused = dict(known.refused)
        self._variables = dict(known.variables)
        shared = () if settings.virtual_local_rank else ("CUDA_VISIBLE_DEVICES",)
        self._of_ranks = {name: "" for name in RANK_VARIABLES if name not in shared}
        self._tries = 0

    def learn(self, loaded: Loaded) -> None:
        """Add what a worker has loaded."""
        new = [name for name in loaded.modules if name not in self._modules | self._refused]
        if new and len(self._modules) + len(new) <= MOST_MODULES:
            self._modules |= dict.fromkeys(new)
            self._variables |= loaded.variables
            self._tries = 0

    def plan(self, most_bytes: int) -> ImportPlan:
        """Return what a nursery is to import now."""
        if self._tries >= MOST_TRIES:
            return ImportPlan()
        return ImportPlan(
            modules=tuple(name for name in self._modules if name not in self._refused),
            refused=tuple(self._refused),
            variables=self._variables | self._of_ranks,
            most_bytes=most_bytes,
        )

    def refuse(self, modules: dict[str, str]) -> None:
        """Leave these out from now on."""
        self._refused |= modules
        self._tries += 1
        name, why = next(iter(modules.items()))
        others = f" and {len(modules) - 1} others" if len(modules) > 1 else ""
        log.info("standbys do not import %s%s: %s", name, others, why)

    def remember(self) -> None:
        """Write the list down, because it works."""
        known = Remembered(self._key, tuple(self._modules), self._refused, self._variables)
        try:
            write_privately(self._path, msgspec.json.encode(known))
        except OSError as error:
            log.debug("%s: not written (%s)", self._path, error)

    def _read(self) -> Remembered:
        try:
            known = msgspec.json.decode(self._path.read_bytes(), type=Remembered)
        except (OSError, msgspec.MsgspecError):  # It is learnt again.
            return Remembered(self._key)
        return known if known.key == self._key else Remembered(self._key)


def key(settings: RunSettings, python: str) -> str:
    """Return a digest of the script, its arguments and the Python environment it runs in."""
    script = os.path.realpath(settings.script)
    parts = [__version__, settings.entry, script, *settings.script_args, os.path.realpath(python)]
    parts += [os.environ.get("PYTHONPATH", ""), *_installed(python)]
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part.encode(errors="surrogateescape") + b"\0")
    try:
        found.update(Path(script).read_bytes())
    except OSError:  # A module: what is installed is known by its directory.
        pass
    return found.hexdigest()


def _installed(python: str) -> Iterable[str]:
    """Yield the directories of installed packages, which change when one is added or removed."""
    root = os.path.dirname(os.path.dirname(python))
    for path in sorted(
        glob.glob(os.path.join(glob.escape(root), "lib*", "python3*", "*-packages"))
    ):
        yield f"{path} {os.stat(path).st_mtime_ns}"
