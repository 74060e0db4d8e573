"""``shard_optimizer="parameters"``, ``tensor_parallel_size``, and modules that divide themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.local_parts import DATA, TENSOR, is_divided
from lightning_pipe.parameters.releasing import check_memory
from lightning_pipe.patches import replaced
from lightning_pipe.sharding import tensor_parallel
from lightning_pipe.sharding.fully_sharded import FullySharded, shard
from lightning_pipe.sharding.mesh import device_mesh
from lightning_pipe.sharding.refusals import WHAT, check_family, in_parts
from lightning_pipe.sharding.roots import Root, left_whole, stages_of_parts, tied
from lightning_pipe.sharding.undone import refer_to_module, undoable
from lightning_pipe.torch_internals import is_compiled
from lightning_pipe.trainer.run import PipelineRun
from lightning_pipe.trainer.world import World

if TYPE_CHECKING:
    from lightning_pipe.trainer.strategy import PipeStrategy


@dataclass
class ModelSharding:
    """What the user asks for, and what it has made of the module of a run.

    Args:
        options: the strategy, which has the user's options.
        mesh: of the processes, once they are connected.
        by_module: whether the module may divide itself: it has a ``configure_model``, and some method asks for the
            mesh.
        at_once: whether the layers must be known before the first batch: parameters are divided by then.
        parameters: of the module of a run, which has been divided.
    """

    options: PipeStrategy
    mesh: Any = None
    by_module: bool = False
    at_once: bool = False
    parameters: FullySharded | None = None
    _undo: list[Callable[[], None]] = field(default_factory=list)

    @property
    def wanted(self) -> bool:
        """Whether an option asks for it."""
        return in_parts(self.options.shard_optimizer, self.options.tensor_parallel_size)

    def connect(self, module: pl.LightningModule, world: World) -> None:
        """Learn what the module of a run divides, and make the mesh. Collective over the world."""
        methods = (value for kind in type(module).__mro__ for value in vars(kind).values())
        self.by_module = is_overridden("configure_model", module) and any(map(_asks_for_mesh, methods))
        self.at_once = self.wanted or self.by_module
        if self.mesh is None and self.at_once and world.layout.world_size > 1:
            self.mesh = device_mesh(world.transport)
        if self.mesh is not None:
            module._device_mesh = self.mesh  # as ModelParallelStrategy does

    def divide(self, module: pl.LightningModule, run: PipelineRun) -> None:
        """Give this rank's stages their values, and divide their parameters. Collective over all processes.

        Raises:
            ConfigurationError: something in the run does not go with it.
        """
        self.parameters, pipeline, options = None, run.pipeline, self.options
        transport, own = pipeline.transport, any(map(is_divided, module.parameters()))
        if self.mesh is not None and self.by_module:
            # a stage may have nothing of what the module has divided
            own = any(transport.all_gather_object(own, transport.topology.same_tensor_rank))
        asked = options.shard_optimizer == "parameters" and self.mesh is not None and self.mesh[DATA].size() > 1
        if own and asked and not any(isinstance(part, FSDPModule) for part in module.modules()):
            raise ConfigurationError(
                'shard_optimizer="parameters" does not divide what configure_model has divided over tensor ranks.',
                hint='Call fully_shard(layer, mesh=self.device_mesh["data_parallel"]) there as well, or leave '
                "shard_optimizer out.",
            )
        if options.reshard_after_forward and not (own or options.shard_optimizer == "parameters"):
            raise ConfigurationError(
                "reshard_after_forward=True frees whole parameters, and no replicas divide any.",
                hint='Use shard_optimizer="parameters", or leave reshard_after_forward out.',
            )
        if self.mesh is None or not (self.wanted or own):
            pipeline.synchronize()
            return
        check(module, pipeline)
        check_memory(module)
        names = dict(module.named_parameters(remove_duplicate=False))
        self._undo = pipeline.synchronize(None if own else self._division(module, pipeline.layers))
        if own and options.tensor_parallel_size > 1:
            # layers of other ranks have hooks as well: configure_model has divided them
            for name, part in {**dict(pipeline.layers), **{root.name: root.module for root in pipeline.roots}}.items():
                tensor_parallel.hooks_inside(name, part)
        tensor_parallel.check_tied(names, module)
        stages = stages_of_parts(module, pipeline.roots, pipeline.layers)
        reshard = options.reshard_after_forward
        self.parameters = FullySharded(module, stages, transport, pipeline.ownership, reshard=reshard)
        pipeline.reductions.sharded = self.parameters

    def _division(self, module: nn.Module, layers: list[tuple[str, nn.Module]]) -> Callable[[Root], Callable[[], None]]:
        """What divides a layer or outside module, which has its values, and returns what puts it back."""
        options, shared = self.options, tied(module, layers)
        weights = {name: each for name, each in module.named_parameters(remove_duplicate=False) if each in shared}
        over_tensor_ranks = tensor_parallel.divider(module, self.mesh[TENSOR], options.parallelize, shared)
        replicas, stay = self.mesh[DATA], left_whole(module, layers)
        count = replicas.size() if options.shard_optimizer == "parameters" else 1

        def divide(root: Root) -> None:
            over_tensor_ranks(root)
            # a tied weight that is one no more would be divided again, or sent to ranks that have a part of it
            tensor_parallel.check_tied(weights, module)
            tensor_parallel.check_even(root, count)
            if count > 1:
                shard(root, replicas, options.reduce_dtype, stay)

        return lambda root: undoable(root.module, partial(divide, root))

    def prepare(self, optimizers: list[Optimizer]) -> None:
        """Let optimizers treat parameters one by one where plain and divided ones are in one group."""
        for optimizer in optimizers if self.parameters is not None else ():
            for group in optimizer.param_groups:
                if len({getattr(parameter, "device_mesh", None) for parameter in group["params"]}) > 1:
                    # torch (2.13) refuses plain tensors and DTensors, and those of different meshes, in one operation
                    group.update(dict.fromkeys(group.keys() & {"foreach", "fused"}, False))

    def hold(self, held: bool) -> None:
        """Around an evaluation: all parameters are whole, however many batches a replica has."""
        if self.parameters is not None:
            self.parameters.hold(held)

    def in_parts(self) -> AbstractContextManager[Any]:
        """Around the making of a checkpoint. Collective."""
        return nullcontext() if self.parameters is None else self.parameters.in_parts()

    def undo(self, pipeline: Pipeline, optimizers: list[Optimizer]) -> bool:
        """After a run: parameters are whole again. Returns whether they are: a module that divides itself stays so."""
        if self.parameters is None:
            return True
        self.parameters.release()
        self.parameters = pipeline.reductions.sharded = None
        for undo in self._undo:
            undo()
        refer_to_module(optimizers, pipeline.module, pipeline.ownership)
        return bool(self._undo)

    def left_behind(self, module: pl.LightningModule | None) -> AbstractContextManager[Any]:
        """Around Lightning's teardown: after an error parameters in parts stay on their device.

        torch (2.13) can move no DTensor that a graph has, and would raise an error about that instead.
        """
        if module is None or self.parameters is None:
            return nullcontext()
        return replaced(module, "cpu", lambda: module)


def _asks_for_mesh(code: Any) -> bool:
    """Whether a function, or one inside it, reads ``device_mesh``."""
    code = getattr(inspect.unwrap(code) if callable(code) else code, "__code__", code)
    return isinstance(code, CodeType) and ("device_mesh" in code.co_names or any(map(_asks_for_mesh, code.co_consts)))


def check(module: pl.LightningModule, pipeline: Pipeline) -> None:
    """Refuse what does not go with parameters that several processes divide.

    Args:
        module: the LightningModule, with its Trainer.
        pipeline: the module over the ranks.

    Raises:
        ConfigurationError: names it, and what to do.
    """
    trainer: Any = module.trainer
    check_family(pipeline.family)
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise ConfigurationError(
                f"{WHAT} and {type(callback).__name__} do not go together: its copy of the module is whole.",
                hint="Leave the callback out, or use shard_optimizer='gradients' without tensor parallelism.",
            )
    if any(map(is_compiled, module.modules())):
        raise ConfigurationError(
            f"{WHAT} and compiled layers do not go together: compiled code has the parameters that it was made with.",
            hint="Leave out torch.compile and module.compile().",
        )
