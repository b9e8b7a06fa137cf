"""What a script may say about itself, and ask of the coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, NotUnderHoldfast
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE
from holdfast.messages.requests import (
    AwaitStragglers,
    CastVote,
    ExcludeNode,
    JoinBarrier,
    StopJob,
    StragglersFound,
)
from holdfast.messages.requests import Tally as Tally
from holdfast.messages.timings import Finding
from holdfast.worker import runtime
from holdfast.worker.requests import SLACK_S

if TYPE_CHECKING:
    from holdfast.worker.torch_store import CoordinatorStore


def progress(step: int) -> None:
    """Say that training step `step` (counted from 1 over the whole job) is finished.

    From the first call on, the script's own count is used instead of the optimizer's.
    """
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise TypeError(f"holdfast.progress: a step is a whole number from 0 on, not {step!r}")
    worker = runtime.current()
    if worker is not None:
        worker.stepped(step)


@contextmanager
def section(name: str) -> Iterator[None]:
    """Mark a stretch of the script: how long it may take is learnt apart from the rest, and its speed
    is compared between ranks. "checkpoint" and "restore" are booked as such by the ledger.

    Sections nest and overlap, and may be entered by any thread.
    """
    worker = runtime.current()
    if worker is None:
        yield
        return
    with worker.section(name):
        yield


def heartbeat() -> None:
    """Say that the script is well, where it does something long that is no training step."""
    worker = runtime.current()
    if worker is not None:
        worker.heartbeat()


def on_straggler(callback: Callable[[Finding], object]) -> None:
    """Have a function called, in a thread of its own, when a rank becomes slow or is not any more.

    It gets a finding: rank, kind ("relative" to the best rank, or "individual": to its own best),
    began or ended, score, and the section where it loses most. Every rank that asks is told.
    """
    asking = _worker("on_straggler").requests

    def listen() -> None:
        after = 0
        while True:
            try:
                answer = asking.ask(AwaitStragglers(after=after), None)
            except HoldfastError:
                return  # The round is over, and with it this process.
            assert isinstance(answer, StragglersFound)
            after = answer.total
            for finding in answer.findings:
                callback(finding)

    threading.Thread(target=listen, name="holdfast-stragglers", daemon=True).start()


def store() -> CoordinatorStore:
    """A `torch.distributed.Store` on the coordinator, shared by all ranks of the round.

    Its keys end with the round: after a restart everybody begins with none. It outlives a rank and
    a coordinator that dies. For addresses and small agreements: a value has at most 512 KiB.
    """
    worker = _worker("store")
    if worker.store is None:
        from holdfast.worker.torch_store import CoordinatorStore  # This imports torch.

        worker.store = CoordinatorStore(worker.requests)
    return worker.store


def barrier(name: str = "", timeout_s: float | None = None) -> None:
    """Wait until every rank of the round has come to the barrier of that name.

    A rank that ended with 0 is not waited for. When a rank dies the round is over, and so is the
    wait: `FencedError`, if this process lives to see it. A name may be used again at once.
    """
    request = JoinBarrier(name=name or "barrier", timeout_s=timeout_s)
    _worker("barrier").requests.ask(request, _patience_s(timeout_s))


def vote(name: str, value: bool | int | str, timeout_s: float | None = None) -> Tally:
    """Vote, wait until every rank of the round has, and see how the vote went.

    All ranks get the same tally: `tally.all_yes`, `tally.unanimous`, `tally.count(value)`.
    """
    request = CastVote(name=name, ballot=value, timeout_s=timeout_s)
    answer = _worker("vote").requests.ask(request, _patience_s(timeout_s))
    assert isinstance(answer, Tally)
    return answer


def exclude_this_node(reason: str) -> None:
    """Say that this node is not fit to train: the job goes on without it and its host.

    Returns when the agent has passed it on; a moment later all ranks are stopped, and the others
    start again in a new round.
    """
    _worker("exclude_this_node").requests.ask(ExcludeNode(reason=reason))


def stop_job(reason: str, code: int = EXIT_DO_NOT_REQUEUE) -> None:
    """End the whole job, on all nodes, with that exit code and reason.

    Returns when the agent has passed it on; a moment later all ranks are stopped.
    """
    _worker("stop_job").requests.ask(StopJob(reason=reason, code=code))


def _worker(what: str) -> runtime.Runtime:
    worker = runtime.current()
    if worker is None:
        raise NotUnderHoldfast(
            f"holdfast.{what}() needs the coordinator of a job: start the script with `holdfast run`"
        )
    return worker


def _patience_s(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else timeout_s + SLACK_S
