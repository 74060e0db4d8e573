"""Finds the layers of a module before it runs: those that are named, one clear sequence, or what is registered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_pipe.errors import PartitionError
from lightning_pipe.partition.calls import (
    Layers,
    flattened,
    has_parameters,
    is_compiled_module,
    is_container,
    is_transparent,
    registered,
    within,
)
from lightning_pipe.partition.choice import choose
from lightning_pipe.text import nearest, several

CLEAR_SHARE = 0.6
"""A sequence is clear if it holds at least this share of the parameters …"""

RIVAL_SHARE = 0.2
"""… and no sequence disjoint from it holds this much."""


def find_layers(module: nn.Module, layers: str | Sequence[str] | None = None, stages: int = 1) -> Layers:
    """Returns the layers of a module in the order in which they run, with their dotted names.

    The layers are the children of an ``nn.Sequential`` or ``nn.ModuleList``. Nested ``nn.Sequential`` and containers
    that cannot be called themselves are flattened at any depth. A module that occurs more than once is not a layer but
    code between the layers: it is held wherever it is used.

    Args:
        module: the whole module, usually a LightningModule.
        layers: dotted path, or paths in the order in which they run. ``*`` stands for any part of a path between two
            dots. A path names a container (its children are the layers) or one layer. ``None`` takes the sequence that
            holds at least 60 % of the parameters if no disjoint one holds 20 %, else modules in the order in which
            they are registered, which is a guess.
        stages: that the layers are to be divided over; so many at least are found where none are named.

    Returns:
        Pairs of dotted name and layer.

    Raises:
        PartitionError: nothing is found, a path leads nowhere or a layer is named twice.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
        >>> [name for name, _ in find_layers(net)]
        ['0', '1.0', '1.1']
    """
    found = known_layers(module, layers)
    if layers is not None or len(found) >= stages:
        return found
    try:
        return choose(module, registered(module), stages).layers
    except PartitionError as error:
        name, number = type(module).__name__, several(stages, "layer")
        raise PartitionError(
            f"{name} does not hold {number} with parameters that could be told before it runs.", hint=error.hint
        ) from None


def known_layers(module: nn.Module, layers: str | Sequence[str] | None) -> Layers:
    """The layers that are named, or those of the one clear sequence; none where they are to be guessed or seen.

    Raises:
        PartitionError: a path leads nowhere or a layer is named twice.
    """
    if layers is not None:
        return _named(module, [layers] if isinstance(layers, str) else list(layers))
    sizes = {id(p): 0 if is_lazy(p) else p.numel() for p in module.parameters()}
    found = [(path, flat, set(map(id, module.get_submodule(path).parameters()))) for path, flat in _sequences(module)]

    def share(held: set[int]) -> float:
        return sum(map(sizes.__getitem__, held)) / (sum(sizes.values()) or 1)

    clear = [
        (max(parameter_count([layer]) for _, layer in flat), -share(held), flat)
        for path, flat, held in found
        if share(held) >= CLEAR_SHARE
        and not any(
            share(others - held) >= RIVAL_SHARE and not (within(path, other) or within(other, path))
            for other, _, others in found
        )
    ]
    # the finest: of a stem, a body and a head it is the blocks of the body. First found is outermost
    return min(clear, key=lambda each: each[:2])[2] if clear else []


def parameter_count(modules: Sequence[nn.Module]) -> int:
    """Number of parameters in the modules, shared ones counted once; parameters not yet materialised count 0."""
    unique = {id(p): p for m in modules for p in m.parameters()}
    return sum(0 if is_lazy(p) else p.numel() for p in unique.values())


def _named(module: nn.Module, paths: list[str]) -> Layers:
    if not paths:
        raise PartitionError("layers=[] names no layer.", hint='Name the sequence, e.g. layers="model.layers".')
    flat: Layers = []
    for path in paths:
        expanded = [
            layer
            for name, found in _expand(module, path, alone=len(paths) == 1)
            for layer in (flattened(name, found) if is_container(found) else [(name, found)])
        ]
        if not expanded:
            raise PartitionError(f"The sequence {path!r} is empty.", hint="Name a sequence that holds layers.")
        flat += expanded
    _check_disjoint([name for name, _ in flat], paths)
    _check_not_inside_compiled(module, [name for name, _ in flat])
    once = _without_repeated(flat)
    if not once:
        kinds = ", ".join(sorted({type(layer).__name__ for _, layer in flat}))
        raise PartitionError(
            f"layers={_paste(paths)} names nothing but modules that occur several times ({kinds}).",
            hint=_instead(flat),
        )
    # names as in named_parameters(): of several names of one module the first counts
    canonical = {id(found): name for name, found in module.named_modules()}
    return [(canonical.get(id(layer), name), layer) for name, layer in once]


def _sequences(module: nn.Module) -> Iterator[tuple[str, Layers]]:
    """Sequences of two or more layers in the order of registration, without those inside one of several like blocks.

    Nothing inside compiled code is one: the calls of its layers cannot be seen.
    """
    inside: list[str] = [path for path, part in module.named_modules() if is_compiled_module(part)]
    for path, container in module.named_modules():
        if not isinstance(container, nn.Sequential | nn.ModuleList) or any(within(path, outer) for outer in inside):
            continue
        layers = _without_repeated(flattened(path, container))
        if len(layers) < 2 or not has_parameters(container):
            continue
        kinds = Counter(type(layer) for _, layer in layers)
        inside += [name for name, layer in layers if kinds[type(layer)] > 1]
        inside += [f"{path}.{key}".lstrip(".") for key, child in container.named_children() if is_transparent(child)]
        yield path, layers


def _without_repeated(layers: Layers) -> Layers:
    calls = Counter(id(layer) for _, layer in layers)
    return [(name, layer) for name, layer in layers if calls[id(layer)] == 1]


def _expand(module: nn.Module, path: str, *, alone: bool) -> Layers:
    found: Layers = [("", module)]
    for part in path.split(".") if path else []:
        found = [
            (f"{name}.{key}" if name else key, child)
            for name, parent in found
            for key, child in parent._modules.items()
            if child is not None and fnmatchcase(key, part)
        ]
    if found:
        return found
    names = [name for name, _ in module.named_modules() if name]
    # a single path must name something that can be divided
    containers = [(name, each) for name, each in module.named_modules() if name and is_container(each)]
    flat = [name for name, each in containers if len(flattened(name, each)) > 1]
    guess = nearest(path, flat if alone else names)
    raise PartitionError(
        f"layers: {type(module).__name__} has no module {path!r}.",
        hint=f"Did you mean layers={guess!r}?" if guess else f"It has {', '.join(names[:12]) or 'no modules at all'}.",
    )


def _check_disjoint(names: list[str], paths: list[str]) -> None:
    # sorted by their parts a name stands right before those inside it
    ordered = sorted(names, key=lambda name: name.split("."))
    for outer, name in pairwise(ordered):
        if within(name, outer):
            what = f"{name!r} twice" if outer == name else f"{outer!r} and, inside it, {name!r}"
            raise PartitionError(f"layers={_paste(paths)} names {what}.", hint="Name every layer once.")


def _check_not_inside_compiled(module: nn.Module, names: list[str]) -> None:
    compiled = [path for path, part in module.named_modules() if is_compiled_module(part)]
    for name in names:
        around = next((path for path in compiled if path != name and within(name, path)), None)
        if around is not None:
            raise PartitionError(
                f"Layer {name!r} lies inside {around or type(module).__name__!r}, which is compiled as a whole: calls "
                "of its layers cannot be seen.",
                hint="Compile the layers one by one.",
            )


def _paste(paths: Sequence[str]) -> str:
    return repr(paths[0]) if len(paths) == 1 else "[" + ", ".join(f'"{path}"' for path in paths) + "]"


def _instead(repeated: Layers) -> str:
    """What to do with a sequence of modules that all occur several times."""
    names = {id(layer): name for name, layer in reversed(repeated)}  # the first name of each
    once = [(name, layer) for name, layer in repeated if names[id(layer)] == name]
    times = len(repeated) // len(once)
    in_turn = [id(layer) for _, layer in repeated] == times * [id(layer) for _, layer in once]
    inner = [name for name, _ in once]
    if len(once) == 1:
        calls = registered(once[0][1])
        while len(calls) == 1 and calls[0].calls:
            calls = calls[0].calls
        inner = [f"{inner[0]}.{call.name}" for call in calls] if len(calls) > 1 else []
    if not in_turn or not inner:
        return "A module called several times cannot be divided over stages; name modules inside or around it."
    begin = "Let" if len(once) > 1 else "If the modules inside run one after the other, let"
    return f"{begin} a training step come back to them: layers={_paste(inner)}, passes={times}."
