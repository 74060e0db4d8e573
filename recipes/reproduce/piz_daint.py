"""The P100 nodes of Chimera's evaluation: what a stage takes on them by the authors' programs, and what is fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce

from lightning_pipe.schedules import Chimera, Family, PipeDream, PipeDream2BW, Schedule
from lightning_pipe.simulate import Costs, Link, simulate
from recipes.reproduce.bubbles import SCHEMES
from recipes.reproduce.counted import sizes_of_stages
from recipes.reproduce.published import published

BLOCKS = {"Bert-48": 48, "GPT-2": 64, "GPT-2, 32 layers": 32}
SAMPLE = {"Bert-48": 4 * (128 * 1024 + 128), "GPT-2": 4 * 632 * 1280, "GPT-2, 32 layers": 4 * 632 * 1280}
"""Bytes of a sequence between two stages: floats of the states, and of Bert's mask."""

LENGTH = {"Bert-48": 1.0, "GPT-2": 632 / 128, "GPT-2, 32 layers": 632 / 128}
"""Tokens of a sequence over those in the authors' profile of a block."""

HEAD = {"Bert-48": 2.515, "GPT-2": 3.023, "GPT-2, 32 layers": 3.023}
"""Operations of the output head over those of a block: for a token 12 h^2 + 2 s h in a block, and in the head V h, in
Bert's h^2 more for its transform."""

EMBEDDING = {"Bert-48": 30522 * 1024, "GPT-2": 50257 * 1280, "GPT-2, 32 layers": 50257 * 1280}
"""Parameters whose whole gradient every backward pass of the first stage fills with zeros and adds: four floats."""

TENSORS = {"Bert-48": 16, "GPT-2": 12, "GPT-2, 32 layers": 12}
"""Parameters of a block, counted as tensors."""

UPDATE = 27 * 4
"""Bytes for each parameter that the passes of the programs' AdamW read and write, its gradient's copies included."""

BANDWIDTH = 550e9
"""Bytes per second of a P100's memory that such passes reach: an estimate, three quarters of the 732e9 in its data
sheet. No paper, profile or program has it, and no bar is fitted by it."""


@dataclass(frozen=True)
class Machine:
    """What is fitted to bars of the paper, which are in sample wherever they are read. Nothing else is.

    Args:
        floor: seconds that both passes over a block take at least, however few samples: their kernels are launched.
        gpt2: seconds of a GPT-2 block for one sequence, forward; for others as the authors' profile grows with tokens.
        p2p: bytes per second between two stages.
        all_reduce: bytes per second of an all-reduce that runs alone, in Rabenseifner's formula.
        together: of Chimera's sums, how many run at once without slowing each other down.
        switch: seconds for each tensor of a block, where a backward pass changes the version of the weights.
        allocator: reserved memory over the memory that is counted.
        calibrated: for every scheme the places of the bars, as ``[Figure 10, W2D16, GEMS, B1]``.
    """

    floor: float
    gpt2: float
    p2p: float
    all_reduce: float
    together: float
    switch: float
    allocator: float
    calibrated: Mapping[str, Sequence[Sequence[str]]]

    def knows(self, scheme: str, speed: float) -> bool:
        """Whether a published value of a scheme is one that constants are fitted to; no other figure has these set-ups.

        Args:
            scheme: of Chimera's Table 2.
            speed: as digitised, to a tenth.
        """
        return any(
            speed == reduce(lambda found, key: found[key], keys, published("chimera", figure))
            for figure, *keys in self.calibrated.get(scheme, ())
        )

    def block(self, model: str, batch: float) -> tuple[float, float]:
        """Seconds of both passes over a block, as fast as its operations are."""
        profile = published("chimera", "P100 profile")
        forward, backward = (
            _between(profile["batch"], profile[f"{way}_ms"], batch * LENGTH[model]) / 1e3
            for way in ("forward", "backward")
        )
        if model == "Bert-48":
            return forward, backward
        scale = self.gpt2 / (_between(profile["batch"], profile["forward_ms"], LENGTH[model]) / 1e3)
        return scale * forward, scale * backward

    def costs(
        self, family: Family, model: str, stages: int, width: int, copies: int, batch: float, *, recompute: bool
    ) -> Costs:
        """Of a micro-batch on each of so many stages, as the authors' programs run them.

        Both ends of a message wait for it. The forward pass is repeated when the gradient is there. Sums begin when a
        rank has nothing left to compute, one after the other, but for Chimera's. (Those of PipeDream and 2BW, which run
        two at a time beside the last backward pass in the programs, are no better so: see ``chimera_figure15``.)

        Args:
            family: the schedule.
            model: a key of `BLOCKS`.
            stages: equal shares of the blocks, with the embedding before and the head behind them.
            width: pipelines side by side.
            copies: ranks of a pipeline that hold a stage.
            batch: samples of a micro-batch.
            recompute: whether backward passes repeat the forward pass.
        """
        number = BLOCKS[model] / stages
        halving = isinstance(family, Chimera) and family.scaling == "backward_halving"
        # the forward pass of two halves is one over both
        forward = self.block(model, 2 * batch)[0] / 2 if halving else self.block(model, batch)[0]
        backward = self.block(model, batch)[1]
        slowed = max(1.0, self.floor / (forward + backward))
        there, back = [number * slowed * forward] * stages, [number * slowed * backward] * stages
        there[-1] += HEAD[model] * forward
        back[-1] += HEAD[model] * backward
        back[0] += 4 * 4 * EMBEDDING[model] / BANDWIDTH
        halves = [each / 2 for each in back]
        asynchronous = isinstance(family, PipeDream | PipeDream2BW)
        for stage in range(stages):
            # without a flush the programs leave the last stage's activations where they are
            if recompute and not (asynchronous and stage == stages - 1):
                back[stage] += there[stage]
            if asynchronous:
                back[stage] += self.switch * TENSORS[model] * number
        sums, sizes = Link(beta=1 / self.all_reduce), sizes_of_stages(model, stages)
        chimera = isinstance(family, Chimera)
        at_once = self.together if chimera else 1
        return Costs(
            there,
            back,
            backward_input=[whole - half for whole, half in zip(back, halves, strict=True)],
            backward_weight=halves,
            recompute=0,  # is in the backward pass
            send=SAMPLE[model] * batch / self.p2p,
            occupies="both",
            reduce=[float(sums.all_reduce(4 * size, width * copies)) / at_once for size in sizes],
            step=[UPDATE * size / BANDWIDTH for size in sizes],
            overlap_reduce=chimera,
        )

    def speed(
        self,
        scheme: str | Family,
        model: str,
        width: int,
        depth: int,
        batch: int,
        total: int,
        recompute: bool,
    ) -> float:
        """Sequences per second, simulated.

        Args:
            scheme: of Chimera's Table 2, or any schedule.
            model: a key of `BLOCKS`.
            width: pipelines side by side.
            depth: ranks of a pipeline.
            batch: sequences of a micro-batch.
            total: of the mini-batch, over all pipelines.
            recompute: whether backward passes compute the forward pass again.
        """
        micro_batches, parts = total // (width * batch), 1
        family = (SCHEMES[scheme] if isinstance(scheme, str) else scheme).for_batches_of(micro_batches)
        if isinstance(family, Chimera) and family.scaling == "backward_halving" and micro_batches > depth:
            parts = 2
        built = _built(family, depth, micro_batches * parts)
        costs = self.costs(
            family, model, built.stages, width, len(built.holders(0)), batch / parts, recompute=recompute
        )
        if family.synchronous:
            return total / float(simulate(built, costs).makespan)
        # once ranks are filled, what so many batches more take
        batches = -(-2 * depth // micro_batches)
        few, more = (simulate(_built(family, depth, n * batches * micro_batches), costs).makespan for n in (1, 2))
        return total * batches / float(more - few)


@cache
def _built(family: Family, depth: int, micro_batches: int) -> Schedule:
    return family.build(depth, micro_batches)


def _between(sizes: Sequence[float], values: Sequence[float], size: float) -> float:
    """On the line through the two nearest sizes; in proportion below the first."""
    if size < sizes[0]:
        return values[0] * size / sizes[0]
    right = next((at for at, each in enumerate(sizes) if each >= size and at), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    return values[right - 1] + (values[right] - values[right - 1]) * (size - low) / (high - low)
