"""Sampling loops of diffusion models in evaluation steps equal one device, and so does their training pass."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.support import oracle, processes
from tests.support.pairs import slow_but
from tests.support.trainer_runs import QUIET, quiet

WIDTH, TIMES, SAMPLES = 4, 8, 6


class Block(nn.Module):
    """A residual layer of the network that denoises."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.out(F.silu(self.hidden(h)))


class Denoiser(L.LightningModule):
    """Samples by DDIM with noise, guided in a batch of twice the size, from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.condition = nn.Embedding(TIMES, WIDTH), nn.Embedding(3, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.register_buffer("alphas", torch.linspace(0.99, 0.1, TIMES, dtype=torch.float64))

    def noise(self, x: Tensor, t: Tensor, condition: Tensor) -> Tensor:
        h = x + self.time(t) + self.condition(condition)
        for layer in self.layers:
            h = layer(h)
        return h

    def guided(self, x: Tensor, t: Tensor, condition: Tensor) -> Tensor:
        """The noise of a batch with and without its condition, extrapolated."""
        both = torch.cat([torch.zeros_like(condition), condition])
        free, bound = self.noise(x.repeat(2, 1), t.repeat(2), both).chunk(2)
        return free + 2.0 * (bound - free)

    def sample(self, condition: Tensor, seed: int) -> tuple[Tensor, int]:
        """The samples, and the number of time steps that they took."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(len(condition), WIDTH, generator=generator, dtype=torch.float64)
        for i in reversed(range(TIMES)):
            noise = self.guided(x, torch.full((len(x),), i), condition)
            now, later = float(self.alphas[i]), self.alphas[i - 1].item() if i else 1.0
            clean = ((x - (1 - now) ** 0.5 * noise) / now**0.5).clamp(-3, 3)
            x = later**0.5 * clean + 0.5 * (1 - later) ** 0.5 * noise
            x = x + 0.1 * i * torch.randn(x.shape, generator=generator, dtype=x.dtype)
            if i < TIMES - 3 and clean.abs().mean() < 2.0:
                break
        return x, TIMES - i

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, condition = batch
        t = (x[:, 0].abs() * 1e4).long() % TIMES
        share, noise = self.alphas[t][:, None], x.cos()
        return F.mse_loss(self.noise(share.sqrt() * x + (1 - share).sqrt() * noise, t, condition), noise)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        samples, used = self.sample(batch[1], batch_idx)
        self.log("mean", samples.mean())
        self.log("used", float(used))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.sample(batch[1], batch_idx + 5)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sampled(process: int, devices: int | None, schedule: str = "1f1b") -> Any:
    from lightning_pipe import PipeStrategy

    quiet()
    L.seed_everything(7, verbose=False)
    strategy = PipeStrategy(layers="layers", schedule=schedule, micro_batches=2) if devices else "auto"
    options = {**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0}
    trainer = L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **options)
    module = Denoiser().double()
    x = torch.arange(SAMPLES * WIDTH, dtype=torch.float64).view(SAMPLES, WIDTH).sin()
    data = DataLoader(TensorDataset(x, torch.arange(SAMPLES) % 3), batch_size=4)
    trainer.fit(module, data, data)
    predictions = [(samples.tolist(), used) for samples, used in trainer.predict(module, data)]
    weights = {name: value.tolist() for name, value in oracle.state_of(module).items()}
    return oracle.numbers(trainer.callback_metrics), predictions, weights


SCHEDULES = [(2, "1f1b"), (2, "interleaved"), (4, "1f1b"), (2, "dualpipev")]


@pytest.mark.parametrize(("ranks", "schedule"), slow_but(SCHEDULES, SCHEDULES[0]))
def test_samples_are_those_of_one_device(ranks: int, schedule: str) -> None:
    theirs = sampled(0, None)
    for ours in processes.run_trainers(sampled, ranks, timeout=100, devices=ranks, schedule=schedule):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-9)
        for (samples, used), (expected, steps) in zip(ours[1], theirs[1], strict=True):
            torch.testing.assert_close(torch.tensor(samples), torch.tensor(expected), rtol=1e-6, atol=1e-9)
            assert used == steps
        for name, value in theirs[2].items():
            torch.testing.assert_close(torch.tensor(ours[2][name]), torch.tensor(value), rtol=1e-6, atol=1e-9)
