"""A restartable function is left and entered again: real agents, real faults, scripts without torch.

Scripts write a line to one log for whatever a test wants to know: the rank, its pid, and what it did.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import NamedTuple

from holdfast.core.job import Job

from .harness import Run, wait_for
from .test_many_nodes import Cluster, kill_node, sizes

PRELUDE = """
    import os, signal, socket, subprocess, sys, threading, time, queue
    import holdfast
    from holdfast.inprocess import Context, RetryLimits, restartable

    def rank():
        return int(os.environ["RANK"])

    def note(*words):
        with open("log", "a") as file:
            file.write(" ".join(map(str, [rank(), os.getpid(), *words])) + "\\n")

    def once(name):
        try:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def until(there):
        while not there():
            time.sleep(0.002)

    def raise_as(name):
        raise type(name, (Exception,), {})("as it happens")

    def steps(state, last=1 << 30):
        while state["step"] < last and not os.path.exists("end"):
            time.sleep(0.005)
            state["step"] += 1
            holdfast.progress(state["step"])
            yield state["step"]
"""


class Noted(NamedTuple):
    rank: int
    pid: int
    what: str


def noted(run: Run, *first: str) -> list[Noted]:
    """What the ranks wrote down, or only the lines that begin with one of these words."""
    path = run.folder / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [Noted(int(rank), int(pid), what) for rank, pid, what in map(_parts, lines)]
    return [one for one in found if not first or one.what.split()[0] in first]


def _parts(line: str) -> tuple[str, str, str]:
    rank, pid, what = line.split(" ", 2)
    return rank, pid, what


def start(run: Run, script: str, *flags: str, nproc: int = 2) -> Run:
    return run.train(*flags, script=PRELUDE + script, nproc=nproc)


def pids(job: Job) -> dict[int, int]:
    return {number: rank.pid for number, rank in job.ranks.items()}


def changed(before: Job, after: Job) -> set[int]:
    """The ranks that have another process."""
    return {rank for rank, pid in pids(after).items() if pids(before).get(rank) != pid}


# ---- what survivors keep -----------------------------------------------------------------------

RAISES = """
    @restartable()
    def train(state, word, ctx: "Context"):
        note("enter", ctx.iteration, ctx.round, os.environ["WORLD_SIZE"], id(state), word)
        for step in steps(state, 40):
            if rank() == 1 and step in (15, 25) and once(f"raised_{step}"):
                raise ValueError(step)
        return rank() + 10

    note("result", train({"step": 0}, "word"))
"""


def test_an_exception_in_one_rank_makes_all_enter_again_in_the_same_processes(run: Run) -> None:
    start(run, RAISES)
    assert run.code() == 0
    for rank in (0, 1):
        mine = [one for one in noted(run) if one.rank == rank]
        assert len({one.pid for one in mine}) == 1
        entries = [one.what.split() for one in mine if one.what.startswith("enter")]
        assert [words[1:4] for words in entries] == [[str(n), str(n + 1), "2"] for n in range(3)]
        assert len({tuple(words[4:]) for words in entries}) == 1, "other arguments"
        assert mine[-1].what == f"result {rank + 10}"
    incidents = run.ask("incidents")
    assert [one["step"] for one in incidents] == [15, 25]
    for one in incidents:
        assert (one["kind"], one["rung"]) == ("exception", "re-enter the function")
        assert one["action"] == "left the function on all ranks and entered it again"
    assert "ValueError: 15" in incidents[0]["detail"]
    assert run.err.count("rank 1 raised ValueError at train.py:") >= 2


TRAINS = """
    @restartable()
    def train(state, ctx: Context):
        note("enter", ctx.iteration, os.environ["WORLD_SIZE"], ctx.why)
        for step in steps(state):
            pass

    train({"step": 0})
"""


def test_whoever_dies_or_stops_the_others_keep_their_processes(run: Run) -> None:
    start(run, TRAINS, nproc=4)
    before = run.until_stepping()

    def after(round: int) -> set[int]:
        nonlocal before
        now = run.until_stepping(round)
        different, before = changed(before, now), now
        assert sorted(now.ranks) == [0, 1, 2, 3]
        return different

    run.kill_rank(2)
    assert after(2) == {2}
    assert run.ask("status")["last_incident"].startswith("rank 2 killed by SIGKILL at step ")
    run.kill_rank(0)
    assert after(3) == {0}
    coordinator = run.coordinator()
    run.kill_rank(1)
    run.kill(coordinator)
    assert after(4) == {1}
    assert run.coordinator() != coordinator
    run.kill_rank(3, signal.SIGSTOP)
    assert after(5) == {3}
    run.kill(run.agent())
    assert after(6) == {0, 1, 2, 3}
    run.end()
    assert run.code() == 0
    incidents = run.ask("incidents")
    assert [one["rung"] for one in incidents][:2] == ["standby", "standby"]
    assert all("3 ranks entered their function again" in one["action"] for one in incidents[:2])
    assert {one.what.split()[2] for one in noted(run, "enter")} == {"4"}


def test_a_node_joins_and_another_leaves_and_nobody_else_starts(
    make_run: Callable[[], Run],
) -> None:
    cluster = Cluster(make_run)

    def join() -> Run:
        node = make_run()
        if cluster.nodes:
            node.job, node.job_home = cluster.nodes[0].job, cluster.nodes[0].job_home
        meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", cluster.endpoint)
        cluster.nodes.append(start(node, TRAINS, "--nnodes", "1:2", *meet))
        return node

    first = join()
    alone = first.until(lambda job: sizes(job) == (2, 1) and not job.unstepped, "two ranks")
    second = join()
    both = first.until(lambda job: sizes(job) == (4, 2) and not job.unstepped, "four ranks")
    assert set(pids(alone).values()) < set(pids(both).values())
    kill_node(second)
    less = first.until(lambda job: sizes(job) == (2, 1) and not job.unstepped, "two ranks again")
    assert set(pids(less).values()) == set(pids(alone).values())
    first.end()
    assert first.code() == 0


# ---- leaving -----------------------------------------------------------------------------------

WAYS = {
    "sleep": "time.sleep(1000)",
    "loop": "while True: pass",
    "lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "event": "threading.Event().wait()",
    "queue": "queue.Queue().get()",
    "socket": "pair = socket.socketpair(); pair[0].recv(1)",
    "child": "subprocess.run(['sleep', '1000'])",
    "thread": "one = threading.Thread(target=time.sleep, args=[1000], daemon=True)\n"
    "one.start(); one.join()",
    "bare except": "for _ in range(3):\n    try: time.sleep(1000)\n    except: pass",
    "return in finally": "def swallow():\n    try: time.sleep(1000)\n    finally: return\n"
    "for _ in range(3): swallow()",
    "cleans up": "try: time.sleep(1000)\nfinally: note('cleaned up')",
}
STANDS = """
    ways = {ways!r}

    @restartable()
    def train(ctx: Context):
        note("enter", ctx.iteration)
        way = list(ways)[ctx.iteration] if ctx.iteration < len(ways) else None
        holdfast.progress(ctx.iteration + 1)
        if way is None:
            return
        if rank() == 0:
            note("way", way)
            exec(ways[way], globals())
            note("went on", way)
        else:
            until(lambda: any(f"way {{way}}\\n" in line for line in open("log")))
            raise_as("Fault_" + way.replace(" ", "_"))

    train()
"""


def test_wherever_a_rank_stands_it_leaves_and_its_process_stays(run: Run) -> None:
    start(run, STANDS.format(ways=WAYS))
    assert run.code() == 0
    found = noted(run)
    assert {one.rank: one.pid for one in found} == dict({(one.rank, one.pid) for one in found})
    assert [one.what for one in found if one.what.startswith("way")] == [f"way {w}" for w in WAYS]
    mine = [one.what for one in found if one.rank == 0 and one.what.startswith("enter")]
    assert mine == [f"enter {number}" for number in range(len(WAYS) + 1)]
    went_on = {one.what.removeprefix("went on ") for one in found if "went on" in one.what}
    assert went_on <= {"bare except", "return in finally"}
    assert [one.what for one in found].count("cleaned up") == 1
    assert len(run.ask("incidents")) == len(WAYS)


STAYS = """
    import ctypes

    def keep_the_gil():
        ctypes.PyDLL(None).sleep(1000)

    def swallow_all():
        while True:
            try:
                while True:
                    try: time.sleep(1000)
                    except BaseException: continue
            except BaseException:
                continue

    @restartable()
    def train(state):
        note("enter")
        for step in steps(state):
            for way in (keep_the_gil, swallow_all):
                if rank() == 0 and step == 5 and once(way.__name__):
                    note("stays", way.__name__)
                    way()
                if rank() == 1 and os.path.exists(way.__name__) and once("raised " + way.__name__):
                    raise_as(way.__name__)

    train({"step": 0})
"""


def test_a_function_that_cannot_be_left_costs_its_own_process_and_no_other(run: Run) -> None:
    start(run, STAYS)
    first = run.until_stepping()
    job = run.until_stepping(round=3)
    assert changed(first, job) == {0}
    run.end()
    assert run.code() == 0
    stays = noted(run, "stays")
    assert [one.what for one in stays] == ["stays keep_the_gil", "stays swallow_all"]
    assert len({one.pid for one in [*stays, *noted(run, "enter")] if one.rank == 0}) == 3
    assert run.err.count("rank 0 does not leave its function; its process is replaced") == 2


ATOMIC = """
    def told():
        return any(one.name == "holdfast-leaving" for one in threading.enumerate())

    @restartable()
    def train(ctx: Context):
        note("enter", ctx.iteration)
        holdfast.progress(ctx.iteration + 1)
        if rank() == 0 and ctx.iteration == 0:
            with ctx.atomic():
                with ctx.atomic():
                    note("begun")
                    open("inside", "w").close()
                    until(told)
                    time.sleep(0.3)
                note("within")
            note("never")
        if rank() == 0 and ctx.iteration == 1:
            open("inside_1", "w").close()
            try:
                time.sleep(1000)
            finally:
                with ctx.atomic():
                    note("never")
        if rank() == 1 and ctx.iteration < 2:
            name = "inside" if ctx.iteration == 0 else "inside_1"
            until(lambda: os.path.exists(name))
            raise_as(name)

    train()
"""


def test_an_atomic_section_is_finished_first_and_one_that_has_not_begun_does_not_begin(
    run: Run,
) -> None:
    start(run, ATOMIC)
    assert run.code() == 0
    mine = [one.what for one in noted(run) if one.rank == 0]
    assert mine == ["enter 0", "begun", "within", "enter 1", "enter 2"]
    assert len({one.pid for one in noted(run)}) == 2


THREADED = """
    @restartable()
    def train(state):
        note("enter")
        for step in steps(state, 30):
            if rank() == 1 and step == 15:
                raise ValueError(step)
        note("done")

    thread = threading.Thread(target=train, args=[{"step": 0}])
    thread.start()
    thread.join()
"""


def test_a_function_may_run_in_a_thread(run: Run) -> None:
    start(run, THREADED)
    assert run.code() == 0
    for rank in (0, 1):
        mine = [one for one in noted(run) if one.rank == rank]
        assert [one.what for one in mine] == ["enter", "enter", "done"]
        assert len({one.pid for one in mine}) == 1


# ---- hooks and ends ----------------------------------------------------------------------------

HOOKS = """
    names = ("initialize", "health_check", "abort", "finalize", "completion", "terminate")

    def hook(name):
        def run(state):
            note(name)
            if name == "health_check" and rank() == 1 and state.iteration == 1 and once("unfit"):
                raise OSError("a broken device")
        return run

    @restartable(**{name: hook(name) for name in names})
    def train(state):
        note("function")
        for step in steps(state, 30):
            if rank() == 1 and step == 15 and once("raised"):
                raise ValueError(step)

    train({"step": 0})
    note("after")
"""


def test_hooks_run_in_order_and_a_health_check_that_raises_costs_that_process_alone(
    run: Run,
) -> None:
    start(run, HOOKS)
    assert run.code() == 0
    enters, leaves = ["initialize", "health_check"], ["abort", "finalize", "health_check"]
    ends = [*enters, "function", "completion", "after"]
    unfit, fresh = dict.fromkeys(one.pid for one in noted(run) if one.rank == 1)
    assert _of(run, unfit) == [*enters, "function", *leaves, *enters, "terminate"]
    assert _of(run, fresh) == ends
    (survivor,) = {one.pid for one in noted(run) if one.rank == 0}
    once = [*enters, "function", *leaves]
    assert _of(run, survivor) in ([*once, *once, *ends], [*once, *enters, *leaves, *ends])


def _of(run: Run, pid: int) -> list[str]:
    return [one.what for one in noted(run) if one.pid == pid]


REASONS = """
    @restartable()
    def train(state, ctx: Context):
        note("enter", ctx.iteration, ctx.why or "-")
        for step in steps(state, 1 << 30 if ctx.iteration < 2 else 60):
            if rank() == 1 and step == 20 and once("first"):
                raise_as("First")
            if rank() == 0 and step > 40 and ctx.iteration == 1 and once("second"):
                raise_as("Second")

    train({"step": 0})
"""


def test_every_rank_learns_what_ended_the_entry_before_also_the_one_that_raised(run: Run) -> None:
    start(run, REASONS)
    assert run.code() == 0
    for rank in (0, 1):
        mine = [one.what for one in noted(run, "enter") if one.rank == rank]
        assert mine[0] == "enter 0 -"
        assert mine[1].startswith("enter 1 rank 1 First at train.py:")
        assert mine[2].startswith("enter 2 rank 0 Second at train.py:")


LIMITED = """
    @restartable(initialize=RetryLimits(LIMIT))
    def train(state):
        note("enter")
        for step in steps(state):
            if rank() == 1 and step % 10 == 0:
                raise_as(f"Fault{step}")

    train({"step": 0})
"""


def test_retry_limits_end_the_job_with_93_and_the_reason(run: Run) -> None:
    start(run, LIMITED.replace("LIMIT", "iterations=3"))
    assert run.code() == 93
    assert "has entered the function 3 times, and RetryLimits allows 3" in run.err
    assert [one.rank for one in noted(run, "enter")].count(1) == 3


def test_too_small_a_world_ends_the_job_with_75_and_the_reason(run: Run) -> None:
    start(run, LIMITED.replace("LIMIT", "min_world=3"))
    assert run.code() == 75
    assert "there are 2 ranks in the round, and RetryLimits needs 3" in run.err
    assert noted(run, "enter") == []


STORM = """
    @restartable()
    def train():
        state = {"step": 0}
        note("enter")
        for step in steps(state):
            if rank() == 1 and step == 5:
                raise ValueError("always here")

    train()
"""


def test_the_same_failure_again_and_again_climbs_and_then_ends_the_job(run: Run) -> None:
    start(run, STORM)
    assert run.code() == 93
    assert "at step 5, 3 times in a row" in run.err
    pids_of = [[one.pid for one in noted(run, "enter") if one.rank == rank] for rank in (0, 1)]
    same, others = pids_of[1][:4], pids_of[1][4:]
    assert len(set(same)) == 1, "entered again three times"
    assert len(set(others)) == len(others) == 5, "then another process each time"
    assert len(set(pids_of[0][:7])) == 1, "the other rank stays until all are replaced"
    assert len(set(pids_of[0])) == 3
    assert len(run.ask("incidents")) == 9


RETURNS = """
    @restartable()
    def train(state, ctx: Context):
        note("enter", ctx.iteration)
        for step in steps(state, 20):
            pass
        if rank() == 1 and ctx.iteration == 0:
            until(lambda: os.path.exists("go"))
            raise ValueError
        note("returns")
        return ctx.iteration

    note("result", train({"step": 0}))
"""


def test_a_fault_while_some_have_returned_makes_all_enter_again(run: Run) -> None:
    start(run, RETURNS)
    wait_for(lambda: noted(run, "returns"), "the return of rank 0")
    assert noted(run, "result") == []
    (run.folder / "go").touch()
    assert run.code() == 0
    assert sorted((one.rank, one.what) for one in noted(run, "result")) == [
        (0, "result 1"),
        (1, "result 1"),
    ]
    assert len({one.pid for one in noted(run)}) == 2


TWICE = """
    @restartable()
    def train():
        holdfast.progress(1)

    train()
    train()
"""


def test_a_second_restartable_function_is_refused_with_the_reason(run: Run) -> None:
    start(run, TWICE, nproc=1)
    assert run.code() != 0
    assert "a process calls one restartable function, once" in run.err + run.out
