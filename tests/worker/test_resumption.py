"""Where a script resumed is known from what it reads, and never guessed.

Each case is a job of several processes in one directory, one for each round.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.worker import resumption
from holdfast.worker.resumption import FileKey, Registry, SavedFile

Run = Callable[..., str]

BEFORE = """
import os, socket, time, threading, warnings
warnings.simplefilter("ignore")
from holdfast.messages.records import RESUMED
from holdfast.shm.rank_page import RankPage, create_page
from holdfast.worker import runtime
from holdfast.worker.channel import Channel
from holdfast.worker.runtime import Runtime
from holdfast.worker.torch_hooks import patches
import torch

near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
page = RankPage(create_page())
worker = Runtime(Channel(far.detach()), page, ROUND, os.getcwd(), time.time())
runtime.install(worker)
patches.book_saves(worker)
patches.note_loads(worker)
patches.count_steps(worker)
worker.resumption.observe()

model = torch.nn.Linear(2, 2)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps, optimizer=sgd):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

def told():
    state = page.read()
    return state.step, state.steps, RESUMED[state.resumed]

def check(*expected):
    assert told() == expected, told()
"""


@pytest.fixture
def rounds(with_torch: Run) -> Run:
    """Run a process for each round of a job."""

    def run(*scripts: str) -> str:
        for number, script in enumerate(scripts, start=1):
            said = with_torch(BEFORE.replace("ROUND", str(number)), script)
        return said

    return run


SAVE = 'train(5); torch.save(model.state_dict(), "state.pt"); train(2); check(7, 7, "none")'
LOAD = 'model.load_state_dict(torch.load("state.pt"))'


def test_a_script_that_loads_what_it_saved_resumes_at_that_step(rounds: Run) -> None:
    again = 'train(3); check(8, 3, "known"); torch.save(model.state_dict(), "state.pt")'
    rounds(SAVE, f"{LOAD}; {again}", f'{LOAD}; train(1); check(9, 1, "known")')


def test_a_file_may_be_written_under_another_name_first(rounds: Run) -> None:
    save = """
    train(5)
    torch.save(model.state_dict(), "state.new")
    os.replace("state.new", "state.pt")
    """
    rounds(save, f'{LOAD}; train(1); check(6, 1, "known")')


def test_a_file_may_be_given_as_itself(rounds: Run) -> None:
    save = """
    train(5)
    with open("state.pt", "wb") as file:
        torch.save(model.state_dict(), file)
    """
    load = """
    with open("state.pt", "rb") as file:
        model.load_state_dict(torch.load(file))
    train(1)
    check(6, 1, "known")
    """
    rounds(save, load)


def test_a_distributed_checkpoint_tells_its_step(rounds: Run) -> None:
    save = """
    import torch.distributed.checkpoint as dcp
    train(5)
    dcp.save(model.state_dict(), checkpoint_id="saved")
    """
    load = """
    import torch.distributed.checkpoint as dcp
    dcp.load(model.state_dict(), checkpoint_id="saved")
    train(1)
    check(6, 1, "known")
    """
    rounds(save, load)


def test_a_checkpoint_that_is_written_meanwhile_is_of_the_step_at_which_it_began(
    rounds: Run,
) -> None:
    save = """
    import torch.distributed as dist, torch.distributed.checkpoint as dcp
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train(5)
    saving = dcp.async_save(model.state_dict(), checkpoint_id="saved")
    train(2)
    saving.result()
    dist.destroy_process_group()
    """
    load = """
    import torch.distributed.checkpoint as dcp
    dcp.load(model.state_dict(), checkpoint_id="saved")
    train(1)
    check(6, 1, "known")
    """
    rounds(save, load)


def test_safetensors_are_files_like_others(rounds: Run) -> None:
    save = """
    from safetensors.torch import save_file
    train(5)
    save_file(model.state_dict(), "state.safetensors")
    """
    load = """
    from safetensors.torch import load_file
    model.load_state_dict(load_file("state.safetensors"))
    train(1)
    check(6, 1, "known")
    """
    rounds(save, load)


def test_a_script_that_reads_nothing_begins_at_0(rounds: Run) -> None:
    rounds(SAVE, 'train(3); check(3, 3, "none")')


def test_what_is_older_than_the_job_says_nothing(rounds: Run) -> None:
    pretrained = """
    open("pretrained", "w").close()
    os.utime("pretrained", (1e9, 1e9))
    """
    rounds(pretrained, 'open("pretrained").read(); train(3); check(3, 3, "none")')


@pytest.mark.parametrize(
    ("save", "load"),
    [
        ("open('kept', 'w').write('5')", "open('kept').read()"),
        ("os.close(os.open('kept', os.O_CREAT))", "os.close(os.open('kept', os.O_RDONLY))"),
        ("pass", "import io; io.BytesIO(); torch.load(buffer())"),
        ("torch.save(1, 'kept'); open('kept', 'wb').write(b'other')", "open('kept').read()"),
    ],
    ids=["a file", "a descriptor", "memory", "a file that was written again"],
)
def test_a_script_that_reads_something_else_may_have_resumed_anywhere(
    rounds: Run, save: str, load: str
) -> None:
    buffer = """
def buffer():
    import io
    made = io.BytesIO()
    torch.save(1, made)
    made.seek(0)
    return made
"""
    rounds(f"train(5); {save}", f'{buffer}\n{load}; train(3); check(3, 3, "unknown")')


def test_a_known_file_among_others_tells_the_step(rounds: Run) -> None:
    save = f'{SAVE}; open("latest", "w").write("state.pt")'
    rounds(save, f'open("latest").read(); {LOAD}; train(1); check(6, 1, "known")')


def test_files_of_different_steps_are_not_certain(rounds: Run) -> None:
    save = 'train(2); torch.save(1, "best.pt"); train(3); torch.save(1, "state.pt")'
    rounds(save, 'torch.load("best.pt"); torch.load("state.pt"); train(1); check(6, 1, "unknown")')


def test_a_save_beside_the_training_is_not_certain(rounds: Run) -> None:
    save = """
    train(5)
    thread = threading.Thread(target=torch.save, args=(model.state_dict(), "state.pt"))
    thread.start()
    thread.join()
    """
    rounds(save, f'{LOAD}; train(1); check(6, 1, "unknown")')


def test_what_follows_from_an_unknown_step_is_unknown(rounds: Run) -> None:
    lost = """
    open("kept").read()
    train(3)
    torch.save(model.state_dict(), "state.pt")
    """
    rounds('train(5); open("kept", "w").close()', lost, f'{LOAD}; train(1); check(4, 1, "unknown")')


def test_the_scripts_own_count_is_known_whatever_it_read(rounds: Run) -> None:
    own = 'import holdfast; open("kept").read(); train(1); holdfast.progress(41)'
    rounds('open("kept", "w").close()', f'{own}; check(41, 1, "known")')


def test_an_optimizers_own_count_is_known_whatever_was_read(rounds: Run) -> None:
    adam = "adam = torch.optim.Adam(model.parameters())"
    save = f'{adam}; train(5, adam); torch.save(adam.state_dict(), "state.pt"); train(2, adam)'
    load = f'{adam}; open("kept").read(); adam.load_state_dict(torch.load("state.pt"))'
    rounds(f'{save}; open("kept", "w").close()', f'{load}; train(1, adam); check(6, 1, "known")')


def test_a_process_forked_from_a_rank_notes_nothing(rounds: Run) -> None:
    save = """
    train(5)
    if os.fork() == 0:
        torch.save(model.state_dict(), "state.pt")
        os._exit(0)
    os.wait()
    """
    rounds(save, f'{LOAD}; train(1); check(1, 1, "unknown")')


def test_nothing_is_observed_after_the_first_step(rounds: Run) -> None:
    rounds(SAVE, 'train(1); open("state.pt").close(); train(1); check(2, 2, "none")')


def test_the_registry_forgets_its_oldest_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumption, "REGISTRY_BYTES", 1000)
    registry = Registry(str(tmp_path / "saved_steps"))
    for step in range(100):
        registry.add(SavedFile(FileKey(1, step, 2, 3), step, exact=True, closed=True))
    kept = [saved.step for saved in registry.files().values()]
    assert kept == list(range(100 - len(kept), 100))
    assert 10 < len(kept) < 60
    assert os.listdir(tmp_path) == ["saved_steps"]


def test_a_registry_that_cannot_be_written_or_read_is_empty(tmp_path: Path) -> None:
    registry = Registry(str(tmp_path / "missing" / "saved_steps"))
    registry.add(SavedFile(FileKey(1, 2, 3, 4), 5, exact=True, closed=True))
    assert registry.files() == {}
    torn = tmp_path / "saved_steps"
    torn.write_text("1 2 3 4 5 1 1\n1 2 3\n\n")
    assert len(Registry(str(torn)).files()) == 1
