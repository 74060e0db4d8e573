"""What a step calls: which modules, in which order, how often, and how much each computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import flop_registry  # FlopCounterMode leaves hooks on parameters (torch 2.13)

from lightning_pipe.torch_internals import TorchDispatchMode, tree_leaves

Layers = list[tuple[str, nn.Module]]
"""Modules with their dotted names."""


@dataclass
class Call:
    """The call of a module that holds parameters.

    Args:
        name: the module's first dotted name; empty for the whole module.
        work: floating-point operations, or the size of the result where that is more: what is not counted (recurrent
            cells, normalisation) goes over its data at least once.
        calls: those of the module's parts, in their order.
    """

    name: str
    work: float = 0.0
    calls: list[Call] = field(default_factory=list)


class _Operations(TorchDispatchMode):
    """Counts floating-point operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, kwargs = getattr(func, "overloadpacket", None), kwargs or {}
        if kind in flop_registry:
            result = func(*args, **kwargs)
            self.total += flop_registry[kind](*args, **kwargs, out_val=result)
            return result
        with self:  # in inference mode operations arrive that consist of others
            result = func.decompose(*args, **kwargs) if hasattr(func, "decompose") else NotImplemented
        return func(*args, **kwargs) if result is NotImplemented else result


@contextmanager
def recorded(module: nn.Module) -> Iterator[list[Call]]:
    """Record the calls of a module's parts; the list is complete at the end.

    Compiled code is not looked into.

    Args:
        module: the whole module.

    Example:
        >>> import torch
        >>> net = nn.ModuleDict({"second": nn.Linear(2, 3), "first": nn.Linear(4, 2)})
        >>> with recorded(net) as calls:
        ...     _ = net["second"](net["first"](torch.zeros(5, 4)))
        >>> [(call.name, call.work) for call in calls]
        [('first', 80.0), ('second', 60.0)]
    """
    operations, root = _Operations(), Call("")
    stack = [root]

    def begin(call: str, *_: Any) -> None:
        stack[-1].calls.append(Call(call, -operations.total))
        stack.append(stack[-1].calls[-1])

    def end(part: nn.Module, arguments: Any, result: Any) -> None:
        call = stack.pop()
        call.work += operations.total
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        call.work = max(call.work, float(sum(sizes)), _recurrent_work(part, result))

    with ExitStack() as during:
        compiled: list[str] = []
        for name, part in module.named_modules():
            if any(name.startswith(f"{outer}.") for outer in compiled) or "parametrizations" in name.split("."):
                continue
            if not has_parameters(part):
                continue
            if is_compiled_module(part):
                compiled.append(name)
            during.callback(part.register_forward_pre_hook(partial(begin, name), prepend=True).remove)
            during.callback(part.register_forward_hook(end, always_call=True).remove)
        during.enter_context(operations)
        yield root.calls


def registered(module: nn.Module) -> list[Call]:
    """What may be called, guessed from the order of registration; work is the number of parameters.

    Modules of torch are taken for one layer, unless they are containers or whole Transformers.
    """
    calls: list[Call] = []
    names = {id(part): name for name, part in reversed(list(module.named_modules()))}

    def visit(part: nn.Module, into: list[Call], seen: set[int]) -> None:
        for child in part._modules.values():
            if child is None or id(child) in seen or not has_parameters(child):
                continue
            seen.add(id(child))
            if is_transparent(child):
                visit(child, into, seen)
                continue
            work = sum(0 if is_lazy(each) else each.numel() for each in child.parameters())
            into.append(Call(names[id(child)], float(work)))
            if not _is_one_layer(child):
                visit(child, into[-1].calls, seen)

    visit(module, calls, set())
    return calls


def is_transparent(module: nn.Module) -> bool:
    """Whether a call of the container is nothing but calls of its children in turn, which can be told apart."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return True
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return plain and not is_compiled_module(module)


def is_container(module: nn.Module) -> bool:
    """Whether a path that leads to a module names what is in it."""
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def flattened(path: str, container: nn.Module) -> Layers:
    """What is in a container, and in those that are transparent in it, with repeated ones."""
    layers: Layers = []
    for key, child in container._modules.items():  # named_children() leaves out repeated ones
        if child is None:
            continue
        name = f"{path}.{key}" if path else key
        layers += flattened(name, child) if is_transparent(child) else [(name, child)]
    return layers


def is_compiled_module(module: nn.Module) -> bool:
    """Whether calls inside the module cannot be seen."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


def within(path: str, outer: str) -> bool:
    """Whether a path leads to a module, or into it; the empty path to the whole one."""
    return not outer or path == outer or path.startswith(f"{outer}.")


def has_parameters(module: nn.Module) -> bool:
    """Whether a module or a part of it has parameters."""
    return next(module.parameters(), None) is not None


def in_words(calls: Sequence[Call], most: int = 12) -> str:
    """The order of calls as an error tells it.

    Example:
        >>> in_words([Call("stem"), Call("block"), Call("block"), Call("head")])
        'stem, block (2 times), head'
    """
    runs: list[tuple[str, int]] = []
    for call in calls:
        again = bool(runs) and runs[-1][0] == call.name
        runs = [*runs[:-1], (call.name, runs[-1][1] + 1)] if again else [*runs, (call.name, 1)]
    shown = [f"{name} ({times} times)" if times > 1 else name for name, times in runs]
    return ", ".join(shown if len(shown) <= most else [*shown[: most - 1], "…", shown[-1]])


def top(calls: Sequence[Call]) -> list[Call]:
    """The calls that the step itself makes; those of the module's ``forward`` if it calls the module."""
    return [part for call in calls for part in (call.calls if not call.name else [call])]


def every_call(calls: Sequence[Call]) -> Iterator[Call]:
    """All calls in the order in which they begin."""
    for call in calls:
        yield call
        yield from every_call(call.calls)


def work_of(calls: Sequence[Call], names: Sequence[str]) -> list[float]:
    """What some modules do in a step, wherever they are called."""
    work = dict.fromkeys(names, 0.0)
    for call in every_call(calls):
        if call.name in work:
            work[call.name] += call.work
    return [work[name] for name in names]


def in_order(calls: Sequence[Call], names: Sequence[str]) -> bool:
    """Whether some modules are called in this order, to the last one: each once, or several times in a row.

    Others may be left out, as layers are that are dropped at random.
    """
    number = {name: index for index, name in enumerate(names)}
    runs = [number[name] for name, _ in groupby(call.name for call in every_call(calls) if call.name in number)]
    return runs[-1:] == [len(names) - 1] and all(before < after for before, after in pairwise(runs))


def _recurrent_work(part: nn.Module, result: Any) -> float:
    """Operations of a recurrent module, which are not counted on every device: two for each weight and step."""
    if not isinstance(part, nn.RNNBase) or not isinstance(result, tuple):
        return 0.0
    data = result[0].data if not isinstance(result[0], Tensor) else result[0]
    return 2.0 * sum(each.numel() for each in part.parameters()) * data.numel() / max(1, data.shape[-1])


def _is_one_layer(module: nn.Module) -> bool:
    own = type(module).__module__.startswith("torch.nn.")
    open_ones = nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder
    return is_compiled_module(module) or (own and not isinstance(module, open_ones))
