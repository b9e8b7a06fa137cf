"""What the status line costs the output of a script, in a pseudo-terminal that reads at once.

    status_line.py                   both of the below, three turns each
    status_line.py --only delay      from `print` to the terminal: a line every millisecond
    status_line.py --only flood      6 MB of lines as fast as the script can print them

Each runs the same job by turns with the line and without it (`--no-status-line`), so that the figures
of one call compare: the ratio is what counts. A line carries the time at which it was printed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

DELAY = """
import sys, time
import holdfast
for step in range(1, int(sys.argv[1]) + 1):
    holdfast.progress(step)
    print(f"stamp {time.monotonic_ns()} of a line such as scripts print", flush=True)
    time.sleep(0.001)
"""
FLOOD = """
import sys, time
import holdfast
holdfast.progress(1)
time.sleep(1.5)  # The status line is there.
line = "x" * 99 + "\\n"
print(f"stamp {time.monotonic_ns()}")
for _ in range(int(sys.argv[1])):
    sys.stdout.write(line * 100)
print("flood is over", flush=True)
"""
STAMP = re.compile(rb"stamp (\d+)")
FLOOD_BYTES = 6_000_000
"""Less than a console keeps for a terminal that is behind."""


def arrivals(script: str, argument: int, line: bool) -> tuple[list[tuple[bytes, int]], bytes]:
    """What the terminal was given, each piece with its time; and all of it."""
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "train.py").write_text(script)
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        flags = [] if line else ["--no-status-line"]
        command = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node", "1", *flags]
        job = subprocess.Popen(
            [*command, "train.py", str(argument)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=home,
            env={**os.environ, "HOLDFAST_HOME": home, "TERM": "xterm"},
            start_new_session=True,
        )
        os.close(slave)
        pieces = []
        while True:
            try:
                select.select([master], [], [])
                data = os.read(master, 1 << 16)
            except OSError:
                break
            pieces.append((data, time.monotonic_ns()))
        os.close(master)
        job.wait()
    shown = b"".join(data for data, _ in pieces)
    assert (b"holdfast: step" in shown) is line, "the line is not there, or should not be"
    return pieces, shown


def delays_ms(line: bool, lines: int) -> list[float]:
    """How long each line took from the script to the terminal."""
    pieces, _ = arrivals(DELAY, lines, line)
    rest, found = b"", []
    for data, at in pieces:
        *whole, rest = (rest + data).split(b"\n")
        for one in whole:
            if (stamp := STAMP.search(one)) is not None:
                found.append((at - int(stamp[1])) / 1e6)
    assert len(found) == lines
    return sorted(found)[: len(found) - len(found) // 1000]


def flood_s(line: bool) -> float:
    """How long it took until the terminal had shown all of a flood."""
    pieces, shown = arrivals(FLOOD, FLOOD_BYTES // 10_000, line)
    stamp = STAMP.search(shown)
    assert stamp is not None
    rest = b""
    for data, at in pieces:
        rest = rest[-100:] + data
        if b"flood is over" in rest:
            return (at - int(stamp[1])) / 1e9
    raise AssertionError("the flood is not over")


def delay(turns: int) -> None:
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    for _ in range(turns):
        for line in (False, True):
            found[line].append(delays_ms(line, lines=3000))
    medians = {}
    for line, name in ((False, "without"), (True, "with")):
        medians[line] = statistics.median(one[len(one) // 2] for one in found[line])
        late = statistics.median(one[len(one) * 99 // 100] for one in found[line])
        print(f"{name} the line: {medians[line]:.3f} ms (median), {late:.3f} ms (99 %)")
    print(f"delay of a line: {medians[True] / medians[False]:.2f} times")


def flood(turns: int) -> None:
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(turns):
        for line in (False, True):
            found[line].append(flood_s(line))
    took = {line: statistics.median(some) for line, some in found.items()}
    for line, name in ((False, "without"), (True, "with")):
        print(f"{name} the line: {FLOOD_BYTES / 1e6 / took[line]:.1f} MB/s")
    print(f"a flood takes {took[True] / took[False]:.2f} times as long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("delay", "flood"))
    parser.add_argument("--turns", type=int, default=3)
    parsed = parser.parse_args()
    for name, measure in (("delay", delay), ("flood", flood)):
        if parsed.only in (None, name):
            measure(parsed.turns)


if __name__ == "__main__":
    main()
