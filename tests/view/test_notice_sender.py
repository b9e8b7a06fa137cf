"""The sender of notices as a process: what targets hear though they fail and it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.harness import wait_for
from e2e.webhooks import SECRET, Webhooks
from journals import home_with, simulated, unfinished, write

from holdfast.jobhome import JobHome
from holdfast.view.notices.news import BURST

PROGRAM = """
import logging, os, sys
from holdfast.jobhome import JobHome
from holdfast.view.notices.process import run_notices
from pathlib import Path

logging.basicConfig(level=logging.INFO)
home, last_word_s, *targets = sys.argv[1:]
run_notices(JobHome(Path(home)), targets, os.getppid(), float(last_word_s))
"""
ALL = 41
"""Incidents of the simulated job."""
ENDS = ("finished", "failed")


class Senders:
    """Starts senders of one job, one after the other."""

    def __init__(self, home: JobHome, log: Path) -> None:
        self.home, self._log = home, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *targets: str, last_word_s: float = 30.0) -> None:
        command = [sys.executable, "-c", PROGRAM, str(self.home.path), str(last_word_s), *targets]
        blocked = {signal.SIGTERM}  # As in every child of a launcher, until it can handle it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(command, stderr=log)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def tell_end(self) -> None:
        assert self.process is not None
        self.process.terminate()

    def code(self) -> int:
        assert self.process is not None
        return self.process.wait(60.0)

    @property
    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture
def senders(tmp_path: Path) -> Iterator[Senders]:
    found = Senders(home_with(unfinished()), tmp_path / "log")
    yield found
    if found.process is not None and found.process.poll() is None:
        found.kill()


@pytest.fixture
def webhooks() -> Iterator[Webhooks]:
    server = Webhooks()
    yield server
    server.close()


def end(senders: Senders) -> None:
    """Write the rest of the job's journal, as a coordinator does that ends at once after it."""
    write(senders.home, simulated()[len(unfinished()) :])


def test_a_notice_that_was_on_its_way_when_the_sender_was_killed_is_sent_again(
    senders: Senders, webhooks: Webhooks
) -> None:
    webhooks.hangs.set()
    senders.start(webhooks.url)
    wait_for(lambda: webhooks.asked, "the request")
    senders.kill()
    webhooks.hangs.clear()
    wait_for(lambda: webhooks.received, "the answer to nobody")
    senders.start(webhooks.url)
    wait_for(lambda: len(webhooks.received) == 2, "the same notice")
    first, second = webhooks.received
    assert (second["incidents"], second["kind"]) == (first["incidents"], first["kind"])


def test_what_a_target_has_taken_is_not_sent_again(senders: Senders, webhooks: Webhooks) -> None:
    senders.start(webhooks.url)
    wait_for(lambda: senders.home.notices.exists(), "the note of the delivery")
    senders.kill()
    senders.start(webhooks.url)
    end(senders)
    senders.tell_end()
    assert senders.code() == 0
    assert webhooks.received[-1]["kind"] in ENDS
    told = [one for notice in webhooks.received for one in notice["incidents"] if not one["open"]]
    assert len(told) == len({one["id"] for one in told})
    assert max(one["id"] for one in told) >= ALL - 1, "the last one may be open"


def test_each_target_has_a_memory_of_its_own(
    senders: Senders, webhooks: Webhooks, tmp_path: Path
) -> None:
    webhooks.answers = [503]
    senders.start(webhooks.url, f"sh -c 'cat >> {tmp_path}/told; echo >> {tmp_path}/told'")
    wait_for(lambda: senders.home.notices.exists(), "the command's notice")
    wait_for(lambda: webhooks.asked, "the request to the webhook")
    senders.kill()
    webhooks.answers = []
    senders.start(webhooks.url)
    wait_for(lambda: webhooks.received, "the notice of the webhook")
    assert len((tmp_path / "told").read_text().splitlines()) == 1


def test_the_end_is_told_though_the_sender_is_killed_while_it_tells(
    senders: Senders, webhooks: Webhooks
) -> None:
    senders.start(webhooks.url)
    wait_for(lambda: webhooks.received, "the first notice")
    webhooks.hangs.set()
    end(senders)
    wait_for(lambda: webhooks.asked[-1]["kind"] in ENDS, "the last request")
    senders.kill()
    webhooks.hangs.clear()
    senders.start(webhooks.url)
    senders.tell_end()
    assert senders.code() == 0
    assert webhooks.received[-1]["kind"] in ENDS
    count = len(webhooks.received)
    senders.start(webhooks.url)
    senders.tell_end()
    assert senders.code() == 0
    assert len(webhooks.received) == count, "the end was told already"


def test_the_end_of_the_run_before_is_not_told_as_the_end_of_this_one(
    senders: Senders, webhooks: Webhooks
) -> None:
    end(senders)
    senders.start(webhooks.url)
    wait_for(lambda: webhooks.received, "the incidents")
    assert senders.process is not None
    assert webhooks.received[0]["kind"] == "incidents"
    with pytest.raises(subprocess.TimeoutExpired):
        senders.process.wait(1.0)


def test_a_target_that_fails_in_every_way_hears_of_everything(
    senders: Senders, webhooks: Webhooks
) -> None:
    webhooks.answers = [500, "close", "half", 429, 200]
    senders.start(webhooks.url)
    wait_for(lambda: webhooks.asked, "the first try")
    end(senders)
    assert senders.code() == 0
    assert len(webhooks.asked) == 5
    assert sum(notice["incidents_new"] for notice in webhooks.received) == ALL
    assert webhooks.received[-1]["kind"] in ENDS
    assert "127.0.0.1 did not take one (HTTP status 500); trying again" in senders.log
    assert "takes them again" in senders.log
    assert SECRET not in senders.log


def test_a_refused_notice_is_counted_in_the_next_one(senders: Senders, webhooks: Webhooks) -> None:
    webhooks.answers = [404, 200]
    senders.start(webhooks.url)
    wait_for(lambda: senders.home.notices.exists(), "the refusal")
    end(senders)
    assert senders.code() == 0
    assert [notice["undelivered"] for notice in webhooks.received] == [1]


def test_a_storm_of_incidents_is_a_few_notices(senders: Senders, webhooks: Webhooks) -> None:
    home_now = JobHome(senders.home.path)
    entries = simulated()
    home_now.journal.unlink()
    write(home_now, entries[:20])
    senders.start(webhooks.url)
    for at in range(20, len(entries), 50):
        write(home_now, entries[at : at + 50])
    senders.tell_end()
    assert senders.code() == 0
    assert len(webhooks.received) <= BURST + 1
    assert sum(notice["incidents_new"] for notice in webhooks.received) == ALL


@pytest.mark.parametrize("hangs", ["webhook", "command"])
def test_a_target_that_hangs_has_a_limit_and_leaves_nothing_behind(
    senders: Senders, webhooks: Webhooks, tmp_path: Path, hangs: str
) -> None:
    webhooks.hangs.set()
    command = f"sh -c 'echo $$ > {tmp_path}/pid; exec sleep 1000'"
    end(senders)
    senders.start(webhooks.url if hangs == "webhook" else command, last_word_s=2.0)
    senders.tell_end()
    assert senders.code() == 0
    if hangs == "command":
        pid = int((tmp_path / "pid").read_text())
        wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "the end of the command")


def test_a_sender_whose_parent_was_killed_tells_that_the_job_is_lost(
    senders: Senders, webhooks: Webhooks
) -> None:
    (senders.home.path / "lock").unlink()
    between = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    sender = [sys.executable, "-c", PROGRAM, str(senders.home.path), "30", webhooks.url]
    senders.process = subprocess.Popen([sys.executable, "-c", between, *sender])
    wait_for(lambda: webhooks.received, "the incidents")
    os.kill(senders.process.pid, signal.SIGKILL)
    wait_for(lambda: webhooks.received[-1]["kind"] == "lost", "the last notice")
    noted = json.loads(senders.home.notices.read_bytes())
    assert [told["ended_run"] for told in noted["targets"].values()] == [0], "it may go on"
