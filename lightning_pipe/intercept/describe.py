"""Numbers and describes what a layer or module leaves behind, for the stages that skip it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import LEAF, PLAIN, CallRecord, Passed, Repeated
from lightning_pipe.intercept.effects import Watch
from lightning_pipe.intercept.in_place import Noted
from lightning_pipe.intercept.torch_functions import unique
from lightning_pipe.intercept.tracker import Tracker
from lightning_pipe.skip import SkipKey
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.torch_internals import tree_flatten


def recorded(
    last_calls: dict[str, CallRecord],
    tracker: Tracker,
    name: str,
    result: Any,
    arguments: Sequence[Any],
    changed: Sequence[Noted],
    stashed: Mapping[SkipKey, Tensor | None],
    popped: tuple[SkipKey, ...],
    watch: Watch | None,
) -> CallRecord:
    """Number what a call leaves behind, and describe it.

    Args:
        last_calls: by name the last record of a layer. A call that leaves the same behind gets the same record.
        tracker: numbers and checks the tensors.
        name: the layer or module.
        result: what it returned.
        arguments: the leaves of what it was given.
        changed: those that it has changed in place.
        stashed: the skip connections that begin in the call.
        popped: those that end in it.
        watch: knows what it leaves behind besides; ``None``: nothing.

    Raises:
        CutError: it returned something that is no tensor and no plain value.
    """
    # A full description costs more than a small layer computes, and most layers leave one new tensor behind.
    usual = type(result) is Tensor and not (changed or stashed or popped) and watch is None
    last = last_calls.get(name) if usual else None
    if last is not None and _again(last, tracker, result, arguments):
        tracker.numbers.bind(result, last.numbers[0])
        return last
    # reversed: of an object that is given twice the first position counts
    position_of = {id(argument): position for position, argument in reversed([*enumerate(arguments)])}
    left = [] if watch is None else [*watch.effects(tracker.numbers.derived, tracker.come_back)]
    whole = (result, [*stashed.values()], [value for _, value in left]) if stashed or left else result
    leaves, structure = ([result], LEAF) if usual else tree_flatten(whole)
    described, new = described_leaves(name, leaves, position_of)
    tracker.touch(new, f"the result of {name}", new=True)
    mutated = tuple([position_of[id(tensor)] for tensor, *_ in changed])
    # the record says already that these change: their memory needs no lender
    others = [(at, owner) for at, owner in enumerate(arguments) if at not in mutated]
    owners = [*others, *(() if watch is None else watch.attributes())]
    lent = {at for leaf in new for at in tracker.in_place.lend(leaf, owners)}
    also = [*(tensor for tensor, *_ in changed), *(one for *_, behind in changed for one in behind)]
    numbers, differentiable = tracker.numbers.give_all(unique(also) + new if also else new)
    call = CallRecord(
        name,
        numbers,
        differentiable,
        structure,
        described,
        mutated,
        tuple(stashed),
        popped,
        tuple([effect for effect, _ in left]),
        None if watch is None else next((at for at, each in enumerate(watch.containers) if each is result), None),
        tuple(sorted(lent, key=str)),
    )
    if usual and not lent and isinstance(described[0], TensorSpec):
        last_calls[name] = call
    return call


def _again(last: CallRecord, tracker: Tracker, result: Tensor, arguments: Sequence[Any]) -> bool:
    """Whether a call has returned one new tensor as the ``last`` one of its name did."""
    spec: TensorSpec = last.leaves[0]
    return (
        tracker.numbers.following == last.numbers[0]
        and result.shape == spec.shape
        and result.dtype == spec.dtype
        and spec.strides is None
        and result.is_contiguous()
        and result.requires_grad == last.differentiable[0]
        and result._base is None
        and tracker.numbers.of(result) is None
        and (result.grad_fn is not None or _lends_nothing(tracker, result, arguments))
    )


def _lends_nothing(tracker: Tracker, result: Tensor, arguments: Sequence[Any]) -> bool:
    """Whether a result without a graph, of an evaluation, is no argument of the call, and shares no memory with one."""
    given = any(result is argument for argument in arguments)
    return not (given or tracker.in_place.lend(result, enumerate(arguments)))


def described_leaves(
    name: str, leaves: Sequence[Any], arguments: Mapping[int, int]
) -> tuple[tuple[Any, ...], list[Tensor]]:
    """A description of every leaf, and the tensors among them that are no arguments, each once.

    Args:
        name: the layer or module, for messages.
        leaves: the leaves.
        arguments: the positions of the arguments, by ``id``.
    """
    described: list[Any] = []
    new: list[Tensor] = []
    first: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        if leaf is None or isinstance(leaf, PLAIN):
            described.append(leaf)
        elif id(leaf) in arguments:
            described.append(Passed(arguments[id(leaf)]))
        elif first.setdefault(id(leaf), position) != position:
            described.append(Repeated(first[id(leaf)]))
        elif isinstance(leaf, Tensor):
            described.append(TensorSpec.of(leaf))
            new.append(leaf)
        else:
            raise CutError(
                f"'{name}' returns a {type(leaf).__qualname__}, which cannot be shown to the next stages.",
                hint="Return tensors, numbers, strings, None, and tuples (named ones too), lists or dictionaries of "
                "them, or register the type with torch.utils._pytree.register_pytree_node.",
            )
    return tuple(described), new
