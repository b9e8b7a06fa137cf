"""The status line in a real terminal: it is there, it mangles nothing, and it is gone afterwards."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from terminals import Terminal

from .harness import TRAINER, Run, wait_for

LINE = "holdfast: step"

CHATTY = """
    import os, sys, time
    import holdfast

    rank, step = int(os.environ["RANK"]), 0
    while not os.path.exists("end"):
        step += 1
        for part in range(10):
            number = f"{rank}-{step}-{part}"
            print(f"\\x1b[3{part % 8}mline {number} \\u4f60\\u597d {'x' * (step % 90)} end\\x1b[0m")
        sys.stdout.flush()
        holdfast.progress(step)
        time.sleep(0.04)  # The emulated terminal is a slow one.
"""
BARS = """
    import os, sys, time
    import holdfast

    step = 0
    while not os.path.exists("end"):
        step += 1
        print(f"\\r{step:>5}|{'#' * (step % 40):<40}| bar", end="", file=sys.stderr, flush=True)
        holdfast.progress(step)
        time.sleep(0.02)
    print(file=sys.stderr)
    print("after the bar")
"""
DRAWS = """
    import os, time
    import holdfast

    step = 0
    while not os.path.exists("end"):
        step += 1
        holdfast.progress(step)
        if os.path.exists("draw"):
            print(f"one {step}\\ntwo\\x1b[A\\rONE", flush=True)
        time.sleep(0.02)
"""

Show = Callable[..., Terminal]


@pytest.fixture
def show(run: Run) -> Iterator[Show]:
    """Starts `holdfast run` in a terminal."""
    terminals = []

    def start(
        *flags: str,
        script: str = TRAINER,
        args: tuple[str, ...] = (),
        command: str = "run",
        nproc: int = 2,
        term: str = "xterm-256color",
        **more: Any,
    ) -> Terminal:
        run.without_torch()
        words = ["--nproc-per-node", str(nproc), "--job", run.job, *flags, run.write(script), *args]
        terminal = Terminal(
            [sys.executable, "-m", "holdfast", command, *words],
            env={**run.env, "TERM": term},
            cwd=run.folder,
            **more,
        )
        terminals.append(terminal)
        run.process = terminal.process
        return terminal

    yield start
    for terminal in terminals:
        run.close()
        terminal.close()


def as_it_was(terminal: Terminal) -> bool:
    """Whether nothing of the terminal's state was changed for good."""
    _, _, hidden = terminal.cursor
    return not hidden and terminal.scroll_region is None and terminal.modes() == terminal.before


def test_the_line_is_at_the_bottom_while_the_job_runs_and_gone_when_it_ends(
    run: Run, show: Show
) -> None:
    terminal = show()
    text = terminal.until(lambda text: re.search(r"steps/s · goodput [0-9.]+%", text), "the line")
    assert text.splitlines()[-1].startswith(LINE)
    run.end()
    assert terminal.code() == 0
    assert not any(LINE in line for line in terminal.all_lines)
    assert "[holdfast] job" in terminal.text
    assert as_it_was(terminal)


def test_fast_output_with_colours_and_wide_characters_is_shown_whole_and_in_order(
    run: Run, show: Show
) -> None:
    terminal = show(script=CHATTY, columns=160)
    terminal.until_seen(LINE)
    run.until(lambda job: job.highest >= 150, "some output")
    run.end()
    assert terminal.code() == 0
    assert_whole(run, terminal)


def assert_whole(run: Run, terminal: Terminal) -> None:
    """All that is in the ranks' logs was shown, in order, and nothing else in between."""
    shown = [line for line in terminal.all_lines if "line " in line]
    for rank in (0, 1):
        logged = re.findall(r"line (\S+) ", run.log(rank).decode())
        found = [re.search(r"line (\S+) ", line) for line in shown]
        assert [one[1] for one in found if one and one[1].startswith(f"{rank}-")] == logged
    assert all(re.fullmatch(r"\[default[01]\]:line \S+ 你\s*好\s* x* ?end", line) for line in shown)
    assert LINE.encode() in terminal.raw
    assert not any(LINE in line for line in terminal.all_lines)
    assert as_it_was(terminal)


def test_a_progress_bar_moves_above_the_line_and_stays_when_it_is_done(
    run: Run, show: Show
) -> None:
    terminal = show(script=BARS, nproc=1)
    terminal.until(
        lambda text: re.search(r"\[default0\]:.*\| bar\n" + LINE, text), "the bar above the line"
    )
    run.end()
    assert terminal.code() == 0
    after = terminal.all_lines
    assert sum("| bar" in line for line in after) == 1
    assert "[default0]:after the bar" in after
    assert as_it_was(terminal)


def test_the_line_goes_for_good_when_a_script_draws_on_the_terminal_itself(
    run: Run, show: Show
) -> None:
    terminal = show(script=DRAWS, nproc=1)
    terminal.until_seen(LINE)
    (run.folder / "draw").touch()
    terminal.until(lambda text: "ONE" in text and LINE not in text, "no line")
    drawn = len(terminal.raw)
    wait_for(lambda: len(terminal.raw) > drawn + 2000, "more of the script's output")
    assert LINE.encode() not in terminal.raw[drawn:]
    run.end()
    assert terminal.code() == 0


@pytest.mark.parametrize(
    ("flags", "term"),
    [(["--quiet"], "xterm"), (["--no-status-line"], "xterm"), ([], "dumb")],
    ids=["quiet", "no-status-line", "dumb"],
)
def test_there_is_no_line_where_none_is_wanted_or_can_be(
    run: Run, show: Show, flags: list[str], term: str
) -> None:
    terminal = show(*flags, args=("100",), term=term)
    assert terminal.code() == 0
    assert b"\x1b" not in terminal.raw


def test_output_that_goes_to_a_file_has_no_trace_of_the_line(run: Run, show: Show) -> None:
    with open(run.folder / "out", "wb") as out:
        terminal = show(script=CHATTY, stdout=out.fileno())
        terminal.until_seen(LINE)
        run.end()
        assert terminal.code() == 0
    written = (run.folder / "out").read_bytes()
    logged = run.log(0) + run.log(1)
    assert sorted(re.sub(rb"\[default[01]\]:", b"", written).split()) == sorted(logged.split())


def test_whichever_process_dies_the_line_comes_back(run: Run, show: Show) -> None:
    terminal = show()
    terminal.until_seen(LINE)
    for name in ("holdfast-line", "holdfast-coord", "holdfast-agent"):
        pid = wait_for(lambda name=name: run._child(name), name)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda name=name, pid=pid: run._child(name) not in (None, pid), f"another {name}")
        seen = terminal.raw.count(LINE.encode())
        wait_for(lambda seen=seen: terminal.raw.count(LINE.encode()) > seen + 2, "the line")
    run.until_stepping(2)
    run.end()
    assert terminal.code() == 0
    logged = [line for line in terminal.all_lines if "starting it again" in line]
    assert len(logged) == 2
    assert all(line.startswith("[holdfast] the ") for line in logged)
    assert not any(LINE in line for line in terminal.all_lines)


def test_the_line_of_a_launcher_that_is_killed_is_taken_away(run: Run, show: Show) -> None:
    terminal = show()
    terminal.until_seen(LINE)
    os.kill(run.pid, signal.SIGKILL)
    terminal.process.wait()
    run.assert_nobody_left()
    assert as_it_was(terminal)
    assert LINE not in terminal.text
    assert terminal.cursor[1] == 0


def test_a_line_in_a_window_that_becomes_narrow_stays_one_line(run: Run, show: Show) -> None:
    terminal = show(columns=120)
    run.until_stepping()
    run.kill_rank(0)
    terminal.until_seen("back in")
    terminal.resize(30, 20)
    terminal.until(
        lambda text: any(
            line.startswith(LINE) and line.endswith("…") for line in text.splitlines()
        ),
        "a short line",
    )
    run.end()
    assert terminal.code() == 0
    assert as_it_was(terminal)


def test_the_terminal_is_as_it_was_after_ctrl_c(run: Run, show: Show) -> None:
    terminal = show()
    terminal.until_seen(LINE)
    terminal.type("\x03")
    assert terminal.code() != 0
    assert LINE not in terminal.text
    assert as_it_was(terminal)


def test_the_nodes_of_holdfast_up_share_the_terminal_with_its_line(run: Run, show: Show) -> None:
    terminal = show("--nodes", "2", command="up", script=CHATTY, nproc=1, columns=160)
    terminal.until_seen(LINE)
    run.until(lambda job: job.highest >= 150, "some output")
    run.end()
    assert terminal.code() == 0
    assert_whole(run, terminal)


SLOW_BYTES_PER_S = 10_000.0
MISSED = "bytes not shown here; the logs have them"


def test_a_terminal_that_is_slow_shows_whole_lines_and_the_end(run: Run, show: Show) -> None:
    terminal = show(script=CHATTY, columns=160, bytes_per_s=SLOW_BYTES_PER_S)
    terminal.until_seen(LINE)
    run.until(lambda job: job.highest >= 150, "more output than it can show in time")
    run.end()
    assert terminal.code() == 0
    before, missed, after = "\n".join(terminal.all_lines).partition(MISSED)
    assert missed
    for shown, rank in ((shown, rank) for shown in (before, after) for rank in (0, 1)):
        logged = re.findall(r"line (\S+) ", run.log(rank).decode())
        found = re.findall(rf"line ({rank}-\S+) .* end", shown)
        assert found == (logged[: len(found)] if shown is before else logged[-len(found) :])
    assert "line " in after
    assert "[holdfast] job" in after
    assert as_it_was(terminal)


TQDM = """
    import time
    import holdfast
    from tqdm import tqdm

    for epoch in tqdm(range(3), desc="epochs"):
        for step in tqdm(range(20), desc="steps", position=1, leave=False):
            holdfast.progress(epoch * 20 + step + 1)
            time.sleep(0.05)
    print("after the bars", flush=True)
"""
ONE_TQDM = """
    import time
    import holdfast
    from tqdm import tqdm

    for step in tqdm(range(200), desc="only"):
        holdfast.progress(step + 1)
        if step % 50 == 49:
            tqdm.write(f"reached {step + 1}")
        time.sleep(0.02)
    print("after the bar", flush=True)
"""
RICH = """
    import time
    import holdfast
    from rich.console import Console
    from rich.progress import track

    console = Console(force_terminal=True, width=60)
    for step in track(range(100), description="tracked", console=console):
        holdfast.progress(step + 1)
        time.sleep(0.03)
    print("after the bars", flush=True)
"""


@pytest.mark.parametrize("script", [TQDM, RICH], ids=["nested tqdm", "rich"])
def test_bars_that_move_the_cursor_have_the_terminal_for_themselves(
    run: Run, show: Show, script: str
) -> None:
    alone = show("--no-status-line", script=script, nproc=1, columns=200)
    assert alone.code() == 0
    beside = show(script=script, nproc=1, columns=200)
    assert beside.code() == 0

    def of_script(terminal: Terminal) -> list[str]:
        lines = [line for line in terminal.all_lines if "[holdfast]" not in line and line]
        return [re.sub(r"[0-9.:?]+ ?(it/s)?", "", line).rstrip() for line in lines]

    assert of_script(beside) == of_script(alone)
    assert any("after the bars" in line for line in of_script(beside))
    assert as_it_was(beside)


def test_a_bar_of_tqdm_and_what_is_written_beside_it_are_whole(run: Run, show: Show) -> None:
    terminal = show(script=ONE_TQDM, nproc=1)
    terminal.until(lambda text: re.search(r"only: +\d+%.*\n" + LINE, text), "the bar over the line")
    assert terminal.code() == 0
    after = terminal.all_lines
    assert [line for line in after if "reached" in line] == [
        f"[default0]:reached {number}" for number in (50, 100, 150, 200)
    ]
    assert sum("only: 100%" in line for line in after) == 1
    assert not any(LINE in line for line in after)


ASKS = """
    import holdfast, time

    for step in range(1, 60):
        holdfast.progress(step)
        time.sleep(0.02)
    name = input("your name? ")
    print(f"hello {name}", flush=True)
    print("last words without an end", end="", flush=True)
"""


def test_a_prompt_is_shown_and_what_is_typed_stays_until_the_script_has_it(
    run: Run, show: Show
) -> None:
    terminal = show(script=ASKS, nproc=1)
    terminal.until_seen(LINE)
    terminal.until_seen("your name?")
    terminal.type("Ada")
    terminal.until_seen("your name? Ada")
    seen = terminal.raw.count(LINE.encode())
    time.sleep(1.5)  # The viewer would have drawn its line three times.
    assert terminal.raw.count(LINE.encode()) == seen
    assert "your name? Ada" in terminal.text
    terminal.type(" Lovelace\n")
    assert terminal.code() == 0
    assert "your name? Ada Lovelace" in terminal.text
    assert "hello Ada Lovelace" in terminal.text
    assert "[default0]:last words without an end" in terminal.text.splitlines()
    assert as_it_was(terminal)


def test_a_narrow_terminal_has_no_line_and_all_output(run: Run, show: Show) -> None:
    script = "for n in range(50): print(f'n{n}')"
    terminal = show("--log-line-prefix-template", "", script=script, nproc=1, columns=10)
    assert terminal.code() == 0
    assert [line for line in terminal.all_lines if re.fullmatch(r"n\d+", line)] == [
        f"n{n}" for n in range(50)
    ]
    assert b"holdfast: " not in terminal.raw


@contextmanager
def in_shell(run: Run) -> Iterator[tuple[Terminal, str]]:
    """A shell in a terminal, and the command that starts the job in it."""
    run.without_torch()
    flags = ["--nproc-per-node", "1", "--job", run.job, run.write(TRAINER)]
    environment = {**run.env, "TERM": "xterm", "PS1": "prompt> "}
    shell = Terminal(["bash", "--norc", "--noprofile", "-i"], env=environment, cwd=run.folder)
    run.process = shell.process
    try:
        shell.until_seen("prompt>")
        yield shell, " ".join([sys.executable, "-m", "holdfast", "run", *flags])
    finally:
        run.close()
        shell.close()


def test_a_job_in_the_background_leaves_the_prompt_of_the_shell_alone(run: Run) -> None:
    with in_shell(run) as (shell, command):
        shell.type(f"{command} &\n")
        run.until(lambda job: job.highest > 100, "some training")
        assert LINE.encode() not in shell.raw
        shell.type("fg\n")
        shell.until_seen(LINE)
        run.end()
        shell.until(lambda text: text.rstrip().endswith("prompt>"), "the prompt")
        assert LINE not in shell.text


def test_a_job_that_is_suspended_and_resumed_has_its_line_again(run: Run) -> None:
    with in_shell(run) as (shell, command):
        shell.type(f"{command}\n")
        shell.until_seen(LINE)
        shell.type("\x1a")
        shell.until_seen("Stopped")
        shell.type("clear\n")
        shell.until(lambda text: LINE not in text and "prompt>" in text, "a clear screen")
        shown = shell.raw.count(LINE.encode())
        time.sleep(1.5)  # The viewer would have drawn its line three times.
        assert shell.raw.count(LINE.encode()) == shown
        shell.type("fg\n")
        shell.until_seen(LINE)
        run.end()
        shell.until(lambda text: text.rstrip().endswith("prompt>"), "the prompt")
        assert LINE not in shell.text


def test_a_terminal_that_stops_writers_of_the_background_stops_no_process_of_the_job(
    run: Run,
) -> None:
    with in_shell(run) as (shell, command):
        shell.type(f"stty tostop; {command}\n")
        shell.until_seen(LINE)
        run.until_stepping()
        run.until(lambda job: job.highest > 200, "some training")
        run.end()
        shell.until(lambda text: text.rstrip().endswith("prompt>"), "the prompt")
        assert "starting it again" not in "\n".join(shell.all_lines)
        assert "finished" in "\n".join(shell.all_lines)
