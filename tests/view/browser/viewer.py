"""Starts a real `holdfast web`, and ends it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from e2e.harness import PATIENCE_S, wait_for


class Web:
    """One `holdfast web`, of the home that its environment names."""

    def __init__(self, folder: Path, env: Mapping[str, str], *flags: str) -> None:
        self.said = folder / f"web-{len(list(folder.glob('web-*')))}.out"
        command = [sys.executable, "-m", "holdfast", "web", *flags]
        with open(self.said, "wb") as out:
            self.process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT
            )
        self.links = wait_for(self._links, "the links of holdfast web")
        self.base = self.links[0].split("/?")[0]

    def _links(self) -> list[str]:
        assert self.process.poll() is None, self.said.read_text()
        found = re.findall(r"http://\S+[?&](?:token|view)=\S+", self.said.read_text())
        return found if len(found) == 2 else []

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
