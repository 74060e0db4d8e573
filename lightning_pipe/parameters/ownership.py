"""Who holds which parameter and buffer: an explicit map, never inferred from devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.construction import materialize
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.absent_tensor import AbsentTensor, Origin, exchange, is_absent


class Ownership:
    """The holders of every parameter and buffer, as pipeline ranks.

    Layers belong to the ranks of their stage; a parameter shared by layers of several stages belongs to all of them.
    Parameters outside the sequence are held by every rank until the first training batch has shown which ranks use
    them (`settle`); what nobody used belongs to the ranks with the loss, and the others keep their copies. So is a
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

    Attributes:
        settled: whether it is known who uses the parameters outside the sequence.
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
    ) -> None:
        self.rank, self.ranks, self.loss_ranks, self.rank_names = rank, ranks, loss_ranks, rank_names
        self.settled = False
        self.elsewhere: Sequence[object] = (module,)
        self.used: set[str] = set()
        self.stand_ins: Mapping[int, nn.Parameter] | None = None
        self._module, self._layers, self._layer_ranks = module, list(layers), list(layer_ranks)
        self._ranks_of = {name: ranks for (name, _), ranks in zip(layers, layer_ranks, strict=True)}
        self._holders: dict[str, tuple[int, ...]] = {}
        self._names: dict[int, str] = {}
        self._inside: set[str] = set()
        self._layer_users: dict[str, set[int]] = {}
        self._aliases: dict[str, str] = {}
        self._map()

    def _map(self) -> None:
        """Find the holders of what the layers own; the rest is held everywhere for now."""
        inside: dict[int, set[int]] = {}
        for (_, layer), ranks in zip(self._layers, self._layer_ranks, strict=True):
            for tensor in _owned(layer):
                inside.setdefault(id(tensor), set()).update(ranks)
        everyone = tuple(range(self.ranks))
        tied = self._in_layers_and_outside()
        for name, tensor in named_tensors(self._module):
            first = self._names.setdefault(id(tensor), name)
            self._aliases[name] = first
            if id(tensor) in tied:
                self._layer_users[first] = inside[id(tensor)]
            elif id(tensor) in inside:
                self._inside.add(first)
            self._holders.setdefault(
                first, everyone if first not in self._inside else tuple(sorted(inside[id(tensor)]))
            )

    def _in_layers_and_outside(self) -> set[int]:
        """The parameters that belong to a layer and to a module that is no part of one."""
        in_layers = {id(part) for _, layer in self._layers for part in layer.modules()}
        owned: tuple[set[int], set[int]] = (set(), set())
        for part in self._module.modules():
            owned[id(part) in in_layers].update(id(parameter) for parameter in part.parameters(recurse=False))
        return owned[0] & owned[1]

    # ------------------------------------------------------------------ questions

    def owners(self, name: str) -> tuple[int, ...]:
        """The ranks that hold the true value of a named parameter or buffer, ascending."""
        return self._holders[self._aliases.get(name, name)] if name in self._aliases else self.loss_ranks

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
        first = self._aliases.get(name)
        if first in self._inside:
            return self.holds(name)
        ran = any(used.endswith(".") and name.startswith(used) for used in self.used)
        return ran or first in self.used or first in self._layer_users

    def counted(self, name: str) -> bool:
        """Whether this rank is the one that counts the parameter in sums over the model: the first holder."""
        return self.owners(name)[0] == self.rank

    def in_layers_alone(self, name: str) -> bool:
        """Whether a parameter belongs to layers, and to no module outside."""
        return self._aliases.get(name) in self._inside

    def outside(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters outside the sequence, each once."""
        for name, parameter in self._module.named_parameters():
            if not self.in_layers_alone(name):
                yield name, parameter

    # ------------------------------------------------------------------ what the tracker asks

    def use(self, parameter: nn.Parameter) -> None:
        """Note that code outside layers uses ``parameter`` on this rank.

        Raises:
            CutError: another rank holds it.
        """
        if self.stand_ins is not None:
            known = self.stand_ins.get(id(parameter))
            parameter = self._never_changes(parameter) if known is None else known
        name = self._names.get(id(parameter))
        if name is None and isinstance(parameter, AbsentTensor):
            raise CutError(
                f"a tensor {tuple(parameter.shape)} {parameter.dtype} is used on rank {self.rank} that was computed "
                "from parameters which other ranks hold.",
                hint="Compute it inside the layer that has the parameters, and return it from there.",
            )
        if name is None or name in self.used:
            return
        if is_absent(parameter) and self.holds(name):
            raise Origin((name,), self).error(
                f"'{name}' is used on rank {self.rank} and follows parameters of other ranks",
                "Only tensors of one rank can follow each other: a teacher whose layers follow a student's needs one "
                "device. For averaged weights use Lightning's callback EMAWeightAveraging.",
            )
        if not self.holds(name):
            raise CutError(
                f"'{name}' is used on {self.rank_names[self.rank]}, but held by {self.holders_in_words(name)}"
                + ("." if name in self._inside else " (in the first training batch only they used it)."),
                hint="Use it where its layer runs, or in every training step. For a penalty on all weights use the "
                "optimizer's weight_decay.",
            )
        if name not in self._inside:
            self.used.add(name)

    def holders_in_words(self, name: str) -> str:
        """How messages name the ranks that hold a parameter."""
        return ", ".join(self.rank_names[rank] for rank in self.owners(name))

    def unnoticed(self, parameter: nn.Parameter) -> CutError:
        """The error for a parameter that is used while another one should stand in for it."""
        return CutError(
            f"'{self._names.get(id(parameter))}' is used through a reference that is no attribute of a module, such as "
            "a list or a closure; an asynchronous schedule cannot give it the version of the weights that is due.",
            hint="Use it as an attribute of its module, or in an nn.ParameterList or nn.ParameterDict.",
        )

    def _never_changes(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter without a stand-in: it must be one that this rank does not train."""
        name = self._names.get(id(parameter))
        if name is not None and parameter.requires_grad and self.holds(name):
            raise self.unnoticed(parameter)
        return parameter

    def run(self, module: str) -> None:
        """Note that this rank runs an outside module, and so decides about its buffers."""
        self.used.add(f"{module}.")

    def may_run(self, module: str) -> bool:
        """Whether this rank computes a layer, or may come to run an outside module."""
        return self.rank in self._ranks_of.get(module, (self.rank,))

    def name_of(self, tensor: Tensor) -> str | None:
        """The dotted name of a parameter or buffer of the module."""
        return next((name for name, owned in named_tensors(self._module) if owned is tensor), None)

    # ------------------------------------------------------------------ placeholders

    def release_layers(self) -> None:
        """Free the parameters and buffers of foreign layers in place: objects and names stay, as `AbsentTensor`.

        Of a module that was built without memory, this rank's tensors are made now.
        """
        _drop_weak_references(self._module)
        _drop_graphs(self._module)
        kept = {name for name in self._holders if self.holds(name)}
        for (_, layer), ranks in zip(self._layers, self._layer_ranks, strict=True):
            if self.rank in ranks:
                continue
            for tensor in _owned(layer):
                name = self._names[id(tensor)]
                if name not in kept and not isinstance(tensor, AbsentTensor):
                    self._release(name, tensor)
            for part in layer.modules():
                # ``module.to`` and its kin must change what absent tensors look like.
                part.__dict__["_apply"] = MethodType(_apply, part)
        foreign = [
            layer for (_, layer), ranks in zip(self._layers, self._layer_ranks, strict=True) if self.rank not in ranks
        ]
        materialize(self._module, without=foreign)

    def _release(self, name: str, tensor: Tensor) -> None:
        tensor.grad = None
        exchange(tensor, AbsentTensor.like(tensor, Origin((name,), self)))

    def settle(self, used_by_rank: Sequence[Iterable[str]]) -> None:
        """Learn from the first training batch who uses the parameters outside the sequence; free the others' copies.

        What nobody has used stays where it is: it may be the average of layers' weights, which each rank has for its
        own layers alone.

        Args:
            used_by_rank: for each rank the names of the parameters it has used, and of the modules it has run with a
                dot behind them.
        """
        _drop_weak_references(self._module)
        users: dict[str, list[int]] = {}
        for rank, names in enumerate(used_by_rank):
            for name in names:
                users.setdefault(name, []).append(rank)
        _drop_graphs(self._module)
        for name, ranks in self._layer_users.items():
            users[name] = sorted({*users.get(name, ()), *ranks})
        for name, parameter in self.outside():
            self._holders[name] = tuple(users.get(name, self.loss_ranks))
            if name in users and not self.holds(name) and not isinstance(parameter, AbsentTensor):
                self._release(name, parameter)
        for prefix, buffer in self._outside_buffers():
            ran = [ranks for name, ranks in users.items() if name.endswith(".") and f"{prefix}.".startswith(name)]
            self._holders[self._aliases[buffer]] = tuple(ran[0]) if ran else self.loss_ranks
        self.settled = True

    def _outside_buffers(self) -> Iterator[tuple[str, str]]:
        for module_name, module in self._module.named_modules():
            for name, _ in module.named_buffers(recurse=False):
                full = f"{module_name}.{name}" if module_name else name
                if self._aliases.get(full) == full and full not in self._inside:
                    yield module_name, full

    def agree_on_lost(self, gather: Callable[[Any], list[Any]]) -> list[str]:
        """Learn which ranks have lost what the map says they hold, and which still have it.

        Args:
            gather: collective; returns what every rank gives, by rank.

        Returns:
            Names of what no rank has.
        """
        for name, tensor in named_tensors(self._module):  # hooks may have added modules
            first = self._aliases.setdefault(name, self._names.setdefault(id(tensor), name))
            self._holders.setdefault(first, self.loss_ranks)
        tensors = dict(named_tensors(self._module))
        absent = {name for name, tensor in tensors.items() if is_absent(tensor)}
        lost = sorted(set().union(*gather(sorted(name for name in absent if self.holds(name)))))
        having = gather([name for name in lost if name not in absent]) if lost else []
        for name in lost:
            ranks = tuple(rank for rank, names in enumerate(having) if name in names)
            self._holders[self._aliases[name]] = ranks or self.owners(name)
        return [name for name in lost if not any(name in names for names in having)]

    def restore(self, fetch: Callable[[str, tuple[int, ...], Tensor], Tensor], without: Container[str] = ()) -> None:
        """Give this rank every value again.

        Args:
            without: names of what no rank has.
            fetch: collective; called on all ranks in the same order with name, owners and the local tensor; returns
                the true value.
        """
        _drop_weak_references(self._module)
        for name, tensor in list(named_tensors(self._module)):
            owners = self._holders.get(name)
            if owners is None or len(owners) == self.ranks or self._aliases[name] != name or name in without:
                continue
            value = fetch(name, owners, tensor)
            if not self.holds(name):
                _replace(tensor, value)
        for _, layer in self._layers:
            for part in layer.modules():
                part.__dict__.pop("_apply", None)
        everyone = tuple(range(self.ranks))
        self._holders = dict.fromkeys(self._holders, everyone)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def tensors_of(*roots: object) -> Iterator[Tensor]:
    """The tensors that attributes and containers of some objects lead to; torch's and Lightning's own are no way."""
    seen: set[int] = set()
    nodes = [node for root in roots for node in vars(root).values()]
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Tensor):
            yield node
        elif isinstance(node, Mapping):
            nodes.extend(node.values())
        elif isinstance(node, list | tuple | set | deque):
            nodes.extend(node)
        elif isinstance(node, nn.Module) or (hasattr(node, "__dict__") and not _is_frameworks(type(node))):
            nodes.extend(vars(node).values())


def _is_frameworks(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] in ("torch", "lightning", "builtins")


def _owned(layer: nn.Module) -> Iterator[Tensor]:
    yield from layer.parameters()
    yield from layer.buffers()


def _replace(tensor: Tensor, value: Tensor) -> None:
    """Let the same object hold another value, device and memory; attributes and ``requires_grad`` stay."""
    # detached: what carried the value here may still refer to it, and such tensors cannot be swapped (torch 2.13)
    exchange(tensor, nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value.detach())


def _span(tensor: Tensor) -> tuple[int, int, int]:
    """The memory that a tensor has a part in, and from where to where its part may reach."""
    if tensor.layout is not torch.strided or is_absent(tensor) or not tensor.numel():
        return 0, 0, 0
    size, start = tensor.element_size(), tensor.data_ptr()
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage()._cdata, start, start + (reach + 1) * size


def _overlap(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    return one[0] == other[0] != 0 and one[1] < other[2] and other[1] < one[2]


def _drop_weak_references(module: nn.Module) -> None:
    """Recurrent layers refer to their weights weakly, and such tensors cannot be swapped (torch 2.13)."""
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            # without them a layer does not look whether its weights are still the same objects; they are
            part._flat_weight_refs = [None] * len(part._flat_weight_refs)


def _drop_graphs(module: nn.Module) -> None:
    """Attributes with a graph refer to parameters, and such parameters cannot be swapped (torch 2.13).

    ``torch.nn.utils.weight_norm`` keeps one from the start; it makes a new one before each use.
    """
    for part in module.modules():
        for name, value in vars(part).items():
            if type(value) is Tensor and value.grad_fn is not None:
                vars(part)[name] = value.detach()


@torch.no_grad()
def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    for tensor in (*self.parameters(recurse=False), *self.buffers(recurse=False)):
        if isinstance(tensor, AbsentTensor):
            tensor.data = fn(tensor.data)
    return self
