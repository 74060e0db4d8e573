"""Parameters and buffers whose values other ranks have, and what comes from them."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipe.construction import attributes_of
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.placeholder import Placeholder, shape_only
from lightning_pipe.intercept.torch_functions import AUTOGRAD, METADATA, changed_in_place, function_name, is_random
from lightning_pipe.local_parts import is_divided
from lightning_pipe.torch_internals import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    storage_uses,
    tree_leaves,
    tree_map,
)

if TYPE_CHECKING:
    from lightning_pipe.parameters.ownership import Ownership

# Functions that need no value, and do not show any.
_NEEDS_NONE = (METADATA - {"__repr__", "__str__", "__format__"}) | AUTOGRAD
_NEEDS_NONE |= {"untyped_storage", "data_ptr", "register_post_accumulate_grad_hook"}
# Functions whose result has the same values, elsewhere or of another type.
_MOVED = frozenset(["to", "cpu", "cuda", "type", "float", "double", "half", "bfloat16", "type_as"])
_ACCESS = frozenset(["__get__", "__set__", "__delete__"])
_PLAIN = Tensor, nn.Parameter
_SHOWN = 3
"""Names that an error lists."""

IN_HOOKS = (
    "In hooks a rank has the values of its own layers alone: read a parameter on the ranks that hold it, with "
    "`if trainer.strategy.pipeline.holds(name)`. Call or generate from a checkpoint, or after fit, when "
    "trainer.strategy.whole_module() gives every rank all of it; the norm of all gradients comes from "
    "trainer.strategy.grad_norm(), and a limit on it is Trainer(gradient_clip_val=…). In a loop of your own ask the "
    "Pipeline on all ranks: evaluate(), state_dict(), clip_grad_norm_()."
)
_IN_STEPS = (
    "Let the layer use it, or return it, in its forward; or register it in the LightningModule, outside the layers: "
    "every rank has it there."
)
_ONE_DEVICE = (
    "Only tensors of one rank can follow each other: a teacher whose layers follow a student's needs one device. For "
    "averaged weights use Lightning's callback EMAWeightAveraging, for a limit on the norm of all gradients "
    "Trainer(gradient_clip_val=…) or self.clip_gradients(…): the norm is trainer.strategy.grad_norm()."
)


def hint_of_use(by: str) -> str:
    """What to do about a parameter of another rank that a step gives to a function."""
    if by.startswith("requires_grad"):
        return "A step that freezes weights and trains them again (to sample, or parts in turns) needs one device."
    if re.fullmatch(r"[a-z]\w*_|__i\w+__", by):
        return (
            f"'{by}' changes weights in the step: do so in on_train_batch_end, or use Lightning's EMAWeightAveraging."
        )
    return (
        "Use it where its layer runs or, outside layers, in every training step. If the first batch left out its "
        "module (an expert, a part that trains later), name all layers in the order of their calls, with it or the "
        "module around it: layers=[...]. For a penalty on all weights use the optimizer's weight_decay; averages of "
        "weights belong in on_train_batch_end."
    )


class Origin(NamedTuple):
    """What the value of an absent tensor comes from: names of parameters and buffers, in a module."""

    names: tuple[str, ...] = ()
    home: Ownership | None = None

    def error(self, what: str, hint: str | None = None) -> CutError:
        """The error for what needs the value."""
        where = self.home.place(self.names) if self.names and self.home is not None else "another rank has its value"
        remedy = IN_HOOKS if self.home is None else self.home.remedy
        return CutError(f"{what}: {where}.", hint=hint or remedy)


class AbsentTensor(Tensor):
    """A tensor with the shape, dtype and device of the true one, without its memory and value.

    Code that goes over all parameters of a module (averaged copies of the weights, limits on them, initialisations) may
    change it in place: nothing happens, but random numbers are drawn as for the true one, so that the next ones are the
    same on all ranks. What is computed from it is absent as well, and so is from then on what it changes: a tensor, and
    parameters and buffers with the same memory, unless this rank computes with them. Reading a value raises
    :class:`~lightning_pipe.errors.CutError`.
    """

    origin: Origin = Origin()

    @classmethod
    def like(cls, tensor: Tensor, origin: Origin | None = None) -> AbsentTensor:
        """Stand for a tensor; for a parameter as a parameter."""
        kind: type[AbsentTensor] = AbsentParameter if isinstance(tensor, nn.Parameter) else AbsentTensor
        void = _void(tensor.dtype, tensor.device)
        absent: AbsentTensor = Tensor._make_subclass(kind, void.expand(tensor.shape), tensor.requires_grad)
        absent.origin = origin if origin is not None else getattr(tensor, "origin", Origin())
        return absent

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentTensor:
        return AbsentTensor.like(self)

    def __copy__(self) -> AbsentTensor:
        return AbsentTensor.like(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.origin.error(
            f"a tensor {tuple(self.shape)} {self.dtype} cannot be pickled or saved",
            hint="Use trainer.save_checkpoint(), on all ranks; what is added to a checkpoint is gathered where it is a "
            "dictionary with the names of parameters. After fit, trainer.strategy.whole_module() gives every rank the "
            "whole module, as pipeline.state_dict() does in a loop of your own. Let a step return a value's .clone().",
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function_name(func)
        with DisableTorchFunctionSubclass():
            if name in _NEEDS_NONE or (name.rpartition(".")[2] in _ACCESS and name != "data.__get__"):
                return func(*args, **kwargs)
            if is_random(name) or getattr(func, "__module__", None) == nn.init.__name__:
                _draw(func, args, kwargs)
            origin = _origin((args, kwargs))
            if "_foreach_" in name:
                return _without_absent(func, name, args, kwargs, origin)
            changed = changed_in_place(name, args, kwargs)
            for tensor in changed:
                if not isinstance(tensor, AbsentTensor):
                    _lose(tensor, name, origin)
            if changed and ("out" in kwargs or any(changed[0] is each for each in args[:1])):
                return changed[0]
            if name in _MOVED and isinstance(absent := args[0], AbsentTensor):
                options = {key: value for key, value in kwargs.items() if key != "memory_format"}
                return cls.like(func(absent.new_zeros(()), *args[1:], **options).expand(absent.shape), origin)
            return _unknown(func, args, kwargs, origin)


class AbsentParameter(AbsentTensor, nn.Parameter):
    """An absent parameter."""


@cache
def _void(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The memory of all absent tensors of a kind: what torch lets through is no number either."""
    with torch.inference_mode(False), DisableTorchFunction():
        return torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)


def exchange(tensor: Tensor, new: Tensor) -> None:
    """Let a tensor's object be another one, with the attributes that it has."""
    attributes = {name: value for name, value in attributes_of(tensor) if name != "origin"}
    if weakref.getweakrefs(tensor):
        gc.collect()  # those of runs that are over: torch swaps no tensor that has any (2.14)
    try:
        torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # torch has counted what refers to it in C++
        name = "".join(f"'{name}' " for name in getattr(new, "origin", Origin()).names)
        raise CutError(
            f"{name}{tuple(tensor.shape)} cannot be left to other ranks: something that was computed from it is alive.",
            hint="Let go of it before the run (`del output`), or compute it under torch.no_grad().",
        ) from error
    tensor.__dict__.update(attributes)


def is_absent(tensor: Tensor) -> bool:
    """Whether there is no value, also where ``.data`` was assigned from an absent tensor: torch asks nobody then."""
    if type(tensor) not in _PLAIN and (isinstance(tensor, AbsentTensor | Placeholder) or is_divided(tensor)):
        return isinstance(tensor, AbsentTensor)
    with DisableTorchFunction():  # a step under way must not take this for one of its calls
        has_memory = tensor.layout is torch.strided and not tensor.is_meta
        return has_memory and tensor.data_ptr() == _void(tensor.dtype, tensor.device).data_ptr()


def _origin(tree: Any) -> Origin:
    """What a call's arguments come from."""
    absent = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, AbsentTensor)]
    names = dict.fromkeys(name for leaf in absent for name in leaf.origin.names)
    home = next((leaf.origin.home for leaf in absent if leaf.origin.home is not None), None)
    return Origin(tuple(names)[: _SHOWN + 1], home)


@torch.no_grad()
def _draw(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Draw the random numbers that ``func`` draws for the true parameters."""

    def real(leaf: Any) -> Any:
        return torch.ones(leaf.shape, dtype=leaf.dtype, device=leaf.device) if isinstance(leaf, AbsentTensor) else leaf

    args, kwargs = tree_map(real, (args, {name: value for name, value in kwargs.items() if name != "out"}))
    func(*args, **kwargs)


def _lose(tensor: Tensor, name: str, origin: Origin) -> None:
    """Let a tensor that ``name`` changes by an absent one be absent, too: it must never be a stale number.

    So are parameters and buffers that it is a view or an alias of, such as ``parameter.data``.

    Raises:
        CutError: this rank computes with it, or nobody can tell what else has its memory.
    """
    sharing = [] if origin.home is None else origin.home.sharing(tensor)
    what = f"'{name}' changes a tensor {tuple(tensor.shape)} {tensor.dtype} by one that another rank has"
    for alias, _ in sharing:
        if alias is not None and origin.home is not None and origin.home.needed(alias):
            raise origin.error(f"{what}, and this rank computes with '{alias}'", _ONE_DEVICE)
    lost = {id(each): each for each in (tensor, *(each for _, each in sharing))}
    # two uses: the tensor's, and the one asked
    if not sharing and tensor.layout is torch.strided and storage_uses(tensor.untyped_storage()._cdata) > 2:
        raise origin.error(
            f"{what}, and it shares its memory with others that no attribute of the module or of a callback leads to",
            "Keep copies of weights as attributes, or use Lightning's callback EMAWeightAveraging.",
        )
    names = {id(each): alias for alias, each in reversed(sharing) if alias is not None}
    for key, each in lost.items():
        own = Origin((names[key],), origin.home) if key in names else origin
        try:
            exchange(each, AbsentTensor.like(each, own))
        except RuntimeError as error:
            raise origin.error(f"{what}, and a graph or another object refers to it", _ONE_DEVICE) from error


def _without_absent(func: Callable[..., Any], name: str, args: Any, kwargs: Any, origin: Origin) -> Any:
    """Call a function of lists of tensors for those positions at which none is absent."""
    lists = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple)]
    length = max(map(len, lists))

    def select(arg: Any, positions: Iterable[int]) -> Any:
        if isinstance(arg, list | tuple) and len(arg) == length:
            return [arg[position] for position in positions]
        return arg

    columns = [[each[position] for each in lists if len(each) == length] for position in range(length)]
    absent = [next((each for each in column if isinstance(each, AbsentTensor)), None) for column in columns]
    kept = [position for position, sample in enumerate(absent) if sample is None]
    results: list[Any] = [None] * length
    if kept:
        found = func(*(select(arg, kept) for arg in args), **{key: select(arg, kept) for key, arg in kwargs.items()})
        for position, result in zip(kept, found or (), strict=False):
            results[position] = result
    changed = changed_in_place(name, args, kwargs)
    for position, tensor in enumerate(changed):
        if absent[position] is not None and not isinstance(tensor, AbsentTensor):
            _lose(tensor, name, _origin([select(arg, [position]) for arg in lists]))
    if changed:
        return args[0]
    for position, sample in enumerate(absent):
        if sample is not None:
            found = sample.new_zeros(()) if name in ("_foreach_norm", "_foreach_max") else sample.detach()
            results[position] = AbsentTensor.like(found, origin)
    return results


def _unknown(func: Callable[..., Any], args: Any, kwargs: Any, origin: Origin) -> Any:
    """The result of a function in shape, dtype and device alone; an error if it is to be a number."""
    try:
        result = shape_only(func, args, kwargs)
    except CutError as error:
        if origin.names:
            raise origin.error(f"'{function_name(func)}' needs a value that is not here") from error
        raise
    return tree_map(lambda leaf: AbsentTensor.like(leaf, origin) if isinstance(leaf, Placeholder) else leaf, result)


def check_value(tensor: Tensor, what: str) -> None:
    """Raise where a step uses what has no value on this rank; it would come out as NaN.

    Args:
        tensor: what is used.
        what: the use, as a message begins.

    Raises:
        CutError: it is absent, or comes from what is.
    """
    if isinstance(tensor, AbsentTensor):
        raise tensor.origin.error(f"{what} needs a value that is not here", hint=_IN_STEPS)
