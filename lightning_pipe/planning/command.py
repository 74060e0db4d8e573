"""``lightning-pipe plan package.module:Name --ranks 4``: how a module would be cut, without starting processes."""

from __future__ import annotations

import argparse
import ast
import importlib
import shutil
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_pipe.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

_FORM = "package.module:Name"
_REMEDY = "Give the values it needs with --argument NAME=VALUE, or name a function that makes the module."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = "Show how a module would be cut. It is made without weights: any size can be planned anywhere."
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add("module", metavar=_FORM, help="a LightningModule, or a function that makes one")
    pair = partial(add, type=option, action="append", default=[], metavar="NAME=VALUE")
    pair("--argument", help="an argument of the module or function, such as layers=24")
    number = partial(add, type=int, metavar="N")
    number("--ranks", default=4, help="ranks in the pipeline (default: %(default)s)")
    number("--batch-size", default=32, help="samples in a batch (default: %(default)s)")
    number("--micro-batches", help="micro-batches in a batch (default: as in training)")
    number("--stages", help="stages of the module (default: as many as the schedule needs)")
    add("--schedule", default="1f1b", metavar="NAME", help="schedule (default: %(default)s)")
    pair("--option", help="an option of the schedule, such as virtual_stages=3")
    add("--layers", action="append", metavar="NAME", help="dotted name of the layer sequence, or several")
    add("--balance", type=_balance, default="parameters", metavar="N,N,…", help="layers of each stage")


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
    if text == "parameters":
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 4,2,2") from None


def _run(values: argparse.Namespace) -> None:
    # torch and lightning take seconds, and drawing schedules needs neither
    from lightning_pipe import schedules
    from lightning_pipe.planning.make import plan
    from lightning_pipe.planning.render import plan_text

    made = plan(
        _made(values.module, dict(values.argument)),
        values.ranks,
        batch=values.batch_size,
        schedule=schedules.get(values.schedule, **dict(values.option)),
        stages="auto" if values.stages is None else values.stages,
        micro_batches="auto" if values.micro_batches is None else values.micro_batches,
        layers=values.layers,
        balance=values.balance,
    )
    print(plan_text(made, width=shutil.get_terminal_size((100, 24)).columns))


def _made(place: str, arguments: dict[str, Any]) -> nn.Module:
    """The module, without values in its parameters."""
    import torch
    from torch import nn

    source, colon, name = place.partition(":")
    if not (source and colon and name):
        raise ConfigurationError(
            f"{place!r} is not of the form {_FORM}.", hint="For example my_project.models:MyModel."
        )
    sys.path.insert(0, "")  # as `python -m` does
    try:
        make = getattr(importlib.import_module(source), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{place} cannot be imported: {error}.") from error
    try:
        with torch.device("meta"):
            module = make(**arguments)
    except Exception as error:
        raise ConfigurationError(f"{place} failed with {type(error).__name__}: {error}", hint=_REMEDY) from error
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"{place} made a {type(module).__name__}, not a module.", hint=_REMEDY)
    return module
