"""``lightning-pipe plan`` and ``search``: how a module would be cut, and which configuration is fastest.

What runs imports torch, which takes seconds; annotations name nothing of it, since jsonargparse imports what they name.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from typing import Any

from lightning_pipe import schedules
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.planning.options import PlanOptions, SearchOptions

FORM = "package.module:Name"
_REMEDY = "Give the values it needs with --arguments.NAME VALUE, or name a function that makes the module."


def run_plan(
    module: str,
    options: PlanOptions,
    arguments: dict[str, Any] | None = None,
    ranks: int = 4,
    batch: int = 32,
    schedule: str = "1f1b",
    schedule_options: dict[str, Any] | None = None,
    profile: str | None = None,
) -> None:
    """Show how a module would be cut. It is made without weights: any size can be planned anywhere.

    Args:
        module: package.module:Name of a LightningModule, or of a function that makes one.
        options: the rest.
        arguments: of the module or function, such as --arguments.layers 24.
        ranks: in the pipeline.
        batch: samples in a batch.
        schedule: its name.
        schedule_options: such as --schedule_options.virtual_stages 3.
        profile: file of `lightning-pipe profile`: then memory counts activations, and the bubble is that of the stages.
    """
    from lightning_pipe.planning.make import plan
    from lightning_pipe.planning.render import plan_text

    family = schedules.get(schedule, **(schedule_options or {}))
    made = plan(made_module(module, arguments or {}), **{**vars(options), "schedule": family})
    print(plan_text(made, width=shutil.get_terminal_size((100, 24)).columns))


def run_search(
    module: str,
    options: SearchOptions,
    arguments: dict[str, Any] | None = None,
    ranks: int = 4,
    global_batch: int = 32,
    families: list[str] | None = None,
    profile: str | None = None,
) -> None:
    """Predict all configurations of a run, and show the best ten.

    Args:
        module: package.module:Name of a LightningModule, or of a function that makes one.
        options: the rest.
        arguments: of the module or function, such as --arguments.layers 24.
        ranks: processes, over all pipelines.
        global_batch: samples of an optimizer step.
        families: schedules to look among, such as [1f1b,gpipe] (default: all with a flush).
        profile: file of `lightning-pipe profile` (a search goes by parameters without).
    """
    from lightning_pipe.partition import find_layers
    from lightning_pipe.planning.cost_profile import CostProfile
    from lightning_pipe.planning.layer_sizes import of_process
    from lightning_pipe.planning.prediction import Predictor
    from lightning_pipe.planning.search import search

    made = made_module(module, arguments or {})
    if profile is not None:
        layers = find_layers(made, options.layers, 1)
        costs = of_process(made, layers, False, options.tensor_parallel_size, CostProfile.load(profile))
        made = Predictor(costs)
    print(search(made, **vars(options)))


def imported(place: str) -> Any:
    """What a place such as ``package.module:Name`` names.

    Raises:
        ConfigurationError: it cannot be imported.
    """
    source, colon, name = place.partition(":")
    if not (source and colon and name):
        raise ConfigurationError(f"{place!r} is not of the form {FORM}.", hint="For example my_project.models:MyModel.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    try:
        return getattr(importlib.import_module(source), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{place} cannot be imported: {error}.") from error


def made_module(place: str, arguments: dict[str, Any], device: str = "meta") -> Any:
    """The module that a place makes; by default without values in its parameters.

    Raises:
        ConfigurationError: it cannot be made, or is no module.
    """
    import torch

    make = imported(place)
    try:
        with torch.device(device):
            module = make(**arguments)
    except Exception as error:
        raise ConfigurationError(f"{place} failed with {type(error).__name__}: {error}", hint=_REMEDY) from error
    if not isinstance(module, torch.nn.Module):
        raise ConfigurationError(f"{place} made a {type(module).__name__}, not a module.", hint=_REMEDY)
    return module
