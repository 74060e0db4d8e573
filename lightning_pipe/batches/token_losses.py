"""What a loss is a mean over: samples, or the labels that count. Losses of the first batches tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.batches.loss_checks import WEIGHTS
from lightning_pipe.batches.micro_batches import MicroBatches
from lightning_pipe.engine.containers import children
from lightning_pipe.errors import ConfigurationError

SAMPLES = "samples"
_IGNORED = -100
"""The label that losses of torch and Hugging Face leave out."""


class TokenLosses:
    """Says what micro-batches count where the user has not.

    The candidates: samples; labels that are not -100; and the same without the first one of each sample, which causal
    models do not predict. A batch that gives them other shares is compared, until one is left.

    Attributes:
        left: the candidates that have predicted all losses so far, alike on all ranks; ``None``: none was compared.
        spread: of the last batch whether it counts, how much by all other candidates for each by the first, and the
            square of that. Sums over replicas tell whether the candidates give these different shares.
    """

    left: tuple[str, ...] | None = None
    spread = 0.0, 0.0, 0.0

    def counted(self, split: MicroBatches) -> MicroBatches:
        """The micro-batches with what they count, and with the candidates, if their shares differ.

        Raises:
            ConfigurationError: the batch has not the labels that earlier losses were a mean over.
        """
        if self.left == (SAMPLES,) or split.own:
            return split
        amounts = {SAMPLES: [*map(float, split.sizes)], **_counts(split, every=self.left is not None)}
        candidates = {name: amounts[name] for name in self.left or amounts if name in amounts}
        if not candidates:
            raise ConfigurationError(
                f"Losses were means over {self.left[0] if self.left else SAMPLES}, which this batch has not.",
                hint=WEIGHTS,
            )
        first, *others = candidates.values()
        total, rest = sum(first), sum(map(sum, others))
        ratio = rest / (total or 1e-9)  # where nothing counts by the first one, no other replica has as much
        self.spread = float(total + rest > 0), ratio, ratio**2
        if not others and self.left is None:  # samples count, as in the batch itself
            return split
        return replace(split, amounts=first, candidates=candidates if _differ(candidates) else {})

    def learn(self, fitting: Sequence[Mapping[str, Sequence[float]]]) -> bool:
        """Keep the candidates that have predicted the losses of a batch; returns whether its weights are still open.

        Args:
            fitting: those that have done so, with what micro-batches count, as seen on each rank; the same on all.

        Raises:
            ConfigurationError: there are none.
        """
        left = [name for name in fitting[0] if all(name in each for each in fitting)]
        if not left:
            raise ConfigurationError(
                "The loss is a mean neither over samples nor over labels that are not -100.", hint=WEIGHTS
            )
        self.left = tuple(left)
        return any(_differ({name: each[name] for name in left}) for each in fitting)


def _differ(candidates: Mapping[str, Sequence[float]]) -> bool:
    """Whether some give micro-batches other shares than the first one."""
    first, *others = [[amount / (sum(each) or 1.0) for amount in each] for each in candidates.values()]
    return any(abs(a - b) > 1e-12 for other in others for a, b in zip(first, other, strict=True))


def _counts(split: MicroBatches, *, every: bool) -> dict[str, list[float]]:
    """By place, the labels that count in each micro-batch.

    Args:
        split: the batch.
        every: whether integers of which none is -100 are counted, too.
    """
    length = sum(split.sizes)
    leaves = {place: leaf for place, leaf in _integers("batch", split.batch) if leaf.ndim > 1 and len(leaf) == length}
    counts = [
        kept.flatten(1).sum(1)
        for leaf in leaves.values()
        for labelled in [leaf != _IGNORED]
        for kept in (labelled, labelled[..., 1:])
    ]
    rows = torch.stack(counts).cpu() if counts else ()  # a GPU is waited for once
    found = {}
    for (place, leaf), *pair in zip(leaves.items(), rows[::2], rows[1::2], strict=True):
        if every or int(pair[0].min()) < leaf[0].numel():
            for name, row in zip((place, f"{place}, shifted"), pair, strict=True):
                found[name] = [float(part.sum()) for part in row.split([*split.sizes])]
    return found


def _integers(place: str, node: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(node, Tensor):
        if node.dtype is torch.long:
            yield place, node
        return
    for key, child in (children(node) or {}).items():
        yield from _integers(f"{place}[{key!r}]", child)
