"""`holdfast submit PLATFORM` hands a job to a cluster: it runs there, also when nobody looks on."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Collection, Mapping, Sequence

from holdfast.cli.flags import parse_settings
from holdfast.config.schema import Settings
from holdfast.config.settings import RunSettings, run_settings
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


def read_job(
    parser: argparse.ArgumentParser, argv: Sequence[str], without: Collection[str], because: str
) -> tuple[Settings, RunSettings, argparse.Namespace]:
    """Read a job that is submitted: what the user said, the job's settings, and the parsed flags.
    Settings of `without` are refused, `because` of how the platform starts nodes."""
    given, command, parsed = parse_settings(parser, argv)
    for name in without:
        if name in given.said:
            raise UsageError(f"{given.shown(name)}: {because}; leave it out")
    # The ranks of a node are counted there: this one may have no GPU.
    here = {name: said for name, said in given.said.items() if name != "nproc_per_node"}
    settings = run_settings(Settings(here, given.warnings), command)
    for warning in settings.warnings:
        print(f"{parser.prog}: {warning}", file=sys.stderr)
    return given, settings, parsed
