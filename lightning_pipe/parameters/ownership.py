"""Who holds which parameter and buffer: an explicit map, never inferred from devices."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.construction import memory_key, tensors_of
from lightning_pipe.errors import CutError, PartitionError
from lightning_pipe.intercept.absent_tensor import IN_HOOKS, AbsentTensor, Origin, exchange, hint_of_use, is_absent
from lightning_pipe.local_parts import is_divided
from lightning_pipe.parameters.holder_map import HolderMap, named_tensors, owned_by
from lightning_pipe.parameters.releasing import drop_graphs, drop_weak_references, release

__all__ = ["Ownership", "named_tensors"]


class Ownership:
    """The holders of every parameter and buffer, as pipeline ranks.

    Layers belong to the ranks of their stage; a parameter shared by layers of several stages belongs to all of them.
    Parameters outside the sequence are held by every rank until the first training batch has shown which ranks use
    them (`learn_users`); what nobody used belongs to the ranks with the loss, and the others keep their copies. So is a
    parameter that a layer and a module outside have in common, which then belongs to the layer's ranks as well.

    Hooks may change what nobody used by the parameters of layers: averaged weights are such tensors. Then each rank
    loses those for which it has not all that is needed (`AbsentTensor`), and keeps the others (`agree_on_lost`).

    Args:
        module: the user's module.
        layers: the layer sequence with dotted names.
        layer_ranks: for each layer the ranks that compute it.
        rank: this rank.
        ranks: number of ranks in the pipeline.
        loss_ranks: the ranks that compute the loss.
        rank_names: how messages name the ranks.
        before: of an earlier run, if the module is still divided as that run has left it.

    Attributes:
        users_known: whether a batch of this run has shown who uses the parameters outside the sequence.
        remedy: what messages advise whoever asks for a value of another rank.
        used: the parameters outside the sequence that this rank has used, and with a dot the modules that it has run.
        elsewhere: objects that may keep copies of parameters and buffers.
        stand_ins: while other tensors stand in for the parameters that are trained here, these by ``id``.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[tuple[str, nn.Module]],
        layer_ranks: Sequence[tuple[int, ...]],
        rank: int,
        ranks: int,
        loss_ranks: tuple[int, ...],
        rank_names: Sequence[str],
        before: Ownership | None = None,
    ) -> None:
        self.rank, self.rank_names = rank, rank_names
        self.users_known = False
        self.remedy = IN_HOOKS
        self.elsewhere: Sequence[object] = (module,)
        self.used: set[str] = set() if before is None else before.used
        self.stand_ins: Mapping[int, nn.Parameter] | None = None
        self._module, self._layers, self._layer_ranks = module, list(layers), list(layer_ranks)
        self._names: dict[int, tuple[Tensor, str]] = {}
        self._map = HolderMap(module, layers, layer_ranks, ranks, loss_ranks)
        if before is not None:
            self._map.inherit(before._map)

    # ------------------------------------------------------------------ questions

    def owners(self, name: str) -> tuple[int, ...]:
        """The ranks that hold the true value of a named parameter or buffer, ascending."""
        return self._map.owners(name)

    def holds(self, name: str) -> bool:
        """Whether this rank is one of the holders."""
        return self.rank in self.owners(name)

    def place(self, names: Sequence[str]) -> str:
        """Which rank this is, and which ranks have some named values, in words."""
        ranks = sorted({rank for name in names for rank in self.owners(name)} - {self.rank})
        what = ", ".join(map(repr, names))
        where = (
            f": {'it is' if len(names) == 1 else 'they are'} on {', '.join(self.rank_names[rank] for rank in ranks)}"
        )
        return f"{self.rank_names[self.rank].capitalize()} does not hold {what}" + (where if ranks else "")

    def sharing(self, tensor: Tensor) -> list[tuple[str | None, Tensor]]:
        """What has memory in common with a tensor; parameters and buffers with their names."""
        span = _span(tensor)
        found: list[tuple[str | None, Tensor]] = [
            (name, owned) for name, owned in named_tensors(self._module) if _overlap(span, _span(owned))
        ]
        return found or [(None, other) for other in tensors_of(*self.elsewhere) if _overlap(span, _span(other))]

    def needed(self, name: str) -> bool:
        """Whether this rank computes with a parameter or buffer: in its layers, or outside as far as is known."""
        if self._map.in_layers_alone(name):
            return self.holds(name)
        ran = any(used.endswith(".") and name.startswith(used) for used in self.used)
        return ran or self._map.first_name(name) in self.used or self._map.in_layers_and_outside(name)

    def counted(self, name: str) -> bool:
        """Whether this rank is the one that counts the parameter in sums over the model: the first holder."""
        return self.owners(name)[0] == self.rank

    def in_layers_alone(self, name: str) -> bool:
        """Whether a parameter belongs to layers, and to no module outside."""
        return self._map.in_layers_alone(name)

    # ------------------------------------------------------------------ what the tracker asks

    def use(self, parameter: nn.Parameter, by: str = "") -> None:
        """Note that code outside layers uses ``parameter`` on this rank, in a function of torch.

        Raises:
            CutError: another rank holds it.
        """
        if self.stand_ins is not None:
            known = self.stand_ins.get(id(parameter))
            parameter = self._never_changes(parameter) if known is None else known
        name = self._map.name_of(parameter)
        if name is None and isinstance(parameter, AbsentTensor):
            raise CutError(
                f"a tensor {tuple(parameter.shape)} {parameter.dtype} is used on rank {self.rank} that was computed "
                "from parameters which other ranks hold.",
                hint="Compute it inside the layer that has the parameters, and return it from there.",
            )
        # A parameter that the module does not own is on every rank that made it.
        if name is None or name in self.used:
            return
        if is_absent(parameter) and self.holds(name):
            raise self._follows_others(name)
        if not self.holds(name):
            raise CutError(
                f"'{name}' is used on {self.rank_names[self.rank]}, but held by {self.holders_in_words(name)}"
                + ("." if self._map.in_layers_alone(name) else " (in the first training batch nobody else used it)."),
                hint=hint_of_use(by),
            )
        if not self._map.in_layers_alone(name):
            self.used.add(name)

    def check_data(self) -> None:
        """Raise if a parameter that this rank holds was assigned data without values.

        Raises:
            CutError: names it.
        """
        for name, parameter in self._module.named_parameters():
            if is_absent(parameter) and self.holds(name):
                raise self._follows_others(name)

    def _follows_others(self, name: str) -> CutError:
        return Origin((name,), self).error(
            f"'{name}' is used on rank {self.rank} and follows parameters of other ranks",
            "Only tensors of one rank can follow each other: change parameters one by one, not through one vector of "
            "all of them; a teacher whose layers follow a student's needs one device. For averaged weights use "
            "Lightning's callback EMAWeightAveraging.",
        )

    def holds_all(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether this rank holds some parameters, as far as the module owns them."""
        return all(name is None or self.holds(name) for name in map(self._map.name_of, parameters))

    def ranks_with(self, tensors: Iterable[Tensor]) -> tuple[int, ...] | None:
        """The ranks that hold all of some parameters and buffers; ``None`` if the module owns none of them."""
        owners = [set(self.owners(name)) for name in map(self._map.name_of, tensors) if name is not None]
        return tuple(sorted(set.intersection(*owners))) if owners else None

    def known_name(self, tensor: Tensor) -> str | None:
        """The name of a tensor that is or was a parameter or buffer of the module, or has stood for one."""
        return self._map.name_of(tensor)

    def also(self, tensor: nn.Parameter, parameter: nn.Parameter) -> None:
        """A tensor stands for a parameter of the module, too: where several processes divide it."""
        name = self.name_of(parameter)
        if name is not None:
            self._map.also(tensor, name)

    def holders_in_words(self, name: str) -> str:
        """How messages name the ranks that hold a parameter."""
        return ", ".join(self.rank_names[rank] for rank in self.owners(name))

    def unnoticed(self, parameter: nn.Parameter) -> CutError:
        """The error for a parameter that is used while another one should stand in for it."""
        return CutError(
            f"'{self._map.name_of(parameter)}' is used through a reference that is no attribute of a module, such as "
            "a list or a closure; an asynchronous schedule cannot give it the version of the weights that is due.",
            hint="Use it as an attribute of its module, or in an nn.ParameterList or nn.ParameterDict.",
        )

    def _never_changes(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter without a stand-in: it must be one that this rank does not train."""
        name = self._map.name_of(parameter)
        if name is not None and parameter.requires_grad and self.holds(name):
            raise self.unnoticed(parameter)
        return parameter

    def run(self, module: str) -> None:
        """Note that this rank runs an outside module, and so decides about its buffers."""
        self.used.add(f"{module}.")

    def name_of(self, tensor: Tensor) -> str | None:
        """The dotted name of a parameter or buffer of the module."""
        known = self._names.get(id(tensor))
        if known is None or known[0] is not tensor:
            name = next((name for name, owned in named_tensors(self._module) if owned is tensor), None)
            if name is None:
                return None
            known = self._names[id(tensor)] = tensor, name
        return known[1]

    # ------------------------------------------------------------------ placeholders

    def check_memory(self) -> None:
        """Refuse a parameter of which another tensor of the module has some of the memory: a change of one is lost.

        Raises:
            PartitionError: names both.
        """
        found: dict[Any, dict[int, tuple[str, Tensor]]] = {}
        for name, tensor in (*named_tensors(self._module), *_attributes(self._module)):
            found.setdefault(_span(tensor)[0], {}).setdefault(id(tensor), (name, tensor))
        found.pop(0, None)
        for (one, first), (other, second) in chain.from_iterable(
            combinations(each.values(), 2) for each in found.values()
        ):
            trained = isinstance(first, nn.Parameter) or isinstance(second, nn.Parameter)
            if trained and _overlap(_span(first), _span(second)):
                raise PartitionError(
                    f"'{one}' and '{other}' are different tensors with memory in common. Ranks, and processes that "
                    "divide parameters, have memory of their own: a change of one would not be one of the other.",
                    hint="Tie parameters as one object (self.head.weight = self.embed.weight), take a view where it is "
                    "used, in a forward, and keep a copy of what is not to change: .detach().clone().",
                )

    def release_layers(self) -> None:
        """Free the parameters and buffers of foreign layers in place: objects and names stay, as `AbsentTensor`.

        What an earlier division has freed stays as it is.

        Raises:
            PartitionError: it has freed what this rank is to compute with, or parameters are views of each other.
        """
        if len(self.rank_names) > 1:
            self.check_memory()
        # Before anything is freed: the first may raise, the others let go of what cannot be swapped.
        self._take_over()
        drop_weak_references(self._module)
        drop_graphs(self._module)
        for (_, layer), ranks in zip(self._layers, self._layer_ranks, strict=True):
            if self.rank in ranks:
                continue
            for tensor in owned_by(layer):
                name = self._map.name_of(tensor)
                if name is not None and not self.holds(name) and not isinstance(tensor, AbsentTensor):
                    self._release(name, tensor)
            for part in layer.modules():
                # ``module.to`` and its kin must change what absent tensors look like; what layers here share is none.
                if any(isinstance(tensor, AbsentTensor) for tensor in _own(part)):
                    part.__dict__["_apply"] = MethodType(_apply, part)

    def _take_over(self) -> None:
        """Let tensors that are absent already refer to this division."""
        for name, tensor in named_tensors(self._module):
            if isinstance(tensor, AbsentTensor):
                if self._map.in_layers_alone(name) and self.holds(name):
                    raise PartitionError(
                        f"{self.rank_names[self.rank].capitalize()} is to compute with '{name}', and has no value of "
                        "it: an earlier run has divided the module in another way.",
                        hint="Call trainer.strategy.whole_module() on all ranks after that run, with its Trainer.",
                    )
                tensor.origin = Origin((name,), self)

    def _release(self, name: str, tensor: Tensor) -> None:
        absent = AbsentTensor.like(tensor, Origin((name,), self))
        if is_divided(tensor):  # otherwise the object stays, and the other one has the values that are freed
            self._map.also(absent, name)
        release(self._module, tensor, absent)

    def learn_users(self, used_by_rank: Sequence[Iterable[str]]) -> None:
        """Learn from the first training batch who uses the parameters outside the sequence; free the others' copies.

        What nobody has used stays where it is: it may be the average of layers' weights, which each rank has for its
        own layers alone.

        Args:
            used_by_rank: for each rank the names of the parameters it has used, and of the modules it has run with a
                dot behind them.
        """
        drop_weak_references(self._module)
        drop_graphs(self._module)
        used = self._map.learn_users(used_by_rank)
        for name, parameter in self._map.outside():
            if name in used and not self.holds(name) and not isinstance(parameter, AbsentTensor):
                self._release(name, parameter)
        self.users_known = True

    def agree_on_lost(self, gather: Callable[[Any], list[Any]]) -> list[str]:
        """Learn which ranks have lost what the map says they hold, and which still have it.

        Args:
            gather: collective; returns what every rank gives, by rank.

        Returns:
            Names of what no rank has.
        """
        self._map.add_new()
        tensors = dict(named_tensors(self._module))
        absent = {name for name, tensor in tensors.items() if is_absent(tensor)}
        lost = sorted(set().union(*gather(sorted(name for name in absent if self.holds(name)))))
        # ``lost`` is the same on all ranks, so that all of them gather or none does
        having = gather([name for name in lost if name not in absent]) if lost else []
        ranks = {name: tuple(rank for rank, names in enumerate(having) if name in names) for name in lost}
        self._map.correct({name: found for name, found in ranks.items() if found})
        return [name for name in lost if not any(name in names for names in having)]

    def restore(self, fetch: Callable[[str, tuple[int, ...], Tensor], Tensor], without: Container[str] = ()) -> None:
        """Give this rank every value again.

        Args:
            without: names of what no rank has.
            fetch: collective; called on all ranks in the same order with name, owners and the local tensor; returns
                the true value.
        """
        drop_weak_references(self._module)
        for name, tensor in list(named_tensors(self._module)):
            # ``fetch`` is collective: nothing here may be decided by what this rank holds.
            if not self._map.has(name) or self._map.held_everywhere(name) or name in without:
                continue
            value = fetch(name, self.owners(name), tensor)
            if not self.holds(name):
                _replace(tensor, value)
        for _, layer in self._layers:
            for part in layer.modules():
                part.__dict__.pop("_apply", None)
        self._map.give_to_all()


def _replace(tensor: Tensor, value: Tensor) -> None:
    """Let the same object hold another value, device and memory; attributes and ``requires_grad`` stay."""
    # detached: what carried the value here may still refer to it, and such tensors cannot be swapped (torch 2.13)
    exchange(tensor, nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value.detach())


def _span(tensor: Tensor) -> tuple[Any, int, int]:
    """The memory that a tensor has a part in, and from where to where its part may reach."""
    if tensor.layout is not torch.strided or is_absent(tensor) or not tensor.numel():
        return 0, 0, 0
    size, start = tensor.element_size(), int(tensor.storage_offset()) * tensor.element_size()
    reach: int = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return memory_key(tensor), start, start + (reach + 1) * size


def _overlap(one: tuple[Any, int, int], other: tuple[Any, int, int]) -> bool:
    return one[0] == other[0] != 0 and one[1] < other[2] and other[1] < one[2]


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are neither parameters nor buffers; ``torch.nn.utils`` makes those with an original when used."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and f"{name}_orig" not in part._parameters:
                yield f"{path}.{name}".lstrip("."), value


def _own(part: nn.Module) -> tuple[Tensor, ...]:
    return (*part.parameters(recurse=False), *part.buffers(recurse=False))


@torch.no_grad()
def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    for tensor in _own(self):
        if isinstance(tensor, AbsentTensor):
            tensor.data = fn(tensor.data)
    for child in self.children() if recurse else ():
        child._apply(fn)  # type: ignore[no-untyped-call]
    return self
