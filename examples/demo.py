"""Runs the demonstration of `make demo`: trains on two CPU ranks, kills one, stops one, and recovers.

It uses only commands that every user has: it finds the pids of the ranks with `holdfast status --json`
and sends them signals.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

STEPS = 2600
KILL_AT = 800
STOP_AT = 1600
LIMIT_S = 120


def holdfast(*words: str) -> list[str]:
    return [sys.executable, "-m", "holdfast", *words]


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def status() -> dict[str, Any]:
    asked = subprocess.run(holdfast("status", "demo", "--json"), capture_output=True, text=True)
    content: dict[str, Any] = json.loads(asked.stdout) if asked.returncode == 0 else {}
    return content


def pid_of(rank: int, at_step: int) -> int:
    """Wait until training has reached a step, and return the pid of a rank."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        now = status()
        if now.get("state") == "ended":
            break
        if now.get("step", 0) >= at_step:
            ranks = [r for node in now["nodes"] for r in node["ranks"]]
            return int(next(r["pid"] for r in ranks if r["rank"] == rank))
        time.sleep(0.1)
    raise SystemExit(f"the demo job did not reach step {at_step}")


def inject_faults() -> None:
    pid = pid_of(1, KILL_AT)
    say(f"kill -9 {pid}       # rank 1, in the middle of training")
    os.kill(pid, signal.SIGKILL)
    pid = pid_of(0, STOP_AT)
    say(f"kill -STOP {pid}    # rank 0: it hangs")
    os.kill(pid, signal.SIGSTOP)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as home:
        os.environ["HOLDFAST_HOME"] = home
        script = str(Path(__file__).with_name("snapshots.py"))
        arguments = ["--steps", str(STEPS), "--checkpoints", os.path.join(home, "checkpoints")]
        say("holdfast run --nproc-per-node 2 examples/snapshots.py")
        command = holdfast("run", "--nproc-per-node", "2", "--job", "demo", script, *arguments)
        job = subprocess.Popen(command)
        try:
            threading.Thread(target=inject_faults, daemon=True).start()
            code = job.wait(LIMIT_S)
        finally:
            job.terminate()
            job.wait()
        for command_name in ("incidents", "goodput"):
            say(f"holdfast {command_name}")
            subprocess.run(holdfast(command_name, "demo"), check=True)
        return code


if __name__ == "__main__":
    sys.exit(main())
