"""Lightning's finetuning callbacks compare parameters by value; each rank has the values of its own stages alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from lightning.pytorch.callbacks import BaseFinetuning
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

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

    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        digests = _digests(pipeline)
        of_optimizer = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        given, known = list(params), {digests.get(id(parameter), parameter) for parameter in of_optimizer}
        kept = [parameter for parameter in given if digests.get(id(parameter), parameter) not in known]
        if len(kept) < len(given):
            rank_zero_warn(
                f"{len(given) - len(kept)} of {len(given)} parameters that a callback has unfrozen are not added to "
                "the optimizer, which has parameters of the same values, as on one device."
            )
        return kept

    with replaced(BaseFinetuning, "filter_on_optimizer", staticmethod(filter_on_optimizer), gated=False):
        yield


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
