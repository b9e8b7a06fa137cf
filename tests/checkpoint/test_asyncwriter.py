"""`AsyncWriter` does what `torch.distributed.checkpoint.async_save` does, and survives more."""

from __future__ import annotations

import inspect
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forks import Forks, disk_control
from ports import free_port

import holdfast.checkpoint
from holdfast.checkpoint import async_writer as asyncwriter
from holdfast.checkpoint.async_writer import AsyncWriter, async_save
from holdfast.checkpoint.standalone.store_meeting import StoreMeeting
from holdfast.checkpoint.state import capture
from holdfast.checkpoint.storage.backends import MANIFEST, open_storage
from holdfast.checkpoint.storage.commit import verify
from holdfast.checkpoint.storage.manifest import decoded, steps
from holdfast.errors import CheckpointError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PROMPT_S = 60.0
"""An error is told everywhere within that time, a tenth of what other ranks are waited for."""


def homes(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"holdfast-{os.getuid()}-script-{pid}-*"))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What to write there is in `forks.CUSTOMIZE`."""
    for name, value in disk_control(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "disk"


@pytest.fixture
def writer() -> Iterator[AsyncWriter]:
    with AsyncWriter(no_dist=True) as one:
        yield one


@pytest.fixture
def make_pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[AsyncWriter]]]:
    """Two ranks in one process."""
    made: list[AsyncWriter] = []

    def make(store: Any = None) -> list[AsyncWriter]:
        store = store or dist.HashStore()
        for rank in (0, 1):
            meeting = StoreMeeting(store, "test", rank, 2)
            monkeypatch.setattr(asyncwriter, "_meeting_of", lambda *_, meeting=meeting: meeting)
            made.append(AsyncWriter())
        return made

    yield make
    for one in made:
        one.close(abort=True)


@pytest.fixture
def pair(disk: Path, make_pair: Callable[..., list[AsyncWriter]]) -> list[AsyncWriter]:
    return make_pair()


@pytest.fixture(scope="module", autouse=True)
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    before = dict(os.environ)
    directory = tmp_path_factory.mktemp("forks")
    os.environ.update(disk_control(directory))
    server = Forks(directory)
    os.environ.clear()
    os.environ.update(before)
    yield server
    server.close()


def loaded(at: str | Path, like: dict[str, Any]) -> dict[str, Any]:
    """What torch reads there, into a state of the same form with nothing in it."""

    def blank(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.zeros_like(value)
        if isinstance(value, dict):
            return {key: blank(one) for key, one in value.items()}
        return [blank(one) for one in value] if isinstance(value, list) else None

    state: dict[str, Any] = blank(like)
    dcp.load(state, checkpoint_id=at)
    return state


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def files(at: Path) -> set[str]:
    return {path.name for path in at.iterdir()}


# ---- in place of torch's ----


def test_a_state_is_saved_as_torch_saves_it(tmp_path: Path) -> None:
    tied = torch.rand(300, 200)
    state = {
        "model": OrderedDict(weight=tied, head=tied, half=torch.rand(7).bfloat16()),
        "optim": {
            "state": {0: {"step": torch.tensor(3.0), "m": torch.rand(40, 50).T}},
            "param_groups": [{"lr": 0.1, "betas": [0.9, 0.99], "params": [0, 1]}],
        },
        "seen": {"ids": torch.arange(9), "name": "x", "rate": 1.5, "nothing": None},
        "words": Counter("hello"),
        "an object": Path("somewhere"),
        "empty": torch.empty(0, 3),
    }
    dcp.async_save(state, checkpoint_id=tmp_path / "torch").result()
    assert async_save(state, checkpoint_id=tmp_path / "ours").result() == str(tmp_path / "ours")
    theirs, ours = loaded(tmp_path / "torch", state), loaded(tmp_path / "ours", state)
    assert equal(ours, theirs)
    assert equal(ours["model"], dict(state["model"]))
    read = [dcp.FileSystemReader(tmp_path / who).read_metadata() for who in ("torch", "ours")]
    assert set(read[0].state_dict_metadata) == set(read[1].state_dict_metadata)
    assert read[0].planner_data == read[1].planner_data


def test_objects_with_a_state_dict_are_asked_for_it(tmp_path: Path, writer: AsyncWriter) -> None:
    model = torch.nn.Linear(3, 4)
    writer.save({"model": model}, checkpoint_id=tmp_path / "a").result()
    assert equal(loaded(tmp_path / "a", {"model": model.state_dict()})["model"], model.state_dict())


def test_the_function_takes_what_torchs_takes() -> None:
    theirs = inspect.signature(dcp.async_save).parameters
    ours = inspect.signature(async_save).parameters
    assert set(theirs) <= set(ours)
    assert holdfast.checkpoint.async_save is async_save
    assert holdfast.checkpoint.AsyncWriter is AsyncWriter


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, holdfast.checkpoint; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"planner": dcp.DefaultSavePlanner()}, "planner.*checkpoint_id="),
        ({"storage_writer": object(), "checkpoint_id": "x"}, "storage_writer.*checkpoint_id="),
        ({}, "checkpoint_id="),
        ({"checkpoint_id": "x", "use_collectives": False}, "no_dist"),
        ({"checkpoint_id": "/"}, "names no directory"),
        ({"checkpoint_id": "s3://bucket"}, "names no directory"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        async_save({"t": torch.ones(1)}, **given)


def test_a_directory_called_like_a_step_is_one_of_ours(tmp_path: Path, writer: AsyncWriter) -> None:
    writer.save({"t": torch.ones(5)}, checkpoint_id=tmp_path / "step_000000070").result()
    storage = open_storage(tmp_path)
    assert [(one.step, one.state) for one in steps(storage)] == [(70, "complete")]
    assert verify(storage, 70) == []


# ---- what is there already ----


def test_a_checkpoint_is_replaced_and_nothing_of_it_stays(
    tmp_path: Path, writer: AsyncWriter
) -> None:
    at = tmp_path / "latest"
    dcp.save({"t": torch.zeros(3)}, checkpoint_id=at)
    foreign = files(at)
    for value in (1, 2):
        writer.save({"t": torch.full((3,), value)}, checkpoint_id=at).result()
        assert torch.equal(loaded(at, {"t": torch.ones(3).long()})["t"], torch.full((3,), value))
    manifest = decoded((at / MANIFEST).read_bytes(), "")
    assert files(at) == {*foreign, MANIFEST, *(file.name for file in manifest.files)}


def test_until_it_is_complete_the_one_before_can_be_loaded(
    tmp_path: Path, disk: Path, writer: AsyncWriter
) -> None:
    state = {"t": torch.zeros(3)}
    writer.save(state, checkpoint_id=tmp_path / "a").result()
    for held in ("distcp", ".metadata"):
        disk.write_text(f"hold:{held}")
        state["t"] += 1
        future = writer.save(state, checkpoint_id=tmp_path / "a")
        time.sleep(0.2)
        assert not future.done()
        assert torch.equal(loaded(tmp_path / "a", state)["t"], state["t"] - 1)
        disk.write_text("")
        future.result()
        assert torch.equal(loaded(tmp_path / "a", state)["t"], state["t"])


# ---- copies and plans ----


class CountingStore:
    """Counts what is asked of a store by all its clones."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._store, name)

    def clone(self) -> CountingStore:
        return self


def test_a_second_save_plans_nothing_and_gathers_nothing(
    tmp_path: Path,
    make_pair: Callable[..., list[AsyncWriter]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layouts = []
    real = capture._lay_out
    monkeypatch.setattr(capture, "_lay_out", lambda *a: layouts.append(1) or real(*a))
    store = CountingStore(dist.HashStore())
    pair = make_pair(store)
    states = [{f"t{i}": torch.rand(1000) for i in range(200)} for _ in pair]
    counts = []
    keys = store.num_keys() + 2
    for number in range(3):
        store.calls.clear()
        save_on_both(pair, states, tmp_path / str(number))
        wait_until(lambda: store.num_keys() == keys)  # All that was said is gone again.
        del store.calls["num_keys"], store.calls["wait"]
        counts.append(store.calls.copy())
    assert len(layouts) == 2
    # Each rank reports that it sealed and that it wrote, and one that it committed.
    assert all(calls["set"] == 5 for calls in counts)
    # The driver reads the reports together where they come together, and so do its actions go out.
    assert all(calls["multi_get"] <= 5 and calls["multi_set"] <= 5 for calls in counts)
    assert all(calls.total() <= 48 for calls in counts), counts


def save_on_both(
    pair: list[AsyncWriter], states: list[dict[str, Any]], at: Path
) -> list[Future[str]]:
    futures = [one.save(state, checkpoint_id=at) for one, state in zip(pair, states, strict=True)]
    for future in futures:
        future.exception(60)
    return futures


def wait_until(so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not so():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_save_returns_when_it_is_copied_and_a_third_waits_for_the_first(
    tmp_path: Path, disk: Path, writer: AsyncWriter
) -> None:
    state = {"t": torch.zeros(100_000)}
    disk.write_text("hold:distcp")
    order: list[int] = []
    futures: list[Future[str]] = []

    def save() -> None:
        state["t"].fill_(len(futures))
        future = writer.save(state, checkpoint_id=tmp_path / str(len(futures)))
        number = len(futures)
        future.add_done_callback(lambda _: order.append(number))
        futures.append(future)

    save()
    save()
    third = threading.Thread(target=save)
    third.start()
    time.sleep(0.3)
    assert len(futures) == 2
    disk.write_text("")
    third.join()
    for number, future in enumerate(futures):
        assert future.result() == str(tmp_path / str(number))
        assert torch.equal(
            loaded(future.result(), state)["t"], torch.full((100_000,), number + 0.0)
        )
    assert order == [0, 1, 2]


def test_an_optimizers_step_waits_for_the_copy(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2_000_000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    with AsyncWriter(no_dist=True, optimizers=[optimizer]) as writer:
        writer.warm_up({"weight": weight}).result()
        future = writer.save({"weight": weight}, checkpoint_id=tmp_path / "a")
        optimizer.step()
        future.result()
    found = loaded(tmp_path / "a", {"weight": weight.data})
    assert torch.equal(found["weight"], torch.ones(2_000_000))


def test_another_structure_is_another_layout(tmp_path: Path, writer: AsyncWriter) -> None:
    states: list[dict[str, Any]] = [
        {"a": torch.rand(10)},
        {"a": torch.rand(200_000), "b": [torch.rand(3), "x"]},
        {"b": [torch.rand(4), "a longer text"]},
        {"a": torch.rand(10)},
    ]
    futures = [
        writer.save(state, checkpoint_id=tmp_path / str(number))
        for number, state in enumerate(states)
    ]
    for future, state in zip(futures, states, strict=True):
        assert equal(loaded(future.result(), state), state)


# ---- two ranks ----


def test_what_ranks_share_is_written_once_if_they_really_share_it(
    tmp_path: Path, pair: list[AsyncWriter]
) -> None:
    states = [{"t": torch.full((30_000,), 7.0), "u": torch.full((30_000,), 8.0)} for _ in pair]

    def size(name: str) -> int:
        return sum(path.stat().st_size for path in (tmp_path / name).glob("*.distcp"))

    def both(name: str) -> None:
        for future in save_on_both(pair, states, tmp_path / name):
            future.result()
        found = loaded(tmp_path / name, states[0])
        assert equal(found, states[0])  # The lowest rank's counts.

    both("alike")
    states[1]["t"].fill_(-1)
    both("differ")
    both("still differ")
    states[1]["t"].fill_(7)
    both("alike again")
    states[1] = {"u": states[1]["u"], "w": torch.ones(50_000)}
    both("another structure on one rank")
    assert (
        "w"
        in dcp.FileSystemReader(tmp_path / "another structure on one rank")
        .read_metadata()
        .state_dict_metadata
    )
    states[1] = dict(states[0])
    both("once more")
    assert size("alike") == size("alike again") == size("once more") < 0.6 * size("differ")
    assert size("still differ") == size("differ")


def test_a_full_disk_of_one_rank_is_an_error_on_all_and_the_next_save_works(
    tmp_path: Path, disk: Path, pair: list[AsyncWriter]
) -> None:
    states = [{"t": torch.rand(1000)} for _ in pair]
    save_on_both(pair, states, tmp_path / "a")
    before = files(tmp_path / "a")
    disk.write_text("full:__1_")
    began = time.monotonic()
    for future in save_on_both(pair, states, tmp_path / "a"):
        assert "rank 1: " in str(future.exception())
        assert "No space left" in str(future.exception())
    assert time.monotonic() - began < PROMPT_S
    wait_until(lambda: files(tmp_path / "a") == before)  # What was written in vain is removed.
    disk.write_text("")
    for future in save_on_both(pair, states, tmp_path / "a"):
        future.result()
    wait_until(lambda: len(files(tmp_path / "a")) == len(before))


def test_an_error_is_heard_while_others_still_write(
    tmp_path: Path, disk: Path, pair: list[AsyncWriter]
) -> None:
    states = [{"t": torch.rand(1000)} for _ in pair]
    save_on_both(pair, states, tmp_path / "a")
    disk.write_text("hold:__0_")
    futures = [
        one.save(state, checkpoint_id=tmp_path / "b")
        for one, state in zip(pair, states, strict=True)
    ]
    time.sleep(0.2)
    began = time.monotonic()
    assert not any(future.done() for future in futures)
    pair[1].close(abort=True)
    for future in futures:
        assert "rank 1 closed its writer" in str(future.exception(PROMPT_S))
    assert time.monotonic() - began < PROMPT_S
    disk.write_text("")


def test_a_state_that_cannot_be_saved_is_an_error_on_all(
    tmp_path: Path, pair: list[AsyncWriter]
) -> None:
    class Unwilling:
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("not today")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    states: list[dict[str, Any]] = [{"t": Unwilling()}, {"t": torch.ones(3)}]
    for future in save_on_both(pair, states, tmp_path / "a"):
        assert "rank 0: 't': its state_dict() failed: ValueError: not today" in str(
            future.exception()
        )
    states[0] = states[1]
    for future in save_on_both(pair, states, tmp_path / "a"):
        future.result()


def test_ranks_that_name_different_places_save_nowhere(
    tmp_path: Path, pair: list[AsyncWriter]
) -> None:
    state = {"t": torch.ones(3)}
    paths = [tmp_path / str(rank) / "last" for rank in (0, 1)]
    futures = [one.save(state, checkpoint_id=at) for one, at in zip(pair, paths, strict=True)]
    for future in futures:
        assert "it does not exist (the ranks gave different paths" in str(future.exception(60))
    assert not list(tmp_path.glob("*/last/.metadata"))


def test_two_processes_train_a_sharded_model(tmp_path: Path, forks: Forks) -> None:
    """They are compared with torch, one's keeper is killed, and they end without a word."""
    port = free_port()
    pids = [forks.start("a_rank", rank, port, str(tmp_path)) for rank in (0, 1)]
    assert [forks.wait(pid) for pid in pids] == [0, 0]
    for number in range(3):
        theirs = tmp_path / f"torch{number}"
        like = {
            name: torch.empty(found.size)
            if isinstance(found, dcp.metadata.TensorStorageMetadata)
            else None
            for name, found in dcp.FileSystemReader(theirs)
            .read_metadata()
            .state_dict_metadata.items()
        }
        assert equal(loaded(tmp_path / f"ours{number}", like), loaded(theirs, like))
    for rank in (0, 1):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert told["error"] == "None", "the next keeper does what the killed one had to do"
        assert told["took_s"] < PROMPT_S
        assert not homes(told["pid"])
    for name in ("killed", "after", "last"):
        assert (tmp_path / name / ".metadata").exists(), name


# ---- what one rank saves alone ----


def test_a_path_that_one_rank_saves_alone_is_told_and_ends_no_later_save(
    tmp_path: Path, make_pair: Callable[..., list[AsyncWriter]]
) -> None:
    pair = make_pair()
    states = [{"t": torch.rand(10)} for _ in pair]
    for number in range(1, 4):
        alone = pair[number % 2].save(states[0], checkpoint_id=tmp_path / "best")
        both = save_on_both(pair, states, tmp_path / str(number))
        assert [future.result(0) for future in both] == [str(tmp_path / str(number))] * 2
        with pytest.raises(CheckpointError, match=r"rank \d: has not saved it; all ranks have to"):
            alone.result(60)
    assert not (tmp_path / "best" / ".metadata").exists()


def test_two_paths_that_one_rank_saves_alone_do_not_stop_it(
    tmp_path: Path, make_pair: Callable[..., list[AsyncWriter]]
) -> None:
    """It has memory for two saves, and a third waits for one of them."""
    pair = make_pair()
    state = {"t": torch.rand(10)}
    alone = [pair[0].save(state, checkpoint_id=tmp_path / name) for name in ("best", "worst")]
    other = pair[1].save(state, checkpoint_id=tmp_path / "1")
    assert pair[0].save(state, checkpoint_id=tmp_path / "1").result(60) == other.result(60)
    assert all(future.exception(60) for future in alone)


def test_a_path_that_one_rank_saved_alone_can_be_saved_by_all_again(
    tmp_path: Path, make_pair: Callable[..., list[AsyncWriter]]
) -> None:
    pair = make_pair()
    states = [{"t": torch.rand(10)} for _ in pair]
    save_on_both(pair, states, tmp_path / "last")
    alone = pair[0].save(states[0], checkpoint_id=tmp_path / "last")
    save_on_both(pair, states, tmp_path / "other")
    assert alone.exception(60) is not None
    for _ in range(2):
        both = save_on_both(pair, states, tmp_path / "last")
        assert [future.exception(0) for future in both] == [None, None]


def test_a_rank_that_saves_alone_does_not_wait_for_ever(
    tmp_path: Path,
    make_pair: Callable[..., list[AsyncWriter]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asyncwriter, "PEERS_PATIENCE_S", 0.3)
    pair = make_pair()
    states = [{"t": torch.rand(10)} for _ in pair]
    with pytest.raises(CheckpointError, match=r"waited 0\.3 s for the others"):
        pair[0].save(states[0], checkpoint_id=tmp_path / "best").result(60)
    monkeypatch.setattr(asyncwriter, "PEERS_PATIENCE_S", 600.0)
    both = save_on_both(pair, states, tmp_path / "1")
    assert [future.exception(0) for future in both] == [None, None]


# ---- deaths ----


def test_a_keeper_may_die_at_any_call_it_makes_to_the_disk(
    tmp_path: Path, disk: Path, writer: AsyncWriter
) -> None:
    at = tmp_path / "a"
    state = {f"t{i}": torch.zeros(10) for i in range(20)}
    writer.save(state, checkpoint_id=at).result()
    good, number, died = 0.0, 0, 0
    while True:
        number += 1
        for tensor in state.values():
            tensor.fill_(number)
        disk.write_text(f"die:{number}!")
        began = time.monotonic()
        future = writer.save(state, checkpoint_id=at)
        error = future.exception(60)
        disk.write_text("")
        (value,) = {float(v) for t in loaded(at, state).values() for v in t}
        if error is None:
            assert value == number
            break
        died += 1
        assert "the keeper died" in str(error)
        assert time.monotonic() - began < PROMPT_S + 1  # One has to be started, too.
        assert value in (good, number)
        good = value
    assert died >= 15
    names = {file.name for file in decoded((at / MANIFEST).read_bytes(), "").files}
    assert files(at) == {MANIFEST, ".metadata", *names}


def test_a_script_may_be_killed_at_any_time(tmp_path: Path, forks: Forks) -> None:
    at = tmp_path / "a"
    began, saved = Path(f"{at}.began"), Path(f"{at}.saved")
    chance = random.Random(4)
    like = {**{f"t{i}": torch.zeros(5000) for i in range(20)}, "number": 0}
    last = 0
    for _ in range(12):
        saved.unlink(missing_ok=True)
        pid = forks.start("save_for_ever", str(at), last)
        wait_until(saved.exists)
        time.sleep(chance.uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        assert forks.wait(pid) == -signal.SIGKILL
        wait_until(lambda pid=pid: not homes(pid))
        state = loaded(at, like)
        number = state.pop("number")
        assert {float(v) for t in state.values() for v in (t.min(), t.max())} == {number}
        assert last < int(saved.read_text()) <= number <= int(began.read_text())
        last = int(began.read_text())


# ---- the end ----


def test_a_script_that_ends_has_saved_everything(tmp_path: Path, forks: Forks) -> None:
    pid = forks.start("save_and_end", str(tmp_path))
    assert forks.wait(pid) == 0
    for number in range(3):
        found = loaded(tmp_path / str(number), {"t": torch.zeros(1000).long()})
        assert torch.equal(found["t"], torch.full((1000,), number))
    assert not homes(pid)


def test_closing_waits_or_gives_up(tmp_path: Path, disk: Path) -> None:
    state = {"t": torch.ones(1000)}
    before = homes(os.getpid())
    disk.write_text("hold:distcp")
    writer = AsyncWriter(no_dist=True)
    future = writer.save(state, checkpoint_id=tmp_path / "a")
    pid = writer._link.keeper_pid
    began = time.monotonic()
    writer.close(abort=True)
    assert time.monotonic() - began < PROMPT_S
    assert isinstance(future.exception(0), CheckpointError)
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(UsageError, match="closed"):
        writer.save(state, checkpoint_id=tmp_path / "b")

    disk.write_text("")
    writer = AsyncWriter(no_dist=True)
    future = writer.save(state, checkpoint_id=tmp_path / "c")
    writer.close()
    assert future.result(0) == str(tmp_path / "c")
    assert homes(os.getpid()) == before


def test_memory_is_given_back(tmp_path: Path) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("holdfast-")

    before = mapped()
    with AsyncWriter(no_dist=True) as writer:
        for number in range(2):
            state = {"t": torch.ones(1000), "odd": torch.ones(100, 100).T}
            writer.save(state, checkpoint_id=tmp_path / str(number)).result()
        assert mapped() == before + 2
    assert mapped() == before
