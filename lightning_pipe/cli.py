"""The command line: ``lightning-pipe schedule`` draws, simulates and exports, ``plan`` plans, ``consolidate`` joins."""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NoReturn, get_args

from lightning_pipe import schedules
from lightning_pipe.errors import PipeError
from lightning_pipe.planning import command
from lightning_pipe.profiling import command as profile_command
from lightning_pipe.schedules import Schedule
from lightning_pipe.schedules.dependencies import Links, Number, Occupied
from lightning_pipe.simulate import Costs, compare, table
from lightning_pipe.simulate.comparison import simulate_batch
from lightning_pipe.text import memory, several

_PROGRAM = "lightning-pipe"
_COMPARE = "compare"
_TIMES = {
    "forward": 1,
    "backward": 2,
    "backward_input": None,
    "backward_weight": None,
    "recompute_time": None,
    "send": 0,
    "reduce": 0,
    "step": 0,
}
"""The options that a profile takes the place of, with what they are if they are not given."""


class _Parser(argparse.ArgumentParser):
    """Mistakes are answered with one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        _fail(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: the arguments, by default those of the process.
    """
    parser = _Parser(prog=_PROGRAM, description="Pipeline parallelism for PyTorch Lightning.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    _add_schedule(commands.add_parser("schedule", help="draw, simulate and export a schedule"))
    command.add_arguments(commands.add_parser("plan", help="show how a module would be cut"))
    profile_command.add_arguments(commands.add_parser("profile", help="measure what a module costs on this machine"))
    _add_consolidate(commands.add_parser("consolidate", help="write an ordinary checkpoint from a folder of shards"))
    values = parser.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            values.run(values)
            sys.stdout.flush()
        except PipeError as error:
            _fail(" ".join(str(error).split()))
        except BrokenPipeError:
            # the reader (`| head`) has seen enough; the interpreter must not find the pipe again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.description = "Draw a schedule, simulate it and export it."
    parser.set_defaults(run=_schedule)
    add = parser.add_argument
    add("name", help=f"{', '.join(schedules.names())}, the path of a .csv file, or {_COMPARE!r}: a table of all")
    number = partial(add, type=int, metavar="N")
    number("--ranks", default=4, help="ranks in the pipeline (default: %(default)s)")
    number("--micro-batches", default=8, help="micro-batches in a batch (default: %(default)s)")
    number("--stages", help="stages of the model (default: as many as the schedule needs)")
    option = partial(add, type=command.option, action="append", default=[])
    option("--option", metavar="NAME=VALUE", help="an option of the schedule, such as virtual_stages=3")
    modes = ("never", "always", "except_last")
    add("--recompute", choices=modes, default="never", help="recompute activations (default: %(default)s)")
    time = partial(add, type=_cost, metavar="TIME")
    time("--forward", default=1, help="of a forward pass: 1, 0.5, 1/3, or 1,2,1 by stage (default: %(default)s)")
    time("--backward", default=2, help="of a backward pass (default: %(default)s)")
    time("--backward-input", help="of its part for the input, where it is split (default: half)")
    time("--backward-weight", help="of its part for the weights (default: the rest)")
    time("--recompute-time", help="of a repeated forward pass (default: that of a forward pass)")
    time("--send", default=0, help="of a message between ranks (default: %(default)s)")
    time("--reduce", default=0, help="to sum a stage's gradients over its copies (default: %(default)s)")
    time("--step", default=0, help="of a stage's optimizer step (default: %(default)s)")
    add("--occupies", choices=get_args(Occupied), default="neither", help="who is busy during a message")
    add("--links", choices=get_args(Links), default="free", help="which messages travel one after the other")
    add("--profile", metavar="FILE", help="times in seconds from `lightning-pipe profile`, in the place of the above")
    number("--micro-batch-size", help="samples of a micro-batch, with --profile (default: the smallest measured)")
    add("--png", metavar="PATH", help="draw a picture (.png, .svg or .pdf), or all of them into this folder")
    add("--trace", metavar="PATH", help="write a trace for https://ui.perfetto.dev")
    add("--csv", metavar="PATH", help="write the schedule in the format of torch's pipelining")


def _schedule(values: argparse.Namespace) -> None:
    if values.name == _COMPARE:
        _compare(values)
        return
    family = schedules.get(values.name, **dict(values.option))

    def build(micro_batches: int) -> Schedule:
        schedule = family.build(values.ranks, micro_batches, values.stages)
        return schedules.with_recompute(schedule, values.recompute)

    schedule = build(values.micro_batches)
    costs = _costs(values)
    timeline = simulate_batch(schedule, build, costs(schedule) if callable(costs) else costs)
    if values.profile is not None:
        timeline = replace(timeline, unit="s", title=f"{timeline.title}, {Path(values.profile).name}")
    print(timeline)
    writers: dict[str | None, Callable[[str], None]] = {
        values.png: timeline.plot,
        values.trace: timeline.to_chrome_trace,
        values.csv: schedule.to_csv,
    }
    for path, write in writers.items():
        if path is not None:
            _write(path, write)


def _add_consolidate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write an ordinary .ckpt from a folder of shards, with one tensor in memory at a time."
    parser.set_defaults(run=_consolidate)
    add = parser.add_argument
    add("folder", help="of PipeStrategy(save_distributed_checkpoint=True)")
    add("file", nargs="?", help="the checkpoint (default: beside the folder)")


def _consolidate(values: argparse.Namespace) -> None:
    # torch takes seconds, and drawing schedules needs none
    from lightning_pipe.trainer.checkpoints.consolidate import consolidate, default_target

    target = values.file or default_target(values.folder)
    tensors = consolidate(values.folder, target)
    print(f"wrote {target}: {several(tensors, 'tensor')}, {memory(os.path.getsize(target))}")


def _compare(values: argparse.Namespace) -> None:
    if values.option or values.trace or values.csv:
        _fail("schedule compare shows all schedules: it takes no --option, --trace and --csv")
    rows = compare(values.ranks, values.micro_batches, values.stages, _costs(values), values.recompute)
    if all(row.schedule is None for row in rows):
        _fail(rows[0].problem)
    print(table(rows))
    if values.profile is not None:
        print(f"times: from {values.profile}, without optimizer steps and sums of gradients over copies of weights")
    if values.png is not None:
        folder = Path(values.png)
        _write(values.png, lambda _: folder.mkdir(parents=True, exist_ok=True), silent=True)
        for row in rows:
            if row.timeline is not None:
                _write(str(folder / (re.sub(r"\W+", "_", row.label) + ".png")), row.timeline.plot)


def _costs(values: argparse.Namespace) -> Costs | Callable[[Schedule], Costs]:
    if values.profile is not None:
        return _profiled(values)
    if values.micro_batch_size is not None:
        _fail("--micro-batch-size says how many samples the costs of a profile are for: give --profile, too.")
    return Costs(
        forward=values.forward,
        backward=values.backward,
        backward_input=values.backward_input,
        backward_weight=values.backward_weight,
        recompute=values.recompute_time,
        send=values.send,
        reduce=values.reduce,
        step=values.step,
        occupies=values.occupies,
        links=values.links,
    )


def _profiled(values: argparse.Namespace) -> Callable[[Schedule], Costs]:
    """The times of a profile, which leave none of the command line's to be given."""
    # torch takes seconds, and drawing schedules without a profile needs none
    from lightning_pipe.planning.cost_profile import CostProfile
    from lightning_pipe.planning.prediction import schedule_costs

    given = [f"--{name.replace('_', '-')}" for name, usual in _TIMES.items() if getattr(values, name) != usual]
    if given:
        _fail(f"--profile has all times: leave {', '.join(given)} away.")
    profile = CostProfile.load(values.profile)
    return schedule_costs(profile, values.micro_batch_size or min(profile.sizes))


def _write(path: str, write: Callable[[str], None], *, silent: bool = False) -> None:
    try:
        write(path)
    except (OSError, ValueError) as error:
        _fail(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}.")
    if not silent:
        print(f"wrote {path}")


def _cost(text: str) -> Number | list[Number]:
    """A number, exactly: ``1``, ``0.5``, ``1/3``; or several, separated by commas."""
    try:
        numbers = [_exact(part) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 1, 0.5, 1/3 or 1,2,1") from None
    return numbers if len(numbers) > 1 else numbers[0]


def _exact(text: str) -> Number:
    value = Fraction(text)
    return value.numerator if value.denominator == 1 else value


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"{_PROGRAM}: note: {message}", file=sys.stderr)


def _fail(message: str) -> NoReturn:
    print(f"{_PROGRAM}: error: {message}", file=sys.stderr)
    raise SystemExit(2)
