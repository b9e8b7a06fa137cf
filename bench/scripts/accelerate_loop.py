"""A training loop with accelerate, as its quick tour writes it, on a tiny model."""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator
from marking import arguments, last_step, marks_of_this_rank
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 64


def main() -> None:
    args = arguments(__doc__)
    marks = marks_of_this_rank()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(4096, FEATURES)
    rows = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    loader = DataLoader(rows, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    while step < last_step(args):
        for batch, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(batch), targets))
            optimizer.step()
            step += 1
            time.sleep(args.pause_ms / 1000)
            marks.finished(step)
            if step >= last_step(args):
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
