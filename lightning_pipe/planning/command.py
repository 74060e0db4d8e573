"""``lightning-pipe plan package.module:Name --ranks 4``: how a module would be cut, without starting processes."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shutil
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_pipe.config import Sharding
from lightning_pipe.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

FORM = "package.module:Name"
_DIVIDED: dict[str, Sharding] = {"state": True, "gradients": "gradients"}
_REMEDY = "Give the values it needs with --argument NAME=VALUE, or name a function that makes the module."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = "Show how a module would be cut. It is made without weights: any size can be planned anywhere."
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add("module", metavar=FORM, help="a LightningModule, or a function that makes one")
    pair = partial(add, type=option, action="append", default=[], metavar="NAME=VALUE")
    pair("--argument", help="an argument of the module or function, such as layers=24")
    number = partial(add, type=int, metavar="N")
    number("--ranks", default=4, help="ranks in the pipeline (default: %(default)s)")
    number("--batch-size", default=32, help="samples in a batch (default: %(default)s)")
    number("--replicas", default=1, help="pipelines side by side (default: %(default)s)")
    number("--nodes", default=1, help="that the processes are on (default: %(default)s)")
    add("--rank-order", choices=("pipeline", "replicas"), default="pipeline", help="whose ranks share a node")
    add("--shard-optimizer", choices=tuple(_DIVIDED), help="what holders of a parameter divide")
    number("--micro-batches", help="micro-batches in a batch (default: as in training)")
    number("--stages", help="stages of the module (default: as many as the schedule needs)")
    number("--passes", default=1, help="of a training step over the layers (default: %(default)s)")
    add("--schedule", default="1f1b", metavar="NAME", help="schedule (default: %(default)s)")
    pair("--option", help="an option of the schedule, such as virtual_stages=3")
    add("--accelerator", choices=("cpu", "gpu"), default="gpu", help="where it will run (default: %(default)s)")
    add("--layers", action="append", metavar="NAME", help="dotted name of the layer sequence, or several")
    add("--balance", type=_balance, default="parameters", metavar="N,N,…", help="layers of each stage, or flops")
    _add_search(parser)


def _add_search(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search", "Predict all configurations, and show the best ten.")
    add = group.add_argument
    add("--search", action="store_true", help="look for the fastest; --ranks counts all processes")
    add(
        "--profile",
        metavar="FILE",
        help="costs from `lightning-pipe profile` (a search goes by parameters without)",
    )
    add("--memory", type=_bytes, metavar="SIZE", help="that each process may hold, such as 16GiB")
    add("--pipeline-ranks", type=int, metavar="N", help="ranks of a pipeline (default: all divisors are tried)")
    add("--schedules", metavar="NAME,…", help="to look among (default: all with a flush)")
    add("--png", metavar="PATH", help="draw where the time of the best goes (.png, .svg or .pdf)")


def _bytes(text: str) -> float:
    """The bytes that ``16GiB``, ``500MB`` or a plain number stand for."""
    match = re.fullmatch(r"([0-9.]+)\s*(?:([KMGT])(i?)B?)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 16GiB, 500MB or 1000000")
    number, letter, binary = match.groups()
    power = "KMGT".index(letter.upper()) + 1 if letter else 0
    return float(number) * float((1024 if binary else 1000) ** power)


def _search(values: argparse.Namespace, module: nn.Module) -> None:
    from lightning_pipe.partition.choice import layers_before_run
    from lightning_pipe.planning.cost_profile import CostProfile
    from lightning_pipe.planning.layer_sizes import of_module
    from lightning_pipe.planning.search import search

    if values.passes != 1:
        raise ConfigurationError(
            f"A search predicts one pass over the layers, not {values.passes}.",
            hint="Leave out --search to plan one configuration, or --passes.",
        )
    costs: nn.Module | CostProfile = module
    if values.profile is not None:
        costs = of_module(CostProfile.load(values.profile), module, layers_before_run(module, values.layers, 1))
    found = search(
        costs,
        values.ranks,
        values.batch_size,
        memory=values.memory,
        families=None if values.schedules is None else values.schedules.split(","),
        pipeline_parallel_size=values.pipeline_ranks,
        layers=values.layers,
    )
    print(found)
    if values.png is not None:
        try:
            found.plot(values.png)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{values.png} cannot be written: {error}.") from error
        print(f"wrote {values.png}")


def option(text: str) -> tuple[str, Any]:
    """A name and a value from a command line."""
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _balance(text: str) -> list[int] | str:
    if text in ("parameters", "flops"):
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 4,2,2") from None


def _run(values: argparse.Namespace) -> None:
    # torch and lightning take seconds, and drawing schedules needs neither
    from lightning_pipe import schedules
    from lightning_pipe.planning.cost_profile import CostProfile
    from lightning_pipe.planning.make import plan
    from lightning_pipe.planning.render import plan_text

    module = made_module(values.module, dict(values.argument))
    if values.search:
        _search(values, module)
        return
    made = plan(
        module,
        values.ranks,
        batch=values.batch_size,
        schedule=schedules.get(values.schedule, **dict(values.option)),
        stages="auto" if values.stages is None else values.stages,
        micro_batches="auto" if values.micro_batches is None else values.micro_batches,
        layers=values.layers,
        balance=values.balance,
        accelerator=values.accelerator,
        profile=None if values.profile is None else CostProfile.load(values.profile),
        replicas=values.replicas,
        nodes=values.nodes,
        rank_order=values.rank_order,
        passes=values.passes,
        shard_optimizer=_DIVIDED.get(values.shard_optimizer, False),
    )
    print(plan_text(made, width=shutil.get_terminal_size((100, 24)).columns))


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


def made_module(place: str, arguments: dict[str, Any], device: str = "meta") -> nn.Module:
    """The module that a place makes; by default without values in its parameters.

    Raises:
        ConfigurationError: it cannot be made, or is no module.
    """
    import torch
    from torch import nn

    make = imported(place)
    try:
        with torch.device(device):
            module = make(**arguments)
    except Exception as error:
        raise ConfigurationError(f"{place} failed with {type(error).__name__}: {error}", hint=_REMEDY) from error
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"{place} made a {type(module).__name__}, not a module.", hint=_REMEDY)
    return module
