"""What steps set in the LightningModule where several pipes share the micro-batches of a batch.

Several ranks complete steps then. What a step adds to an attribute (a counter, a sum) grows by what all of them add.
What it sets without asking for the value before is what the last micro-batch has set, whichever rank runs that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import nn

from lightning_pipe.intercept.lookups import reads_told
from lightning_pipe.intercept.recompute import is_recomputing
from lightning_pipe.intercept.snapshot import Change
from lightning_pipe.patches import replaced
from lightning_pipe.trainer.attribute_records import PLAIN, Key


class _Run(NamedTuple):
    """What a run of the step has read, and what it has set, with whether it has read that before."""

    read: set[Key]
    written: dict[Key, bool]


class PipeWrites:
    """Sees which attributes complete runs set without asking for their values.

    Args:
        modules: those whose attributes count, by name.

    Attributes:
        last: the last micro-batch that has been completed here.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._names = {id(module): name for name, module in modules.items()}
        self._run: _Run | None = None
        self._orders: dict[Key, int] = {}
        self._by_own_value: set[Key] = set()
        self.last = -1

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Around a run of the Trainer."""
        setting = nn.Module.__setattr__

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            if self._run is not None and id(module) in self._names:
                key = self._names[id(module)], name
                self._run.written.setdefault(key, key in self._run.read)
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
        run = self._run = _Run(set(), {})
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

    def ordered(self, changes: Sequence[Change], of_layers: Sequence[Change]) -> list[Change]:
        """The changes of a batch with the micro-batches that made them, where the last one counts.

        Args:
            changes: those in the LightningModule.
            of_layers: those in layers.
        """
        orders = {key: order for key, order in self._orders.items() if key not in self._by_own_value}
        last, self.last = self.last, -1
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


def _is_whole(change: Change) -> bool:
    """Whether an attribute has been set."""
    return change.kind == "set" and len(change.path) == 2


def _key(change: Change) -> Key:
    return change.path[0], change.path[1][1]
