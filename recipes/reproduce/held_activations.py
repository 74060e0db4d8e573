"""What the running engine holds: the activations of the schedules with controllable memory."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial

import torch
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.profiling.processes import in_processes
from lightning_pipe.schedules import Family
from lightning_pipe.simulate import simulate
from lightning_pipe.transport.base import Transport
from recipes.reproduce.bubbles import value
from recipes.reproduce.published import published
from recipes.reproduce.results import Result, Row

NAMES = {"1F1B": "1f1b", "V-ZB": "zero_bubble_v", "V-Half": "vhalf", "V-Min": "vmin"}
"""Ours for the paper's."""


def controllable_memory(ranks: Sequence[int], many: int, tolerance: str) -> Result:
    """Counted on the engine, on few ranks, and by the simulator on so many that the rest of the formulas is small.

    Args:
        ranks: of the pipelines that run, one process each.
        many: ranks of the simulated pipeline.
        tolerance: of a share of 1F1B's activations.
    """
    families = {scheme: schedules.get(name) for scheme, name in NAMES.items()}
    rows = []
    for number in ranks:
        job = partial(count, families=list(families.values()), micro_batches=2 * number)
        found: list[Fraction] = in_processes(job, number, "cpu", timeout=600)
        for scheme, held in zip(families, found, strict=True):
            formula = published("controllable_memory", "Activations")[scheme]
            what = f"{scheme}, most micro-batches held on a rank, p={number}, counted by the engine"
            rows.append(Row(what, value(formula, p=number), held, "exact", note=formula))
    for scheme, share in published("controllable_memory", "Abstract").items():
        peak = max(simulate(families[scheme].build(many, 2 * many)).peak_activations)
        found_share = Fraction(peak, families[scheme].stages_per_rank * many)
        what = f"{scheme}, share of 1F1B's activations, p={many}, simulated"
        rows.append(Row(what, value(share), found_share, tolerance))
    return Result.of(rows)


def count(transport: Transport, families: Sequence[Family], micro_batches: int) -> list[Fraction]:
    """For each schedule the most that a rank has held in a batch, in micro-batches on its share of the model.

    Args:
        transport: of the ranks.
        families: the schedules.
        micro_batches: of the batch.
    """
    ranks = transport.topology.ranks
    found = []
    for family in families:
        stages = ranks * family.stages_per_rank
        net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(stages)))
        pipeline = Pipeline(net, find_layers(net), [1] * stages, family, transport)
        pipeline.partition()
        parts = [torch.ones(1, 2) for _ in range(micro_batches)]
        pipeline.train(lambda _, part, net=net: net(part).sum(), parts, [1 / micro_batches] * micro_batches)  # type: ignore[misc]
        held = transport.all_gather_object(pipeline.executor.peak_held, tuple(range(ranks)))
        found.append(Fraction(max(held), family.stages_per_rank))
    return found
