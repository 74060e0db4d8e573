"""Lightning Fabric launches the processes, loads data and saves; the loop is the user's, the pipeline ours.

python examples/fabric.py                            two processes
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric
from small_gpt2 import loss_of, small_gpt2, texts
from torch.utils.data import DataLoader

import lightning_pipe


def main() -> None:
    """Train, evaluate and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("small_gpt2.ckpt"))
    arguments = parser.parse_args()
    fabric = Fabric(devices=arguments.devices, strategy="ddp")
    fabric.launch()
    model = small_gpt2()
    # in the place of fabric.setup(model): the model is divided, not copied
    pipeline = lightning_pipe.Pipeline(model, micro_batches=4, device=fabric.device)
    # all processes are one pipeline, whose ranks get the same batches
    loader = fabric.setup_dataloaders(DataLoader(texts(), batch_size=16), use_distributed_sampler=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for number, batch in enumerate(loader):
        loss = pipeline.train(lambda part: loss_of(model, part), batch)
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"batch {number}: loss {loss.item():.6f}")
    model.eval()
    losses = pipeline.evaluate(lambda batch: loss_of(model, batch), loader)
    fabric.print(f"evaluated: loss {torch.stack(losses).mean().item():.6f}")
    fabric.save(arguments.output, {"model": pipeline.state_dict()})


if __name__ == "__main__":
    main()
