"""ElasticTrainer in one process: accumulation, precision, learning rates, state, what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from elastic_cases import SIZE, Info, Lockstep, new_model, new_optimizer, new_scheduler, records
from torch.nn import functional

import holdfast
from holdfast.errors import UsageError

F32 = torch.float32


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


class Setup:
    """A model, an optimizer, a loader of four micro-batches a step, and a trainer of them."""

    def __init__(self, dtype: torch.dtype = F32, data: Any = None, **options: Any) -> None:
        self.x, self.y = records(dtype)
        self.model = new_model(dtype)
        self.optimizer = new_optimizer("sgd", self.model)
        self.data = data if data is not None else Lockstep(4, 0, 1, global_batch=13)
        self.trainer = holdfast.ElasticTrainer(self.model, self.optimizer, self.data, **options)

    def loss(self, part: Any) -> Any:
        return functional.cross_entropy(self.model(self.x[part]), self.y[part])

    def train(self, until: Callable[[], bool] = lambda: False) -> None:
        for part in self.data:
            with self.trainer.accumulate():
                self.trainer.backward(self.loss(part))
            self.trainer.step()
            if until():
                return


class Given:
    """A loader that says of its batches what a test wants it to say."""

    def __init__(self, *infos: Info) -> None:
        self.infos = infos
        self.current: Info | None = None

    def __iter__(self) -> Any:
        for info in self.infos:
            self.current = info
            yield torch.arange(info.records)


# ---- steps ----


def test_step_says_when_an_optimizer_step_was_taken() -> None:
    setup = Setup()
    told = []
    for part in setup.data:
        with setup.trainer.accumulate():
            setup.trainer.backward(setup.loss(part))
        told.append(setup.trainer.step())
    assert told == [False, False, False, True] * 4 + [False, False, True]
    assert (setup.trainer.steps, setup.trainer.samples) == (5, SIZE)


def test_several_backward_passes_of_one_micro_batch_add_up() -> None:
    one, two = Setup(torch.float64), Setup(torch.float64)
    for setup, parts in ((one, [1.0]), (two, [0.25, 0.75])):
        for part in setup.data:
            with setup.trainer.accumulate():
                loss = setup.loss(part)
                for share in parts:
                    setup.trainer.backward(loss * share, retain_graph=True)
            if setup.trainer.step():
                break
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_schedulers_step_once_a_step() -> None:
    setup = Setup()
    schedulers = [new_scheduler(setup.optimizer), new_scheduler(setup.optimizer)]
    trainer = holdfast.ElasticTrainer(
        setup.model, setup.optimizer, setup.data, scheduler=schedulers
    )
    setup.trainer = trainer
    setup.train()
    assert [each.last_epoch for each in schedulers] == [5, 5]


def test_several_optimizers_are_clipped_together_and_step_together() -> None:
    setup = Setup(torch.float64)
    first, _, last = setup.model
    pair = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (first, last)]
    setup.trainer = holdfast.ElasticTrainer(
        setup.model, pair, setup.data, max_grad_norm=0.1, loss="mean"
    )
    setup.train(until=lambda: setup.trainer.steps == 1)
    model = new_model(torch.float64)
    functional.cross_entropy(model(setup.x[:13]), setup.y[:13]).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert float(setup.trainer.grad_norm) == pytest.approx(float(norm))
    for a, b in zip(setup.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_a_plain_loader_with_told_samples_equals_whole_batches() -> None:
    setup = Setup(torch.float64)
    trainer = holdfast.ElasticTrainer(setup.model, setup.optimizer)
    for part, last in (([0, 1, 2], False), ([3], False), ([4, 5, 6, 7, 8], True)):
        with trainer.accumulate(samples=len(part), last=last):
            trainer.backward(setup.loss(part))
        assert trainer.step() is last
    model = new_model(torch.float64)
    functional.cross_entropy(model(setup.x[:9]), setup.y[:9]).backward()
    new_optimizer("sgd", model).step()
    assert trainer.samples == 9
    for a, b in zip(setup.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_an_idle_micro_batch_changes_nothing() -> None:
    results = []
    for idles in (0, 2):
        setup = Setup(torch.float64)
        trainer = holdfast.ElasticTrainer(setup.model, setup.optimizer)
        for _ in range(idles):
            with trainer.idle(last=False):
                trainer.backward(setup.loss([9]))
            trainer.step()
        with trainer.accumulate(samples=3):
            trainer.backward(setup.loss([0, 1, 2]))
        assert trainer.step()
        results.append(list(setup.model.parameters()))
    assert all(map(torch.equal, *results))


def test_gradients_are_dropped_after_a_step_and_on_request() -> None:
    setup = Setup()
    setup.train(until=lambda: setup.trainer.steps == 1)
    assert all(p.grad is None for p in setup.model.parameters())
    setup.train(until=lambda: setup.data.current.index == 1)
    assert all(p.grad is not None for p in setup.model.parameters())
    setup.trainer.discard()
    assert all(p.grad is None for p in setup.model.parameters())
    setup.train(until=lambda: setup.trainer.steps == 2)


# ---- precision ----


def test_autocast_covers_the_forward_pass_and_not_the_backward_pass() -> None:
    setup = Setup(autocast=torch.bfloat16)
    seen = []
    setup.model[0].weight.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))
    with setup.trainer.accumulate(samples=4):
        out = setup.model(setup.x[:4])
        setup.trainer.backward(functional.cross_entropy(out, setup.y[:4]))
    assert out.dtype == torch.bfloat16
    assert seen == [False]
    assert not torch.is_autocast_enabled("cpu")


def test_a_step_in_bfloat16_equals_one_that_is_written_by_hand() -> None:
    setup = Setup(autocast=torch.bfloat16)
    setup.train(until=lambda: setup.trainer.steps == 1)
    model = new_model(F32)
    for part in torch.arange(13).tensor_split(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(setup.x[part]), setup.y[part])
        (loss * (len(part) / 13)).backward()
    new_optimizer("sgd", model).step()
    assert all(map(torch.equal, setup.model.parameters(), model.parameters()))


def scaler(**options: Any) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=256.0, **options)


def test_a_scaler_does_not_change_steps() -> None:
    plain = Setup(torch.float64, max_grad_norm=0.2)
    scaled = Setup(torch.float64, max_grad_norm=0.2, scaler=scaler())
    for setup in (plain, scaled):
        setup.train()
    for a, b in zip(plain.model.parameters(), scaled.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
    assert float(plain.trainer.grad_norm) == pytest.approx(float(scaled.trainer.grad_norm))


def test_a_step_with_infinite_gradients_is_skipped_by_every_optimizer() -> None:
    setup = Setup()
    first, _, last = setup.model
    pair = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (first, last)]
    schedulers = [new_scheduler(each) for each in pair]
    grows = scaler()
    trainer = holdfast.ElasticTrainer(setup.model, pair, scheduler=schedulers, scaler=grows)
    before = copy.deepcopy(setup.model.state_dict())
    last.bias.register_hook(lambda grad: grad / 0)  # The first optimizer's gradients are finite.
    with trainer.accumulate(samples=2):
        trainer.backward(setup.loss([0, 1]))
    assert trainer.step() is False
    assert (trainer.steps, trainer.skipped, trainer.samples) == (0, 1, 0)
    assert grows.get_scale() == 128.0
    assert [each.last_epoch for each in schedulers] == [0, 0]
    assert all(torch.equal(value, before[key]) for key, value in setup.model.state_dict().items())
    assert all(p.grad is None for p in setup.model.parameters())


def test_a_disabled_scaler_is_none() -> None:
    setup = Setup(scaler=scaler(enabled=False))
    setup.train(until=lambda: setup.trainer.steps == 1)
    assert setup.trainer.steps == 1


# ---- learning rates ----


class Rates(torch.optim.SGD):
    """Notes the learning rates that its steps see."""

    def __init__(self, model: torch.nn.Module, rate: Any = 0.1) -> None:
        super().__init__(model.parameters(), lr=rate)
        self.seen: list[float] = []

    def step(self, closure: Any = None) -> None:
        self.seen.append(float(self.param_groups[0]["lr"]))
        super().step(closure)


def rates(batch_size: int, state: Any = None, rate: Any = 0.1, **options: Any) -> Any:
    """Train an epoch in batches of that size; the rates, the optimizer, and the trainer."""
    setup = Setup()
    optimizer = Rates(setup.model, rate)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    setup.data = Lockstep(batch_size, 0, 1, global_batch=None)
    setup.trainer = holdfast.ElasticTrainer(
        setup.model, optimizer, setup.data, scheduler=scheduler, **options
    )
    if state is not None:
        setup.trainer.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        scheduler.load_state_dict(state[2])
    setup.train()
    saved = [each.state_dict() for each in (setup.trainer, optimizer, scheduler)]
    return optimizer.seen, saved


@pytest.mark.parametrize(("scale", "factor"), [("none", 1.0), ("linear", 2.0), ("sqrt", 2**0.5)])
def test_the_rate_follows_the_batch_and_schedulers_still_apply(scale: Any, factor: float) -> None:
    seen, saved = rates(20, scale=scale, reference_batch=10)
    assert seen == pytest.approx([0.1 * factor / 2**n for n in range(4)])
    assert saved[1]["param_groups"][0]["lr"] == pytest.approx(0.1 / 2**4)


def test_the_short_batch_at_an_epochs_end_has_the_rate_of_the_others() -> None:
    seen, _ = rates(60, scale="linear", reference_batch=30)
    assert seen == pytest.approx([0.2, 0.1])


def test_the_reference_is_the_first_batch_and_survives_any_number_of_restores() -> None:
    seen, saved = rates(30, scale="linear")
    assert seen == pytest.approx([0.1, 0.05, 0.025])
    seen, saved = rates(60, saved, scale="linear")
    assert seen == pytest.approx([2 * 0.0125, 2 * 0.00625])
    seen, saved = rates(15, saved, scale="linear")
    assert seen[:2] == pytest.approx([0.003125 / 2, 0.003125 / 4])
    assert saved[0]["reference_batch"] == 30


def test_a_reference_that_was_passed_stays_after_a_restore() -> None:
    _, saved = rates(30, scale="linear")
    seen, _ = rates(30, saved, scale="linear", reference_batch=10)
    assert seen[0] == pytest.approx(3 * 0.0125)


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.1)
    seen, _ = rates(60, rate=rate, scale="linear", reference_batch=30)
    assert seen == pytest.approx([0.2, 0.1])
    assert float(rate) == pytest.approx(0.025)


def test_a_step_that_fails_leaves_the_rate_as_it_was() -> None:
    setup = Setup(data=Given(Info(4, 4, 0, 1)), scale="linear", reference_batch=2)

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    setup.optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no memory"):
        setup.train()
    assert setup.optimizer.param_groups[0]["lr"] == 0.2


# ---- state ----


def test_counts_go_on_after_a_restore() -> None:
    setup, again = Setup(), Setup()
    setup.train()
    again.trainer.load_state_dict(setup.trainer.state_dict())
    again.train()
    assert (again.trainer.steps, again.trainer.samples) == (10, 2 * SIZE)


def test_a_restore_drops_what_was_accumulated() -> None:
    setup = Setup()
    setup.train(until=lambda: setup.data.current.index == 1)
    setup.trainer.load_state_dict(setup.trainer.state_dict())
    assert all(p.grad is None for p in setup.model.parameters())
    with pytest.raises(UsageError, match="no accumulate"):
        setup.trainer.step()


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match="got epoch, position; this is not a trainer's state"):
        Setup().trainer.load_state_dict({"epoch": 1, "position": 2})


# ---- what is refused ----


def test_backward_outside_of_accumulate_is_refused() -> None:
    setup = Setup()
    with pytest.raises(UsageError, match="called within `with trainer"):
        setup.trainer.backward(setup.loss([0]))


def test_an_accumulate_without_backward_is_refused() -> None:
    setup = Setup()
    with pytest.raises(UsageError, match=r"without trainer.backward\(loss\)"), accumulating(setup):
        setup.loss([0]).backward()


def test_a_step_within_accumulate_is_refused() -> None:
    setup = Setup()
    with pytest.raises(UsageError, match="after the block of accumulate"), accumulating(setup):
        setup.trainer.step()


def test_a_nested_accumulate_is_refused() -> None:
    setup = Setup()
    with (
        pytest.raises(UsageError, match="cannot be nested"),
        accumulating(setup),
        accumulating(setup),
    ):
        pass


def accumulating(setup: Setup) -> Any:
    return setup.trainer.accumulate(samples=1)


def test_a_step_without_accumulate_is_refused() -> None:
    with pytest.raises(UsageError, match="no accumulate"):
        Setup().trainer.step()


def test_a_forgotten_step_is_noticed() -> None:
    setup = Setup(data=Given(Info(2, 2, 0, 1), Info(2, 2, 0, 1)))
    setup.trainer.step = lambda: False  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"call step\(\) after each"):
        setup.train()


def test_a_micro_batch_that_was_left_out_is_noticed() -> None:
    setup = Setup(data=Given(Info(2, 4, 0, 3), Info(1, 4, 2, 3)))
    with pytest.raises(UsageError, match="at micro-batch 2 of its step, but 1 went through"):
        setup.train()


def test_micro_batches_of_two_steps_are_not_mixed() -> None:
    setup = Setup(data=Given(Info(2, 4, 0, 2), Info(2, 5, 1, 2)))
    with pytest.raises(
        UsageError, match="a step of 5 samples, those before it to one of 4 samples"
    ):
        setup.train()


def test_a_micro_batch_that_raised_spoils_its_step_until_it_is_discarded() -> None:
    setup = Setup(data=Given(Info(2, 2, 0, 1)))
    with pytest.raises(ZeroDivisionError), accumulating(setup):
        raise ZeroDivisionError
    with pytest.raises(UsageError, match=r"discard\(\) drops them"):
        setup.trainer.step()
    with pytest.raises(UsageError, match=r"discard\(\) drops them"):
        setup.train()
    setup.trainer.discard()
    setup.train()
    assert setup.trainer.steps == 1


def test_a_loader_that_does_not_tell_needs_samples() -> None:
    setup = Setup(data=[torch.arange(4)])
    with pytest.raises(UsageError, match=r"pass accumulate\(samples=...\)"):
        setup.train()


def test_last_is_the_loaders_to_tell() -> None:
    setup = Setup()
    next(iter(setup.data))
    with (
        pytest.raises(UsageError, match="do not pass `last`"),
        setup.trainer.accumulate(last=True),
    ):
        pass


def test_idle_is_not_for_loaders_that_tell() -> None:
    setup = Setup()
    next(iter(setup.data))
    with pytest.raises(UsageError, match=r"use accumulate\(\)"):
        setup.trainer.idle()


def test_a_model_without_gradients_is_refused() -> None:
    setup = Setup()
    optimizer = new_optimizer("sgd", new_model(F32))
    trainer = holdfast.ElasticTrainer(setup.model, optimizer)
    with trainer.accumulate(samples=1):
        trainer.backward(setup.loss([0]))
    with pytest.raises(UsageError, match="no parameter of the optimizers has a gradient"):
        trainer.step()


def test_a_step_without_samples_on_any_rank_is_refused() -> None:
    setup = Setup()
    trainer = holdfast.ElasticTrainer(setup.model, setup.optimizer)
    with trainer.idle():
        trainer.backward(setup.loss([0]))
    with pytest.raises(UsageError, match="no rank had any samples"):
        trainer.step()


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (1.5, "a float"),
        (torch.zeros(3, requires_grad=True), r"one of shape \(3,\)"),
        (torch.zeros(()), "one without a gradient"),
    ],
    ids=["number", "vector", "constant"],
)
def test_a_loss_that_is_none_is_refused(loss: Any, said: str) -> None:
    setup = Setup()
    with pytest.raises(UsageError, match=said), accumulating(setup):
        setup.trainer.backward(loss)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss": "median"}, "loss is one of"),
        ({"scale": "cubic"}, "scale is one of"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is above 0"),
        ({"reference_batch": 0}, "reference_batch is above 0"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Setup(**options)


def test_a_scheduler_that_needs_a_metric_is_refused() -> None:
    setup = Setup()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(setup.optimizer)
    with pytest.raises(UsageError, match="call its step"):
        holdfast.ElasticTrainer(setup.model, setup.optimizer, scheduler=plateau)


def test_a_process_group_that_is_missing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match=r"WORLD_SIZE=4 .* init_process_group"):
        Setup()


def test_a_short_per_step_is_refused() -> None:
    with pytest.raises(UsageError, match="per_step is above 0"):
        next(Setup().trainer.batches([], samples=len, per_step=0))
