"""The command line: a parser for the command that is asked for, made from the signature of what it runs."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn, get_type_hints

from jsonargparse import ArgumentParser, DefaultHelpFormatter
from jsonargparse.typing import register_type

from lightning_pipe.errors import PipeError

_PROGRAM = "lightning-pipe"


class _Command(NamedTuple):
    """The module that has the command's function, and what to type."""

    module: str
    summary: str
    examples: tuple[str, ...]


_COMMANDS = {
    "schedule": _Command(
        "lightning_pipe.planning.schedule_command",
        "draw, simulate and export a schedule, or compare all",
        ("1f1b --ranks 4 --micro-batches 8", "compare", "interleaved --options.virtual_stages 3 --png picture.png"),
    ),
    "plan": _Command(
        "lightning_pipe.planning.command",
        "show how a module would be cut",
        ("my_project.models:Net --arguments.layers 24 --ranks 4", "my_project.models:Net --balance [4,2]"),
    ),
    "search": _Command(
        "lightning_pipe.planning.command",
        "predict all configurations, and show the best ten",
        ("my_project.models:Net --ranks 8 --global-batch 256 --memory 16GiB",),
    ),
    "profile": _Command(
        "lightning_pipe.profiling.command",
        "measure what a module costs on this machine",
        ("my_project.models:Net --batch my_project.data:batch --ranks 2 --sizes [1,4]",),
    ),
}


class _Help(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Leaves the lines of examples alone."""


class _Parser(ArgumentParser):
    """Mistakes are answered with one line and exit code 2."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        told = " ".join(message.split())
        if found := re.fullmatch(r'Parser key "([^"]+)": .*[Vv]alue: (.*)', told):
            told = f"--{found[1]} cannot be {found[2]!r}"
        _fail(f"{told} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: the arguments, by default those of the process.
    """
    name, *words = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if name in ("-h", "--help"):
        print(_overview())
        return
    if name not in _COMMANDS:
        _fail(f"there is no command {name!r}; known are {', '.join(_COMMANDS)}")
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            _run(name, words)
            sys.stdout.flush()
        except PipeError as error:
            _fail(" ".join(str(error).split()))
        except BrokenPipeError:
            # the reader (`| head`) has seen enough; the interpreter must not find the pipe again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(name: str, words: Sequence[str]) -> None:
    """Call the function of a command with what the command line gives to its parameters.

    A parameter that is a dataclass is given by the options of its fields, in a group of their own; a parameter of the
    same name as a field is the field's option.
    """
    command = _COMMANDS[name]
    # no function is named as the command: jsonargparse looks for it in the packages around it, too, and
    # `lightning_pipe.plan` imports torch, which takes seconds
    function: Callable[..., None] = getattr(importlib.import_module(command.module), f"run_{name}")
    register_type(Fraction, fail_already_registered=False)
    examples = "\n".join(f"  {_PROGRAM} {name} {words}" for words in command.examples)
    parser = _Parser(prog=f"{_PROGRAM} {name}", epilog=f"examples:\n{examples}", formatter_class=_Help)
    hints = get_type_hints(function)
    groups: dict[str, Any] = {each: hint for each, hint in hints.items() if is_dataclass(hint)}
    parser.add_function_arguments(function, as_positional=True, skip=set(groups))
    for kind in groups.values():
        parser.add_class_arguments(kind, skip=set(hints))
    values = parser.parse_args([_underscored(word) for word in words]).as_dict()
    given: dict[str, Any] = {each: values[each] for each in hints if each in values}
    for each, kind in groups.items():
        given[each] = kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})
    function(**given)


def _underscored(word: str) -> str:
    """``--micro-batches=8`` as Python spells it."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}"


def _overview() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.summary}" for name, command in _COMMANDS.items()]
    head = ["Pipeline parallelism for PyTorch Lightning.", "", f"usage: {_PROGRAM} COMMAND …", "", "commands:"]
    return "\n".join([*head, *lines, "", f"{_PROGRAM} COMMAND --help has the options of each."])


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"{_PROGRAM}: note: {message}", file=sys.stderr)


def _fail(message: str) -> NoReturn:
    print(f"{_PROGRAM}: error: {message}", file=sys.stderr)
    raise SystemExit(2)
