"""Model caches for generation: of no use in a step that runs once, and out of the sight of other stages."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn


class Caches:
    """Switches the ``use_cache`` of Hugging Face configurations off while steps run; it is on by default there.

    Args:
        module: the user's module.
        tells: whether to say so.
    """

    def __init__(self, module: nn.Module, *, tells: bool = True) -> None:
        configurations = {id(c): c for part in module.modules() if hasattr(c := vars(part).get("config"), "__dict__")}
        self._configurations = list(configurations.values())
        self._told = not tells

    def off(self) -> Iterator[tuple[Any, str, bool]]:
        """What is replaced where there are to be no caches: owners, names and values."""
        switched: list[Any] = [c for c in self._configurations if vars(c).get("use_cache") is True]
        if switched and not self._told:
            self._told = True
            warnings.warn("Model caches (use_cache) are switched off while steps run in a pipeline.", stacklevel=2)
        yield from ((configuration, "use_cache", False) for configuration in switched)
