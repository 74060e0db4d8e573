"""Lightning's finetuning callbacks compare parameters by value; each rank has the values of its own stages alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.patches import replaced


@contextmanager
def values_compared(pipeline: Pipeline) -> Iterator[None]:
    """Let ``BaseFinetuning`` add to an optimizer what it would on one device.

    It leaves out parameters that are equal to one in the optimizer already (``torch.equal``, Lightning 2.6). Inside,
    every rank learns from a digest which parameters of the model are equal. All ranks of a pipeline must ask.

    Args:
        pipeline: knows who has which value.
    """
    before = vars(BaseFinetuning)["filter_on_optimizer"]

    def filter_on_optimizer(optimizer: Any, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        digests = _digests(pipeline)
        # one small tensor for each value: parameters with equal values get the same one, and others an unequal one
        by_digest = {key: torch.tensor([number]) for number, key in enumerate(dict.fromkeys(digests.values()))}

        def value(parameter: nn.Parameter) -> Tensor:
            return by_digest[digests[id(parameter)]] if id(parameter) in digests else parameter

        given = list(params)
        known = [value(p) for group in optimizer.param_groups for p in group["params"]]
        kept = before.__func__(_Known(known), map(value, given))
        chosen = {id(tensor) for tensor in kept}
        return [parameter for parameter in given if id(value(parameter)) in chosen]

    with replaced(BaseFinetuning, "filter_on_optimizer", staticmethod(filter_on_optimizer), gated=False):
        yield


class _Known:
    """As much of an optimizer as ``filter_on_optimizer`` reads: its parameters."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.param_groups = [{"params": parameters}]


def _digests(pipeline: Pipeline) -> dict[int, bytes]:
    """A digest of value and shape for each parameter, by ``id``. Collective over the pipeline."""
    mine = {
        name: _digest(parameter)
        for name, parameter in pipeline.module.named_parameters()
        if pipeline.holds(name) and pipeline.ownership.counted(name)
    }
    gathered = pipeline.transport.all_gather_object(mine, pipeline.pipeline_members)
    known = {name: digest for each in gathered for name, digest in each.items()}
    return {id(parameter): known[name] for name, parameter in pipeline.module.named_parameters()}


def _digest(parameter: nn.Parameter) -> bytes:
    data = parameter.detach().cpu().contiguous()
    return hashlib.sha256(f"{tuple(data.shape)}".encode() + data.double().numpy().tobytes()).digest()
