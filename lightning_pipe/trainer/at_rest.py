"""A divided module between the runs of a Trainer: each rank keeps its share until somebody asks for all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.parameters.releasing import named_tensors
from lightning_pipe.partition import Layers
from lightning_pipe.text import memory
from lightning_pipe.transport.base import Transport

GATHER_LIMIT = 2**30
"""Modules of up to so many bytes are whole again on every rank after a run."""
CALL = "trainer.strategy.whole_module()"
_ASK = (
    "The run is over, and each rank has kept its share of the module, which is larger than "
    f"PipeStrategy(gather_limit=…). On all ranks: {CALL}"
)
_KEY = "_pipe_at_rest"
_EXPORT = "save_pretrained"


@dataclass(eq=False)
class AtRest:
    """What a module that stays divided remembers in one of its attributes; copies and pickles of it do not.

    Args:
        pipeline: the module over the ranks, as the last run has left it.
    """

    pipeline: Pipeline

    def __deepcopy__(self, memo: dict[int, Any]) -> AtRest:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def size_of(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, wherever their values are."""
    return sum({id(tensor): tensor.nbytes for _, tensor in named_tensors(module)}.values())


def finish_run(module: pl.LightningModule, pipeline: Pipeline, *, whole: bool) -> None:
    """At the end of a run: give every rank the whole module, or leave it divided. Collective over the pipeline.

    Args:
        module: the LightningModule, in host memory.
        pipeline: the module over the ranks.
        whole: whether every rank gets the whole module.
    """
    vars(module)[_KEY] = AtRest(pipeline)
    if whole:
        gather(module)
        return
    pipeline.agree_on_lost()  # who has copies of weights that hooks have made
    pipeline.ownership.remedy = _ASK
    rank_zero_info(
        f"{type(module).__name__} ({memory(size_of(module))}) stays divided over the ranks. {CALL}, called on all "
        f"ranks, gives each of them the whole module."
    )


def resting(module: nn.Module) -> Pipeline | None:
    """How a module is divided that no run uses; ``None`` if it is whole, or if it is a copy."""
    found = vars(module).get(_KEY)
    return found.pipeline if isinstance(found, AtRest) and found.pipeline.module is module else None


def gather(module: pl.LightningModule) -> None:
    """Give every rank the whole module. Collective over the pipeline.

    Args:
        module: the LightningModule.
    """
    if (pipeline := resting(module)) is None:
        return
    pipeline.restore()
    forget(module)
    for part in module.modules():
        if vars(part).get(_EXPORT) is _refused:
            del vars(part)[_EXPORT]


def forget(module: nn.Module) -> None:
    """The module is whole, or a run uses it."""
    vars(module).pop(_KEY, None)


def resume_divided(module: nn.Module, layers: Layers, transport: Transport, stages: int) -> Pipeline | None:
    """The division that the next run goes on with; ``None`` if the module is whole.

    Args:
        module: the LightningModule.
        layers: its layers now.
        transport: this process's transport in the next run.
        stages: stages of the next run.

    Raises:
        ConfigurationError: the next run has other processes or stages, or the module has other layers.
    """
    pipeline = resting(module)
    if pipeline is None:
        return None
    before = pipeline.transport
    arranged = before.topology, before.process, len(pipeline.balance)
    same = arranged == (transport.topology, transport.process, stages)
    if not same or [layer for _, layer in pipeline.layers] != [layer for _, layer in layers]:
        what = "its layers are others now" if same else "this Trainer has other ranks, replicas or stages"
        raise ConfigurationError(
            f"{type(module).__name__} is still divided over the ranks by an earlier run, and {what}.",
            hint=f"Gather it after that run, with its Trainer, on all ranks: {CALL}",
        )
    return pipeline


def refuse_export(module: nn.Module) -> None:
    """Let the models of Transformers, PEFT and others in a divided module refuse ``save_pretrained``, which needs all.

    Args:
        module: the LightningModule.
    """
    for part in module.modules():
        if hasattr(part, _EXPORT):
            vars(part)[_EXPORT] = _refused


def _refused(*_: Any, **__: Any) -> NoReturn:
    """Stands in the place of the method."""
    raise ConfigurationError(
        f"{_EXPORT}() of a model that is divided over the ranks.",
        hint=f"Call {CALL} on all ranks after fit, then save on process 0. In a run, save a checkpoint on all ranks, "
        "which has the whole module: trainer.save_checkpoint()",
    )
