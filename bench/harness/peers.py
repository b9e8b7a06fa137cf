"""Virtual environments for the launchers that do not live beside holdfast.

Each peer gets its own, made once with the Python that runs the bench and kept in a cache folder.
torch goes in first and pinned, so that pip does not choose another build of it for the sake of a
peer. numpy follows the bench's own environment, because torch imports it where it finds it and
a start is longer with it than without.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from harness import launchers

TORCH = "torch==2.13.0"

PEERS: dict[str, tuple[list[str], Callable[[Path], launchers.Launcher]]] = {
    "dlrover": (
        ["dlrover==0.6.1", "grpcio", "protobuf", "tornado", "psutil", "kubernetes"],
        launchers.dlrover,
    ),
    "nvrx": (["nvidia-resiliency-ext==0.4.1"], launchers.nvrx),
}


def peer(name: str, cache: Path, say: Callable[[str], None]) -> launchers.Launcher:
    """The launcher of a peer, installed if it was not yet."""
    requirements, make = PEERS[name]
    environment = cache.resolve() / name
    wanted = "\n".join([sys.version, TORCH, *_numpy(), *requirements])
    stamp = environment / "holdfast-bench.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        say(f"installing {name} into {environment} (once)")
        _install(environment, [TORCH], [*_numpy(), *requirements])
        stamp.write_text(wanted)
    return make(environment)


def _numpy() -> list[str]:
    try:
        return [f"numpy=={importlib.metadata.version('numpy')}"]
    except importlib.metadata.PackageNotFoundError:
        return []


def _install(environment: Path, *batches: list[str]) -> None:
    shutil.rmtree(environment, ignore_errors=True)
    environment.parent.mkdir(parents=True, exist_ok=True)
    log = environment.with_suffix(".pip.log")
    commands = [[sys.executable, "-m", "venv", str(environment)]]
    commands += [[str(environment / "bin" / "pip"), "install", *batch] for batch in batches]
    with log.open("w") as output:
        for command in commands:
            if subprocess.run(command, stdout=output, stderr=output).returncode != 0:
                raise launchers.LauncherMissingError(f"{' '.join(command)} failed; see {log}")
