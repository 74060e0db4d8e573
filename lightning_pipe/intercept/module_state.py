"""The attributes that a user's step changes: remembered, compared, and changed alike on other ranks.

Every rank runs the user's step, but only the run that completes it counts. A `Snapshot` remembers the attributes and
containers of the LightningModule; after a run that ended early `Snapshot.undo` puts them back; after a complete one
`Snapshot.changes` lists what became different, for the other ranks to `apply`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.layer_state import LayerState
from lightning_pipe.intercept.snapshot import Change, is_compared, items_of, refill

_CONTAINERS = (list, dict)
_FEW = 32
"""In containers of up to so many elements random generators and iterators are looked for."""


def attributes(modules: Mapping[str, nn.Module], kind: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, Any], Any]]:
    """The attributes of a kind, also in short lists and dictionaries: names, where each is with its key, values."""
    for path, module in modules.items():
        for name, value in vars(module).items():
            if _is_one(value.__class__, kind):
                yield f"{path}.{name}".lstrip("."), (vars(module), name), value
            elif type(value) in _CONTAINERS and 0 < len(value) <= _FEW and is_compared(name):
                for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                    if _is_one(item.__class__, kind):
                        yield f"{path}.{name}[{key!r}]".lstrip("."), (value, key), item


@cache
def _is_one(kind: Any, of: Any) -> bool:
    """``issubclass``, around each run of the step: to look a type up costs a tenth of that with torch's (2.13)."""
    return issubclass(kind, of)


def apply(changes: Sequence[Change], state: LayerState) -> None:
    """Make changes that another rank's step made.

    Args:
        changes: those there, which can travel.
        state: knows the modules.
    """
    for change in changes:
        if not state.adopt(change):
            owner: Any = state.around[change.path[0]]
            for key in change.path[1:-1]:
                owner = items_of(owner)[key]
            _apply(owner, change)


def check_portable(changes: Iterable[Change]) -> None:
    """See whether changes can travel to other processes.

    Raises:
        CutError: an attribute is a tensor that this stage has not got, or something that cannot be pickled.
    """
    for change in changes:
        try:
            if type(change.value) is not Tensor and not isinstance(change.value, int | float | str | None):
                pickle.dumps(change.value)
        except CutError as error:
            raise CutError(
                f"the step sets `{change.written}` to a tensor that an earlier stage has and did not send: in "
                "earlier batches of this shape nothing kept or used it.",
                hint=f"Set `{change.written}` in every batch, or to a value: float(…).",
            ) from error
        except Exception as error:
            raise CutError(
                f"the step sets `{change.written}` to something that cannot be pickled, so other ranks cannot have it.",
                hint="Set it outside of the step, on all ranks; under a Trainer in a hook such as setup or "
                "on_train_batch_start.",
            ) from error


def _apply(owner: Any, change: Change) -> None:
    key, target = change.path[-1], items_of(owner)
    if change.kind == "append":
        target.extend(change.value)
    elif change.kind == "delete":
        target.pop(key, None)
    elif change.kind == "fill" and type(_now(target, key)) is type(change.value):
        refill(target[key], change.value)  # others may hold it, too
    elif isinstance(change.value, Tensor) and _fits(_now(target, key), change.value):
        # in place: optimizers, callbacks and views refer to the tensor
        with torch.no_grad():
            target[key].copy_(change.value)
    else:
        target[key] = change.value


def _now(target: Any, key: Any) -> Any:
    return target.get(key) if isinstance(target, Mapping) else target[key]


def _fits(now: Any, value: Tensor) -> bool:
    return (
        isinstance(now, Tensor)
        and (now.shape, now.dtype, now.device) == (value.shape, value.dtype, value.device)
        and not now.requires_grad
        and not now.is_inference()
    )
