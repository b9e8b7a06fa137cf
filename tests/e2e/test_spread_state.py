"""Each rank uses numbers of its own. Whatever is killed and however many ranks come back, each of them
knows all numbers that were used up to the step that it goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .test_checkpoints import finished, trainings

SCRIPT = """
    import os, sys, time
    import torch
    import holdfast

    torch.set_num_threads(1)
    rank, until, hold = int(os.environ["RANK"]), int(sys.argv[1]), int(sys.argv[2])

    class Used:
        merged_by_rank_0 = False

        def __init__(self):
            self.used = set()

        def state_dict(self):
            return {"used": self.used}

        def merge_state_dicts(self, parts):
            return set().union(*(part["used"] for part in parts))

        def load_state_dict(self, state):
            self.used = state

    class UsedByRankZero(Used):
        merged_by_rank_0 = True

        def load_part(self, part):
            self.used = set()

    def note(what, *words):
        with open(f"{what}_{rank}", "a") as file:
            print(*words, file=file)

    data, zero = Used(), UsedByRankZero()
    state = {"data": data, "zero": zero, "net": torch.nn.Linear(8, 8)}
    ckpt = holdfast.Checkpointer("ckpts", state, memory_every=1)
    step = ckpt.restore()
    numbers = "/".join(",".join(map(str, sorted(one.used))) for one in (data, zero))
    note("restored", step, ckpt.restored.where, numbers)
    while step < until:
        if step == hold:
            note("held", step)
            while not os.path.exists("go"):
                time.sleep(0.01)
        step += 1
        for one in (data, zero):
            one.used.add(10 * step + rank)
        assert ckpt.save(step).memory().outcome == "saved"
"""
"""Trains to the step that its first argument names, and waits at the one that its second names."""


def used(steps: range, ranks: int) -> set[int]:
    return {10 * step + rank for step in steps for rank in range(ranks)}


def restored(folder: Path, rank: int) -> list[tuple[int, str, set[int], set[int]]]:
    """What each life of a rank began with: step, tier, and what it then held to be used."""
    found = []
    for line in (folder / f"restored_{rank}").read_text().splitlines():
        step, where, *rest = line.split()
        data, zero = (_numbers(one) for one in rest[0].split("/"))
        found.append((int(step), where, data, zero))
    return found


def _numbers(text: str) -> set[int]:
    return set(map(int, filter(None, text.split(","))))


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three ranks of which one is killed after step 2, and which end at 3; then two, up to 4."""
    with trainings(tmp_path_factory.mktemp("resized")) as make:
        three, two = make(), make()
        name, folder = three.write(SCRIPT), three.folder
        three.start(name, "3", "2", nproc=3)
        held = [folder / f"held_{rank}" for rank in range(3)]
        three.await_(lambda: all(one.exists() for one in held), "all ranks after step 2")
        three.kill_rank(1)
        (folder / "go").touch()
        finished(three)
        two.start(name, "4", "9", nproc=2, job=three.job)
        finished(two)
        yield folder


def test_after_a_kill_and_with_fewer_ranks_every_rank_knows_what_all_of_them_used(
    resized: Path,
) -> None:
    killed, fewer = used(range(1, 3), 3), used(range(1, 4), 3)
    want = [(0, "None", set()), (2, "memory", killed), (3, "storage", fewer)]
    for rank, lives in ((0, 3), (1, 3), (2, 2)):
        found = [(step, where, data) for step, where, data, _ in restored(resized, rank)]
        assert found == want[:lives]


def test_rank_0_alone_knows_it_where_the_class_says_so(resized: Path) -> None:
    killed, fewer = used(range(1, 3), 3), used(range(1, 4), 3)
    assert [zero for *_, zero in restored(resized, 0)] == [set(), killed, fewer]
    assert [zero for *_, zero in restored(resized, 1)] == [set(), set(), set()]
