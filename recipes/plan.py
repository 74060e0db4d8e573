"""Shows how a recipe would be cut, without running it: ``python -m recipes.plan experiment=… size=paper``.

The model is built without weights, so any size can be planned anywhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import hydra
from hydra.errors import ConfigCompositionException, OverrideParseException
from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_pipe.errors import PipeError
from lightning_pipe.schedules import Family, Schedule
from recipes import config
from recipes.errors import RecipeError, sentence

BYTES_PER_NUMBER = 4
STATES = 3  # besides the weight: its gradient and two moments


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def show(settings: DictConfig) -> None:
    """Prints one plan for every number of ranks."""
    try:
        config.require_experiment(settings)
        config.check(settings)
        for text in plans(settings):
            print(text, end="\n\n")
    except Exception as error:
        if (told := sentence(error)) is None:
            raise
        sys.exit(told)


def plans(settings: DictConfig) -> Iterator[str]:
    """One plan for every number of ranks.

    Args:
        settings: a checked configuration.

    Yields:
        the plan as text, or a sentence that says why there is none.
    """
    import torch

    from recipes import job

    if settings.pipe is None:
        raise RecipeError("pipe=none has no stages to plan.", hint="Choose a schedule: pipe=1f1b.")
    with torch.device("meta"):
        module = job.make_module(settings)
    options = instantiate(settings.pipe, _target_="builtins.dict", _convert_="all")
    for ranks in settings.ranks:
        try:
            yield plan(module, ranks, options, settings.data.batch_size, settings.trainer.accumulate_grad_batches)
        except PipeError as error:
            yield f"{ranks} ranks: {error}"


def plan(module: Any, ranks: int, options: Mapping[str, Any], batch: int, accumulation: int = 1) -> str:
    """The plan of one pipeline.

    Args:
        module: the LightningModule; its parameters may be without values.
        ranks: in the pipeline.
        options: arguments of `lightning_pipe.PipeStrategy`.
        batch: samples in a batch.
        accumulation: batches in an optimizer step.
    """
    from lightning_pipe import schedules
    from lightning_pipe.config import BatchEquation, Layout, micro_batch_count
    from lightning_pipe.partition import divide, find_layers, held_by_stages
    from lightning_pipe.pipeline.topology import Topology
    from lightning_pipe.plan_text import Plan, StagePlan, plan_text

    family = schedules.get(options["schedule"])
    stages = family.placed(ranks, None if options["stages"] == "auto" else options["stages"])[1]
    layers = find_layers(module, options["layers"])
    counts = divide(module, layers, stages, options["balance"])
    micro_batches = micro_batch_count(batch, ranks, options["micro_batches"])
    schedule = family.build(ranks=ranks, micro_batches=micro_batches, stages=stages)
    micro_batches, bubble = predicted(family, schedule)
    topology = Topology.for_schedule(ranks, loss_rank=schedule.placement[0, stages - 1])

    described, names = [], iter(name for name, _ in layers)
    for stage, (count, held) in enumerate(zip(counts, held_by_stages(module, layers, counts), strict=True)):
        holders = {topology.process(0, rank) for (_, place), rank in schedule.placement.items() if place == stage}
        size = sum(one.size for one in held)
        trained = sum(one.size for one in held if one.parameter.requires_grad)
        described.append(
            StagePlan(
                stage=stage,
                ranks=tuple(sorted(holders)),
                layers=tuple(next(names) for _ in range(count)),
                parameters=size,
                trainable=trained,
                bytes=BYTES_PER_NUMBER * (size + STATES * trained),
            )
        )
    equation = BatchEquation(batch, micro_batches, 1, accumulation)
    total = sum(parameter.numel() for parameter in module.parameters())
    note = f"{total:,} parameters; memory is that of weights, gradients and two optimizer moments in 32 bits"
    return plan_text(
        Plan(
            type(module).__name__,
            tuple(described),
            Layout(ranks, 1, stages),
            family.label,
            equation,
            bubble,
            notes=(note,),
        ),
        width=130,
    )


def predicted(family: Family, schedule: Schedule) -> tuple[int, float]:
    """Micro-batches of a batch and the bubble ratio; without a flush, the schedule's own number and the steady state.

    Args:
        family: of the schedule.
        schedule: for the micro-batches that were asked for.
    """
    from lightning_pipe.schedules import stream
    from lightning_pipe.simulate import Costs, simulate

    if schedule.synchronous:
        return schedule.micro_batches, float(simulate(schedule, Costs()).bubble_ratio)
    flow = stream(family, schedule.ranks, schedule.stages)
    batches = 20 * flow.period + 2 * schedule.ranks
    endless = family.build(schedule.ranks, batches * flow.micro_batches, stages=schedule.stages)
    return flow.micro_batches, float(simulate(endless, Costs()).steady_bubble_ratio)


def main() -> None:
    """Runs the command line; a mistake of the user's ends with a sentence."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    config.register()
    given = (word.replace("+experiment=", "experiment=", 1) if word.startswith("+") else word for word in sys.argv[1:])
    sys.argv[1:] = ["hydra=plan", *given]
    try:
        show()
    except (ConfigCompositionException, OverrideParseException) as error:
        sys.exit(str(config.explain(error)))


if __name__ == "__main__":
    main()
