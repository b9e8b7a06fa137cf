"""`holdfast run` does what `torchrun` does, wherever docs/torchrun.md says "same"."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from .harness import Run, wait_for

# ---- signals -----------------------------------------------------------------------------------

TAKE_SIGNALS = """
    import os, signal, sys, time
    rank = os.environ["RANK"]

    def note(number, frame):
        print("got", signal.Signals(number).name, flush=True)
        with open(f"got_{rank}", "a") as file:
            file.write(signal.Signals(number).name + " ")
        if "stay" not in sys.argv:
            sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, note)
    open(f"ready_{rank}", "w").close()
    while True:
        time.sleep(60)
"""


def until_ready(run: Run, count: int = 2) -> None:
    wait_for(lambda: len(list(run.folder.glob("ready_*"))) == count, "the ranks' handlers")


def got(folder: Path) -> list[str]:
    return [path.read_text().strip() for path in sorted(folder.glob("got_*"))]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_the_ranks_get_the_signal_that_was_sent(run: Run, name: str) -> None:
    flags = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGUSR1", "--standby", "0"]
    run.train(*flags, script=TAKE_SIGNALS)
    until_ready(run)
    run.kill(run.pid, signal.Signals[name])
    assert run.code() == (1 if name == "SIGINT" else 75)
    assert got(run.folder) == [name, name]


def test_a_rank_that_stays_is_killed_after_the_shutdown_timeout(run: Run) -> None:
    run.train("--shutdown-timeout", "1", "--standby", "0", script=TAKE_SIGNALS, args=["stay"])
    until_ready(run)
    began = time.monotonic()
    run.kill(run.pid, signal.SIGINT)
    assert run.code() == 1
    assert time.monotonic() - began >= 1
    assert got(run.folder) == ["SIGINT", "SIGINT"]


def test_the_training_within_a_command_gets_the_signal_too(run: Run) -> None:
    script = run.write(TAKE_SIGNALS)
    shell = f"trap : TERM; {sys.executable} {script} & wait; wait"
    run.start("--no-python", "sh", "-c", shell)
    until_ready(run)
    run.kill(run.pid, signal.SIGTERM)
    assert run.code() == 75
    assert got(run.folder) == ["SIGTERM", "SIGTERM"]


def test_a_script_that_is_interrupted_ends_with_a_keyboard_interrupt(run: Run) -> None:
    script = "open('ready_0', 'w').close(); import time; time.sleep(600)"
    run.train("--standby", "0", script=script, nproc=1)
    until_ready(run, 1)
    run.kill(run.pid, signal.SIGINT)
    assert run.code() == 1
    assert run.log(0).endswith(b"KeyboardInterrupt\n")


# ---- addresses ---------------------------------------------------------------------------------


def test_the_ranks_get_the_masters_address_as_it_was_given(run: Run) -> None:
    with socket.create_server(("", 0)) as free:
        port = str(free.getsockname()[1])
    script = "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
    flags = ["--master-addr", socket.gethostname(), "--master-port", port, "--standby", "0"]
    run.train(*flags, script=script, nproc=1)
    assert run.code() == 0
    assert run.log(0).decode().split() == [socket.gethostname(), port]


# ---- the launcher's own error file -------------------------------------------------------------


def test_the_launchers_error_file_says_which_error_ended_the_job(run: Run) -> None:
    run.train("--standby", "0", script="1 / 0", nproc=1, env={"TORCHELASTIC_ERROR_FILE": "why"})
    assert run.code() == 1
    message = json.loads((run.folder / "why").read_text())["message"]
    assert message["message"] == "ZeroDivisionError: division by zero"
    assert message["errorCode"] == 1
    assert "ZeroDivisionError" in message["extraInfo"]["py_callstack"]


# ---- timers ------------------------------------------------------------------------------------

LATE = """
    import json, os, time

    def timer(after_s, scope):
        at = time.time() + after_s if after_s else -1
        request = dict(pid=os.getpid(), scope_id=scope, expiration_time=at, signal=9, version=1)
        return json.dumps(request) + chr(10)

    def say(*timers):
        with open(os.environ["TORCHELASTIC_TIMER_FILE"], "w") as pipe:
            pipe.write("".join(timers))  # At once: they are read together, however late.

    say(timer(0.1, "in time"), timer(0, "in time"))
    time.sleep(0.3)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        say(timer(0.1, "too long"))
        time.sleep(600)
    with open("served", "w") as file:
        file.write(os.environ["TORCHELASTIC_TIMER_FILE"])
"""
"""Says what torch's client says, without its imports."""


def test_a_rank_that_misses_its_timer_is_killed_and_comes_back(run: Run) -> None:
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TMPDIR": str(run.folder)}
    run.train("--standby", "0", "--max-restarts", "1", script=LATE, nproc=1, env=env)
    assert run.code() == 0
    assert run.err.count("did not leave") == run.err.count("did not leave too long in time") == 1
    pipe = Path((run.folder / "served").read_text())
    assert pipe.parent == run.folder
    assert not pipe.exists()


# ---- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["script", "command"])
def test_a_local_rank_in_the_arguments_is_replaced(run: Run, how: str) -> None:
    script = "import sys; print(*sys.argv[1:])"
    words = ["a${local_rank}b", "$local_rank", "$HOME", "$$", "100%"]
    if how == "command":
        run.start("--no-python", sys.executable, run.write(script), *words)
    else:
        run.train("--standby", "0", script=script, args=words)
    assert run.code() == 0
    assert [run.log(rank) for rank in (0, 1)] == [b"a0b 0 $HOME $ 100%\n", b"a1b 1 $HOME $ 100%\n"]
