"""Follows the user's code outside layers and numbers, alike on all ranks, what derives from layers or parameters."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from lightning_pipe.errors import CutError
from lightning_pipe.pipeline.cut.changes import FACTORIES, counting, memory_of
from lightning_pipe.pipeline.cut.functions import (
    AUTOGRAD,
    METADATA,
    RANDOM,
    changed_in_place,
    function_name,
    leaves_of,
    results_of,
    shaped_by_values,
    unique,
)
from lightning_pipe.pipeline.cut.path import Call, TensorSpec
from lightning_pipe.pipeline.cut.placeholder import Placeholder, shape_only
from lightning_pipe.pipeline.rng import Streams

_SAME_PATH = "The step must take the same path on all ranks: no decisions by rank, time, unseeded randomness or values."
_NO_VIEWS = "Do not keep views of, or weak references to, tensors across layer calls; use .clone()."
_tokens = itertools.count()


class Holdings(Protocol):
    """What the tracker must know of the module's parameters and buffers outside layers."""

    def use(self, parameter: nn.Parameter) -> None:
        """Note that this stage uses ``parameter`` for real; raises if this rank does not hold it."""

    def run(self, module: str) -> None:
        """Note that this stage runs an outside module."""

    def name_of(self, tensor: Tensor) -> str | None:
        """The dotted name of a parameter or buffer of the module, ``None`` for other tensors."""


class Tracker(TorchFunctionMode):
    """A mode around one run of the user's step on one stage.

    A tensor is *derived* if it comes from a layer or a parameter. Derived tensors get numbers in the order in which
    they appear; all ranks run the same code, so they get the same numbers everywhere. While the stage is ``waiting``,
    derived tensors are placeholders here and their calls are only checked against ``expected``, the calls that the
    previous stage made up to its cut. At this stage's first layer the placeholders are filled, and derived tensors are
    real from there on.

    Args:
        expected: the calls of the previous stage up to its cut; ``None`` on the first stage.
        streams: the batch's random streams.
        micro_batch: keys the random streams.
        holdings: the module's parameters and buffers outside layers.
    """

    def __init__(
        self,
        expected: tuple[Call, ...] | None,
        streams: Streams,
        micro_batch: int,
        holdings: Holdings,
    ) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.used: set[int] = set()
        self.waiting = expected is not None
        self.partial = True
        self.spans: list[tuple[int, int]] = []
        self._expected = expected or ()
        self.unfilled: dict[int, str] = {}
        self._read_before: set[int] = set()
        self._lent: dict[int, tuple[Any, tuple[int, int]]] = {}
        self.lenders: dict[tuple[int, int], Tensor] = {}
        self._token = next(_tokens)
        self._alive: dict[int, weakref.ref[Tensor]] = {}
        self._next = 0
        self._streams, self._micro_batch = streams, micro_batch
        self._holdings = holdings
        self._off = 0

    # ------------------------------------------------------------------ numbers

    def number_of(self, tensor: Tensor) -> int | None:
        """The number ``tensor`` carries in this run, if any."""
        mark = getattr(tensor, "_pipe_number", None)
        return mark[1] if mark is not None and mark[0] == self._token else None

    def bind(self, tensor: Tensor, number: int) -> None:
        """Let ``tensor`` carry ``number``."""
        tensor._pipe_number = (self._token, number)  # type: ignore[attr-defined]
        self._alive[number] = weakref.ref(tensor)

    def rename(self, old: Tensor, new: Tensor, *, replace: bool) -> None:
        """Let ``new`` carry the number of ``old`` too; with ``replace`` it is the one that crosses a cut."""
        number = self.number_of(old)
        if number is not None:
            new._pipe_number = (self._token, number)  # type: ignore[attr-defined]
            if replace:
                self._alive[number] = weakref.ref(new)

    def number(self, tensor: Tensor) -> int:
        """The number of a derived tensor; a new one when it is seen for the first time."""
        known = self.number_of(tensor)
        if known is not None:
            return known
        number, self._next = self._next, self._next + 1
        self.bind(tensor, number)
        return number

    def numbers(self, tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """The numbers of the tensors that a call leaves, and which of them require a gradient."""
        return tuple([self.number(tensor) for tensor in tensors]), tuple([tensor.requires_grad for tensor in tensors])

    def derived(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` comes from a layer or a parameter."""
        return (
            isinstance(tensor, (Placeholder, nn.Parameter))
            or tensor.requires_grad
            or self.number_of(tensor) is not None
        )

    def alive(self) -> Iterator[tuple[int, Tensor]]:
        """The numbered tensors that still exist, by number."""
        for number, reference in self._alive.items():
            tensor = reference()
            if tensor is not None:
                yield number, tensor

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
                hint=_SAME_PATH,
            )
        self.bind(value, number)
        self._alive.pop(number)
        try:
            swap(placeholder, value)
        except CutError as error:
            self.unfilled[number] = error.message
        self._alive[number] = weakref.ref(placeholder)

    # ------------------------------------------------------------------ the record

    def expect(self, name: str) -> Call:
        """The call the previous stage made here; raises unless it was ``name``."""
        position = len(self.calls)
        if position < len(self._expected) and self._expected[position].name == name:
            call = self._expected[position]
            self.calls.append(call)
            return call
        found = f"'{self._expected[position].name}'" if position < len(self._expected) else "none"
        raise CutError(
            f"this stage makes call number {position} outside its layers to '{name}', the previous stage made {found}.",
            hint=_SAME_PATH,
        )

    @property
    def complete(self) -> bool:
        """Whether all expected calls have come."""
        return len(self.calls) == len(self._expected)

    def arrive(self) -> None:
        """The stage's first layer is reached: the previous stage must have come here after the same calls."""
        if not self.complete:
            raise CutError(
                f"this stage reached its first layer after {len(self.calls)} calls outside its layers, the previous "
                f"stage after {len(self._expected)}.",
                hint=_SAME_PATH,
            )
        self.waiting = False

    def follow(self, tensors: list[Tensor], call: Call) -> None:
        """Give the tensors of a call on a waiting stage the numbers they have on the previous stage."""
        if len(tensors) != len(call.numbers):
            raise CutError(
                f"'{call.name}' gives {len(tensors)} tensors here, {len(call.numbers)} on the previous stage."
            )
        for tensor, number, differentiable in zip(tensors, call.numbers, call.differentiable, strict=True):
            if isinstance(tensor, Placeholder):
                tensor.differentiable = differentiable
            known = self.number_of(tensor)
            if known is None:
                self.bind(tensor, number)
            elif known != number:
                raise CutError(f"'{call.name}' returns one of its arguments here and a copy on the previous stage.")
            self._next = max(self._next, number + 1)

    def touch(self, tensors: list[Tensor], name: str, new: bool = False) -> None:
        """Note that real code uses ``tensors``; a placeholder among them has not been sent and is an error.

        So is a tensor that was made inside a layer and is not its result, unless it is ``new``: the layers of other
        stages have none like it to give.
        """
        for position, tensor in enumerate(tensors):
            known = self.number_of(tensor)
            if isinstance(tensor, Placeholder):
                if known in self.unfilled:
                    raise CutError(f"'{name}' needs tensor argument {position}: {self.unfilled[known]}", hint=_NO_VIEWS)
                raise CutError(
                    f"'{name}' needs tensor argument {position}, {tuple(tensor.shape)} {tensor.dtype}, which an "
                    "earlier stage has and did not send: in the first batch of this shape nothing needed it.",
                    hint="Use the same tensors in every batch of the same shape: make optional uses unconditional.",
                )
            if known is not None:
                if self.unfilled and known in self.unfilled:
                    raise CutError(f"'{name}' needs tensor argument {position}: {self.unfilled[known]}", hint=_NO_VIEWS)
                self.used.add(known)
            elif self.partial and not new and tensor.grad_fn is not None and self._made_inside(tensor.grad_fn):
                raise CutError(
                    f"'{name}' uses a tensor {tuple(tensor.shape)} {tensor.dtype} that left a layer otherwise than by "
                    "its result, through a hook for instance; the layers of other stages cannot give theirs.",
                    hint="Return it from the layer, or keep it as an attribute of the module that computes it; switch "
                    "options such as output_attentions and output_router_logits off.",
                )

    def _made_inside(self, node: Any) -> bool:
        made = node._sequence_nr()
        return any(start <= made < end for start, end in self.spans)

    # ------------------------------------------------------------------ the mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record and number one torch call outside layers."""
        kwargs = kwargs or {}
        if self._off:
            return func(*args, **kwargs)
        name = function_name(func)
        if name in METADATA:
            if name == "requires_grad.__get__" and isinstance(args[0], Placeholder):
                return args[0].differentiable
            return func(*args, **kwargs)
        tensors = [leaf for leaf in leaves_of(args, kwargs) if isinstance(leaf, Tensor)]
        if self.waiting:
            self._read_before.update(map(id, tensors))
        if not any(self.derived(tensor) for tensor in tensors):
            with counting() if name in FACTORIES and kwargs.get("out") is None else nullcontext():
                return func(*args, **kwargs)
        return (
            self._stand_in(name, func, args, kwargs) if self.waiting else self._run(name, func, args, kwargs, tensors)
        )

    def _stand_in(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        call = self.expect(name)
        written = self.written(changed_in_place(name, args, kwargs))
        if name in AUTOGRAD:
            if not isinstance(args[0], Placeholder):
                return func(*args, **kwargs)
            self.follow(written, call)
            return RemovableHandle(OrderedDict()) if name == "register_hook" else args[0]
        self.forget(written, name)
        if call.structure is None:
            result = shape_only(func, args, kwargs)
        else:
            device = next(leaf.device for leaf in leaves_of(args, kwargs) if isinstance(leaf, Tensor))
            leaves = [Placeholder.of(leaf, device) if isinstance(leaf, TensorSpec) else leaf for leaf in call.leaves]
            result = tree_unflatten(leaves, call.structure)
        self.follow(results_of(result, written), call)
        return result

    def written(self, changed: Sequence[Tensor]) -> list[Tensor]:
        """What is written to when tensors change in place: they, and what those that are not derived are views of.

        A view of a derived tensor is derived itself: that both change needs no word.
        """
        bases = [tensor._base for tensor in changed if tensor._base is not None and not self.derived(tensor)]
        return unique([*changed, *bases])

    def lend(self, result: Tensor, arguments: Sequence[Any]) -> Iterator[int]:
        """The arguments whose memory a layer's result shares, of those that every stage has for itself."""
        if result.grad_fn is not None and result._base is None:
            return  # the usual case: new memory
        memory = memory_of(result)
        for position, argument in enumerate(arguments):
            if isinstance(argument, Tensor) and not self.derived(argument) and memory_of(argument) == memory:
                self.note_lent(result, (len(self.calls), position))
                yield position

    def note_lent(self, tensor: Tensor, lender: tuple[int, int]) -> None:
        """Note that ``tensor`` shares the memory of an argument that every stage has for itself."""
        memory = tensor.untyped_storage()
        self._lent[memory._cdata] = (memory, lender)

    def lender_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """Which argument a derived tensor shares its memory with, of those that every stage has for itself."""
        if not self._lent or not self.derived(tensor):
            return None
        _, lender = self._lent.get(memory_of(tensor) or 0, (None, None))
        return lender

    def check_not_lent(self, changed: Sequence[Tensor], name: str) -> None:
        """Raise if a change in place would reach, on this stage alone, a tensor that every stage has for itself."""
        for tensor in changed:
            if self.partial and self.lender_of(tensor) is not None:
                raise CutError(
                    f"'{name}' changes a tensor {tuple(tensor.shape)} {tensor.dtype} in place, and an argument of the "
                    "layer that returned it shares its memory; other stages have that argument as it was.",
                    hint="Use the out-of-place form, or .clone() one of them.",
                )

    def forget(self, written: Sequence[Tensor], name: str) -> None:
        """Turn known tensors into placeholders, because ``name`` writes another stage's values into them."""
        known = [tensor for tensor in written if not isinstance(tensor, Placeholder)]
        for tensor in known:
            owned = self._holdings.name_of(tensor)
            if owned is not None:
                raise CutError(
                    f"'{name}' changes '{owned}' in place before this stage's layers, with values of an earlier stage.",
                    hint=f"Change '{owned}' after the last layer, or inside a layer.",
                )
        memories = [tensor.untyped_storage() for tensor in known]
        for tensor in known:
            number = self.number_of(tensor)
            if number is not None:
                del self._alive[number]  # tensors with weak references cannot be swapped
            swap(tensor, Placeholder.of(TensorSpec.of(tensor), tensor.device))
        if any(torch._C._storage_Use_Count(memory._cdata) > 1 for memory in memories):  # 1: the list here
            raise CutError(
                f"'{name}' changes a tensor {tuple(known[0].shape)} {known[0].dtype} in place before this stage's "
                "layers, with values of an earlier stage, and another tensor shares its memory.",
                hint="Change the tensor itself, before there are views of it, or use the out-of-place form."
                + (
                    " Trainer(inference_mode=False) lets views be followed."
                    if torch.is_inference_mode_enabled()
                    else ""
                ),
            )

    def _run(self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter):
                self._holdings.use(tensor)
        self.touch(tensors, name)
        changed = changed_in_place(name, args, kwargs)
        self.check_not_lent(changed, name)
        written = self.written(changed)
        for tensor in written:
            if id(tensor) in self._read_before:
                self._check_not_read(tensor, name)
        if name in RANDOM:
            with self._streams.isolated(self._micro_batch, -1, len(self.calls)):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        numbers, differentiable = self.numbers(results_of(result, written))
        if shaped_by_values(name, args):
            leaves, structure = tree_flatten(result)
            described = tuple(TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            self.calls.append(Call(name, numbers, differentiable, structure, described))
        else:
            self.calls.append(Call(name, numbers, differentiable))
        return result

    def _check_not_read(self, changed: Tensor, name: str) -> None:
        """A buffer must not change here for the next micro-batch if an earlier stage reads it."""
        owned = self._holdings.name_of(changed) if self.number_of(changed) is None else None
        if owned is not None:
            raise CutError(
                f"'{name}' changes '{owned}' in place with values of this stage, and an earlier stage reads it: it "
                "would read an old value for the next micro-batch.",
                hint=f"Change '{owned}' inside a layer, or after the step, in on_train_batch_end.",
            )

    def paused(self) -> _Paused:
        """A context in which torch calls are neither recorded nor slowed down."""
        return _Paused(self)


class _Paused:
    """Takes the mode off torch's stack where it is on top, and silences it elsewhere. A class, for speed."""

    __slots__ = ("_popped", "_tracker")

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def __enter__(self) -> None:
        self._popped = _get_current_function_mode() is self._tracker  # type: ignore[no-untyped-call]
        if self._popped:
            torch._C._pop_torch_function_stack()
        else:
            self._tracker._off += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._popped:
            torch._C._push_on_torch_function_stack(self._tracker)
        else:
            self._tracker._off -= 1


def swap(old: Tensor, new: Tensor) -> None:
    """Make the object ``old`` hold what ``new`` holds, for everyone who has a reference to it."""
    try:
        torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    except (RuntimeError, TypeError) as error:
        raise CutError(
            f"a tensor {tuple(old.shape)} {old.dtype} computed before this stage's layers cannot be filled in, because "
            f"something else shares its memory or refers to it weakly: {error}",
            hint=_NO_VIEWS,
        ) from error
