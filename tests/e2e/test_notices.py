"""Notices of real jobs: a killed rank, a job that gives up, a launcher that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from .harness import TRAINER, Run, gone, wait_for
from .webhooks import SECRET, Webhooks


@pytest.fixture
def hook() -> Iterator[Webhooks]:
    found = Webhooks()
    yield found
    found.close()


def test_a_killed_rank_and_the_end_are_told_to_a_webhook_and_to_a_command(
    run: Run, hook: Webhooks
) -> None:
    run.train("--notify", hook.url, "--notify", "sh -c 'cat >> told; echo >> told'")
    run.until_stepping()
    run.kill_rank(1)
    wait_for(lambda: "incident" in hook.kinds(), "the notice of the incident")
    run.end()
    assert run.code() == 0
    incident, end = [one for one in hook.received if one["kind"] in ("incident", "finished")]
    assert "rank 1" in incident["text"]
    assert "back in" in incident["text"]
    assert incident["incidents"][0]["lost_s"] > 0
    assert end["text"].startswith(f"job {run.job} finished: ")
    assert end["exit_code"] == 0
    lines = (run.folder / "told").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == hook.kinds()
    for text in (run.err, run.out):
        assert SECRET not in text
    run.assert_nobody_left()


def test_a_script_does_not_see_the_secret(run: Run, hook: Webhooks) -> None:
    script = "import os; print('seen', [n for n, v in os.environ.items() if 'secret' in v])"
    run.train(script=script, env={"HOLDFAST_NOTIFY": hook.url})
    assert run.code() == 0
    assert "seen []" in run.out
    assert hook.kinds() == ["finished"]


def test_a_job_that_gives_up_says_why(run: Run, hook: Webhooks) -> None:
    run.train("--notify", hook.url, "--max-restarts", "0", script="raise ValueError('no good')")
    assert run.code() != 0
    end = hook.received[-1]
    assert end["kind"] == "failed"
    assert "ValueError" in end["text"]


def test_the_end_is_told_though_the_coordinator_is_killed_again_and_again(
    run: Run, hook: Webhooks
) -> None:
    run.train("--notify", hook.url)
    run.until_stepping()
    os.kill(run.coordinator(), signal.SIGKILL)
    run.until(lambda job: job.highest > 200, "training without a break")
    sender = wait_for(lambda: run._child("holdfast-notes"), "the sender")
    os.kill(sender, signal.SIGKILL)
    wait_for(lambda: run._child("holdfast-notes") not in (None, sender), "another sender")
    run.end()
    assert run.code() == 0
    assert hook.kinds()[-1] == "finished"


def test_the_end_is_told_though_its_sender_is_killed_between_request_and_answer(
    run: Run, hook: Webhooks
) -> None:
    hook.hangs.set()
    run.train("--notify", hook.url, args=("100",))
    for count in (1, 2):
        wait_for(lambda count=count: len(hook.asked) == count, "a request")
        sender = wait_for(lambda: run._child("holdfast-notes"), "the sender")
        os.kill(sender, signal.SIGKILL)
        wait_for(partial(gone, sender), "the sender's end")
    hook.hangs.clear()
    assert run.code() == 0
    assert hook.asked[-1]["kind"] == hook.kinds()[-1] == "finished"
    assert len(hook.asked) == 3


def test_a_launcher_that_is_killed_is_told_as_a_lost_job(run: Run, hook: Webhooks) -> None:
    run.train("--notify", hook.url)
    run.until_stepping()
    wait_for(lambda: run._child("holdfast-notes"), "the sender")
    os.kill(run.pid, signal.SIGKILL)
    wait_for(lambda: "lost" in hook.kinds(), "the last notice")
    assert run.process is not None
    run.process.wait()
    run.assert_nobody_left()


def test_a_webhook_that_hangs_delays_the_end_by_a_limit_and_nothing_else(
    run: Run, hook: Webhooks
) -> None:
    hook.hangs.set()
    run.train("--notify", hook.url, args=("100",))
    began = time.monotonic()
    assert run.code() == 0
    assert time.monotonic() - began < 60
    assert run.ask("goodput")["wall_s"] < 30
    run.assert_nobody_left()


def test_a_second_signal_ends_the_wait_for_the_last_notice(run: Run, hook: Webhooks) -> None:
    hook.hangs.set()
    run.train("--notify", hook.url)
    run.until_stepping()
    sender = wait_for(lambda: run._child("holdfast-notes"), "the sender")
    os.kill(run.pid, signal.SIGTERM)
    wait_for(lambda: (job := run.peek()) is not None and job.result is not None, "the job's end")
    for child in ("holdfast-agent", "holdfast-coord"):  # Until then a signal is for these.
        wait_for(lambda child=child: run._child(child) is None, f"the end of {child}")
    os.kill(run.pid, signal.SIGTERM)
    began = time.monotonic()
    run.code()
    assert time.monotonic() - began < 8
    assert not os.path.exists(f"/proc/{sender}")


def test_a_command_that_hangs_does_not_outlive_the_job(run: Run) -> None:
    run.train("--notify", "sh -c 'echo $$ > pid; exec sleep 1000'")
    run.until_stepping()
    os.kill(run.pid, signal.SIGTERM)
    wait_for(lambda: (run.folder / "pid").exists(), "the command")
    wait_for(lambda: run._child("holdfast-agent") is None, "the agent's end")
    os.kill(run.pid, signal.SIGTERM)
    run.code()
    pid = int((run.folder / "pid").read_text())
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "the command's end")


@pytest.mark.parametrize("killed", [False, True], ids=["", "coordinator killed"])
def test_a_coordinator_alone_sends_notices(
    make_run: Callable[[], Run], hook: Webhooks, killed: bool
) -> None:
    alone, node = make_run(), make_run()
    command = [sys.executable, "-m", "holdfast", "coordinator", "--job", alone.job]
    alone.start_raw(command, {"HOLDFAST_NOTIFY": hook.url})
    port = wait_for(
        lambda: (found := re.search(r"listens on 127.0.0.1:(\d+)", alone.out)) and found.group(1),
        "the address",
    )
    node.env["HOLDFAST_HOME"] = alone.env["HOLDFAST_HOME"]
    node.train(f"--coordinator=127.0.0.1:{port}", job=alone.job, args=("100",))
    if killed:
        os.kill(alone.coordinator(), signal.SIGKILL)
    assert node.code() == 0
    assert alone.code() == 0
    assert hook.kinds() == ["finished"]
    assert SECRET not in alone.out + alone.err
    alone.assert_nobody_left()


def test_a_job_on_a_platform_sends_notices(run: Run, hook: Webhooks) -> None:
    run.without_torch()
    up = [sys.executable, "-m", "holdfast", "up", "--nodes=2", f"--job={run.job}"]
    run.start_raw([*up, "--notify", hook.url, run.write(TRAINER), "100"])
    assert run.code() == 0
    assert hook.kinds() == ["finished"]
    run.assert_nobody_left()


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("no-such-command --now", "no-such-command: no such command"),
        (f"ftp://host/{SECRET}", "only http:// and https://"),
        (f"http:///{SECRET}", "has no host"),
    ],
)
def test_a_target_that_cannot_work_is_refused_before_the_job_starts(
    run: Run, target: str, why: str
) -> None:
    run.train("--notify", target)
    assert run.code() == 2
    assert why in run.err
    assert SECRET not in run.err


def test_config_does_not_show_the_secret(run: Run, hook: Webhooks) -> None:
    run.start_raw([sys.executable, "-m", "holdfast", "config", "--notify", hook.url, "--json"])
    assert run.code() == 0
    assert SECRET not in run.out
