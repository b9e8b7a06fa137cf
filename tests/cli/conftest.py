"""A job's home, and a coordinator that gives one answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.jobhome import JobFile, JobHome, create
from holdfast.messages.wire import FromAgent, Visit
from holdfast.wire import framing

Serve = Callable[[bytes], list[Visit]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobHome:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    made = create("j", "train.py")
    made.journal.touch()
    made.write_job_file(JobFile(job="llm", host="127.0.0.1", port=1, token="t", pid=1))
    return made


@pytest.fixture
def serve(home: JobHome) -> Iterator[Serve]:
    """A coordinator that says one thing to whoever comes; what it was asked is in the list."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    home.write_job_file(JobFile(job="llm", host="127.0.0.1", port=port, token="t", pid=1))
    asked: list[Visit] = []
    threads: list[threading.Thread] = []

    def start(answer: bytes) -> list[Visit]:
        def talk() -> None:
            with listener.accept()[0] as peer:
                decoder = framing.FrameDecoder[FromAgent](FromAgent)  # type: ignore[arg-type]
                while not asked and (data := peer.recv(1 << 16)):
                    asked.extend(m for m in decoder.feed(data) if isinstance(m, Visit))
                peer.sendall(answer)

        threads.append(threading.Thread(target=talk, daemon=True))
        threads[-1].start()
        return asked

    yield start
    listener.close()
    for thread in threads:
        thread.join(10)
