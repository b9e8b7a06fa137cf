"""The progress page: what a reader sees is always something that was written as a whole."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

from holdfast.shm.rank_page import (
    _FIRST_SLOT,
    _SLOT_WORDS,
    _SLOTS,
    PAGE_BYTES,
    PageState,
    RankPage,
    create_page,
)


def whole(n: int) -> PageState:
    """A state in which every field says the same."""
    return PageState(*_fields(n))


def write(page: RankPage, n: int) -> None:
    page.write(*_fields(n))


def _fields(n: int) -> tuple[Any, ...]:
    x = float(n)
    return (n, n, x, x, x, x, n, x, x, n, n, x, x, x, n)


def scribbler(fd: int) -> int:
    """A process that writes as fast as it can, until it is killed."""
    pid = os.fork()
    if pid == 0:
        try:
            page = RankPage(fd)
            n = 0
            while True:
                n += 1
                write(page, n)
        finally:
            os._exit(1)
    return pid


def wait_for_first_write(page: RankPage) -> None:
    deadline = time.monotonic() + 60
    while page.read().steps == 0:
        assert time.monotonic() < deadline, "the writer never wrote"


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.fixture
def fd() -> int:
    return create_page()


def test_a_fresh_page_says_that_nothing_was_done(fd: int) -> None:
    assert RankPage(fd).read() == whole(0)
    assert os.fstat(fd).st_size == PAGE_BYTES


def test_what_was_written_last_is_read(fd: int) -> None:
    writer, reader = RankPage(fd), RankPage(fd)
    for n in range(1, 200):
        write(writer, n)
        assert reader.read() == whole(n)


def test_the_page_outlives_its_descriptor_and_its_writer(fd: int) -> None:
    reader = RankPage(fd)
    pid = os.fork()
    if pid == 0:
        write(RankPage(fd), 42)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(fd)
    assert reader.read() == whole(42)


def test_a_reader_never_sees_half_of_a_write_while_another_process_writes(fd: int) -> None:
    page = RankPage(fd)
    pid = scribbler(fd)
    try:
        wait_for_first_write(page)
        last = 0
        for _ in range(100_000):
            state = page.read()
            assert state == whole(state.steps), "torn"
            assert state.steps >= last, "went back"
            last = state.steps
    finally:
        end(pid)


def test_a_writer_killed_at_any_moment_leaves_a_whole_state() -> None:
    chance = random.Random(1)
    for _ in range(25):
        fd = create_page()
        page = RankPage(fd)
        pid = scribbler(fd)
        try:
            wait_for_first_write(page)
            for _ in range(chance.randrange(200)):
                page.read()
        finally:
            end(pid)
        state = page.read()
        assert state == whole(state.steps)
        page.close()
        os.close(fd)


def test_a_slot_half_written_is_not_yet_pointed_at(fd: int) -> None:
    page = RankPage(fd)
    write(page, 1)
    # A writer that dies in the next slot has changed its words and not the sequence.
    following = _FIRST_SLOT + _SLOT_WORDS * 2
    page._ints[following] = 999
    page._floats[following + 3] = 1e9
    assert page.read() == whole(1)


@pytest.mark.parametrize("writes", [1, 30, 31, 32, 33, 64, 100])
def test_a_reader_overtaken_while_it_reads_sees_nothing_half_written(
    fd: int, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, writer = RankPage(fd), RankPage(fd)
    write(writer, 1)

    class Overtaken:
        """In the middle of the first read, the writer writes so often and begins one write more."""

        def __init__(self) -> None:
            self.done = False

        def __getitem__(self, key: slice) -> list[float]:
            if not self.done:
                self.done = True
                for n in range(2, writes + 2):
                    write(writer, n)
                begun = _FIRST_SLOT + _SLOT_WORDS * ((writes + 2) % _SLOTS)
                writer._floats[begun + 3] = 1e9
            return list(writer._floats[key])

    page._floats.release()
    monkeypatch.setattr(page, "_floats", Overtaken())
    state = page.read()
    assert state == whole(state.steps)


def test_closing_gives_the_memory_back(fd: int) -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("holdfast-rank-page" in line for line in maps)

    before = mapped()
    page = RankPage(fd)
    assert mapped() == before + 1
    page.close()
    assert mapped() == before
    os.close(fd)
