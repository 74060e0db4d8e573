"""Where the costs of a module are kept from run to run."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import nn

from lightning_pipe.partition import Layers
from lightning_pipe.partition.cache import cache_path
from lightning_pipe.planning.cost_profile import CostProfile
from lightning_pipe.planning.layer_sizes import of_module, without_times


class ProfileStore:
    """The profile of one module on disk, from `lightning-pipe profile`.

    The module is taken as it is when the store is made, see `cache_path`.

    Args:
        module: the module.
        layers: its layer sequence.
        conditions: of this run.
        folder: where; by default ``$LIGHTNING_PIPE_CACHE`` or ``~/.cache/lightning_pipe``.

    Attributes:
        path: the file.
        module: its layers and parameters, without times.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Layers,
        conditions: Mapping[str, str],
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.path = cache_path(module, ["costs", *(name for name, _ in layers)], ".profile.json", folder)
        self.module = without_times(module, layers)
        self.conditions = conditions

    def load(self, *names: str) -> CostProfile | None:
        """The profile, with the parameters that are frozen now; ``None`` if there is none.

        Args:
            names: of the conditions that it must have been measured under.

        Raises:
            ConfigurationError: it cannot be read, or was measured under others.
        """
        if not self.path.exists():
            return None
        stored = CostProfile.load(self.path)
        stored.check({name: self.conditions[name] for name in names})
        return of_module(stored, self.module)
