"""The attributes that a user's step changes: remembered, compared, and changed alike on other ranks.

Every rank runs the user's step, but only the run that completes it counts. `Tracked.capture` remembers the
attributes and containers of the LightningModule; after a run that ended early `Snapshot.undo` puts them back; after a
complete one `Snapshot.changes` lists what became different, for the other ranks to `apply`.
"""

from __future__ import annotations

import pickle
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.contents import Change, at, items_of
from lightning_pipe.intercept.interceptor import outside_modules
from lightning_pipe.intercept.layer_state import LayerState
from lightning_pipe.intercept.snapshot import Snapshot, is_compared
from lightning_pipe.intercept.uncounted import check_counted

_CONTAINERS = (list, dict)
_FEW = 32
"""In containers of up to so many elements random generators and iterators are looked for."""


class Tracked:
    """The modules whose attributes the complete run of a step decides.

    Those are the LightningModule and all modules in it, except layers, modules outside the sequence that hold
    parameters (they really run on every rank that has them), metrics, and torch's own modules.

    Args:
        module: the LightningModule.
        layers: the layers of the sequence.
        of_layers: who has their attributes.
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module], of_layers: LayerState) -> None:
        real = [*layers, *(outside for _, outside in outside_modules(module, layers))]
        apart = {id(part) for root in real for part in root.modules()}
        self.modules = {
            name: part
            for name, part in module.named_modules()
            if part is module or (id(part) not in apart and not isinstance(part, Metric) and not is_torchs(type(part)))
        }
        of_layers.around = self.modules
        self._of_layers = of_layers
        self._other_types: dict[type | tuple[type, ...], set[type]] = {}

    def capture(self) -> Snapshot:
        """Remember all attributes as they are now."""
        return Snapshot(self.modules)

    def attributes(self, kind: type | tuple[type, ...]) -> Iterator[tuple[str, tuple[Any, Any], Any]]:
        """The attributes of a kind, also in short lists and dictionaries: names, where each is with its key, values."""
        # around each run of the step: to look a type up costs a tenth of what isinstance costs with torch's (2.13)
        others = self._other_types.setdefault(kind, set())
        for path, module in self.modules.items():
            for name, holder, key, value in _entries(vars(module), others):
                if isinstance(value, kind):
                    yield f"{path}.{name}".lstrip("."), (holder, key), value
                elif type(value) not in _CONTAINERS:
                    others.add(type(value))

    def take(self, before: Snapshot | None) -> tuple[list[Change], list[str]]:
        """What steps have changed since a snapshot, for other ranks; see `portable`.

        Args:
            before: the attributes before the steps; ``None``: no other rank needs what they have changed here.
        """
        of_layers = self._of_layers.take()
        return ([], []) if before is None else portable([*before.changes(), *of_layers])

    def apply(self, changes: Sequence[Change]) -> None:
        """Make changes that another rank's step made.

        Args:
            changes: what `take` returned there.
        """
        for change in changes:
            if not self._of_layers.concerns(change):
                _apply(at(self.modules[change.path[0]], change.path[1:-1]), change)
        # behind that: a layer may hold a list that the LightningModule holds, which is longer by now
        self._of_layers.adopt(changes)


def _entries(attributes: dict[str, Any], others: Container[type]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Attributes and what is in short containers, but for some types: names, holders, keys and values."""
    for name, value in attributes.items():
        if type(value) in others:
            continue
        yield name, attributes, name, value
        if type(value) in _CONTAINERS and 0 < len(value) <= _FEW and is_compared(name):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                if type(item) not in others:
                    yield f"{name}[{key!r}]", value, key, item


def portable(changes: Iterable[Change]) -> tuple[list[Change], list[str]]:
    """The changes that can travel to other processes, and the names of those that cannot.

    Raises:
        CutError: an attribute is a tensor that this stage has not got.
    """
    kept: list[Change] = []
    lost: list[str] = []
    for change in changes:
        try:
            if type(change.value) is not Tensor and not isinstance(change.value, int | float | str | None):
                pickle.dumps(change.value)
            kept.append(change)
        except CutError as error:
            raise CutError(
                f"the step sets `self.{name_of(change)}` to a tensor that an earlier stage has and did not send: in "
                "earlier batches of this shape nothing kept or used it.",
                hint=f"Set `self.{name_of(change)}` in every batch, or to a value: float(…).",
            ) from error
        except Exception:
            lost.append(name_of(change))
    return kept, lost


def name_of(change: Change) -> str:
    """The attribute that has changed, as code writes it behind ``self.``; keys in the place of brackets."""
    module, *steps = change.path
    return ".".join([*([module] if module else []), *(str(key) for _, key in steps if key not in (None, "_buffers"))])


def _apply(owner: Any, change: Change) -> None:
    kind, key = change.path[-1]
    target = items_of(owner, kind)
    if change.kind == "append":
        target.extend(change.value)
    elif change.kind == "delete":
        target.pop(key, None)
    elif change.kind == "fill" and type(_now(target, key)) is type(change.value):
        # others may hold it, too
        filled = target[key]
        filled.clear()
        filled.update(change.value) if isinstance(filled, set) else filled.extend(change.value)
    else:
        value = change.value
        if isinstance(value, Tensor) and _fits(_now(target, key), value):
            # in place: optimizers, callbacks and views refer to the tensor
            check_counted([target[key]])
            with torch.no_grad():
                target[key].copy_(value)
        else:
            target[key] = value


def _now(target: Any, key: Any) -> Any:
    return target.get(key) if isinstance(target, Mapping) else target[key]


def _fits(now: Any, value: Tensor) -> bool:
    return (
        isinstance(now, Tensor)
        and (now.shape, now.dtype, now.device) == (value.shape, value.dtype, value.device)
        and not now.requires_grad
        and not now.is_inference()
    )


def is_torchs(kind: type) -> bool:
    """Whether a class is torch's own, or torchmetrics'."""
    return str(kind.__module__).partition(".")[0] in ("torch", "torchmetrics")
