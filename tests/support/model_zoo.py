"""The models of the equality sweeps: tiny, deterministic, in float64, each a LightningModule that knows no pipeline.

Every model is a way to be silently wrong. All of them train with plain SGD or with Adam and a large eps, because Adam
turns the rounding noise of a gradient that is truly zero (an attention key's bias) into a step of full length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.zoo.base import HiddenStates, Mlp, Module, Residual
from tests.support.zoo.batches import (
    bert_batches,
    causal_batches,
    odd_batches,
    pair_batches,
    regression_batches,
    sequence_batches,
    t5_batches,
    token_batches_of_20,
)
from tests.support.zoo.crossings import (
    Appends,
    Auxiliary,
    Branches,
    Detached,
    InPlace,
    Keywords,
    LogsOnTheWay,
    NonContiguous,
    Selects,
    Skips,
    Structures,
    UnusedOutputs,
)
from tests.support.zoo.hugging_face import bert, gpt2, llama, t5
from tests.support.zoo.layers import Lookups, Noise, Recurrent, Sequences, Statistics, WeightNorm
from tests.support.zoo.sharing import (
    FrozenLayers,
    FrozenPrefix,
    ScaleInTwoStages,
    SharedByLayers,
    SharedModule,
    SharedNorm,
    TiedToLayers,
)


@dataclass(frozen=True, eq=False)
class Entry:
    """One model of the sweeps.

    Args:
        name: what the test is called.
        construct: makes the module; called under a fixed seed.
        batches: makes the first batches, always the same ones.
        layers: what the user passes as ``layers=``.
        threads: several ranks may live in one process. Not so where random numbers are drawn: threads share generators.
        replicas: runs in which a stage is on several ranks equal one device.
        pipes: a schedule may have several pipes.
        fewest: samples that a micro-batch must have.
        main: belongs to the full sweep; the others are swept at fewer points.
        tolerance: by how much losses and weights may differ.
    """

    name: str
    construct: Callable[[], Module]
    batches: Callable[[int], list[Any]] = field(default=regression_batches)
    layers: str | list[str] | None = None
    threads: bool = True
    replicas: bool = True
    pipes: bool = True
    fewest: int = 1
    main: bool = False
    tolerance: float = 1e-9

    def build(self) -> Module:
        """The module, with the same weights each time."""
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return self.construct().double().train()

    def __str__(self) -> str:
        return self.name


ZOO: dict[str, Entry] = {
    entry.name: entry
    for entry in [
        Entry("mlp", Mlp, pair_batches, main=True),
        Entry("residual", Residual, layers="layers", main=True),
        Entry("hidden_states", HiddenStates, main=True),
        Entry("gpt2", gpt2, causal_batches, main=True),
        Entry("bert", bert, bert_batches, main=True),
        Entry("llama", llama, causal_batches, main=True),
        Entry(
            "t5",
            t5,
            t5_batches,
            layers=["model.encoder.block", "model.decoder.block"],
            main=True,
            # its softmax is one of float32 (Transformers 5.9), whose rounding another order of float64 sums flips
            tolerance=1e-7,
        ),
        Entry("structures", Structures),
        Entry("non_contiguous", NonContiguous),
        Entry("in_place", InPlace),
        Entry("skips", Skips),
        Entry("frozen_prefix", FrozenPrefix),
        Entry("frozen_layers", FrozenLayers),
        Entry("shared_norm", SharedNorm),
        Entry("shared_by_layers", SharedByLayers),
        Entry("tied_to_layers", TiedToLayers, layers="layers"),
        Entry("shared_module", SharedModule),
        Entry("scale_in_two_stages", ScaleInTwoStages),
        Entry("auxiliary", Auxiliary),
        Entry("detached", Detached),
        Entry("keywords", Keywords),
        Entry("branches", Branches),
        Entry("selects", Selects),
        Entry("appends", Appends),
        Entry("logs_on_the_way", LogsOnTheWay),
        Entry("unused_outputs", UnusedOutputs),
        Entry("lookups", Lookups, token_batches_of_20, layers="layers"),
        # that of torch.nn.utils sets a weight in each call, here outside the layers
        Entry("weight_norm", WeightNorm, layers="layers", pipes=False),
        Entry("recurrent", Recurrent, token_batches_of_20, layers="layers"),
        Entry("statistics", Statistics, replicas=False, fewest=2),
        Entry("noise", Noise, threads=False),
        Entry("sequence_lengths", Sequences, sequence_batches, layers="layers"),
        Entry("odd_batches", Residual, odd_batches, layers="layers"),
    ]
}
MAIN = [entry for entry in ZOO.values() if entry.main]
SMALL = [entry for entry in ZOO.values() if not entry.main]
