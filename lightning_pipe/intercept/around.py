"""What layers read of the modules around them, most of all of their LightningModule.

A layer may refer to its LightningModule, whose attributes steps change. Only the last stage completes the runs of the
step, so other stages have there what was before the batch::

    def training_step(self, batch):         stage 0                             stage 1, the last one
        h = self.layers[0](batch)           reads self.gain: 1.0, each time     answers: 1.0, then 0.9
        loss = self.layers[1](h).mean()     ends at the cut                     reads self.gain: 1.0, then 0.9
        self.gain *= 0.9                                                        0.9, then 0.81

So the stage that runs a layer tells the last stage what the layer has read, and that compares it with its own, which is
what one device has.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import Read
from lightning_pipe.intercept.kept_state import content_of, has_content, holder_of, is_state, shown
from lightning_pipe.intercept.shared_state import written
from lightning_pipe.intercept.tensor_state import same_values
from lightning_pipe.torch_internals import DisableTorchFunction

_COMPARED = 1024
"""Bytes up to which tensors are compared."""
_MISSING = object()


class Around:
    """The modules that are no parts of layers or outside modules, and what these read of them.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = {id(part): name for name, part in module.named_modules()}
        self._module = module

    def told(self, part: nn.Module, attribute: str) -> Read | None:
        """What a layer has read, for other stages; ``None`` if it cannot be compared.

        Args:
            part: of this module.
            attribute: its name.
        """
        value, name = holder_of(part, attribute).get(attribute, _MISSING), self._names.get(id(part))
        if isinstance(value, Tensor):
            comparable = type(value) is Tensor and value.nbytes <= _COMPARED and not value.requires_grad
        else:
            comparable = is_state(value)
        data = shown(value) if comparable and name is not None else None
        return None if data is None or name is None else Read(name, attribute, data)

    def check(self, reader: str, reads: Sequence[Read]) -> None:
        """What a layer has read where it runs must be what it would read here.

        Args:
            reader: the layer.
            reads: what it has read.

        Raises:
            CutError: it is not.
        """
        for read in reads:
            part = self._module.get_submodule(read.module)
            value = holder_of(part, read.attribute).get(read.attribute, _MISSING)
            # what layers have computed has no value here yet, and its stage knows it is the same
            if isinstance(value, Tensor) and (type(value) is not Tensor or value.requires_grad):
                continue
            if not alike(value, pickle.loads(read.data)):
                raise CutError(
                    f"'{reader}' reads `{written(read.module, read.attribute)}` in its forward pass, which depends on "
                    "what the step has set for other micro-batches or batches: its stage has an older value than one "
                    "device would.",
                    hint="Compute it from the batch alone before the layers are called, or change it in a hook such as "
                    "on_train_batch_end; with micro_batches=1 (in evaluations stream_evaluation=False) the step may "
                    "change it.",
                )


def alike(one: Any, other: Any) -> bool:
    """Whether two values say the same; the order of keys does not count."""
    return _equal(one, other, set())


def _equal(one: Any, other: Any, seen: set[int]) -> bool:
    if type(one) is not type(other) or id(one) in seen:
        return type(one) is type(other)
    if isinstance(one, (Tensor, np.ndarray)):
        with DisableTorchFunction(), torch.no_grad():
            return one.shape == other.shape and same_values(one.cpu() if isinstance(one, Tensor) else one, other)
    if has_content(one):
        one, other = content_of(one), content_of(other)
    if not isinstance(one, (list, tuple, deque, dict)):
        return bool(one == other or (one != one and other != other))
    seen.add(id(one))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key], seen) for key, value in one.items())
    return len(one) == len(other) and all(_equal(item, twin, seen) for item, twin in zip(one, other, strict=True))
