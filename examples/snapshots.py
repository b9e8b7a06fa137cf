"""Trains the model of `train.py` with snapshots, so that a fault costs at most a few steps.

It takes a snapshot in memory every 10 steps and a checkpoint on storage every 500, of which the last
three are kept. `--sharded` shards the model with FSDP2. It also resumes in a world of another size.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--checkpoints", default="checkpoints", help="a directory or a URL")
    parser.add_argument("--sharded", action="store_true", help="FSDP2 instead of DDP")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    layers = torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
    model: torch.nn.Module = torch.nn.Sequential(*layers)
    model = fully_shard(model) if options.sharded else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    ckpt = holdfast.Checkpointer(
        options.checkpoints,
        {"model": model, "optimizer": optimizer},
        memory_every=10,
        storage_every=500,
        keep=holdfast.KeepLatest(3),
    )
    step = ckpt.restore()
    while step < options.steps:
        inputs = torch.randn(64, 64)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        ckpt.save(step)
        if dist.get_rank() == 0 and step % 200 == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
