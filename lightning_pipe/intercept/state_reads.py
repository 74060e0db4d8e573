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

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import CallRecord
from lightning_pipe.intercept.effects import Effect
from lightning_pipe.patches import replaced

_HINT = (
    "Let the module's forward return it, or keep it in the LightningModule: the step may read and change attributes of "
    "its own."
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
        for name, root in roots:
            self.names[id(root)] = name
            self._root_of.update((id(part), id(root)) for part in root.modules())
        self._late: dict[Read, str] = {}
        self._unseen: dict[Read, str] = {}
        self._places: dict[Read, int] = {}
        self._watching: ExitStack | None = None
        self._reading: Callable[[nn.Module, str], None] = _unnoted

    def run(self) -> RunReads:
        """What is to be known of one run of the step."""
        return RunReads(self)

    @contextmanager
    def installed(self, reading: Callable[[nn.Module, str], None]) -> Iterator[None]:
        """Around many batches: watch what has changed by now, and what changes meanwhile.

        Args:
            reading: told of each of these attributes that is read, with its module.
        """
        self._reading = reading
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
        if key not in self._late and key not in self._unseen and (late or unseen) and self._watching is not None:
            kind = type(part)
            self._watching.enter_context(replaced(kind, name, _Watched(kind, name, self._reading), gated=False))
        if unseen:
            self._unseen[key] = written
        elif late:
            self._late[key] = written

    def read(self, module: nn.Module, name: str, called: set[int], *, waiting: bool) -> None:
        """The step's code reads an attribute; see `RunReads.read`."""
        key = id(module), name
        if key in self._unseen and not self.course.one_pipe:
            raise _unlike(self._unseen[key], "forward passes change in several pipes, each for its own micro-batches")
        if key in self._unseen:
            raise _unlike(self._unseen[key], "a forward pass changes on a stage that cannot show it to others")
        if waiting and key in self._late and self._root_of.get(key[0]) not in called:
            raise _unlike(self._late[key], "a forward pass changes on a later stage than those that read it")


class RunReads:
    """The reads and changes of one run of the step, on the last stage.

    Args:
        known: what all runs have in common.
    """

    def __init__(self, known: StateReads) -> None:
        self._known = known
        self._called: set[int] = set()
        self._stage = 0

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
        course = self._known.course
        self._called.add(id(root))
        if layer is not None and course.in_order:
            self._stage = next(stage for stage, span in enumerate(course.spans) if layer in span)
        for effect in call.effects:
            if not effect.attribute:
                continue
            self._known.change(
                root.get_submodule(effect.path),
                effect,
                ".".join(filter(None, (self._known.names[id(root)], *effect.place))),
                self._stage if course.in_order else int(own),
                # the first stage runs all that comes before its layers, and shows what it keeps for good
                late=not (effect.kept and course.in_order and self._stage == 0),
                unseen=effect.kept and ((effect.structure is None and not own) or not course.one_pipe),
            )


class _Watched:
    """Stands on a class for an attribute of its modules, and tells who reads it."""

    def __init__(self, kind: Any, name: str, reading: Callable[[nn.Module, str], None]) -> None:
        self._name, self._reading = name, reading
        # a default that stands on the class, or what watches the attribute for another rank of this process
        self._before = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _MISSING)

    def __get__(self, module: nn.Module | None, kind: Any) -> Any:
        if module is not None:
            self._reading(module, self._name)
            if isinstance(self._before, _Watched):
                return self._before.__get__(module, kind)
            if self._name in vars(module):
                return vars(module)[self._name]
        if self._before is _MISSING:
            raise AttributeError(self._name)  # Python goes on with __getattr__, which finds buffers
        return self._before

    def __set__(self, module: nn.Module, value: Any) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: nn.Module) -> None:
        vars(module).pop(self._name)


def _unnoted(module: nn.Module, name: str) -> None:
    """Nobody watches."""


def _unlike(written: str, why: str, who: str = "the step reads") -> CutError:
    return CutError(f"{who} `self.{written}`, which {why}: stages would see different values.", hint=_HINT)
