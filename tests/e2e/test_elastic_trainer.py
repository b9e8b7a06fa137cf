"""Steps of real gloo ranks equal those of one process, while the world goes from 4 ranks to 2 to 3.

Starting ranks takes longer than training here, so each world trains all cases, one after the other, and
each test checks one of them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from elastic_cases import (
    CASES,
    EPOCHS,
    MAX_NORM,
    STEPS_PER_EPOCH,
    Case,
    Lockstep,
    Training,
    new_model,
    new_optimizer,
    new_scheduler,
    records,
    reference,
    wrap,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from worlds import run_world

import holdfast

WORLDS = {4: 3, 2: 7, 3: EPOCHS * STEPS_PER_EPOCH}
"""World sizes in their order, and the step at which each ends: the first two within an epoch."""

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def run_cases(directory: Path, world: int, until: int) -> Callable[[int], None]:
    def act(rank: int) -> None:
        for name, case in CASES.items():
            training = Training(case, rank, world)
            path = directory / f"{name}.pt"
            if path.exists():
                restore(training, torch.load(path, weights_only=False))
            training.until(until)
            model, optim = get_state_dict(training.model, training.optimizer, options=FULL)
            dist.barrier()  # All have read what was there.
            if rank == 0:
                rest = (training.scheduler, training.trainer, training.data)
                parts = [part.state_dict() for part in rest]
                torch.save((model, optim, parts, training.norms), path)
            dist.barrier()

    return act


def restore(training: Training, saved: Any) -> None:
    model, optim, parts, norms = saved
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=model,
        optim_state_dict=optim,
        options=StateDictOptions(full_state_dict=True),
    )
    rest = (training.scheduler, training.trainer, training.data)
    for part, state in zip(rest, parts, strict=True):
        part.load_state_dict(state)
    training.norms = norms


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("elastic")
    for world, until in WORLDS.items():
        run_world(world, run_cases(directory, world, until))
    return directory


@pytest.mark.parametrize("name", CASES)
def test_a_changing_world_trains_as_one_process_does(name: str, trained: Path) -> None:
    case = CASES[name]
    model, _, (scheduler, trainer, _), norms = torch.load(
        trained / f"{name}.pt", weights_only=False
    )
    expected = reference(case, EPOCHS * STEPS_PER_EPOCH)
    bound = 1e-12 if case.dtype == torch.float64 else 1e-6
    for key, value in expected.parameters.items():
        torch.testing.assert_close(model[key], value, rtol=0, atol=bound, msg=f"{name}: {key}")
    assert norms == pytest.approx(expected.norms, rel=1e-5 if bound == 1e-6 else 1e-10)
    assert scheduler["_last_lr"] == [pytest.approx(expected.rate)]
    assert (trainer["steps"], trainer["samples"]) == (10, 2 * 61)


def test_the_reference_clips_some_steps_and_not_others() -> None:
    norms = reference(Case(), EPOCHS * STEPS_PER_EPOCH).norms
    assert min(norms) < MAX_NORM < max(norms)


# ---- collectives ---------------------------------------------------------------------------------


def collectives(rank: int, kind: str, how: str) -> Counter[str]:
    """What this rank's gloo did in the steps of an epoch, after a first one."""
    case = Case(kind, told=how == "told", sync_each=how == "each")
    training = Training(case, rank, 3)
    training.until(STEPS_PER_EPOCH)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        training.until(2 * STEPS_PER_EPOCH)
    return Counter(e.name for e in seen.events() if e.name.startswith("gloo:"))


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("collectives")

    def act(rank: int) -> None:
        kinds = [
            (kind, how) for kind in ("ddp", "fully_shard") for how in ("known", "told", "each")
        ]
        torch.save({kind: collectives(rank, *kind) for kind in kinds}, directory / f"{rank}.pt")
        dist.barrier()  # Rank 0 has the store.

    run_world(3, act)
    return directory


@pytest.mark.parametrize("how", ["known", "told", "each"])
@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
def test_all_ranks_issue_the_same_number_of_collectives(kind: str, how: str, counted: Path) -> None:
    first, *others = [torch.load(counted / f"{r}.pt", weights_only=False) for r in range(3)]
    assert all(other[kind, how] == first[kind, how] for other in others)
    assert first[kind, how].total() > 0


def test_ddp_reduces_once_a_step_and_sums_samples_once_where_they_are_told(counted: Path) -> None:
    seen = torch.load(counted / "0.pt", weights_only=False)
    assert seen["ddp", "known"] == {"gloo:all_reduce": STEPS_PER_EPOCH}
    assert seen["ddp", "told"] == {"gloo:all_reduce": 2 * STEPS_PER_EPOCH}


@pytest.mark.parametrize(("kind", "parts"), [("ddp", 1), ("fully_shard", 2)])
def test_gradients_are_reduced_in_the_last_micro_batch_alone_unless_asked(
    kind: str, parts: int, counted: Path
) -> None:
    """The steps have 3 micro-batches, and 2 at the epoch's end; models are reduced in parts."""
    seen = torch.load(counted / "0.pt", weights_only=False)
    assert seen[kind, "each"].total() - seen[kind, "known"].total() == parts * (4 * 2 + 1)


# ---- one world, several promises -----------------------------------------------------------------


def skipping(rank: int, kind: str) -> dict[str, Any]:
    """Two steps, the first of which has an infinite loss on rank 1 alone."""
    x, y = records(torch.float32)
    model = wrap(kind, new_model(torch.float32), 3)
    optimizer = new_optimizer("sgd", model)
    scheduler = new_scheduler(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = Lockstep(2, rank, 3, global_batch=13)
    trainer = holdfast.ElasticTrainer(
        model, optimizer, data, scheduler=scheduler, scaler=scaler, max_grad_norm=1.0
    )
    before = copy.deepcopy(get_model_state_dict(model, options=FULL))
    told = []
    for part in data:
        with trainer.accumulate():
            loss = functional.cross_entropy(model(x[part]), y[part])
            bad = rank == 1 and trainer.skipped == 0
            trainer.backward(loss * float("inf") if bad else loss)
        taken = trainer.step()
        if data.current is not None and data.current.index == data.current.of - 1:
            after = get_model_state_dict(model, options=FULL)
            same = all(torch.equal(after[key], before[key]) for key in before) if after else None
            counts = (taken, trainer.steps, trainer.skipped, scheduler.last_epoch)
            told.append((*counts, scaler.get_scale(), same))
        if trainer.steps:
            return {"told": told, "model": get_model_state_dict(model, options=FULL)}
    raise AssertionError("no step was taken")


def leasing(rank: int, kind: str) -> dict[str, Any]:
    """Sources of different lengths, one of which has nothing for a while, and one nothing at all."""
    x, y = records(torch.float64)
    model = wrap(kind, new_model(torch.float64), 3)
    trainer = holdfast.ElasticTrainer(model, new_optimizer("sgd", model))
    batches = LEASED[rank]
    left = torch.tensor([0])  # The rank without data has something to take part with.
    passes = 0
    for part in trainer.batches(iter(batches), samples=len, per_step=2, idle=left):
        with trainer.accumulate():
            trainer.backward(functional.cross_entropy(model(x[part]), y[part]))
        trainer.step()
        passes += 1
    counts = (trainer.steps, trainer.samples, passes)
    return {"counts": counts, "model": get_model_state_dict(model, options=FULL)}


def part(start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop)


LEASED: list[list[torch.Tensor | None]] = [
    [part(0, 4), part(4, 8), part(8, 11), part(11, 12), part(12, 15)],
    [None, part(20, 24), None, None, part(24, 29)],
    [],
]
LEASED_STEPS = [[*range(0, 8)], [*range(8, 12), *range(20, 24)], [*range(12, 15)], [*range(24, 29)]]
"""What ranks have for each step: up to two batches, fewer if there is nothing now."""


def first_fsdp(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    training = Training(Case("fsdp1", dtype=torch.float32), rank, 3)
    training.until(STEPS_PER_EPOCH)
    with FullyShardedDataParallel.summon_full_params(training.model):
        named = training.model.named_parameters()
        model = {name.replace("_fsdp_wrapped_module.", ""): p.clone() for name, p in named}
    return {"norms": training.norms, "model": model}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    directory = tmp_path_factory.mktemp("told")

    def act(rank: int) -> None:
        answers: dict[str, Any] = {"fsdp1": first_fsdp(rank)}
        for kind in ("ddp", "fully_shard"):
            answers[f"skipping {kind}"] = skipping(rank, kind)
            answers[f"leasing {kind}"] = leasing(rank, kind)
        answers["errors"] = refusals()
        torch.save(answers, directory / f"{rank}.pt")
        dist.barrier()  # Rank 0 has the store.

    run_world(3, act)
    ranks = [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(3)]
    return lambda name: [answers[name] for answers in ranks]


@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
def test_infinite_gradients_of_one_rank_skip_the_step_on_all(
    kind: str, told: Callable[[str], list[Any]]
) -> None:
    for rank, answer in enumerate(told(f"skipping {kind}")):
        (skipped, taken) = answer["told"]
        assert skipped[:5] == (False, 0, 1, 0, 512.0), f"rank {rank}"
        assert taken[:5] == (True, 1, 1, 1, 512.0), f"rank {rank}"
    first = told(f"skipping {kind}")[0]
    assert [same for *_, same in first["told"]] == [True, False]


@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
def test_a_step_after_a_skipped_one_is_right(kind: str, told: Callable[[str], list[Any]]) -> None:
    x, y = records(torch.float32)
    model = new_model(torch.float32)
    functional.cross_entropy(model(x[13:26]), y[13:26]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    new_optimizer("sgd", model).step()
    check_same(told(f"skipping {kind}")[0]["model"], model.state_dict(), 1e-6)


@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
def test_ranks_with_different_amounts_of_data_end_together_and_are_weighted(
    kind: str, told: Callable[[str], list[Any]]
) -> None:
    samples = sum(map(len, LEASED_STEPS))
    assert [answer["counts"] for answer in told(f"leasing {kind}")] == [(4, samples, 6)] * 3
    x, y = records(torch.float64)
    model = new_model(torch.float64)
    optimizer = new_optimizer("sgd", model)
    for step in LEASED_STEPS:
        optimizer.zero_grad()
        functional.cross_entropy(model(x[step]), y[step]).backward()
        optimizer.step()
    check_same(told(f"leasing {kind}")[0]["model"], model.state_dict(), 1e-12)


def test_fsdp_1_trains_as_one_process_does(told: Callable[[str], list[Any]]) -> None:
    expected = reference(Case(dtype=torch.float32), STEPS_PER_EPOCH)
    for answer in told("fsdp1"):
        check_same(answer["model"], expected.parameters, 1e-6)
        assert answer["norms"] == pytest.approx(expected.norms, rel=1e-5)


def refusals() -> list[str]:
    """What a trainer on three ranks says to models and loaders that do not fit."""
    model = new_model(torch.float64)
    optimizer = new_optimizer("sgd", model)
    ddp = wrap("ddp", model, 3)
    alone = [dist.new_group([rank]) for rank in range(3)][dist.get_rank()]
    tries: list[Callable[[], Any]] = [
        lambda: holdfast.ElasticTrainer(model, optimizer),
        lambda: holdfast.ElasticTrainer(ddp, optimizer, Lockstep(2, 0, 3, global_batch=2)),
        lambda: holdfast.ElasticTrainer(ddp, optimizer, group=alone),
    ]
    said = []
    for attempt in tries:
        with pytest.raises(holdfast.errors.UsageError) as caught:
            attempt()
        said.append(str(caught.value))
    return said


def test_models_and_batches_that_do_not_fit_the_world_are_refused(
    told: Callable[[str], list[Any]],
) -> None:
    for plain, small, narrow in told("errors"):
        assert "nothing averages the gradients of Sequential over the 3 ranks" in plain
        assert "global batch of 2 is smaller than the world of 3 ranks" in small
        assert "averages gradients over 3 ranks, but its steps are shared by 1" in narrow


def check_same(model: Any, expected: Any, bound: float) -> None:
    assert model.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(model[key], value, rtol=0, atol=bound, msg=key)
