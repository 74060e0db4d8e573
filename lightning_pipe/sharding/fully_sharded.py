"""Parameters divided over the replicas: FSDP2 around every layer and outside module of a rank.

Source: Zhao et al., PyTorch FSDP, arXiv:2304.11277; Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.3 (stage 3).

FSDP's own hooks gather a module's parameters before its forward and sum its gradients behind its backward, for every
micro-batch. A stage does so once for a batch, by hand, as torch's own pipelining does, and the hooks go: they would act
on the step's side of a layer's call, and not where a backward pass is divided into halves::

    between batches     a part of each parameter (DTensor)        the optimizer's step, checkpoints
    gather              whole parameters, as without FSDP         all micro-batches, forward and backward
    stage_done          gradients summed over the replicas,       behind a stage's last backward pass
                        parameters in parts again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.local_parts import DATA
from lightning_pipe.sharding.roots import Root
from lightning_pipe.transport.base import Transport

_OUTSIDE = -1
"""The key of modules outside the layers: their gradients are complete when the batch is."""


class Names(Protocol):
    """Knows parameters by the tensors that stand for them."""

    def also(self, tensor: nn.Parameter, parameter: nn.Parameter) -> None:
        """A tensor stands for a parameter of the module, too."""


class FullySharded:
    """The modules of this rank whose parameters the replicas divide.

    Args:
        roots: the layers of this rank's stages and the modules outside the layers, of which some are divided.
        transport: this process's transport. The group of its replicas must have been made.
        names: is told which tensors stand for which parameters.
    """

    def __init__(self, roots: Iterable[Root], transport: Transport, names: Names) -> None:
        self._transport, self._names = transport, names
        self._members = tuple(sorted(transport.topology.replica_processes(transport.rank)))
        self._roots: dict[int, list[Root]] = {}
        for root in roots:
            if any(isinstance(part, FSDPModule) for part in root.module.modules()):
                key = _OUTSIDE if root.stage is None else root.stage
                self._roots.setdefault(key, []).append(root)
                _take_over(root)
        self._order = sorted(self._roots, reverse=True)  # the last stage's backward passes end first
        self._done: set[int] = set()
        self._next = 0
        self._gathered = self._held = False
        self._versions: dict[int, int] = {}

    # ------------------------------------------------------------------ values

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Around the passes of a training batch: every parameter is whole. Collective over the replicas."""
        self.gather()
        try:
            yield
            self._finish()
        except BaseException:
            for parameter in self._parameters(*self._order):
                if parameter.unsharded is not None:
                    parameter.unsharded.grad = None
            self._next = 0
            self._done.clear()
            self.release()
            raise

    def hold(self, held: bool) -> None:
        """Keep parameters whole over many batches, whose number may differ between replicas: those of an evaluation.

        Args:
            held: whether they are gathered now, or go back into parts.

        Raises:
            ConfigurationError: somebody has changed one meanwhile, which would be lost.
        """
        self._held = held
        if held:
            self.gather()
            self._versions = {id(p): p._version for p in self._whole()}
            return
        changed = [p for p in self._whole() if self._gathered and p._version != self._versions.get(id(p), p._version)]
        self.release()
        if changed:
            raise ConfigurationError(
                f"A hook of an evaluation has changed a parameter of shape {tuple(changed[0].shape)}; while an "
                'evaluation runs with shard_optimizer="parameters", parameters are copies that are put together.',
                hint="Change parameters in on_train_batch_end or on_train_epoch_start.",
            )

    def gather(self) -> None:
        """Make all parameters whole. Collective over the replicas."""
        if self._gathered:
            return
        self._gathered = True
        # what is made within an evaluation is used in training, too
        with torch.inference_mode(False), torch.no_grad():
            modules = [module for key in self._order for root in self._roots[key] for module in fsdp_modules(root)]
            waiting = [module.unshard(async_op=True) for module in modules]
            for handle in waiting:
                if handle is not None:
                    handle.wait()
        for parameter in self._parameters(*self._order):
            self._names.also(parameter.unsharded, parameter.sharded)

    def release(self) -> None:
        """Free all but this process's parts."""
        self._gathered = False
        for key in self._order:
            for root in self._roots[key]:
                for module in fsdp_modules(root):
                    module.reshard()

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """Parameters are in parts inside, where they are held whole: while a checkpoint is made. Collective."""
        held = self._held
        if held:
            self.hold(False)
        try:
            yield
        finally:
            if held:
                self.hold(True)

    # ------------------------------------------------------------------ gradients

    def stage_done(self, stage: int) -> None:
        """The last backward pass of a stage is done: sum its gradients, once those of later stages are."""
        self._done.add(stage)
        self._advance()

    def _finish(self) -> None:
        """Sum what is left."""
        self._done.update(self._order)
        self._advance()
        self._next = 0
        self._done.clear()
        self._gathered = False

    def _advance(self) -> None:
        # replicas with other numbers of micro-batches may end their stages in another order
        while self._next < len(self._order) and self._order[self._next] in self._done:
            self._reduce(self._order[self._next])
            self._next += 1

    @torch.no_grad()
    def _reduce(self, key: int) -> None:
        found = [parameter for parameter in self._parameters(key) if parameter.sharded.requires_grad]
        present = torch.tensor([parameter.unsharded.grad is not None for parameter in found], dtype=torch.int32)
        self._transport.all_reduce(present, self._members).wait()
        for parameter, somewhere in zip(found, present.tolist(), strict=True):
            if somewhere and parameter.unsharded.grad is None:
                # one that has a gradient on another replica: all take part in its sum, or none
                parameter.unsharded.grad = torch.zeros_like(parameter.unsharded)
        for root in self._roots[key]:
            for state in _root_states(root):
                state._root_post_backward_final_callback()

    # ------------------------------------------------------------------ who has what

    def keeps(self, holds: Callable[[str], bool], name: str) -> bool:
        """Whether a parameter stays with others that FSDP gathers together with it, and that this rank holds.

        Args:
            holds: whether this rank holds what has a name.
            name: of the parameter.
        """
        roots = self._roots.get(_OUTSIDE, ())
        return any(name.startswith(f"{root.name}.") and _is_held(root, holds) for root in roots)

    def forget(self, holds: Callable[[str], bool]) -> None:
        """After the first batch: modules outside the layers that other ranks use are none of this rank's any more.

        Args:
            holds: whether this rank holds what has a name.
        """
        kept = [root for root in self._roots.pop(_OUTSIDE, []) if _is_held(root, holds)]
        if kept:
            self._roots[_OUTSIDE] = kept
        self._order = sorted(self._roots, reverse=True)

    def _whole(self) -> Iterator[nn.Parameter]:
        found = (parameter.unsharded for parameter in self._parameters(*self._order))
        return (parameter for parameter in found if parameter is not None)

    def _parameters(self, *keys: int) -> Iterator[_Parameter]:
        for key in keys:
            for root in self._roots[key]:
                yield from _parameters(root)


class _Parameter:
    """A parameter of FSDP: its part, and the whole one while it is gathered."""

    def __init__(self, own: Any) -> None:
        self.sharded: nn.Parameter = own.sharded_param
        self.unsharded: Any = getattr(own, "_unsharded_param", None)


def shard(root: Root, mesh: Any, reduce_dtype: torch.dtype | None, whole: set[nn.Parameter]) -> None:
    """Let the replicas divide the parameters of a layer or outside module.

    Args:
        root: the module.
        mesh: of the replicas.
        reduce_dtype: in which gradients are summed; ``None``: in their own.
        whole: the parameters that stay as they are.
    """
    mine = [parameter for parameter in root.module.parameters() if parameter not in whole]
    if not mine:
        return
    # FSDP sums the gradients of a module in one buffer, which has one type
    other = {parameter for parameter in mine if parameter.dtype != mine[0].dtype}
    fully_shard(
        root.module,
        mesh=mesh,
        reshard_after_forward=False,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        ignored_params=whole | other,
    )


def _is_held(root: Root, holds: Callable[[str], bool]) -> bool:
    return any(holds(name) for name, _ in root.module.named_parameters(prefix=root.name))


def fsdp_modules(root: Root) -> list[FSDPModule]:
    """The modules of a root on which ``fully_shard`` was called."""
    return [part for part in root.module.modules() if isinstance(part, FSDPModule)]


def _take_over(root: Root) -> None:
    """Let gradients be added up as they are, and FSDP's own hooks go."""
    for module in fsdp_modules(root):
        state = module._get_fsdp_state()
        policy = state._mp_policy
        if policy.param_dtype is not None or policy.output_dtype is not None:
            raise ConfigurationError(
                f"'{root.name}' was sharded with {policy}: a stage gathers parameters in their own type.",
                hint="Leave param_dtype and output_dtype out of MixedPrecisionPolicy, and use "
                "Trainer(precision='bf16-mixed') or 'bf16-true'.",
            )
        for group in state._fsdp_param_groups:
            if DATA not in (group.mesh_info.mesh.mesh_dim_names or ()):
                raise ConfigurationError(
                    f"'{root.name}' was sharded over another mesh than that of the replicas.",
                    hint=f'Use fully_shard(layer, mesh=self.device_mesh["{DATA}"]).',
                )
        # losses are weighted by samples over all replicas: sums are all there is to do
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    without_hooks(root.module)
    for state in _root_states(root):
        state._lazy_init()


def without_hooks(module: nn.Module) -> None:
    """Take FSDP's own hooks away, of layers of other ranks as well: a step calls these, too."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()


def _root_states(root: Root) -> Sequence[Any]:
    """The states of FSDP in a root that are in no other one."""
    found: list[Any] = []
    inside: set[int] = set()
    for part in root.module.modules():  # from the outside to the inside
        if isinstance(part, FSDPModule) and id(part) not in inside:
            found.append(part._get_fsdp_state())
            inside.update(id(each) for each in part.modules())
    return found


def _parameters(root: Root) -> Iterator[_Parameter]:
    for module in fsdp_modules(root):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            yield from map(_Parameter, group.fsdp_params)
