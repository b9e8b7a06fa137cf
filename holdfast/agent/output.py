"""Takes what the ranks print: all of it into their logs, line by line onto the terminal.

A stream that --redirects or --tee names has a file of its own as well, where torchrun has it:

    <log dir>/<run id>_<random>/attempt_<restarts>/<local rank>/stdout.log, stderr.log, error.json
    <log dir>/<run id>_<random>/attempt_<restarts>/filtered_stdout.log, filtered_stderr.log

A worker writes into pipes and the agent writes the file, so a full disk costs log lines and not the
training; and the terminal has a thread of its own, so that one that does not read (a paused pager)
stops neither the ranks nor their repair. What the terminal misses is still in the log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from holdfast.agent.console import ERR, OUT, Console, write_all
from holdfast.config.settings import RunSettings
from holdfast.jobhome import make_private_directory, open_privately
from holdfast.terminal_line import is_drawing, whole

log = logging.getLogger("holdfast.agent")

READ_BYTES = 1 << 16
LONGEST_LINE = 1 << 16
PROMPT_AFTER_S = 0.2
"""A line that is not finished for so long is a prompt."""
TAIL_BYTES = 4096
DRAIN_READS = 32
"""More than a pipe can hold, so that a drain takes all that is there and then ends."""


class LogFile:
    """A rank's log. A full disk is logged once and tried again with each write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tail = b""
        self._fd = -1
        self._lost = 0

    def write(self, data: bytes) -> None:
        self.tail = (self.tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]
        try:
            if self._fd < 0:
                make_private_directory(self.path.parent)
                self._fd = open_privately(self.path, os.O_WRONLY | os.O_APPEND)
            if self._lost:
                write_all(self._fd, f"\n[holdfast] {self._lost} bytes lost here\n".encode())
                log.warning("%s can be written again; %d bytes were lost", self.path, self._lost)
                self._lost = 0
            write_all(self._fd, data)
        except OSError as error:
            if not self._lost:
                log.error("%s cannot be written (%s); training goes on", self.path, error.strerror)
            self._lost += len(data)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


LineReader = Callable[[list[bytes]], None]
"""Takes complete lines, without their ends."""
ShowBar = Callable[[bytes, bool], None]
"""Shows the progress bar of a stream; the second argument says whether it is a prompt."""


def progress_bar(unfinished: bytes) -> bytes:
    """Return what a line that is not finished shows now, if it was begun anew by a carriage return."""
    return whole(_newest(unfinished)).rstrip() if b"\r" in unfinished else b""


def _newest(unfinished: bytes) -> bytes:
    newest = unfinished.rstrip(b"\r").rpartition(b"\r")[2]
    return b"" if is_drawing(newest) else newest


def onto(console: Console, fd: int, prefix: bytes) -> LineReader:
    """Return a reader that shows lines on the terminal with the rank's prefix."""
    return lambda lines: console.write(fd, b"".join(prefix + line + b"\n" for line in lines))


def matching_into(log_file: LogFile, texts: Sequence[bytes], prefix: bytes) -> LineReader:
    """Return a reader that copies lines with one of the texts to a file of their own."""

    def copy(lines: list[bytes]) -> None:
        found = [line for line in lines if any(text in line for text in texts)]
        if found:
            log_file.write(b"".join(prefix + line + b"\n" for line in found))

    return copy


class RankPipe:
    """One pipe of one rank: stdout or stderr."""

    def __init__(
        self,
        files: Sequence[LogFile],
        readers: Sequence[LineReader],
        show_bar: ShowBar | None = None,
    ) -> None:
        """`show_bar` is given the rank's progress bar whenever it changes."""
        self._files = files
        self._line_readers = readers
        self._show_bar = show_bar
        self._bar = b""
        self._prompt: asyncio.TimerHandle | None = None
        self._line = bytearray()
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        asyncio.get_running_loop().add_reader(self._reader, self._read)

    def _read(self) -> bool:
        try:
            data = os.read(self._reader, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._stop()
            return False
        for file in self._files:
            file.write(data)
        if self._line_readers:
            self._split(data)
        return True

    def _split(self, data: bytes) -> None:
        """Pass complete lines on; an overlong line is passed on in pieces."""
        self._line += data
        *lines, rest = bytes(self._line).split(b"\n")
        bar = progress_bar(rest) if self._show_bar is not None else b""
        if len(rest) > LONGEST_LINE and bar:
            rest = b"\r" + bar  # What it has overwritten is in the log.
        elif len(rest) > LONGEST_LINE:
            lines.append(rest)
            rest = b""
        self._line = bytearray(rest)
        self._bar_is(bar)
        self._await_prompt(bool(rest) and not bar)
        if lines:
            self._pass_on(lines)

    def _bar_is(self, bar: bytes, prompts: bool = False) -> None:
        if self._show_bar is not None and bar != self._bar:
            self._bar = bar
            self._show_bar(bar, prompts)

    def _await_prompt(self, unfinished: bool) -> None:
        """Show a line that is not finished if it stays so."""
        if self._prompt is not None:
            self._prompt.cancel()
            self._prompt = None
        if unfinished and self._show_bar is not None:
            loop = asyncio.get_running_loop()
            self._prompt = loop.call_later(PROMPT_AFTER_S, self._be_prompt)

    def _be_prompt(self) -> None:
        self._bar_is(whole(_newest(bytes(self._line))), prompts=True)

    def _pass_on(self, lines: list[bytes]) -> None:
        for read in self._line_readers:
            read(lines)

    def drain(self) -> None:
        """Take what is in the pipe now; a grandchild may keep it open for ever."""
        for _ in range(DRAIN_READS):
            if self._reader < 0 or not self._read():
                return

    def close(self) -> None:
        self.drain()
        self._stop()
        self._await_prompt(False)
        self._bar_is(b"")
        if self._line:
            self._pass_on([bytes(self._line)])
            self._line.clear()

    def _stop(self) -> None:
        if self._reader >= 0:
            asyncio.get_running_loop().remove_reader(self._reader)
            os.close(self._reader)
            self._reader = -1


@dataclass(frozen=True)
class RankStream:
    """Where a rank's stdout or stderr goes, besides its log."""

    console: Console | None = None
    file: Path | None = None
    texts: Sequence[str] = ()
    """Lines with one of these are also copied to `matching`."""
    matching: Path | None = None


class Output:
    """Both pipes and the log of one rank."""

    def __init__(self, path: Path, streams: tuple[RankStream, RankStream], prefix: str) -> None:
        self.log = LogFile(path)
        self._files = [self.log]
        self._pipes = [
            RankPipe(
                self._files_of(stream),
                self._readers_of(fd, stream, prefix.encode()),
                _bar_of(stream, prefix.encode()),
            )
            for fd, stream in zip((OUT, ERR), streams, strict=True)
        ]

    def _files_of(self, stream: RankStream) -> list[LogFile]:
        return [self.log] if stream.file is None else [self.log, self._opened(stream.file)]

    def _readers_of(self, fd: int, stream: RankStream, prefix: bytes) -> list[LineReader]:
        readers: list[LineReader] = []
        if stream.console is not None:
            readers.append(onto(stream.console, fd, prefix))
        if stream.matching is not None:
            texts = [text.encode() for text in stream.texts]
            readers.append(matching_into(self._opened(stream.matching), texts, prefix))
        return readers

    def _opened(self, path: Path) -> LogFile:
        self._files.append(LogFile(path))
        return self._files[-1]

    def writers(self) -> list[int]:
        """Return the writing ends, for the worker's stdout and stderr."""
        return [pipe.writer for pipe in self._pipes]

    def handed_over(self) -> None:
        """Close the writing ends, now that the worker has them."""
        for writer in self.writers():
            os.close(writer)

    def drain(self) -> None:
        for pipe in self._pipes:
            pipe.drain()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for file in self._files:
            file.close()

    def tail(self) -> str:
        return self.log.tail.decode("utf-8", "replace")


def _bar_of(stream: RankStream, prefix: bytes) -> ShowBar | None:
    """Return what shows the progress bar of a stream; None if the terminal shows none."""
    console = stream.console
    if console is None or not console.has_line:
        return None

    def show(bar: bytes, prompts: bool) -> None:
        console.show_bar(prefix, prefix + bar if bar else b"", prompts)

    return show


class StreamFolder:
    """The directory for this node's streams, in torchrun's layout."""

    def __init__(self, settings: RunSettings, base: Path, run_id: str) -> None:
        terminal = settings.terminal
        masks = [*terminal.redirects.values(), *terminal.tee.values()]
        wanted = any(masks) or bool(terminal.stdout_filters or terminal.stderr_filters)
        self._wanted = wanted and settings.log_dir != os.devnull
        self._base = base
        self._run_id = run_id
        self._path: Path | None = None

    def attempt(self, restarts: int) -> Path | None:
        """Return the directory for the ranks that start now; None if no flag asks for files."""
        if not self._wanted:
            return None
        try:
            if self._path is None:
                self._base.mkdir(parents=True, exist_ok=True)
                self._path = Path(tempfile.mkdtemp(prefix=f"{self._run_id}_", dir=self._base))
            attempt = self._path / f"attempt_{restarts}"
            attempt.mkdir(exist_ok=True)
        except OSError as error:
            log.error("%s: no files for streams (%s)", self._base, error.strerror)
            return None
        return attempt


def rank_output(
    settings: RunSettings,
    console: Console,
    path: Path,
    rank: int,
    local_rank: int,
    attempt: Path | None = None,
) -> Output:
    """Create a rank's output: to its log, and to files and the terminal as far as the user wants."""
    terminal = settings.terminal
    redirected, teed = terminal.redirects.get(local_rank, 0), terminal.tee.get(local_rank, 0)
    shown = (OUT | ERR) & (~redirected | teed)
    if terminal.local_ranks_filter is not None and local_rank not in terminal.local_ranks_filter:
        shown = 0
    prefix = Template(terminal.log_line_prefix_template).safe_substitute(
        role_name=settings.role, local_rank=local_rank, rank=rank
    )

    def stream(bit: int, name: str, texts: Sequence[str]) -> RankStream:
        file = matching = None
        if attempt is not None and (redirected | teed) & bit:
            file = attempt / str(local_rank) / f"{name}.log"
        if attempt is not None and texts and shown & bit:
            matching = attempt / f"filtered_{name}.log"
        return RankStream(console if shown & bit else None, file, texts, matching)

    streams = (
        stream(OUT, "stdout", terminal.stdout_filters),
        stream(ERR, "stderr", terminal.stderr_filters),
    )
    return Output(path, streams, prefix)
