"""Writes how the job fares into the tracker that a script uses: `holdfast.track`.

A thread of its own on rank 0 asks the coordinator now and then for the job's account and passes it on
as a few numbers. The step that they are written at is the job's highest finished step, which never
goes back, so that curves stay monotone although a restart takes steps again. Whatever goes wrong here
(a tracker that was closed, a coordinator that is restarting, a round that ended) is printed once and
never raised: the script does not depend on its tracking.

W&B counts the rows of a run itself and refuses to go back. The numbers are added to the row that the
script is about to write, and only become a row of their own if the script wrote none since.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from holdfast.errors import FencedError, HoldfastError
from holdfast.messages.requests import JobAccount, ReadAccount
from holdfast.worker import runtime
from holdfast.worker.requests import RequestClient

EVERY_S: Final = 30.0
LEAST_S: Final = 1.0
PATIENCE_S: Final = 60.0
GIVE_UP_AFTER: Final = 5
"""Failures in a row after which a tracker is left alone."""

Write = Callable[[Mapping[str, float], int], object]
"""Writes numbers by name, at a step."""


def numbers(account: JobAccount) -> dict[str, float]:
    """Return what is tracked of an account, by name."""
    total = sum(account.seconds.values())
    found: dict[str, float] = {
        "holdfast/goodput": account.seconds.get("productive", 0.0) / total if total else 0.0,
        "holdfast/incidents": account.incidents,
        "holdfast/restarts": account.restarts,
        "holdfast/world_size": account.world_size,
    }
    if account.steps_per_s is not None:
        found["holdfast/steps_per_s"] = account.steps_per_s
    if account.samples_per_s is not None:
        found["holdfast/samples_per_s"] = account.samples_per_s
    if account.loss is not None:
        found["holdfast/loss"] = float(account.loss)
    for cause, seconds in account.seconds.items():
        if cause != "productive":
            found[f"holdfast/lost_rank_seconds/{cause}"] = seconds
    return found


# ---- trackers ----


def writing_to(tracker: Any) -> Write | None:
    """Return how to write to a tracker: the given one, or the one that is in use; None if unknown."""
    module = getattr(type(tracker), "__module__", "").partition(".")[0]
    name = getattr(tracker, "__name__", "")  # Of a module that was given in place of its run.
    if tracker is None or name in ("wandb", "mlflow"):
        return _in_use(name)
    if hasattr(tracker, "add_scalar"):
        return _tensorboard(tracker)
    if module == "wandb":
        return WandbRows(tracker).write
    if module == "mlflow":
        return _mlflow(tracker)
    if hasattr(tracker, "log_metrics"):  # Loggers of Lightning.
        return lambda found, step: tracker.log_metrics(dict(found), step)
    return tracker if callable(tracker) else None


def _in_use(name: str) -> Write | None:
    """Find a run that the script has begun; TensorBoard's writers are not known anywhere."""
    wandb, mlflow = sys.modules.get("wandb"), sys.modules.get("mlflow")
    if name != "mlflow" and getattr(wandb, "run", None) is not None:
        return WandbRows(wandb.run).write  # type: ignore[union-attr]
    if name != "wandb" and mlflow is not None and hasattr(mlflow, "active_run"):
        run = mlflow.active_run()
        return None if run is None else _mlflow(run)
    return None


def _tensorboard(writer: Any) -> Write:
    def write(found: Mapping[str, float], step: int) -> None:
        for name, value in found.items():
            writer.add_scalar(name, value, step)

    return write


def _mlflow(run: Any) -> Write:
    # The active run belongs to the thread that began it; this one has to name it.
    import mlflow

    def write(found: Mapping[str, float], step: int) -> None:
        mlflow.log_metrics(dict(found), step=step, run_id=run.info.run_id)

    return write


class WandbRows:
    """Adds numbers to the rows of a run of W&B."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._row: int | None = None
        run.define_metric("holdfast/step", hidden=True)
        run.define_metric("holdfast/*", step_metric="holdfast/step")

    def write(self, found: Mapping[str, float], step: int) -> None:
        alone = self._run.step == self._row
        self._run.log({**found, "holdfast/step": step}, commit=alone)
        self._row = self._run.step


# ---- tracking ----


class Tracking:
    """The thread that tracks."""

    def __init__(self, requests: RequestClient, write: Write, every_s: float) -> None:
        self._requests = requests
        self._write = write
        self._every_s = every_s
        self._step = 0
        self._failures = 0
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="holdfast-track", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set() and self._failures < GIVE_UP_AFTER:
            try:
                self.track_once()
                self._failures = 0
            except FencedError:
                pass  # The next round may be this process's too.
            except Exception as error:  # A user's tracker may raise anything; the script goes on.
                self._failed(error)
            self._ended.wait(self._every_s)

    def track_once(self) -> None:
        """Ask how the job fares, and write it down."""
        account = self._requests.ask(ReadAccount(), PATIENCE_S)
        assert isinstance(account, JobAccount)
        self._step = max(self._step, account.step)
        if not self._ended.is_set():
            self._write(numbers(account), self._step)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1 and not isinstance(error, HoldfastError):
            say(f"could not write: {type(error).__name__}: {error}; the script goes on")
        if self._failures == GIVE_UP_AFTER:
            say(f"gave up after {GIVE_UP_AFTER} failures in a row; the newest: {error}")


def begin(tracker: Any, every: float, first: bool) -> None:
    """Track with this tracker from now on, in place of an earlier one; only the first rank does."""
    worker = runtime.current()
    if worker is None:
        if first:
            say("nothing to track: the script was not started with `holdfast run`")
        return
    if worker.tracking is not None:
        worker.tracking.end()
        worker.tracking = None
    if not first:
        return
    try:
        write = writing_to(tracker)
        every_s = max(LEAST_S, float(every))
    except Exception as error:  # Tracking must not cost anybody the script.
        say(f"nothing is tracked: {type(error).__name__}: {error}")
        return
    if write is None:
        wanted = "a SummaryWriter, a run of MLflow or W&B, or a function of numbers and step"
        found = "no run is active" if tracker is None else f"{type(tracker).__name__} is none"
        say(f"nothing is tracked: {found}; give it {wanted}")
        return
    worker.tracking = Tracking(worker.requests, write, every_s)


def say(text: str) -> None:
    print(f"[holdfast] holdfast.track: {text}", file=sys.stderr, flush=True)
