"""A line at the bottom of a terminal with many writers: no order of writes mixes it with output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import terminal_line
from holdfast.terminal_line import (
    AWAY,
    ClearingStream,
    LinePage,
    TerminalLine,
    is_drawing,
    whole,
)

COLUMNS = 40


class Shown(TerminalLine):
    """The line of a process whose standard streams are a terminal."""

    def __init__(self, page: LinePage) -> None:
        self.page = page
        self._fds = frozenset({1, 2})


@contextmanager
def paged(path: Path) -> Iterator[LinePage]:
    page = LinePage(path, create=True)
    yield page
    page.close()


class Emulated:
    """A terminal that remembers all that scrolled away."""

    def __init__(self) -> None:
        self.screen = pyte.HistoryScreen(COLUMNS, 6, history=10_000)
        self._stream = pyte.ByteStream(self.screen)

    def write(self, data: bytes) -> None:
        self._stream.feed(data.replace(b"\n", b"\r\n").replace(b"\r\r\n", b"\r\n"))

    def lines(self) -> list[str]:
        rows = [*self.screen.history.top]
        past = ["".join(row[at].data for at in range(COLUMNS)).rstrip() for row in rows]
        return [*past, *(line.rstrip() for line in self.screen.display)]


TEXT = st.text("abc", min_size=1, max_size=COLUMNS - 1)
WRITES = st.one_of(
    st.tuples(st.just("output"), TEXT),
    st.tuples(st.just("log"), TEXT),
    st.tuples(st.just("draw"), st.text("#", min_size=1, max_size=2 * COLUMNS)),
    st.tuples(st.just("bar"), st.text("%", max_size=2 * COLUMNS)),
    st.tuples(st.just("hide"), st.just("")),
)


@given(writes=st.lists(WRITES, max_size=40))
def test_all_output_is_whole_and_in_order_whoever_writes_when(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.mktemp("line") / "line"
    with paged(path) as page:
        line, terminal, printed = Shown(page), Emulated(), []
        for kind, text in writes:
            if kind == "output":
                printed.append(text)
                terminal.write(line.around(1, f"{text}\n".encode()))
            elif kind == "log":
                printed.append(text)
                terminal.write((AWAY if line.is_on(2) else b"") + f"{text}\n".encode())
            elif kind == "draw":
                page.set_line(text.encode())
                terminal.write(line.around(2, b""))
            elif kind == "bar":
                page.set_bar(text.encode())
                terminal.write(line.around(2, b""))
            elif line.is_on(2):
                page.set_line(b"")
                terminal.write(AWAY)
        seen = [one for one in terminal.lines() if one and one[0] in "abc"]
        assert seen == printed
        assert terminal.screen.cursor.x == 0
        ours = [one for one in terminal.lines() if one and one[0] in "#%"]
        assert len(ours) <= 2
        if page.texts().line:
            below = terminal.lines()[terminal.screen.cursor.y - 6 :]
            assert not any(one and one[0] in "abc" for one in below)


def test_the_colours_of_a_script_go_on_after_the_line(tmp_path: Path) -> None:
    with paged(tmp_path / "line") as page:
        line, terminal = Shown(page), Emulated()
        page.set_line(b"the line")
        terminal.write(line.around(1, b"\x1b[31mred\n"))
        terminal.write(line.around(1, b"still red\n"))
        rows = [row for row in terminal.screen.display if row.startswith("still")]
        at = terminal.screen.display.index(rows[0])
        assert terminal.screen.buffer[at][0].fg == "red"


@pytest.mark.parametrize(
    ("output", "drawing"),
    [
        (b"plain", False),
        (b"\x1b[31mred\x1b[0m\x1b[K", False),
        (b"\x1b]0;title\x07", False),
        (b"two bars\x1b[A", True),
        (b"\x1b[2J\x1b[H", True),
        (b"\x1b[?1049h", True),
        (b"\x1b7saved", True),
    ],
)
def test_a_script_that_moves_between_rows_is_known(output: bytes, drawing: bool) -> None:
    assert is_drawing(output) is drawing


@pytest.mark.parametrize(
    "text", ["\x1b[38;5;208m50%|███▌\x1b[0m 你", "é", "\x1b[1m"], ids=["colours", "é", "sequence"]
)
def test_what_is_cut_anywhere_is_shown_without_the_begin_of_what_is_missing(text: str) -> None:
    encoded = text.encode()
    for at in range(len(encoded) + 1):
        shown = whole(encoded[:at])
        shown.decode()  # No half of a character.
        assert re.sub(rb"\x1b\[[0-9;]*m", b"", shown).count(b"\x1b") == 0
        assert len(shown) == at or at < len(encoded)


def test_a_write_that_was_cut_short_goes_on_with_its_line_whoever_wrote_meanwhile(
    tmp_path: Path,
) -> None:
    lines = b"aaaa\nbbbb\ncccc\n"
    with paged(tmp_path / "line") as page:
        line = Shown(page)
        page.set_line(b"# the line")
        for at in range(len(line.around(1, lines))):
            terminal = Emulated()
            terminal.write(line.around(1, lines)[:at])
            terminal.write(line.around(2, b""))
            terminal.write(line.around(1, line.rest_of(lines, at)))
            shown = [one for one in terminal.lines() if one]
            assert shown == ["aaaa", "bbbb", "cccc", "# the line"], at


def test_what_is_typed_after_a_prompt_stands_behind_it(tmp_path: Path) -> None:
    with paged(tmp_path / "line") as page:
        line, terminal = Shown(page), Emulated()
        page.set_line(b"# the line")
        page.set_bar(b"name? ", prompts=True)
        terminal.write(line.around(2, b""))
        terminal.write(b"Ada")
        assert terminal.lines()[:2] == ["name? Ada", "# the line"]
        terminal.write(b"\r\n")
        page.set_bar(b"")
        terminal.write(line.around(1, b"hello\n"))
        assert terminal.lines()[:3] == ["name? Ada", "hello", "# the line"]


def test_the_line_stands_aside_for_a_script_that_draws(tmp_path: Path) -> None:
    with paged(tmp_path / "line") as page:
        line = Shown(page)
        page.set_line(b"the line")
        assert line.around(1, b"\x1b[Aup\n") == AWAY + b"\x1b[Aup\n"
        assert line.around(1, b"more\n") == b"more\n"
        assert line.around(2, b"") == b""


def test_a_page_that_is_damaged_or_gone_has_no_line(tmp_path: Path) -> None:
    path = tmp_path / "line"
    with paged(path) as page:
        page.set_line(b"the line")
        assert LinePage(path).texts().line == b"the line"
        path.write_bytes(path.read_bytes().replace(b"the", b"THE"))
        assert page.texts().line == b""
        path.write_bytes(b"")
        assert page.texts().line == b""
        page.set_line(b"again")
        assert page.texts().line == b"again"


def test_a_line_that_is_too_long_for_the_page_is_cut(tmp_path: Path) -> None:
    with paged(tmp_path / "line") as page:
        page.set_line(b"x" * 5000)
        assert set(page.texts().line) == set(b"x")
        page.set_bar(b"y" * 5000)
        assert set(page.texts().line) == set(b"x")


def test_output_is_left_alone_where_there_is_no_terminal(tmp_path: Path) -> None:
    with paged(tmp_path / "line") as page:
        page.set_line(b"the line")
        assert TerminalLine(page).around(1, b"output\n") == b"output\n"
    assert terminal_line.found(tmp_path / "line") is None


def test_what_is_printed_in_pieces_erases_the_line_once(tmp_path: Path) -> None:
    import io

    with paged(tmp_path / "line") as page:
        page.set_line(b"the line")
        under = io.StringIO()
        stream = ClearingStream(under, Shown(page))
        print("a", "b", file=stream)
        print("c", file=stream)
        away = AWAY.decode()
        assert under.getvalue() == f"{away}a b\n{away}c\n"
