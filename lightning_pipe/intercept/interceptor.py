"""Puts itself between the user's step and the module's layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from lightning_pipe.intercept.crossing import Crossing
from lightning_pipe.intercept.describe import show_distributions
from lightning_pipe.intercept.layer_calls import RunCache
from lightning_pipe.intercept.layer_state import LayerState
from lightning_pipe.intercept.recompute import BufferGuard
from lightning_pipe.intercept.stage_run import StageRun, under_way
from lightning_pipe.intercept.torch_patches.activation_checkpoints import CHECKPOINTS, run_again
from lightning_pipe.intercept.torch_patches.autograd_functions import FUNCTIONS, called_within
from lightning_pipe.intercept.torch_patches.backward_hooks import BACKWARD_HOOKS
from lightning_pipe.intercept.torch_patches.encoders import padding_alike
from lightning_pipe.patches import all_replaced
from lightning_pipe.torch_internals import NormBase, interrupting, is_compiled

if TYPE_CHECKING:
    from lightning_pipe.parameters.ownership import Ownership

_set = nn.Module.__setattr__


def _set_attribute(module: nn.Module, name: str, value: Any) -> None:
    # a compiler that traces a layer is to see what it would see without us
    if not is_dynamo_compiling() and (run := under_way.run) is not None:
        run.layer_calls.setting(run, module, name, value)
    _set(module, name, value)


ATTRIBUTES = ((nn.Module, "__setattr__", _set_attribute),)

_PATCHES = (*ATTRIBUTES, *CHECKPOINTS, *FUNCTIONS, *BACKWARD_HOOKS)


class Interceptor:
    """Puts a wrapper around the layers and the outside modules while steps run, and takes it away afterwards.

    Args:
        module: the user's module.
        layers: the layer sequence with dotted names.
        parameter_use: learns which parameters and modules outside layers steps use.
        device: the rank's device.
        tells: whether this rank says what it changes for the time of the steps.
        places: by the names of layers, their stages, and by stage who runs it, in words.
        one_pipe: whether all micro-batches take the same way.

    Attributes:
        state: knows who has the attributes of layers and outside modules.
        cache: what runs have in common, and keep for later ones.
        buffers: of layers and outside modules, for second runs.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[tuple[str, nn.Module]],
        parameter_use: Ownership,
        device: torch.device,
        *,
        tells: bool = True,
        places: tuple[Mapping[str, int], Sequence[str]] = ({}, ()),
        one_pipe: bool = True,
    ) -> None:
        self._patched = False
        show_distributions()
        self.module = module
        self.layers = [layer for _, layer in layers]
        configurations = (vars(part).get("config") for part in module.modules())
        self._configurations = [*{id(each): each for each in configurations if hasattr(each, "__dict__")}.values()]
        self._tells = tells
        outside = list(outside_modules(module, self.layers))
        self._wrapped = [*enumerate(layers), *zip(count(-2, -1), outside, strict=False)]
        self.state = LayerState(module, [*layers, *outside], *places, one_pipe=one_pipe)
        self.cache = RunCache(self.state, parameter_use, device)
        self.buffers = BufferGuard(self.state.root_of)
        # by key: the number of a layer; for outside modules numbers below that of torch calls, -1
        self._wrappers: dict[int, Callable[..., Any]] = {}
        self._forwards: dict[int, Callable[..., Any]] = {}
        ids = {id(layer) for layer in self.layers}
        self._encoders = [
            part
            for part in module.modules()
            if isinstance(part, nn.TransformerEncoder)
            and type(part).forward is nn.TransformerEncoder.forward
            and any(id(layer) in ids for layer in part.layers)
        ]

    @contextmanager
    def installed(self, *, caches: bool = False) -> Iterator[None]:
        """Wrap the forwards. As instance attributes: nothing stays behind that copying or pickling could meet.

        Args:
            caches: whether model caches are of use.
        """
        off = () if caches else self.caches_off()
        with self.torch_patched(), all_replaced(chain(self._places(), off)):
            yield

    def caches_off(self) -> Iterator[tuple[Any, str, bool]]:
        """What is replaced where model caches are of no use, and out of the sight of other stages: in one run each.

        Those of Hugging Face's models are on by default: ``use_cache`` of their configurations.
        """
        switched: list[Any] = [each for each in self._configurations if vars(each).get("use_cache") is True]
        if switched and self._tells:
            self._tells = False
            warnings.warn("Model caches (use_cache) are switched off while steps run in a pipeline.", stacklevel=2)
        yield from ((configuration, "use_cache", False) for configuration in switched)

    @contextmanager
    def torch_patched(self) -> Iterator[None]:
        """Around many batches: what in torch follows the runs of this thread is put in place once for all of them."""
        if self._patched:
            yield
            return
        with all_replaced(_PATCHES):
            self._patched = True
            try:
                yield
            finally:
                self._patched = False

    def _places(self) -> Iterator[tuple[nn.Module, str, Any]]:
        """What stands in modules while steps run, each in place before the next is asked for."""
        for key, (name, module) in self._wrapped:
            yield module, "forward", self._wrapper(key, name, module)
            if is_compiled(module):
                yield module, "_compiled_call_impl", None  # the wrapper calls what is compiled
        for each in self._encoders:
            yield each, "forward", interrupting(padding_alike(each, each.forward))
            yield each, "_compiled_call_impl", None

    def _wrapper(self, key: int, name: str, module: nn.Module) -> Callable[..., Any]:
        """What stands in the place of a module's forward."""
        # The wrapper is made once, for speed; what it calls is asked for anew, since forwards may be replaced.
        if vars(module).get("forward") is not self._wrappers.get(key, self):  # it is when wrappers are put on again
            self._forwards[key] = own_forward(module)
        if key in self._wrappers:
            return self._wrappers[key]

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            run, forward = under_way.run, self._forwards[key]
            if run is None:
                return run_again(forward, args, kwargs)
            if run.surroundings.inside:
                return forward(*args, **kwargs)
            if run.tracker.function:
                raise called_within(run.tracker.function, name)
            if key >= 0:
                return run.call_layer(key, module, forward, args, kwargs)
            return run.call_module(name, key, module, forward, args, kwargs)

        # with its names and signature: Hugging Face's generate() asks what a model's forward takes (5.23)
        made = self._wrappers[key] = interrupting(update_wrapper(wrapper, module.forward, updated=()))
        return made

    def follow(
        self, run: StageRun, step: Callable[[], Any], receive: Callable[[], Crossing | None] = lambda: None
    ) -> Any:
        """Run the user's step; its calls of layers go to ``run``. ``receive`` gives what earlier stages send."""
        before, under_way.run = under_way.run, run
        try:
            with self.state.of_run(run):
                return run.run(step, receive)
        finally:
            under_way.run = before


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """What a wrapper calls: the module's forward, compiled if ``module.compile()`` was called."""
    compiled, forward = vars(module).get("_compiled_call_impl"), module.forward
    if compiled is None or module._forward_hooks or module._forward_pre_hooks:
        return forward

    def without_wrapper(*args: Any, **kwargs: Any) -> Any:
        wrapper = vars(module).pop("forward")
        try:
            return compiled(*args, **kwargs)
        finally:
            vars(module)["forward"] = wrapper

    return without_wrapper


def outside_modules(module: nn.Module, layers: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules with a forward of their own that have parameters, or statistics, and concern no layer."""
    inside = {id(part) for layer in layers for part in layer.modules()}
    ids = {id(layer) for layer in layers}
    seen, largest = set[int](), tuple[str, ...]()
    for name, part in module.named_modules(remove_duplicate=False):  # a module before its parts
        if not name or id(part) in inside or name.startswith(largest):
            continue
        is_called = type(part).forward is not nn.Module.forward and ids.isdisjoint(map(id, part.modules()))
        if is_called and (any(True for _ in part.parameters()) or any(isinstance(m, NormBase) for m in part.modules())):
            largest += (f"{name}.",)
            if id(part) not in seen:
                seen.add(id(part))
                yield name, part
