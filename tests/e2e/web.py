"""Starts a real `holdfast web`, asks it, and ends it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .harness import PATIENCE_S, wait_for


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
        self.base, self.token = _parts(self.links[0])

    def _links(self) -> list[str]:
        assert self.process.poll() is None, self.said.read_text()
        found = re.findall(r"http://\S+[?&](?:token|view)=\S+", self.said.read_text())
        return found if len(found) == 2 else []

    def __enter__(self) -> Web:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def open(self, path: str) -> Any:
        """The answer to a request, to be read and closed."""
        headers = {"authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(self.base + path, headers=headers)
        return urllib.request.urlopen(request, timeout=PATIENCE_S)

    def get(self, path: str) -> Any:
        """What is answered, in JSON that any program can read."""
        with self.open(path) as answer:
            return json.loads(answer.read(), parse_constant=_no_json)

    def events(self, path: str) -> Iterator[tuple[str, Any]]:
        """The server-sent events of a path, as they come."""
        with self.open(path) as stream:
            name = ""
            for line in stream:
                if line.startswith(b"event: "):
                    name = line[7:].decode().strip()
                elif line.startswith(b"data: "):
                    yield name, json.loads(line[6:], parse_constant=_no_json)


def _parts(link: str) -> tuple[str, str]:
    """Address and token of a link, whichever page it is of."""
    found = re.fullmatch(r"(http://127\.0\.0\.1:[0-9]+)/\S*\?token=(\S+)", link)
    assert found is not None, link
    return found[1], found[2]


def _no_json(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")
