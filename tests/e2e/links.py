"""Network namespaces with a cable that can be cut, for tests that run nodes in them.

Tests of several processes lay links at the same time, and a test that was killed leaves its own behind.
So each test first locks a number, which names its links and their addresses for as long as it lives;
whatever links have that name already belong to nobody, and are removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

_NUMBERS: Final = 60
_MOST_LINKS: Final = 4
"""Of one test: each link has a network of its own in 10.213.0.0/16."""


class Link:
    """A network namespace and the cable to it."""

    def __init__(self, network: int) -> None:
        self.name = f"hf{network}"
        self.outside, self.inside = f"{self.name}o", f"{self.name}i"
        self.here, self.there = f"10.213.{network}.1", f"10.213.{network}.2"

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
    assert count <= _MOST_LINKS
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("cutting a link needs root and iproute2")
    with _locked_number() as number:
        links = [Link(_MOST_LINKS * number + each) for each in range(_MOST_LINKS)]
        for link in links:
            link.remove()
        try:
            for link in links[:count]:
                link.lay()
            yield links[:count]
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        finally:
            for link in links:
                link.remove()


@contextmanager
def _locked_number() -> Iterator[int]:
    """Hold a number that no other test of this machine has; the kernel frees it when we die."""
    folder = Path(tempfile.gettempdir())
    for number in range(_NUMBERS):
        with (folder / f"holdfast-links-{number}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield number
            return
    pytest.fail(f"all {_NUMBERS} numbers for links are locked by other tests")
