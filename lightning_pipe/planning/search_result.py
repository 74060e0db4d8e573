"""What a search found, as a table."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from lightning_pipe.config import divided
from lightning_pipe.planning.prediction import Configuration, Prediction
from lightning_pipe.simulate.style import time_of
from lightning_pipe.text import memory, several, table

_PARTS = ("compute", "recompute", "step", "bubble", "communication", "reduction")


@dataclass(frozen=True)
class SearchResult:
    """The best configurations.

    Args:
        choices: the best, fastest first.
        ruled_out: what does not fit into the memory, with the bytes that a rank needs at least, the smallest first.
        considered: how many configurations there are.
        simulated: how many of them were simulated; the bounds of the others were too high.
        seconds: that the search took.
        limit: bytes that a rank may hold; infinite: any.
    """

    choices: tuple[Prediction, ...]
    ruled_out: tuple[tuple[float, Configuration], ...]
    considered: int
    simulated: int
    seconds: float
    limit: float = inf

    @property
    def best(self) -> Prediction:
        """The fastest configuration."""
        return self.choices[0]

    @property
    def reason(self) -> str:
        """Why the best one is the best, in a sentence."""
        first, *others = self.choices
        if not others:
            return f"{first.configuration.label}: nothing else fits."
        second = others[0]
        gain = {part: getattr(second, part) - getattr(first, part) for part in _PARTS}
        most = max(gain, key=lambda part: gain[part])
        faster = second.seconds / first.seconds - 1
        why = f", most of it {most}" if gain[most] > 0.01 * first.seconds else ""
        return (
            f"{first.configuration.label}: {time_of(first.seconds, 's')} per step; "
            f"next is {second.configuration.label}, {100 * faster:.1f} % slower{why}."
        )

    def __str__(self) -> str:
        head = ("", "schedule", "ranks x replicas", "stages", "micro-batches", "time", *_PARTS, "memory")
        rows = [_row(number, each) for number, each in enumerate(self.choices, 1)]
        return "\n".join([table(head, rows, names=1), "", *self._facts()])

    def _facts(self) -> list[str]:
        facts = [
            f"chosen: {self.reason}",
            f"{several(self.considered, 'configuration')} considered, {self.simulated} of them simulated, "
            f"in {self.seconds:.1f} s",
        ]
        if self.limit < inf:
            out = f"{len(self.ruled_out)} of those looked at do not fit into {memory(self.limit)}"
            if self.ruled_out:
                needed, small = self.ruled_out[0]
                out += f"; the smallest of them, {small.label}, needs {memory(needed)}"
            facts.append(out)
        return [*facts, "all figures are predicted; shares are those of the time, memory is the most on a rank"]


def _row(number: int, one: Prediction) -> tuple[str, ...]:
    own = one.configuration
    changes = [
        " +recompute" * (own.recompute != "never"),
        f" +{divided(own.shard_optimizer)}" * bool(own.shard_optimizer),
    ]
    return (
        str(number),
        own.family.label + "".join(changes),
        f"{own.ranks} x {own.replicas}" + f" x {own.tensor}" * (own.tensor > 1),
        str(own.stages),
        f"{own.micro_batches} x {own.samples}",
        time_of(one.seconds, "s"),
        *(f"{100 * getattr(one, part) / one.seconds:.1f} %" for part in _PARTS),
        memory(one.bytes),
    )
