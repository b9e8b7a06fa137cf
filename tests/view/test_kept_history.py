"""What was read of a long journal is kept and gone on from; the journal alone decides what is true."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e.web import Web
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import home_with, simulated, write
from serving_web import ServedPage, page, run

from holdfast import kernel
from holdfast.core.replay import Entry
from holdfast.jobhome import JobHome, find
from holdfast.view import follower as followers
from holdfast.view.follower import Follower, JournalFile
from holdfast.view.history import kept
from holdfast.view.history.kept import KeptHistory
from holdfast.view.web import answers
from holdfast.view.web.app import encoded
from holdfast.view.web.past import read_past

LIMIT_S = 60.0


def told(follower: Follower) -> list[bytes]:
    """All that a page can ask of a job."""
    numbers = range(1, len(follower.job.incidents) + 1)
    return [
        encoded(answer)
        for answer in (
            answers.now(follower, answers.lost_today(follower)),
            answers.timeline(follower, None, None, 300, 0, None, "rank"),
            answers.timeline(follower, None, None, 300, 0, None, "node"),
            answers.goodput(follower, 50),
            answers.checkpoints(follower),
            answers.nodes(follower),
            answers.speed(follower),
            [answers.incident(follower, number) for number in numbers],
        )
    ]


def over(entries: tuple[Entry, ...], name: str = "j") -> JobHome:
    """The home of a job that does not run, so that each answer is the same whenever it is asked for."""
    home = home_with(entries, name)
    home.leave()
    return home


def opened(home: JobHome) -> Follower:
    follower = Follower.open(home)
    follower.close()
    return follower


@pytest.fixture
def any_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "KEPT_FROM", 1)


@settings(max_examples=8, deadline=None)
@given(share=st.floats(0.001, 0.999))
def test_a_viewer_that_goes_on_knows_what_one_that_read_all_knows(share: float) -> None:
    entries = simulated(seed=3)
    cut = max(1, int(len(entries) * share))
    home = over(entries[:cut], f"j{os.urandom(6).hex()}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(followers, "KEPT_FROM", 1)
        opened(home)
    write(home, entries[cut:])
    late = Follower(JournalFile(home))
    assert late.go_on_from(kept.read(home.history))
    assert late.taken == cut
    late.catch_up()
    assert told(late) == told(opened(home))
    late.close()


@pytest.mark.usefixtures("any_is_much")
def test_opening_keeps_what_it_read_and_the_next_one_reads_only_what_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = simulated()
    home = home_with(entries[:-50])
    opened(home)
    assert home.history.stat().st_mode & 0o077 == 0
    write(home, entries[-50:])
    asked: list[int] = []
    plain = JournalFile.entries

    def noted(source: JournalFile, after: int, limit: int) -> Any:
        asked.append(after)
        return plain(source, after, limit)

    monkeypatch.setattr(JournalFile, "entries", noted)
    assert opened(home).taken == len(entries)
    assert min(asked) >= len(entries) - 51


def _torn(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flipped(content: bytes) -> bytes:
    return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]


def _of_another_version(content: bytes) -> bytes:
    return content.replace(kept.FORMAT.encode(), b"0, holdfast 0.0, journal 0")


@pytest.mark.usefixtures("any_is_much")
@pytest.mark.parametrize(
    "spoilt", [_torn, _flipped, _of_another_version, lambda content: b"", lambda content: b"\n"]
)
def test_a_file_that_is_of_no_use_is_ignored_and_replaced(
    spoilt: Callable[[bytes], bytes],
) -> None:
    home = over(simulated())
    expected = told(opened(home))
    content = home.history.read_bytes()
    assert kept.read(home.history) is not None
    home.history.write_bytes(spoilt(content))
    assert kept.read(home.history) is None
    assert told(opened(home)) == expected
    assert kept.read(home.history) is not None


@pytest.mark.usefixtures("any_is_much")
def test_what_was_kept_of_another_journal_is_not_taken() -> None:
    other, home = over(simulated(seed=2), "other"), over(simulated(seed=4))
    opened(other)
    home.history.write_bytes(other.history.read_bytes())
    follower = opened(home)
    assert follower.taken == len(simulated(seed=4))
    assert told(follower) == told(opened(home))
    assert follower.job.opened_at == opened(home).job.opened_at


@pytest.mark.usefixtures("any_is_much")
def test_a_journal_that_lost_its_end_and_went_another_way_is_read_again() -> None:
    entries = simulated()
    longer = home_with(entries, "longer")
    opened(longer)
    home = home_with((*entries[:-30], *entries[-20:]))
    home.history.write_bytes(longer.history.read_bytes())
    assert opened(home).taken == len(entries) - 10


@pytest.mark.usefixtures("any_is_much")
def test_a_home_in_which_nothing_can_be_kept_is_read_all_the_same() -> None:
    home = home_with(simulated())
    home.history.mkdir()
    (home.history / "in the way").touch()
    assert opened(home).taken == len(simulated())


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_what_is_no_file_of_a_viewer_is_not_waited_for(kind: str) -> None:
    home = home_with(simulated())
    if kind == "pipe":
        os.mkfifo(home.history)
    else:
        home.history.symlink_to("/dev/zero")
    assert kept.read(home.history) is None


@pytest.mark.usefixtures("any_is_much")
def test_a_file_for_which_there_is_no_room_leaves_nothing() -> None:
    home = home_with(simulated())
    opened(home)
    known = kept.read(home.history)
    assert known is not None
    home.history.unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            kept.write(home.history, known)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [path for path in home.path.iterdir() if path.name.startswith("history")]


KEEPER = """
import sys
from pathlib import Path
from holdfast.view.history import kept
path = Path(sys.argv[1])
known = kept.read(path)
for _ in range(40):
    kept.write(path, known)
"""


@pytest.mark.usefixtures("any_is_much")
def test_viewers_that_keep_at_once_do_not_spoil_the_file() -> None:
    home = home_with(simulated())
    opened(home)
    keepers = [
        subprocess.Popen([sys.executable, "-c", KEEPER, home.history], stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for keeper in keepers:
        said = keeper.communicate()[1]
        assert keeper.returncode == 0, said.decode()
    assert kept.read(home.history) is not None


# ---- a page of a long journal ----


@pytest.fixture(scope="module")
def long_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a simulated job of 640 ranks, of which nobody has read anything."""
    path = tmp_path_factory.mktemp("long")
    words = (
        "--nodes 80 --hours 0.4 --faults heavy --fault-rate 150 --seed 1 --check never --job long"
    )
    subprocess.run(
        [sys.executable, "-m", "holdfast", "sim", *words.split()],
        env={**os.environ, "HOLDFAST_HOME": str(path)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return path


@pytest.fixture
def long(long_home: Path, monkeypatch: pytest.MonkeyPatch) -> JobHome:
    monkeypatch.setenv("HOLDFAST_HOME", str(long_home))
    home = find("long")
    home.history.unlink(missing_ok=True)
    return home


def children(name: str) -> list[int]:
    found = []
    for pid in kernel.children(os.getpid()):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                found.append(pid)
        except OSError:
            continue
    return found


async def read_whole(web: ServedPage) -> dict[str, Any]:
    """Wait for a `now` of the whole journal."""
    heard = await web.events(
        "/api/jobs/long/stream", lambda name, data: name == "now" and "past" not in data
    )
    now: dict[str, Any] = heard[-1][1]
    return now


def test_a_long_journal_is_shown_at_once_and_its_past_when_it_was_read(long: JobHome) -> None:
    async def test() -> None:
        async with page() as web:
            now = await web.get("/api/jobs/long/now")
            assert 0.0 <= now["past"]["read"] < 1.0
            assert now["past"]["since"] > now["status"]["opened_at"]
            early = await web.get("/api/jobs/long/incidents")
            assert early["total"] > 10
            goodput = await web.get("/api/jobs/long/goodput")
            later = await read_whole(web)
            for one in (now, later):  # A snapshot may be younger than the newest event.
                assert one["status"].pop("wall_s") == pytest.approx(1440.0, abs=5.0)
            assert later["status"] == now["status"]
            assert await web.get("/api/jobs/long/incidents") == early
            whole = await web.get("/api/jobs/long/goodput")
            for one in (whole, goodput):
                del one["total"]["unknown"]  # From the newest event to then.
            assert whole["total"] == goodput["total"]
            timeline = await web.get("/api/jobs/long/timeline", fold="node")
            begins = [lane["spans"][0][0] for lane in timeline["lanes"]]
            assert min(begins) < now["status"]["opened_at"] + 60.0
            story = await web.get("/api/jobs/long/incidents/1")
            assert story["story"]
        assert not children("holdfast-past")
        async with page() as web:
            assert "past" not in await web.get("/api/jobs/long/now")

    run(test)
    assert isinstance(kept.read(long.history), KeptHistory)


def test_the_reader_imports_nothing_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = home_with(simulated())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hashlib.py").write_text("raise SystemExit('not the one of Python')")
    shares: list[float] = []
    asyncio.run(read_past(home, shares.append))
    assert shares[-1] == 1.0


def test_if_its_reader_is_killed_the_server_reads_it(long: JobHome) -> None:
    async def test() -> None:
        async with page() as web:
            assert "past" in await web.get("/api/jobs/long/now")
            while not (readers := children("holdfast-past")):
                await asyncio.sleep(0.01)
            os.kill(readers[0], signal.SIGKILL)
            now = await read_whole(web)
            assert now["status"]["state"] != "gathering"
            assert (await web.get("/api/jobs/long/incidents/1"))["story"]
        assert kept.read(long.history) is None

    run(test)


def test_the_reader_dies_with_a_server_that_is_killed(long: JobHome, tmp_path: Path) -> None:
    with Web(tmp_path, os.environ, "long") as web:
        assert "past" in web.get("/api/jobs/long/now")
        while not (found := kernel.children(web.process.pid)):
            assert web.process.poll() is None
        reader = os.pidfd_open(found[0])
    assert select.select([reader], [], [], LIMIT_S)[0]
    os.close(reader)
