"""Modules that no pipeline can run are refused before they are divided, with what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_pipe.errors import ConfigurationError, PartitionError
from lightning_pipe.parameters.releasing import named_tensors


def check_module(module: nn.Module) -> None:
    """Refuse parameters whose shapes only the first batch will tell, and modules that nobody can take apart.

    Modules whose gradients are no sums over samples are refused, too: losses do not show it.

    Raises:
        PartitionError: there is one, or it is no module.
    """
    if not isinstance(module, nn.Module):
        raise PartitionError(f"A torch.nn.Module is needed, not {module!r:.60}.")
    name = next((name for name, tensor in named_tensors(module) if is_lazy(tensor)), None)
    if name is not None:
        raise PartitionError(
            f"'{name}' has no shape yet (it belongs to a lazy module): a rank without its layer would never learn it.",
            hint="Give the layer its sizes, or run the module once on an example batch before the Trainer gets it.",
        )
    scripted = next((name for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise PartitionError(
            f"'{scripted}' is a module of TorchScript, whose parameters and calls cannot be given to other ranks.",
            hint="Train the module itself, and call torch.jit.script() after fit; scripted functions work. For speed, "
            "compile layers: layer.compile() in setup.",
        )
    by_frequency = next((name for name, part in module.named_modules() if getattr(part, "scale_grad_by_freq", 0)), None)
    if by_frequency is not None:
        raise scaled_by_frequency(f"'{by_frequency}'")


def scaled_by_frequency(what: str) -> PartitionError:
    """The error for gradients that are no sums over samples, for the module or function that computes them."""
    return PartitionError(
        f"{what} has scale_grad_by_freq: it divides gradients by how often an index is in the batch, which a "
        "micro-batch does not know.",
        hint="Leave scale_grad_by_freq=True out.",
    )


def check_division(module: nn.Module, layers: Sequence[tuple[str, nn.Module]], stages: int) -> None:
    """Refuse modules that can be no more than one stage.

    These are models that Transformers has quantised, whose weights are objects of other libraries, and layers that
    change themselves before they are called, which ranks without them cannot follow.

    Raises:
        ConfigurationError: there is one, and there are several stages.
    """
    if stages == 1:
        return
    for name, part in module.named_modules():
        quantizer = getattr(part, "hf_quantizer", None)
        if quantizer is not None:
            method = quantizer.quantization_config.quant_method
            raise ConfigurationError(
                f"'{name}' ({type(part).__name__}) is quantised by {getattr(method, 'value', method)}: such weights "
                "cannot be divided over stages.",
                hint="Load it without quantization_config, in dtype=torch.bfloat16: each rank holds its share alone.",
            )
    for name, layer in layers:
        if any(isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values()):
            raise ConfigurationError(
                f"Layer '{name}' has torch.nn.utils.spectral_norm, a hook that changes the layer's buffers in front of "
                "its call.",
                hint="Use torch.nn.utils.parametrizations.spectral_norm, which does so inside the layer.",
            )
