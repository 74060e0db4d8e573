"""``save_pretrained`` needs the whole model: while one of Hugging Face is divided over the ranks, it says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn

from lightning_pipe.errors import ConfigurationError

_METHOD = "save_pretrained"


def refuse_export(*_: Any, **__: Any) -> NoReturn:
    """Stands in the place of the method.

    Raises:
        ConfigurationError: always.
    """
    raise ConfigurationError(
        f"{_METHOD}() of a model that is divided over the ranks.",
        hint="Call trainer.strategy.whole_module() on all ranks after fit, then save on process 0. In a run, save a "
        "checkpoint on all ranks, which has the whole module: trainer.save_checkpoint()",
    )


def divided(module: nn.Module) -> None:
    """Let the Hugging Face models in a module refuse to be exported.

    Args:
        module: the LightningModule.
    """
    for model in _models(module):
        vars(model)[_METHOD] = refuse_export


def whole(module: nn.Module) -> None:
    """Let them be exported as always.

    Args:
        module: the LightningModule.
    """
    for model in _models(module):
        vars(model).pop(_METHOD, None)


def _models(module: nn.Module) -> Iterator[nn.Module]:
    """The models of Transformers, and those of PEFT around them."""
    modules = (("transformers.modeling_utils", "PreTrainedModel"), ("peft", "PeftModel"))
    kinds = tuple(getattr(sys.modules[name], kind) for name, kind in modules if name in sys.modules)
    return (part for part in module.modules() if isinstance(part, kinds))
