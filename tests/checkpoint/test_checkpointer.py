"""What a script is promised of `save`, `restore` and tickets."""

from __future__ import annotations

import copy
import errno
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy
import pytest
import torch
from bodies import save
from states import FakeLink, check_same, flip, forked, offer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from holdfast.checkpoint.checkpointer import LinkedCheckpointer
from holdfast.checkpoint.memory.image import Image
from holdfast.checkpoint.memory.images import Images
from holdfast.checkpoint.state.capture import Position, capture
from holdfast.checkpoint.storage.posix import PosixStorage
from holdfast.checkpoint.tickets import Result
from holdfast.errors import CheckpointError, UsageError
from holdfast.messages.requests import SaveSettled

Output = pytest.CaptureFixture[str]


@pytest.fixture
def link(shm: Path) -> Iterator[FakeLink]:
    yield FakeLink(shm)
    while Script.working:
        Script.working.pop().shutdown()


class Script:
    """A model in training."""

    working: ClassVar[list[Executor]] = []
    """What goes on beside training, and may outlive the script."""

    def __init__(self, link: FakeLink, seed: int = 0, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optimizer, "epoch": seed}
        settings.setdefault("directory", None)
        directory = settings.pop("directory")
        self.checkpointer = LinkedCheckpointer(directory, self.state, link=link, **settings)
        self.working.extend((self.checkpointer._slots._ahead, self.checkpointer._slots._behind))

    def backward(self) -> None:
        self.model(torch.randn(8, 3)).square().sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def snapshot(self) -> dict[str, Any]:
        model, optim = self.model.state_dict(), self.optimizer.state_dict()
        return copy.deepcopy({"model": model, "optim": optim, "epoch": self.state["epoch"]})


def restored(link: FakeLink, seed: int = 9, **settings: Any) -> dict[str, Any]:
    """The state of another script that restores what this one saved."""
    script = Script(reader(link), seed, **settings)
    script.checkpointer.restore()
    return script.snapshot()


def reader(link: FakeLink) -> FakeLink:
    other = FakeLink(link.images / "reader")
    other.images.mkdir(exist_ok=True)
    other.saves = link.saves
    return other


class Held:
    """What is copied beside training waits, until it is let go."""

    def __init__(self, checkpointer: LinkedCheckpointer) -> None:
        self._gate = threading.Event()
        checkpointer._slots._behind.submit(self._gate.wait, 20)

    def let_go(self) -> None:
        self._gate.set()


# ---- saving and restoring ----


def test_a_restored_state_is_the_one_that_was_saved(link: FakeLink) -> None:
    script = Script(link)
    for _ in range(3):
        script.step()
    want = script.snapshot()
    script.checkpointer.save(3).memory()
    script.step()
    other = Script(reader(link), 9)
    assert other.checkpointer.restore() == 3
    check_same(other.snapshot(), want)
    assert other.checkpointer._link.resumed_at == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_snapshot_is_the_state_at_the_moment_of_the_save(
    link: FakeLink, block: bool, overlap: bool
) -> None:
    script, other = Script(link, overlap=overlap), Script(reader(link), 9)
    for step in range(1, 5):
        script.step()
        want = script.snapshot()
        ticket = script.checkpointer.save(step, block=block)
        script.step()
        assert ticket.memory() == Result("saved", "memory")
        other.checkpointer.restore()
        check_same(other.snapshot(), want)


def test_masters_of_another_precision_than_their_parameters_come_back_exactly(
    link: FakeLink,
) -> None:
    def made(value: float) -> tuple[Any, dict[str, Any]]:
        parameter = torch.nn.Parameter(torch.full((3,), value, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        optimizer.state[parameter] = {"master": torch.full((3,), value + 1e-6)}
        return optimizer.state[parameter], {"p": parameter, "o": optimizer}

    master, state = made(1.0)
    LinkedCheckpointer(None, state, link=link).save(1).memory()
    other = made(2.0)[1]
    checkpointer = LinkedCheckpointer(None, other, link=reader(link))
    checkpointer.restore()
    (got,) = other["o"].state.values()
    check_same(got["master"], master["master"])


def test_on_a_fresh_start_there_is_nothing_to_restore(link: FakeLink) -> None:
    script = Script(link)
    before = script.snapshot()
    assert script.checkpointer.restore() == 0
    assert script.checkpointer.restored.where is None
    check_same(script.snapshot(), before)


def test_it_says_what_was_restored_and_from_where(link: FakeLink, capsys: Output) -> None:
    script = Script(link)
    script.checkpointer.save(5).memory()
    assert script.checkpointer.restore() == 5
    assert (script.checkpointer.restored.step, script.checkpointer.restored.where) == (5, "memory")
    assert "restored step 5 from memory" in capsys.readouterr().err


def test_what_does_not_verify_is_refused_and_the_next_older_taken(
    link: FakeLink, capsys: Output
) -> None:
    script = Script(link)
    wants = {}
    for step in (1, 2):
        script.step()
        wants[step] = script.snapshot()
        script.checkpointer.save(step).memory()
    paths = {step: path for step, _, path in link.saves}
    flip(paths[2], Image.open(paths[2]).body_at + 100)
    link.offered = [offer(2), offer(1, "step 2 from memory: rank 0: damaged")]
    other = Script(link, 9)
    assert other.checkpointer.restore() == 1
    check_same(other.snapshot(), wants[1])
    assert "digest" in link.tried[0].error
    assert "refused: step 2 from memory: rank 0: damaged" in capsys.readouterr().err
    assert other.checkpointer.restored.refused == ("step 2 from memory: rank 0: damaged",)


def test_training_does_not_start_over_in_silence(link: FakeLink) -> None:
    script = Script(link)
    script.checkpointer.save(1).memory()
    path = link.saves[0][2]
    flip(path, Image.open(path).body_at + 100)
    with pytest.raises(CheckpointError, match=r"no saved state can be restored"):
        script.checkpointer.restore()


def test_a_step_that_is_not_there_is_an_error(link: FakeLink) -> None:
    with pytest.raises(CheckpointError, match="step 7 is not there"):
        Script(link).checkpointer.restore(step=7)


def test_a_state_that_does_not_fit_is_an_error_that_says_why(link: FakeLink) -> None:
    script = Script(link)
    script.checkpointer.save(1).memory()
    other = Script(link)
    other.model.append(torch.nn.Linear(4, 4))
    with pytest.raises(CheckpointError, match=r"another module.*lacks '2\.bias', '2\.weight'"):
        other.checkpointer.restore()


# ---- beside training ----


def test_parameters_wait_for_their_copy_before_the_next_step(link: FakeLink) -> None:
    script = Script(link, overlap=True)
    script.step()
    script.checkpointer.save(0, block=True)
    held = Held(script.checkpointer)
    want = script.snapshot()
    ticket = script.checkpointer.save(1)
    script.backward()  # Forward changes buffers; they were copied before.
    assert ticket.memory(0.0) == Result("pending")
    assert not ticket.done()
    with pytest.raises(TimeoutError, match=r"step 1 is not saved after 0.01 s"):
        ticket.result(0.01)
    letting_go = threading.Thread(target=held.let_go)
    letting_go.start()
    script.optimizer.step()
    letting_go.join()
    assert ticket.result(20) == Result("saved", "memory")
    assert ticket.memory(20).outcome == "saved"
    check_same(restored(link), want)


def test_the_step_of_any_other_optimizer_is_not_held_up_for_long(link: FakeLink) -> None:
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    script = Script(link)
    script.step()
    script.checkpointer.save(1)
    other.step()
    assert script.checkpointer.save(2).memory().outcome == "saved"


def test_a_change_by_other_means_fails_the_save_rather_than_tear_it(
    link: FakeLink, capsys: Output
) -> None:
    script = Script(link, overlap=True)
    script.step()
    script.checkpointer.save(1, block=True)
    want = script.snapshot()
    held = Held(script.checkpointer)
    ticket = script.checkpointer.save(2)
    with torch.no_grad():
        script.model[0].weight.mul_(2)
    held.let_go()
    result = ticket.memory(20)
    assert result.outcome == "failed"
    assert "changed while it was copied" in result.reason
    with pytest.raises(
        CheckpointError, match=r"step 2 was not saved: .*changed while it was copied"
    ):
        ticket.result()
    assert link.missing == [(2, "failed", result.reason)]
    assert "step 2 was not saved" in capsys.readouterr().err
    check_same(restored(link), want)
    # And training goes on.
    script.step()
    assert script.checkpointer.save(3).memory(20).outcome == "saved"


def test_with_block_nothing_is_left_to_do(link: FakeLink) -> None:
    script = Script(link, overlap=True)
    script.step()
    held = Held(script.checkpointer)
    ticket = script.checkpointer.save(1, block=True)
    assert ticket.memory(0.0) == ticket.result(20) == Result("saved", "memory")
    held.let_go()


def test_unless_overlap_is_asked_for_every_save_blocks(link: FakeLink) -> None:
    script = Script(link)
    script.step()
    held = Held(script.checkpointer)
    assert script.checkpointer.save(1).memory(0.0) == Result("saved", "memory")
    held.let_go()


def test_an_overlapped_save_counts_from_the_next_step_or_call_on(link: FakeLink) -> None:
    script = Script(link, overlap=True)
    script.step()
    copier = script.checkpointer._slots._behind
    for step, go_on in enumerate((script.step, script.checkpointer.restore), start=1):
        script.checkpointer.save(step)
        copier.submit(lambda: None).result(20)
        assert [one for one, _, _ in link.saves] == list(range(1, step))
        go_on()
        copier.submit(lambda: None).result(20)
        assert [one for one, _, _ in link.saves] == list(range(1, step + 1))


def test_a_ticket_that_is_asked_again_and_again_is_done_without_another_step(
    link: FakeLink,
) -> None:
    script = Script(link, overlap=True)
    script.step()
    ticket = script.checkpointer.save(1)
    until = time.monotonic() + 60
    while not ticket.done():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_save_waits_for_the_copy_of_the_one_before(link: FakeLink) -> None:
    script = Script(link, overlap=True)
    script.step()
    for step in range(1, 20):
        script.checkpointer.save(step)
    assert script.checkpointer.save(20).memory().outcome == "saved"
    assert [step for step, _, _ in link.saves] == list(range(1, 21))


def test_memory_is_there_before_the_first_save(link: FakeLink, shm: Path) -> None:
    script = Script(link)
    script.step()
    script.checkpointer._slots._ahead.shutdown()
    inodes = {path.stat().st_ino for path in shm.glob("*.image")}
    assert len(inodes) == 2
    script.checkpointer.save(1, block=True)
    assert {path.stat().st_ino for path in shm.glob("*.image")} == inodes


def test_a_checkpointer_that_nobody_has_any_more_is_gone(link: FakeLink) -> None:
    """Torch keeps its hooks for ever, but they keep nothing."""
    script = Script(link)
    script.step()
    script.checkpointer.save(1).memory()
    script.checkpointer._slots._ahead.shutdown()
    script.checkpointer._slots._behind.shutdown()
    gone = weakref.ref(script.checkpointer), weakref.ref(script.model)
    optimizer = script.optimizer
    del script
    gc.collect()
    assert [one() for one in gone] == [None, None]
    optimizer.step()


def test_several_checkpointers_may_wait_for_a_first_step(link: FakeLink, shm: Path) -> None:
    scripts = [Script(link, seed) for seed in range(3)]
    for script in scripts * 2:
        script.step()


def test_a_compiled_step_waits_for_the_copy_and_compiles_none_of_ours(
    link: FakeLink, capsys: Output
) -> None:
    script = Script(link, overlap=True)
    step = torch.compile(script.optimizer.step, backend="eager")
    for number in range(1, 4):
        script.backward()
        step()
        want = script.snapshot()
        ticket = script.checkpointer.save(number)
    script.backward()
    step()
    assert ticket.memory().outcome == "saved"
    check_same(restored(link), want)
    assert "holdfast" not in capsys.readouterr().err.replace("[holdfast] restored", "")


# ---- intervals ----


def tiers(checkpointer: LinkedCheckpointer, steps: int) -> str:
    """One letter for each step: memory, storage, or nothing."""
    found = [checkpointer.save(step) for step in range(1, steps + 1)]
    checkpointer.save(0, to="memory").memory()
    return "".join((ticket.to or "-")[0] for ticket in found)


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({"directory": "d"}, "ssssss"),
        ({"directory": None}, "mmmmmm"),
        ({"directory": "d", "memory_every": 2}, "-m-m-m"),
        ({"directory": "d", "storage_every": 3}, "--s--s"),
        ({"directory": "d", "memory_every": 2, "storage_every": 3}, "-msm-s"),
    ],
)
def test_intervals_say_where_a_save_goes(
    link: FakeLink, settings: dict[str, Any], want: str
) -> None:
    assert tiers(Script(link, **settings).checkpointer, 6) == want


def test_a_save_that_is_not_due_says_so(link: FakeLink) -> None:
    ticket = Script(link, memory_every=2).checkpointer.save(1)
    want = Result("skipped", None, "it is not due")
    assert ticket.done()
    assert (ticket.result(), ticket.memory(), ticket.storage()) == (want, want, want)
    assert link.saves == []


def test_a_save_may_be_asked_for_at_any_step(link: FakeLink) -> None:
    checkpointer = Script(link, directory="d", storage_every=100).checkpointer
    checkpointer.save(1, to="memory").memory()
    checkpointer.save(2, to="storage").memory()
    assert [wish for _, wish, _ in link.saves] == ["if needed", "now"]


def test_without_a_directory_a_snapshot_is_never_for_storage(link: FakeLink) -> None:
    checkpointer = Script(link).checkpointer
    checkpointer.save(1).memory()
    assert link.saves[0][1] == "never"
    with pytest.raises(UsageError, match="no directory"):
        checkpointer.save(2, to="storage")


# ---- tickets ----


def test_a_ticket_remembers_what_it_was_told(link: FakeLink) -> None:
    ticket = Script(link).checkpointer.save(1)
    assert ticket.memory() == Result("saved", "memory")
    link.settled[1, "memory"] = SaveSettled(outcome="skipped", reason="it is too long ago")
    assert ticket.done()
    assert (ticket.memory(), ticket.result()) == (Result("saved", "memory"),) * 2


def test_a_ticket_tells_how_far_a_save_got(link: FakeLink) -> None:
    ticket = Script(link, directory="d").checkpointer.save(1, block=True)
    assert ticket.memory() == Result("saved", "memory")
    assert ticket.storage(0.0) == Result("pending")
    assert not ticket.done()
    link.settled[1, "storage"] = SaveSettled(outcome="saved")
    assert ticket.storage() == ticket.result() == Result("saved", "storage")
    assert ticket.done()


def test_asking_whether_a_save_is_done_never_waits(link: FakeLink) -> None:
    """The link answers only after `done` has returned."""
    ticket = Script(link, directory="d").checkpointer.save(1, block=True)
    assert not ticket.done()
    link.settled[1, "storage"] = SaveSettled(outcome="saved")
    until = time.monotonic() + 60
    while not ticket.done():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_ticket_gives_the_reason_of_a_skip(link: FakeLink) -> None:
    ticket = Script(link, directory="d").checkpointer.save(1, block=True)
    link.settled[1, "storage"] = SaveSettled(outcome="skipped", reason="a newer one")
    assert ticket.result() == ticket.storage() == Result("skipped", None, "a newer one")


def test_the_result_of_a_save_that_failed_is_its_error(link: FakeLink) -> None:
    ticket = Script(link, directory="d").checkpointer.save(1, block=True)
    link.settled[1, "storage"] = SaveSettled(outcome="failed", reason="the disk is full")
    assert ticket.storage() == Result("failed", None, "the disk is full")
    with pytest.raises(CheckpointError, match=r"^step 1 was not saved: the disk is full$"):
        ticket.result()


def test_what_was_meant_for_memory_is_never_on_storage(link: FakeLink) -> None:
    ticket = Script(link, directory="d").checkpointer.save(1, to="memory", block=True)
    assert ticket.storage() == Result("skipped", None, "it was meant for memory")
    assert ticket.result() == Result("saved", "memory")


def test_waiting_for_the_last_save(link: FakeLink) -> None:
    checkpointer = Script(link, directory="d").checkpointer
    checkpointer.wait()
    checkpointer.save(1, to="memory")
    checkpointer.wait()
    checkpointer.save(2)
    checkpointer.wait(timeout=0.0)


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_closing_waits_for_the_last_save_and_raises_if_nothing_came_of_it(
    link: FakeLink, outcome: Literal["failed", "skipped"]
) -> None:
    with Script(link).checkpointer as checkpointer:
        checkpointer.save(1)
    checkpointer.close()
    with pytest.raises(UsageError, match="is closed"):
        checkpointer.save(2)
    failing = Script(link, directory="d").checkpointer
    link.settled[3, "storage"] = SaveSettled(outcome=outcome, reason="the disk is full")
    failing.save(3)
    with pytest.raises(CheckpointError, match=r"step 3.* was .*: the disk is full"):
        failing.close()


def test_an_error_in_the_block_is_not_hidden_by_the_end_of_the_checkpointer(
    link: FakeLink,
) -> None:
    checkpointer = Script(link, directory="d").checkpointer
    link.settled[1, "storage"] = SaveSettled(outcome="failed", reason="the disk is full")
    checkpointer.save(1)
    with pytest.raises(ZeroDivisionError), checkpointer:
        raise ZeroDivisionError


# ---- saves that fail, or are not made ----


def test_a_save_that_finds_both_images_read_is_skipped_with_its_reason(
    link: FakeLink, capsys: Output
) -> None:
    script, images = Script(link), Images(link.images)
    for step in (1, 2):
        script.checkpointer.save(step, block=True)
    with ExitStack() as until:
        for _, _, path in link.saves:
            image = images.image(path)
            assert until.enter_context(images.pinned(image, image.state))
        ticket = script.checkpointer.save(3)
        why = "both images are still being read; saves come faster than they are kept"
        want = Result("skipped", None, why)
        assert (ticket.result(), ticket.memory(), ticket.storage()) == (want, want, want)
        assert link.missing == [(3, "skipped", why)]
        script.checkpointer.wait()
    assert capsys.readouterr().err == ""
    assert script.checkpointer.save(4).memory().outcome == "saved"


def test_when_a_save_for_storage_was_skipped_the_next_one_goes_there(
    link: FakeLink, tmp_path: Path
) -> None:
    script, images = Script(link, directory=tmp_path), Images(link.images)
    for step in (1, 2):
        script.checkpointer.save(step, to="memory", block=True)
    with ExitStack() as until:
        for _, _, path in link.saves:
            image = images.image(path)
            assert until.enter_context(images.pinned(image, image.state))
        script.checkpointer.save(3, to="storage")
    assert [script.checkpointer.save(step, to="memory").to for step in (4, 5)] == [
        "storage",
        "memory",
    ]


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    return monkeypatch


@pytest.mark.parametrize("block", [True, False])
def test_without_memory_a_save_fails_and_training_goes_on(
    link: FakeLink, no_memory: pytest.MonkeyPatch, capsys: Output, block: bool
) -> None:
    script = Script(link)
    script.step()
    ticket = script.checkpointer.save(1, block=block)
    assert ticket.memory().outcome == "failed"
    with pytest.raises(CheckpointError, match="No space left on device; see `df -h"):
        ticket.result()
    assert link.missing == [(1, "failed", ticket.memory().reason)]
    assert "step 1 was not saved: no" in capsys.readouterr().err
    script.step()
    no_memory.undo()
    want = script.snapshot()
    assert script.checkpointer.save(2, block=block).memory().outcome == "saved"
    check_same(restored(link), want)


def test_what_cannot_be_saved_is_named_and_training_goes_on(link: FakeLink) -> None:
    script = Script(link)
    script.state["epoch"] = {"list": [object()]}
    ticket = script.checkpointer.save(1)
    assert ticket.done()
    assert ticket.memory().reason.startswith("epoch.list.0: a builtins.object cannot be saved")
    script.state["epoch"] = 2
    assert script.checkpointer.save(2).memory().outcome == "saved"


def test_a_state_dict_that_raises_is_named_and_training_goes_on(link: FakeLink) -> None:
    script = Script(link)

    class Broken:
        def state_dict(self) -> Any:
            raise ZeroDivisionError("oh")

        def load_state_dict(self, state: Any) -> None: ...

    script.state["broken"] = Broken()
    result = script.checkpointer.save(1).memory()
    assert result.outcome == "failed"
    assert result.reason == "'broken': its state_dict() failed: ZeroDivisionError: oh"


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("error", [CheckpointError("agent gone"), OSError(5, "agent gone")])
def test_nobody_to_look_after_an_image_is_a_failed_save(
    link: FakeLink, monkeypatch: pytest.MonkeyPatch, block: bool, error: Exception
) -> None:
    def gone(*args: Any) -> None:
        raise error

    monkeypatch.setattr(link, "saved", gone)
    monkeypatch.setattr(link, "missed", gone)
    result = Script(link).checkpointer.save(1, block=block).memory(20)
    assert result.outcome == "failed"
    assert "agent gone" in result.reason


def test_the_garbage_collector_is_left_as_it_was(
    link: FakeLink, no_memory: pytest.MonkeyPatch
) -> None:
    script = Script(link)
    script.checkpointer.save(1)
    assert gc.isenabled()
    gc.disable()
    try:
        script.checkpointer.save(2)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_no_memory_before_the_first_save_is_told(
    link: FakeLink, no_memory: pytest.MonkeyPatch, capsys: Output
) -> None:
    script = Script(link)
    script.step()
    script.checkpointer._slots._ahead.shutdown()
    assert "there may be no memory for snapshots" in capsys.readouterr().err


# ---- what makes no sense ----


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True, 10**18])
def test_a_step_is_a_whole_number(link: FakeLink, step: Any) -> None:
    with pytest.raises(UsageError, match="a step is an integer"):
        Script(link).checkpointer.save(step)


def test_a_step_may_be_numpys(link: FakeLink) -> None:
    Script(link).checkpointer.save(numpy.int64(3)).memory()  # type: ignore[arg-type]
    assert [(type(step), step) for step, _, _ in link.saves] == [(int, 3)]


@pytest.mark.parametrize("to", ["disk", "", 3])
def test_there_are_two_places_to_save_to(link: FakeLink, to: Any) -> None:
    with pytest.raises(UsageError, match="`to` is"):
        Script(link).checkpointer.save(1, to=to)


class OnlySaves:
    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("state", "settings", "match"),
    [
        ([1], {}, "the state is a dict"),
        ({1: 2}, {}, "the state is a dict"),
        ({"a": OnlySaves()}, {}, "'a' has only one of state_dict and load_state_dict"),
        ({}, {"storage_every": 3}, "storage_every needs a directory"),
        ({}, {"memory_every": 0}, "memory_every is a positive number"),
        ({}, {"memory_every": "3"}, "memory_every is a positive number"),
        ({}, {"keep": 3}, "keep is a policy"),
        ({"a": {"b": [object()]}}, {}, r"a\.b\.0: a builtins\.object cannot be saved"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(
    link: FakeLink, state: Any, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        LinkedCheckpointer(None, state, link=link, **settings)


def test_an_empty_directory_is_none(link: FakeLink) -> None:
    """It is a variable that was never set, and not the working directory."""
    with pytest.raises(UsageError, match="the directory is empty"):
        LinkedCheckpointer("", {}, link=link)


def test_an_object_of_the_scripts_own_is_not_asked_for_its_state_before_a_save(
    link: FakeLink,
) -> None:
    class Loader:
        asked = False

        def state_dict(self) -> Any:
            self.asked = True
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    loader = Loader()
    checkpointer = LinkedCheckpointer(None, {"loader": loader}, link=link)
    assert not loader.asked
    checkpointer.save(1)
    assert loader.asked


# ---- names ----


def names(link: FakeLink) -> list[str]:
    return [name for name, _, _ in link.opened]


def test_a_checkpointer_has_the_same_name_after_a_restart(link: FakeLink, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    for directory in ("ckpt", tmp_path / "ckpt", "./ckpt/"):
        LinkedCheckpointer(directory, {}, link=link)
    for _ in range(2):
        LinkedCheckpointer(None, {"a": 1}, link=link)
    assert len(set(names(link)[:3])) == 1
    assert len(set(names(link)[3:])) == 1


def test_two_checkpointers_of_a_script_have_two_names(link: FakeLink) -> None:
    for directory, state in (("x", {}), ("y", {}), (None, {"a": 1}), (None, {"b": 1})):
        LinkedCheckpointer(directory, state, link=link)
    LinkedCheckpointer("s3://bucket/x", {}, link=link)
    assert len(set(names(link))) == 5
    assert link.opened[-1][1] == "s3://bucket/x"


# ---- cost ----


def python_calls(act: Any) -> int:
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()
    gc.disable()  # It calls back.
    sys.setprofile(seen)
    try:
        act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_to_capture_many_tensors_takes_no_more_python_than_a_few() -> None:
    def calls(count: int) -> int:
        tensors = {f"t{n}": torch.zeros(1) for n in range(count)}
        position = Position(1, 1, 0, 1)
        layout = capture({"m": tensors}, None, position).layout
        return python_calls(lambda: capture({"m": tensors}, layout, position))

    assert calls(3000) == calls(10)


def test_saves_of_several_threads_never_mix(link: FakeLink) -> None:
    """Each has its image to itself: none is written by two at a time."""
    state = {"a": torch.zeros(500_000), "b": torch.zeros(500_000)}
    checkpointer = LinkedCheckpointer(None, state, link=link)
    checkpointer.save(0)
    inside = threading.Semaphore()
    start, alone = checkpointer._slots.start, []

    def watched(*args: Any) -> Any:
        alone.append(inside.acquire(blocking=False))
        try:
            return start(*args)
        finally:
            inside.release()

    checkpointer._slots.start = watched  # type: ignore[method-assign]
    threads = [
        threading.Thread(target=lambda: [checkpointer.save(step) for step in range(1, 20)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alone == [True] * 57


def test_a_fork_cannot_write_to_the_images_of_the_process_it_comes_from(link: FakeLink) -> None:
    checkpointer = LinkedCheckpointer(None, {"epoch": 1}, link=link)
    checkpointer.save(1).memory()
    before = link.saves[0][2].read_bytes()

    def act() -> None:
        with pytest.raises(UsageError, match="forked"):
            checkpointer.save(2)
        with pytest.raises(UsageError, match="forked"):
            checkpointer.restore()

    assert os.waitpid(forked(act), 0)[1] == 0
    assert link.saves[0][2].read_bytes() == before


def test_a_rule_of_the_users_own_that_fails_is_told_and_deletes_nothing(
    link: FakeLink, capsys: Output, tmp_path: Path
) -> None:
    link.settled[1, "storage"] = SaveSettled(outcome="saved")
    save(PosixStorage(tmp_path), 1)
    checkpointer = LinkedCheckpointer(
        tmp_path, {"epoch": 1}, link=link, keep=lambda steps: steps[7:8][0]
    )
    checkpointer.save(1)
    for thread in threading.enumerate():
        if thread.name == "retention":
            thread.join()
    assert "old checkpoints stay, because keep failed: IndexError" in capsys.readouterr().err


def test_checkpointers_that_come_and_go_leave_no_memory_and_no_hooks(link: FakeLink) -> None:
    script = Script(link)
    model, optimizer = script.model, script.optimizer
    gone: list[weakref.ref[Any]] = []
    hooks: set[int] = set()
    for number in range(3):
        one = LinkedCheckpointer(None, {f"model {number}": model, "optim": optimizer}, link=link)
        script.step()
        one.save(number).memory()
        gone.append(weakref.ref(one._slots))
        del one
        gc.collect()
        hooks.add(len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks))
    until = time.monotonic() + 60
    while any(one() is not None for one in gone):  # The thread that copied may be about to let go.
        assert time.monotonic() < until
        gc.collect()
    assert len(hooks) == 1
