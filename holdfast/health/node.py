"""Reads the files of a machine that checks need, below a root.

The root is "/" on a real machine and a made-up tree in a test. What cannot be read, for whatever
reason, is None: a check must say "unknown" then, and cannot forget to.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path

from holdfast.health.nvml import Gpus, NoNvml, read_gpus
from holdfast.health.settings import HealthSettings

READ_BYTES = 4 << 20
_CGROUPS = "sys/fs/cgroup"


class Node:
    """One look at a machine."""

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self._root = Path(settings.root)

    @property
    def is_real(self) -> bool:
        return self._root == Path("/")

    def path(self, inner: str) -> Path:
        return self._root / inner

    def text(self, inner: str) -> str | None:
        try:
            with open(self.path(inner), "rb") as file:
                return file.read(READ_BYTES).decode(errors="replace").strip()
        except OSError:
            return None

    def lines(self, inner: str) -> list[str]:
        return (self.text(inner) or "").splitlines()

    def number(self, inner: str) -> int | None:
        try:
            return int(self.text(inner) or "")
        except ValueError:
            return None

    def numbers(self, inner: str) -> set[int] | None:
        """Read a list such as "0-3,8"."""
        text = self.text(inner)
        return None if text is None else number_set(text)

    def names(self, inner: str) -> list[str]:
        """List a directory; empty if it does not exist."""
        try:
            return sorted(path.name for path in self.path(inner).iterdir())
        except OSError:
            return []

    def fields(self, inner: str) -> dict[str, int]:
        """Read a file of lines "name value" or "name: value kB"."""
        found: dict[str, int] = {}
        for line in self.lines(inner):
            words = line.split()
            if len(words) >= 2 and words[1].isdecimal():
                scale = 1024 if words[2:] == ["kB"] else 1
                found[words[0].rstrip(":")] = int(words[1]) * scale
        return found

    def cgroups(self, controller: str) -> list[str]:
        """List the directories of this process's cgroups, version 1 or 2, the innermost first.

        A limit may be set at any level. In a container the path that the kernel names may not be
        visible; then the mounted cgroup is ours.
        """
        found: list[str] = []
        for line in self.lines("proc/self/cgroup"):
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            parts = [part for part in path.split("/") if part]
            top = [_CGROUPS, *([controller] if controllers else [])]
            for depth in range(0 if ".." in parts else len(parts), -1, -1):
                level = "/".join([*top, *parts[:depth]])
                if self.path(level).is_dir():
                    found.append(level)
        return found

    def alive(self, pid: int) -> bool:
        return self.path(f"proc/{pid}").is_dir()

    @cached_property
    def gpus(self) -> Gpus | NoNvml:
        """The GPUs at this look, read once for all checks."""
        return read_gpus(self.settings.nvml)

    @cached_property
    def has_nvidia_device(self) -> bool:
        """Whether there is an NVIDIA GPU, with or without a driver."""
        files = any(re.fullmatch(r"nvidia[0-9]+", name) for name in self.names("dev"))
        return files or any(
            self.text(f"sys/bus/pci/devices/{address}/vendor") == "0x10de"
            and (self.text(f"sys/bus/pci/devices/{address}/class") or "").startswith("0x03")
            for address in self.names("sys/bus/pci/devices")
        )


def number_set(text: str) -> set[int]:
    found: set[int] = set()
    for first, last in re.findall(r"([0-9]+)(?:-([0-9]+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def boot_id(root: str) -> str:
    """Return the identifier of the machine's current boot; empty if there is none."""
    try:
        return Path(root, "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
