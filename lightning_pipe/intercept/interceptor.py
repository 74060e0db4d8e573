"""Puts itself between the user's step and the module's layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, update_wrapper
from itertools import chain
from typing import Any

from torch import Tensor, nn

from lightning_pipe.intercept.around import Around
from lightning_pipe.intercept.buffer_changes import BufferChanges
from lightning_pipe.intercept.distributions import show_distributions
from lightning_pipe.intercept.generation_caches import Caches
from lightning_pipe.intercept.layer_calls import RunCache
from lightning_pipe.intercept.recompute import is_recomputing
from lightning_pipe.intercept.shared_state import Sharing
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.intercept.stage_run import StageRun
from lightning_pipe.intercept.stage_views import StageViews
from lightning_pipe.intercept.state_reads import Course, StateReads
from lightning_pipe.intercept.torch_patches.activation_checkpoints import CHECKPOINTS, run_again
from lightning_pipe.intercept.torch_patches.autograd_functions import FUNCTIONS
from lightning_pipe.intercept.torch_patches.backward_hooks import BACKWARD_HOOKS
from lightning_pipe.intercept.torch_patches.encoders import padding_alike
from lightning_pipe.intercept.torch_patches.inner_backward import INNER_BACKWARD
from lightning_pipe.intercept.torch_patches.patch import installed
from lightning_pipe.intercept.turns.run import TurnRun
from lightning_pipe.patches import all_replaced
from lightning_pipe.torch_internals import NormBase, interrupting, is_compiled

_PATCHES = (CHECKPOINTS, FUNCTIONS, BACKWARD_HOOKS, INNER_BACKWARD)


class Interceptor:
    """Puts a wrapper around the layers and the outside modules while steps run, and takes it away afterwards.

    Args:
        module: the user's module.
        layers: the layer sequence with dotted names.
        tells: whether this rank says what it changes for the time of the steps.
        course: how micro-batches pass the stages; ``None``: all of them run here.

    Attributes:
        run: the run of the step that is under way.
        cache: what runs keep for later ones.
        views: what each of several stages of this rank sees of the layers of others.
        around: the modules by name whose attributes runs that are not the last stage's leave as they were.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[tuple[str, nn.Module]],
        *,
        tells: bool = True,
        course: Course | None = None,
    ) -> None:
        self.run: StageRun | TurnRun | None = None
        self.around: Mapping[str, nn.Module] = {}
        self._current = lambda: self.run
        show_distributions()
        self.module = module
        self.layers = [layer for _, layer in layers]
        self.cache = RunCache()
        self.views = StageViews(self.cache, self.computing)
        self._caches = Caches(module, tells=tells)
        self._outside = list(outside_modules(module, self.layers))
        roots = [*self.layers, *(outside for _, outside in self._outside)]
        self.cache.sharing, self.cache.around = Sharing(module, roots), Around(module)
        self.cache.reads = StateReads([*layers, *self._outside], course or Course((), in_order=False, one_pipe=True))
        self._buffer_changes = BufferChanges(self.computing, self.cache.reads, self.views.note_changed_in_place)
        # by key: the number of a layer; for outside modules numbers below that of torch calls, -1
        self._wrappers: dict[int, Callable[..., Any]] = {}
        self._forwards: dict[int, Callable[..., Any]] = {}
        self._hides_compiled = False
        ids = {id(layer) for layer in self.layers}
        self._encoders = [
            part
            for part in module.modules()
            if isinstance(part, nn.TransformerEncoder)
            and type(part).forward is nn.TransformerEncoder.forward
            and any(id(layer) in ids for layer in part.layers)
        ]

    def computing(self) -> Iterator[nn.Module]:
        """The layers and outside modules with all their parts, each once."""
        roots = (*self.layers, *(module for _, module in self._outside))
        yield from {id(part): part for root in roots for part in root.modules()}.values()

    def reads_seen(self) -> AbstractContextManager[None]:
        """Around many batches: see what the step's own code reads of layers and outside modules."""
        if self.cache.reads is None or any(map(is_compiled, self.module.modules())):
            return nullcontext()  # compiled code could not be looked into
        return self.cache.reads.installed(self._reading)

    def _reading(self, module: nn.Module, name: str) -> None:
        if isinstance(self.run, StageRun):
            if self.cache.writes is not None and not self.run.inside:
                self.cache.writes.by_read(module, name)
            self.run.read(module, name)
        elif self.run is None and self.cache.reads is not None:
            self.cache.reads.read_in_hook(module, name)

    def attributes(self, stage: int | None = None, *, all_of_them: bool = True) -> Snapshot:
        """The attributes of layers and outside modules as they are now.

        Args:
            stage: as the next run of this one sees them.
            all_of_them: not only those that calls or steps have changed so far.
        """
        with self.views.seen_by(stage):
            return self.cache.kept(self.computing() if all_of_them else None)

    def attributes_around(self) -> Snapshot:
        """The attributes as they are now of what is around layers and outside modules: the LightningModule's own."""
        return Snapshot(self.around, buffers=False)

    def changed(self) -> Iterator[str]:
        """What calls or steps have changed so far in layers and outside modules, as code writes it."""
        for part, names in self.cache.keepers.values():
            yield from (self.cache.reads.written(part, name) for name in names if self.cache.reads is not None)

    def note_changes(self, before: Snapshot) -> None:
        """Note which of all attributes have changed since they were looked at."""
        self.cache.note_changes(before.changes(), self.computing())

    @contextmanager
    def _apart(self, run: StageRun | TurnRun) -> Iterator[None]:
        """Around a run: one of several stages of this rank leaves alone what the others keep."""
        if not isinstance(run, StageRun) or not run.apart:
            yield
            return
        with self.views.apart(run):
            yield

    @property
    def in_module(self) -> bool:
        """Whether a layer or an outside module runs now, in a step."""
        return self.run is not None and self.run.inside

    def setting(self, part: nn.Module, name: str, value: Any) -> None:
        """A layer or an outside module that runs now is about to set an attribute of one of its parts."""
        if self.run is not None:
            self.run.layer_calls.setting(part, name, value)

    def is_behind(self, part: nn.Module, name: str | None = None) -> bool:
        """Whether the step is behind the stage that runs a module; with a name, if calls change the attribute there."""
        state = self.run.layer_calls.state if isinstance(self.run, StageRun) and self.run.stage.last else None
        return state is not None and state.is_behind(part, name)

    def note_set(self, part: nn.Module, name: str) -> None:
        """The step is about to set an attribute of a layer or an outside module."""
        self.views.note_set(part, name)
        if self.cache.reads is not None:
            self.cache.reads.watch_one(part, name)

    def adopts(self, part: nn.Module, name: str) -> None:
        """An attribute is about to become what runs on another rank have left, whatever those on this one have."""
        self.views.forget(part, name)

    def changed_elsewhere(self, part: nn.Module, name: str) -> bool:
        """Calls on any rank have changed an attribute. Returns whether this rank does not know the value of now."""
        reads = self.cache.reads
        self.cache.called.add((id(part), name))
        if reads is None:
            return False
        if id(part) not in self.cache.run_here and not reads.is_current(part, name):
            reads.changed(part, name, here=False)
            return True
        return False

    def hide(self, part: nn.Module, name: str) -> None:
        """Calls have changed an attribute of which this rank cannot have the value, unless it runs them all."""
        reads = self.cache.reads
        if reads is not None and not (reads.course.one_pipe and id(part) in self.cache.run_here):
            reads.hide(part, name)

    @property
    def several(self) -> bool:
        """Whether this rank may have several stages."""
        return self.cache.reads is None or not self.cache.reads.course.in_order

    @property
    def apart(self) -> bool:
        """Whether what the run under way sets in the layers of others is put back behind it."""
        return isinstance(self.run, StageRun) and self.run.apart

    @property
    def watches(self) -> bool:
        """Whether reads of attributes can be seen."""
        return self.cache.reads is not None and self.cache.reads.watches

    @property
    def one_pipe(self) -> bool:
        """Whether all micro-batches take the same way."""
        return self.cache.reads is None or self.cache.reads.course.one_pipe

    def has_run(self, part: nn.Module, *, now: bool = False) -> bool:
        """Whether a part of a layer or an outside module has run on this rank; ``now``: in the run under way."""
        if not now:
            return id(part) in self.cache.run_here
        return self.run is not None and self.run.layer_calls.has_run(part)

    @contextmanager
    def installed(self, *, caches: bool = False) -> Iterator[None]:
        """Wrap the forwards. As instance attributes: nothing stays behind that copying or pickling could meet.

        Args:
            caches: whether model caches are of use.
        """
        off = () if caches else self._caches.off()
        with self.torch_patched(), all_replaced(chain(self._places(), off)):
            yield

    def torch_patched(self) -> AbstractContextManager[None]:
        """Around many batches: what in torch follows the runs of this thread is put in place once for all of them."""
        return installed(_PATCHES, self._current)

    @property
    def compiled(self) -> bool:
        """Whether any part of the module is compiled. To be asked while the wrappers are on."""
        return self._hides_compiled or any(map(is_compiled, self.module.modules()))

    def _places(self) -> Iterator[tuple[nn.Module, str, Any]]:
        """What stands in modules while steps run, each in place before the next is asked for."""
        self._hides_compiled = False
        for number, layer in enumerate(self.layers):
            yield layer, "forward", self._wrapper(number, layer, self._layer_wrapper)
            if is_compiled(layer):
                yield self._hidden(layer)
        for position, (name, outside) in enumerate(self._outside):
            yield outside, "forward", self._wrapper(-2 - position, outside, partial(self._module_wrapper, name))
            if is_compiled(outside):
                yield self._hidden(outside)
        for encoder in self._encoders:
            yield encoder, "forward", interrupting(padding_alike(encoder, encoder.forward))
            if is_compiled(encoder):
                yield self._hidden(encoder)

    def _wrapper(
        self, key: int, module: nn.Module, make: Callable[[int, nn.Module], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """What stands in the place of a module's forward."""
        # The wrapper is made once, for speed; what it calls is asked for anew, since forwards may be replaced.
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            # with its names and signature: Hugging Face's generate() asks what a model's forward takes (5.23)
            made = update_wrapper(make(key, module), module.forward, updated=())
            wrapper = self._wrappers[key] = interrupting(made)
        if vars(module).get("forward") is not wrapper:  # it is when wrappers are put on within themselves
            self._forwards[key] = own_forward(module)
        return self._wrappers[key]

    def _hidden(self, module: nn.Module) -> tuple[nn.Module, str, None]:
        """What hides that a module is compiled: the wrapper calls what is."""
        self._hides_compiled = True
        return module, "_compiled_call_impl", None

    def returning(self, result: Any) -> None:
        """The step is about to return, if it is under way; see `StageRun.returning`."""
        if self.run is not None:
            self.run.returning(result)

    def follow(self, run: StageRun | TurnRun, step: Callable[[], Any]) -> Any:
        """Run the user's step; its calls of layers go to ``run``."""
        self.run = run
        if isinstance(run, StageRun) and not run.stage.all and not is_recomputing():
            run.tracker.changing = self._changing
        try:
            with self._apart(run):
                return run.run(step)
        finally:
            self.run = None

    def _changing(self, written: Sequence[Tensor], function: str) -> None:
        """The step is about to change tensors in place. The tracker has this, which does not refer to its run."""
        if isinstance(self.run, StageRun):
            self._buffer_changes.check(self.run, written, function)

    def _layer_wrapper(self, number: int, layer: nn.Module) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            run, forward = self.run, self._forwards[number]
            if run is None:
                return run_again(forward, args, kwargs)
            if run.inside:
                return forward(*args, **kwargs)
            return run.call_layer(number, layer, forward, args, kwargs)

        return wrapper

    def _module_wrapper(self, name: str, key: int, module: nn.Module) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            run, forward = self.run, self._forwards[key]
            if run is None:
                return run_again(forward, args, kwargs)
            if run.inside:
                return forward(*args, **kwargs)
            return run.call_module(name, key, module, forward, args, kwargs)

        return wrapper


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

    def walk(parent: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in parent.named_children():
            path = f"{prefix}{name}"
            if id(child) in inside:
                continue
            holds_layers = any(id(part) in ids for part in child.modules())
            callable_ = type(child).forward is not nn.Module.forward
            if holds_layers or not callable_:
                yield from walk(child, f"{path}.")
            elif any(True for _ in child.parameters()) or any(isinstance(part, NormBase) for part in child.modules()):
                yield path, child

    seen: set[int] = set()
    for name, child in walk(module, ""):
        if id(child) not in seen:
            seen.add(id(child))
            yield name, child
