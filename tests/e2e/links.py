"""Network namespaces with a cable that can be cut, for tests that run nodes in them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Link:
    """A network namespace and the cable to it."""

    def __init__(self, number: int = 0) -> None:
        self.name = f"hf{os.getpid() % 100000}{'abc'[number]}"
        self.outside, self.inside = f"{self.name}o", f"{self.name}i"
        self.here, self.there = f"10.213.{77 + number}.1", f"10.213.{77 + number}.2"

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def lay(self) -> None:
        self._ip("netns", "add", self.name)
        self._ip("link", "add", self.outside, "type", "veth", "peer", "name", self.inside)
        self._ip("link", "set", self.inside, "netns", self.name)
        self._ip("addr", "add", f"{self.here}/24", "dev", self.outside)
        self._ip("link", "set", self.outside, "up")
        self._ip("-n", self.name, "addr", "add", f"{self.there}/24", "dev", self.inside)
        self._ip("-n", self.name, "link", "set", self.inside, "up")
        self._ip("-n", self.name, "link", "set", "lo", "up")

    def command(self, *words: str) -> tuple[str, ...]:
        """Return the command that runs these words in the namespace."""
        return ("ip", "netns", "exec", self.name, *words)

    def cut(self) -> None:
        """No FIN, no RST: packets just do not arrive any more."""
        self._ip("-n", self.name, "link", "set", self.inside, "down")

    def mend(self) -> None:
        self._ip("-n", self.name, "link", "set", self.inside, "up")

    def remove(self) -> None:
        for words in (["netns", "del", self.name], ["link", "del", self.outside]):
            subprocess.run(["ip", *words], check=False, capture_output=True)


@contextmanager
def laid(count: int) -> Iterator[list[Link]]:
    """Lay so many links; a test that cannot have them is skipped."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("cutting a link needs root and iproute2")
    links = [Link(number) for number in range(count)]
    try:
        for link in links:
            link.lay()
        yield links
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    finally:
        for link in links:
            link.remove()
