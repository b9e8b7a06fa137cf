"""`holdfast web` as a process, beside a real job: what is killed, and what goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from e2e.web import Web

from holdfast.cli.main import main
from holdfast.jobhome import find
from holdfast.view.follower import Follower

LIMIT_S = 120.0
SCRIPT = """
import sys, time
from pathlib import Path
import holdfast
step = 0
while not Path(sys.argv[1]).exists():
    step += 1
    time.sleep(0.01)
    holdfast.progress(step)
"""


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@contextmanager
def training(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A job of two ranks that trains until the file is there."""
    script, stop = tmp_path / "train.py", tmp_path / "stop"
    script.write_text(SCRIPT)
    words = ("run", "--job", "live", "--nproc-per-node", "2", str(script), str(stop))
    with started(*words) as job:
        deadline = time.monotonic() + LIMIT_S
        while not stepped():
            assert job.poll() is None, job.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield job, stop


def stepped() -> bool:
    path = Path(os.environ["HOLDFAST_HOME"]) / "jobs" / "live" / "journal.db"
    if not path.exists():
        return False
    try:
        follower = Follower.open(find("live"))
    except Exception:  # Its first events are being written.
        return False
    follower.close()
    return follower.job.highest > 0


def coordinator_of(launcher: int) -> int:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = path.read_text().split(")", 1)
        except OSError:
            continue
        if "(holdfast-coord" in name and int(rest.split()[1]) == launcher:
            return int(path.parent.name)
    raise AssertionError("there is no coordinator")


def test_a_killed_coordinator_is_gone_and_back_and_a_killed_page_harms_nobody(
    tmp_path: Path,
) -> None:
    with training(tmp_path) as (job, stop), Web(tmp_path, os.environ, "live") as web:
        assert web.get("/api/jobs/live/now")["status"]["state"] == "running"
        heard = []
        for name, _ in web.events("/api/jobs/live/stream"):
            if not heard:
                os.kill(coordinator_of(job.pid), signal.SIGKILL)
            heard.append(name)
            if name == "back":
                break
        assert heard.index("gone") < heard.index("back")
        step = web.get("/api/jobs/live/now")["status"]["step"]
        for name, data in web.events("/api/jobs/live/stream"):
            if name == "now" and data["status"]["step"] > step:
                break  # It is followed on, past what the coordinator before wrote.
        web.close()
        stop.touch()
        assert job.wait(LIMIT_S) == 0
    follower = Follower.open(find("live"))
    assert follower.status().exit_code == 0
    follower.close()


def test_a_killed_rank_is_on_the_stream(tmp_path: Path) -> None:
    with training(tmp_path) as (job, stop), Web(tmp_path, os.environ, "live") as web:
        killed = False
        for name, data in web.events("/api/jobs/live/stream"):
            if not killed:
                killed = True
                follower = Follower.open(find("live"))
                os.kill(follower.status().nodes[0].ranks[1].pid, signal.SIGKILL)
                follower.close()
            if name == "incident":
                assert data["rank"] == 1
                assert data["kind"] == "signal"
                if not data["open"]:
                    break
        told = web.get(f"/api/jobs/live/incidents/{data['id']}")
        assert told["incident"]["lost_s"] > 0
        assert {"WorkerExited", "StartWorkers"} <= {step["what"] for step in told["story"]}
        why = web.get("/api/jobs/live/why?rank=0")
        assert why["verdict"]["sentence"]
        assert "train.py" in why["ranks"]["0"]
        stop.touch()
        assert job.wait(LIMIT_S) == 0


def test_a_simulated_job_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--nodes", "300", "--hours", "0.1", "--job", "big"]) == 0
    follower = Follower.open(find("big"))
    status = follower.status()
    assert status.world_size == 2400
    assert follower.history.timeline.ranks == 2400
    follower.close()
    assert main(["status", "big", "--json"]) == 0
    assert '"world_size": 2400' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--listen", "nowhere.invalid:1"], "--listen"),
        (["nobody"], "no job"),
        (["--coordinator", "127.0.0.1:1"], "--token-file"),
        (["--listen", "x:y:z"], "HOST:PORT"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["web", *words]) != 0
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_stopped_ends_open_pages_without_a_word(
    tmp_path: Path, number: signal.Signals
) -> None:
    assert main(["sim", "--nodes", "2", "--hours", "0.02", "--faults", "none", "--job", "s"]) == 0
    with Web(tmp_path, os.environ) as web:
        with web.open("/api/jobs/s/stream") as stream:
            while not stream.readline().startswith(b"event: now"):
                pass
            web.process.send_signal(number)
            while stream.readline():  # To its end.
                pass
        assert web.process.wait(LIMIT_S) == 0
        assert len(web.said.read_text().splitlines()) == len(web.links)
