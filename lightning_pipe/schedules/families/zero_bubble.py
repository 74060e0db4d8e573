"""Zero-bubble schedules: the backward pass is split, and its weight part fills what would be idle time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.families.building_block import repeated, v_half, v_min
from lightning_pipe.schedules.families.interleaved import Interleaved, sequence
from lightning_pipe.schedules.family import Family, Orders, check_choice

Variant = Literal["h1", "h2", "v", "v_half", "v_min"]
_WARM_UP = {"h1": 1, "h2": 2}
_BLOCKS = {"v_half": v_half, "v_min": v_min}


@dataclass(frozen=True)
class ZeroBubble(Family):
    """Zero bubble (Qi et al. 2024): ``I`` computes the gradient of a stage's input, ``W`` later that of its weights.

    With F, I, W for the times of the parts, the idle time inside rank 0's span is, for enough micro-batches,
    ``(ranks - 1)(F + I - W)`` for H1, with 1F1B's activations, and ``(ranks - 1)(F + I - 2W)`` for H2, with up to
    ``2 ranks - 1`` micro-batches held. Measured over the whole makespan with a flush, H2 gains nothing over H1 when
    the three parts are equal. V places two stages on each rank in the shape of a V, so that the first and the last
    stage meet on rank 0, and has no idle time inside any rank's span when the parts are equal, with 1F1B's memory.

    V-Half and V-Min (Qi et al. 2024b, arXiv 2405.15362, section 3) have V's placement and hold the activations of
    ``(ranks + 2) // 2`` and ``(ranks + 4) // 3`` micro-batches, which tend to a half and a third of 1F1B's. With equal
    parts their bubbles tend to a half and two thirds of 1F1B's. V-Min's idle time may grow with the micro-batches
    where the parts differ, V-Half's where ``W + 2I < 2F`` or ``W + 2F < 2I``, and that of both where messages take
    long. V stands here for that paper's V-ZB, which has 1F1B's memory and no bubble. `search` takes the
    fastest that a limit of memory allows.

    Args:
        variant: ``"h1"``, ``"h2"`` (with a flush), ``"v"``, ``"v_half"`` or ``"v_min"``.

    Example:
        >>> from lightning_pipe import simulate
        >>> timeline = simulate(ZeroBubble(variant="h1").build(ranks=4, micro_batches=8))
        >>> timeline.bubble_ratio, timeline.peak_activations
        (Fraction(1, 9), (4, 4, 4, 4))
    """

    name: ClassVar[str] = "zero_bubble"

    variant: Variant = "h1"

    def __post_init__(self) -> None:
        check_choice("ZeroBubble", get_args(Variant), variant=self.variant)

    @property
    def stages_per_rank(self) -> int:
        """Two in the shape of a V, else one."""
        return 1 if self.variant in _WARM_UP else 2

    def variants(self) -> tuple[Family, ...]:
        """H1, H2, V, V-Half and V-Min."""
        return tuple(map(ZeroBubble, get_args(Variant)))

    def published(self, ranks: int, micro_batches: int) -> int:
        """V needs ``2 ranks - 1`` micro-batches to fill the pipeline."""
        return max(micro_batches, 2 * ranks - 1) if self.variant == "v" else micro_batches

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """The orders of the handcrafted schedules (sections 2 and 6 of the first paper), or a repeated block's."""
        if self.variant in _BLOCKS:
            return repeated(_BLOCKS[self.variant], ranks, micro_batches)
        if self.variant == "v":
            return [_v_shaped(ranks, micro_batches, rank) for rank in range(ranks)]
        return [_linear(_WARM_UP[self.variant], ranks, micro_batches, rank) for rank in range(ranks)]


@dataclass(frozen=True)
class InterleavedZeroBubble(Interleaved):
    """Zero bubble (Qi et al. 2024, H1) over interleaved stages; stage ``s`` is on rank ``s % ranks``.

    Micro-batches take Megatron-LM's order, with one more forward to warm up for each rank behind, instead of two, and
    rank ``r`` puts its weight parts off by ``r`` input parts. This is torch's ``ScheduleInterleavedZeroBubble`` for
    micro-batches that are a multiple of the ranks; for others torch changes the size of its groups, and here the order
    of the next multiple is cut short. With one virtual stage it is H1.

    With a multiple of ``ranks`` micro-batches rank 0 is idle inside its span for H1's ``(ranks - 1)(F + I - W)``, with
    the parts of one of the smaller stages; with equal parts that is ``(ranks - 1) / (3 virtual_stages micro_batches)``
    of the ideal time. Every rank holds ``virtual_stages * ranks`` stage-micro-batches, 1F1B's memory.

    Args:
        virtual_stages: stages per rank; by default 2, or ``stages / ranks`` where the number of stages is given.

    Example:
        >>> from lightning_pipe import simulate
        >>> timeline = simulate(InterleavedZeroBubble(virtual_stages=2).build(ranks=4, micro_batches=8))
        >>> timeline.bubble_ratio, timeline.peak_activations
        (Fraction(1, 17), (8, 8, 8, 8))
    """

    name: ClassVar[str] = "interleaved_zero_bubble"

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """Interleaved 1F1B with input parts, each followed by the weight part of ``rank`` input parts before."""
        virtual = self.stages_per_rank
        return [
            split(
                sequence(Kind.FORWARD, ranks, micro_batches, range(virtual), rank),
                sequence(Kind.BACKWARD_INPUT, ranks, micro_batches, range(virtual)[::-1], rank),
                warm_up=(virtual - 1) * ranks + ranks - 1 - rank,
                put_off=rank,
            )
            for rank in range(ranks)
        ]


def split(forwards: Sequence[Action], inputs: Sequence[Action], warm_up: int, put_off: int) -> list[Action]:
    """``warm_up`` forwards, then forward and input part in turn; then what is left.

    An input part is followed by the weight part of the one ``put_off`` before it, or sooner where no forward is left.
    """
    order, paired = list(forwards[:warm_up]), forwards[warm_up:]
    weights = iter([action._replace(kind=Kind.BACKWARD_WEIGHT) for action in inputs])
    for index, action in enumerate(inputs):
        order += [*paired[index : index + 1], action]
        if index >= min(put_off, len(paired)):
            order.append(next(weights))
    return [*order, *weights]


def _linear(depth: int, ranks: int, micro_batches: int, rank: int) -> list[Action]:
    """H1 is 1F1B with ``W`` put off on later ranks; H2 warms up with twice as many forwards."""
    forwards, inputs = (
        [Action(kind, rank, index) for index in range(micro_batches)] for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT)
    )
    return split(forwards, inputs, warm_up=depth * (ranks - 1 - rank), put_off=depth * rank)


def _v_shaped(ranks: int, micro_batches: int, rank: int) -> list[Action]:
    """ZB-V: down the ranks with the first stages, and up again with the second ones."""
    down, up = rank, 2 * ranks - 1 - rank
    forward, for_input, for_weight = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    actions: list[Action] = []
    counts: Counter[tuple[Kind, int]] = Counter()

    def add(stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            actions.append(Action(kind, stage, counts[kind, stage]))
            counts[kind, stage] += 1

    add(down, *[forward] * (2 * (ranks - rank) - 1))
    for _ in range(rank):
        add(up, forward)
        add(down, forward)
    for _ in range(ranks - rank):
        add(up, forward, for_input, for_weight)
    while counts[forward, up] < micro_batches:
        add(down, *[forward] * (counts[forward, down] < micro_batches), for_input, for_weight)
        add(up, forward, for_input, for_weight)
    for _ in range(rank):
        add(down, for_input)
        add(up, for_input)
    for _ in range(ranks - rank):
        add(down, for_input, for_weight)
    for stage in (up, down):
        add(stage, *[for_weight] * (micro_batches - counts[for_weight, stage]))
    return actions
