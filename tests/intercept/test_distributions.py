"""Distributions that layers return: the next stages compute with them as one device does, and gradients come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D

from tests.support.pairs import slow_but
from tests.support.returning_layers import WIDTH, Make, ReturningLayers, assert_crosses_cuts


class Shifted(D.Normal):
    """A user's own."""

    def __init__(self, loc: Tensor, scale: Tensor, name: str) -> None:
        super().__init__(loc, scale)
        self.name = name

    def log_prob(self, value: Any) -> Tensor:
        return super().log_prob(value - len(self.name))


def affine(h: Tensor) -> D.Distribution:
    scale = h[:, :1].exp()
    return D.TransformedDistribution(D.Normal(h, scale), [D.AffineTransform(h[:, 1:2], 2.0), D.TanhTransform().inv])


MAKE: dict[str, Make] = {
    "normal": lambda h: D.Normal(h, h.exp()),
    "independent": lambda h: D.Independent(D.Normal(h, h.exp()), 1),
    "categorical": lambda h: D.Independent(D.Categorical(logits=torch.stack([h, -h], -1)), 1),
    "mixture": lambda h: D.MixtureSameFamily(
        D.Categorical(logits=h), D.Independent(D.Normal(h[..., None].expand(-1, -1, WIDTH), 2.0), 1)
    ),
    "transformed": affine,
    "multivariate": lambda h: D.MultivariateNormal(h, torch.diag_embed(h.exp())),
    "own": lambda h: Shifted(h, h.exp(), "two"),
    "several": lambda h: (D.Normal(h, 1.0), {"tail": [D.StudentT(3.0, h)]}),
}


class Score(nn.Module):
    def __init__(self, discrete: bool) -> None:
        super().__init__()
        self.discrete, self.weight = discrete, nn.Parameter(torch.ones(()))

    def forward(self, found: Any, x: Tensor) -> Tensor:
        all_found = [found[0], *found[1]["tail"]] if isinstance(found, tuple) else [found]
        values = (x > 0).to(x.dtype) if self.discrete else x.tanh()
        return -self.weight * torch.stack([one.log_prob(values).reshape(len(x), -1).sum(-1) for one in all_found]).sum(
            0
        )


class Model(ReturningLayers):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first, head, last, score = self.layers
        found = head(first(batch))
        if isinstance(found, D.Normal):  # code between the layers reads it as ever
            assert len(found.mean) == len(batch) == found.batch_shape[0]
            assert found.batch_shape.numel() == found.mean.numel()
        return score(found, last(batch)).mean()


@pytest.mark.parametrize("kind", slow_but(MAKE, "categorical", "several"))
def test_a_distribution_crosses_a_cut(kind: str) -> None:
    assert_crosses_cuts(lambda: Model(MAKE[kind], Score(kind == "categorical"), rate=0.05))
