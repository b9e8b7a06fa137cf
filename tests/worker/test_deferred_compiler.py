"""Training begins without torch's compiler, and a script that compiles finds torch as it was made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.worker.deferred_compiler import seems_to_compile

Script = Callable[..., str]

BEGIN = """
import sys
import torch, torch.distributed as dist
from holdfast.worker.deferred_compiler import COMPILER, defer

KINDS = (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop)
steps, finders = [kind.step for kind in KINDS], list(sys.meta_path)
made = [step.__code__ for step in steps]
skipped = [torch.optim.Optimizer.zero_grad, torch.optim.Optimizer.add_param_group]
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)

def train(kind):
    optimizer = kind(model.parameters(), lr=0.1)
    torch.autograd.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return optimizer
"""
DEFER = "assert defer()"


def test_plain_training_does_not_import_the_compiler(with_plain_torch: Script) -> None:
    script = """
    for kind in KINDS:
        optimizer = train(kind)
        optimizer.load_state_dict(optimizer.state_dict())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(model)
    train(torch.optim.AdamW)
    assert COMPILER not in sys.modules
    """
    with_plain_torch(BEGIN, DEFER, script)


def test_steps_without_the_compiler_have_the_same_result(with_plain_torch: Script) -> None:
    script = """
    for kind in KINDS:
        train(kind)
    print([parameter.tolist() for parameter in model.parameters()])
    """
    assert with_plain_torch(BEGIN, DEFER, script) == with_plain_torch(BEGIN, script)


@pytest.mark.parametrize("outside", [True, False])
def test_a_step_records_gradients_if_it_is_differentiable(
    with_plain_torch: Script, outside: bool
) -> None:
    script = f"""
    for differentiable in (False, True):
        class Own(torch.optim.SGD):
            def _init_group(self, *args):
                seen.append(torch.is_grad_enabled())
                return super()._init_group(*args)

        seen, weight = [], torch.zeros(2)
        weight.grad = torch.zeros(2)
        optimizer = Own([weight], lr=0.1, differentiable=differentiable)
        torch.set_grad_enabled({outside})
        optimizer.step()
        assert seen == [differentiable]
        assert torch.is_grad_enabled() is {outside}
    assert COMPILER not in sys.modules
    """
    with_plain_torch(BEGIN, DEFER, script)


@pytest.mark.parametrize(
    "use",
    [
        "import torch._dynamo",
        "torch._dynamo.config.verbose",
        "from torch._dynamo.utils import counters",
        "torch.compile(lambda x: x + 1, backend='eager')(torch.zeros(2))",
    ],
)
def test_once_the_compiler_is_imported_nothing_is_left_of_the_deferral(
    with_plain_torch: Script, use: str
) -> None:
    script = """
    assert sys.modules[COMPILER] is torch._dynamo
    assert isinstance(torch._dynamo, type(sys))
    assert sys.meta_path == finders
    assert [step.__code__ for step in steps] == made
    train(torch.optim.SGD)
    for one in skipped:
        called = vars(one.__wrapped__)["__dynamo_disable"]
        assert called is not one.__wrapped__
    """
    with_plain_torch(BEGIN, DEFER, "train(torch.optim.SGD)", use, script)


def test_a_compiled_step_trains_after_a_deferral(with_plain_torch: Script) -> None:
    script = """
    optimizer = train(torch.optim.SGD)

    @torch.compile(backend="eager")
    def step():
        torch.autograd.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    print([parameter.tolist() for parameter in model.parameters()])
    """
    deferred, usual = with_plain_torch(BEGIN, DEFER, script), with_plain_torch(BEGIN, script)
    assert deferred.splitlines()[-1] == usual.splitlines()[-1]


def test_a_torch_that_is_built_differently_is_left_alone(with_plain_torch: Script) -> None:
    script = """
    del sys.modules["torch.optim.optimizer"]._use_grad_for_differentiable
    names = set(vars(torch))
    assert not defer()
    assert set(vars(torch)) == names
    assert sys.meta_path == finders
    """
    with_plain_torch(BEGIN, script)


def test_there_is_nothing_to_defer_once_it_is_imported(with_torch: Script) -> None:
    with_torch(BEGIN, "assert not defer()")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("model = torch.compile(model)", True),
        ("from torch.distributed.fsdp import fully_shard", True),
        ("from transformers import Trainer", True),
        ("from torch.utils.checkpoint import checkpoint", True),
        ("model = DistributedDataParallel(model)", False),
        ("import torch", False),
    ],
)
def test_a_script_that_will_compile_is_known_by_its_text(line: str, expected: bool) -> None:
    assert seems_to_compile(line.encode()) is expected


def test_the_script_of_the_bench_seems_to_do_without() -> None:
    script = Path(__file__).parents[2] / "bench" / "scripts" / "ddp.py"
    assert not seems_to_compile(script.read_bytes())
