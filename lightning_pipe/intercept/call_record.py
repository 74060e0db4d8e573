"""What a run of the user's step did up to a cut, and what is alive there."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.effects import Effect
from lightning_pipe.intercept.kept_state import Place
from lightning_pipe.skip import SkipKey
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.torch_internals import tree_flatten

# What torch 2.13 says whenever it unpickles a structure of its own.
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated", category=FutureWarning)


LEAF = tree_flatten(None)[1]
"""The structure of a result that is one leaf."""
AGAIN = "a layer of an earlier stage again"
"""The name of the only call that later stages are told of, where a step has to be run in another way."""


class Same(NamedTuple):
    """A result that is an argument or an earlier result, the same object, by its place among these in that order."""

    at: int


@dataclass(frozen=True, slots=True)
class Unseen:
    """Stands for a result, or an argument of a hook, that no message can hold: of which type it is."""

    kind: str

    def __getattr__(self, name: str) -> Any:
        raise CutError(
            f"a forward hook reads '{name}' of a {self.kind}, on a stage that does not run the hook's layer.",
            hint="Read tensors, numbers, strings, and tuples, lists or dictionaries of them in forward hooks.",
        )


_PATH = (TensorSpec, Same, type(None))
"""Of the leaves of a record those that belong to the path; the others are values."""
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Unseen)
"""Types of results that travel, as `Value`: else 1 is True, and NaN is not the one that its pickle makes."""
AS_THEY_ARE = (type(None), Enum, Unseen)
"""Types of results that travel as they are: they do not mix up what differs."""


class Value(NamedTuple):
    """A plain value that a layer returns, or what is read from a tensor, as bytes: equal only if it is the same."""

    data: bytes

    @classmethod
    def of(cls, value: Any) -> Value:
        """The value as bytes."""
        return cls(pickle.dumps(value))

    @property
    def value(self) -> Any:
        """What was read."""
        return pickle.loads(self.data)


# A tuple: the sender at a boundary compares the records of a whole step for every micro-batch.
class CallRecord(NamedTuple):
    """One recorded call outside layers, or of one layer or outside module.

    Args:
        name: torch function, or dotted name of the layer or module.
        numbers: the numbers given to the tensors in its result, in order.
        differentiable: which of these tensors require a gradient.
        structure: for layers and modules, and torch functions that read values, or return new tensors, the pytree
            structure of the result, and if there are any, of the tensors of ``stashed`` and of what ``effects`` leave;
            ``None`` for other torch functions.
        leaves: with a structure, its leaves: :class:`TensorSpec`, :class:`Same`, :class:`Value` or `AS_THEY_ARE`.
        mutated: for layers and modules, the arguments changed in place (positions among the argument's tensors).
        stashed: the skip connections that begin in this call.
        popped: the skip connections that end in it.
        effects: for layers and modules, what they leave behind besides their result.
        container: the number of the list or dictionary in the arguments that the result is, if it is one.
        lent: for layers and modules, the positions of arguments, and the places of attributes, whose memory a result
            shares, and which every stage has for itself.
        hook: for a forward hook on a part of a layer, the path from the layer to the part and the hook's number there.
        drawn: for a function that has drawn random numbers where ranks take turns, the states of the generators then.
        changing: for layers and modules, what their calls have changed in their attributes so far.
    """

    name: str
    numbers: tuple[int, ...]
    differentiable: tuple[bool, ...]
    structure: Any = None
    leaves: tuple[Any, ...] = ()
    mutated: tuple[int, ...] = ()
    stashed: tuple[SkipKey, ...] = ()
    popped: tuple[SkipKey, ...] = ()
    effects: tuple[Effect, ...] = ()
    container: int | None = None
    lent: tuple[int | Place, ...] = ()
    hook: tuple[str, int] | None = None
    drawn: tuple[bytes, ...] = ()
    changing: tuple[Place, ...] = ()

    @property
    def new_numbers(self) -> tuple[int, ...]:
        """The numbers of the leaves that are tensors and no arguments; the other numbers are of what has changed."""
        return self.numbers[len(self.numbers) - sum(isinstance(leaf, TensorSpec) for leaf in self.leaves) :]

    @property
    def is_plain(self) -> bool:
        """Whether a layer has left a new tensor as its result, and nothing else."""
        one = len(self.leaves) == 1 and type(self.leaves[0]) is TensorSpec and self.structure.is_leaf()
        others = self.mutated or self.stashed or self.popped or self.effects or self.lent or self.changing
        return one and not others and self.container is None


class LiveTensor(NamedTuple):
    """One tensor that is alive at a cut.

    ``shared`` marks tensors whose memory another tensor shares, or whose own elements do: they travel as copies, so
    changing one in place after the cut would be wrong, and raises.
    """

    number: int
    spec: TensorSpec
    requires_grad: bool
    shared: bool


@dataclass(frozen=True)
class RunRecord:
    """The calls up to a cut and the tensors alive there: what two stages must agree on."""

    calls: tuple[CallRecord, ...]
    entries: tuple[LiveTensor, ...]

    @property
    def values(self) -> list[Any]:
        """What the code between layers has read, and layers have returned, that is no tensor, in order."""
        return [leaf for call in self.calls for leaf in call.leaves if not isinstance(leaf, _PATH)]

    def with_values(self, values: Iterable[Any]) -> RunRecord:
        """The same calls with other values; ``None`` for what is missing."""
        each, calls = iter(values), list[CallRecord]()
        for call in self.calls:
            leaves = [leaf if isinstance(leaf, _PATH) else next(each, None) for leaf in call.leaves]
            calls.append(call._replace(leaves=tuple(leaves)))
        return RunRecord(tuple(calls), self.entries)

    @property
    def single_numbers(self) -> frozenset[int]:
        """The numbers of the entries that have one element."""
        return frozenset(entry.number for entry in self.entries if all(size == 1 for size in entry.spec.shape))
