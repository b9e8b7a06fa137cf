"""transformers' Trainer on a tiny model with random weights, as one would write it for torchrun.

It downloads nothing. What it does for the bench is in `marking`: each finished step is written down.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from marking import arguments, last_step, marks_of_this_rank
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

TOKENS = 32
VOCABULARY = 64


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens that depend only on their index."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(TOKENS) + index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


class Marking(TrainerCallback):  # type: ignore[misc]
    """Writes each finished step down, and ends the training when the bench says so."""

    def __init__(self) -> None:
        self._args = arguments(__doc__)
        self._marks = marks_of_this_rank()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        time.sleep(self._args.pause_ms / 1000)
        self._marks.finished(state.global_step)
        control.should_training_stop = state.global_step >= last_step(self._args)


def main() -> None:
    marking = Marking()
    size = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, n_positions=TOKENS, vocab_size=VOCABULARY, use_cache=False
    )
    settings = TrainingArguments(
        output_dir="trainer",
        max_steps=1_000_000,
        per_device_train_batch_size=4,
        use_cpu=True,
        ddp_backend="gloo",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(size),
        args=settings,
        train_dataset=Numbers(),
        callbacks=[marking],
    )
    trainer.train()


if __name__ == "__main__":
    main()
