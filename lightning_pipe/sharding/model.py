"""The parameters of a divided module, divided once more: over tensor ranks, then over replicas; and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.absent_tensor import is_absent
from lightning_pipe.local_parts import is_divided
from lightning_pipe.parameters.ownership import Ownership, named_tensors
from lightning_pipe.sharding import tensor_parallel
from lightning_pipe.sharding.fully_sharded import FullySharded, shard
from lightning_pipe.sharding.roots import Root, left_whole, stages_of_parts, tied
from lightning_pipe.sharding.tensor_parallel import Parallelize
from lightning_pipe.sharding.undone import Surface
from lightning_pipe.transport.base import Transport


class ShardedModel:
    """A module whose parameters several processes divide.

    Args:
        module: the user's module, divided over the ranks of the pipeline, with values.
        roots: the layers of this rank and the modules outside.
        layers: all layers with dotted names.
        transport: this process's transport.
        own: whether the module's own ``configure_model`` has divided parameters: nobody knows how to put them back.

    Attributes:
        parameters: those that the replicas divide; ``None`` until `over_replicas`, and after `undo`.
        own: as given.
    """

    def __init__(
        self,
        module: nn.Module,
        roots: list[Root],
        layers: list[tuple[str, nn.Module]],
        transport: Transport,
        *,
        own: bool,
    ) -> None:
        self.parameters: FullySharded | None = None
        self.own = own
        self._module, self._roots, self._layers, self._transport = module, roots, layers, transport
        self._surfaces = [] if self.own else [Surface(root.module) for root in roots]

    def over_tensor_ranks(self, mesh: Any, parallelize: Parallelize | None) -> None:
        """Divide layers over the tensor ranks. Collective over these.

        Args:
            mesh: of the tensor ranks.
            parallelize: divides a layer or outside module; ``None``: plans of Transformers do, or the module's own
                ``configure_model`` has.

        Raises:
            ConfigurationError: nobody says how; the plan, or what it makes, is not supported.
        """
        self._same_values()
        names = tensor_parallel.names_by_parameter(self._module)
        divide = None if self.own else self._divider(parallelize)
        for root in self._roots:
            if divide is not None:
                divide(root, mesh)
        # layers of other ranks have hooks where configure_model has divided them
        for name, module in {**dict(self._layers), **{root.name: root.module for root in self._roots}}.items():
            tensor_parallel.hooks_inside(name, module)
        tensor_parallel.check_divided(self._module, self._roots, names)

    def _divider(self, parallelize: Parallelize | None) -> Callable[[Root, Any], object]:
        if parallelize is not None:
            return lambda root, mesh: parallelize(root.module, mesh)
        plan = tensor_parallel.plan_of(self._module, self._transport.topology.tensor)
        if not plan:
            raise ConfigurationError(
                f"tensor_parallel_size={self._transport.topology.tensor}, and nothing says how "
                f"{type(self._module).__name__} is divided: it holds no model of Transformers with a plan "
                "(base_model_tp_plan), and its configure_model divides nothing.",
                hint="Use PipeStrategy(parallelize=lambda layer, mesh: parallelize_module(layer, mesh, …)), or call "
                'parallelize_module(…, self.device_mesh["tensor_parallel"], …) in configure_model.',
            )
        return tensor_parallel.by_plan(plan, tied(self._module, self._layers))

    @torch.no_grad()
    def _same_values(self) -> None:
        """Give all tensor ranks the values of the first, as the replicas have those of the first."""
        members = self._transport.topology.tensor_processes(self._transport.process)
        for _, tensor in named_tensors(self._module):
            if not is_divided(tensor) and not is_absent(tensor):
                data = tensor.detach().contiguous()
                self._transport.broadcast(data, members[0], members).wait()
                tensor.data.copy_(data)

    def over_replicas(
        self, mesh: Any, names: Ownership, reduce_dtype: torch.dtype | None, *, divide: bool, reshard: bool
    ) -> None:
        """Divide parameters over the replicas. Collective over these.

        Args:
            mesh: of the replicas.
            names: is told which tensors stand for which parameters.
            reduce_dtype: in which gradients are summed; ``None``: in their own.
            divide: whether all parameters are divided; otherwise those alone that ``configure_model`` has divided.
            reshard: whether the parameters of a stage are whole while it computes alone.
        """
        whole = left_whole(self._module, self._layers)
        for root in self._roots if divide and not self.own else ():
            shard(root, mesh, reduce_dtype, whole)
        stages = stages_of_parts(self._module, self._roots, self._layers)
        self.parameters = FullySharded(self._module, stages, self._transport, names, reshard=reshard)
        tensor_parallel.check_divided(self._module, self._roots, ())
        for parameter in self._module.parameters():
            if is_divided(parameter):
                names.also(parameter, parameter)
        for surface in self._surfaces:
            surface.changed()

    def undo(self) -> None:
        """Give each rank whole parameters of its stages again. Collective over the processes that divide them.

        A module that has divided itself stays so.
        """
        if self.parameters is not None:
            self.parameters.release()
        self.parameters = None
        for surface in self._surfaces:
            surface.restore()
        self._surfaces.clear()
