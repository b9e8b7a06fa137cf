"""What ranks print: whole in the log, never in anybody's way."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.agent import output as outputs
from holdfast.agent.console import CONSOLE_BYTES, PIECE_BYTES, Console, pieces
from holdfast.agent.output import (
    LONGEST_LINE,
    LogFile,
    Output,
    RankStream,
    StreamFolder,
    progress_bar,
    rank_output,
)
from holdfast.cli.flags import parse_run


class Recorded(Console):
    """A console that keeps what it would show."""

    def __init__(self, has_line: bool = False) -> None:
        self.shown: list[tuple[int, bytes]] = []
        self.bars: list[bytes] = []
        self._has_line = has_line

    @property
    def has_line(self) -> bool:
        return self._has_line

    def show_bar(self, stream: bytes, text: bytes, prompts: bool = False) -> None:
        self.bars.append(text)

    def write(self, fd: int, data: bytes) -> None:
        self.shown.append((fd, data))

    def text(self, fd: int = 1) -> bytes:
        return b"".join(data for to, data in self.shown if to == fd)


def printed(
    path: Path, write: Callable[[int, int], object], console: Console | None = None
) -> Output:
    """An output after a writer in another thread wrote to both ends and closed them."""
    return written(lambda: Output(path, (RankStream(console), RankStream(console)), "[0]:"), write)


def written(make: Callable[[], Output], write: Callable[[int, int], object]) -> Output:
    async def scenario() -> Output:
        output = make()
        out, err = (os.dup(fd) for fd in output.writers())
        output.handed_over()

        def work() -> None:
            write(out, err)
            os.close(out)
            os.close(err)

        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.001)
        output.close()
        return output

    return asyncio.run(asyncio.wait_for(scenario(), 200))


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def test_lines_are_whole_in_the_log_and_prefixed_on_the_terminal(tmp_path: Path) -> None:
    console = Recorded()
    output = printed(
        tmp_path / "x" / "rank_0.log", lambda out, _: write_all(out, b"a\nb\n"), console
    )
    assert (tmp_path / "x" / "rank_0.log").read_bytes() == b"a\nb\n"
    assert console.text() == b"[0]:a\n[0]:b\n"
    assert output.tail() == "a\nb\n"


def test_both_streams_are_in_one_log_and_apart_on_the_terminal(tmp_path: Path) -> None:
    console = Recorded()

    def work(out: int, err: int) -> None:
        write_all(out, b"out\n")
        write_all(err, b"err\n")

    printed(tmp_path / "log", work, console)
    assert sorted((tmp_path / "log").read_bytes().split()) == [b"err", b"out"]
    assert (console.text(1), console.text(2)) == (b"[0]:out\n", b"[0]:err\n")


def test_a_last_line_without_an_end_is_shown(tmp_path: Path) -> None:
    console = Recorded()
    printed(tmp_path / "log", lambda out, _: write_all(out, b"no newline"), console)
    assert console.text() == b"[0]:no newline\n"
    assert (tmp_path / "log").read_bytes() == b"no newline"


def test_a_hundred_megabytes_without_a_newline_are_kept_in_the_log_and_not_in_memory(
    tmp_path: Path,
) -> None:
    read_end, write_end = os.pipe()  # A terminal that nobody reads.
    console = Console()
    redirect = _ConsoleTo(console, write_end)
    before = resident_bytes()
    piece = b"x" * (1 << 20)
    printed(tmp_path / "log", lambda out, _: [write_all(out, piece) for _ in range(100)], redirect)
    assert (tmp_path / "log").stat().st_size == 100 << 20
    assert resident_bytes() - before < 40 << 20
    console.close(limit_s=0.0)
    os.close(read_end)
    console._thread.join(60)
    os.close(write_end)
    (tmp_path / "log").unlink()


class _ConsoleTo(Console):
    """A real console whose terminal is another descriptor."""

    def __init__(self, console: Console, fd: int) -> None:
        self._console, self._fd, self._line = console, fd, None

    def write(self, fd: int, data: bytes) -> None:
        self._console.write(self._fd, data)


def test_binary_output_is_kept_as_it_is(tmp_path: Path) -> None:
    data = bytes(range(256)) * 1000
    output = printed(tmp_path / "log", lambda out, _: write_all(out, data), Recorded())
    assert (tmp_path / "log").read_bytes() == data
    assert isinstance(output.tail(), str)


def test_a_full_disk_costs_log_lines_and_is_mentioned_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = LogFile(Path("/dev/full"))
    for _ in range(10):
        log.write(b"lost\n")
    assert sum("cannot be written" in r.getMessage() for r in caplog.records) == 1
    assert log.tail.endswith(b"lost\n")
    log.close()


def test_a_disk_that_has_room_again_gets_a_note_of_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogFile(tmp_path / "log")
    log.write(b"before\n")
    real = os.write

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs.os, "write", full)
    log.write(b"12345")
    monkeypatch.setattr(outputs.os, "write", real)
    log.write(b"after\n")
    log.close()
    text = (tmp_path / "log").read_text()
    assert text == "before\n\n[holdfast] 5 bytes lost here\nafter\n"


def test_a_log_directory_that_cannot_be_made_does_not_stop_the_output(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    console = Recorded()
    printed(tmp_path / "file" / "log", lambda out, _: write_all(out, b"still shown\n"), console)
    assert console.text() == b"[0]:still shown\n"


def test_a_blocked_terminal_never_blocks_who_writes_to_it() -> None:
    read_end, write_end = os.pipe()
    console = Console()

    def write_much() -> None:
        for _ in range(1000):
            console.write(write_end, b"x" * (1 << 16))

    writer = threading.Thread(target=write_much, daemon=True)
    writer.start()
    writer.join(60)
    assert not writer.is_alive()
    assert console._queued_bytes < CONSOLE_BYTES + (2 << 16)
    console.close(limit_s=0.05)
    os.close(read_end)
    console._thread.join(60)
    os.close(write_end)


def test_a_terminal_that_reads_again_is_told_what_it_missed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    read_end, write_end = os.pipe()
    console = Console()
    console.write(write_end, b"a" * (CONSOLE_BYTES + 1))
    console.write(write_end, b"b" * 100)
    assert console._dropped == 100
    got = bytearray()
    while len(got) <= CONSOLE_BYTES:
        got += os.read(read_end, 1 << 20)
    console.close(60)
    assert b"b" not in got
    assert "100 bytes not shown here" in capfd.readouterr().err
    os.close(read_end)
    os.close(write_end)


def test_a_terminal_that_is_gone_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    console = Console()
    console.write(write_end, b"x\n")
    console.close(60)
    assert not console._thread.is_alive()
    os.close(write_end)


def test_a_terminal_made_non_blocking_by_somebody_else_still_gets_everything() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    console = Console()
    console.write(write_end, b"x" * 300_000)
    got = 0
    while got < 300_000:
        got += len(os.read(read_end, 1 << 16))
    console.close(60)
    assert got == 300_000
    os.close(read_end)
    os.close(write_end)


def test_draining_ends_though_somebody_keeps_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0

    def always_full(fd: int, size: int) -> bytes:
        nonlocal reads
        reads += 1
        assert reads < 10_000, "the drain never ends"
        return b"y" * 10

    async def scenario() -> None:
        output = Output(tmp_path / "log", (RankStream(), RankStream()), "")
        output.handed_over()
        with monkeypatch.context() as patched:
            patched.setattr(outputs.os, "read", always_full)
            output.drain()
        output.close()

    asyncio.run(scenario())
    assert reads > 0


def test_the_tail_is_the_last_of_both_streams_and_bounded(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    log.write(b"x" * 100_000 + b"end")
    log.write(b"!")
    assert log.tail.endswith(b"end!")
    assert len(log.tail) == outputs.TAIL_BYTES
    log.close()


# ---- torchrun's layout ----


def talk(out: int, err: int) -> None:
    write_all(out, b"loss 1\nfine\n")
    write_all(err, b"warn 2\n")


def two_ranks(folder: Path, *flags: str) -> tuple[Recorded, dict[str, bytes]]:
    """What two ranks show, and the files that they leave under the log directory."""
    (folder / "train.py").touch()
    words = ["--nproc-per-node", "2", "--log-dir", str(folder / "logs"), "--role", "t"]
    settings = parse_run([*words, *flags, str(folder / "train.py")])
    streams = StreamFolder(settings, folder / "logs", "run7")
    console = Recorded()
    for local_rank in (0, 1):
        log = folder / f"rank_{local_rank}.log"
        attempt = streams.attempt(restarts=3)
        written(
            lambda rank=local_rank, log=log, attempt=attempt: rank_output(  # type: ignore[misc]
                settings, console, log, 4 + rank, rank, attempt
            ),
            talk,
        )
        assert sorted(log.read_bytes().split(b"\n")) == [b"", b"fine", b"loss 1", b"warn 2"]
    files = [path for path in folder.glob("logs/**/*") if path.is_file()]
    assert all(path.relative_to(folder / "logs").parts[0].startswith("run7_") for path in files)
    return console, {
        "/".join(path.relative_to(folder / "logs").parts[1:]): path.read_bytes() for path in files
    }


def test_no_flag_no_files(tmp_path: Path) -> None:
    assert two_ranks(tmp_path)[1] == {}


def test_a_redirected_stream_has_a_file_where_torchrun_has_it(tmp_path: Path) -> None:
    console, files = two_ranks(tmp_path, "--redirects", "0:1,1:2")
    assert files == {
        "attempt_3/0/stdout.log": b"loss 1\nfine\n",
        "attempt_3/1/stderr.log": b"warn 2\n",
    }
    assert (console.text(1), console.text(2)) == (b"[t1]:loss 1\n[t1]:fine\n", b"[t0]:warn 2\n")


def test_a_teed_stream_has_a_file_and_is_shown_with_the_prefix_of_the_template(
    tmp_path: Path,
) -> None:
    template = ["--log-line-prefix-template", "${role_name}/${rank}/${local_rank}/${other} "]
    console, files = two_ranks(tmp_path, "--tee", "1", *template)
    assert sorted(files) == ["attempt_3/0/stdout.log", "attempt_3/1/stdout.log"]
    assert console.text(1).splitlines()[::2] == [
        b"t/4/0/${other} loss 1",
        b"t/5/1/${other} loss 1",
    ]


def test_a_rank_that_is_filtered_out_has_files_and_is_not_shown(tmp_path: Path) -> None:
    console, files = two_ranks(tmp_path, "--tee", "3", "--local-ranks-filter", "1")
    assert len(files) == 4
    assert b"[t0]" not in console.text(1) + console.text(2)


def test_lines_with_a_text_of_all_ranks_that_are_shown_are_in_one_file(tmp_path: Path) -> None:
    filters = ["--duplicate-stdout-filters", "loss", "--duplicate-stderr-filters", "x,warn"]
    _, files = two_ranks(tmp_path, "--redirects", "0:2", *filters)
    assert files["attempt_3/filtered_stdout.log"] == b"[t0]:loss 1\n[t1]:loss 1\n"
    assert files["attempt_3/filtered_stderr.log"] == b"[t1]:warn 2\n"


def test_a_log_directory_of_dev_null_has_no_files(tmp_path: Path) -> None:
    assert two_ranks(tmp_path, "--log-dir", os.devnull, "--tee", "3")[1] == {}


# ---- progress bars ----


@pytest.mark.parametrize(
    ("unfinished", "bar"),
    [
        (b"no bar", b""),
        (b"\r 10%|#", b" 10%|#"),
        (b"\r 10%|#\r 20%|##", b" 20%|##"),
        (b" 10%|#\r", b" 10%|#"),
        (b" 10%|#\r        \r", b""),
        (b"\r two rows\x1b[A", b""),
    ],
)
def test_what_follows_a_carriage_return_is_a_progress_bar(unfinished: bytes, bar: bytes) -> None:
    assert progress_bar(unfinished) == bar


def test_a_bar_is_shown_while_it_moves_and_printed_when_it_is_done(tmp_path: Path) -> None:
    console = Recorded(has_line=True)

    def write(out: int, err: int) -> None:
        os.write(err, b"\r 50%")
        os.write(err, b"\r100%\n")

    printed(tmp_path / "log", write, console)
    assert console.bars in ([b"[0]: 50%", b""], [])  # None if both arrived together.
    assert console.text(2) == b"[0]:\r 50%\r100%\n"


def test_a_bar_that_never_ends_does_not_fill_the_terminal(tmp_path: Path) -> None:
    console = Recorded(has_line=True)

    def write(out: int, err: int) -> None:
        for number in range(3000):
            os.write(err, b"\r%050d" % number)

    output = printed(tmp_path / "log", write, console)
    assert console.text(2).count(b"\n") == 1
    assert console.text(2).endswith(b"%050d\n" % 2999)
    assert len(console.text(2)) < 2 * LONGEST_LINE
    assert output.log.path.read_bytes().count(b"\r") == 3000


def test_a_terminal_gets_whole_lines_in_pieces() -> None:
    lines = b"".join(b"%d %s\n" % (n, b"x" * (n % 900)) for n in range(200)) + b"y" * 9000 + b"\n"
    found = list(pieces(lines))
    assert b"".join(found) == lines
    assert all(piece.endswith(b"\n") for piece in found)
    assert max(len(piece) for piece in found[:-1]) <= PIECE_BYTES
