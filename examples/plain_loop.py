"""A training loop in plain PyTorch over a pipeline. Nothing of Lightning is imported.

torchrun --nproc-per-node 2 examples/plain_loop.py
python examples/plain_loop.py                        one process: to debug, and in notebooks
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from small_gpt2 import loss_of, small_gpt2, texts
from torch.utils.data import DataLoader, DistributedSampler

import lightning_pipe


def main() -> None:
    """Train, evaluate and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("small_gpt2.pt"))
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model = small_gpt2()
    pipeline = lightning_pipe.Pipeline(model, micro_batches=4, data_parallel_size=arguments.replicas)
    # the ranks of a pipeline get the same batches: samples are dealt out to replicas alone
    data, replicas = texts(), (pipeline.data_parallel_size, pipeline.data_parallel_rank)
    sampler = DistributedSampler(data, *replicas, shuffle=False)
    loader = DataLoader(data, batch_size=16 // arguments.replicas, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = int(os.environ.get("RANK", "0")) == 0
    for number, batch in enumerate(loader):
        loss = pipeline.train(lambda part: loss_of(model, part), batch)
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if first:
            print(f"batch {number}: loss {loss.item():.6f}", flush=True)
    model.eval()
    losses = pipeline.evaluate(lambda batch: loss_of(model, batch), loader)
    state = pipeline.state_dict()  # on all ranks; each has a part of it
    if first:
        print(f"evaluated: loss {torch.stack(losses).mean().item():.6f}")
        torch.save(state, arguments.output)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
