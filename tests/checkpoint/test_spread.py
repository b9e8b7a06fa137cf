"""State that is spread over ranks is merged from what all of them saved, whoever restores it."""

from __future__ import annotations

import enum
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from keepers import TOKEN, Node
from states import CHECKPOINTER, FakeLink, Rank, check_same, flip, image_of, load, small_blocks
from test_agentlink import Worker as AgentAnswers
from worlds import run_world

from holdfast.checkpoint import checkpointer as checkpointers
from holdfast.checkpoint.checkpointer import LinkedCheckpointer
from holdfast.checkpoint.keeper.orders import _shared_digest
from holdfast.checkpoint.memory.image import Image
from holdfast.checkpoint.memory.images import Images
from holdfast.checkpoint.restore import load as restore
from holdfast.checkpoint.restore.plain_dcp import load_start
from holdfast.checkpoint.restore.sources import open_files, open_image
from holdfast.checkpoint.state.capture import Position, capture
from holdfast.checkpoint.state.layout import Contents
from holdfast.checkpoint.state.skeleton import assemble, dismantle, entries_of
from holdfast.checkpoint.state.spread import needs_all_parts
from holdfast.checkpoint.storage.backends import rank_file_name, step_directory
from holdfast.checkpoint.storage.commit import commit, verify
from holdfast.checkpoint.storage.manifest import find_step
from holdfast.checkpoint.storage.posix import PosixStorage
from holdfast.checkpoint.storage.rank_file import extents_of, write_file
from holdfast.cli.main import main
from holdfast.errors import CheckpointError, Unusable, UsageError
from holdfast.messages.checkpoints import Holder, Tried
from holdfast.messages.requests import FindState, ImageAt, LocateImage, StateFound
from holdfast.messages.units import NodeId, RoundNumber, StepNumber
from holdfast.messages.units import Rank as RankNumber
from holdfast.worker.checkpointer import AgentLink, Checkpointer

LARGE = 40_000
"""Elements of a tensor that all ranks share, and that is written once."""


class Used:
    """Numbers that were used: each rank knows those that it used itself."""

    def __init__(self, *used: int) -> None:
        self.used = set(used)

    def state_dict(self) -> dict[str, Any]:
        return {"used": set(self.used), "first": min(self.used, default=None)}

    def merge_state_dicts(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {"used": set().union(*(part["used"] for part in parts)), "parts": len(parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.used = state["used"]


class UsedByRankZero(Used):
    """As `Used`, but only rank 0 is told what all ranks used."""

    merged_by_rank_0 = True
    part: Any = "never loaded"

    def load_part(self, part: dict[str, Any] | None) -> None:
        self.part = part


class InOrder:
    """Whose state is the list of all parts."""

    def __init__(self, part: Any = None) -> None:
        self.part = part

    def state_dict(self) -> Any:
        return self.part

    def merge_state_dicts(self, parts: list[Any]) -> list[Any]:
        return parts

    def load_state_dict(self, state: list[Any]) -> None:
        self.part = state


USED = [{1, 5}, {2}, set(), {3, 4, 1 << 70}]
"""What each of four ranks used."""
ALL = {1, 2, 3, 4, 5, 1 << 70}
WORLDS = (2, 3, 4, 6)


def states(step: int = 1) -> list[dict[str, Any]]:
    """What four ranks save."""
    return [
        {
            "shared": torch.arange(float(LARGE)) + step,
            "data": Used(*numbers).state_dict(),
            "rank": rank,
        }
        for rank, numbers in enumerate(USED)
    ]


def images(directory: Path, saved: Sequence[dict[str, Any]], step: int = 1) -> list[Path]:
    size = len(saved)
    return [Rank(directory, rank, size).save(one, step) for rank, one in enumerate(saved)]


def store(directory: Path, shm: Path, saved: Sequence[dict[str, Any]], step: int = 1) -> None:
    """Write a checkpoint as keepers would: each rank a slice of what all share."""
    storage, records = PosixStorage(directory), []
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        for rank, path in enumerate(images(Path(folder), saved, step)):
            image = Image.open(path)
            record = image.record()
            assert record is not None
            body, span = image.body[: record.size], record.contents
            contents = msgspec.msgpack.decode(body[span.at : span.end], type=Contents)
            size = len(saved)
            extents = extents_of(contents, rank, size, "slice")
            where = step_directory(step), rank_file_name(rank, 1)
            whose = step, 1, rank, size
            records.append(
                write_file(storage, *where, body, extents, span, *whose, lambda size: None)
            )
            body.release()
            image.close()
    commit(storage, step, 1, len(saved), records, job="job", saved_at=1e9)


def from_storage(directory: Path, state: dict[str, Any], rank: int, step: int = 1) -> None:
    with ExitStack() as until:
        restore.load(state, open_files(PosixStorage(directory), step, until), rank)


# ---- merged -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", WORLDS)
def test_every_rank_of_any_world_loads_the_union_from_storage(
    shm: Path, tmp_path: Path, size: int
) -> None:
    store(tmp_path, shm, states())
    for rank in range(size):
        state = {"data": Used(99), "shared": torch.zeros(LARGE), "rank": None}
        from_storage(tmp_path, state, rank)
        assert state["data"].used == ALL
        assert state["rank"] == rank % 4
        check_same(state["shared"], torch.arange(float(LARGE)) + 1)


@pytest.mark.parametrize("size", WORLDS)
def test_every_rank_of_any_world_loads_the_union_from_images(shm: Path, size: int) -> None:
    paths = images(shm, states())
    for rank in range(size):
        found = load({"data": Used(99), "rank": None}, *paths, rank=rank)
        assert (found["data"].used, found["rank"]) == (ALL, rank % 4)


@settings(max_examples=25, deadline=None)
@given(parts=st.lists(st.frozensets(st.integers(0, 200)), min_size=1, max_size=6), data=st.data())
def test_parts_are_all_there_in_the_order_of_ranks(
    parts: list[frozenset[int]], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, 8))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        found = load(
            {"x": InOrder()}, *images(Path(folder), [{"x": one} for one in parts]), rank=rank
        )
    assert found["x"].part == parts


def test_parts_may_have_tensors_of_any_shape_and_none_of_them_is_a_living_one(shm: Path) -> None:
    saved = [{"x": {"t": torch.arange(float(n))}, "y": n} for n in (3, 0, LARGE, 5)]
    mine = torch.ones(3)
    state = {"x": InOrder({"t": mine}), "y": None}
    found = load(state, *images(shm, saved), rank=2)
    check_same(found["x"].part, [one["x"] for one in saved])
    assert (mine == 1).all()
    assert found["y"] == LARGE


def test_what_an_ordinary_object_saved_is_merged_once_its_class_can(
    shm: Path, tmp_path: Path
) -> None:
    """Checkpoints of older versions of a script, which were saved by rank as these are."""

    class Before:
        def state_dict(self) -> dict[str, Any]:
            return {"used": {7}, "first": 7}

        def load_state_dict(self, state: Any) -> None:
            raise NotImplementedError

    store(tmp_path, shm, [{"data": Before().state_dict()}])
    state = {"data": Used()}
    from_storage(tmp_path, state, 1)
    assert state["data"].used == {7}


def test_a_module_is_never_merged(shm: Path) -> None:
    class Averaged(torch.nn.Linear):  # type: ignore[misc]
        def merge_state_dicts(self, parts: Any) -> Any:
            raise AssertionError("it is not asked")

    module = Averaged(2, 2)
    path = Rank(shm).save({"m": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}})
    load({"m": module}, path)
    assert (module.weight == 1).all()


# ---- merged by rank 0 ---------------------------------------------------------------------------


def test_rank_0_alone_loads_the_union_where_the_class_says_so(shm: Path, tmp_path: Path) -> None:
    store(tmp_path, shm, states())
    found = [UsedByRankZero(99) for _ in range(6)]
    for rank, one in enumerate(found):
        from_storage(tmp_path, {"data": one}, rank)
    assert (found[0].used, found[0].part) == (ALL, "never loaded")
    for rank in (1, 2, 3):
        assert found[rank].part["used"] == USED[rank]
    assert [one.part for one in found[4:]] == [None, None], "there were only four ranks"
    assert [one.used for one in found[1:]] == [{99}] * 5


def test_a_rank_that_does_not_merge_needs_no_image_but_its_own(shm: Path) -> None:
    paths = images(shm, states())
    one = UsedByRankZero()
    with ExitStack() as until:
        restore.load({"data": one}, [open_image(paths[3], image_of(1, 3, 4), until)], 3)
    assert one.part["used"] == USED[3]


def test_only_ranks_that_merge_ask_for_all_images() -> None:
    assert [needs_all_parts({"a": 1, "b": Used()}, rank) for rank in (0, 1)] == [True, True]
    assert [needs_all_parts({"b": UsedByRankZero()}, rank) for rank in (0, 1)] == [True, False]
    model = {"m": torch.nn.Linear(1, 1), "value": 1}
    assert [needs_all_parts(model, rank) for rank in (0, 1)] == [False, False]


def test_a_class_that_cannot_load_a_part_is_refused_at_once(shm: Path) -> None:
    class Lacking(Used):
        merged_by_rank_0 = True

    with pytest.raises(UsageError, match=r"'data' has merged_by_rank_0, but no method load_part"):
        LinkedCheckpointer(None, {"data": Lacking()}, link=FakeLink(shm))


# ---- what it costs ------------------------------------------------------------------------------


class Counting(PosixStorage):
    """Storage that notes which rank files are opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: set[int] = set()
        self.now: list[int] = []
        """Those that are open."""

    @contextmanager
    def open(self, path: str) -> Any:
        if not path.endswith(".distcp"):
            with super().open(path) as file:
                yield file
            return
        rank = int(path.rpartition("/")[2].split("_")[2])
        self.opened.add(rank)
        self.now.append(rank)
        with super().open(path) as file:
            yield file
        self.now.remove(rank)


def opened_for(directory: Path, state: dict[str, Any], rank: int) -> set[int]:
    storage = Counting(directory)
    with ExitStack() as until:
        restore.load(state, open_files(storage, 1, until), rank)
    return storage.opened


def test_no_file_of_another_rank_is_opened_unless_an_entry_is_merged(
    shm: Path, tmp_path: Path
) -> None:
    store(tmp_path, shm, states())
    assert opened_for(tmp_path, {"rank": None}, 2) == {2}
    assert opened_for(tmp_path, {"data": None}, 2) == {2}
    assert opened_for(tmp_path, {"data": UsedByRankZero()}, 2) == {2}
    assert opened_for(tmp_path, {"data": UsedByRankZero()}, 0) == {0, 1, 2, 3}
    assert opened_for(tmp_path, {"data": Used()}, 2) == {0, 1, 2, 3}


def test_files_of_other_ranks_are_closed_once_their_parts_are_read(
    shm: Path, tmp_path: Path
) -> None:
    """Of a large world there are more than a process may have open."""
    store(tmp_path, shm, states())
    storage = Counting(tmp_path)

    class Looking(Used):
        def merge_state_dicts(self, parts: Any) -> Any:
            assert storage.now == [2]
            return super().merge_state_dicts(parts)

    state = {"data": Looking(), "rank": None}
    with ExitStack() as until:
        restore.load(state, open_files(storage, 1, until), 2)
    assert (storage.opened, storage.now) == ({0, 1, 2, 3}, [])


def test_of_other_ranks_no_tensors_are_read(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    read: list[int] = []

    class Metered:
        def __init__(self, source: Any) -> None:
            self.name, self.size, self.digests = source.name, source.size, source.digests
            self._source = source

        def read_into(self, at: int, views: Sequence[memoryview]) -> None:
            read.append(sum(map(len, views)))
            self._source.read_into(at, views)

    paths = images(shm, states())
    with ExitStack() as until:
        stored = [open_image(path, image_of(1, r, 4), until) for r, path in enumerate(paths)]
        for other in stored[1:]:
            other.source = Metered(other.source)
        state = {"data": Used(), "shared": torch.zeros(LARGE), "rank": None}
        restore.load(state, stored, 0)
    assert 0 < sum(read) < 3 * 4096, f"of {3 * LARGE * 4} bytes"


def test_parts_that_differ_do_not_keep_what_all_share_from_being_written_once(shm: Path) -> None:
    """Neither values nor tensors of an entry that is spread over ranks are taken for shared ones."""

    def shared_by(rank: int) -> bytes:
        ranks, part = (
            Rank(shm, rank, 2),
            {"n": [rank] * 1000 * rank, "t": torch.full((LARGE,), rank)},
        )
        state = {"model": torch.ones(LARGE), "data": part}
        captured = capture(state, None, Position(1, 1, rank, 2), spread=frozenset({"data"}))
        copy = ranks.copy(captured, 1)
        copy.done.result()
        image = Image.open(copy.path)
        record = image.record()
        assert record is not None
        found = _shared_digest(image.body, record.contents, 2)
        image.close()
        return found

    assert shared_by(0) == shared_by(1) != b""


# ---- errors -------------------------------------------------------------------------------------


class Failing(Used):
    def merge_state_dicts(self, parts: Any) -> Any:
        raise ZeroDivisionError("no number left")


def test_whatever_merge_state_dicts_raises_is_told_with_the_name_and_changes_nothing(
    shm: Path,
) -> None:
    tensor = torch.zeros(LARGE)
    state = {"shared": tensor, "data": Failing()}
    told = r"'data': its merge_state_dicts\(\) failed: ZeroDivisionError: no number left"
    with pytest.raises(CheckpointError, match=told):
        load(state, *images(shm, states()))
    assert (tensor == 0).all()


def test_whatever_load_part_raises_is_told_with_the_name(shm: Path) -> None:
    class Broken(UsedByRankZero):
        def load_part(self, part: Any) -> None:
            raise KeyError("nothing I know")

    with pytest.raises(CheckpointError, match=r"'data': its load_part\(\) failed: KeyError"):
        load({"data": Broken()}, *images(shm, states()), rank=1)


def test_a_rank_that_saved_no_part_is_named(shm: Path) -> None:
    saved = states()
    del saved[2]["data"]
    with pytest.raises(CheckpointError, match=r"of rank 2 has no 'data'; it has 'shared', 'rank'"):
        load({"data": Used()}, *images(shm, saved))


def test_parts_are_not_merged_unless_all_are_at_hand(shm: Path) -> None:
    paths = images(shm, states())
    with ExitStack() as until, pytest.raises(CheckpointError, match=r"4 ranks .* 1 are at hand"):
        restore.load({"data": Used()}, [open_image(paths[1], image_of(1, 1, 4), until)], 1)


def test_a_part_that_is_damaged_refuses_the_state_for_every_rank(shm: Path) -> None:
    paths = images(shm, states())
    image = Image.open(paths[3])
    flip(paths[3], image.body_at + 100)
    image.close()
    for rank in range(4):
        with pytest.raises(Unusable, match="digest"):
            load({"data": Used()}, *paths, rank=rank)


# ---- through checkpointers ----------------------------------------------------------------------


def in_one_process(act: Any) -> None:
    run_world(1, lambda rank: act())


def test_when_one_ranks_part_is_damaged_an_older_state_is_taken(shm: Path, tmp_path: Path) -> None:
    for step in (1, 2):
        store(tmp_path, shm, [{"data": {"used": {10 * step + rank}}} for rank in range(4)], step)
    flip(tmp_path / step_directory(2) / rank_file_name(3, 1), 200)

    def act(rank: int) -> None:
        state = {"data": Used()}
        checkpointer = Checkpointer(tmp_path, state)
        assert checkpointer.restore() == 1
        assert state["data"].used == {10, 11, 12, 13}
        (refused,) = checkpointer.restored.refused
        assert refused.startswith("step 2 from storage: rank 0: ")
        assert refused.endswith("(and 1 more ranks)")

    run_world(2, act)
    assert find_step(PosixStorage(tmp_path), 2).state == "refused"


def test_when_parts_cannot_be_merged_an_older_state_is_taken(shm: Path, tmp_path: Path) -> None:
    for step in (1, 2):
        store(tmp_path, shm, [{"data": {"used": {step}}}] * 2, step)

    class Choosy(Used):
        def merge_state_dicts(self, parts: Any) -> Any:
            assert 2 not in parts[0]["used"], "I do not like 2"
            return super().merge_state_dicts(parts)

    def act() -> None:
        state = {"data": Choosy()}
        checkpointer = Checkpointer(tmp_path, state)
        assert checkpointer.restore() == 1
        assert state["data"].used == {1}
        assert "'data': its merge_state_dicts() failed" in checkpointer.restored.refused[0]

    in_one_process(act)
    assert verify(PosixStorage(tmp_path), 2) == [], "the checkpoint itself is good, and stays"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that four ranks saved by themselves, without `holdfast run`."""
    directory: Path = tmp_path_factory.mktemp("saved")

    def act(rank: int) -> None:
        data, zero = Used(*USED[rank]), UsedByRankZero(*USED[rank])
        state = {"data": data, "zero": zero, "shared": torch.ones(LARGE), "rank": rank}
        checkpointer = Checkpointer(directory, state)
        assert checkpointer.restore() == 0
        assert checkpointer.save(1).storage().outcome == "saved"

    run_world(4, act)
    return directory


@pytest.mark.parametrize("size", [2, 6])
def test_ranks_without_a_coordinator_merge_what_others_saved(saved: Path, size: int) -> None:
    def act(rank: int) -> None:
        data, zero = Used(99), UsedByRankZero(99)
        state = {"data": data, "zero": zero, "shared": torch.zeros(LARGE), "rank": None}
        assert Checkpointer(saved, state).restore() == 1
        assert (data.used, state["rank"]) == (ALL, rank % 4)
        assert zero.used == (ALL if rank == 0 else {99})
        if rank:
            assert zero.part == (Used(*USED[rank]).state_dict() if rank < 4 else None)
        torch.distributed.barrier()  # Rank 0 has the store, and waits at its end only for so long.

    run_world(size, act)


def test_what_all_ranks_share_is_written_once_though_their_parts_differ(saved: Path) -> None:
    sizes = [path.stat().st_size for path in (saved / step_directory(1)).glob("*.distcp")]
    assert sum(sizes) < 2 * LARGE * 4


def test_plain_torch_reads_the_part_of_rank_0(saved: Path) -> None:
    state: dict[str, Any] = {"data": {"used": None, "first": None}, "shared": torch.zeros(LARGE)}
    dcp.load(state, checkpoint_id=saved / step_directory(1), no_dist=True)
    assert state["data"] == {"used": USED[0], "first": 1}
    assert (state["shared"] == 1).all()


def test_it_is_listed_verified_and_exported_like_any_other(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "ls", str(saved)]) == 0
    assert main(["ckpt", "verify", str(saved)]) == 0
    to = tmp_path / "state.pt"
    assert main(["ckpt", "export", str(saved), "--to", str(to)]) == 0
    found = torch.load(to, weights_only=True)
    assert found["data"]["used"] == USED[0]
    assert "complete" in capsys.readouterr().out


def test_a_job_that_starts_from_anothers_checkpoint_merges_all_parts(saved: Path) -> None:
    state = {"data": Used(), "zero": UsedByRankZero()}
    started = load_start(str(saved), state, 0, None, False)
    assert started is not None
    assert started.verified
    assert (state["data"].used, state["zero"].used) == (ALL, ALL)


def test_of_a_plain_checkpoint_the_only_part_is_merged_and_that_is_said(tmp_path: Path) -> None:
    plain = {"data": {"used": {1, 2}, "more": {"a": [1, {"b": 2}]}}, "zero": {"used": {3}}, "n": 1}
    dcp.save(plain, checkpoint_id=tmp_path / "step-5", no_dist=True)
    for rank in (0, 1):
        whole = InOrder()
        state: dict[str, Any] = {"data": whole, "zero": UsedByRankZero(9), "n": None}
        started = load_start(str(tmp_path), state, rank, None, False)
        assert started is not None
        assert (started.step, started.verified) == (5, False)
        assert "'data', 'zero': it has the part of one rank only" in started.message
        assert (whole.part, state["n"]) == ([plain["data"]], 1)
        assert (state["zero"].used, state["zero"].part) == (
            ({3}, "never loaded") if rank == 0 else ({9}, None)
        )


def test_a_plain_checkpoint_without_the_entry_is_refused_by_its_name(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "step-5", no_dist=True)
    with pytest.raises(CheckpointError, match=r"has no 'data'; its entries are 'model'"):
        load_start(str(tmp_path), {"data": Used()}, 0, None, False)


# ---- from memory --------------------------------------------------------------------------------


class Answering(AgentAnswers):
    """An agent on whose node rank 0's image is; a coordinator that knows who has rank 1's."""

    own: Path
    peer: Node

    def ask(self, request: Any, patience_s: float | None) -> Any:
        self.said.append(request)
        if isinstance(request, FindState):
            return StateFound(where="loaded") if request.tried == Tried() else self._offer(request)
        assert isinstance(request, LocateImage)
        here = request.image.rank == 0
        return ImageAt(path=str(self.own) if here else "", token=TOKEN)

    def _offer(self, request: FindState) -> StateFound:
        assert request.tried is None, request.tried
        at = self.peer.peer
        holders = (
            Holder(RankNumber(0), NodeId("here"), "127.0.0.1", 1),
            Holder(RankNumber(1), NodeId("there"), at.host, at.port),
        )
        return StateFound(
            where="memory",
            step=StepNumber(1),
            round=RoundNumber(1),
            world_size=2,
            holders=holders if request.all_ranks else holders[:1],
        )

    def resumed(self, step: int) -> None:
        pass


@pytest.fixture
def answering(shm: Path, there: Node, monkeypatch: pytest.MonkeyPatch) -> Answering:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(checkpointers, "checkpointer_name", lambda *_: CHECKPOINTER)
    for name in ("here", "there"):
        (shm / name).mkdir()
    worker = Answering(shm)
    worker.own = Rank(shm / "here", 0, 2).save({"data": {"used": {1}}, "rank": 0})
    Rank(shm / "there", 1, 2).save({"data": {"used": {2}}, "rank": 1})
    there.server._store = Images(shm / "there")
    worker.peer = there
    return worker


def restored_from_memory(worker: Answering, state: dict[str, Any]) -> dict[str, Any]:
    checkpointer = LinkedCheckpointer(None, state, link=AgentLink(worker))  # type: ignore[arg-type]
    assert checkpointer.restore() == 1
    checkpointer.close()
    return state


def test_in_a_world_of_the_same_size_parts_are_read_from_own_and_peers_memory(
    answering: Answering,
) -> None:
    state = restored_from_memory(answering, {"data": Used(), "rank": None})
    assert (state["data"].used, state["rank"]) == ({1, 2}, 0)
    located = [one.image.rank for one in answering.said if isinstance(one, LocateImage)]
    assert sorted(located) == [0, 1]


def test_an_ordinary_restore_from_memory_asks_for_no_other_image(answering: Answering) -> None:
    restored_from_memory(answering, {"rank": None})
    asked = [one for one in answering.said if isinstance(one, FindState | LocateImage)]
    assert not any(one.all_ranks for one in asked if isinstance(one, FindState))
    assert [one.image.rank for one in asked if isinstance(one, LocateImage)] == [0]


# ---- entries of a skeleton ----------------------------------------------------------------------


class Name(str, enum.Enum):
    ONE = "one"
    TWO = "two"


@pytest.mark.parametrize(
    "state",
    [
        {"a": {1, 2}, "b": torch.ones(2), "c": {"d": [torch.zeros(1), 5]}},
        {"a": torch.ones(1), "b": torch.ones(2)},
        {Name.ONE: [1], Name.TWO: {"t": torch.ones(3)}},
        {},
    ],
    ids=["mixed", "tensors", "enum", "empty"],
)
def test_entries_of_a_skeleton_are_assembled_one_by_one(state: dict[str, Any]) -> None:
    parts = dismantle(state)
    entries = entries_of(parts.skeleton)
    assert list(entries) == list(state)
    for name, want in state.items():
        check_same(assemble(entries[name], parts.tensors.__getitem__), want)
