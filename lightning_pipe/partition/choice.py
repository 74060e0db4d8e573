"""Chooses the layers of a module from what a step calls: any modules, in the order in which they are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, groupby, pairwise
from math import inf
from typing import NamedTuple

from torch import nn

from lightning_pipe.errors import PartitionError
from lightning_pipe.partition.calls import (
    Call,
    Layers,
    every_call,
    flattened,
    has_parameters,
    in_order,
    in_words,
    is_compiled_module,
    is_container,
    top,
    within,
    work_of,
)
from lightning_pipe.text import several

FINE = 4
"""A module is opened while it does more than this part of a stage's share of the work."""

SHARED = 0.1
"""Modules that are called at several places may do so much of the work: every rank that calls them holds them."""

MOST_PASSES = 4
"""A step that comes back to its layers more often than that runs a loop."""

_LISTS = (nn.ModuleList, nn.ModuleDict)


class Chosen(NamedTuple):
    """The layers of a module.

    Args:
        layers: in the order of their calls.
        work: of each; empty: it is not known.
        order: the numbers of the layers in the order of all calls, in which a step may come back to them; empty: it
            is not known.
        opened: modules, and the layers that they call in turn.
    """

    layers: Layers
    work: list[float] = []  # noqa: RUF012 - nobody changes it
    order: list[int] = []  # noqa: RUF012
    opened: list[tuple[str, nn.Module, list[str]]] = []  # noqa: RUF012

    def passes(self, counts: Sequence[int]) -> int:
        """How often the step runs from an earlier to a later stage.

        Args:
            counts: the layers of every stage.
        """
        stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
        stages = [stage_of[number] for number in self.order]
        return 1 + sum(after < before for before, after in pairwise(stages))

    def closed(self, counts: Sequence[int]) -> tuple[Layers, list[int]]:
        """The layers, and their numbers by stage, with modules closed again whose layers are all on one stage.

        Args:
            counts: the layers of every stage.
        """
        ends, found = list(accumulate(counts, initial=0)), list[Layers]()
        for start, end in pairwise(ends):
            names, parts = [name for name, _ in self.layers[start:end]], dict(self.layers[start:end])
            for name, module, inner in reversed(self.opened):  # those inside of others come first
                if inner[0] in names and names[(at := names.index(inner[0])) : at + len(inner)] == inner:
                    names[at : at + len(inner)], parts[name] = [name], module
            found.append([(name, parts[name]) for name in names])
        return [layer for stage in found for layer in stage], list(map(len, found))


def choose(module: nn.Module, calls: Sequence[Call], stages: int, *, passes: float = 1) -> Chosen:
    """Choose the layers: modules with parameters, none inside another, each called once or several times in a row.

    The modules that the step itself calls are opened, the largest first, into the modules that they call in turn, while
    one does more than a quarter of a stage's share of the work. A module stays closed whose parts are not called, or
    called in turns (a loop over time), or which calls some elements of a list alone (experts): it is one layer. What is
    called at several places and does little (a shared norm) is no layer but code between layers. Beside the elements of
    a list or dictionary that are layers the others are, too: another batch may call them (the head of its task).

    Args:
        module: the whole module.
        calls: those of one run of the step.
        stages: that the layers are to be divided over.
        passes: how often the step may go over the layers, from the first to the last one (siamese networks).

    Raises:
        PartitionError: there are fewer such modules than stages.

    Example:
        >>> net = nn.ModuleDict({"tail": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
        >>> [name for name, _ in choose(net, [Call("head", 8.0), Call("tail", 8.0)], stages=2).layers]
        ['head', 'tail']
    """
    parts = dict(module.named_modules())
    order = top(calls)
    limit = sum(call.work for call in order) / (FINE * stages)
    found = _Order(order, parts, passes)
    opened: list[tuple[str, nn.Module, list[str]]] = []
    while (name := _to_open(found, parts, passes, None if len(found.layers) < stages else limit)) is not None:
        inner = [part.name for call in found.calls if call.name == name for part in call.calls]
        opened.append((name, parts[name], list(dict.fromkeys(inner))))
        found = found.opened(name, parts, passes)
    if len(found.layers) < stages:
        raise _too_few(module, calls, stages, found.layers, passes)
    names = _with_elements(found.layers, calls, parts)
    numbers = {name: number for number, name in enumerate(names)}
    runs = [numbers[name] for name in found.runs if name in numbers]
    # closed again, a module would lie around a layer that it does not call itself
    closable = [
        each
        for each in opened
        if all(any(within(name, part) for part in each[2]) for name in names if within(name, each[0]))
    ]
    return Chosen(
        [(name, parts[name]) for name in names],
        [found.work.get(name, 0.0) for name in names],
        runs,
        closable if len(runs) == len(found.layers) else [],
    )


def _with_elements(layers: Sequence[str], calls: Sequence[Call], parts: dict[str, nn.Module]) -> list[str]:
    """The layers, with the elements of lists and dictionaries that this step leaves out beside those that it calls."""
    names, called = [*layers], [call.name for call in every_call(calls)]
    for path, container in parts.items():
        inside = [name for name in names if within(name, path)]
        if not inside or not isinstance(container, _LISTS):
            continue
        whole: list[str] = []
        for key, part in container.named_children():
            element = f"{path}.{key}"
            left_out = has_parameters(part) and not isinstance(part, _LISTS) and parts.get(element) is part
            if any(within(name, element) for name in called):
                whole += [name for name in inside if within(name, element)]
            elif left_out:
                whole.append(element)
        start = names.index(inside[0])
        if names[start : start + len(inside)] == inside == [name for name in whole if name in inside]:
            names[start : start + len(inside)] = whole
    return names


def _too_few(
    module: nn.Module, calls: Sequence[Call], stages: int, layers: Sequence[str], passes: float
) -> PartitionError:
    hint = "Train it on one device."
    if len(layers) > 1:
        hint = f"Use {len(layers)} stages or fewer: fewer devices, or a schedule with one stage on each ('1f1b')."
    if passes < inf:
        with suppress(PartitionError):
            chosen = choose(module, calls, stages, passes=inf)
            named = f"{line(module, chosen.layers)} and passes={chosen.passes([1] * len(chosen.layers))}"
            hint = f"The step comes back to its layers: use schedule='1f1b', 'gpipe' or 'interleaved' with {named}."
    if any(map(is_compiled_module, module.modules())):
        hint = "Compile the layers one by one; code compiled as a whole is one layer."
    return PartitionError(
        f"{type(module).__name__} has {several(len(layers), 'layer')} for {several(stages, 'stage')}: a layer is a "
        f"module with parameters that a step calls at one place. Called were: {in_words(top(calls))}. Layers: "
        f"{', '.join(layers) or 'none'}.",
        hint=hint,
    )


def serves(layers: Layers, calls: Sequence[Call], stages: int) -> bool:
    """Whether a sequence of layers is called in its order, and little is done outside of it.

    Args:
        layers: the sequence.
        calls: those of a step.
        stages: that the layers are to be divided over.
    """
    names = [name for name, _ in layers]
    total = sum(call.work for call in top(calls))
    outside = total - sum(work_of(calls, names))
    return len(layers) >= stages and in_order(calls, names) and outside <= total / (FINE * stages)


def line(module: nn.Module, layers: Layers, counts: Sequence[int] = ()) -> str:
    """The option that names these layers, as short as it can be and as `find_layers` reads it.

    Args:
        module: the whole module.
        layers: the layers; of a container `find_layers` takes the modules in it.
        counts: the layers of every stage, which become the option ``balance``; empty: without it.
    """
    short = list[str]()
    for parent, group in groupby((name for name, _ in layers), lambda name: name.rpartition(".")[0]):
        inside = list(group)
        children = module.get_submodule(parent)._modules.items()
        every = [f"{parent}.{key}" for key, child in children if child is not None]
        short += [f"{parent}.*"] if parent and len(inside) > 1 and inside == every else inside
    sizes = [len(flattened(name, part)) if is_container(part) else 1 for name, part in layers]
    ends = pairwise(accumulate(counts, initial=0))
    balance = f", balance={[sum(sizes[start:end]) for start, end in ends]}" if counts else ""
    return f"layers={(short[0] if len(short) == 1 else short)!r}{balance}"


class _Order:
    """Calls one after the other, of which none lies within another, and what they mean for the layers."""

    def __init__(self, calls: Sequence[Call], parts: dict[str, nn.Module], passes: float) -> None:
        self.calls = calls
        self.work = dict.fromkeys((call.name for call in calls), 0.0)
        for call in calls:
            self.work[call.name] += call.work
        self.runs = [name for name, _ in groupby(call.name for call in calls)]
        times = Counter(self.runs)
        inner = _inside_others(list(times), parts)
        repeated = {name for name in times if times[name] > 1}
        if passes > 1 and self._weight(repeated) > SHARED and _passes(self.runs) <= passes:
            repeated = set()
        self.layers = [name for name in times if name not in repeated and name not in inner]
        self.inner, self.repeated = self._weight(inner), self._weight(repeated)

    def _weight(self, names: set[str]) -> float:
        return sum(self.work[name] for name in names) / (sum(self.work.values()) or 1.0)

    def opened(self, name: str, parts: dict[str, nn.Module], passes: float) -> _Order:
        """The same with one of the modules opened."""
        calls = [part for call in self.calls for part in (call.calls if call.name == name else [call])]
        return _Order(calls, parts, passes)


def _to_open(found: _Order, parts: dict[str, nn.Module], passes: float, limit: float | None) -> str | None:
    """The largest module that can be opened and is to be; ``None``: all stay closed.

    Args:
        found: the order.
        parts: the modules by name.
        passes: see `choose`.
        limit: the work of the largest module that stays closed; ``None``: there are not layers enough.
    """
    openable = {call.name for call in found.calls if call.calls}
    for name, work in sorted(found.work.items(), key=lambda pair: -pair[1]):
        if limit is not None and work <= limit and not found.inner:
            return None
        if name not in openable or (limit is not None and _chooses(parts[name], found.calls, name)):
            continue
        finer = found.opened(name, parts, passes)
        if finer.repeated <= max(found.repeated, SHARED) and len(finer.layers) >= len(found.layers):
            return name
    return None


def _chooses(module: nn.Module, calls: Sequence[Call], name: str) -> bool:
    """Whether a module has called some elements of a list of its own and not others: data may decide (experts)."""
    called = {part.name for call in calls if call.name == name for part in every_call(call.calls)}
    lists = [
        [f"{name}.{path}.{key}" for key, part in container.named_children() if has_parameters(part)]
        for path, container in module.named_children()
        if isinstance(container, _LISTS)
    ]
    return any(0 < len(called.intersection(elements)) < len(elements) for elements in lists)


def _inside_others(names: Sequence[str], parts: dict[str, nn.Module]) -> set[str]:
    """The modules that are parts of others among them."""
    within = {id(part) for name in names for part in parts[name].modules() if part is not parts[name]}
    return {name for name in names if id(parts[name]) in within}


def _passes(runs: Sequence[str]) -> float:
    """How often calls go through the modules in the order in which they first come, the last time to the last one."""
    number = {name: index for index, name in enumerate(dict.fromkeys(runs))}
    order = [number[name] for name in runs]
    times = 1 + sum(after < before for before, after in pairwise(order))
    return times if order[-1] == len(number) - 1 else inf
