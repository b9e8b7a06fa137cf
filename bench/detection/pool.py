"""Tries side by side, each in a process of its own.

A try's process adopts what its job starts, so "everything below it" is that job's, and several can run
at once. A try that takes the whole machine runs alone. Whatever happens to a try's process, the bench
adopts and ends what it leaves behind.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

from harness import processes

Try = TypeVar("Try")
Result = TypeVar("Result")
_context = multiprocessing.get_context("fork")


def run(
    work: Callable[[Try], Result], shared: Iterable[Try], alone: Iterable[Try], jobs: int
) -> Iterator[Result]:
    """The results of all tries, as they come: first those that can share the machine."""
    yield from _run(work, list(shared), jobs)
    yield from _run(work, list(alone), 1)


def _run(work: Callable[[Try], Result], tries: list[Try], jobs: int) -> Iterator[Result]:
    waiting, running = tries[::-1], dict[Connection, BaseProcess]()
    while waiting or running:
        while waiting and len(running) < jobs:
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_work, args=(work, waiting.pop(), theirs))
            process.start()
            theirs.close()
            running[ours] = process
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            process = running.pop(ready)
            try:
                result = ready.recv()
            except EOFError:
                process.join()
                raise RuntimeError(f"a try ended with {process.exitcode} and no result") from None
            process.join()
            yield result


def _work(work: Callable[[Try], Result], one: Try, results: Connection) -> None:
    processes.die_with_parent()
    processes.adopt_orphans()
    # Ctrl-C is the bench's to answer. A handler, because a signal that is ignored stays so in the job.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        results.send(work(one))
    except Exception:
        traceback.print_exc()
        raise
    finally:
        processes.end_descendants([])
