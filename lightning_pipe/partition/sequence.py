"""Finds the layer sequence of a module: the flat list of layers that the stages are cut from."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_pipe.errors import PartitionError
from lightning_pipe.text import amount, nearest, several

Layers = list[tuple[str, nn.Module]]

CLEAR_SHARE = 0.6
"""A sequence is taken without being named if it holds at least this share of the parameters …"""

RIVAL_SHARE = 0.2
"""… and no sequence disjoint from it holds this much."""


def find_layers(module: nn.Module, layers: str | Sequence[str] | None = None) -> Layers:
    """Returns the layers of a module in the order in which they run, with their dotted names.

    The layers are the children of an ``nn.Sequential`` or ``nn.ModuleList``. Nested ``nn.Sequential`` and containers
    that cannot be called themselves are flattened at any depth. A module that occurs more than once is not a layer but
    code between the layers: it is held wherever it is used.

    Args:
        module: the whole module, usually a LightningModule.
        layers: dotted path, or paths in the order in which they run. ``*`` stands for any part of a path between two
            dots. A path names a container (its children are the layers) or one layer. ``None`` finds the sequence if
            the choice is clear: it holds at least 60 % of the parameters and no disjoint one holds 20 %.

    Returns:
        Pairs of dotted name and layer.

    Raises:
        PartitionError: nothing is found, the choice is not clear, a path leads nowhere or a layer is named twice.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
        >>> [name for name, _ in find_layers(net)]
        ['0', '1.0', '1.1']
    """
    if layers is None:
        return _find(module)
    return _named(module, [layers] if isinstance(layers, str) else list(layers))


def parameter_count(modules: Sequence[nn.Module]) -> int:
    """Number of parameters in the modules, shared ones counted once; parameters not yet materialised count 0."""
    unique = {id(p): p for m in modules for p in m.parameters()}
    return sum(0 if is_lazy(p) else p.numel() for p in unique.values())


def finer_path(module: nn.Module, layers: Layers) -> str | None:
    """A wildcard path to the sequences inside the given layers, if there are any."""
    for name, layer in layers:
        for inner, candidate in layer.named_modules():
            if _is_container(candidate) and len(_flatten(inner, candidate)) > 1:
                head, _, _ = name.rpartition(".")
                return ".".join(part for part in (head, "*", inner) if part)
    return None


def longer_sequences(module: nn.Module, layers: int) -> list[str]:
    """The paths of sequences with at least so many layers, those with most parameters first."""
    found: list[tuple[int, str]] = []
    for path, part in module.named_modules():
        if path and _is_container(part) and len(_without_repeated(_flatten(path, part))) >= layers:
            found.append((parameter_count([part]), path))
    return [path for _, path in sorted(found, key=lambda pair: -pair[0])]


@dataclass(frozen=True)
class _Candidate:
    """A container that could be the sequence."""

    path: str
    layers: Layers
    parameters: dict[int, int]

    @property
    def size(self) -> int:
        return sum(self.parameters.values())

    @property
    def largest_layer(self) -> int:
        return max(parameter_count([layer]) for _, layer in self.layers)

    def besides(self, other: _Candidate) -> int:
        """Parameters of the other that are not in this one."""
        return sum(size for key, size in other.parameters.items() if key not in self.parameters)


def _find(module: nn.Module) -> Layers:
    total = parameter_count([module])
    candidates = _candidates(module)
    clear = [
        one
        for one in candidates
        if one.size >= CLEAR_SHARE * total > 0
        and not any(
            one.besides(other) >= RIVAL_SHARE * total and _disjoint(one.path, other.path) for other in candidates
        )
    ]
    if not clear:
        raise _unclear(module, candidates, total)
    # the finest: of a stem, a body and a head it is the blocks of the body. First found is outermost
    return min(clear, key=lambda one: (one.largest_layer, -one.size)).layers


def _named(module: nn.Module, paths: list[str]) -> Layers:
    if not paths:
        raise PartitionError("layers=[] names no layer.", hint='Name the sequence, e.g. layers="model.layers".')
    flat: Layers = []
    for path in paths:
        expanded = [
            layer
            for name, found in _expand(module, path, alone=len(paths) == 1)
            for layer in (_flatten(name, found) if _is_container(found) else [(name, found)])
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


def _candidates(module: nn.Module) -> list[_Candidate]:
    """Sequences of two or more layers in the order of registration, without those inside one of several like blocks.

    Nothing inside compiled code is a candidate: the calls of its layers cannot be seen.
    """
    found: list[_Candidate] = []
    inside: list[str] = [path for path, part in module.named_modules() if is_compiled_module(part)]
    for path, container in module.named_modules():
        if not isinstance(container, nn.Sequential | nn.ModuleList) or any(_within(path, outer) for outer in inside):
            continue
        layers = _without_repeated(_flatten(path, container))
        if len(layers) < 2 or next(container.parameters(), None) is None:
            continue
        kinds = Counter(type(layer) for _, layer in layers)
        inside += [name for name, layer in layers if kinds[type(layer)] > 1]
        inside += [name for name, nested in _flattened_containers(path, container) if nested is not container]
        parameters = {id(p): 0 if is_lazy(p) else p.numel() for p in container.parameters()}
        found.append(_Candidate(path, layers, parameters))
    return found


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def is_transparent(module: nn.Module) -> bool:
    """Whether a call of the container is nothing but calls of its children in turn, which can be told apart."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return True
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return plain and not is_compiled_module(module)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether calls inside the module cannot be seen."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


def _flatten(path: str, container: nn.Module) -> Layers:
    layers: Layers = []
    for key, child in container._modules.items():  # named_children() leaves out repeated ones
        if child is None:
            continue
        name = f"{path}.{key}" if path else key
        layers += _flatten(name, child) if is_transparent(child) else [(name, child)]
    return layers


def _flattened_containers(path: str, container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield path, container
    for key, child in container._modules.items():
        if child is not None and is_transparent(child):
            yield from _flattened_containers(f"{path}.{key}" if path else key, child)


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
    guess = nearest(path, longer_sequences(module, 2) if alone else names)
    raise PartitionError(
        f"layers: {type(module).__name__} has no module {path!r}.",
        hint=f"Did you mean layers={guess!r}?" if guess else f"It has {', '.join(names[:12]) or 'no modules at all'}.",
    )


def _check_disjoint(names: list[str], paths: list[str]) -> None:
    # sorted by their parts a name stands right before those inside it
    ordered = sorted(names, key=lambda name: name.split("."))
    for outer, name in pairwise(ordered):
        if _within(name, outer):
            what = f"{name!r} twice" if outer == name else f"{outer!r} and, inside it, {name!r}"
            raise PartitionError(f"layers={_paste(paths)} names {what}.", hint="Name every layer once.")


def _check_not_inside_compiled(module: nn.Module, names: list[str]) -> None:
    compiled = [path for path, part in module.named_modules() if is_compiled_module(part)]
    for name in names:
        around = next((path for path in compiled if path != name and _within(name, path)), None)
        if around is not None:
            raise PartitionError(
                f"Layer {name!r} lies inside {around or type(module).__name__!r}, which is compiled as a whole: calls "
                "of its layers cannot be seen.",
                hint="Compile the layers one by one.",
            )


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _disjoint(one: str, other: str) -> bool:
    return not _within(one, other) and not _within(other, one)


def _paste(paths: Sequence[str]) -> str:
    return repr(paths[0]) if len(paths) == 1 else "[" + ", ".join(f'"{path}"' for path in paths) + "]"


def _option(paths: Sequence[str]) -> str:
    """How code and the command line name layers."""
    option = shlex.quote(paths[0] if len(paths) == 1 else f"[{','.join(paths)}]")
    return f"PipeStrategy(layers={_paste(paths)}), on the command line --layers {option}"


def _parts(path: str, module: nn.Module) -> list[str]:
    """The outermost modules inside that hold parameters, if they are several."""
    children = [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
    children = [(name, child) for name, child in children if parameter_count([child])]
    if len(children) == 1:
        return _parts(*children[0])
    parts = [
        part
        for name, child in children
        for part in (_flatten(name, child) if _is_container(child) else [(name, child)])
    ]
    return [name for name, _ in parts]


def _instead(repeated: Layers) -> str:
    """What to do with a sequence of modules that all occur several times."""
    names = {id(layer): name for name, layer in reversed(repeated)}  # the first name of each
    once = [(name, layer) for name, layer in repeated if names[id(layer)] == name]
    times = len(repeated) // len(once)
    in_turn = [id(layer) for _, layer in repeated] == times * [id(layer) for _, layer in once]
    inner = [name for name, _ in once] if len(once) > 1 else _parts(*once[0])
    if not in_turn or not inner:
        return "A module called several times cannot be divided over stages; name modules inside or around it."
    begin = "Let" if len(once) > 1 else "If the modules inside run one after the other, let"
    return f"{begin} a training step come back to them: layers={_paste(inner)}, passes={times}."


def _unclear(module: nn.Module, candidates: list[_Candidate], total: int) -> PartitionError:
    name = type(module).__name__
    if not candidates:
        parts = _parts("", module)
        compiled = any(is_compiled_module(part) for part in module.modules())
        return PartitionError(
            f"{name} holds no nn.Sequential or nn.ModuleList of at least 2 layers that the stages could be cut from.",
            hint="Compile the layers one by one; code compiled as a whole cannot be cut."
            if compiled
            else f"If these run one after the other, name them: {_option(parts)}."
            if parts
            else "Build an nn.Sequential or nn.ModuleList of layers: a single module cannot be divided.",
        )
    outermost = [one for one in candidates if not any(one is not o and _within(one.path, o.path) for o in candidates)]
    table = "\n".join(
        f"  {one.path or '(the module itself)':40s} {several(len(one.layers), 'layer'):>10s}  "
        f"{amount(one.size):>7s} parameters  {100 * one.size / max(total, 1):3.0f} %"
        for one in outermost
    )
    worthwhile = [one.path for one in outermost if one.size >= 0.01 * total] or [outermost[0].path]
    return PartitionError(
        f"Which layers of {name} to cut is not clear: a sequence is taken by itself if it holds "
        f"{100 * CLEAR_SHARE:.0f} % of the {amount(total)} parameters and no other one {100 * RIVAL_SHARE:.0f} %. "
        f"Found:\n{table}",
        hint=f"Name them in the order in which they run: {_option(worthwhile)}.",
    )
