"""Opens the platform that `holdfast up --on` names, and says what a platform is told about its nodes.

A platform that `holdfast up` can use is a module here with a function `open_platform(orders)`. It is
imported in the supplier's process only, so its engine's packages are needed by nobody else. Kubernetes
is not among them: there the operator is the supplier (`holdfast operator`).
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.config.settings import RunSettings
    from holdfast.platforms.supplier import Platform

PLATFORMS: Mapping[str, str] = {
    "local": "holdfast.platforms.local",
    "slurm": "holdfast.platforms.slurm",
    "ray": "holdfast.platforms.ray",
}
"""Names for `--on`, and the module of each."""


@dataclass(frozen=True)
class NodeOrders:
    """How the nodes of a job are started, on any platform."""

    job: str
    settings: RunSettings
    """What the user said; the flags in `command` are made from it."""
    command: Sequence[str]
    """The launcher with its arguments; the first word is a path."""
    environ: Mapping[str, str]
    """All that a node needs: this process's environment, and the job's token."""
    records: Path
    """Directory of the job's home for what the platform has to remember of each request."""
    lifeline: int
    """Reading end of a pipe that is closed when nobody is there any more for whom nodes should run."""
    limit_s: float
    """How long a node that was told to leave may take."""


def open_platform(name: str, orders: NodeOrders) -> Platform:
    """Open a platform by its name; PlatformError or UsageError where it cannot be used here."""
    module = importlib.import_module(PLATFORMS[name])
    platform: Platform = module.open_platform(orders)
    return platform


def own_host(name: str, environ: Mapping[str, str]) -> str:
    """Where nodes of a platform reach this machine; UsageError where the platform cannot be used."""
    module = importlib.import_module(PLATFORMS[name])
    find = getattr(module, "own_host", None)
    return str(find(environ)) if find is not None else socket.gethostname()
