"""Follows the user's code outside layers and numbers, alike on all ranks, what derives from layers or parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.absent_tensor import check_value
from lightning_pipe.intercept.call_record import AGAIN, CallRecord, Unseen
from lightning_pipe.intercept.describe import described, stand_ins
from lightning_pipe.intercept.digest import Digest
from lightning_pipe.intercept.in_place import InPlace
from lightning_pipe.intercept.numbers import NO_VIEWS, SAME_PATH, Numbers
from lightning_pipe.intercept.placeholder import KNOWN, Placeholder, no_hook, no_value
from lightning_pipe.intercept.random_streams import Surroundings
from lightning_pipe.intercept.torch_functions import (
    AUTOGRAD,
    METADATA,
    MIRRORED,
    changed_in_place,
    draws,
    function_name,
    is_random,
    leaves_of,
    results_of,
    values_read,
)
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.torch_internals import current_function_mode, pop_function_mode, push_function_mode, tree_unflatten

if TYPE_CHECKING:
    from lightning_pipe.parameters.ownership import Ownership


class Tracker(TorchFunctionMode):
    """A mode around one run of the user's step on one stage.

    A tensor is *derived* if it comes from a layer or a parameter. Derived tensors get numbers in the order in which
    they appear; all ranks run the same code, so they get the same numbers everywhere. While the stage is ``waiting``,
    derived tensors are placeholders here and their calls are only checked against ``expected``, the calls that the
    previous stage made up to its cut. At this stage's first layer the placeholders are filled, and derived tensors are
    real from there on.

    Args:
        isolated: gives a context with the micro-batch's random stream of a key.
        parameter_use: the module's parameters and buffers outside layers.
        partial: whether other stages run some of the layers.

    Attributes:
        partial: as given.
        followed: whether other stages make the calls again that come now.
        expected: while ``waiting``, the calls of the previous stage up to its cut.
        alone: whether no other micro-batch is under way, which could read what this one changes.
        surroundings: what is around the code that runs now.
        come_back: called where the step comes back to an earlier stage other than by a layer, if it may.
        changing: told which tensors a function is about to change in place; ``None``: nobody asks.
        function: the ``torch.autograd.Function`` that is being applied, if any.
        leaves_before: by ``id`` the leaves of the graph that an earlier stage uses: derivatives by them go on there.
        shows_objects: whether other ranks can be shown what layers change in objects that they are given.
    """

    come_back: Callable[[str], None] | None = None
    changing: Callable[[Sequence[Tensor], str], None] | None = None
    function = ""
    alone = shows_objects = False

    def __init__(
        self,
        isolated: Callable[..., AbstractContextManager[None]],
        parameter_use: Ownership,
        *,
        partial: bool,
    ) -> None:
        super().__init__()
        self.calls: list[CallRecord] = []
        self.used: set[int] = set()
        self.waiting, self._off = False, 0
        self.spans: list[tuple[int, int]] = []
        self.numbers = Numbers()
        self.digest = Digest(self.numbers, parameter_use.name_of, idle=not partial)
        self.in_place = InPlace(self.numbers, parameter_use, partial=partial)
        self.partial = self.followed = partial
        self.expected = tuple[CallRecord, ...]()
        self.leaves_before: dict[int, Tensor] = {}
        self.surroundings, self._parameter_use = Surroundings(isolated), parameter_use

    # ------------------------------------------------------------------ the record

    def expects(self, name: str) -> bool:
        """Whether the call that the previous stage made here was ``name``."""
        return (call := self.following()) is not None and call.name == name

    # not a property: code that is compiled outside layers has the compiler trace the mode (torch 2.13)
    def following(self) -> CallRecord | None:
        """The call that the previous stage made here, if any."""
        position = len(self.calls)
        return self.expected[position] if position < len(self.expected) else None

    def expect(self, name: str) -> CallRecord:
        """The call the previous stage made here; raises unless it was ``name``, and was given the same."""
        call = self.following()
        if call is not None and call.name == AGAIN and self.come_back is not None:
            self.come_back(name)
        if call is not None and call.name == name:
            self.digest.check(name, len(self.calls))
            self.calls.append(call)
            return call
        found, number = "none" if call is None else f"'{call.name}'", len(self.calls)
        raise CutError(
            f"this stage makes call number {number} outside its layers to '{name}', the previous stage made {found}.",
            hint=SAME_PATH,
        )

    @property
    def complete(self) -> bool:
        """Whether all expected calls have come."""
        return len(self.calls) == len(self.expected)

    def arrive(self) -> None:
        """The first layer is reached, (4) in `stage_run`: the previous stage must have made the same calls before."""
        if not self.complete:
            raise CutError(
                f"this stage reached its first layer after {len(self.calls)} calls outside its layers, the previous "
                f"stage after {len(self.expected)}.",
                hint=SAME_PATH,
            )
        self.waiting = False

    def follow(self, tensors: list[Tensor], call: CallRecord) -> None:
        """Give the tensors of a call on a waiting stage the numbers they have on the previous stage."""
        if len(tensors) != len(call.numbers):
            raise CutError(
                f"'{call.name}' gives {len(tensors)} tensors here, {len(call.numbers)} on the previous stage."
            )
        for tensor, number, differentiable in zip(tensors, call.numbers, call.differentiable, strict=True):
            if isinstance(tensor, Placeholder):
                tensor.differentiable = differentiable
            known = self.numbers.of(tensor)
            if known is None:
                self.numbers.bind(tensor, number)
            elif known != number:
                raise CutError(f"'{call.name}' returns one of its arguments here and a copy on the previous stage.")

    def touch(self, tensors: list[Tensor], name: str, new: bool = False) -> None:
        """Note that real code uses ``tensors``; a placeholder among them has not been sent and is an error.

        So is a parameter that another rank has, and a tensor that was made inside a layer and is not its result, unless
        it is ``new``: the layers of other stages have none like it to give.
        """
        for position, tensor in enumerate(tensors):
            plain = type(tensor) is Tensor  # else what it is derived from is asked, which takes longer
            if not plain and isinstance(tensor, nn.Parameter):
                if self.come_back is not None and not self._parameter_use.holds_all([tensor]):
                    self.come_back(name)
                self._parameter_use.use(tensor, name)
            if not plain:
                check_value(tensor, f"'{name}'")
            known = self.numbers.of(tensor)
            if known in self.numbers.unfilled:
                raise CutError(
                    f"'{name}' needs tensor argument {position}: {self.numbers.unfilled[known]}", hint=NO_VIEWS
                )
            if not plain and isinstance(tensor, Placeholder):
                raise CutError(
                    f"'{name}' needs tensor argument {position}, {tuple(tensor.shape)} {tensor.dtype}, which an "
                    "earlier stage has and did not send: in the first batch of this shape nothing needed it.",
                    hint="Use the same tensors in every batch of the same shape: make optional uses unconditional.",
                )
            if known is not None:
                self.used.add(known)
            elif plain and tensor.requires_grad and tensor.is_leaf:
                self._parameter_use.use(tensor, name)
            elif self.partial and not new and tensor.grad_fn is not None and self._made_inside(tensor.grad_fn):
                raise CutError(
                    f"'{name}' uses a tensor {tuple(tensor.shape)} {tensor.dtype} that left a layer otherwise than by "
                    "its result, through a pre-hook or a global for instance; the layers of other stages cannot give "
                    "theirs.",
                    hint="Return it from the layer, keep it as an attribute of the module that computes it, or take it "
                    "in a forward hook on a part of the layer.",
                )

    def note_leaves(self, tensors: Sequence[Tensor]) -> None:
        """Note the leaves of the graph among what an earlier stage uses."""
        self.leaves_before |= {id(each): each for each in tensors if each.requires_grad and each.grad_fn is None}

    def _made_inside(self, node: Any) -> bool:
        # Autograd counts the nodes that a thread makes (torch 2.13), so those of a layer lie between two counts.
        made = node._sequence_nr()
        return any(start <= made < end for start, end in self.spans)

    # ------------------------------------------------------------------ the mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record and number one torch call outside layers."""
        kwargs = kwargs or {}
        if self._off or self.function:
            if not self._off:  # what an autograd Function uses counts, and no more: other stages have its results
                tensors = [leaf for leaf in leaves_of(args, kwargs) if isinstance(leaf, Tensor)]
                self.touch(tensors, function_name(func), new=True)
            return func(*args, **kwargs)
        name = function_name(func)
        gradient = name in ("grad.__get__", "grad.__set__") and isinstance(args[0], nn.Parameter)
        if gradient and (owned := self._parameter_use.name_of(args[0])) is not None and args[0].requires_grad:
            raise CutError(
                f"the step reads or sets the gradient of '{owned}', which is on another rank, or in training that of "
                "some micro-batches, or none.",
                hint="Do so in a hook, such as on_before_optimizer_step. Lightning zeroes gradients by itself; "
                "torch.autograd.grad gives derivatives within the step.",
            )
        if name in MIRRORED and len(args) == 2 and isinstance(args[0], Tensor) and isinstance(args[1], Tensor):
            # for `x < h` Python asks h first if it is of a class derived from that of x: a placeholder, for h > x
            func = MIRRORED[name]
            name, args = function_name(func), args[::-1]
        if name in METADATA and not (name == "__format__" and args[1]):  # known without a value: nothing to record
            return (KNOWN.get(name, func) if args and isinstance(args[0], Placeholder) else func)(*args, **kwargs)
        leaves = leaves_of(args, kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self.waiting:
            self.note_leaves(tensors)
        if not any(map(self.numbers.derived, tensors)):
            return self._plain(name, func, args, kwargs, leaves, tensors)
        if name == "_is_all_true":  # so torch.distributions checks what it is given: on the stage that has it
            self.touch([] if self.waiting else tensors, name)
            return self.waiting or bool(func(*args, **kwargs))
        # what a hook refers to changes in backward passes, at other times on every rank
        self.digest.call(name, tensors if name == "register_hook" else leaves, kwargs)
        return (self._answer if self.waiting else self._run)(name, func, args, kwargs, tensors)

    def _plain(self, name: str, func: Any, args: Any, kwargs: Any, leaves: list[Any], tensors: list[Tensor]) -> Any:
        """Call a function of what is not derived: every stage has it, and does the same."""
        changed = changed_in_place(name, args, kwargs)
        written = self.in_place.written(changed) if changed else ()
        if written:
            self._check_changing(written, name)
        if name in ("numpy", "__array__"):
            return self.in_place.array_of(func, args, kwargs)
        if name == "data.__get__":
            func = Tensor.detach
        if drawn := draws(func, name):
            with self._stream_of():
                result = func(*args, **kwargs)
            if is_random(name):
                self.digest.draw(name, kwargs.get("generator"))
        else:
            result = func(*args, **kwargs)
        if name.startswith(("empty", "new_empty")):
            with torch.no_grad():  # the result may be a leaf
                result.zero_()  # what is in new memory differs between stages, and says nothing
        if self.digest.compares:  # behind the last layer, too
            # what is given back as it was (`.to(device)`) is what it was
            made = [each for each in results_of(result, ()) if all(each is not leaf for leaf in leaves)]
            self.digest.follow((name, *kwargs), leaves, made, written, drawn)
        return result

    def _answer(self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        call = self.expect(name)
        written = self.in_place.written(changed_in_place(name, args, kwargs))
        if name in AUTOGRAD:
            if not isinstance(args[0], Placeholder):
                return func(*args, **kwargs)
            self.follow(written, call)
            return no_hook() if name == "register_hook" else args[0]
        self.in_place.forget(written, name)  # (3): an earlier stage has written values that are not here
        if call.structure is None:
            raise no_value(func, "what it returns, or leaves of a tensor's shape, does not go to other stages")
        result = tree_unflatten(stand_ins(call.leaves, tensors, tensors[0].device), call.structure)
        self.follow(results_of(result, written), call)
        return result

    def _run(self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        self.touch(tensors, name)
        before = self.in_place.noted(tensors) if self.function else ()
        changed = changed_in_place(name, args, kwargs)
        written = self.in_place.written(changed) if changed else ()
        if written:
            self._check_changing(written, name)
        shapes = list(map(TensorSpec.of, written))
        # A stage that waits does not call the function: what it draws must not come from the stream of the code around.
        if self.function or draws(func, name):
            with self._stream_of(-1, len(self.calls)):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        numbers, differentiable = self.numbers.give_all(results_of(result, written))
        told = None
        # what the code reads may decide its path: stages that wait read the same
        if (self.function or self.followed) and list(map(TensorSpec.of, written)) == shapes:
            told = _shown(result, tensors) if numbers else values_read(name, result)
        if self.function and self.partial and (told is None or self.in_place.changed(before, name)):
            raise CutError(
                f"the torch.autograd.Function '{name}' changes a tensor in place, or returns something else than new "
                "tensors on the device of what it is given: other stages cannot see it.",
                hint="Apply it inside a layer.",
            )
        self.calls.append(CallRecord(name, numbers, differentiable, *(told or ())))
        return result

    def _stream_of(self, *key: int) -> AbstractContextManager[None]:
        """The random stream of a function; without a key that of the code around."""
        return self.surroundings.stream(*key)

    def call_function(self, name: str, apply: Any, args: Any, kwargs: Any) -> Any:
        """Record or follow one application of a ``torch.autograd.Function`` outside layers."""
        leaves = leaves_of(args, kwargs)
        self.digest.call(name, leaves, kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self.waiting:
            return self._answer(name, apply, args, kwargs, tensors)
        with self.within(name):
            return self._run(name, apply, args, kwargs, tensors)

    @contextmanager
    def within(self, function: str) -> Iterator[None]:
        """While a ``torch.autograd.Function`` is applied."""
        self.function = function
        try:
            yield
        finally:
            self.function = ""

    def _check_changing(self, written: Sequence[Tensor], name: str) -> None:
        """Raise if tensors are about to change in place and other stages would not see it."""
        if name.startswith("requires_grad") or (name.endswith(".__set__") and name != "data.__set__"):
            return  # what belongs to a tensor changes, and not its values
        self.in_place.check_not_lent(written, name)
        if self.changing is not None:
            self.changing(written, name)

    def paused(self) -> _Paused:
        """A context, around layers and the engine's own code, in which calls are neither recorded nor slowed down."""
        return _Paused(self)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Within `paused`, while a hook acts: it is followed, and draws the same random numbers on all stages."""
        off, around = self._off, self.surroundings
        around.inner_hook = True
        try:
            # All stages have appended the hook's call by now, so they agree on the position. The last number tells this
            # stream from the one of a torch function at the same position; see `_run`.
            with around.stream(-1, len(self.calls), 0):
                self._off, around.inside = 0, False
                try:
                    # Silenced by a count, the mode is still on torch's stack; otherwise `_Paused` has taken it off.
                    with nullcontext() if off else self:
                        yield
                finally:
                    self._off, around.inside = off, True
        finally:
            around.inner_hook = False


def _shown(result: Any, tensors: Sequence[Tensor]) -> tuple[Any, tuple[Any, ...]] | None:
    """What a function of tensors returns, for stages that wait; ``None``: it is nothing that they can be shown."""
    structure, leaves, _ = described(result, tensors, tensors[0].device)
    return None if any(isinstance(leaf, Unseen) for leaf in leaves) else (structure, leaves)


class _Paused:
    """Takes the mode off torch's stack where it is on top, and silences it elsewhere. A class, for speed."""

    __slots__ = ("_inside", "_popped", "_tracker")

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def __enter__(self) -> None:
        around = self._tracker.surroundings
        self._inside, around.inside = around.inside, True
        self._popped = current_function_mode() is self._tracker  # type: ignore[no-untyped-call]
        if self._popped:
            # A mode on the stack sends each torch call of a layer through Python. One that the user has put on top of
            # this one must not be taken off, so it costs that much there.
            pop_function_mode()
        else:
            self._tracker._off += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracker.surroundings.inside = self._inside
        if self._popped:
            push_function_mode(self._tracker)
        else:
            self._tracker._off -= 1
