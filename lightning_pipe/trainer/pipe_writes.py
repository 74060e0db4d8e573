"""What steps set in the LightningModule where several pipes share the micro-batches of a batch.

Several ranks complete steps then. What a step adds to an attribute (a counter, a sum) grows by what all of them add.
What it sets without asking for the value before is what the last micro-batch has set, whichever rank runs that.

Of numbers in objects, lists and dictionaries nobody sees who reads them. What grows by the same in two runs is a
counter, anything else is refused.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.contents import Change, Path
from lightning_pipe.intercept.layer_calls import ONCE_FOR_A_BATCH
from lightning_pipe.intercept.lookups import reads_told
from lightning_pipe.intercept.recompute import is_recomputing
from lightning_pipe.intercept.shared_state import written
from lightning_pipe.patches import replaced
from lightning_pipe.trainer.attribute_records import PLAIN, Key
from lightning_pipe.trainer.module_state import name_of


class _Run(NamedTuple):
    """What a run of the step has read, what it has set, with whether it has read that before, and made as a number."""

    read: set[Key]
    written: dict[Key, bool]
    made: set[Key]


class PipeWrites:
    """Sees which attributes complete runs set without asking for their values.

    Args:
        modules: those whose attributes count, by name.

    Attributes:
        last: the last micro-batch that has been completed here.
        unsteady: the names of the whole numbers that grow by more, the larger they are: these are no counters.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._names = {id(module): name for name, module in modules.items()}
        self._run: _Run | None = None
        self._orders: dict[Key, int] = {}
        self._by_own_value: set[Key] = set()
        # the numbers that steps have made themselves, in this batch and before, and what they have changed of that
        self._new: set[Key] = set()
        self._made: set[Key] = set()
        self._changed: set[Key] = set()
        self._growth = _Growth()
        self.last = -1
        self.unsteady: set[str] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Around a run of the Trainer."""
        setting = nn.Module.__setattr__

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            if self._run is not None and id(module) in self._names:
                key = self._names[id(module)], name
                self._run.written.setdefault(key, key in self._run.read)
                if name not in vars(module) and _is_number(value):
                    self._run.made.add(key)
            setting(module, name, value)

        with ExitStack() as changed:
            changed.enter_context(replaced(nn.Module, "__setattr__", set_attribute, gated=False))
            for kind in {type(module) for module in self._modules.values()}:
                changed.enter_context(reads_told(kind, self._note_read))
            yield

    def _note_read(self, module: nn.Module, name: str) -> None:
        if self._run is not None and id(module) in self._names:
            self._run.read.add((self._names[id(module)], name))

    @contextmanager
    def noting(self, index: int, complete: Callable[[], bool]) -> Iterator[None]:
        """Around a run of the step.

        Args:
            index: of its micro-batch.
            complete: asked behind it whether it counts.
        """
        run = self._run = _Run(set(), {}, set())
        try:
            yield
        finally:
            self._run = None
            if complete() and not is_recomputing():
                self.last = max(self.last, index)
                for key, by_own_value in run.written.items():
                    self._orders[key] = max(index, self._orders.get(key, -1))
                    if by_own_value:
                        self._by_own_value.add(key)
                        self._changed |= {key} & (self._made | self._new)
                self._new |= run.made

    def note_changes(self, changes: Iterable[Change]) -> None:
        """What a complete run has changed."""
        self._growth.note(changes)

    def check(self, read: Mapping[Key, str]) -> None:
        """At the end of a batch that several ranks complete.

        Args:
            read: the attributes of the LightningModule that layers read, with the layers.

        Raises:
            CutError: the sum of what numbers have grown by is not what one device has, or a layer reads one.
        """
        for key in sorted(self._by_own_value & read.keys()):
            raise CutError(
                f"'{read[key]}' reads `{written(*key)}` in its forward pass, which the step changes by its own value, "
                "and this schedule has several pipes: none of them runs all micro-batches, so none has the value that "
                "one device has.",
                hint=ONCE_FOR_A_BATCH,
            )
        for key in sorted(self._changed):
            raise CutError(
                f"the step makes `{written(*key)}` itself and then changes it by its own value, and this schedule has "
                "several pipes: each of them has begun anew.",
                hint=f"Set `{written(*key)}` in __init__, or in a hook such as on_fit_start.",
            )
        self._made |= self._new
        self.unsteady |= self._growth.check()

    def ordered(self, changes: Sequence[Change], of_layers: Sequence[Change]) -> list[Change]:
        """The changes of a batch with the micro-batches that made them, where the last one counts.

        Args:
            changes: those in the LightningModule.
            of_layers: those in layers.
        """
        orders = {key: order for key, order in self._orders.items() if key not in self._by_own_value}
        last, self.last = self.last, -1
        self._growth.forget()
        self._new.clear()
        self._changed.clear()
        self._orders.clear()
        self._by_own_value.clear()
        found = [
            change._replace(order=orders.pop(_key(change), -1)) if _is_whole(change) else change for change in changes
        ]
        # what is set to what it was: another rank may have set something else before
        for (module, name), order in orders.items():
            value = vars(self._modules[module]).get(name)
            if isinstance(value, PLAIN) and name in vars(self._modules[module]):
                path = module, ("attribute", name)
                delta = 0 if isinstance(value, int | float) and not isinstance(value, bool) else None
                found.append(Change("set", path, value, delta, order=order))
        return found + [change._replace(order=last) for change in of_layers]


class _Growth:
    """What numbers grow by in complete runs of the step."""

    def __init__(self) -> None:
        self._runs: list[dict[Path, Change]] = []
        # by the path of a number, what it has grown by in the first run that has changed it
        self._first: dict[Path, Any] = {}
        self._counters: set[Path] = set()
        # of a whole number, its values before the last three runs and what it has grown by in them
        self._latest: dict[Path, deque[tuple[int, int]]] = {}

    def note(self, changes: Iterable[Change]) -> None:
        """What a run has changed."""
        numbers = (change for change in changes if change.kind == "set" and _is_number(change.value))
        self._runs.append({change.path: change for change in numbers})

    def forget(self) -> None:
        """The end of a batch."""
        self._runs.clear()

    def check(self) -> set[str]:
        """Returns the names of the whole numbers that have grown by what depends on their values.

        Raises:
            CutError: a number in an object, a list or a dictionary has not grown alike in the first two runs.
        """
        unsteady = set[str]()
        for run in self._runs:
            for path in self._first.keys() - run.keys() - self._counters:
                self._compare(path, 0)
            for path, change in run.items():
                self._compare(path, change.delta)
                if isinstance(change.delta, int) and self._depends(path, change.value - change.delta, change.delta):
                    unsteady.add(name_of(change))
        return unsteady

    def _depends(self, path: Path, value: int, growth: int) -> bool:
        """Whether a number becomes the same multiple of itself, and the same more, in each of three runs.

        Numbers of samples or words grow now by more, now by less, but not so.
        """
        latest = self._latest.setdefault(path, deque(maxlen=3))
        latest.append((value, growth))
        if len(latest) < 3:
            return False
        (value_1, growth_1), (value_2, growth_2), _ = latest
        return growth_1 != growth_2 and (growth_2 - growth_1) * (value - value_2) == (growth - growth_2) * (
            value_2 - value_1
        )

    def _compare(self, path: Path, growth: Any) -> None:
        """Compare what a number has grown by with the first run that has changed it."""
        inside = len(path) > 2
        if path not in self._first and growth is not None:
            self._first[path] = growth
        elif growth is not None and math.isclose(self._first[path], growth, rel_tol=1e-6):
            self._counters.add(path)
        elif inside and path not in self._counters:
            raise _is_no_counter(path)


def latest(reports: Sequence[Sequence[Change]]) -> list[list[Change]]:
    """The changes of all ranks that complete steps, of each attribute that they only set the last one alone.

    Example:
        >>> made = [Change("set", ("", ("attribute", "k")), value, 1, order=value) for value in (4, 3)]
        >>> [[change.value for change in of_rank] for of_rank in latest([[each] for each in made])]
        [[4], []]
    """
    orders: dict[Any, list[int]] = {}
    for change in (change for of_rank in reports for change in of_rank if _is_whole(change)):
        orders.setdefault(change.path, []).append(change.order)
    only_set = {path: max(found) for path, found in orders.items() if min(found) >= 0}
    return [
        [
            change._replace(delta=None) if _is_whole(change) and change.path in only_set else change
            for change in of_rank
            if not _is_whole(change) or only_set.get(change.path, change.order) == change.order
        ]
        for of_rank in reports
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_no_counter(path: Path) -> CutError:
    name = name_of(Change("set", path))
    return CutError(
        f"the step changes the number `self.{name}`, and this schedule has several pipes: whether it adds to that or "
        "sets it cannot be seen in an object, a list or a dictionary.",
        hint=f"Keep it as an attribute of the LightningModule (`self.{name.rpartition('.')[2]}`), or as a tensor there "
        "that the step adds to. " + ONCE_FOR_A_BATCH,
    )


def _is_whole(change: Change) -> bool:
    """Whether an attribute or a buffer has been set."""
    _, (_, name), *inner = change.path
    return change.kind == "set" and len(inner) == (1 if name == "_buffers" else 0)


def _key(change: Change) -> Key:
    module, (_, name), *inner = change.path
    return module, inner[0][1] if name == "_buffers" else name
