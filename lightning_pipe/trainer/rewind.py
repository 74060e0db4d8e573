"""Takes back what a training batch has changed, for a batch that has to run once more in another way."""

from __future__ import annotations

from torch import nn

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.absent_tensor import is_absent
from lightning_pipe.intercept.snapshot import Snapshot


class Rewind:
    """The state of a module on this rank before a batch. Gradients are not part of it.

    Args:
        module: the LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = dict(module.named_modules())
        held = [(part._buffers, name, each) for part in parts.values() for name, each in part._buffers.items()]
        self._attributes = Snapshot(parts, buffers=False)
        self._buffers = [
            (*place, each, each.clone()) for *place, each in held if each is not None and not is_absent(each)
        ]
        frozen = [
            (name, each) for name, each in module.named_parameters() if not (each.requires_grad or is_absent(each))
        ]
        self._frozen = [(name, each, each._version) for name, each in frozen]

    def undo(self, why: str) -> None:
        """Put everything back.

        Args:
            why: the batch has to run again.

        Raises:
            ConfigurationError: it has changed what is not copied before every batch.
        """
        changed = [name for name, each, version in self._frozen if each._version != version]
        if changed:
            raise ConfigurationError(
                f"{why} And the step changes '{changed[0]}', so its first batch cannot run again.",
                hint="Use PipeStrategy(micro_batches=1) from the beginning.",
            )
        self._attributes.undo()
        for buffers, name, buffer, value in self._buffers:
            buffer.data.copy_(value)
            buffers[name] = buffer
