"""The phases of real training steps, seen by hooks that the script does not see.

Torch's hooks are global, so scripts run in processes of their own (see `with_torch`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

Run = Callable[..., str]

BEFORE = """
import sys, threading, time
from holdfast.shm.vital_signs import PHASES, VITALS_BYTES, Vitals
from holdfast.worker.torch_hooks.phases import Phases

class Recorded(Vitals):
    def __init__(self):
        super().__init__(memoryview(bytearray(VITALS_BYTES)))
        self.marked = []
    def mark(self, phase, now):
        self.marked.append(PHASES[phase])
        super().mark(phase, now)

vitals = Recorded()
phases = Phases(vitals)
phases.install()

def seen(run, *args):
    vitals.marked.clear()
    run(*args)
    return [phase for phase in vitals.marked]

def without_between(run, *args):
    return [phase for phase in seen(run, *args) if phase != "between"]
"""
TORCH = """
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
ONES = torch.ones(4, 8)
STEP = ["data", "forward", "backward", "optimizer"]

def train(loader, net=model, optimizers=(sgd,)):
    for batch in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
            net(batch).sum().backward()
            optimizer.step()
"""


def test_the_phases_of_every_kind_of_step_are_seen_in_their_order(with_torch: Run) -> None:
    script = """
    loader = DataLoader([ONES[0]] * 12, batch_size=4)
    assert without_between(train, loader) == STEP * 3 + ["data"], vitals.marked
    assert seen(train, loader)[:8] == [
        "data", "between", "forward", "backward", "between", "optimizer", "between", "data"]

    # With workers of its own, which are forks with our hooks in them.
    class Loads(torch.utils.data.Dataset):
        def __len__(self): return 8
        def __getitem__(self, index): return nn.Identity()(torch.ones(8))
    workers = DataLoader(Loads(), batch_size=4, num_workers=2)
    assert without_between(train, workers) == STEP * 2 + ["data"], vitals.marked

    # In the training thread, with a module and another loader of its own: all of it is data.
    class Nests(Loads):
        def __getitem__(self, index):
            return next(iter(DataLoader([nn.Identity()(torch.ones(8))])))[0]
    assert without_between(train, DataLoader(Nests(), batch_size=4)) == STEP * 2 + ["data"]

    # Our own loader, in the training process and with a loader process.
    from holdfast.data import ElasticDataLoader
    for processes in (0, 1):
        elastic = ElasticDataLoader([ONES[0]] * 12, 4, num_workers=processes)
        assert without_between(train, elastic) == STEP * 3 + ["data"], (processes, vitals.marked)

    # Without a loader.
    assert without_between(train, [ONES] * 2) == STEP[1:] * 2, vitals.marked

    # DDP.
    import os
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo", f"file://{os.getcwd()}/store", rank=0, world_size=1)
    assert without_between(train, [ONES] * 2, DistributedDataParallel(model)) == STEP[1:] * 2

    # Gradients of two batches for one step.
    def accumulate():
        for _ in range(2):
            model(ONES).sum().backward()
        sgd.step()
    assert without_between(accumulate) == ["forward", "backward"] * 2 + ["optimizer"]

    # Two optimizers by turns.
    other = torch.optim.Adam(model.parameters())
    assert without_between(train, [ONES], model, (sgd, other)) == STEP[1:] * 2

    # Checkpointing, by which a backward pass calls modules, and another backward within it.
    from torch.utils.checkpoint import checkpoint
    def recompute(reentrant):
        inputs = ONES.clone().requires_grad_()
        checkpoint(model, inputs, use_reentrant=reentrant).sum().backward()
        sgd.step()
    for reentrant in (True, False):
        assert without_between(recompute, reentrant) == STEP[1:], (reentrant, vitals.marked)

    # Without any module: there is no forward phase, and none is made up in the backward pass.
    weight = torch.ones(8, 1, requires_grad=True)
    def functional():
        part = lambda x: nn.functional.linear(x, weight.T)
        checkpoint(part, ONES, use_reentrant=False).sum().backward()
    assert without_between(functional) == ["backward"]

    # Evaluation.
    def evaluate():
        model.eval()
        with torch.no_grad():
            for batch in DataLoader([ONES[0]] * 8, batch_size=4):
                model(batch)
        model.train()
    assert without_between(evaluate) == ["data", "forward"] * 2 + ["data"], vitals.marked

    # A step that raises has ended too.
    def fails():
        try:
            torch.autograd.backward(torch.ones(1))
        except RuntimeError:
            pass
    assert seen(fails) == ["backward", "between"]
    assert without_between(train, [ONES]) == STEP[1:]
    """
    said = with_torch(BEFORE, TORCH, script)
    assert "arning" not in said, said


def test_times_are_those_that_the_script_took(with_torch: Run) -> None:
    script = """
    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 1)
        def forward(self, x):
            time.sleep(0.03)
            return self.inner(x)
    class Slowly(torch.utils.data.Dataset):
        def __len__(self): return 3
        def __getitem__(self, index):
            time.sleep(0.05)
            return ONES[0]
    net = Slow()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(0.02))
    def slow_gradient(gradient):
        time.sleep(0.04)
    began = time.monotonic()
    for batch in DataLoader(Slowly(), batch_size=1):
        optimizer.zero_grad()
        loss = net(batch).sum()
        loss.register_hook(slow_gradient)
        loss.backward()
        optimizer.step()
        time.sleep(0.01)
    took = {name: each.latest_s for name, each in vitals.times().items()}
    whole = time.monotonic() - began
    expected = {"data": 0.05, "forward": 0.03, "backward": 0.04, "optimizer": 0.02}
    for name, least in expected.items():
        assert len([t for t in took[name] if t >= least]) >= 3, (name, took[name])
    assert sum(map(sum, took.values())) <= whole
    """
    said = with_torch(BEFORE, TORCH, script)
    assert "arning" not in said, said


def test_of_short_steps_only_some_are_followed(with_torch: Run) -> None:
    script = """
    def steps(count):
        return sum(phase == "optimizer" for phase in seen(train, [ONES] * count))
    assert steps(20) == 20, "until it is warm"
    vitals.warm_up = 0
    vitals.stepped(time.monotonic(), None)
    began = time.monotonic()
    followed = steps(1000)
    a_step_s = (time.monotonic() - began) / 1000
    assert 10 <= followed <= 300, followed
    assert vitals.marks > 1000, "that a step ends is a mark"
    took = vitals.times()
    assert abs(took["forward"].count - took["optimizer"].count) <= 1
    between = sorted(took["between"].latest_s)
    assert between[len(between) // 2] < 5 * a_step_s, "what was not followed is not booked"
    own = vitals.own_times()
    assert abs(own["forward"].count - own["backward"].count) <= 1
    assert sum(own["forward"].latest_s) <= sum(took["forward"].latest_s)

    # Something else begins in the middle of a step: from then on it is followed.
    def evaluate():
        for batch in DataLoader(ONES, batch_size=1):
            model(batch)
    while not phases._skips:
        train([ONES])
    assert seen(evaluate) == []
    phases._stepped_at += 3600.0
    phases.wake()
    assert seen(evaluate) == [], "it may still be a short step"
    phases._stepped_at -= 3601.0
    phases.wake()
    assert without_between(evaluate) == ["data", "forward"] * 4 + ["data"]

    # When somebody wants steps to be slow, all of them are.
    dragged = []
    phases.drag = lambda: dragged.append(1)
    train([ONES] * 2)
    dragged.clear()
    train([ONES] * 50)
    assert len(dragged) == 50
    phases.drag = None

    # Long steps are all followed.
    real = model.forward
    def slowly(batch):
        time.sleep(0.05)
        return real(batch)
    model.forward = slowly
    steps(5)
    assert steps(5) == 5
    """
    with_torch(BEFORE, TORCH, script)


def test_in_which_times_there_is_waiting_is_known(with_torch: Run) -> None:
    script = """
    import torch.distributed as dist
    from holdfast.shm.vital_signs import ALSO_IN_FORWARD, LEFT_OUT, WITH_GRADIENTS
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def layers(): return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    def waiting(net):
        sgd = torch.optim.SGD(net.parameters(), lr=1e-3)
        assert without_between(train, [ONES], net, (sgd,)) == STEP[1:]
        return vitals.waiting
    assert waiting(layers()) == WITH_GRADIENTS
    sharded = layers()
    fully_shard(sharded[0])
    assert waiting(sharded) == LEFT_OUT
    assert waiting(layers()) == WITH_GRADIENTS
    assert waiting(nn.Sequential(sharded, DistributedDataParallel(nn.Linear(1, 1)))) == WITH_GRADIENTS

    # DDP gives all ranks the buffers of rank 0 first; that is no work of the rank's own.
    class Slowly(DistributedDataParallel):
        def _sync_buffers(self):
            time.sleep(0.2)
    before = vitals.times()["forward"].count
    began = time.monotonic()
    assert waiting(Slowly(layers())) == WITH_GRADIENTS
    assert vitals.times()["forward"].latest_s[-1] <= time.monotonic() - began - 0.2
    assert vitals.times()["forward"].count == before + 1

    # Of a compiled model only the optimizer knows the parameters.
    torch.compile(lambda x: x, backend="eager")(ONES)
    sgd = torch.optim.SGD(sharded.parameters(), lr=1e-3)
    sgd.step()
    assert vitals.waiting == ALSO_IN_FORWARD
    torch.optim.SGD(layers().parameters(), lr=1e-3).step()
    assert vitals.waiting == WITH_GRADIENTS
    dist.destroy_process_group()
    """
    with_torch(BEFORE, TORCH, script)


def test_waiting_for_other_ranks_is_not_counted_as_own_work(with_torch: Run) -> None:
    script = """
    import os
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    waited_s = []
    def meet():
        began = time.monotonic()
        dist.all_reduce(torch.ones(2), async_op=True).wait()  # As torch's own functions do.
        functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).sum()  # As DTensors do.
        waited_s.append(time.monotonic() - began)

    child = os.fork()
    dist.init_process_group(
        "gloo", f"file://{os.getcwd()}/store", rank=int(not child), world_size=2)
    if not child:
        for _ in range(3):
            time.sleep(0.1)
            meet()
            time.sleep(0.1)
            meet()
        dist.barrier()
        os._exit(0)

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 1)
        def forward(self, x):
            time.sleep(0.02)
            meet()
            return self.inner(x)
    net = Late()
    sgd = torch.optim.SGD(net.parameters(), lr=1e-3)
    def reduce(gradient):
        time.sleep(0.03)
        meet()
    for _ in range(3):
        loss = net(ONES).sum()
        loss.register_hook(reduce)
        loss.backward()
        sgd.step()
    times, own = vitals.times(), vitals.own_times()
    for name, work_s in (("forward", 0.02), ("backward", 0.03)):
        assert times[name].count == own[name].count == 3
        each = zip(times[name].latest_s, own[name].latest_s, waited_s[name == "backward"::2])
        for took_s, own_s, met_s in each:
            assert took_s > met_s, (name, took_s, met_s)
            assert work_s <= own_s < took_s - met_s / 2, (name, took_s, own_s, met_s)

    # Of another thread it does not count.
    before = phases._own_times.waited_s
    elsewhere = threading.Thread(target=dist.barrier)
    elsewhere.start()
    elsewhere.join()
    assert phases._own_times.waited_s == before
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.destroy_process_group()
    """
    with_torch(BEFORE, TORCH, script)


def test_the_time_between_phases_is_one_duration_a_step_without_waits(with_torch: Run) -> None:
    script = """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    class Buffered(DistributedDataParallel):
        def _sync_buffers(self):
            time.sleep(0.2)  # Waits for rank 0.
    net = Buffered(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    sgd = torch.optim.SGD(net.parameters(), lr=1e-3)
    began = time.monotonic()
    for batch in DataLoader([ONES[0]] * 16, batch_size=4):
        time.sleep(0.02)  # After the loader ...
        net(batch).sum().backward()
        time.sleep(0.02)  # ... before the optimizer ...
        sgd.step()
        time.sleep(0.02)  # ... and after it.
    times, own = vitals.times()["between"], vitals.own_times()["between"]
    assert times.count > 2 * own.count, (times, own)
    assert own.count == 3, "of the first step the start was not seen"
    assert min(own.latest_s) >= 0.06, own
    assert sum(own.latest_s) <= time.monotonic() - began - 4 * 0.2, own
    dist.destroy_process_group()
    """
    with_torch(BEFORE, TORCH, script)


def test_after_steps_that_were_not_followed_only_the_followed_one_counts(with_torch: Run) -> None:
    script = """
    def steps(count):
        for _ in range(count):
            model(ONES).sum().backward()
            sgd.step()
            vitals.stepped(time.monotonic(), 0.001)
    began = time.monotonic()
    steps(300)
    a_step_s = (time.monotonic() - began) / 300
    own = vitals.own_times()["between"]
    assert 5 < own.count < 200, own.count
    assert sorted(own.latest_s)[len(own.latest_s) // 2] < 5 * a_step_s, own
    """
    with_torch(BEFORE, TORCH, script)


def test_only_the_thread_that_trains_is_followed(with_torch: Run) -> None:
    script = """
    def elsewhere(act, *args):
        thread = threading.Thread(target=act, args=args)
        thread.start()
        thread.join()
    assert seen(elsewhere, train, [ONES]) == [], "a teacher that is trained beside it"
    assert seen(elsewhere, list, DataLoader([ONES[0]] * 4)) == [], "a loader that runs ahead"

    def trains():
        vitals.stepped(time.monotonic(), None)
        train([ONES])
    assert [p for p in seen(elsewhere, trains) if p != "between"] == STEP[1:]
    assert seen(train, [ONES]) == [], "now the other one trains"
    """
    said = with_torch(BEFORE, TORCH, script)
    assert "arning" not in said, said


def test_the_script_cannot_tell(with_torch: Run) -> None:
    script = """
    import inspect, pickle, torch.nn.modules.module as m
    from torch.utils.hooks import RemovableHandle
    assert torch.autograd.backward.__name__ == "backward"
    assert torch.autograd.backward.__module__ == "torch.autograd"
    assert list(inspect.signature(torch.autograd.backward).parameters)[0] == "tensors"
    assert pickle.loads(pickle.dumps(torch.autograd.backward)) is torch.autograd.backward
    number = RemovableHandle.next_id
    train(DataLoader([ONES[0]] * 4, batch_size=4))
    assert RemovableHandle.next_id == number, "no number of a hook was used up"
    assert not any("holdfast" in type(finder).__module__ for finder in sys.meta_path)
    import copy
    copy.deepcopy(model), torch.jit.trace(model, ONES), torch.fx.symbolic_trace(model)
    torch.jit.script(model)(ONES)
    from importlib.machinery import SourceFileLoader
    import torch.utils.data.dataloader as d
    for module in (m, d, torch.autograd):
        assert isinstance(module.__loader__, SourceFileLoader), module
    """
    said = with_torch(BEFORE, TORCH, script)
    assert "arning" not in said, said


def test_torch_compile_is_not_disturbed(with_torch: Run) -> None:
    """No graph break, no further compilation, no warning; and the phases are still seen."""
    script = """
    from torch._dynamo.utils import counters

    def compiled():
        counters.clear()
        torch._dynamo.reset()

    def measured(net, steps=5):
        compiled()
        for _ in range(steps):
            sgd.zero_grad()
            net(ONES).sum().backward()
            sgd.step()
        return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]

    loss = nn.MSELoss()
    train([ONES])
    whole = torch.compile(model, backend="eager", fullgraph=True)
    assert measured(whole) == (0, 1), counters
    part = torch.compile(lambda x: model(x) * 2, backend="eager", fullgraph=True)
    assert measured(part) == (0, 1), counters
    assert measured(lambda x: loss(part(x), torch.zeros(4, 1))) == (0, 1), counters

    loader = DataLoader([ONES[0]] * 8, batch_size=4)
    assert without_between(train, loader, whole) == STEP * 2 + ["data", "forward"], vitals.marked

    compiled()
    step = torch.compile(sgd.step, backend="eager")
    for _ in range(3):
        model(ONES).sum().backward()
        assert without_between(step) == ["optimizer"], vitals.marked
    """
    said = with_torch(BEFORE, TORCH, script)
    assert "arning" not in said, said


def test_hooks_are_there_as_soon_as_torch_is_imported() -> None:
    script = """
assert "torch" not in sys.modules
import torch, torch.utils.data
assert without_between(train, DataLoader([ONES[0]] * 4, batch_size=4)) == STEP + ["data"]
assert not any("holdfast" in type(finder).__module__ for finder in sys.meta_path)
"""
    before, _, after = script.partition("import torch, torch.utils.data\n")
    code = "\n".join([BEFORE, before, TORCH, after])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_step_costs_a_few_microseconds_more(with_torch: Run) -> None:
    """Bounds are generous: machines are noisy. bench/detect.py measures it against a 5 ms step."""
    script = """
    from torch.optim import optimizer as o
    import torch.nn.modules.module as m

    def cost(steps):
        began = time.thread_time()
        train([ONES] * steps)
        return (time.thread_time() - began) / steps

    hooks = o._global_optimizer_pre_hooks, o._global_optimizer_post_hooks
    kept = [dict(each) for each in hooks]
    backward = torch.autograd.backward

    def turn(on):
        torch.autograd.__dict__["backward"] = backward if on else backward.__wrapped__
        m._global_forward_pre_hooks.clear()
        for each, was in zip(hooks, kept):
            each.clear()
            each.update(was if on else {})

    took = {True: [], False: []}
    train([ONES] * 50)
    for _ in range(15):
        for on in (True, False):
            turn(on)
            took[on].append(cost(30))
    more = min(took[True]) - min(took[False])
    print(f"{more * 1e6:.1f} us a step")
    assert more < 100e-6
    """
    said = with_torch(BEFORE, TORCH, script)
    assert "arning" not in said, said
