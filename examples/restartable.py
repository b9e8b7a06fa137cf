"""Trains the model of `train.py` in a function that is left and entered again when a rank fails.

The ranks that did not fail keep their processes and their living state, so that no step is lost. Try
`holdfast run --nproc-per-node 4 examples/restartable.py`, and kill one of the four.
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast


@holdfast.inprocess.restartable()
def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    dist.init_process_group("gloo")
    kept = holdfast.inprocess.keep({"model": model, "optimizer": optimizer})
    step = kept.restore()
    replica = DistributedDataParallel(model)
    while step < steps:
        inputs = torch.randn(64, 64)
        loss = (replica(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        kept.commit(step)
        if dist.get_rank() == 0 and step % 200 == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    layers = torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
    model = torch.nn.Sequential(*layers)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), options.steps)


if __name__ == "__main__":
    main()
