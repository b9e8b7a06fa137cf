"""Implements the functions of the `holdfast` module that scripts and frameworks call.

In a process that `holdfast run` did not start, functions that only report do nothing, those that
describe the process use torchrun's environment variables, and those that need the coordinator raise
`NotUnderHoldfast`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, SupportsFloat

from msgspec import Struct

from holdfast.errors import HoldfastError, NotUnderHoldfast, UsageError
from holdfast.messages import requests as messages
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE
from holdfast.messages.requests import Tally
from holdfast.messages.timings import Finding
from holdfast.worker import runtime, told_losses
from holdfast.worker.requests import SLACK_S

if TYPE_CHECKING:
    from holdfast.worker.torch_store import CoordinatorStore


class RankInfo(Struct, frozen=True, kw_only=True):
    """The place of one process in its job."""

    rank: int
    """Global rank, from 0 to `world_size` - 1."""
    local_rank: int
    """Rank within the node, from 0; always 0 under `--virtual-local-rank`."""
    world_size: int
    """Number of ranks in the round."""
    local_world_size: int
    """Number of ranks on this node."""
    node_rank: int
    """Rank of this node, from 0 to `node_count` - 1; torchrun's GROUP_RANK."""
    node_count: int
    """Number of nodes in the round."""
    round: int
    """Number of the round, from 1; 0 outside `holdfast run`."""
    restarts: int
    """How often the job had restarted its ranks when this process started."""
    run_id: str
    """Job name, or `--rdzv-id` where that was given; empty if the launcher set none."""
    active: bool
    """Whether this process is a worker of `holdfast run`."""


def is_active() -> bool:
    """Return whether this process is a worker of `holdfast run`, and not forked from one."""
    worker = runtime.current()
    return worker is not None and worker.pid == os.getpid()


def round() -> int:
    """Return the number of the current round, from 1; 0 outside `holdfast run`.

    It grows with every restart and every change of membership: a fencing token for whatever must not
    outlive a restart.
    """
    worker = runtime.current()
    return 0 if worker is None else worker.round


def restarts() -> int:
    """Return how often the job had restarted its ranks when this process started.

    It is torchrun's TORCHELASTIC_RESTART_COUNT, so it is also right under torchrun; 0 without either.
    """
    return _variable("TORCHELASTIC_RESTART_COUNT", 0)


def rank_info() -> RankInfo:
    """Return the rank, the world and the round of this process.

    Ranks and sizes come from torchrun's environment variables, which `holdfast run` sets too. Without
    any launcher the process is rank 0 of 1.
    """
    world_size = _variable("WORLD_SIZE", 1)
    return RankInfo(
        rank=_variable("RANK", 0),
        local_rank=_variable("LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=_variable("LOCAL_WORLD_SIZE", world_size),
        node_rank=_variable("GROUP_RANK", 0),
        node_count=_variable("GROUP_WORLD_SIZE", 1),
        round=round(),
        restarts=restarts(),
        run_id=os.environ.get("TORCHELASTIC_RUN_ID", ""),
        active=is_active(),
    )


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UsageError(f"{name}={text}: the launcher must set it to an integer") from None


def progress(step: int | None = None, loss: SupportsFloat | None = None) -> None:
    """Report a finished training step, its loss, or both. Outside `holdfast run` this does nothing.

    `step` is its number, counted from 1 over the whole job. From the first call with a step on, the
    script's own count replaces the count of optimizer steps; most scripts need no such call. Without a
    step, the loss is that of the last step that was counted, and the count stays as it is.

    `loss` is a number, or a tensor of one element; anything else raises TypeError. Pass the tensor, not
    `loss.item()`, which would wait for the GPU: one on a GPU is copied beside the training, once a
    second at most, and shown a step or more later. NaN and infinity are shown as such. Every rank may
    tell its loss; the job's is that of the lowest rank that tells one.
    """
    if step is None:
        if loss is None:
            raise TypeError("holdfast.progress: give it a step, a loss, or both")
    elif not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise TypeError(f"holdfast.progress: step must be an integer from 0 on, not {step!r}")
    told = None if loss is None else told_losses.checked(loss)
    worker = runtime.current()
    if worker is None:
        return
    if step is None:
        worker.tell_loss(told)
    else:
        worker.stepped(step, told)


@contextmanager
def section(name: str) -> Iterator[None]:
    """Mark part of the script as a section. Outside `holdfast run` this does nothing.

    A section of each `name` has a hang deadline that is learnt separately, and its speed is compared
    between ranks. The ledger books "checkpoint", "restore" and "evaluation" under causes of their own.
    Sections may nest and overlap, and any thread may enter one.
    """
    worker = runtime.current()
    if worker is None:
        yield
        return
    with worker.section(name):
        yield


def evaluating() -> AbstractContextManager[None]:
    """Mark part of the script as an evaluation. Outside `holdfast run` this does nothing.

    It is the section "evaluation": the ledger books its time under that cause, and neither its time nor
    the records that a loader of `holdfast.data` delivers in it count for the job's speed.
    """
    return section(runtime.EVALUATION)


def heartbeat() -> None:
    """Report that the script makes progress during long work that is no training step.

    It restarts the hang deadline of the current phase. Outside `holdfast run` this does nothing.
    """
    worker = runtime.current()
    if worker is not None:
        worker.heartbeat()


def on_straggler(callback: Callable[[Finding], object]) -> None:
    """Call `callback` with a `Finding` whenever a rank becomes a straggler or ceases to be one.

    It runs in a thread of its own, on every rank that registered one, until the round ends. Raises
    `NotUnderHoldfast` outside `holdfast run`.
    """
    requests = _worker("on_straggler").requests

    def listen() -> None:
        after = 0
        while True:
            try:
                answer = requests.ask(messages.AwaitStragglers(after=after), None)
            except HoldfastError:
                return  # The round is over, and with it this process.
            assert isinstance(answer, messages.StragglersFound)
            after = answer.total
            for finding in answer.findings:
                callback(finding)

    threading.Thread(target=listen, name="holdfast-stragglers", daemon=True).start()


def store() -> CoordinatorStore:
    """Return a `torch.distributed.Store` on the coordinator, shared by all ranks of the round.

    Its keys end with the round: after a restart the store is empty. It survives the death of a rank
    and of the coordinator. It is meant for addresses and small agreements: a value has at most 512
    KiB. Raises `NotUnderHoldfast` outside `holdfast run`.
    """
    worker = _worker("store")
    if worker.store is None:
        from holdfast.worker.torch_store import CoordinatorStore  # This imports torch.

        worker.store = CoordinatorStore(worker.requests)
    return worker.store


def barrier(name: str = "", timeout_s: float | None = None) -> None:
    """Wait until every rank of the round has reached the barrier called `name`.

    Ranks that have exited with 0 count as present. When a rank dies the round ends, and the call
    raises `FencedError` if this process lives to see it. A name may be used again at once. After
    `timeout_s` seconds the call raises `RequestTimeout`; None waits for as long as the round lasts.
    Raises `NotUnderHoldfast` outside `holdfast run`.
    """
    request = messages.JoinBarrier(name=name or "barrier", timeout_s=timeout_s)
    _worker("barrier").requests.ask(request, _patience_s(timeout_s))


def vote(name: str, value: bool | int | str, timeout_s: float | None = None) -> Tally:
    """Cast `value` in the vote called `name`, wait for every rank's vote, and return the tally.

    All ranks get the same tally: `tally.all_yes`, `tally.unanimous`, `tally.count(value)`. Ranks that
    have exited with 0 count as absent. After `timeout_s` seconds the call raises `RequestTimeout`;
    None waits for as long as the round lasts. Raises `NotUnderHoldfast` outside `holdfast run`.
    """
    request = messages.CastVote(name=name, ballot=value, timeout_s=timeout_s)
    answer = _worker("vote").requests.ask(request, _patience_s(timeout_s))
    assert isinstance(answer, Tally)
    return answer


def track(tracker: Any = None, every: float = 30.0) -> None:
    """Write goodput, incidents, restarts, speed and lost time into an experiment tracker.

    `tracker` is a TensorBoard `SummaryWriter`, a run of MLflow or W&B (or the module `mlflow` or
    `wandb`), a logger of Lightning, or a function that takes a dictionary of numbers and a step. None
    takes the run of W&B or MLflow that is active. Rank 0 writes, every `every` seconds, from a thread
    of its own; on all other ranks the call does nothing. The step is the highest that the job has
    finished, so it never goes back, whatever restarts. A later call replaces the tracker. Nothing is
    ever raised: what goes wrong is printed in one line, as in a script that `holdfast run` did not
    start.
    """
    from holdfast.worker import tracking

    tracking.begin(tracker, every, first=os.environ.get("RANK", "0") == "0")


def exclude_this_node(reason: str) -> None:
    """Exclude this node and its host from the job, and give `reason` in the incident.

    The call returns when the agent has passed the request on; a moment later all ranks are stopped,
    and the other nodes start again in a new round. Raises `NotUnderHoldfast` outside `holdfast run`.
    """
    _worker("exclude_this_node").requests.ask(messages.ExcludeNode(reason=reason))


def stop_job(reason: str, code: int = EXIT_DO_NOT_REQUEUE) -> None:
    """End the whole job on all nodes, with `reason` in its report and `code` as its exit code.

    The default code is 93, do not requeue. The call returns when the agent has passed the request on;
    a moment later all ranks are stopped. Raises `NotUnderHoldfast` outside `holdfast run`.
    """
    _worker("stop_job").requests.ask(messages.StopJob(reason=reason, code=code))


def scale(nodes: int | tuple[int, int], spares: int | None = None) -> None:
    """Want another number of `nodes` for this job, or a range of them, and so many `spares`.

    The call returns when the coordinator has taken it. What is missing is asked for of the platform,
    and a larger world is formed when it has come; a smaller one is formed at once: this rank is
    stopped a moment later. Raises `RequestDenied` for numbers that the job cannot have, and
    `NotUnderHoldfast` outside `holdfast run`.
    """
    fewest, most = (nodes, nodes) if isinstance(nodes, int) else nodes
    request = messages.ChangeNodes(min_nodes=fewest, max_nodes=most, spares=spares)
    _worker("scale").requests.ask(request)


def _worker(function: str) -> runtime.Runtime:
    worker = runtime.current()
    if worker is None:
        raise NotUnderHoldfast(
            f"holdfast.{function}() needs a job's coordinator: start the script with `holdfast run`"
        )
    return worker


def _patience_s(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else timeout_s + SLACK_S
