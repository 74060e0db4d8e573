"""What the step's own code reads of layers and outside modules, of all that their forward passes change.

Of a module that an earlier stage runs, code behind the call reads the value of now (`kept_state`). Other reads may be
of an old value here, or on another stage, which nobody would see in the numbers::

    stage 0                            stage 1, the last one
    scale = self.head.scale            scale = self.head.scale       the first stage never runs the head
    h = self.layers(x * scale)         ...
                                       loss = self.head(h)           changes its scale

The last stage runs all of the step, so it is shown all changes and makes all reads. What a module changes is watched
from the first change on: what was read before it was right on all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import CallRecord
from lightning_pipe.intercept.effects import AttributeSearch, Effect
from lightning_pipe.intercept.kept_state import KeptState, is_data, is_metric, is_state
from lightning_pipe.patches import replaced

_HINT = (
    "Let the module's forward return it, or keep it in the LightningModule: the step may read and change attributes of "
    "its own."
)
_HINT_ON_TENSORS = (
    "A tensor, such as a loss of the layer's own, may be an attribute that forward sets in each call: "
    "`self.aux = tensor`, in the place of a list of tensors. Let the module's forward return anything else."
)
_MISSING = object()
Read = tuple[int, str]
"""The ``id`` of a part of a module, and the name of an attribute."""


class Course(NamedTuple):
    """How micro-batches pass the stages.

    Args:
        spans: the layers of each stage.
        in_order: whether each rank has one stage, and one pass: what a rank is shown comes in the order of the
            micro-batches then.
        one_pipe: whether all micro-batches take the same way.
    """

    spans: Sequence[range]
    in_order: bool
    one_pipe: bool


class _Calls(NamedTuple):
    """What calls on any rank change, as far as this one knows.

    Args:
        changing: all of it.
        current: what of it is here as on one device.
        hidden: what of it hooks must not read here.
        readers: the layers that have read something of others before anybody was known to change it.
    """

    changing: set[Read]
    current: set[Read]
    hidden: set[Read]
    readers: dict[Read, str]


class StateReads:
    """What is known of the runs of a rank.

    Args:
        roots: the layers and the outside modules, by their names.
        course: how micro-batches pass the stages.
    """

    def __init__(self, roots: Iterable[tuple[str, nn.Module]], course: Course) -> None:
        self.course = course
        self.names: dict[int, str] = {}
        self._root_of: dict[int, int] = {}
        self._roots: dict[int, nn.Module] = {}
        for name, root in roots:
            self._roots[id(root)] = root
            self.names[id(root)] = name
            self._root_of.update((id(part), id(root)) for part in root.modules())
        self._late: dict[Read, str] = {}
        self._unseen: dict[Read, str] = {}
        self._places: dict[Read, int] = {}
        self._far: set[Read] = set()
        self._calls = _Calls(set(), set(), set(), {})
        self._looks = AttributeSearch()
        self._watched: set[tuple[type, str]] = set()
        self._watching: ExitStack | None = None
        self._reading: Callable[[nn.Module, str], None] = _unnoted

    def run(self) -> RunReads:
        """What is to be known of one run of the step."""
        return RunReads(self)

    def root_of(self, part: nn.Module) -> int:
        """The ``id`` of the layer or outside module that a module is part of; -1: it is none."""
        return self._root_of.get(id(part), -1)

    def note_far(self, part: nn.Module, name: str) -> None:
        """Another stage has changed an attribute in a call."""
        self._far.add((id(part), name))

    def is_far(self, part: nn.Module, name: str) -> bool:
        """Whether calls on other stages change an attribute."""
        return (id(part), name) in self._far

    def seeks(self, root: nn.Module, call: CallRecord) -> bool:
        """Whether it is to be seen what the step changes in place behind the call of a module of another stage."""
        if any(effect.kept for effect in call.effects):
            return True
        return self._looks.seeks(self.names[id(root)], root)

    def note_looked(self, root: nn.Module, *, found: bool) -> None:
        """What the step has changed in place behind the call of a module."""
        self._looks.note(self.names[id(root)], root, found)

    @contextmanager
    def installed(self, reading: Callable[[nn.Module, str], None]) -> Iterator[None]:
        """Around many batches: watch what has changed by now, and what changes meanwhile.

        Args:
            reading: told of each of these attributes that is read, with its module.
        """
        self._reading = reading
        self._watched.clear()
        with ExitStack() as self._watching:
            yield
        self._watching = None

    def change(self, part: nn.Module, effect: Effect, written: str, place: int, *, late: bool, unseen: bool) -> None:
        """A call has changed an attribute.

        Args:
            part: of this part of a module.
            effect: the change.
            written: as code writes it, behind ``self``.
            place: tells the stages apart that may change it.
            late: whether other stages than the one that changes it would read an old value before the next call.
            unseen: whether they would behind the call, too.

        Raises:
            CutError: two stages change it.
        """
        name = effect.attribute
        key = id(part), name
        if effect.kept and self._places.setdefault(key, place) != place:
            raise _unlike(written, "forward passes change on two stages", "a module keeps")
        if key not in self._late and key not in self._unseen and (late or unseen):
            self._watch(part, name)
        if unseen:
            self._unseen[key] = written
        elif late:
            self._late[key] = written

    def _watch(self, part: nn.Module, name: str) -> None:
        """See from now on who reads an attribute."""
        kind: Any = type(part)
        # a metric reads its states whenever modules are listed, and they are brought to all ranks in another way
        if self._watching is not None and (kind, name) not in self._watched and not is_metric(kind):
            self._watched.add((kind, name))
            self._watching.enter_context(replaced(kind, name, Watched(kind, name, self._reading), gated=False))

    @property
    def watches(self) -> bool:
        """Whether it can be seen who reads an attribute."""
        return self._watching is not None

    def watch_one(self, part: nn.Module, name: str) -> None:
        """See from now on who reads an attribute of a layer or an outside module."""
        # what calls compute by: each of them asks for it, and it says in every step what that wants of it
        if name != "training" and id(part) in self._root_of:
            self._watch(part, name)

    def watch(self, parts: Iterable[nn.Module]) -> None:
        """See from now on what a layer reads of modules that are no parts of it."""
        for part in parts:
            around = id(part) not in self._root_of
            for name, value in {**vars(part), **(part._buffers if around else {})}.items():
                if is_data(name) and (is_state(value) or (around and type(value) is Tensor)):
                    self._watch(part, name)

    def changed(self, part: nn.Module, name: str, *, here: bool) -> None:
        """The calls of a module change an attribute.

        Args:
            part: of this part of it.
            name: the attribute.
            here: whether this rank runs it, or has been shown what the call has changed.

        Raises:
            CutError: a layer has read it that runs before.
        """
        key = id(part), name
        if here and self.course.in_order and self.course.one_pipe:
            self._calls.current.add(key)
            self._calls.readers.pop(key, None)
        elif (reader := self._calls.readers.get(key)) is not None:
            raise _read_early(reader, self.written(part, name))
        self._calls.changing.add(key)

    def hide(self, part: nn.Module, name: str) -> None:
        """Calls change an attribute to what this rank cannot have: hooks must not read it."""
        self._calls.hidden.add((id(part), name))
        self._watch(part, name)

    def is_current(self, part: nn.Module, name: str) -> bool:
        """Whether an attribute that calls change is here what it is on one device."""
        return (id(part), name) in self._calls.current

    def read_in_call(self, reader: str, part: nn.Module, name: str) -> None:
        """A layer reads an attribute of another one, which has not been called in this run of the step.

        Args:
            reader: the layer.
            part: of this part of the other one.
            name: the attribute.

        Raises:
            CutError: the calls of that change it.
        """
        key = id(part), name
        if key in self._calls.changing:
            raise _read_early(reader, self.written(part, name))
        self._calls.readers[key] = reader

    def read_in_hook(self, part: nn.Module, name: str) -> None:
        """Code outside of steps reads an attribute.

        Raises:
            CutError: this rank has no value of it.
        """
        if (id(part), name) in self._calls.hidden:
            why = "changes on another rank, and cannot be shown to this one"
            if not self.course.one_pipe:
                why = "changes in several pipes, each for its own micro-batches"
            raise CutError(f"a hook reads `{self.written(part, name)}`, which a forward pass {why}.", hint=_HINT)

    def written(self, part: nn.Module, name: str) -> str:
        """An attribute as code writes it."""
        root = self._roots.get(self.root_of(part))
        path = next((path for path, each in root.named_modules() if each is part), "") if root is not None else ""
        return ".".join(filter(None, ("self", self.names.get(id(root), ""), path, name)))

    def read(self, module: nn.Module, name: str, called: Container[int], *, waiting: bool) -> None:
        """The step's code reads an attribute; see `RunReads.read`."""
        key = id(module), name
        if key in self._unseen and not self.course.one_pipe:
            raise _unlike(self._unseen[key], "forward passes change in several pipes, each for its own micro-batches")
        if key in self._unseen:
            why = "a forward pass changes on a stage that cannot show it to others"
            raise _unlike(self._unseen[key], why, hint=_HINT_ON_TENSORS)
        if waiting and key in self._late and self._root_of.get(key[0]) not in called:
            raise _unlike(self._late[key], "a forward pass changes on a later stage than those that read it")


class RunReads:
    """The reads and changes of one run of the step, on the last stage.

    Args:
        known: what all runs have in common.
    """

    def __init__(self, known: StateReads) -> None:
        self._known = known
        self._called: dict[int, int] = {}
        self._stage = 0
        # roots of this stage that are to be looked at behind its last call, and as they were then
        self._pending: list[nn.Module] = []
        self._left: list[tuple[nn.Module, KeptState]] = []

    def read(self, module: nn.Module, name: str, *, waiting: bool) -> None:
        """The step's code reads an attribute that forward passes change.

        Args:
            module: of this one.
            name: of the attribute.
            waiting: whether an earlier stage runs this code for its own layers.

        Raises:
            CutError: another stage has the value, and cannot show it in time.
        """
        self._known.read(module, name, self._called, waiting=waiting)

    def note(self, root: nn.Module, call: CallRecord, layer: int | None, *, own: bool) -> None:
        """A layer or outside module has been called.

        Args:
            root: the module.
            call: what it has left behind.
            layer: the number of the layer; ``None``: it is an outside module.
            own: whether this stage runs it.

        Raises:
            CutError: two stages change the same attribute.
        """
        known, course = self._known, self._known.course
        if layer is not None and layer not in course.spans[self._stage]:
            self._look()
            self._stage = next((stage for stage, span in enumerate(course.spans) if layer in span), self._stage)
        self._called[id(root)] = self._stage
        if not own and known.seeks(root, call):
            self._pending.append(root)
        for effect in call.effects:
            if not effect.attribute:
                continue
            part = root.get_submodule(effect.path)
            if not own:
                known.note_far(part, effect.attribute)
            known.change(
                part,
                effect,
                ".".join(filter(None, (known.names[id(root)], *effect.place))),
                self._stage if course.in_order else int(own),
                # the first stage runs all that comes before its layers, and shows what it keeps for good
                late=not (effect.kept and course.in_order and self._stage == 0),
                unseen=effect.kept and ((effect.structure is None and not own) or not course.one_pipe),
            )

    def is_behind(self, part: nn.Module, name: str | None) -> bool:
        """Whether the step is behind the stage that runs a module: that stage does not run this code.

        Args:
            part: the module, or a part of it.
            name: of an attribute that calls must have changed; ``None``: any.
        """
        stage = self._called.get(self._known.root_of(part))
        return stage is not None and stage < self._stage and (name is None or self._known.is_far(part, name))

    def _look(self) -> None:
        """Behind the last call of a stage: what changes now is changed by code that this stage does not run."""
        self._left += [(root, KeptState(root, only_in_place=True)) for root in self._pending]
        self._pending.clear()

    def altered(self) -> Iterator[tuple[nn.Module, str]]:
        """At the end: the lists, dictionaries and objects that such code has changed in place."""
        self._look()
        for root, before in self._left:
            places = before.places()
            self._known.note_looked(root, found=bool(places))
            yield from ((root.get_submodule(path), name) for path, name in places)


class Watched:
    """Stands on a class for an attribute of its modules, and tells who reads it."""

    def __init__(self, kind: Any, name: str, reading: Callable[[nn.Module, str], None]) -> None:
        self._name, self._reading = name, reading
        # a default that stands on the class, or what watches the attribute for another rank of this process
        self._before = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _MISSING)

    def __get__(self, module: nn.Module | None, kind: Any) -> Any:
        if module is not None:
            self._reading(module, self._name)
            if isinstance(self._before, Watched):
                return self._before.__get__(module, kind)
            if self._name in vars(module):
                return vars(module)[self._name]
        if self._before is _MISSING:
            raise AttributeError(self._name)  # Python goes on with __getattr__, which finds buffers
        # what computes the value once for each module (cached_property), or is bound to it
        bound = getattr(type(self._before), "__get__", None)
        return self._before if bound is None else bound(self._before, module, kind)

    def __set__(self, module: nn.Module, value: Any) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: nn.Module) -> None:
        vars(module).pop(self._name)


def _unnoted(module: nn.Module, name: str) -> None:
    """Nobody watches."""


def _read_early(reader: str, written: str) -> CutError:
    return CutError(
        f"'{reader}' reads `{written}` in its forward pass, which that of another module changes later in the step: it "
        "would read another value than on one device.",
        hint="Keep it in the LightningModule, and let the step give it to the layer as an argument.",
    )


def _unlike(written: str, why: str, who: str = "the step reads", hint: str = _HINT) -> CutError:
    return CutError(f"{who} `self.{written}`, which {why}: stages would see different values.", hint=hint)
