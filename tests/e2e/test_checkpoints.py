"""Snapshots and checkpoints of real training: whatever is killed, torn or full, what is restored is the
newest that verifies, and the same on all ranks.

Starting torch takes seconds, so one job tells a whole story here, and each test checks one promise in
it. Scripts and keepers can be held at chosen places, so no story depends on how fast anything is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ports import free_port

from holdfast.checkpoint.memory.image import Image
from holdfast.checkpoint.state.layout import Contents
from holdfast.checkpoint.storage.backends import open_storage
from holdfast.checkpoint.storage.commit import verify
from holdfast.checkpoint.storage.manifest import steps
from holdfast.checkpoint.storage.writer_mark import MARK
from holdfast.core.commits.state import Commits

from .harness import Run, cmdline, gone, wait_for

TRAINER = """
    import gc, glob, hashlib, os, sys, time
    import torch, torch.distributed as dist
    import holdfast

    gc.freeze()  # Python ends faster: it need not look at all that was imported.
    torch.set_num_threads(1)
    rank, until = int(os.environ.get("RANK", "0")), int(sys.argv[1])
    life = 1 + len(glob.glob(f"life_{rank}_*"))
    open(f"life_{rank}_{life}", "w").close()

    def hold(name):
        open(f"{name}.at_{rank}", "w").close()
        while not os.path.exists(f"{name}.go"):
            time.sleep(0.01)

    def note(*words):
        with open(f"notes_{rank}", "a") as file:
            print(*words, file=file)

    def digest():
        found = hashlib.sha256()
        for tensor in [*net.state_dict().values(), *optim.state_dict()["state"].values()]:
            for part in tensor.values() if isinstance(tensor, dict) else [tensor]:
                found.update(part.numpy().tobytes())
        return found.hexdigest()[:16]

    together = TOGETHER and "RANK" in os.environ
    if together:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    net = torch.nn.Linear(16, 16)
    model = torch.nn.parallel.DistributedDataParallel(net) if together else net
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"net": net, "optim": optim, "rank": rank}
    ckpt = holdfast.Checkpointer("ckpts", state, OPTIONS)
    BEFORE
    step = ckpt.restore()
    note("restored", step, ckpt.restored.where, digest())
    AFTER
    while step < until:
        random = torch.Generator().manual_seed(1000 * step + rank)
        optim.zero_grad()
        model(torch.randn(4, 16, generator=random)).square().mean().backward()
        optim.step()
        step += 1
        ticket = ckpt.save(step)
        note("saved", step, digest())
        if ticket.to is not None:
            assert ticket.memory().outcome == "saved", ticket.memory()
        THEN
    note("ended", step, digest())
    if together:
        dist.barrier()
        dist.destroy_process_group()
"""
"""Trains to the step that its argument names. It notes what it restores and saves."""

HOOKS = """
    import os, sys

    if "holdfast.checkpoint.keeper" in sys.orig_argv:
        import time
        from holdfast.checkpoint.memory import image
        from holdfast.checkpoint.storage import posix as disk

        def gated(name, real):
            def act(*args, **named):
                if os.path.exists(f"{name}.closed"):
                    open(f"{name}.reached", "w").close()
                    while os.path.exists(f"{name}.closed"):
                        time.sleep(0.01)
                return real(*args, **named)
            return act

        disk.Disk.create = gated("write", disk.Disk.create)
        image.block_digests = gated("seal", image.block_digests)
"""
"""Keepers read this when they start: what they write and seal can be held up."""


def trainer(
    options: str, *, together: bool = False, before: str = "", after: str = "", then: str = ""
) -> str:
    text = TRAINER.replace("TOGETHER", str(together)).replace("OPTIONS", options)
    for name, lines in (("BEFORE", before), ("AFTER", after), ("THEN", then)):
        place = next(line for line in text.splitlines() if line.strip() == name)
        depth = len(place) - len(place.lstrip())
        lines = textwrap.indent(textwrap.dedent(lines).strip("\n") or "pass", " " * depth)
        text = text.replace(place, lines)
    return text


class Training(Run):
    """A run whose script and keepers can be held, and what it noted."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        hooks = folder / "hooks"
        hooks.mkdir(exist_ok=True)
        (hooks / "sitecustomize.py").write_text(textwrap.dedent(HOOKS))
        self.env["PYTHONPATH"] = os.pathsep.join(
            [str(hooks), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        self.env |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def go(self, script: str, until: int, *flags: str, nproc: int = 2) -> Training:
        self.start(*flags, self.write(script), str(until), nproc=nproc)
        return self

    # ---- held places ----

    def held(self, name: str, ranks: int = 2) -> None:
        """Wait until all ranks are at that place."""
        places = [self.folder / f"{name}.at_{rank}" for rank in range(ranks)]
        self.await_(lambda: all(place.exists() for place in places), f"all ranks at {name}")

    def let_go(self, name: str) -> None:
        (self.folder / f"{name}.go").touch()

    def shut(self, gate: str) -> None:
        (self.folder / f"{gate}.reached").unlink(missing_ok=True)
        (self.folder / f"{gate}.closed").touch()

    def reached(self, gate: str) -> None:
        self.await_((self.folder / f"{gate}.reached").exists, f"a keeper at the {gate} gate")

    def open(self, gate: str) -> None:
        (self.folder / f"{gate}.closed").unlink()

    def await_(self, found: Callable[[], Any], what: str) -> None:
        """Wait for that; but not for a job that is over."""

        def look() -> bool:
            if found():
                return True
            assert self.process is not None
            code = self.process.poll()
            assert code is None, f"the job ended with {code} before {what}"
            return False

        wait_for(look, what)

    def keeper(self, other_than: int = 0) -> int:
        def find() -> int:
            found = [pid for pid in self.alive() if b"holdfast.checkpoint.keeper" in cmdline(pid)]
            return next((pid for pid in found if pid != other_than and not gone(pid)), 0)

        return wait_for(find, "a keeper")

    # ---- what came of it ----

    def notes(self, rank: int = 0, what: str = "") -> list[list[str]]:
        path = self.folder / f"notes_{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split()[bool(what) :] for line in lines if line.startswith(what)]

    def restored(self, rank: int = 0) -> list[tuple[int, str]]:
        """What each life of that rank began with."""
        return [(int(step), where) for step, where, _ in self.notes(rank, "restored")]

    def stored(self) -> dict[int, str]:
        """The steps that there is anything of on storage, and their state."""
        storage = open_storage(self.folder / "ckpts")
        return {one.step: one.state for one in steps(storage)}

    def intact(self) -> list[int]:
        """The steps on storage that are complete, every byte of which was checked."""
        storage = open_storage(self.folder / "ckpts")
        whole = [step for step, state in self.stored().items() if state == "complete"]
        assert [refusal for step in whole for refusal in verify(storage, step)] == []
        return sorted(whole)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """All events of that kind in the journal."""
        query = "SELECT event FROM events WHERE json_extract(event, '$.type') = ? ORDER BY number"
        with contextlib.closing(sqlite3.connect(self.job_home / "journal.db")) as journal:
            return [json.loads(row[0]) for row in journal.execute(query, (kind,))]

    def images(self) -> list[str]:
        """What of this run is in shared memory."""
        return [name for name in os.listdir("/dev/shm") if f"-{self.job}-" in name]


Make = Callable[..., Training]


@contextlib.contextmanager
def trainings(root: Path) -> Iterator[Make]:
    """Runs in folders under that one; all are ended, and tell their story if something is wrong."""
    made: list[Training] = []

    def make(folder: str = "run") -> Training:
        place = root / folder
        place.mkdir(exist_ok=True)
        made.append(Training(place))
        return made[-1]

    try:
        yield make
    except BaseException:
        print(*[run.story() for run in made], sep="\n\n")
        raise
    finally:
        for run in made:
            run.close()


def finished(run: Training, code: int = 0) -> Training:
    assert run.code() == code, run.story()
    run.assert_nobody_left()
    return run


# ---- a rank is killed ---------------------------------------------------------------------------

NO_STORAGE = """
    if life > 1:
        import holdfast.checkpoint.checkpointer as engine
        def never(where):
            raise AssertionError("storage was read")
        engine.open_storage = never
"""
KILL_AT_7 = """
    if step == 7 and life == 1 and rank == 1:
        os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """Rank 1 of two kills itself after step 7, which is in memory and was never meant for storage."""
    with trainings(tmp_path_factory.mktemp("killed")) as make:
        run = make()
        options = "memory_every=1, storage_every=1000"
        run.go(trainer(options, together=True, before=NO_STORAGE, then=KILL_AT_7), 12)
        yield finished(run)


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """The same training, undisturbed and without us."""
    with trainings(tmp_path_factory.mktemp("torchrun")) as make:
        run = make()
        run.write(trainer("storage_every=6", together=True))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        port = ["--master-port", str(free_port())]
        run.start_raw([*torchrun, *port, "train.py", "12"])
        yield finished(run)


def test_a_killed_rank_comes_back_from_memory_and_reads_no_storage(killed: Training) -> None:
    for rank in (0, 1):
        assert killed.restored(rank) == [(0, "None"), (7, "memory")]
        (_, (*_, digest)) = killed.notes(rank, "restored")
        assert ["7", digest] in killed.notes(rank, "saved")


def test_training_after_a_kill_ends_with_the_very_weights_of_an_undisturbed_run(
    killed: Training, under_torchrun: Training
) -> None:
    for rank in (0, 1):
        assert killed.notes(rank, "ended") == under_torchrun.notes(rank, "ended")


def test_a_kill_brings_the_newest_snapshot_to_storage(killed: Training) -> None:
    (death,) = [event for event in killed.events("WorkerExited") if event.get("signal") == 9]
    (written,) = [e for e in killed.events("CheckpointWritten") if e["snapshot"]["step"] == 7]
    assert written["error"] == ""
    assert written["at"] > death["at"]
    assert 7 in killed.intact()


def test_nothing_is_left_in_shared_memory_after_success(killed: Training) -> None:
    assert killed.images() == []


SAVE_PLAIN = """
    import torch, torch.distributed.checkpoint as dcp
    net = torch.nn.Linear(16, 16)
    optim = torch.optim.Adam(net.parameters(), lr=0.01)
    net(torch.ones(16)).sum().backward()
    optim.step()
    state = {"net": net.state_dict(), "optim": optim.state_dict(), "rank": 9}
    dcp.save(state, checkpoint_id="old/step-40", no_dist=True)
"""


def test_a_job_starts_from_a_plain_checkpoint_and_after_a_kill_goes_on_from_its_own(
    tmp_path: Path,
) -> None:
    with trainings(tmp_path) as make:
        run = make()
        command = [sys.executable, "-c", textwrap.dedent(SAVE_PLAIN)]
        subprocess.run(command, cwd=run.folder, check=True)
        kill = KILL_AT_7.replace("step == 7", "step == 43")
        script = trainer("memory_every=1, storage_every=1000", together=True, then=kill)
        script = script.replace("ckpt.restore()", "ckpt.restore(start_from='old')")
        finished(run.go(script, 45))
        for rank in (0, 1):
            assert run.restored(rank) == [(40, "start"), (43, "memory")]
        assert "step-40, which torch.distributed.checkpoint saved: NOT VERIFIED" in run.err


def test_the_same_script_saves_under_torchrun(under_torchrun: Training) -> None:
    assert under_torchrun.restored(1) == [(0, "None")]
    assert under_torchrun.intact() == [6, 12]


def test_the_same_script_saves_and_restores_under_plain_python(tmp_path: Path) -> None:
    with trainings(tmp_path) as make:
        run = make()
        run.write(trainer("storage_every=2"))
        for until in ("4", "6"):
            run.start_raw([sys.executable, "train.py", until])
            finished(run)
        assert run.restored() == [(0, "None"), (4, "storage")]
        assert run.intact() == [2, 4, 6]
        (_, (*_, digest)) = run.notes(0, "restored")
        assert ["4", digest] in run.notes(0, "saved")


# ---- keeper and coordinator are killed ----------------------------------------------------------

SAVE_EACH = "memory_every=1, storage_every=5"
HOLD_AT_8 = """
    if step == 8 and life == 1:
        hold("eight")
"""


class Orphaned:
    """Keeper and coordinator are killed while step 1 is sealed and while step 5 is written; then the
    rank dies; in the end it is through, and the agent is killed while step 10 is written."""

    def __init__(self, make: Make) -> None:
        self.run = run = make()
        run.shut("seal")
        run.shut("write")
        run.go(trainer(SAVE_EACH, then=HOLD_AT_8), 10, nproc=1)
        run.reached("seal")
        run.kill(first := run.keeper())
        kill_coordinator(run)
        second = run.keeper(other_than=first)
        run.open("seal")
        run.reached("write")
        run.held("eight", 1)
        run.shut("write")
        run.kill(second)
        run.reached("write")
        kill_coordinator(run)
        run.open("write")
        run.until(lambda job: any(book.stored for book in job.of(Commits).books.values()), "step 5")
        run.shut("write")
        run.kill_rank(0)
        run.until(lambda job: job.ranks and job.unfinished == 0, "the end of the only rank")
        run.reached("write")
        self.ended_early = gone(run.pid)
        run.kill(run.agent())
        run.open("write")
        finished(run)


@pytest.fixture(scope="module")
def orphaned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orphaned]:
    with trainings(tmp_path_factory.mktemp("orphaned")) as make:
        yield Orphaned(make)


def kill_coordinator(run: Training) -> None:
    run.kill(coordinator := run.coordinator())
    wait_for(lambda: run.coordinator() != coordinator, "another coordinator")


def test_a_keeper_that_somebody_stopped_goes_on_with_the_next_save(tmp_path: Path) -> None:
    with trainings(tmp_path) as make:
        run = make()
        run.go(trainer(SAVE_EACH, then=HOLD_AT_8), 10, nproc=1)
        run.held("eight", 1)
        run.kill(run.keeper(), signal.SIGSTOP)
        run.let_go("eight")
        assert run.code(20.0) == 0
        assert run.intact()[-1] == 10


def test_a_snapshot_counts_although_the_keeper_died_while_it_was_sealed(orphaned: Orphaned) -> None:
    assert orphaned.run.notes(0, "saved")[0][0] == "1"
    assert orphaned.run.restored(0) == [(0, "None"), (8, "memory"), (10, "memory")]


def test_a_checkpoint_is_whole_although_keeper_and_coordinator_died_while_it_was_written(
    orphaned: Orphaned,
) -> None:
    assert 5 in orphaned.run.intact()


def test_the_end_of_a_job_waits_for_the_last_checkpoint(orphaned: Orphaned) -> None:
    assert not orphaned.ended_early


def test_the_last_checkpoint_is_whole_although_the_agent_died_while_it_was_written(
    orphaned: Orphaned,
) -> None:
    assert 10 in orphaned.run.intact()


def test_training_noticed_the_death_of_the_rank_and_of_the_agent_alone(orphaned: Orphaned) -> None:
    kinds = [incident["kind"] for incident in orphaned.run.ask("incidents")]
    assert [kind for kind in kinds if kind != "storage"] == ["signal", "node"]


def test_a_step_that_is_being_written_stays_while_newer_ones_are_saved_to_memory(
    tmp_path: Path,
) -> None:
    with trainings(tmp_path) as make:
        run = make()
        run.shut("write")
        run.go(trainer(SAVE_EACH, then="if step == 9: hold('9')"), 9)
        run.reached("write")
        run.held("9")
        run.open("write")
        run.let_go("9")
        assert finished(run).intact() == [5, 9], "the end writes the newest snapshot"


# ---- agent and launcher are killed --------------------------------------------------------------


HOLD_AT_9 = """
    if step == 5 or step % 5 == 0 and life == 3:
        assert ticket.storage().outcome == "saved"
    if step in (9, 12):
        hold(str(step))
"""


class Abandoned:
    """An agent is killed while step 10 is sealed, its launcher while 10 is written and 13 sealed."""

    def __init__(self, make: Make) -> None:
        self.run = run = make()
        run.go(trainer(SAVE_EACH, then=HOLD_AT_9), 20, "--save-deadline", "0.5")
        run.held("9")
        run.shut("seal")
        run.let_go("9")
        run.reached("seal")
        run.kill(agent := run.agent())
        wait_for(lambda: run.agent() != agent, "another agent")
        run.shut("write")
        run.open("seal")
        run.reached("write")
        run.held("12")
        run.shut("seal")
        run.let_go("12")
        run.reached("seal")
        run.kill(run.pid)
        run.assert_nobody_left()
        self.left = run.images()
        run.open("write")
        run.open("seal")
        self.next = make()
        self.next.go(trainer(SAVE_EACH, then=HOLD_AT_9), 12)
        finished(self.next)


@pytest.fixture(scope="module")
def abandoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Abandoned]:
    with trainings(tmp_path_factory.mktemp("abandoned")) as make:
        yield Abandoned(make)


def test_images_outlive_their_agent_and_the_next_one_has_them(abandoned: Abandoned) -> None:
    for rank in (0, 1):
        assert abandoned.run.restored(rank)[:2] == [(0, "None"), (9, "memory")]


def test_what_was_half_written_when_the_launcher_was_killed_is_not_restored(
    abandoned: Abandoned,
) -> None:
    for rank in (0, 1):
        assert abandoned.run.restored(rank)[2:] == [(5, "storage")]


def test_half_written_steps_are_saved_again_and_whole(abandoned: Abandoned) -> None:
    assert {5, 10} <= set(abandoned.run.intact())


def test_what_a_killed_launcher_left_in_shared_memory_is_gone_once_another_ran(
    abandoned: Abandoned,
) -> None:
    assert len(abandoned.left) == 1
    assert not os.path.exists(f"/dev/shm/{abandoned.left[0]}")
    assert abandoned.next.images() == []


# ---- told to stop; worlds of other sizes --------------------------------------------------------


class Resized:
    """Two ranks are told to stop while storage is slow; then there are three, then one."""

    def __init__(self, make: Make) -> None:
        options = "memory_every=1, storage_every=5, keep=holdfast.KeepLatest(2)"
        script = trainer(options, then="if step == 5: ticket.storage()\nif step == 7: hold('7')")
        self.two = run = make()
        run.go(script, 9, "--save-deadline", "1")
        run.held("7")
        run.shut("write")
        run.kill(run.pid, signal.SIGTERM)
        self.code = run.code()  # Storage takes until `open`, which comes after it.
        self.reached = (run.folder / "write.reached").exists()
        self.intact = run.intact()
        run.open("write")
        run.let_go("7")
        each = trainer("storage_every=1, keep=holdfast.KeepLatest(2)", together=True)
        self.three = finished(make().go(each, 9, nproc=3))
        self.one = finished(make().go(each, 10, nproc=1))


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resized]:
    with trainings(tmp_path_factory.mktemp("resized")) as make:
        yield Resized(make)


def test_a_job_told_to_stop_ends_in_time_although_storage_is_slow(resized: Resized) -> None:
    assert resized.code == 75
    assert resized.reached
    told = "storage took longer than the 1 s of --save-deadline"
    assert told in resized.two.err
    assert "the next save tries again" not in resized.two.err


def test_the_old_checkpoint_is_unharmed_by_a_save_that_was_cut_short(resized: Resized) -> None:
    assert resized.intact == [5]


def test_a_world_of_another_size_restores_from_storage(resized: Resized) -> None:
    run = resized.one
    saved = dict(run.notes(0, "saved"))
    assert run.restored(0) == [(0, "None"), (5, "storage"), (9, "storage")]
    assert run.restored(1) == [(0, "None"), (5, "storage")]
    assert run.restored(2) == [(5, "storage")]
    assert [digest for *_, digest in run.notes(0, "restored")][1:] == [saved["5"], saved["9"]]


def test_across_runs_exactly_as_many_checkpoints_stay_as_are_to_be_kept(resized: Resized) -> None:
    assert resized.one.intact() == [9, 10]
    left = sorted(path.name for path in (resized.one.folder / "ckpts").glob("step_*"))
    assert left == ["step_000000009", "step_000000010"]


# ---- storage is full ----------------------------------------------------------------------------

TELL_STORAGE = """
    if step < 4:
        result = ticket.storage()
        note("result", result.outcome, result.reason)
        hold(str(step))
"""


class Full:
    """Storage has no room for step 2, nor for step 4, the last one."""

    def __init__(self, make: Make) -> None:
        self.run = run = make()
        self.disk = run.folder / "ckpts"
        self.disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(self.disk)]
        if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("a small file system cannot be mounted here")
        try:
            self._run()
        finally:
            self.stored = run.intact()
            subprocess.run(["umount", "-l", str(self.disk)], check=True)

    def _run(self) -> None:
        run = self.run
        run.go(trainer("storage_every=1", then=TELL_STORAGE), 4, nproc=1)
        run.held("1", 1)
        self.fill()
        run.let_go("1")
        run.held("2", 1)
        self.incidents = run.ask("incidents")
        self.status = run.ask("status")
        (self.disk / "filler").unlink()
        run.let_go("2")
        run.held("3", 1)
        self.fill()
        run.shut("write")

        run.let_go("3")
        run.until(lambda job: job.ranks and job.unfinished == 0, "the end of the only rank")
        run.reached("write")
        run.open("write")
        self.code = run.code()

    def fill(self) -> None:
        with contextlib.suppress(OSError), open(self.disk / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(512))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Full]:
    with trainings(tmp_path_factory.mktemp("full")) as make:
        yield Full(make)


def test_training_goes_on_when_storage_is_full_and_the_ticket_says_why(full: Full) -> None:
    failed = full.run.notes(0, "result")[1]
    assert failed[0] == "failed"
    assert "No space left on device" in " ".join(failed)
    assert [step for step, _ in full.run.notes(0, "saved")] == ["1", "2", "3", "4"]


def test_a_full_storage_is_an_incident_that_everybody_can_see(full: Full) -> None:
    (incident,) = full.incidents
    assert (incident["kind"], incident["step"]) == ("storage", 2)
    assert "No space left on device" in incident["detail"]
    assert "training goes on" in incident["action"]
    assert "step 2 was not written to storage" in full.status["last_incident"]
    (checkpoints,) = full.status["checkpoints"]
    assert (checkpoints["in_memory"], checkpoints["on_storage"]) == (2, 1)
    assert checkpoints["failures"] == 1
    assert "step 2 is not on storage" in full.run.err


def test_once_there_is_room_again_the_next_save_works(full: Full) -> None:
    assert full.run.notes(0, "result")[2] == ["saved"]
    assert full.stored == [1, 3]


def test_a_job_whose_last_checkpoint_cannot_be_written_ends_with_1_and_the_reason(
    full: Full,
) -> None:
    assert full.code == 1
    assert "the last save failed" in full.run.err
    assert "No space left on device" in full.run.err


# ---- bytes are flipped --------------------------------------------------------------------------

TWO_CHECKPOINTERS = """
    from pathlib import Path
    from holdfast.checkpoint.memory.image import Image
    from holdfast.worker import runtime

    own = {"value": 0}
    second = holdfast.Checkpointer(None, own)

    def spoil(which, count):
        "Flip a byte in the newest images of a checkpointer of this rank."
        home = Path(runtime.current().images)
        images = [Image.open(p) for p in home.glob(f"{which._name}-{rank}-*.image")]
        images.sort(key=lambda image: image.record().step)
        for image in images[-count:]:
            image.body[image.record().size // 2 + life] ^= 0xFF

    def spoil_storage(number):
        if rank == 0:
            path = f"ckpts/step_{number:09}/__1_"
            (name,) = glob.glob(path + "*")
            with open(name, "r+b") as file:
                file.seek(os.path.getsize(name) // 3)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 0xFF]))

    def await_stored(number):
        while not os.path.exists(f"ckpts/step_{number:09}/holdfast.json"):
            time.sleep(0.01)

    if life == 2:
        await_stored(7)
        spoil(ckpt, 1)
        if rank == 1:
            spoil(second, 1)
    elif life == 3:
        await_stored(9)
        spoil(ckpt, 2)
        if rank == 0:
            spoil_storage(9)
    elif life == 4:
        spoil(ckpt, 2)
        for number in (5, 7):
            spoil_storage(number)
    if life > 1:
        holdfast.barrier("spoilt")
"""
SECOND_RESTORES = """
    note("second", second.restore(), second.restored.where, own["value"])
"""
SECOND_SAVES = """
    own["value"] = step * 10 + rank
    other = second.save(step)
    if step == 5:
        assert ticket.storage().outcome == "saved"
    if step == {1: 7, 2: 9, 3: 8}.get(life):
        assert other.memory().outcome == "saved"
        if rank == 1:
            os.kill(os.getpid(), 9)
        time.sleep(60)
"""


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """Rank 1 dies at steps 7, 9 and 8. Before its next life something of what was saved is spoilt: the
    newest images; then the newest checkpoint too; then everything."""
    with trainings(tmp_path_factory.mktemp("spoilt")) as make:
        run = make()
        script = trainer(
            SAVE_EACH, before=TWO_CHECKPOINTERS, after=SECOND_RESTORES, then=SECOND_SAVES
        )
        yield run.go(script, 12)


def test_when_the_newest_image_of_one_rank_is_spoilt_all_ranks_take_an_older_one(
    spoilt: Training,
) -> None:
    spoilt.code()
    assert [spoilt.notes(rank, "second")[1] for rank in (0, 1)] == [
        ["6", "memory", "60"],
        ["6", "memory", "61"],
    ]
    assert "refused: step 7 from memory: rank 1: " in spoilt.err


def test_two_checkpointers_of_a_script_are_apart(spoilt: Training) -> None:
    spoilt.code()
    assert spoilt.restored(0)[1] == (7, "storage")
    assert spoilt.notes(0, "second")[2] == ["9", "memory", "90"]


def test_when_no_image_is_good_the_newest_checkpoint_is_taken_and_that_is_said(
    spoilt: Training,
) -> None:
    spoilt.code()
    assert [spoilt.restored(rank)[1] for rank in (0, 1)] == [(7, "storage")] * 2
    assert "restored step 7 from storage" in spoilt.err
    assert "refused: step 7 from memory: rank 0: " in spoilt.err


def test_when_the_newest_checkpoint_is_spoilt_an_older_one_is_taken_and_that_is_said(
    spoilt: Training,
) -> None:
    spoilt.code()
    assert [spoilt.restored(rank)[2] for rank in (0, 1)] == [(7, "storage")] * 2
    assert "refused: step 9 from storage: rank " in spoilt.err
    assert spoilt.stored()[9] == "refused"


def test_when_nothing_is_good_the_job_fails_and_does_not_start_over(spoilt: Training) -> None:
    assert spoilt.code() == 93
    assert "no saved state can be restored" in spoilt.err
    assert len(spoilt.restored(0)) == 3
    assert spoilt.restored(0)[1:] == [(7, "storage")] * 2


def test_nothing_is_left_in_shared_memory_after_a_failure(spoilt: Training) -> None:
    spoilt.code()
    assert spoilt.images() == []


def test_another_run_does_not_start_over_either_when_all_that_was_saved_is_spoilt(
    spoilt: Training,
) -> None:
    spoilt.code()
    again = Training(spoilt.folder)
    try:
        again.go(trainer("storage_every=5"), 1)
        assert again.code() != 0
        assert "no saved state can be restored" in again.err
    finally:
        again.close()


def test_an_image_that_is_spoilt_after_its_seal_does_not_become_a_checkpoint(
    tmp_path: Path,
) -> None:
    with trainings(tmp_path) as make:
        run = make()
        run.shut("write")
        run.go(trainer("storage_every=5"), 5, nproc=1)
        run.reached("write")
        (home,) = run.images()
        for path in Path("/dev/shm", home).glob("*.image"):
            image = Image.open(path)
            record = image.record()
            if record is not None and record.step == 5:
                where = record.contents
                contents = msgspec.msgpack.decode(image.body[where.at : where.end], type=Contents)
                image.body[contents.items[0].raw.at] ^= 0xFF
        run.open("write")
        run.code()
        assert run.stored()[5] != "complete"


# ---- others save there too ----------------------------------------------------------------------


def test_two_jobs_at_once_in_one_directory_leave_each_others_checkpoints_whole(
    tmp_path: Path,
) -> None:
    """One has seen that nobody committed step 1, and is about to write it when the other does. They are
    told of each other by a mark, but it may be lost."""
    with trainings(tmp_path) as make:
        slow, fast, told = make("slow"), make("fast"), make("told")
        script = trainer("storage_every=1", then="note('result', ticket.storage().outcome)")
        script = script.replace('"ckpts"', repr(str(fast.folder / "ckpts")))
        slow.shut("write")
        slow.go(script, 2, nproc=1)
        slow.reached("write")
        told.go(script, 2, nproc=1)
        assert told.code() == 1
        assert f"job {slow.job} (process " in told.err
        assert told.notes(0, "result") == [["failed"], ["failed"]]
        (fast.folder / "ckpts" / MARK).unlink()
        finished(fast.go(script.replace("manual_seed(7)", "manual_seed(8)"), 2, nproc=1))
        slow.open("write")
        slow.code()
        assert fast.notes(0, "result") == [["saved"], ["saved"]]
        assert fast.intact() == [1, 2]


# ---- two nodes ----------------------------------------------------------------------------------


def test_a_rank_killed_on_one_of_two_nodes_brings_both_back_from_memory(tmp_path: Path) -> None:
    kill = KILL_AT_7.replace("rank == 1", "rank == 1 and not glob.glob('life_0_2')")
    script = trainer("memory_every=1, storage_every=1000", together=True, then=kill)
    with trainings(tmp_path) as make:
        first, second = make(), make()
        second.job, second.job_home = first.job, first.job_home
        meet = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
        for node in (first, second):
            node.go(script, 9, *meet, "--rdzv-backend", "c10d", nproc=1)
        finished(first)
        finished(second)
        for rank in (0, 1):
            assert first.restored(rank) == [(0, "None"), (7, "memory")]
        assert first.intact() == [7, 9]
        (commit,) = [e for e in first.events("CheckpointWritten") if e["snapshot"]["step"] == 7]
        assert commit["error"] == ""
