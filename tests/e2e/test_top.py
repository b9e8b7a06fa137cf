"""`holdfast top` in a real terminal, beside a real job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from terminals import Terminal

from .harness import MARKER, PATIENCE_S, Run, wait_for

Watch = Callable[..., Terminal]


@pytest.fixture
def watch(run: Run) -> Iterator[Watch]:
    """Starts `holdfast top` for the job."""
    terminals = []

    def start(term: str = "xterm-256color", **more: Any) -> Terminal:
        environment = {k: v for k, v in run.env.items() if k != MARKER}
        terminal = Terminal(
            [sys.executable, "-m", "holdfast", "top", run.job],
            env={**environment, "TERM": term},
            cwd=run.folder,
            **more,
        )
        terminals.append(terminal)
        return terminal

    yield start
    for terminal in terminals:
        terminal.close()


def top(run: Run, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast", "top", run.job, *words],
        env={k: v for k, v in run.env.items() if k != MARKER},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_a_job_is_followed_through_a_fault_to_its_end(run: Run, watch: Watch) -> None:
    run.train()
    run.until_stepping()
    screen = watch()
    screen.until(lambda text: " running " in text and "steps/s" in text, "a running job")
    assert "rr" in screen.text
    run.kill_rank(1)
    screen.until(lambda text: "incidents  1" in text and "back in" in text, "the incident")
    os.kill(run.coordinator(), signal.SIGKILL)
    run.until(lambda job: job.highest > 300, "training that goes on")
    before = screen.text
    screen.until(lambda text: text != before and " running " in text, "steps after that")
    run.end()
    assert run.code() == 0
    screen.until(lambda text: " ended " in text and "finished" in text, "the end")
    assert screen.process.poll() is None
    screen.type("x")
    assert screen.code() == 0
    assert screen.modes() == screen.before
    assert not screen.cursor[2]


def test_keys_turn_pages_and_the_window_may_change(run: Run, watch: Watch) -> None:
    run.train()
    run.until_stepping()
    run.kill_rank(0)
    run.until(lambda job: job.incidents and job.incidents[0].closed_at, "an incident")
    screen = watch(columns=60, rows=24)
    screen.until_seen("> rank 0")
    screen.type("l")
    screen.until_seen("> rank 1")
    screen.type("i")
    screen.until_seen("phases: ")
    screen.resize(120, 20)
    screen.until(lambda text: "phases: " in text and "Esc back" in text, "the page again")
    screen.type("?")
    screen.until_seen("quit; the job goes on")
    screen.type("w")
    screen.until(lambda text: "why: rank 1" in text and "train.py" in text, "the rank's stack")
    screen.type("\x1b")
    screen.until_seen("> rank 1")
    screen.type("q")
    assert screen.code() == 0
    assert screen.modes() == screen.before
    assert run.process is not None
    assert run.process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_terminal_is_given_back_whatever_ends_it(
    run: Run, watch: Watch, number: signal.Signals
) -> None:
    run.train()
    run.until_stepping()
    screen = watch()
    screen.until_seen("> rank 0")
    os.kill(screen.process.pid, number)
    assert screen.code() == 0
    assert screen.modes() == screen.before
    assert screen.raw.endswith(b"\x1b[?7h\x1b[?25h\x1b[?1049l")


def test_a_terminal_that_cannot_draw_gets_lines_without_escapes(run: Run, watch: Watch) -> None:
    run.train()
    run.until_stepping()
    screen = watch(term="dumb")
    screen.until_seen("running round 1, 2 ranks, step")
    run.end()
    assert screen.code() == 0
    assert "exit code 0" in "".join(screen.lines)
    assert b"\x1b" not in screen.raw


def test_without_colours_the_screen_is_the_same(run: Run, watch: Watch) -> None:
    run.train()
    run.until_stepping()
    run.env["NO_COLOR"] = "1"
    screen = watch()
    screen.until_seen("> rank 0")
    screen.type("\x03")
    assert screen.code() == 0
    assert re.search(rb"\x1b\[[0-9;]*(?:3|4|9)[0-9][0-9;]*m", screen.raw) is None
    assert screen.modes() == screen.before


def test_a_window_that_is_too_small_shows_a_part_and_recovers(run: Run, watch: Watch) -> None:
    run.train()
    run.until_stepping()
    screen = watch(columns=10, rows=3)
    screen.until(lambda text: text.strip(), "something")
    assert len(screen.lines) <= 3
    screen.resize(100, 30)
    screen.until_seen("> rank 0")
    screen.type("q")
    assert screen.code() == 0


def test_a_job_that_is_killed_is_shown_as_lost(run: Run, watch: Watch) -> None:
    run.train()
    run.until_stepping()
    screen = watch()
    screen.until_seen(" running ")
    os.kill(run.pid, signal.SIGKILL)
    screen.until_seen("no process runs this job any more")


def test_into_a_pipe_it_writes_lines_until_the_job_is_over(run: Run) -> None:
    run.train()
    run.until_stepping()
    watching = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "top", run.job, "--json"],
        env={k: v for k, v in run.env.items() if k != MARKER},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        assert first["status"]["state"] == "running"
        assert first["map"]["ranks"] == "rr"
        run.end()
        rest = [json.loads(line) for line in watching.stdout]
        assert watching.wait(PATIENCE_S) == 0
        assert rest[-1]["status"]["exit_code"] == 0
        steps = [one["status"]["step"] for one in (first, *rest)]
        assert steps == sorted(steps)
    finally:
        watching.kill()
        watching.wait()


def test_one_look_is_printed_and_that_is_all(run: Run) -> None:
    run.train(args=("50",))
    assert run.code() == 0
    done = top(run, "--once")
    assert done.returncode == 0
    assert "step 50" in done.stdout
    assert "finished" in done.stdout
    assert "\x1b" not in done.stdout
    assert json.loads(top(run, "--once", "--json").stdout)["status"]["step"] == 50
    plain = top(run).stdout.splitlines()
    assert len(plain) == 1
    assert "exit code 0" in plain[0]
    wait_for(lambda: not run.alive(), "nobody")
