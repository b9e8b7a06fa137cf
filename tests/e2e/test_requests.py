"""Scripts that ask the coordinator: a store, barriers, votes, and control of the job."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from ports import free_port

from .harness import Run, wait_for

STORE = """
    import datetime, os, threading, time
    import torch, torch.distributed as dist
    import holdfast

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = holdfast.store()

    def ask(*questions):
        for question in questions:
            try:
                answer = eval(question)
            except Exception as error:
                answer = f"{type(error).__name__} {error}"
            os.write(1, f"said {question} -> {answer}\\n".encode())  # Whole, although threads ask.

    def until(path):
        while not os.path.exists(path):
            time.sleep(0.01)
"""


def said(run: Run, rank: int, round: int = 1) -> dict[str, str]:
    """What a rank's questions were answered."""
    lines = run.log(rank, round).decode().splitlines()
    pairs = [line[5:].partition(" -> ") for line in lines if line.startswith("said ")]
    return {question: answer for question, _, answer in pairs}


def test_fifty_threads_add_one_and_everybody_sees_fifty(run: Run) -> None:
    script = """
    def add():
        store.add("n", 1)

    if rank == 0:
        threads = [threading.Thread(target=add) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    holdfast.barrier("added")
    ask("store.add('n', 0)", "store.get('n')")
    """
    run.start(run.write(STORE + script), nproc=3)
    assert run.code() == 0
    for rank in range(3):
        assert said(run, rank) == {"store.add('n', 0)": "50", "store.get('n')": "b'50'"}


def test_the_store_does_what_a_torch_store_does(run: Run) -> None:
    script = """
    import random
    soon = datetime.timedelta(seconds=0.2)
    prefixed = dist.PrefixStore("p", dist.PrefixStore("q", store))
    large = random.Random(rank).randbytes(512 << 10)
    store.set_timeout(datetime.timedelta(seconds=20))
    try:
        store.wait([f"never{rank}", "nor this"], soon)
    except dist.DistStoreError as error:
        print("said timeout ->", type(error).__name__, isinstance(error, TimeoutError), error)
    if rank == 0:
        ask(
            "isinstance(store, dist.Store)", "holdfast.store() is store", "store.timeout.seconds",
            "prefixed.set('k', 'v')", "prefixed.get('k')", "store.get('q/p/k')",
            "prefixed.compare_set('k', 'v', 'w')", "prefixed.compare_set('k', 'v', 'x')",
            "prefixed.compare_set('new', '', 'first')", "prefixed.compare_set('not', 'there', 'x')",
            "prefixed.add('n', 5)", "prefixed.num_keys()", "store.num_keys()",
            "prefixed.check(['k', 'n'])", "prefixed.check(['k', 'gone'])",
            "prefixed.delete_key('k')", "prefixed.delete_key('k')", "store.add('q/p/new', 1)",
            "prefixed.has_extended_api()", "prefixed.append('a', 'x')", "prefixed.append('a', 'y')",
            "prefixed.multi_set(['b', 'c'], ['1', '2'])", "prefixed.multi_get(['a', 'b', 'c'])",
            "prefixed.clone().get('a')", "prefixed.queue_push('q', 'x')", "store.list_keys()",
            "store.set('big', b'x' * (513 << 10))", "prefixed.wait(['a'], soon)",
        )
    store.set(f"large{rank}", large)
    theirs = store.multi_get([f"large{r}" for r in range(size)])
    assert theirs == [random.Random(r).randbytes(512 << 10) for r in range(size)]
    prefixed.barrier("all", size, datetime.timedelta(seconds=20))
    pid = os.fork()
    if pid == 0:
        ask("store.get('n')")
        os._exit(0)
    os.waitpid(pid, 0)
    """
    run.start(run.write(STORE + script), nproc=3)
    assert run.code() == 0
    for rank in range(3):
        timeout = said(run, rank)["timeout"]
        assert timeout == f"StoreTimeout True timed out: waited 0.2 s for 'never{rank}', 'nor this'"
        assert said(run, rank)["store.get('n')"].startswith("NotUnderHoldfast")
    answers = said(run, 0)
    expected = {
        "isinstance(store, dist.Store)": "True",
        "holdfast.store() is store": "True",
        "store.timeout.seconds": "20",
        "prefixed.get('k')": "b'v'",
        "store.get('q/p/k')": "b'v'",
        "prefixed.compare_set('k', 'v', 'w')": "b'w'",
        "prefixed.compare_set('k', 'v', 'x')": "b'w'",
        "prefixed.compare_set('new', '', 'first')": "b'first'",
        "prefixed.compare_set('not', 'there', 'x')": "b'there'",
        "prefixed.add('n', 5)": "5",
        "prefixed.check(['k', 'n'])": "True",
        "prefixed.check(['k', 'gone'])": "False",
        "prefixed.delete_key('k')": "False",
        "prefixed.has_extended_api()": "True",
        "prefixed.multi_get(['a', 'b', 'c'])": "[b'xy', b'1', b'2']",
        "prefixed.clone().get('a')": "b'xy'",
        "prefixed.wait(['a'], soon)": "None",
    }
    assert {question: answers[question] for question in expected} == expected
    assert answers["store.add('q/p/new', 1)"].startswith("RequestDenied not a number")
    assert answers["store.set('big', b'x' * (513 << 10))"].startswith("RequestDenied")
    assert answers["prefixed.queue_push('q', 'x')"].startswith("NotImplementedError")
    assert answers["store.list_keys()"].startswith("NotImplementedError")


def test_process_groups_form_over_the_store_again_in_every_round(run: Run) -> None:
    script = """
    ask("store.check(['kept'])")
    dist.init_process_group("gloo", store=holdfast.store(), rank=rank, world_size=size)
    pair = dist.new_group([0, 1])
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank < 2:
        dist.all_reduce(total, group=pair)
    ask("total.item()")
    store.set("kept", "")
    holdfast.barrier("set")
    ask("store.check(['kept'])  # later")
    holdfast.barrier("asked")
    holdfast.progress(1)
    if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9)
    dist.barrier()
    dist.destroy_process_group()
    """
    run.start(run.write(STORE + script), nproc=3)
    assert run.code() == 0
    for round in (1, 2):
        for rank in range(3):
            answers = said(run, rank, round)
            assert answers["store.check(['kept'])"] == "False", "a key outlived its round"
            assert answers["store.check(['kept'])  # later"] == "True"
            assert answers["total.item()"] == ("6.0" if rank < 2 else "3.0")


def test_what_was_set_and_who_waits_survive_the_coordinator(run: Run) -> None:
    script = """
    if rank == 0:
        store.set("k", "v")
        store.add("n", 1)
    waiting = threading.Thread(target=lambda: ask("store.get('later')"))
    waiting.start()
    store.wait(["k", "n"])
    holdfast.progress(1)
    until("killed")
    if rank == 0:
        ask("store.add('n', 1)")
        store.set("later", "came")
    ask("store.get('k')")
    waiting.join()
    holdfast.barrier()
    """
    run.start(run.write(STORE + script), nproc=3)
    run.until_stepping()
    wait_for(lambda: (job := run.peek()) and len(job.requests.open) == 3, "three that wait")
    before = run.coordinator()
    run.kill(before)
    (run.folder / "killed").touch()
    assert run.code() == 0
    for rank in range(3):
        assert said(run, rank)["store.get('k')"] == "b'v'"
        assert said(run, rank)["store.get('later')"] == "b'came'"
    assert said(run, 0)["store.add('n', 1)"] == "2"
    job = run.peek()
    assert job is not None
    assert job.membership.round == 1


# ---- without torch -----------------------------------------------------------------------------

ASKING = """
    import os, signal, sys, time
    import holdfast
    from holdfast.errors import FencedError, RequestTimeout

    rank, first = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
"""


def test_every_addition_counts_once_however_often_the_coordinator_dies(run: Run) -> None:
    script = """
    import threading
    from holdfast.messages.requests import Add
    from holdfast.worker import runtime

    def add():
        for _ in range(100):
            runtime.current().requests.ask(Add(key="n", amount=1))

    holdfast.progress(1)
    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    holdfast.barrier()
    print(runtime.current().requests.ask(Add(key="n", amount=0)).number)
    """
    run.train(script=ASKING + script, nproc=3)
    for many in (100, 700, 1500):
        run.until(
            lambda job, many=many: int(job.requests.store.items.get("n", 0)) > many, "additions"
        )
        run.kill(run.coordinator())
    assert run.code() == 0
    assert all(run.log(rank) == b"2400\n" for rank in range(3))


def test_a_barrier_holds_everybody_and_its_name_can_be_used_again(run: Run) -> None:
    script = """
    for turn in range(20):
        with open(f"turn_{rank}", "w") as file:
            file.write(str(turn))
        holdfast.barrier("turn")
        seen = {int(open(f"turn_{r}").read() or turn) for r in range(3)}
        assert seen <= {turn, turn + 1}, seen
        holdfast.barrier("turn")
    try:
        holdfast.barrier(f"only {rank}", timeout_s=0.1)
    except RequestTimeout:
        print("alone")
    """
    run.train(script=ASKING + script, nproc=3)
    assert run.code() == 0
    assert all(run.log(rank) == b"alone\n" for rank in range(3))


def test_a_rank_that_ended_is_not_waited_for(run: Run) -> None:
    script = """
    if rank != 2:
        holdfast.barrier("x")
        tally = holdfast.vote("y", "same")
        print(tally.unanimous, tally.voters, tally.absent)
    """
    run.train(script=ASKING + script, nproc=3)
    assert run.code() == 0
    assert run.log(0) == run.log(1) == b"True 2 1\n"


def test_a_rank_that_dies_does_not_leave_the_others_at_the_barrier(run: Run) -> None:
    script = """
    signal.signal(signal.SIGTERM, lambda *_: None)  # It means to finish what it does first.
    holdfast.progress(1)
    if first and rank == 2:
        time.sleep(0.2)
        os.kill(os.getpid(), 9)
    try:
        holdfast.barrier("all")
        print("all there")
    except FencedError as error:
        print("fenced", error)
        sys.exit(1)
    """
    run.train(script=ASKING + script, nproc=3)
    assert run.code() == 0
    for rank in (0, 1):
        assert b"fenced round 1 is over: rank 2 killed by SIGKILL" in run.log(rank, 1)
    assert all(run.log(rank, 2) == b"all there\n" for rank in range(3))
    (incident,) = run.ask("incidents")
    assert incident["rank"] == 2


def test_a_rank_knows_its_place_in_every_round(run: Run) -> None:
    script = """
    info = holdfast.rank_info()
    print(info.rank, info.local_rank, info.world_size, info.node_rank, info.node_count)
    print(info.run_id, holdfast.is_active(), holdfast.round(), holdfast.restarts())
    holdfast.progress(1)
    holdfast.barrier()
    if first and rank == 1:
        os.kill(os.getpid(), 9)
    holdfast.barrier()
    """
    run.train(script=ASKING + script, nproc=2)
    assert run.code() == 0
    for rank in range(2):
        place = f"{rank} {rank} 2 0 1\n"
        told = run.log(rank, 1).decode()  # A rank that is stopped in a barrier may say so.
        assert told.startswith(f"{place}{run.job} True 1 0\n")
        assert run.log(rank, 2).decode() == f"{place}{run.job} True 2 1\n"


def test_a_vote_is_the_same_for_all(run: Run) -> None:
    script = """
    mixed = holdfast.vote("go", rank != 1)
    agreed = holdfast.vote("go", True)
    step = holdfast.vote("step", 40 + rank)
    print(mixed.yes, mixed.no, mixed.all_yes, agreed.all_yes, step.count(41), step.unanimous)
    """
    run.train(script=ASKING + script, nproc=3)
    assert run.code() == 0
    assert all(run.log(rank) == b"2 1 False True 1 False\n" for rank in range(3))


def test_a_script_can_stop_the_job(run: Run) -> None:
    script = """
    holdfast.progress(1)
    if rank == 1:
        holdfast.stop_job("the loss is not a number")
    time.sleep(60)
    """
    run.train(script=ASKING + script, nproc=3)
    assert run.code() == 93
    assert "rank 1 stopped the job: the loss is not a number" in run.err


def test_a_script_can_end_the_job_in_good_order(run: Run) -> None:
    script = """
    if rank == 0:
        holdfast.stop_job("converged", code=0)
    time.sleep(60)
    """
    run.train(script=ASKING + script, nproc=3)
    assert run.code() == 0


def test_a_script_can_have_its_node_excluded(make_run: Callable[[], Run]) -> None:
    script = """
    step = 0
    while not os.path.exists("end"):
        time.sleep(0.01)
        step += 1
        holdfast.progress(step)
        if first and rank == 3 and os.path.exists("unfit"):
            os.unlink("unfit")
            holdfast.exclude_this_node("its fan is dead")
    """
    endpoint = f"127.0.0.1:{free_port()}"
    flags = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    host, other = make_run(), make_run()
    host.train(*flags, script=ASKING + script)
    host.until(lambda job: job.membership.count() == 1, "the first node")
    other.job, other.job_home = host.job, host.job_home
    other.train(*flags, script=ASKING + script)
    host.until(lambda job: len(job.ranks) == 4 and not job.unstepped, "four ranks")
    (host.folder / "unfit").touch()
    assert other.code() == 93
    job = host.until(
        lambda job: job.state.name == "running" and len(job.ranks) == 2 and not job.unstepped,
        "two ranks",
    )
    assert job.incidents[-1].kind == "exclude"
    assert list(job.membership.excluded.values()) == ["its fan is dead"]
    host.end()
    assert host.code() == 0


def test_a_rank_that_does_not_read_its_answers_harms_nobody(run: Run) -> None:
    """Not its agent, not the other ranks; not even itself, once it is awake again."""
    script = """
    holdfast.progress(1)
    if rank == 1:
        with open("asleep", "w") as file:
            file.write(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    for turn in range(3):
        holdfast.barrier("go")
    print("through")
    """
    run.train(script=ASKING + script, nproc=3)
    path = run.folder / "asleep"
    pid = int(wait_for(lambda: path.exists() and path.read_text(), "the sleeper"))
    wait_for(lambda: (job := run.peek()) and len(job.requests.open) == 2, "two at the barrier")
    os.kill(pid, signal.SIGCONT)
    assert run.code() == 0
    assert all(run.log(rank) == b"through\n" for rank in range(3))
