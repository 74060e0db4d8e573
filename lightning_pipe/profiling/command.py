"""``lightning-pipe profile package.module:Name --ranks 2``: what a module costs on this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.planning.command import FORM, imported, made_module
from lightning_pipe.planning.cost_profile import CostProfile

_NAMED = f"Name a function that makes a batch or a loader, or a data module: --batch {FORM}."


def run_profile(
    module: str,
    arguments: dict[str, Any] | None = None,
    batch: str | None = None,
    ranks: int = 1,
    sizes: list[int] | None = None,
    layers: str | list[str] | None = None,
    rounds: int = 5,
    device: Literal["cpu", "cuda"] = "cpu",
    timeout: float = 1800,
    output: str | None = None,
) -> None:
    """Measure what a module costs on this machine, for runs that are balanced by time, for plans and searches.

    Args:
        module: package.module:Name of a LightningModule, or of a function that makes one.
        arguments: of the module or function, such as --arguments.layers 24.
        batch: package.module:Name of what makes a batch, a loader or a data module (default: the module itself).
        ranks: processes of the coming run's pipeline.
        sizes: samples of micro-batches, such as [1,4] (default: 1, 2, 4 and 8 as far as the batch goes).
        layers: dotted name of the layer sequence, or several.
        rounds: repetitions, of which the median counts.
        device: where to measure.
        timeout: seconds for all of it.
        output: the file (default: where runs of the module look for it, in the cache folder).
    """
    from lightning_pipe.profiling.processes import in_processes

    options = {"micro_batch_sizes": sizes, "layers": layers, "rounds": rounds}
    job = partial(measure_named, place=module, arguments=arguments or {}, batch=batch, options=options)
    found, kept = in_processes(job, ranks, device, timeout)
    path = output or kept
    try:
        found.save(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}.") from error
    measured = ", ".join(map(str, found.sizes))
    print(f"measured {len(found.layers)} layers of {found.module} on micro-batches of {measured} samples: {path}")


def measure_named(
    transport: Any, *, place: str, arguments: dict[str, Any], batch: str | None, options: dict[str, Any]
) -> tuple[CostProfile, Path]:
    """In each process: make the module and its batch, measure, and say where runs look for it."""
    from lightning_pipe.partition import find_layers
    from lightning_pipe.planning.layer_sizes import profile_path
    from lightning_pipe.profiling.measure import measure_profile

    module = made_module(place, arguments, str(transport.device))
    found = measure_profile(transport, module, _batch(module, batch), **options)
    return found, profile_path(module, find_layers(module, options["layers"]))


def _batch(module: Any, place: str | None) -> Any:
    """A batch or a loader: what the named function makes, or what it or the module gives for training."""
    made = module if place is None else imported(place)()
    if not hasattr(made, "train_dataloader"):
        if place is not None:
            return made
        raise ConfigurationError(f"{type(module).__name__} has no train_dataloader.", hint=_NAMED)
    try:
        if made is not module:
            made.prepare_data()
            made.setup("fit")
        return made.train_dataloader()
    except Exception as error:
        raise ConfigurationError(
            f"{type(made).__name__} has no train_dataloader that gives a batch: {error}", hint=_NAMED
        ) from error
