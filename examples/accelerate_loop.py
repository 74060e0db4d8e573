"""Hugging Face Accelerate prepares data, optimizer and tracking; the model stays ours.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from small_gpt2 import loss_of, small_gpt2, texts
from torch.utils.data import DataLoader

import lightning_pipe


def main() -> None:
    """Train, evaluate and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("small_gpt2.pt"))
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = small_gpt2()  # not for accelerator.prepare, which would copy it to all processes
    pipeline = lightning_pipe.Pipeline(model, micro_batches=4, device=accelerator.device)
    # accelerator.prepare would deal batches out to all processes; only replicas get others than the rest
    loader = prepare_data_loader(
        DataLoader(texts(), batch_size=16),
        device=accelerator.device,
        num_processes=pipeline.data_parallel_size,
        process_index=pipeline.data_parallel_rank,
        put_on_device=True,
    )
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=3e-3))
    accelerator.init_trackers("small_gpt2")
    for number, batch in enumerate(loader):
        loss = pipeline.train(lambda part: loss_of(model, part), batch)
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=number)
        accelerator.print(f"batch {number}: loss {loss.item():.6f}")
    model.eval()
    losses = pipeline.evaluate(lambda batch: loss_of(model, batch), loader)
    accelerator.print(f"evaluated: loss {torch.stack(losses).mean().item():.6f}")
    accelerator.save(pipeline.state_dict(), arguments.output)
    accelerator.end_training()


if __name__ == "__main__":
    main()
