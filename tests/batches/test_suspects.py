"""Tensors as long as the batch that are no samples are refused, or named."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from lightning_pipe.batches.suspects import Suspects, ambiguous
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


TABLE = torch.randn(LENGTH, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_causal_masks_are_refused(dtype: torch.dtype) -> None:
    for mask in (causal(dtype), causal(dtype).T, ~causal(torch.bool)):
        with pytest.raises(ConfigurationError, match=r"(?s)batch\['mask'\].*causal mask.*mask\[None\]"):
            Suspects().look(batch(mask=mask), LENGTH, None)
    assert Suspects().look(batch(mask=causal(dtype)[None]), LENGTH, None) == []


def test_time_first_is_refused_where_the_loader_tells() -> None:
    time_first = {"x": torch.zeros(12, LENGTH, 4), "y": torch.zeros(12, LENGTH)}
    with pytest.raises(ConfigurationError, match="dimension 1"):
        Suspects().look(time_first, 12, LENGTH)
    for found, size in ((time_first, None), (time_first, 12), ({**time_first, "n": torch.zeros(12)}, LENGTH)):
        assert Suspects().look(found, 12, size) == []


@pytest.mark.parametrize(
    ("constant", "told_at"),
    [
        (TABLE, 1),
        (TABLE[:, 0], 1),  # one for each class, of which there are as many
        (torch.arange(LENGTH), 4),
        (torch.ones(LENGTH, LENGTH), None),  # attention to everything
        (torch.arange(LENGTH).expand(LENGTH, LENGTH), None),  # positions
        (torch.zeros(LENGTH, dtype=torch.int64), None),
        (torch.ones(1, LENGTH), None),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, Tensor) else None,
)
def test_what_never_changes_is_told_once(constant: Tensor, told_at: int | None) -> None:
    suspects = Suspects()
    told = [suspects.look(batch(number, extra=constant.clone()), LENGTH, LENGTH) for number in range(8)]
    assert told == [[f"batch['extra'] {tuple(constant.shape)}"] if n == told_at else [] for n in range(8)]


def test_the_same_batch_again_tells_nothing() -> None:
    suspects = Suspects()
    assert [suspects.look(batch(extra=TABLE), LENGTH, None) for _ in range(4)] == [[]] * 4


def test_labels_that_agree_by_chance() -> None:
    suspects, labels = Suspects(), torch.tensor([0, 1, 0, 1, 1, 0, 1, 0])
    for number in range(6):
        assert suspects.look(batch(number, label=labels if number in (1, 2, 3) else 1 - labels), LENGTH, None) == []


def test_names_what_may_lie_the_other_way() -> None:
    assert ambiguous({"m": torch.zeros(8, 8), "x": torch.zeros(8, 4), "y": [torch.zeros(8, 2, 8)]}, 8) == [
        "batch['m'] (8, 8)",
        "batch['y'][0] (8, 2, 8)",
    ]


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


def fit(batches: list[Any], micro_batches: int = 8, **options: Any) -> tuple[list[float], list[str]]:
    recorder = oracle.Recorder()
    strategy = PipeStrategy(layers="layers", stages=2, micro_batches=micro_batches, **options)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, callbacks=[recorder], **QUIET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Attentive(), oracle.loader(batches))
    ours = ("as long as the batch", "not checked")
    return recorder.trace.losses, [str(one.message) for one in caught if any(t in str(one.message) for t in ours)]


def test_a_mask_that_would_be_broadcast() -> None:
    """In micro-batches of one sample each gets one row of it."""
    with pytest.raises(ConfigurationError, match="causal mask"):
        fit([batch(mask=causal(torch.float64))])
    bias = torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    _, told = fit([batch(seed, mask=bias) for seed in range(3)])
    assert sum("not checked" in text for text in told) == 1
    assert sum("batch['mask'] (8, 8)" in text for text in told) == 1
    losses, told = fit([batch(seed, mask=bias[None]) for seed in range(3)])
    assert told == []
    expected = oracle.fit(Attentive(), [batch(seed, mask=bias[None]) for seed in range(3)], clip=None).losses
    assert losses == pytest.approx(expected, rel=1e-9)


def test_an_error_in_the_step_names_what_may_be_cut_wrongly() -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)batch\['mask'\] \(8, 8\).*mask\[None\].*split_batch") as caught:
        fit([batch(mask=TABLE @ TABLE.T)], micro_batches=4)
    assert type(caught.value.__cause__) is RuntimeError


def test_time_first_from_a_loader() -> None:
    samples = [(torch.zeros(12, 4), torch.zeros(12, dtype=torch.int64)) for _ in range(LENGTH)]

    def collate(items: list[Any]) -> dict[str, Tensor]:
        return {name: torch.stack(each, 1) for name, each in zip(("x", "y"), zip(*items, strict=True), strict=True)}

    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=PipeStrategy(micro_batches=4, stages=2, layers="layers"), **QUIET
    )
    with pytest.raises(ConfigurationError, match=r"(?s)dimension 1.*batches of 8 samples.*split_batch"):
        trainer.fit(Attentive(), DataLoader(samples, batch_size=LENGTH, collate_fn=collate))  # type: ignore[arg-type]
