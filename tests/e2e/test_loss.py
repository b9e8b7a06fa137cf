"""A job whose ranks tell their loss, one of which dies: what is seen of it from outside."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from .harness import Run, wait_for
from .web import Web

TELLING = """
    import math, os, time
    import holdfast

    rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    step = 20 * restarts
    while not os.path.exists("end"):
        time.sleep(0.01)
        step += 1
        loss = rank + 1 / step
        holdfast.progress(step, math.nan if os.path.exists("diverge") else loss)
"""
"""Tells 1 / step on rank 0, and more on the others; after a restart it goes on from step 20."""

LOGGING = """
    import os, time
    import torch
    import holdfast

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(1, 51):
        optimizer.zero_grad()
        loss = model(torch.zeros(1, 1)).sum() * 0 + step
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            holdfast.progress(loss=loss)
"""
"""Leaves its steps to the optimizer's hook, and tells the loss, the number of the step, every 20."""


TRANSFORMERS = """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(256)]
    size = GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=8, use_cache=False)
    settings = TrainingArguments(
        "trainer", max_steps=50, logging_steps=20, use_cpu=True, save_strategy="no", report_to=[]
    )
    trainer = Trainer(model=GPT2LMHeadModel(size), args=settings, train_dataset=rows)
    trainer.train()
    open("logged", "w").write(str(trainer.state.log_history[1]["loss"]))
"""
LIGHTNING = """
    import lightning, torch
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, _):
            loss = self.layer(batch).square().mean()
            self.log("train_loss", loss)
            if self.global_step == 39:
                open("logged", "w").write(str(loss.item()))
            return loss

        def validation_step(self, batch, _):
            self.log("loss", 777.0)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(accelerator="cpu", max_steps=50, log_every_n_steps=20, **quiet)
    trainer.fit(Module(), DataLoader(torch.ones(50, 1)), DataLoader(torch.ones(5, 1)))
"""
"""Both train for 50 steps, log their loss every 20, and write down what it was at step 40."""


def test_the_loss_is_seen_and_after_a_kill_it_is_that_of_the_new_round(run: Run) -> None:
    pytest.importorskip("starlette", reason="holdfast[web] is not installed")
    pytest.importorskip("uvicorn", reason="holdfast[web] is not installed")
    run.train(script=TELLING)
    run.until_stepping()
    run.until(lambda job: job.loss is not None and job.loss.step > 300, "a loss beyond step 300")
    before = run.ask("status")
    assert before["loss"] == 1 / before["loss_step"], "rank 0's, of the step it is shown with"
    with Web(run.folder, run.env) as web:

        def get(path: str) -> Any:
            return web.get(f"/api/jobs/{run.job}/{path}")

        run.kill_rank(1)
        run.until_stepping(round=2)
        back = run.until(lambda job: job.loss is not None, "a loss of the second round").loss
        assert back is not None
        assert 20 < back.step < before["loss_step"], "the round went back, and its loss with it"

        def second_round() -> dict[str, Any]:
            found: dict[str, Any] = get("now")
            told = found["status"]["round"] == 2 and found["loss"] is not None
            return found if told and found["loss"] < 1 else {}

        now = wait_for(second_round, "rank 0's loss of the second round on the page")
        assert now["loss"] == now["status"]["loss"] == 1 / now["status"]["loss_step"]
        (run.folder / "diverge").touch()
        wait_for(lambda: get("now")["loss"] == "NaN", "a loss that is no number")
        for _, step, loss in get("loss")["points"]:
            assert loss in ("NaN", 1 / step, 1 + 1 / step), "rank 1's until rank 0 has told one"
        run.end()
        assert run.code() == 0
    after = run.ask("status")
    assert (after["loss"], after["loss_step"] > 20) == ("NaN", True)


def test_a_loss_without_a_step_is_of_the_step_that_the_hook_counted(run: Run) -> None:
    run.start(run.write(LOGGING), nproc=1)
    assert run.code() == 0
    status = run.ask("status")
    assert (status["step"], status["loss"], status["loss_step"]) == (50, 40.0, 40)


@pytest.mark.parametrize(
    ("framework", "script"), [("transformers", TRANSFORMERS), ("lightning", LIGHTNING)]
)
def test_what_a_framework_logs_is_the_loss_of_its_step(
    run: Run, framework: str, script: str
) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    run.start(run.write(script), nproc=1)
    assert run.code() == 0
    status, logged = run.ask("status"), float((run.folder / "logged").read_text())
    assert (status["step"], status["loss"], status["loss_step"]) == (50, logged, 40)
