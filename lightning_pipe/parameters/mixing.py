"""Notices that an optimizer joins numbers of several parameters, which each rank would do for its own alone.

In the first step every tensor has the colours of the parameters that it comes from: a parameter, its gradient and its
state have one, and the result of a function has those of its arguments. Nothing is computed twice and no optimizer is
known by name; what comes from no parameter (a learning rate, a count of steps) has no colour. Numbers that are read
with ``item`` keep their colour in arithmetic; of others it shows in the order of the reads (`Mixing._noted`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.torch_functions import METADATA, changed_in_place, function_name
from lightning_pipe.torch_internals import tree_leaves, tree_map

# ruff: noqa: SIM905  a table of names is easier to read as words than as a list of strings

Colours = frozenset[str]
"""Names of parameters."""

_NONE: Colours = frozenset()
_SHAPES_ALONE = frozenset(
    """
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full
    new_empty_strided
    """.split()
)
"""Functions whose result has nothing of the values of a tensor."""
_OVERWRITE = frozenset("copy_ fill_ zero_ _foreach_copy_ _foreach_zero_ normal_ uniform_ bernoulli_".split())
"""Functions after which nothing is left of what a tensor was before."""
_BY_POSITION = ("_foreach_", "_fused_", "_amp_foreach_")
"""Functions of lists that treat what has the same position together, and nothing else."""


class Mixing:
    """Looks on at the first real step of an optimizer, and at none afterwards.

    Args:
        optimizer: the optimizer.
        names: of its parameters, by ``id``.

    Raises:
        ConfigurationError: from the step: it joins parameters. Names the operation, its place and two of them.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer, self._names = optimizer, names
        self._memory: dict[int, tuple[StorageWeakRef, list[tuple[int, int, Colours]]]] = {}
        self._others: dict[int, tuple[Tensor, Colours]] = {}
        self._reads: dict[str, str] = {}
        self._mode: _Mode | None = None
        self.done = False
        """Whether there has been a step."""
        self._failed = False
        self._hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]

    # ------------------------------------------------------------------ when

    def remove(self) -> None:
        """End, in the middle of a step too."""
        self._end()
        for hook in self._hooks:
            hook.remove()

    def _end(self) -> None:
        self._pause()
        self.done = True
        self._memory.clear()
        self._others.clear()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return None if self.done else after_closure(args, kwargs, self._resume, self._pause)

    def _after(self, *_: Any) -> None:
        stepped = self._mode is not None
        self._pause()
        if stepped:
            self._without_traces()
            self._end()  # the hooks stay: torch is going over them

    def _resume(self) -> None:
        parameters = [(p, self._names.get(id(p))) for group in self._optimizer.param_groups for p in group["params"]]
        known = [(parameter, name) for parameter, name in parameters if name is not None and parameter.grad is not None]
        if not known or self.done:
            return
        for parameter, name in known:
            # a count of steps among the state has no colour
            state = [leaf for leaf in tree_leaves(self._optimizer.state.get(parameter)) if isinstance(leaf, Tensor)]
            for tensor in (parameter, parameter.grad, *(each for each in state if each.numel() > 1)):
                self._paint(tensor, frozenset([name]))
        self._mode = _Mode(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _pause(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _without_traces(self) -> None:
        """Numbers that the optimizer keeps become ordinary ones."""
        kept: list[dict[Any, Any]] = [*self._optimizer.param_groups, vars(self._optimizer)]
        kept += [state for state in self._optimizer.state.values() if isinstance(state, dict)]
        for each in kept:
            for key, value in each.items():
                if isinstance(value, _Number):
                    each[key] = value.plain

    # ------------------------------------------------------------------ colours

    def colours_of(self, leaf: Any) -> Colours:
        """The parameters that a tensor or number comes from."""
        if isinstance(leaf, _Number):
            return leaf.colours
        if not isinstance(leaf, Tensor):
            return _NONE
        place = _place_of(leaf)
        if place is None:
            return self._others.get(id(leaf), (leaf, _NONE))[1]
        key, start, stop = place
        spans = self._memory[key][1] if key in self._memory else []
        return _NONE.union(*(colours for begin, end, colours in spans if begin < stop and start < end))

    def _paint(self, tensor: Tensor, colours: Colours) -> None:
        place = _place_of(tensor)
        if place is None:
            self._others[id(tensor)] = (tensor, colours)
            return
        key, start, stop = place
        # as long as the reference lives no other memory gets this key
        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        _, spans = self._memory.setdefault(key, (reference, []))
        spans[:] = [span for span in spans if span[0] < start or span[1] > stop]
        if colours:
            spans.append((start, stop, colours))

    def union(self, name: str, leaves: Iterable[Any]) -> Colours:
        """The colours of what an operation takes; of a comparison or sum of numbers as well.

        Raises:
            ConfigurationError: there are several.
        """
        colours = _NONE.union(*map(self.colours_of, leaves))
        if len(colours) > 1:
            raise self._error(name, *sorted(colours)[:2])
        return colours

    def _error(self, name: str, one: str, other: str, where: str = "") -> ConfigurationError:
        self._failed = True  # what handles the error may join what it likes
        return ConfigurationError(
            f"{type(self._optimizer).__name__}.step joins numbers of several parameters: '{name}' at "
            f"{where or _line()} brings '{one}' and '{other}' together. On a pipeline each rank would join those of "
            "its own layers alone.",
            hint="Use an optimizer that treats every parameter by itself, such as AdamW or SGD; for a limit on the "
            "norm of all gradients Trainer(gradient_clip_val=…).",
        )

    # ------------------------------------------------------------------ calls

    def called(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a torch function and colour what it leaves behind."""
        name = function_name(func)
        if self._failed or name in METADATA or (name.endswith(".__get__") and name not in ("T.__get__", "mT.__get__")):
            return func(*args, **kwargs)
        if name.startswith(_BY_POSITION):
            return self._by_position(name, func, args, kwargs)
        written = changed_in_place(name, args, kwargs)
        out = tree_leaves(kwargs.get("out"))
        fresh = written if name in _OVERWRITE else [leaf for leaf in out if isinstance(leaf, Tensor)]
        given = [] if name in _SHAPES_ALONE else [each for each in tree_leaves((args, kwargs)) if not _in(each, fresh)]
        colours = self.union(name, given)
        if name == "data.__set__":
            colours |= self.union(name, args)
        before = {place[0] for leaf in tree_leaves((args, kwargs)) if (place := _place_of(leaf)) is not None}
        result = func(*args, **kwargs)
        if colours and any(not isinstance(leaf, Tensor) and leaf is not None for leaf in tree_leaves(result)):
            return self._read(name, result, colours)
        self._noted(colours)
        for tensor in written:
            self._paint(tensor, colours)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not _in(leaf, written):
                place = _place_of(leaf)
                if place is None or place[0] not in before:
                    self._paint(leaf, colours)
        return result

    def _by_position(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        length = len(args[0])
        lists = [each for each in given if isinstance(each, list | tuple) and len(each) == length]
        common = [each for each in given if not isinstance(each, list | tuple)]
        sources = lists[1:] if name in _OVERWRITE else lists
        colours = [self.union(name, [*common, *(each[i] for each in sources)]) for i in range(length)]
        result = func(*args, **kwargs)
        written = lists if name.startswith("_fused_") else [args[0]] if name.endswith("_") else [list(result or ())]
        for i, each in enumerate(colours):
            self._noted(each)
            for tensor in (tensors[i] for tensors in written if len(tensors) == length):
                if isinstance(tensor, Tensor):
                    self._paint(tensor, each)
        return result

    # ------------------------------------------------------------------ numbers

    def _read(self, name: str, result: Any, colours: Colours) -> Any:
        """A value is read: it stays coloured, or the read is kept in mind."""
        if name in ("item", "tolist"):
            return tree_map(lambda leaf: _Number.of(leaf, colours, self) if type(leaf) is float else leaf, result)
        for colour in colours:
            self._reads.pop(colour, None)
            self._reads[colour] = _line()
        return result

    def _noted(self, colours: Colours) -> None:
        """Raise if a parameter is gone on with after it was read, and others after it.

        A loop that reads and uses one parameter after the other never comes back; what first reads all of them does.
        """
        for colour in colours:
            if colour in self._reads:
                last = next(reversed(self._reads))
                if last != colour:
                    raise self._error("a value read from a tensor", colour, last, self._reads[last])
                del self._reads[colour]

    @property
    def active(self) -> bool:
        """Whether the step is under way."""
        return self._mode is not None and not self._failed


def after_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[], None], first: Callable[[], None] = lambda: None
) -> tuple[Any, Any] | None:
    """For hooks before a step: do something once the gradients are there, after its closure if it has one.

    Args:
        args: of the step, with the optimizer.
        kwargs: of the step.
        then: what is to be done; each time if the step calls its closure several times.
        first: what is to be done before the closure.

    Returns:
        Other arguments for the step.
    """

    def around(closure: Callable[[], Any]) -> Callable[[], Any]:
        def own() -> Any:
            first()
            result = closure()
            then()
            return result

        return own

    optimizer, *rest = args
    if rest and callable(rest[0]):
        return (optimizer, around(rest[0]), *rest[1:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": around(kwargs["closure"])}
    then()
    return None


class _Mode(TorchFunctionMode):
    def __init__(self, mixing: Mixing) -> None:
        super().__init__()
        self._mixing = mixing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._mixing.called(func, args, kwargs or {})


class _Number(float):
    """A number that was read from a tensor."""

    colours: Colours
    _mixing: Mixing

    @classmethod
    def of(cls, value: float, colours: Colours, mixing: Mixing) -> _Number:
        """A number with colours."""
        number = cls(value)
        number.colours, number._mixing = colours, mixing
        return number

    @property
    def plain(self) -> float:
        """The number alone."""
        return float.__pos__(self)

    def __reduce__(self) -> Any:
        return float, (self.plain,)


def _arithmetic(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def method(self: _Number, *others: Any) -> Any:
        result = plain(self, *others)
        if type(result) is not float or not self._mixing.active:
            return result
        return _Number.of(result, self._mixing.union(name, (self, *others)), self._mixing)

    return method


for _name in "add sub mul truediv floordiv mod pow".split():
    for _each in (f"__{_name}__", f"__r{_name}__"):
        setattr(_Number, _each, _arithmetic(_each))
for _each in ("__neg__", "__abs__", "__pos__"):
    setattr(_Number, _each, _arithmetic(_each))


def _place_of(tensor: Any) -> tuple[int, int, int] | None:
    """The memory of a tensor, and where in it the tensor begins and ends; ``None`` for others."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # subclasses without memory of their own
        return None
    start = int(tensor.storage_offset()) * tensor.element_size()
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    stop = start + (int(reach) + 1 if tensor.numel() else 0) * tensor.element_size()
    return int(storage._cdata), start, stop


def _in(leaf: Any, tensors: Iterable[Tensor]) -> bool:
    return any(leaf is tensor for tensor in tensors)


def _line() -> str:
    """The line of the optimizer's code that runs."""
    frames = list(_frames())
    own = [frame for frame in frames if not frame[0].startswith(str(Path(torch.__file__).parent))]
    file, line = (own or frames)[0]
    return f"{file}:{line}"


def _frames() -> Iterator[tuple[str, int]]:
    """Files and lines of this thread, innermost first, up to the step."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            yield frame.f_code.co_filename, frame.f_lineno
        if frame.f_code.co_name == "step":
            return
        if frame.f_back is None:
            return
        frame = frame.f_back
