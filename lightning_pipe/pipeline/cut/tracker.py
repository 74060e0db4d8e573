"""Follows the user's code outside layers: which tensors derive from layers or parameters, numbered alike on all ranks."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_leaves

from lightning_pipe.errors import CutError
from lightning_pipe.pipeline.cut.path import Call
from lightning_pipe.pipeline.cut.placeholder import Placeholder, function_name, shape_only
from lightning_pipe.pipeline.rng import Streams

# Functions that look at a tensor without reading its value: they run as they are and are not recorded.
_METADATA = frozenset(
    "size dim stride numel nelement element_size storage_offset is_contiguous is_floating_point is_complex is_pinned "
    "ndimension get_device type_as_string __len__ __hash__ __repr__ __str__ __format__ has_names is_same_size "
    "is_tensor is_storage result_type requires_grad_ retain_grad register_hook".split()
)
_METADATA_PROPERTIES = frozenset(
    f"{name}.__get__"
    for name in "shape dtype device ndim layout requires_grad is_leaf grad_fn is_cuda is_cpu is_meta is_sparse "
    "is_quantized is_nested names itemsize nbytes output_nr _version _base retains_grad grad".split()
)
# Functions that draw random numbers: outside layers each draws from a stream of its own, so that a stage that only
# stands in for the call does not fall behind.
_RANDOM = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout rrelu bernoulli bernoulli_ "
    "multinomial normal normal_ poisson rand_like randn_like randint_like random_ uniform_ exponential_ geometric_ "
    "log_normal_ cauchy_ scaled_dot_product_attention gumbel_softmax".split()
)
_IN_PLACE = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__".split()
)
_tokens = itertools.count()


class Holdings(Protocol):
    """What the tracker must know of the module's parameters and buffers outside layers."""

    def use(self, parameter: nn.Parameter) -> None:
        """Note that this stage uses ``parameter`` for real; raises if this rank does not hold it."""

    def name_of(self, tensor: Tensor) -> str | None:
        """The dotted name of a parameter or buffer of the module, ``None`` for other tensors."""


class Tracker(TorchFunctionMode):
    """A mode around one run of the user's step on one stage.

    A tensor is *derived* if it comes from a layer or a parameter. Derived tensors get numbers in the order in which they
    appear; all ranks run the same code, so they get the same numbers everywhere. Before the stage's first layer
    (``waiting``) derived tensors are placeholders here and their calls are only checked against ``expected``, the calls
    the previous stage made; afterwards they are real.

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
        self._expected = expected or ()
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

    def number(self, tensor: Tensor) -> int:
        """The number of a derived tensor; a new one when it is seen for the first time."""
        known = self.number_of(tensor)
        if known is not None:
            return known
        number, self._next = self._next, self._next + 1
        self.bind(tensor, number)
        return number

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
        """Give the placeholder with ``number`` its value, in place: every reference to it sees the value."""
        reference = self._alive.pop(number, None)
        placeholder = reference() if reference is not None else None
        del reference  # tensors with weak references cannot be swapped (torch 2.13)
        if placeholder is None:
            return
        if placeholder.shape != value.shape or placeholder.dtype != value.dtype:
            raise CutError(
                f"tensor {number} is {tuple(value.shape)} {value.dtype} on the stage that computes it and "
                f"{tuple(placeholder.shape)} {placeholder.dtype} on this one.",
                hint="The step must take the same path on all ranks: no decisions by rank, time or unseeded randomness.",
            )
        self.bind(value, number)
        self._alive.pop(number)
        swap(placeholder, value)
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
            hint="The step must take the same path on all ranks: no decisions by rank, time, unseeded randomness or values.",
        )

    def arrive(self) -> None:
        """The stage's first layer is reached: from here on derived tensors are real."""
        if len(self.calls) != len(self._expected):
            raise CutError(
                f"this stage reached its first layer after {len(self.calls)} calls, "
                f"the previous stage had made {len(self._expected)} (next: '{self._expected[len(self.calls)].name}').",
                hint="The step must take the same path on all ranks: no decisions by rank, time, unseeded randomness or values.",
            )
        self.waiting = False

    def follow(self, tensors: list[Tensor], numbers: tuple[int, ...]) -> None:
        """Give the tensors of a call on a waiting stage the numbers they have on the previous stage."""
        if len(tensors) != len(numbers):
            raise CutError(
                f"'{self.calls[-1].name}' gives {len(tensors)} tensors here, {len(numbers)} on the previous stage."
            )
        for tensor, number in zip(tensors, numbers, strict=True):
            if self.number_of(tensor) is None:
                self.bind(tensor, number)
            self._next = max(self._next, number + 1)

    def touch(self, tensors: list[Tensor], name: str) -> None:
        """Note that real code uses ``tensors``; a placeholder among them has not been sent and is an error."""
        for position, tensor in enumerate(tensors):
            if isinstance(tensor, Placeholder):
                raise CutError(
                    f"'{name}' needs tensor argument {position}, {tuple(tensor.shape)} {tensor.dtype}, which an earlier "
                    "stage has and did not send: in the first batch of this shape nothing needed it.",
                    hint="The step must use the same tensors in every batch of the same shape; make optional uses unconditional.",
                )
            known = self.number_of(tensor)
            if known is not None:
                self.used.add(known)

    # ------------------------------------------------------------------ the mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record and number one torch call outside layers."""
        kwargs = kwargs or {}
        if self._off:
            return func(*args, **kwargs)
        name = function_name(func)
        if name in _METADATA or name in _METADATA_PROPERTIES:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(self.derived(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        return (
            self._stand_in(name, func, args, kwargs) if self.waiting else self._run(name, func, args, kwargs, tensors)
        )

    def _stand_in(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        call = self.expect(name)
        changed = _changed_in_place(name, args, kwargs)
        if changed is not None:
            self.forget(changed, name)
        result = shape_only(func, args, kwargs)
        self.follow(_results(result, changed), call.numbers)
        return result

    def forget(self, changed: Tensor, name: str) -> None:
        """Turn a known tensor into a placeholder, because ``name`` writes another stage's values into it."""
        if isinstance(changed, Placeholder):
            return
        owned = self._holdings.name_of(changed)
        if owned is not None:
            raise CutError(
                f"'{name}' changes '{owned}' in place before this stage's layers, with values of an earlier stage.",
                hint=f"Change '{owned}' after the last layer, or inside a layer.",
            )
        swap(changed, Placeholder.of(tuple(changed.shape), changed.dtype, changed.device))

    def _run(self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter):
                self._holdings.use(tensor)
        self.touch(tensors, name)
        if name in _RANDOM:
            with self._streams.isolated(self._micro_batch, -1, len(self.calls)):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        numbers = tuple(self.number(tensor) for tensor in _results(result, _changed_in_place(name, args, kwargs)))
        self.calls.append(Call(name, numbers))
        return result

    def paused(self) -> _Paused:
        """A context in which torch calls are neither recorded nor slowed down."""
        return _Paused(self)


class _Paused:
    """Takes the mode off torch's stack where it is on top, and silences it elsewhere. A class, for speed."""

    __slots__ = ("_popped", "_tracker")

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def __enter__(self) -> None:
        self._popped = _get_current_function_mode() is self._tracker
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
        torch.utils.swap_tensors(old, new)
    except (RuntimeError, TypeError) as error:
        raise CutError(
            f"a tensor {tuple(old.shape)} {old.dtype} computed before this stage's layers cannot be filled in, because "
            f"something else shares its memory or refers to it weakly: {error}",
            hint="Do not keep views of, or weak references to, tensors across layer calls; use .clone().",
        ) from error


def _changed_in_place(name: str, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that a torch function changes in place, by torch's naming rule."""
    if name in _IN_PLACE or name.endswith(".__set__") or (name.endswith("_") and not name.endswith("__")):
        return args[0] if args and isinstance(args[0], Tensor) else None
    out = kwargs.get("out")
    return out if isinstance(out, Tensor) else None


def _results(result: Any, changed: Tensor | None) -> list[Tensor]:
    """The tensors a call leaves behind: its results and what it changed in place, each object once."""
    leaves = (
        [result] if isinstance(result, Tensor) else [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    )
    if changed is not None and all(changed is not leaf for leaf in leaves):
        leaves.append(changed)
    return leaves
