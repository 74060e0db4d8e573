"""One batch on its way through the engine: the object that goes down whole, from the caller to the stages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_pipe.config import is_thorough
from lightning_pipe.engine.containers import fresh
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.random_streams import RandomStreams
from lightning_pipe.torch_internals import tree_map

StepFunction = Callable[[int, Any], Any]


@dataclass
class Batch:
    """What one batch brings to the engine.

    Args:
        step: ``step(index, micro_batch)`` runs the user's step; its value counts on the stage with the loss alone.
        micro_batches: the slices of the batch.
        signatures: a number for each of them: equal numbers, equal shapes.
        weights: the factor of each micro-batch's loss.
        streams: the batch's random streams.
        training: whether gradients are wanted.
        undisturbed: whether no other micro-batch is under way meanwhile, which could read what this one changes.
        using: ``using(stage, micro_batch)`` is entered around computations, to put the weights that they use in place;
            ``None``: they are there.
        results: what the step returned for each micro-batch, detached, where the loss is.
        constant: the micro-batches whose loss depends on nothing that is trained.
        again: whether it has run before, ahead of earlier batches: what differed then must not do so again.
        ahead: whether earlier batches are under way, which may change what this one computes with.
        repeats: whether a run of the step has ended because it has to be run in another way: it comes back to an
            earlier stage, or one that ran ahead of earlier batches has computed with other values.
    """

    step: StepFunction
    micro_batches: Sequence[Any]
    signatures: Sequence[Hashable]
    weights: Sequence[float]
    streams: RandomStreams
    training: bool
    undisturbed: bool = False
    using: Callable[[int, int], AbstractContextManager[None]] | None = None
    results: dict[int, Any] = field(default_factory=dict)
    constant: set[int] = field(default_factory=set)
    again: bool = False
    ahead: bool = False
    repeats: bool = False

    def keep(self, micro_batch: int, loss: Tensor | None, result: Any) -> None:
        """Keep what the step returned.

        Args:
            micro_batch: its number.
            loss: the weighted loss; ``None`` in an evaluation.
            result: what the step returned.

        Raises:
            ConfigurationError: no loss of the batch depends on anything that is trained. One micro-batch's need not,
                nor one that counts nothing.
        """
        # Detached: the graph behind a result would live as long as the batch.
        self.results[micro_batch] = _detached(result)
        if loss is None or loss.requires_grad or not self.weights[micro_batch]:
            return
        self.constant.add(micro_batch)
        if len(self.constant) == len(self.micro_batches):
            raise ConfigurationError(
                "The loss depends on no parameter that is trained: there are no gradients.",
                hint="Return it as it was computed, not from detach(), item() or torch.no_grad(); look at which "
                "parameters require gradients.",
            )

    @property
    def thorough(self) -> bool:
        """Whether what layers refer to is compared: in the first batches, some later ones, and second runs."""
        return self.again or is_thorough(self.streams.number)

    def slice(self, micro_batch: int) -> Any:
        """A micro-batch for one run: the step may change it, and nothing else shares its memory."""
        return fresh(self.micro_batches[micro_batch])


def _detached(result: Any) -> Any:
    if isinstance(result, Tensor):  # torch's walk over containers would leave something for the garbage collector
        return result.detach()
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)
