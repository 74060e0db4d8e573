"""What cannot work in a pipeline is refused before it starts, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec

import lightning.pytorch as pl
import torch
from lightning.pytorch import plugins
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer

from lightning_pipe.config import Sharding
from lightning_pipe.distributions import maker
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.sharding.refusals import in_parts

_OTHER_PRECISIONS = (
    plugins.BitsandbytesPrecision,
    plugins.DeepSpeedPrecision,
    plugins.FSDPPrecision,
    plugins.TransformerEnginePrecision,
    plugins.XLAPrecision,
)
_EVALUATIONS = ("validation_step", "test_step", "predict_step")
# Entries of parameter groups by which optimizers of other packages clip by themselves, as LAMB does.
_OWN_CLIPPING = ("max_grad_norm", "clip_grad_norm", "grad_clip_norm")
_OLD_OPTIONS = {
    "whole_batches": "every rank has whole batches now",
    "reproducible_rng": "random numbers always depend on seed, step, micro-batch and layer alone",
}
"""Options that `PipeStrategy` had, and what is so without them."""

P = ParamSpec("P")


def refusing_old_options(create: Callable[P, None]) -> Callable[P, None]:
    """Let a constructor answer options that it had in earlier versions, by a `ConfigurationError`."""

    @wraps(create)
    def checked(*args: P.args, **options: P.kwargs) -> None:
        for name in options.keys() & _OLD_OPTIONS:
            raise ConfigurationError(f"The option '{name}' is gone: {_OLD_OPTIONS[name]}.", hint="Leave it out.")
        create(*args, **options)

    return checked


def check_sharding(shard_optimizer: Sharding, tensor_parallel_size: int, parallelize: object) -> None:
    """Refuse options of `PipeStrategy` about what processes divide that have no such value, or contradict each other.

    Raises:
        ConfigurationError: names the option, and what to use.
    """
    if shard_optimizer not in (False, True, "gradients", "parameters"):
        raise ConfigurationError(
            f"shard_optimizer={shard_optimizer!r} is not supported.",
            hint='Use True, which divides the optimizer\'s state, "gradients", which divides gradients as well, or '
            '"parameters", which divides these, too.',
        )
    if not isinstance(tensor_parallel_size, int):
        raise ConfigurationError(f"tensor_parallel_size={tensor_parallel_size!r}: a whole number is needed.")
    in_parts(shard_optimizer, tensor_parallel_size)
    if parallelize is not None and tensor_parallel_size == 1:
        raise ConfigurationError(
            "parallelize= divides layers over tensor ranks, and tensor_parallel_size is 1.",
            hint="Use tensor_parallel_size=2 or more, or leave parallelize out.",
        )


def check_module(module: pl.LightningModule, trainer: Any, *, fitting: bool, ranks: int) -> None:
    """Refuse a LightningModule or Trainer that a pipeline cannot run.

    Args:
        module: the LightningModule.
        trainer: its Trainer.
        fitting: whether it will be trained.
        ranks: ranks in the pipeline.

    Raises:
        ConfigurationError: names what it is and what to do.
    """
    if fitting and not module.automatic_optimization:
        raise ConfigurationError(
            "Manual optimization (automatic_optimization=False) does not work with a pipeline: training_step runs once "
            "for each micro-batch and stage, so it cannot run backward passes and optimizer steps itself.",
            hint="Use automatic optimization with one optimizer, or another strategy.",
        )
    for name in (*(("training_step",) if fitting else ()), *_EVALUATIONS):
        if is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True):
            raise ConfigurationError(
                f"{name}(dataloader_iter) fetches batches itself; a pipeline must give the same one to all ranks.",
                hint=f"Use {name}(batch, batch_idx).",
            )
    for callback in trainer.callbacks:
        if maker(callback) not in (None, maker(trainer)):
            raise ConfigurationError(
                f"The callback {type(callback).__name__} is one of {maker(callback)}, and the Trainer of "
                f"{maker(trainer)}: they have classes of their own.",
                hint="Import both from the same package.",
            )
    if ranks > 1 and any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):
        raise ConfigurationError(
            "The BatchSizeFinder tries sizes until memory runs out, which happens on one rank alone.",
            hint="Find the batch size by hand; memory grows with the size of a micro-batch.",
        )
    if fitting and ranks > 1 and any(isinstance(callback, ModelPruning) for callback in trainer.callbacks):
        raise ConfigurationError(
            "ModelPruning computes masks over all weights and puts them into the layers; no rank has all of them.",
            hint="Prune before training or after it, with torch.nn.utils.prune on the whole module.",
        )
    if isinstance(trainer.precision_plugin, _OTHER_PRECISIONS):
        raise ConfigurationError(
            f"{type(trainer.precision_plugin).__name__} does not work with a pipeline: it belongs to another strategy, "
            "or puts other layers into the module.",
            hint='Use precision="bf16-mixed", "16-mixed", "bf16-true", "32-true" or "64-true".',
        )
    # By name: whether there is one is no reason to import torch's sharding.
    sharded = {"DTensor", "FlatParameter"}.intersection(type(parameter).__name__ for parameter in module.parameters())
    if sharded:
        raise ConfigurationError(
            f"The module has parameters of type {min(sharded)}: they are sharded already.",
            hint="Pass the module as it was built, and divide it by options of PipeStrategy or in its configure_model. "
            "One that an earlier run has divided there goes on in a new one, from a checkpoint.",
        )


def check_copies(trainer: Any, module: pl.LightningModule) -> None:
    """Refuse callbacks that have copied the module before its layers were divided."""
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging) and callback._average_model is not None:
            raise ConfigurationError(
                f"{type(callback).__name__} copied {type(module).__name__} before its layers were there to be divided "
                "over the ranks.",
                hint="Build the layers in __init__ instead of setup or configure_model, or leave the callback out.",
            )


def check_optimizers(optimizers: Sequence[Optimizer], module: pl.LightningModule, ranks: int) -> None:
    """Refuse optimizers that are known to do something else on every rank; of others their first step tells.

    Args:
        optimizers: what ``configure_optimizers`` returned.
        module: has all parameters whose gradients are summed.
        ranks: ranks in the pipeline.

    Raises:
        ConfigurationError: names the optimizer and what to do.
    """
    known = {*map(id, module.parameters())}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError(
                f"{kind} searches along one direction through all parameters; on a pipeline no rank has all of them.",
                hint="Use an optimizer that treats every parameter by itself, such as AdamW or SGD.",
            )
        for group in optimizer.param_groups:
            if not known.issuperset(map(id, group["params"])):
                what = f"{kind} is to train a parameter that {type(module).__name__}.parameters() does not give."
                raise ConfigurationError(what, hint="Keep it, or its module, in an attribute or a ModuleList.")
            for limit in filter(group.get, _OWN_CLIPPING if ranks > 1 else ()):
                raise ConfigurationError(
                    f"{kind}({limit}={group[limit]}) clips by the norm of the gradients that it sees, which on a "
                    "pipeline are those of one rank.",
                    hint=f"Use {limit}=None and Trainer(gradient_clip_val={group[limit]}).",
                )


def check_asynchronous(trainer: Any, pipeline: Pipeline, micro_batches: int | str, *, sharded: Sharding) -> None:
    """Refuse what a schedule without a flush cannot do exactly, or only by letting all ranks wait for each other.

    Args:
        trainer: the Trainer.
        pipeline: the module over the ranks.
        micro_batches: the strategy's option.
        sharded: the strategy's option ``shard_optimizer``.

    Raises:
        ConfigurationError: names what it is and what to do.
    """
    assert pipeline.asynchronous is not None
    name, several = pipeline.family.name, len(pipeline.pipeline_members) > 1
    size = pipeline.asynchronous.stream.micro_batches
    if micro_batches not in ("auto", size):
        raise ConfigurationError(
            f"Schedule {name!r} makes a step of {size} micro-batches; the strategy has micro_batches={micro_batches}.",
            hint=f"Use micro_batches={size} or 'auto'.",
        )
    if trainer.accumulate_grad_batches != 1:
        raise steps_for_every_batch(name, trainer.accumulate_grad_batches)
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value" and several:
        raise ConfigurationError(
            f"gradient_clip_val={trainer.gradient_clip_val} limits the norm of all gradients of the model; without a "
            f"flush ({name!r}) the stages would wait for each other in every batch to find it.",
            hint="Use gradient_clip_val=None, or gradient_clip_algorithm='value', or clip every stage by itself: "
            "override configure_gradient_clipping and call torch.nn.utils.clip_grad_norm_(self.parameters(), …) in it.",
        )
    if several and any(each.reduce_on_plateau and each.interval == "step" for each in trainer.lr_scheduler_configs):
        raise ConfigurationError(
            f"ReduceLROnPlateau with interval='step' asks after each batch for a loss that {name!r} has batches later.",
            hint="Use interval='epoch', or a schedule with a flush, such as '1f1b'.",
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ConfigurationError(
            f"16-mixed precision scales the loss, and all stages must agree for every batch whether it was too large; "
            f"schedule {name!r} has no time at which they could.",
            hint="Use precision='bf16-mixed', or a schedule with a flush, such as '1f1b'.",
        )
    if sharded:
        raise ConfigurationError(
            f"shard_optimizer={sharded!r} does not go with schedule {name!r}, which keeps several versions of the "
            "weights.",
            hint="Leave it out, or use a schedule with a flush.",
        )


def steps_for_every_batch(name: str, accumulate_grad_batches: int) -> ConfigurationError:
    """A schedule without a flush cannot accumulate gradients over batches."""
    return ConfigurationError(
        f"Schedule {name!r} steps for every batch; the Trainer has accumulate_grad_batches={accumulate_grad_batches}.",
        hint="Use larger batches, and schedule='pipedream_2bw', which cuts them into micro-batches.",
    )
