"""What happens beside a job while it trains: slow receivers and servers, words that come late, and
people who suspend it, debug it or want the processors for themselves.

Everything here begins when the script notes that it is time (`began.RANK` in the folder of signs), and
runs in a thread of the bench's process, so that no sign of it shows in the job.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import processes
from harness.marks import Seconds

PIECES_A_S = 16
LOOK_EVERY_S = 0.02
BUSY = 6
PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH, WALL = 0x4206, 0x4207, 17, 0x40000000
FAST, SLOW = 1 << 20, 1 << 16
"""Bytes a second; those who transfer for more than a minute do it at the low rate."""

_libc = ctypes.CDLL(None, use_errno=True)


class Beside:
    """Made before the job is: `address` tells its script where to turn to. `start` it with the job.
    `failed` says what did not happen; it is empty in the end."""

    def __init__(self, what: str, lasts_s: Seconds, signs: Path) -> None:
        self._signs, self._lasts_s = signs, lasts_s
        self._rate = FAST if lasts_s <= 60 else SLOW
        self.address = ""
        self.failed = "what should have happened beside the job did not"
        self._act: Callable[[], None] = getattr(self, f"_{what.replace(' ', '_')}")
        prepare: Callable[[], None] | None = getattr(self, f"_make_{what.replace(' ', '_')}", None)
        if prepare is not None:
            prepare()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._act()
        except OSError as error:
            self.failed = f"beside the job: {error}"

    def _done(self) -> None:
        self.failed = ""

    def _began(self, rank: int | None = None) -> None:
        """Wait until a rank, or any of them, says that it is time."""
        while not any(self._signs.glob("began.*" if rank is None else f"began.{rank}")):
            time.sleep(LOOK_EVERY_S)

    def _listen(self) -> None:
        self._server = socket.socket()
        # Small buffers, or the kernel takes all at once.
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        self._server.bind(("127.0.0.1", 0))
        self._server.listen()
        host, port = self._server.getsockname()
        self.address = f"{host}:{port}"

    _make_sink = _make_source = _listen

    def _sink(self) -> None:
        """Take what comes at a low rate, and confirm it."""
        while True:
            connection, _ = self._server.accept()
            with connection:
                while connection.recv(self._rate // PIECES_A_S, socket.MSG_WAITALL):
                    time.sleep(1 / PIECES_A_S)
                connection.sendall(b"ok")
            self._done()

    def _source(self) -> None:
        """Answer each request with a file, at a low rate."""
        size = int(self._rate * self._lasts_s)
        while True:
            connection, _ = self._server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(f"HTTP/1.0 200 OK\r\nContent-Length: {size}\r\n\r\n".encode())
                piece = self._rate // PIECES_A_S
                for at in range(0, size, piece):
                    connection.sendall(bytes(min(piece, size - at)))
                    time.sleep(1 / PIECES_A_S)
            self._done()

    def _make_fifo_reader(self) -> None:
        self.address = str(self._signs / "fifo")
        os.mkfifo(self.address)

    def _fifo_reader(self) -> None:
        while True:
            with open(self.address, "rb", buffering=0) as fifo:
                while fifo.read(self._rate // PIECES_A_S):
                    time.sleep(1 / PIECES_A_S)
            self._done()

    def _make_late_word(self) -> None:
        self.address = str(self._signs / "word")
        os.mkfifo(f"{self.address}.pipe")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(f"{self.address}.sock")
        self._server.listen()

    def _late_word(self) -> None:
        """A file, a byte in a pipe, an answer from a service: after as long as the row says."""
        self._began()
        time.sleep(self._lasts_s)
        self._done()
        Path(self.address).touch()
        threading.Thread(target=self._answer, daemon=True).start()
        Path(f"{self.address}.pipe").write_text("x")

    def _answer(self) -> None:
        connection, _ = self._server.accept()
        with connection:
            connection.sendall(b"x")

    def _suspend(self) -> None:
        self._began()
        stopped: set[int] = set()
        while living := {process.pid for process in processes.descendants()} - stopped:
            for pid in living:
                _kill(pid, signal.SIGSTOP)
            stopped |= living
        time.sleep(self._lasts_s)
        for pid in stopped:
            _kill(pid, signal.SIGCONT)
        self._done()

    def _debugger(self) -> None:
        """Hold every thread of rank 0, as a debugger does."""
        self._began(0)
        pid = _rank_pid(self._signs.parent)
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
        for thread in threads:
            _ptrace(PTRACE_SEIZE, thread)
        for thread in threads:
            _ptrace(PTRACE_INTERRUPT, thread)
            os.waitpid(thread, WALL)
        time.sleep(self._lasts_s)
        for thread in threads:
            _ptrace(PTRACE_DETACH, thread)
        self._done()

    def _busy(self) -> None:
        self._began()
        with busy():
            self._done()
            time.sleep(self._lasts_s)


@contextmanager
def busy(count: int = BUSY) -> Iterator[None]:
    """Processes that want all they can get."""
    spin, end = [sys.executable, "-c", "while True: pass"], processes.die_with_parent
    hogs = [subprocess.Popen(spin, preexec_fn=end) for _ in range(count)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def _rank_pid(folder: Path) -> int:
    """The process that is rank 0, by the name of its file of marks."""
    newest = max(folder.glob("*/marks/0.*"), key=lambda path: path.name.rsplit(".", 1)[-1])
    return int(newest.name.split(".")[1])


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _ptrace(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None) == -1:
        raise OSError(ctypes.get_errno(), f"ptrace({request:#x}) of thread {thread}")
