"""Numbers of tensors, the same on all ranks."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.placeholder import Placeholder

SAME_PATH = (
    "The step must take the same path on all ranks: no decisions by rank, time, unseeded randomness or values. State "
    "that goes from one micro-batch to the next (self.hidden) needs micro_batches=1."
)
NO_VIEWS = "Do not keep views of, or weak references to, tensors across layer calls; use .clone()."
tokens = itertools.count()
"""Each is larger than all before it."""


class Numbers:
    """The numbers of the tensors that derive from layers or parameters, in one run of the step on one stage.

    Attributes:
        token: marks on tensors count with it alone: they may outlive a run, and others mark them anew.
        unfilled: by number why a tensor does not have the value that it has on an earlier stage.
        following: the number that the next new tensor gets.
    """

    def __init__(self) -> None:
        self.unfilled: dict[int, str] = {}
        self.token = next(tokens)
        self._alive: dict[int, weakref.ref[Tensor]] = {}
        self.following = 0

    def of(self, tensor: Tensor) -> int | None:
        """The number that ``tensor`` carries, if any."""
        mark = getattr(tensor, "_pipe_number", None)
        return mark[1] if mark is not None and mark[0] == self.token else None

    def bind(self, tensor: Tensor, number: int) -> None:
        """Let ``tensor`` carry ``number``."""
        tensor._pipe_number = (self.token, number)  # type: ignore[attr-defined]
        self._alive[number] = weakref.ref(tensor)
        if number >= self.following:
            self.following = number + 1

    def give(self, tensor: Tensor) -> int:
        """The number of a derived tensor, (2) in `stage_run`; a new one when it is seen for the first time."""
        known = self.of(tensor)
        if known is not None:
            return known
        number = self.following
        self.bind(tensor, number)
        return number

    def give_all(self, tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """The numbers of the tensors that a call leaves, and which of them require a gradient."""
        if len(tensors) == 1:  # as mostly
            return (self.give(tensors[0]),), (tensors[0].requires_grad,)
        return tuple([self.give(tensor) for tensor in tensors]), tuple([tensor.requires_grad for tensor in tensors])

    def derived(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` comes from a layer or a parameter."""
        # Asked for each argument of each function. Of a tensor of that very type the metaclass of Parameter need not
        # be asked, which is written in Python (torch 2.13).
        if tensor.requires_grad or self.of(tensor) is not None:
            return True
        return type(tensor) is not Tensor and isinstance(tensor, (Placeholder, nn.Parameter))

    def alive(self) -> list[tuple[int, Tensor]]:
        """The numbered tensors that still exist, by number."""
        return [(number, tensor) for number, reference in self._alive.items() if (tensor := reference()) is not None]

    def find(self, number: int) -> Tensor | None:
        """The tensor with a number, if it still exists."""
        reference = self._alive.get(number)
        return None if reference is None else reference()

    def fill(self, number: int, value: Tensor) -> None:
        """Give the placeholder with ``number`` its value, in place: every reference to it sees the value.

        One that cannot be filled, because autograd or a view refers to it as well, is an error only if it is used.
        """
        reference = self._alive.pop(number, None)
        placeholder = reference() if reference is not None else None
        del reference  # tensors with weak references cannot be swapped (torch 2.13)
        if placeholder is None:
            return
        if placeholder.shape != value.shape or placeholder.dtype != value.dtype:
            raise CutError(
                f"tensor {number} is {tuple(value.shape)} {value.dtype} on the stage that computes it and "
                f"{tuple(placeholder.shape)} {placeholder.dtype} on this one.",
                hint=SAME_PATH,
            )
        attributes = set_attributes(placeholder)
        self.bind(value, number)
        self._alive.pop(number)
        try:
            swap(placeholder, value)
            vars(placeholder).update(attributes)
        except CutError as error:
            self.unfilled[number] = error.message
        self._alive[number] = weakref.ref(placeholder)

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Make the object ``old`` hold what ``new`` holds; it has no number then."""
        number = self.of(old)
        if number is not None:
            del self._alive[number]  # tensors with weak references cannot be swapped
        swap(old, new)


def set_attributes(tensor: Tensor) -> dict[str, Any]:
    """The attributes that the user's code has set in a tensor."""
    return {n: each for n, each in vars(tensor).items() if n[0] != "_" and n not in ("differentiable", "origin")}


def swap(old: Tensor, new: Tensor) -> None:
    """Make the object ``old`` hold what ``new`` holds, for everyone who has a reference to it."""
    try:
        torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    except (RuntimeError, TypeError) as error:
        raise CutError(
            f"a tensor {tuple(old.shape)} {old.dtype} computed before this stage's layers cannot be filled in, because "
            f"something else shares its memory or refers to it weakly: {error}",
            hint=NO_VIEWS,
        ) from error
