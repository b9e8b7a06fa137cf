"""Saves that a script makes by itself are sections named checkpoint, whoever they are made by."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

Run = Callable[..., str]

BEFORE = """
import io, os, socket, sys, threading, time
from holdfast.shm.rank_page import RankPage, create_page
from holdfast.worker import runtime
from holdfast.worker.channel import Channel
from holdfast.worker.runtime import Runtime
from holdfast.worker.torch_hooks.patches import book_saves

near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
page = RankPage(create_page())
worker = Runtime(Channel(far.detach()), page)
runtime.install(worker)
book_saves(worker)

def sections():
    return [(s.name, s.own) for s in page.vitals.read().sections]

class Watched(io.RawIOBase):
    def __init__(self):
        self.inside = []
    def writable(self): return True
    def write(self, data):
        self.inside = sections()
        time.sleep(0.01)
        return len(data)
"""


def test_a_save_to_a_file_is_a_section_and_is_booked(with_torch: Run) -> None:
    script = """
    import torch
    ones = torch.ones(3)
    storage = Watched()
    torch.save(ones, storage)
    assert storage.inside == [("checkpoint", True)], storage.inside
    assert sections() == []
    assert page.read().saves == 1 and page.read().checkpoint_s >= 0.01
    torch.save(ones, "saved.pt")
    torch.serialization.save(ones, f="saved.pt")
    assert page.read().saves == 3
    assert torch.load("saved.pt").equal(ones)
    """
    with_torch(BEFORE, script)


def test_a_save_into_memory_is_none(with_torch: Run) -> None:
    script = """
    import torch
    torch.save(torch.ones(3), io.BytesIO())
    torch.save(torch.ones(3), f=io.BytesIO())
    assert page.read().saves == 0
    """
    with_torch(BEFORE, script)


def test_a_save_within_the_scripts_own_section_is_booked_once(with_torch: Run) -> None:
    script = """
    import torch, holdfast
    before = time.monotonic()
    with holdfast.section("checkpoint"):
        began = time.monotonic()
        torch.save(torch.ones(3), Watched())
        torch.save(torch.ones(3), Watched())
        took = time.monotonic() - began
    assert page.read().saves == 1
    assert took <= page.read().checkpoint_s <= time.monotonic() - before
    """
    with_torch(BEFORE, script)


def test_a_save_of_another_thread_is_its_section_and_no_lost_time(with_torch: Run) -> None:
    script = """
    import torch
    storage = Watched()
    thread = threading.Thread(target=torch.save, args=(torch.ones(3), storage))
    thread.start()
    thread.join()
    assert storage.inside == [("checkpoint", False)], storage.inside
    assert page.read().saves == 1 and page.read().checkpoint_s == 0.0
    """
    with_torch(BEFORE, script)


def test_a_save_that_fails_leaves_no_section_open(with_torch: Run) -> None:
    script = """
    import torch
    try:
        torch.save(torch.ones(3), "/no/such/directory/saved.pt")
    except RuntimeError:
        assert sections() == []
    else:
        raise AssertionError("it was saved")
    """
    with_torch(BEFORE, script)


def test_torchs_distributed_checkpoints_are_sections(with_torch: Run) -> None:
    script = """
    import warnings
    warnings.simplefilter("ignore")
    import torch, torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    seen = []
    class Seen(FileSystemWriter):
        def write_data(self, *args):
            seen.append(sections())
            return super().write_data(*args)
    state = {"weight": torch.ones(3)}
    dcp.save(state, storage_writer=Seen("one"))
    assert seen == [[("checkpoint", True)]], seen
    assert page.read().saves == 1
    dcp.save(state, checkpoint_id="two")
    loaded = {"weight": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id="two")
    assert loaded["weight"].equal(state["weight"])
    """
    with_torch(BEFORE, script)


def test_the_script_cannot_tell(with_torch: Run) -> None:
    script = """
    import inspect, pickle, torch
    assert torch.save is torch.serialization.save
    assert torch.save.__name__ == "save" and torch.save.__module__ == "torch.serialization"
    assert list(inspect.signature(torch.save).parameters)[:2] == ["obj", "f"]
    assert pickle.loads(pickle.dumps(torch.save)) is torch.save
    """
    with_torch(BEFORE, script)


def test_saves_are_seen_in_a_script_that_imports_torch_later() -> None:
    script = """
assert "torch" not in sys.modules
import torch
storage = Watched()
torch.save(torch.ones(3), storage)
assert storage.inside == [("checkpoint", True)], storage.inside
assert torch.save is torch.serialization.save
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_saver
assert dcp.save is state_dict_saver.save and dcp.save.__wrapped__
"""
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + script],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
