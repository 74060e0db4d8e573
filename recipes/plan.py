"""Shows how a recipe would be cut, without running it: ``python -m recipes.plan experiment=… size=paper``.

The model is built without weights, so any size can be planned anywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_pipe.errors import PipeError
from recipes import command_line, config
from recipes.errors import RecipeError, sentence


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

    from lightning_pipe.planning.make import plan
    from lightning_pipe.planning.render import plan_text
    from recipes import job

    if settings.pipe is None:
        raise RecipeError("pipe=none has no stages to plan.", hint="Choose a schedule: pipe=1f1b.")
    with torch.device("meta"):
        module = job.make_module(settings)
    given = instantiate(settings.pipe, _target_="builtins.dict", _convert_="all")
    options = {name: given[name] for name in ("schedule", "stages", "layers", "balance", "micro_batches", "recompute")}
    options |= {"batch": settings.data.batch_size, "accumulation": settings.trainer.accumulate_grad_batches}
    ranks_of_pipe, replicas = given["pipeline_parallel_size"], given["data_parallel_size"]
    if replicas != "auto":
        options["replicas"] = replicas
    for ranks in settings.ranks or ([4, 8, 16] if ranks_of_pipe == "auto" else [ranks_of_pipe]):
        try:
            text = plan_text(plan(module, ranks, **options), width=130)
            yield text if options["recompute"] == "never" else f"{text}\nRecompute {options['recompute']}"
        except PipeError as error:
            yield f"{ranks} ranks: {error}"


if __name__ == "__main__":
    command_line.run(show, "hydra=plan")
