"""``lightning-pipe profile package.module:Name --ranks 2``: what a module costs on this machine."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.planning.command import FORM, imported, made_module, option

_NAMED = f"Name a function that makes a batch or a loader, or a data module: --batch {FORM}."

if TYPE_CHECKING:
    from lightning_pipe.planning.cost_profile import CostProfile
    from lightning_pipe.transport.base import Transport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = "Measure what a module costs on this machine, for `lightning-pipe plan --profile`."
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add("module", metavar=FORM, help="a LightningModule, or a function that makes one")
    pair = partial(add, type=option, action="append", default=[], metavar="NAME=VALUE")
    pair("--argument", help="an argument of the module or function, such as layers=24")
    add("--batch", metavar=FORM, help="makes a batch, a loader or a data module (default: the module itself)")
    number = partial(add, type=int, metavar="N")
    number("--ranks", default=1, help="processes of the coming run's pipeline (default: %(default)s)")
    number("--rounds", default=5, help="repetitions, of which the median counts (default: %(default)s)")
    add("--sizes", type=_sizes, metavar="N,N,…", help="samples of micro-batches (default: 1,2,4,8)")
    add("--layers", action="append", metavar="NAME", help="dotted name of the layer sequence, or several")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: %(default)s)")
    add("--timeout", type=float, default=1800, metavar="SECONDS", help="for all of it (default: %(default)s)")
    add("--output", metavar="PATH", help="the file (default: one per module in the cache folder)")


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,2,4") from None


def _run(values: argparse.Namespace) -> None:
    from lightning_pipe.profiling.processes import in_processes

    options = {"micro_batch_sizes": values.sizes, "layers": values.layers, "rounds": values.rounds}
    job = partial(
        measure_named, place=values.module, arguments=dict(values.argument), batch=values.batch, options=options
    )
    found, kept = in_processes(job, values.ranks, values.device, values.timeout)
    path = values.output or kept
    try:
        found.save(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}.") from error
    sizes = ", ".join(map(str, found.sizes))
    print(f"measured {len(found.layers)} layers of {found.module} on micro-batches of {sizes} samples: {path}")


def measure_named(
    transport: Transport, *, place: str, arguments: dict[str, Any], batch: str | None, options: dict[str, Any]
) -> tuple[CostProfile, Path]:
    """In each process: make the module and its batch, measure, and say where runs look for it."""
    from lightning_pipe.partition import find_layers
    from lightning_pipe.planning.profile_store import ProfileStore
    from lightning_pipe.profiling.measure import measure_profile

    module = made_module(place, arguments, str(transport.device))
    found = measure_profile(transport, module, _batch(module, batch), **options)
    return found, ProfileStore(module, find_layers(module, options["layers"]), {}).path


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
