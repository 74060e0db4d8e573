"""Who holds which parameter and buffer, by name: an explicit map, never inferred from devices.

A module of three layers on two ranks, with code outside the layers (``self.scale``) and one weight used twice::

                          rank 0                rank 1 (computes the loss)
    layer of one stage    layers.0.weight       layers.1.weight, layers.2.bias
    tied weight           layers.0.weight ===== layers.2.weight      both ranks; gradients are summed at the end
    outside the layers    scale (?)             scale (?)            everyone until the first batch, then its users
    nobody uses it        average (kept)        average              the loss ranks; the others keep their copies

Schedules with several pipes, such as Chimera, compute a stage on two ranks: its layers have *copies*, one on each. Data
parallelism adds *replicas*: the same rank of every pipeline holds the same names. The map counts ranks of one pipeline;
`Topology.holders` turns these into the processes of all replicas, whose gradients are summed together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from lightning_pipe.construction import tensors_of
from lightning_pipe.errors import CutError, PartitionError
from lightning_pipe.intercept.absent_tensor import IN_HOOKS, AbsentTensor, Origin, exchange, hint_of_use, is_absent
from lightning_pipe.local_parts import is_divided
from lightning_pipe.parameters.releasing import check_memory, make_swappable, named_tensors, release, share_memory
from lightning_pipe.torch_internals import named_parameters


@dataclass(eq=False)
class _Held:
    """One parameter or buffer, under all of its names.

    Args:
        name: the first of its names.
        owners: the ranks that hold its true value, ascending.
        in_layers: the ranks that compute the layers which have it.
        outside: whether it is a parameter that a module outside the layers has.
    """

    name: str
    owners: tuple[int, ...]
    in_layers: Collection[int] = ()
    outside: bool = False

    @property
    def in_layers_alone(self) -> bool:
        """Whether it belongs to layers, and to no module outside."""
        return bool(self.in_layers) and not self.outside


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
        loss_ranks: the ranks that compute the loss.
        rank_names: how messages name the ranks, all of them.
        before: of an earlier run, if the module is still divided as that run has left it.

    Attributes:
        users_known: whether a batch of this run has shown who uses the parameters outside the sequence.
        remedy: what messages advise whoever asks for a value of another rank.
        used: the parameters outside the sequence that this rank has used, and with a dot the modules that it has run.
        elsewhere: objects that may keep copies of parameters and buffers.
        unknown: by ``id`` leaves of the graph that this rank has used and the module does not have, while they last.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[tuple[str, nn.Module]],
        layer_ranks: Sequence[tuple[int, ...]],
        rank: int,
        loss_ranks: tuple[int, ...],
        rank_names: Sequence[str],
        before: Ownership | None = None,
    ) -> None:
        self.rank, self.rank_names = rank, rank_names
        self.users_known = False
        self.remedy = IN_HOOKS
        self.elsewhere: Sequence[object] = (module,)
        self.unknown = WeakValueDictionary[int, Tensor]()
        self.used: set[str] = set() if before is None else before.used
        self._module, self._layers, self._layer_ranks = module, list(layers), list(layer_ranks)
        self._everyone, self._loss_ranks = tuple(range(len(rank_names))), loss_ranks
        self._held: dict[str, _Held] = {}  # the same object for all names of a tensor
        self._names: dict[int, tuple[Tensor, str]] = {}  # with the tensor, so that its ``id`` stays its own
        self._fill()
        if before is not None:  # it has learnt about tensors outside the layers
            for name, tensor in named_tensors(module):
                known, held = before.known_name(tensor), self._held[name]
                if known is not None and not held.in_layers_alone:
                    held.owners = before.owners(known)

    def _fill(self) -> None:
        """Find the holders of what the layers own; the rest is held everywhere for now."""
        users: dict[int, set[int]] = {}
        for (_, layer), ranks in zip(self._layers, self._layer_ranks, strict=True):
            for _, tensor in named_tensors(layer):
                users.setdefault(id(tensor), set()).update(ranks)
        in_layers = {part for _, layer in self._layers for part in layer.modules()}
        others = (part for part in self._module.modules() if part not in in_layers)
        outside = {id(parameter) for part in others for parameter in part.parameters(recurse=False)}
        for name, tensor in named_tensors(self._module):
            ranks = tuple(sorted(users.get(id(tensor), ())))
            # Code outside the layers may use the tensor on any rank, so the layers' ranks are only some of its users.
            alone = ranks and id(tensor) not in outside
            self._add(name, tensor, _Held(name, ranks if alone else self._everyone, ranks, id(tensor) in outside))

    def _add(self, name: str, tensor: Tensor, new: _Held) -> None:
        """Take up a name of a tensor; ``new`` if none of its names is known."""
        first = self._names.setdefault(id(tensor), (tensor, name))[1]
        self._held.setdefault(name, self._held.get(first, new))

    # ------------------------------------------------------------------ questions

    def owners(self, name: str) -> tuple[int, ...]:
        """The ranks that hold the true value of a named parameter or buffer, ascending."""
        return self._held[name].owners if name in self._held else self._loss_ranks

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
        owned: list[tuple[str | None, Tensor]] = [
            (name, other) for name, other in named_tensors(self._module) if share_memory(tensor, other)
        ]
        return owned or [(None, other) for other in tensors_of(*self.elsewhere) if share_memory(tensor, other)]

    def needed(self, name: str) -> bool:
        """Whether this rank computes with a parameter or buffer: in its layers, or outside as far as is known."""
        held = self._held.get(name)
        if held is not None and held.in_layers:
            return held.outside or self.holds(name)
        return any(map(name.startswith, _modules(self.used))) or (held is not None and held.name in self.used)

    def counted(self, name: str) -> bool:
        """Whether this rank is the one that counts the parameter in sums over the model: the first holder."""
        return self.owners(name)[0] == self.rank

    def in_layers_alone(self, name: str) -> bool:
        """Whether a parameter belongs to layers, and to no module outside."""
        return name in self._held and self._held[name].in_layers_alone

    # ------------------------------------------------------------------ what the tracker asks

    def use(self, parameter: Tensor, by: str = "") -> None:
        """Note that code outside layers uses a parameter, or another leaf of the graph, in a function of torch.

        Raises:
            CutError: another rank holds it.
        """
        name = self.known_name(parameter)
        if name is None and isinstance(parameter, AbsentTensor):
            raise CutError(
                f"a tensor {tuple(parameter.shape)} {parameter.dtype} is used on {self.rank_names[self.rank]} that was "
                "computed from parameters which other ranks hold.",
                hint="Compute it inside the layer that has the parameters, and return it from there.",
            )
        if name is None:  # it is on every rank that made it
            self.unknown[id(parameter)] = parameter
        if name is None or name in self.used:
            return
        if is_absent(parameter) and self.holds(name):
            raise self._follows_others(name)
        if not self.holds(name):
            raise CutError(
                f"'{name}' is used on {self.rank_names[self.rank]}, but held by {self.holders_in_words(name)}"
                + ("." if self.in_layers_alone(name) else " (in the first training batch nobody else used it)."),
                hint=hint_of_use(by),
            )
        if not self.in_layers_alone(name):
            self.used.add(name)

    def check_data(self) -> None:
        """Raise if a parameter that this rank computes with was assigned data without values.

        Torch tells nobody of ``teacher.data = 0.9 * teacher.data + 0.1 * student.data``; it would compute NaN.

        Raises:
            CutError: names it.
        """
        for name, parameter in named_parameters(self._module):
            if is_absent(parameter) and self.holds(name) and self.needed(name):
                raise self._follows_others(name)

    def _follows_others(self, name: str) -> CutError:
        return Origin((name,), self).error(
            f"'{name}' is used on {self.rank_names[self.rank]} and follows parameters of other ranks",
            "Only tensors of one rank can follow each other: change parameters one by one, not through one vector of "
            "all of them; a teacher whose layers follow a student's needs one device. For averaged weights use "
            "Lightning's callback EMAWeightAveraging.",
        )

    def holds_all(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether this rank holds some parameters, as far as the module owns them."""
        return all(name is None or self.holds(name) for name in map(self.known_name, parameters))

    def ranks_with(self, tensors: Iterable[Tensor]) -> tuple[int, ...] | None:
        """The ranks that hold all of some parameters and buffers; ``None`` if the module owns none of them."""
        owners = [set(self.owners(name)) for name in map(self.known_name, tensors) if name is not None]
        return tuple(sorted(set.intersection(*owners))) if owners else None

    def known_name(self, tensor: Tensor) -> str | None:
        """The first name of a tensor that is or was a parameter or buffer of the module, or has stood for one."""
        return self._names.get(id(tensor), (tensor, None))[1]

    def also(self, tensor: Tensor, parameter: Tensor) -> None:
        """A tensor stands for a parameter of the module, too: a part of it, or the whole that is gathered of parts."""
        name = self.name_of(parameter)
        if name is not None:
            self._names[id(tensor)] = tensor, name

    def holders_in_words(self, name: str) -> str:
        """How messages name the ranks that hold a parameter."""
        return ", ".join(self.rank_names[rank] for rank in self.owners(name))

    def run(self, module: str) -> None:
        """Note that this rank runs an outside module, and so decides about its buffers."""
        self.used.add(f"{module}.")

    def name_of(self, tensor: Tensor) -> str | None:
        """The first name of a parameter or buffer of the module."""
        name = self.known_name(tensor)
        return name or next((name for name, owned in named_tensors(self._module) if owned is tensor), None)

    # ------------------------------------------------------------------ placeholders

    def release_layers(self) -> None:
        """Free the parameters and buffers of foreign layers in place: objects and names stay, as `AbsentTensor`.

        What an earlier division has freed stays as it is.

        Raises:
            PartitionError: it has freed what this rank is to compute with, or parameters are views of each other.
        """
        if len(self.rank_names) > 1:
            check_memory(self._module)
        # Before anything is freed: the first may raise, the others let go of what cannot be swapped.
        self._take_over()
        make_swappable(self._module)
        for (_, layer), ranks in zip(self._layers, self._layer_ranks, strict=True):
            if self.rank in ranks:
                continue
            for _, tensor in named_tensors(layer):
                name = self.known_name(tensor)
                if name is not None and not self.holds(name) and not isinstance(tensor, AbsentTensor):
                    self._release(name, tensor)

    def _take_over(self) -> None:
        """Let tensors that are absent already refer to this division."""
        for name, tensor in named_tensors(self._module):
            if isinstance(tensor, AbsentTensor):
                if self.in_layers_alone(name) and self.holds(name):
                    raise PartitionError(
                        f"{self.rank_names[self.rank].capitalize()} is to compute with '{name}', and has no value of "
                        "it: an earlier run has divided the module in another way.",
                        hint="Call trainer.strategy.whole_module() on all ranks after that run, with its Trainer.",
                    )
                tensor.origin = Origin((name,), self)

    def _release(self, name: str, tensor: Tensor) -> None:
        absent = AbsentTensor.like(tensor, Origin((name,), self))
        if is_divided(tensor):  # otherwise the object stays, and the other one has the values that are freed
            self.also(absent, tensor)
        release(self._module, tensor, absent)

    def learn_users(self, used_by_rank: Sequence[Iterable[str]]) -> None:
        """Learn from the first training batch who uses the parameters outside the sequence; free the others' copies.

        What nobody has used stays where it is: it may be the average of layers' weights, which each rank has for its
        own layers alone.

        Args:
            used_by_rank: for each rank the names of the parameters it has used, and of the modules it has run with a
                dot behind them.
        """
        make_swappable(self._module)
        users: dict[str, list[int]] = {}
        for rank, names in enumerate(used_by_rank):
            for name in names:
                users.setdefault(name, []).append(rank)
        for name, tensor in [*named_tensors(self._module)]:
            held = self._held.get(name)
            if held is None or held.name != name or held.in_layers_alone:
                continue
            if isinstance(tensor, nn.Parameter):
                known = sorted({*users.get(name, ()), *held.in_layers})
            else:  # a buffer is not "used" as a parameter is: it belongs to the ranks that run its module
                known = next((users[module] for module in _modules(users) if name.startswith(module)), [])
            held.owners = tuple(known) or self._loss_ranks
            if known and isinstance(tensor, nn.Parameter) and not self.holds(name) and not is_absent(tensor):
                self._release(name, tensor)
        self.users_known = True

    def agree_on_lost(self, gather: Callable[[Any], list[Any]]) -> list[str]:
        """Learn which ranks have lost what the map says they hold, and which still have it.

        Args:
            gather: collective; returns what every rank gives, by rank.

        Returns:
            Names of what no rank has.

        Raises:
            CutError: a rank has parameters or buffers that others lack.
        """
        tensors = dict(named_tensors(self._module))
        new = {name for name, each in tensors.items() if name not in self._held and self.known_name(each) is None}
        for name, tensor in tensors.items():  # hooks may have added modules
            self._add(name, tensor, _Held(name, self._loss_ranks))
        absent = {name for name, tensor in tensors.items() if is_absent(tensor)}
        added, found = zip(*gather((new, {name for name in absent if self.holds(name)})), strict=True)
        if apart := set.union(*added) - set.intersection(*added):
            why = f"'{min(apart)}' is on some ranks alone: steps that end early on others do not add it there."
            raise CutError(why, hint="Create it in __init__ or configure_model.")
        lost = sorted(set.union(*found))
        # ``lost`` is the same on all ranks, so that all of them gather or none does
        having = gather([name for name in lost if name not in absent]) if lost else []
        for name in lost:
            ranks = tuple(rank for rank, names in enumerate(having) if name in names)
            self._held[name].owners = ranks or self.owners(name)
        return [name for name in lost if not any(name in names for names in having)]

    def restore(self, fetch: Callable[[str, tuple[int, ...], Tensor], Tensor], without: Container[str] = ()) -> None:
        """Give this rank every value again.

        Args:
            without: names of what no rank has.
            fetch: collective; called on all ranks in the same order with name, owners and the local tensor; returns
                the true value.
        """
        make_swappable(self._module)
        for name, tensor in list(named_tensors(self._module)):
            # ``fetch`` is collective: nothing here may be decided by what this rank holds.
            held = self._held.get(name)
            if held is None or held.name != name or held.owners == self._everyone or name in without:
                continue
            value = fetch(name, held.owners, tensor)
            if not self.holds(name):
                # Detached: what carried the value here may still refer to it, and such tensors cannot be swapped.
                parameter = isinstance(tensor, nn.Parameter)
                exchange(tensor, nn.Parameter(value, tensor.requires_grad) if parameter else value.detach())
        for held in self._held.values():
            held.owners = self._everyone


def _modules(used: Iterable[str]) -> list[str]:
    """The modules among what a rank has used, with a dot behind them."""
    return [name for name in used if name.endswith(".")]
