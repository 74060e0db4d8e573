"""How much the layers of a module compute, counted on an example of its input without a single number."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.partition.calls import Layers
from lightning_pipe.torch_internals import tree_map

_REMEDY = 'Use balance="parameters", or pass the costs as a function: balance=lambda layer: …'


def layer_flops(module: nn.Module, layers: Layers) -> list[float]:
    """Floating-point operations of every layer in one forward pass on the module's example.

    Matrix products, convolutions and attention count. What is computed between two layers counts with the first of
    them, what comes before all layers with the first one. Backward passes take twice as long everywhere.

    Args:
        module: with an ``example_input_array``, which its ``forward`` takes.
        layers: the layer sequence.

    Raises:
        ConfigurationError: there is no example, or nothing can be counted with it.
    """
    example = getattr(module, "example_input_array", None)  # Lightning's
    if example is None:
        raise ConfigurationError(
            'balance="flops" needs an example of the input, and the module has none.',
            hint=f"Set self.example_input_array to what forward takes. {_REMEDY}",
        )
    args, kwargs = _called_with(tree_map(_empty, example))
    state = _without_values(module)
    counter = FlopCounterMode(display=False)
    begun = [(0, 0)]  # a layer, and the operations before it
    training = {part: part.training for part in module.modules()}
    try:
        with ExitStack() as during:
            for number, (_, layer) in enumerate(layers):
                during.callback(layer.register_forward_pre_hook(partial(_note, begun, counter, number)).remove)
            during.enter_context(torch.no_grad())
            during.enter_context(counter)
            module.eval()
            torch.func.functional_call(module, state, args, kwargs, tie_weights=False)
    except Exception as error:
        raise ConfigurationError(
            f"The operations of {type(module).__name__} cannot be counted on its example: "
            f"{type(error).__name__}: {error}",
            hint=_REMEDY,
        ) from error
    finally:
        for part, was in training.items():
            part.training = was
    costs = [0.0] * len(layers)
    for (number, before), (_, after) in pairwise([*begun, (0, counter.get_total_flops())]):
        costs[number] += after - before
    if not any(costs):
        raise ConfigurationError(
            f"No operations of {type(module).__name__} were counted: its forward calls none of its layers.",
            hint=_REMEDY,
        )
    return costs


def _note(begun: list[tuple[int, int]], counter: FlopCounterMode, layer: int, *_: Any) -> None:
    begun.append((layer, counter.get_total_flops()))


def _without_values(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer on the meta device, by one name for each module that has it.

    `functional_call` puts what it has replaced back by name: of two names of one module the second would bring back
    what stood in for the first (torch 2.13, with ``tie_weights=True`` also where it is given one name).
    """
    made: dict[int, Tensor] = {}
    return {
        f"{path}.{name}" if path else name: made.setdefault(id(tensor), _empty(tensor))
        for path, part in module.named_modules()
        for name, tensor in (*part.named_parameters("", False, False), *part.named_buffers("", False, False))
    }


def _empty(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf


def _called_with(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of ``forward``, as Lightning passes an example on."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}
