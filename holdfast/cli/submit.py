"""`holdfast submit PLATFORM` hands a job to a cluster: it runs there, also when nobody looks on."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from holdfast.errors import UsageError

PLATFORMS: Mapping[str, tuple[str, str]] = {
    "slurm": ("holdfast.cli.submit_slurm", "as a batch job that comes back after preemption"),
    "ray": ("holdfast.cli.submit_ray", "as a Ray job whose nodes are actors"),
}
"""The module of each platform's command, and what it does in a few words."""

ABOUT = """\
usage: holdfast submit PLATFORM [flags] SCRIPT [its own arguments]

Submit a job to a cluster, where `holdfast up` runs it.

{platforms}

`holdfast submit PLATFORM --help` explains each."""


def main(argv: Sequence[str]) -> int:
    name, *rest = argv or ("--help",)
    if name in ("-h", "--help"):
        lines = [f"  {name:<8}{about}" for name, (_, about) in PLATFORMS.items()]
        print(ABOUT.format(platforms="\n".join(lines)))
        return 0 if argv else 2
    if name not in PLATFORMS:
        known = ", ".join(PLATFORMS)
        raise UsageError(f"no platform {name!r}; these can be submitted to: {known}")
    code: int = importlib.import_module(PLATFORMS[name][0]).main(rest)
    return code
