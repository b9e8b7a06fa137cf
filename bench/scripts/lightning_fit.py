"""Lightning's Trainer with its DDP strategy on a tiny module.

Lightning sees torchrun's variables and leaves the starting of processes to the launcher.
"""

from __future__ import annotations

import os
import time
from typing import Any

import lightning
import torch
from marking import arguments, last_step, marks_of_this_rank
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 64


class Summing(lightning.LightningModule):  # type: ignore[misc]
    """Learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Marking(lightning.Callback):  # type: ignore[misc]
    """Writes each finished step down, and ends the training when the bench says so."""

    def __init__(self) -> None:
        self._args = arguments(__doc__)
        self._marks = marks_of_this_rank()

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        time.sleep(self._args.pause_ms / 1000)
        self._marks.finished(trainer.global_step)
        trainer.should_stop = trainer.global_step >= last_step(self._args)


def main() -> None:
    marking = Marking()
    inputs = torch.randn(4096, FEATURES)
    rows = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_steps=1_000_000,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[marking],
    )
    trainer.fit(Summing(), DataLoader(rows, batch_size=16, shuffle=True))


if __name__ == "__main__":
    main()
