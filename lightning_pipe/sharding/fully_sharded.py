"""Parameters divided over the replicas: FSDP2 around every layer and outside module of a rank.

Source: Zhao et al., PyTorch FSDP, arXiv:2304.11277; Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.3 (stage 3).

FSDP's own hooks gather a module's parameters before its forward and sum its gradients behind its backward, for every
micro-batch. A stage does so once for a batch, by hand, as torch's own pipelining does, and the hooks go: they would act
on the step's side of a layer's call, and not where a backward pass is divided into halves::

    between batches     a part of each parameter (DTensor)        the optimizer's step, checkpoints
    gather              whole parameters, as without FSDP         all micro-batches, forward and backward
    stage_done          gradients summed over the replicas,       behind a stage's last backward pass
                        parameters in parts again

With ``reshard`` the parameters of a stage are whole while an action computes it, and in parts in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.local_parts import DATA, is_divided
from lightning_pipe.parameters.ownership import Ownership
from lightning_pipe.sharding.roots import Root
from lightning_pipe.sharding.tensor_parallel import check_alike
from lightning_pipe.transport.base import Transport

_OUTSIDE = -1
"""The key of modules outside the layers: their gradients are complete when the batch is."""


class FullySharded:
    """The modules of this rank whose parameters the replicas divide.

    Args:
        module: the user's module, of which some parts are divided: layers, modules outside, or what contains them.
        stages: for the parts of this rank's layers and of modules outside the stage, or ``None`` outside; other parts
            of layers are those of other ranks.
        transport: this process's transport. The group of its replicas must have been made.
        names: is told which tensors stand for which parameters.
        reshard: whether the parameters of a stage go back into parts between the actions of a training batch.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Mapping[Any, int | None],
        transport: Transport,
        names: Ownership,
        *,
        reshard: bool = False,
    ) -> None:
        self._module, self._transport, self._names, self._reshard = module, transport, names, reshard
        self._members = tuple(sorted(transport.topology.replica_processes(transport.rank)))
        # by stage, what was given to ``fully_shard`` at once: its parameters are gathered and summed together
        self._states: dict[int, list[Any]] = {}
        for state, places in _states(module, stages).items():
            stage = next(iter(places.values()))
            _take_over(state, places)
            self._states.setdefault(_OUTSIDE if stage is None else stage, []).append(state)
        self._order = sorted(self._states, reverse=True)  # the last stage's backward passes end first
        self._done: set[int] = set()
        self._next = 0
        self._held = False
        for parameter in filter(is_divided, module.parameters()):
            names.also(parameter, parameter)
        self._versions: dict[nn.Parameter, int] = {}  # of whole parameters, when they were put together

    # ------------------------------------------------------------------ values

    @contextmanager
    def gathered(self, micro_batches: int) -> Iterator[None]:
        """Around the passes of a training batch, in which parameters are whole. Collective over the replicas.

        Args:
            micro_batches: of this replica.

        Raises:
            ConfigurationError: another replica has more or fewer, and with ``reshard`` each action is collective.
        """
        if self._reshard:
            self._check_alike(micro_batches)
        self._unshard([_OUTSIDE] if self._reshard else self._order)
        yield
        self.stage_done(*self._order)  # what is left
        self._next = 0
        self._done.clear()

    @contextmanager
    def whole(self, stage: int) -> Iterator[None]:
        """Around an action of a training batch that computes a stage. Collective over the replicas with ``reshard``."""
        if not self._reshard:
            yield
            return
        self._unshard([stage])
        yield
        self._check_unchanged(stage)
        self.release(stage)

    def _check_alike(self, micro_batches: int) -> None:
        counts = self._transport.all_gather_object(micro_batches, self._members)
        if len(set(counts)) > 1:
            raise ConfigurationError(
                f"One replica has a batch of {min(counts)} micro-batches and another one of {max(counts)}; with "
                "reshard_after_forward=True they gather the parameters of a stage together, for each micro-batch.",
                hint="Use DataLoader(drop_last=True), or leave out reshard_after_forward.",
            )

    def hold(self, held: bool) -> None:
        """Keep parameters whole over many batches, whose number may differ between replicas: those of an evaluation.

        Args:
            held: whether they are gathered now, or go back into parts.

        Raises:
            ConfigurationError: somebody has changed one meanwhile, which would be lost.
        """
        self._held = held
        if held:
            self._unshard(self._order)
            return
        try:
            self._check_unchanged()
        finally:
            self.release()

    def _check_unchanged(self, *keys: int) -> None:
        """Refuse a change of whole parameters, by a forward pass or a hook: it would be lost."""
        for _, whole in self._parameters(*(keys or self._order)):
            if whole is not None and whole._version != self._versions.get(whole, whole._version):
                raise ConfigurationError(
                    f"A parameter of shape {tuple(whole.shape)} has changed while a forward pass or an evaluation ran; "
                    'with shard_optimizer="parameters" they compute with copies that are put together from parts.',
                    hint="Change parameters in on_train_batch_end or on_train_epoch_start.",
                )

    def release(self, *stages: int) -> None:
        """Free all but this process's parts: of some stages, or of everything."""
        for module in self._modules(stages or self._order):
            module.reshard()

    def _unshard(self, keys: Sequence[int]) -> None:
        # what is made within an evaluation is used in training, too
        with torch.inference_mode(False), torch.no_grad():
            waiting = [module.unshard(async_op=True) for module in self._modules(keys)]
            for handle in filter(None, waiting):
                handle.wait()
        for part, whole in self._parameters(*keys):
            self._names.also(whole, part)
            self._versions[whole] = whole._version

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

    def stage_done(self, *stages: int) -> None:
        """The last backward passes of stages are done: sum their gradients, once those of later stages are."""
        self._done.update(stages)
        # replicas with other numbers of micro-batches may end their stages in another order
        while self._next < len(self._order) and self._order[self._next] in self._done:
            self._reduce(self._order[self._next])
            self._next += 1

    @torch.no_grad()
    def _reduce(self, key: int) -> None:
        self._check_unchanged(key)
        found = [whole for part, whole in self._parameters(key) if part.requires_grad]
        present = torch.tensor([whole.grad is not None for whole in found], dtype=torch.int32)
        self._transport.all_reduce(present, self._members).wait()
        for whole, somewhere in zip(found, present.tolist(), strict=True):
            if somewhere and whole.grad is None:
                # one that has a gradient on another replica: all take part in its sum, or none
                whole.grad = torch.zeros_like(whole)
        for state in self._states[key]:
            state._root_post_backward_final_callback()

    # ------------------------------------------------------------------ who has what

    def together(self, used: Iterable[str]) -> set[str]:
        """What a rank has used, with all that FSDP gathers together with it: the rank holds these as well.

        Args:
            used: names of parameters outside the layers, and others.
        """
        found = set(used)
        return found.union(*(names for names in map(self._names_in, self._states.get(_OUTSIDE, ())) if names & found))

    def forget(self, holds: Callable[[str], bool]) -> None:
        """After the first batch: modules outside the layers that other ranks use are none of this rank's any more.

        Args:
            holds: whether this rank holds what has a name.

        Raises:
            ConfigurationError: tensor ranks train whole parameters apart.
        """
        check_alike(self._module, self._transport)
        kept = [state for state in self._states.pop(_OUTSIDE, []) if any(map(holds, self._names_in(state)))]
        if kept:
            self._states[_OUTSIDE] = kept
        self._order = sorted(self._states, reverse=True)

    def _names_in(self, state: Any) -> set[str]:
        return {name for own in _of_state(state) if (name := self._names.known_name(own.sharded_param)) is not None}

    def _modules(self, keys: Iterable[int]) -> list[FSDPModule]:
        return [state._modules[0] for key in keys for state in self._states.get(key, ())]

    def _parameters(self, *keys: int) -> Iterator[tuple[nn.Parameter, Any]]:
        """Each parameter's part, and the whole one, once it has been gathered."""
        states = (state for key in keys for state in self._states.get(key, ()))
        return ((own.sharded_param, getattr(own, "_unsharded_param", None)) for s in states for own in _of_state(s))


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


def _of_state(state: Any) -> list[Any]:
    """FSDP's parameters of what was given to ``fully_shard`` at once."""
    return [own for group in state._fsdp_param_groups for own in group.fsdp_params]


def _states(module: nn.Module, stages: Mapping[Any, int | None]) -> dict[Any, dict[str, int | None]]:
    """What ``fully_shard`` knows of the parts of this rank, each with their names and stages; its own hooks go.

    Raises:
        ConfigurationError: parts of several stages are gathered together.
    """
    found: dict[Any, dict[str, int | None]] = {}
    for name, part in module.named_modules():
        if not isinstance(part, FSDPModule):
            continue
        state = part._get_fsdp_state()
        # they would act on the step's side of a layer's call; a step calls layers of other ranks as well
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        # what its code names counts as on the ranks that do not divide it: FSDP's class lies in a module of torch's
        type(part).__module__ = type(part).__mro__[2].__module__
        if part in stages:
            found.setdefault(state, {})[name] = stages[part]
    for places in found.values():
        if len(set(places.values())) > 1:
            raise ConfigurationError(
                f"fully_shard was given {', '.join(map(repr, places))} together, which are not in one stage.",
                hint="Call fully_shard for each layer, and for modules outside the layers.",
            )
    return found


def _take_over(state: Any, names: Iterable[str]) -> None:
    """Let a state of FSDP be one by itself, and let gradients be added up as they are."""
    name = next(iter(names))
    policy = state._mp_policy
    if policy.param_dtype is not None or policy.output_dtype is not None:
        raise ConfigurationError(
            f"'{name}' was sharded with {policy}: a stage gathers parameters in their own type.",
            hint="Leave param_dtype and output_dtype out of MixedPrecisionPolicy, and use "
            "Trainer(precision='bf16-mixed') or 'bf16-true'.",
        )
    for group in state._fsdp_param_groups:
        if DATA not in (group.mesh_info.mesh.mesh_dim_names or ()):
            raise ConfigurationError(
                f"'{name}' was sharded over another mesh than that of the replicas.",
                hint=f'Use fully_shard(layer, mesh=self.device_mesh["{DATA}"]).',
            )
    # losses are weighted by samples over all replicas: sums are all there is to do
    state._modules[0].set_gradient_divide_factor(1.0)
    state._modules[0].set_force_sum_reduction_for_comms(True)
    # as FSDP begins with the outermost module: that one may have parts of several stages
    state._is_root = True
    state._state_ctx.all_states.append(state)
    state._init_shared_state()
    for group in state._fsdp_param_groups:
        group.lazy_init()
