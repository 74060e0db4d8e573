"""What all recipes' LightningModules share: how their optimizer and learning rate schedule are made."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
from torch import nn
from typing_extensions import override

from recipes.errors import RecipeError
from recipes.optimizers import MakeOptimizer, MakeScheduler, decay_groups

printed = logging.getLogger("recipes.printed")  # goes into the log file only


class Trained(L.LightningModule):
    """A LightningModule with an optimizer that spares biases and norms from weight decay.

    A subclass that hands ``**network`` on to what makes its network names that: ``class GPT2(Trained, network=gpt2)``.
    The network's arguments are then part of its signature, so each is written at one place, and configured by it; all
    but those that the module gives itself: ``class Denoiser(Trained, network=UNet, given=("inputs",))``.

    Args:
        weight_decay: on matrices and convolutions only.

    Attributes:
        make_optimizer: makes the optimizer from parameter groups; needed for training only.
        make_scheduler: makes the learning rate schedule from the optimizer and the number of steps; None keeps it
            constant.
        head: what names of parameters and buffers begin with that know the classes: a transfer begins them anew.
    """

    model: Any  # the network
    make_optimizer: MakeOptimizer | None = None
    make_scheduler: MakeScheduler | None = None
    head: tuple[str, ...] = ()

    def __init_subclass__(
        cls, network: Callable[..., nn.Module] | None = None, given: Sequence[str] = (), **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if network is not None or "__init__" in vars(cls):  # a signature of its own, not that of its base
            cls.__signature__ = _joined(cls.__init__, network, given)  # type: ignore[attr-defined]

    def __init__(self, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.weight_decay = weight_decay

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the network: on what `example_input_array` is an example of, where a module has one."""
        return self.model(*args, **kwargs)

    @override
    def configure_optimizers(self) -> Any:
        if self.make_optimizer is None:
            raise TypeError(f"{type(self).__name__} has no make_optimizer, so it can be evaluated but not trained.")
        optimizer = self.make_optimizer(decay_groups(self, self.weight_decay))
        if self.make_scheduler is None:
            return optimizer
        schedule = self.make_scheduler(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.strict_loading:
            return
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: state[name] for name in state if not name.startswith(self.head)}
        own = [name for name, _ in self.named_parameters() if not name.startswith(self.head)]
        missing = [name for name in own if name not in state]
        if missing:
            raise RecipeError(
                f"The checkpoint lacks {len(missing)} of the {len(own)} parameters that a transfer takes over, such as "
                f"{missing[0]}.",
                hint="transfer=true needs a checkpoint of the same model, but for its head.",
            )
        # where the other run was in its own data
        checkpoint.pop(type(self.trainer.datamodule).__qualname__, None)  # type: ignore[attr-defined]

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the first process, and puts the same into the log: a pipeline tells its plan this way."""
        super().print(*args, **kwargs)
        if self.trainer.is_global_zero:
            printed.info("%s", "\n".join(map(str, args)))


def _joined(
    constructor: Callable[..., None], network: Callable[..., nn.Module] | None, given: Sequence[str]
) -> inspect.Signature:
    """The signature of a constructor with the arguments of the network in the place of its ``**network``."""
    own = {name: one for name, one in _evaluated(constructor).items() if name != "self"}
    if network is None:
        return inspect.Signature(list(own.values()))
    own = {name: one for name, one in own.items() if one.kind is not one.VAR_KEYWORD}
    passed = {name: one for name, one in _evaluated(network).items() if name not in own and name not in given}
    return inspect.Signature([one.replace(kind=one.KEYWORD_ONLY) for one in (*passed.values(), *own.values())])


def _evaluated(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function, eval_str=True).parameters
