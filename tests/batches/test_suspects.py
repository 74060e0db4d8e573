"""Tensors as long as the batch that may be no samples are refused."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipe import PipeStrategy
from lightning_pipe.batches.micro_batches import divide_batch
from lightning_pipe.errors import ConfigurationError
from tests.support import oracle
from tests.support.trainer_runs import QUIET

LENGTH = 8


def batch(seed: int = 0, samples: int = LENGTH, **more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, LENGTH, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(3, (samples,), generator=generator), **more}


def causal(dtype: torch.dtype) -> Tensor:
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return (
        allowed if dtype is torch.bool else torch.zeros(LENGTH, LENGTH, dtype=dtype).masked_fill(~allowed, -torch.inf)
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_causal_masks_are_not_cut(dtype: torch.dtype) -> None:
    for mask in (causal(dtype), causal(dtype).T, ~causal(torch.bool)):
        with pytest.raises(ConfigurationError, match=r"(?s)batch\['mask'\].*causal mask.*mask\[None\]"):
            divide_batch(batch(mask=mask), 2)
        assert len(divide_batch(batch(mask=mask), 2, 1).parts) == 1
    for other in (causal(dtype)[None], torch.ones(LENGTH, LENGTH), torch.randn(LENGTH, LENGTH)):
        assert len(divide_batch(batch(mask=other), 2).parts) == 8


class Attentive(L.LightningModule):
    """Adds what the batch brings to its attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).double()
        self.head = nn.Linear(4, 3).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"]
        for layer in self.layers:
            x = torch.tanh((layer(x) @ x.mT + batch["mask"]).softmax(-1) @ x)
        return F.cross_entropy(self.head(x.mean(1)), batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TimeFirst(Attentive):
    """Every step sees those before it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"]
        for layer in self.layers:
            x = torch.tanh(layer(x).cumsum(0))
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["y"].flatten())


BIAS = torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def fit(data: list[Any], micro_batches: Any = 8, model: type[Attentive] = Attentive) -> tuple[list[float], str]:
    recorder = oracle.Recorder()
    strategy = PipeStrategy(layers="layers", stages=2, micro_batches=micro_batches)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, callbacks=[recorder], **QUIET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model(), oracle.loader(data))
    return recorder.trace.losses, " ".join(str(one.message) for one in caught)


def test_a_mask_that_would_be_broadcast() -> None:
    """In micro-batches of one sample each gets one row of it."""
    with pytest.raises(ConfigurationError, match="causal mask"):
        fit([batch(mask=causal(torch.float64))])
    _, told = fit([batch(seed, mask=BIAS) for seed in range(3)])
    assert told.count("It was not checked whether") == 1
    losses, told = fit([batch(seed, mask=BIAS[None]) for seed in range(3)])
    assert "not checked" not in told
    expected = oracle.fit(Attentive(), [batch(seed, mask=BIAS[None]) for seed in range(3)], clip=None).losses
    assert losses == pytest.approx(expected, rel=1e-9)


def test_a_mask_that_fits_no_micro_batch_is_an_error_of_the_step() -> None:
    with pytest.raises(RuntimeError, match="The size of tensor a"):
        fit([batch(mask=BIAS)], micro_batches=4)


def test_time_first_runs_whole_or_is_told() -> None:
    """Six steps of eight samples are cut along time, which the first batch shows."""
    data = [{"x": each["x"][:6], "y": torch.randint(3, (6, LENGTH))} for each in map(batch, range(3))]
    expected = oracle.fit(TimeFirst(), data, clip=None).losses
    losses, told = fit(data, "auto", TimeFirst)
    assert "depends on which samples are together" in told
    assert losses == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ConfigurationError, match=r"(?s)depends on which samples are together.*split_batch"):
        fit(data, 3, TimeFirst)
