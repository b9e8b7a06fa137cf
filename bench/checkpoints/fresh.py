"""Functions that are called in a process of their own.

A measure must not find what an earlier one left: warm memory, threads, a half-used allocator. So each
runs in a fresh process, and so does whatever a measure wants to see as it is after a restart. What a
function gets and what it returns are plain values, sent as JSON; what it prints goes to its caller's
standard error.

    python -m checkpoints.fresh MODULE:FUNCTION ARGUMENTS
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from harness import processes

BENCH = Path(__file__).resolve().parent.parent
LIMIT_S = 600.0


class TaskError(RuntimeError):
    """A task ended without a result."""


def call(task: str, *args: Any, limit_s: float = LIMIT_S, log: IO[bytes] | None = None) -> Any:
    """What the function returns."""
    process = _spawn(task, args, log)
    try:
        answer, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise TaskError(f"{task} took longer than {limit_s:g} s") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0 or not answer:
        raise TaskError(f"{task} ended with {process.returncode}")
    return json.loads(answer)


@contextmanager
def serving(task: str, *args: Any) -> Iterator[Any]:
    """A function that is a generator: what it yields first; it goes on when this is left."""
    process = _spawn(task, args, None)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        answer = process.stdout.readline()
        if not answer:
            raise TaskError(f"{task} ended with {process.wait()}")
        yield json.loads(answer)
    finally:
        process.stdin.close()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _spawn(task: str, args: tuple[Any, ...], log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    paths = [str(BENCH), str(BENCH.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", "checkpoints.fresh", task, json.dumps(args)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        preexec_fn=processes.die_with_parent,
    )


def main() -> None:
    answers = os.dup(1)  # Nothing that is printed shall get between them.
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(":")
    found = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    if isinstance(found, Iterator):
        os.write(answers, f"{json.dumps(next(found))}\n".encode())
        sys.stdin.read()
        next(found, None)
    else:
        whole = json.dumps(found).encode()
        while whole:
            whole = whole[os.write(answers, whole) :]


if __name__ == "__main__":
    main()
