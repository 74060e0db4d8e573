"""What several processes divide of each parameter: told before a run, and seen in one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_pipe.config import Sharding
from lightning_pipe.local_parts import DATA, TENSOR, pieces
from lightning_pipe.partition import Layers, ParameterPlace
from lightning_pipe.planning.cost_profile import MOMENTS
from lightning_pipe.sharding.roots import left_whole, tied
from lightning_pipe.sharding.tensor_parallel import plan_of, styles_of

_GUESSED = (
    "nothing says before the run how tensor ranks divide layers: their matrices are taken for divided, and other "
    "parameters for whole"
)

_DIVIDED = {
    True: "its optimizer state",
    "gradients": "its optimizer state and, once they are summed, its gradients",
    "parameters": "its optimizer state, its gradients once they are summed, and between batches its values",
}


class Factors(NamedTuple):
    """What a holder of trained parameters has, in bytes, or in multiples of the parameters.

    Args:
        values: of the parameters, during a batch.
        summed: gradients that are kept once they are summed; those of a batch are whole while it runs.
        optimizer: its state, two moments.
    """

    values: float
    summed: float
    optimizer: float


def factors(holders: int, sharding: Sharding) -> Factors:
    """What a holder of a trained parameter has, in multiples of it.

    Args:
        holders: of the parameter.
        sharding: what they divide.

    Example:
        >>> [tuple(factors(4, sharding)) for sharding in (False, True, "gradients", "parameters")]
        [(1.0, 1.0, 2.0), (1.0, 1.0, 0.5), (1.0, 0.25, 0.5), (1.25, 0.25, 0.5)]
    """
    part = 1 / holders
    return Factors(
        # beside the whole parameters of a batch each has its part, which the optimizer updates
        1 + part if sharding == "parameters" else 1.0,
        part if sharding in ("gradients", "parameters") else 1.0,
        MOMENTS * (part if sharding else 1.0),
    )


@dataclass(frozen=True)
class Division:
    """What several processes divide of each parameter.

    Args:
        sharding: what the holders of a parameter divide.
        tensor: into how many pieces tensor ranks divide a parameter, by its name; others are whole on each of them.
        whole: names of parameters whose values all holders have, whatever ``sharding`` says.
        note: what a plan says of it, where it is a guess.
        number_bytes: bytes of a number; ``None``: as in each parameter.
    """

    sharding: Sharding = False
    tensor: Mapping[str, int] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    note: str = ""
    number_bytes: int | None = None

    @classmethod
    def before_run(cls, module: nn.Module, layers: Layers, sharding: Sharding, tensor: int) -> Division:
        """As a run will divide the module, as far as that is known: a plan of Transformers says it for tensor ranks.

        Args:
            module: the whole module.
            layers: its layers.
            sharding: ``shard_optimizer``.
            tensor: ``tensor_parallel_size``.
        """
        names, note = frozenset[str](), ""
        if tensor > 1:
            plan = plan_of(module, tensor)
            names = frozenset(_of_plan(module, layers, plan) if plan else _matrices(layers))
            note = "" if plan else _GUESSED
        stay = left_whole(module, layers) if sharding == "parameters" else set()
        return cls(sharding, dict.fromkeys(names, tensor), _names(module, stay), note)

    @classmethod
    def of_run(cls, module: nn.Module, sharding: Sharding) -> Division:
        """As the module is divided now.

        Args:
            module: the whole module, which is divided.
            sharding: what the holders of a parameter divide.
        """
        named = list(module.named_parameters())
        tensor = {name: number for name, one in named if (number := pieces(one, TENSOR)) > 1}
        whole = {name for name, one in named if pieces(one, DATA) == 1} if sharding == "parameters" else ()
        return cls(sharding, tensor, frozenset(whole))

    @classmethod
    def of_all(cls, each: Sequence[Division]) -> Division:
        """What all ranks of a pipeline know together: others' parameters look whole to a rank.

        Args:
            each: `of_run` on every rank.
        """
        tensor = {name: number for one in each for name, number in one.tensor.items()}
        return cls(each[0].sharding, tensor, frozenset.intersection(*(one.whole for one in each)))

    def of(self, one: ParameterPlace) -> Sharding:
        """What the holders of a parameter divide."""
        return False if one.name in self.whole else self.sharding

    def size(self, one: ParameterPlace) -> int:
        """Bytes of a parameter on one of its tensor ranks."""
        return self.whole_size(one) // self.tensor.get(one.name, 1)

    def whole_size(self, one: ParameterPlace) -> int:
        """Bytes of a parameter on one device."""
        return one.size * (self.number_bytes or one.parameter.element_size())

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan says of it."""
        notes = [self.note] if self.note else []
        if self.sharding:
            what = _DIVIDED[self.sharding]
            notes.append(f"shard_optimizer={self.sharding!r}: the holders of a parameter divide {what}")
        return tuple(notes)


def _of_plan(module: nn.Module, layers: Layers, plan: Mapping[str, str]) -> Iterator[str]:
    """The parameters that a plan of Transformers divides, by columns or by rows: of these biases stay whole.

    A plan names modules, and of experts their parameters. Tied weights stay whole.
    """
    shared, style_of = tied(module, layers), styles_of(plan)
    for name, parameter in module.named_parameters():
        of_module, _, key = name.rpartition(".")
        for place in (name, of_module):
            style = style_of(place) or ""
            if parameter not in shared and ("col" in style or ("row" in style and (place == name or key == "weight"))):
                yield name


def _matrices(layers: Layers) -> Iterator[str]:
    named = chain.from_iterable(layer.named_parameters(prefix=name) for name, layer in layers)
    return (name for name, parameter in named if not is_lazy(parameter) and parameter.ndim > 1)


def _names(module: nn.Module, parameters: set[nn.Parameter]) -> frozenset[str]:
    return frozenset(name for name, parameter in module.named_parameters() if parameter in parameters)
