"""The whole chain on real gloo ranks: look at them, read their recorders, name the guilty one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from puppets import wait_for

from holdfast import proc
from holdfast.diagnosis import flight
from holdfast.diagnosis.stacks import Subject, collect
from holdfast.diagnosis.verdict import judge
from holdfast.messages.evidence import RankEvidence, Verdict, fit
from holdfast.messages.units import NodeId, Rank, RoundNumber

GUILTY = 1
RANKS = range(3)
LOOKS = 5


class Stage:
    """The process that forks ranks, and all that it forked."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("stage.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    def play(self, scene: str, folder: Path) -> list[int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(scene, folder, file=self._process.stdin, flush=True)
        return [int(word) for word in self._process.stdout.readline().split()]

    def end_scene(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.end()


def gather(pids: list[int], folder: Path) -> list[RankEvidence]:
    """What an agent would gather, and send."""
    for name in ("ask", *(f"dump_{rank}" for rank in RANKS)):
        (folder / name).unlink(missing_ok=True)
    ages = [time.time() - (folder / f"beat_{rank}").stat().st_mtime for rank in RANKS]
    found = asyncio.run(collect([Subject(pid) for pid in pids], 20.0))
    (folder / "ask").touch()
    alive = [r for r in RANKS if found[pids[r]].state != "T" and ages[r] < 1.0]
    wait_for(lambda: all((folder / f"dump_{r}").exists() for r in alive), "the dumps")
    evidence = []
    for rank, pid in enumerate(pids):
        dump = folder / f"dump_{rank}"
        read = flight.read(dump.read_bytes()) if dump.exists() else None
        each = RankEvidence(
            node=NodeId("node-0"),
            round=RoundNumber(1),
            rank=Rank(rank),
            pid=pid,
            process_state=found[pid].state,
            beat_age_s=ages[rank],
            # A worker's heartbeat is Holdfast's own code, not the user's.
            stacks=tuple(thread for thread in found[pid].threads if thread.name != "watch"),
            stack_source=found[pid].source,
            collectives=read.collectives if read is not None else None,
            blocked=read is not None and read.blocked,
            pairs=read.pairs if read is not None else None,
            world=read.world if read is not None else 1,
            ended=rank == GUILTY and (folder / "ended").exists(),
            idle_s=ages[rank],
            missing=found[pid].missing,
        )
        encoded = msgspec.msgpack.encode(fit(each))
        evidence.append(msgspec.msgpack.decode(encoded, type=RankEvidence))
    return evidence


def judged(
    pids: list[int], folder: Path, right: Callable[[Verdict], object], proof: str | None
) -> tuple[list[RankEvidence], Verdict]:
    """The evidence and the verdict, once every rank stands where it hangs.

    On a busy machine one may be late, and is not there at the first look. A wrong proof is wrong even
    so."""
    for _ in range(LOOKS):
        evidence = gather(pids, folder)
        verdict = judge(evidence, 3)
        assert verdict.proof in (None, proof), verdict.sentence
        if right(verdict):
            break
    return evidence, verdict


AT_LOADER = r"rank 1 on node-0 sleeps in stage\.py:\d+ \(load_batch\); "

PROOFS = {"skipped": "mismatch", "stopped": "stopped", "resized": "mismatch"}
"""The one that left stands in the user's code, as in an exit handler: it may still come back."""
SCENES = {
    "asleep": AT_LOADER + r"ranks 0, 2 wait in all_reduce #4 of group 0$",
    "backward": AT_LOADER + r"ranks 0, 2 wait in all_reduce #\d+ of group 0$",
    "skipped": r"does not match: rank 1 in barrier; ranks 0, 2 in all_reduce of Float\[3\]",
    "stopped": r"rank 1 on node-0 is stopped \(SIGSTOP\) in stage\.py:\d+ \(stopped\); ",
    "gil": r"rank 1 on node-0 holds the GIL in stage\.py:\d+ \(gil\); ",
    "computing": r"rank 1 on node-0 computes in stage\.py:\d+ \(computing\); ",
    "left": r"^rank 1 has ended \(its script finished\); ranks 0, 2 wait in all_reduce #4 of group 0$",
    "resized": r"does not match: rank 1 in all_gather of Float\[5\]; ranks 0, 2 in all_reduce of Flo",
    "again": AT_LOADER + r"ranks 0, 2 wait in all_gather #1 of group 0, world 2$",
    "chain": AT_LOADER + r"rank 2 waits in all_reduce #1 of group 1; rank 0 waits in all_reduce #1",
}


@pytest.mark.parametrize("scene", SCENES)
def test_the_guilty_rank_is_named(stage: Stage, scene: str, tmp_path: Path) -> None:
    pids = stage.play(scene, tmp_path)
    try:
        wait_for(lambda: all((tmp_path / f"at_{r}").exists() for r in RANKS), "the hang")
        time.sleep(2.5 if scene == "gil" else 0.8)
        evidence, verdict = judged(
            pids, tmp_path, lambda v: re.search(SCENES[scene], v.sentence), PROOFS.get(scene)
        )
        assert verdict.guilty == (GUILTY,), verdict.sentence
        assert re.search(SCENES[scene], verdict.sentence), verdict.sentence
        assert verdict.proof == PROOFS.get(scene)
        if scene in ("asleep", "chain", "again"):
            assert 1700 < (verdict.left_s or 0) < 1800, "torch's own timeout is half an hour"
            assert verdict.waiting == (0, 2)
        blind = [msgspec.structs.replace(each, collectives=None) for each in evidence]
        expected = () if scene in ("skipped", "resized") else (GUILTY,)
        assert judge(blind, 3).guilty == expected, "without recorders"
        assert all(proc.process_state(pid) not in ("X", "Z") for pid in pids)
    finally:
        stage.end_scene(pids)


LINE = r" \(stage\.py:\d+\)"
CIRCLES = {
    "circle": rf"^ranks 0, 1 wait for each other in a circle: rank 0 in all_reduce #1 of group 1{LINE}"
    rf", rank 1 in all_reduce #1 of group 2{LINE}; rank 2 waits in all_reduce",
    "receives": rf"^ranks 0–2 wait .* circle: rank 0 in recv from rank 2 #3 of group 0{LINE}, rank 1",
    "sends": rf"circle: rank 0 in send to rank 1 #1 of group 1{LINE}, rank 1 in send to rank 2",
    "posted": rf"circle: rank 0 in recv from rank 1 #1 of group 0{LINE}, rank 1 in recv from rank",
}


@pytest.mark.parametrize("scene", CIRCLES)
def test_ranks_that_wait_for_each_other_in_a_circle_are_proven_to(
    stage: Stage, scene: str, tmp_path: Path
) -> None:
    verdict = played(stage, scene, tmp_path, lambda v: v.proof, "circle")
    assert re.search(CIRCLES[scene], verdict.sentence), verdict.sentence
    assert (verdict.proof, verdict.guilty, verdict.waiting) == ("circle", (), (0, 1, 2))
    assert re.fullmatch(rf"stage\.py:\d+ \({scene}\)", verdict.place)


@pytest.mark.parametrize("scene", ["sent", "any_source", "tagged"])
def test_nothing_is_proven_where_the_other_end_may_have_been_called(
    stage: Stage, scene: str, tmp_path: Path
) -> None:
    guilty = (GUILTY,) if scene == "sent" else ()
    verdict = played(stage, scene, tmp_path, lambda v: v.guilty == guilty, None)
    assert verdict.proof is None, verdict.sentence
    assert verdict.guilty == guilty, verdict.sentence


def played(
    stage: Stage,
    scene: str,
    folder: Path,
    right: Callable[[Verdict], object],
    proof: str | None,
) -> Verdict:
    """The verdict on a scene that has come to stand still."""
    pids = stage.play(scene, folder)
    try:
        wait_for(lambda: all((folder / f"at_{r}").exists() for r in RANKS), "the hang")
        time.sleep(0.8)
        return judged(pids, folder, right, proof)[1]
    finally:
        stage.end_scene(pids)
