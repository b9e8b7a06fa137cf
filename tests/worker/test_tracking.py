"""`holdfast.track` writes into real trackers, with steps that never go back, and never raises."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import FencedError, RequestError
from holdfast.messages.requests import JobAccount
from holdfast.messages.units import StepNumber
from holdfast.worker import tracking


def account(step: int, incidents: int = 0, **more: Any) -> JobAccount:
    fields = {"steps_per_s": 4.0, "samples_per_s": None, "world_size": 2, **more}
    seconds = {"productive": 90.0, "redo": 4.0, "detect": 6.0}
    return JobAccount(
        step=StepNumber(step),
        seconds=seconds,
        restarts=incidents,
        incidents=incidents,
        **fields,
    )


class Coordinator:
    """Answers with these accounts, or raises them; then the script ends."""

    def __init__(self, *answers: JobAccount | Exception) -> None:
        self._answers = list(answers)
        self.asked_all = threading.Event()

    def ask(self, request: object, patience_s: float) -> JobAccount:
        if not self._answers:
            self.asked_all.set()
            raise FencedError("the script has ended")
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def track(write: tracking.Write, *answers: JobAccount | Exception) -> None:
    coordinator = Coordinator(*answers)
    running = tracking.Tracking(coordinator, write, every_s=0.01)  # type: ignore[arg-type]
    assert coordinator.asked_all.wait(60)
    running.end()


RESTARTED = (account(10), account(20), account(18, incidents=1), account(30, incidents=1))
"""A coordinator that lost its journal's end may know less than before."""


def test_steps_never_go_back() -> None:
    steps: list[int] = []
    track(lambda found, step: steps.append(step), *RESTARTED)
    assert steps == [10, 20, 20, 30]


def test_a_round_that_ends_and_a_coordinator_that_is_away_only_cost_a_point() -> None:
    found: list[int] = []
    away = RequestError("the agent of this worker does not answer any more")
    track(lambda _, step: found.append(step), account(1), FencedError("over"), away, account(2))
    assert found == [1, 2]


def test_a_tracker_that_always_raises_is_left_alone_after_a_while(capfd) -> None:
    calls = []

    def write(found: object, step: int) -> None:
        calls.append(step)
        raise OSError("no space left on device")

    answers = [account(i) for i in range(tracking.GIVE_UP_AFTER + 3)]
    coordinator = Coordinator(*answers)
    running = tracking.Tracking(coordinator, write, every_s=0.0)  # type: ignore[arg-type]
    for thread in threading.enumerate():
        if thread.name == "holdfast-track":
            thread.join(60)
    running.end()
    assert len(calls) == tracking.GIVE_UP_AFTER
    said = capfd.readouterr().err
    assert "no space left on device; the script goes on" in said
    assert "gave up after" in said


def test_outside_holdfast_run_it_says_so_in_one_line(capfd, monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    holdfast.track(object(), every=0.1)
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "not started with `holdfast run`" in said
    monkeypatch.setenv("RANK", "3")
    holdfast.track()
    assert capfd.readouterr().err == ""


class Worker:
    """The runtime of a worker, as far as tracking needs it."""

    def __init__(self) -> None:
        self.tracking: tracking.Tracking | None = None
        self.requests = Coordinator(account(1))


@pytest.fixture
def worker(monkeypatch) -> Iterator[Worker]:
    made = Worker()
    monkeypatch.setattr("holdfast.worker.runtime.current", lambda: made)
    yield made
    if made.tracking is not None:
        made.tracking.end()


@pytest.mark.parametrize("tracker", [object(), 5, "runs"])
def test_what_is_no_tracker_is_named_and_not_raised(worker, capfd, tracker) -> None:
    holdfast.track(tracker)
    assert f"nothing is tracked: {type(tracker).__name__} is none" in capfd.readouterr().err
    assert worker.tracking is None


def test_a_later_call_replaces_the_tracker(worker) -> None:
    holdfast.track(lambda found, step: None)
    first = worker.tracking
    holdfast.track(lambda found, step: None)
    assert first is not None
    assert first._ended.is_set()
    assert worker.tracking is not first


# ---- real trackers ----


def test_tensorboard_has_each_number_at_its_step(tmp_path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip(
        "tensorboard", reason="tensorboard is not installed: pip install tensorboard"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        write = tracking.writing_to(writer)
        assert write is not None
        track(write, *RESTARTED)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in read.Scalars("holdfast/goodput")] == [10, 20, 20, 30]
    assert [event.value for event in read.Scalars("holdfast/incidents")] == [0, 0, 1, 1]
    assert read.Scalars("holdfast/goodput")[0].value == pytest.approx(0.9)
    assert read.Scalars("holdfast/lost_rank_seconds/detect")[0].value == 6.0


def test_mlflow_has_them_in_the_run_that_another_thread_began(tmp_path, monkeypatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    with mlflow.start_run() as run:
        for given in (run, None, mlflow):
            assert tracking.writing_to(given) is not None
        write = tracking.writing_to(None)
        assert write is not None
        track(write, *RESTARTED)
    history = mlflow.tracking.MlflowClient().get_metric_history(
        run.info.run_id, "holdfast/restarts"
    )
    assert [(point.step, point.value) for point in history] == [(10, 0), (20, 0), (20, 1), (30, 1)]


def offline_run(folder: Any) -> Any:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    return wandb.init(mode="offline", dir=str(folder), project="test", settings=settings)


def records(data: bytes) -> Iterator[bytes]:
    """The records of a transaction log: LevelDB's format, after seven bytes of W&B's own."""
    block, head, position, parts = 32768, 7, 7, b""
    while position + head <= len(data):
        if block - position % block < head:
            position += block - position % block
            continue
        size, kind = struct.unpack("<xxxxHB", data[position : position + head])
        parts += data[position + head : position + head + size]
        position += head + size
        if kind in (1, 4):  # Whole, or the last part.
            yield parts
            parts = b""


def rows(run: Any) -> list[dict[str, Any]]:
    """The rows of an offline run that is finished; its service writes them a moment later."""
    from wandb.proto import wandb_internal_pb2

    file, deadline = Path(run.settings.sync_file), time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [wandb_internal_pb2.Record.FromString(data) for data in records(file.read_bytes())]
        if any(record.HasField("exit") for record in found):
            break
        time.sleep(0.05)
    histories = [record.history.item for record in found if record.HasField("history")]
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        for items in histories
    ]


def written(run: Any, work: Callable[[tracking.Write], None]) -> list[dict[str, Any]]:
    write = tracking.writing_to(run)
    assert write is not None
    work(write)
    run.finish()
    return rows(run)


def test_wandb_has_them_in_the_scripts_own_rows(tmp_path) -> None:
    run = offline_run(tmp_path)

    def work(write: tracking.Write) -> None:
        for step in range(1, 4):
            run.log({"loss": 1.0 / step}, step=step)
            write(tracking.numbers(account(step)), step)
            run.log({"accuracy": step}, step=step)

    found = written(run, work)
    assert [row["loss"] for row in found if "loss" in row] == [1.0, 0.5, 1 / 3], "none was dropped"
    assert [row["accuracy"] for row in found if "accuracy" in row] == [1, 2, 3]
    assert [row["holdfast/step"] for row in found if "holdfast/step" in row] == [1, 2, 3]


def test_wandb_has_them_also_if_the_script_writes_nothing(tmp_path) -> None:
    run = offline_run(tmp_path)

    def work(write: tracking.Write) -> None:
        for step in range(1, 6):
            write(tracking.numbers(account(step)), step)

    steps = [row["holdfast/step"] for row in written(run, work) if "holdfast/step" in row]
    assert steps == sorted(set(steps))
    assert len(steps) >= 4
    assert steps[-1] == 5
