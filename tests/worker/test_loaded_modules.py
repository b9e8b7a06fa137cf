"""The agent is told of installed modules, never of the user's own files."""

from __future__ import annotations

import importlib
import os
import site
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.messages.local import PACKET_BYTES, FromWorker, Loaded
from holdfast.shm.rank_page import RankPage, create_page
from holdfast.worker import loaded_modules
from holdfast.worker.channel import Channel
from holdfast.worker.loaded_modules import LoadedModules, changed, digest, installed, is_importing


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A script's directory with a virtual environment in it, and another directory on PYTHONPATH."""
    packages = tmp_path / "project" / "venv" / "site-packages"
    places = {
        "lm_installed": packages,
        "lm_own": tmp_path / "project",
        "lm_on_path": tmp_path / "p",
    }
    for name, place in places.items():
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.py").write_text("")
    editable = tmp_path / "editable"
    editable.mkdir()
    (editable / "lm_editable.py").write_text("")
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(packages)])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "p"))
    paths = [tmp_path / "project", tmp_path / "p", packages, editable]
    monkeypatch.setattr(sys, "path", [*map(str, paths), *sys.path])
    names = [*places, "lm_editable"]
    for name in names:
        importlib.import_module(name)
    yield tmp_path
    for name in names:
        sys.modules.pop(name, None)


def test_only_installed_modules_count(project: Path) -> None:
    names = ["lm_own", "lm_installed", "lm_on_path", "lm_editable", "json", "holdfast.kernel"]
    assert list(installed(names)) == ["lm_installed", "json", "holdfast.kernel"]


def test_what_no_other_process_would_find_by_its_name_does_not_count() -> None:
    assert list(installed(["__main__", "os.path", "sys", "not_loaded_at_all"])) == []


def test_variables_are_told_without_their_values() -> None:
    found = changed({"KEPT": "1", "SET": "1", "GONE": "1"}, {"KEPT": "1", "SET": "2", "NEW": "3"})
    assert found == {"GONE": "", "NEW": digest("3"), "SET": digest("2")}
    assert found["NEW"] != "3"


def test_a_thread_that_imports_is_told_from_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lm_waits.py").write_text(
        "from threading import Event\nhere, go_on = Event(), Event()\n"
        "import lm_meeting\nlm_meeting.here.set()\nlm_meeting.go_on.wait(20)\n"
    )
    (tmp_path / "lm_meeting.py").write_text(
        "from threading import Event\nhere, go_on = Event(), Event()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    meeting = importlib.import_module("lm_meeting")
    thread = threading.Thread(target=importlib.import_module, args=("lm_waits",))
    thread.start()
    try:
        assert meeting.here.wait(20)
        assert thread.ident is not None
        assert is_importing(sys._current_frames()[thread.ident])
        assert not is_importing(sys._current_frames()[threading.get_ident()])
    finally:
        meeting.go_on.set()
        thread.join()
        for name in ("lm_waits", "lm_meeting"):
            sys.modules.pop(name, None)


class Agent:
    """The agent's end of a worker's channel."""

    def __init__(self) -> None:
        self._near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._near.setblocking(False)
        self.loaded = LoadedModules(Channel(far.detach()), RankPage(create_page()).vitals)

    def heard(self) -> list[Loaded]:
        found = []
        while True:
            try:
                packet = self._near.recv(PACKET_BYTES)
            except BlockingIOError:
                return found
            message = msgspec.msgpack.decode(packet, type=FromWorker)
            assert isinstance(message, Loaded)
            found.append(message)


def test_many_modules_are_told_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent()
    names = [f"lm_{number:0{loaded_modules.LONGEST_NAME - 3}}" for number in range(600)]
    monkeypatch.setattr(loaded_modules, "WORTH_S", 0.0)
    monkeypatch.setattr(loaded_modules, "installed", lambda _: iter(names))
    monkeypatch.setitem(os.environ, "LM_SET", "1")
    agent.loaded.stepped()
    messages = agent.heard()
    assert [name for message in messages for name in message.modules] == names
    assert len(messages) == 3
    assert all(message.variables["LM_SET"] == digest("1") for message in messages)


def test_a_script_that_hardly_imports_says_nothing() -> None:
    agent = Agent()
    agent.loaded.beat()
    agent.loaded.stepped()
    assert agent.heard() == []
